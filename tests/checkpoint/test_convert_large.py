"""Conversion of a checkpoint that does not fit in memory, and of a family with a table of names."""

import json
import mmap
import weakref

import pytest
import torch

from phalanx.checkpoint import safetensors, torch_foreign, torch_hf
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.torch_foreign import bytes_of, params_of
from phalanx.core.errors import UserError
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder
from tests.hf_models import weights_of


def test_a_checkpoint_larger_than_memory_is_streamed(tmp_path, monkeypatch):
    """Count the bytes of the pieces that are in memory at a time, and the largest read and write. As a control, a
    checkpoint that is held whole shows up in the counts."""
    live, peak, largest = 0, 0, 0

    class Counted(mmap.mmap):
        def __init__(self, _, size):
            nonlocal live, peak
            live += size
            peak = max(peak, live)
            weakref.finalize(self, give_back, size)

    def give_back(size):
        nonlocal live
        live -= size

    def read_into(self, start, room, read=safetensors.File.read_into):
        nonlocal largest
        largest = max(largest, len(room))
        read(self, start, room)

    source = save_zeros(tmp_path / "source")
    monkeypatch.setattr(torch_foreign.mmap, "mmap", Counted)
    monkeypatch.setattr(safetensors.File, "read_into", read_into)
    image_bytes, store = 1 << 16, Folder(tmp_path / "pieces")
    made = torch_hf.read(source, store, image_bytes=image_bytes)
    size = sum(e.held.numel * e.item_bytes for e in made.entries)
    assert size > 20 * image_bytes and len(made.files) > 20 and not Reader(store, made.name).verify()
    assert peak <= 3 * image_bytes and largest <= image_bytes, (peak, largest)  # rows are not cut, so a bit more than 2
    torch_hf.write(Reader(store, made.name), tmp_path / "back", max_shard_bytes=1e6)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    torch_hf.read(source, Folder(tmp_path / "whole"))
    assert peak >= size


def save_zeros(source):
    """Save a Llama checkpoint with a file for each tensor."""
    source.mkdir()
    config = dict(
        architectures=["LlamaForCausalLM"], vocab_size=512, hidden_size=64, intermediate_size=256,
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    ours = torch_hf.config_in(source)[1]
    index = {}
    for i, piece in enumerate(torch_hf.pieces_of(params_of(ours), torch_hf.table_of("llama", ours))):
        name = f"model-{i:05d}.safetensors"
        safetensors.write(source / name, [(piece.theirs, "F32", piece.shape)], [bytes_of(torch.zeros(piece.shape))])
        index[piece.theirs] = name
    (source / torch_hf.INDEX).write_text(json.dumps({"weight_map": index}))
    return source


OWN = """
from torch import nn
from phalanx import Family, Init, Weight

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim = c.options["dim"]
        self.embed = nn.Embedding(c.vocab_size, dim)
        self.layers = nn.ModuleList(nn.ModuleDict({n: nn.Linear(dim, dim) for n in "qkv"}) for _ in range(2))
        self.head = nn.Linear(dim, c.vocab_size)

FAMILY = Family(
    build=Model,
    init=lambda name, config: Init(0.02),
    split={"embed": "vocab", "head": "head"},
    weights=(
        Weight("wte.weight", "embed.weight"),
        Weight("h.*.c_attn.weight", ("layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"), transpose=True),
        Weight("h.*.c_attn.bias", ("layers.*.q.bias", "layers.*.k.bias", "layers.*.v.bias")),
        Weight("lm_head.*", "head.*"),
    ),
)
"""


@pytest.fixture
def own(tmp_path):
    """Save the weights of a user's own family as fused, transposed matrices. Return its config, the folder and the
    tensors."""
    (tmp_path / "own.py").write_text(OWN)
    config = ModelConfig(family=f"{tmp_path}/own.py:FAMILY", vocab_size=11, options={"dim": 6})
    torch.manual_seed(2)
    tensors = {"wte.weight": torch.randn(11, 6), "lm_head.weight": torch.randn(11, 6), "lm_head.bias": torch.randn(11)}
    for i in range(2):
        tensors |= {f"h.{i}.c_attn.weight": torch.randn(6, 18), f"h.{i}.c_attn.bias": torch.randn(18)}
    (tmp_path / "theirs").mkdir()
    listed = [(name, "F32", tuple(t.shape)) for name, t in tensors.items()]
    safetensors.write(tmp_path / "theirs" / "model.safetensors", listed, [bytes_of(t) for t in tensors.values()])
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "mine"}')
    return config, tmp_path / "theirs", tensors


@pytest.mark.parametrize("image_bytes", [1 << 30, 4096 // 8])
def test_a_table_of_names_is_a_door_for_any_family(own, tmp_path, image_bytes):
    config, folder, tensors = own
    store = Folder(tmp_path / "ours")
    reader = Reader(store, torch_hf.read(folder, store, model=config, image_bytes=image_bytes).name)
    got = weights_of(reader)
    for i in range(2):
        for j, name in enumerate("qkv"):
            want = tensors[f"h.{i}.c_attn.weight"][:, 6 * j : 6 * j + 6].t()
            assert torch.equal(got[f"layers.{i}.{name}.weight"], want)
            assert torch.equal(got[f"layers.{i}.{name}.bias"], tensors[f"h.{i}.c_attn.bias"][6 * j : 6 * j + 6])
    torch_hf.write(reader, tmp_path / "back")
    again = Folder(tmp_path / "again")
    second = weights_of(Reader(again, torch_hf.read(tmp_path / "back", again, model=config).name))
    assert all(torch.equal(second[name], value) for name, value in got.items())
    assert (tmp_path / "back" / "config.json").read_text() == '{"model_type": "mine"}'


def test_a_parameter_without_a_row_is_named(own, tmp_path):
    _, folder, _ = own
    text = OWN.replace('        Weight("lm_head.*", "head.*"),\n', "")
    (tmp_path / "less.py").write_text(text)
    less = ModelConfig(family=f"{tmp_path}/less.py:FAMILY", vocab_size=11, options={"dim": 6})
    with pytest.raises(UserError, match=r"(?s)'head.weight' is in no row.*remedy: add a phalanx.Weight"):
        torch_hf.read(folder, Folder(tmp_path / "ours"), model=less)
    (tmp_path / "none.py").write_text(OWN.replace("weights=(", "weights=() and ("))
    none = ModelConfig(family=f"{tmp_path}/none.py:FAMILY", vocab_size=11, options={"dim": 6})
    with pytest.raises(UserError, match="no table of the names"):
        torch_hf.read(folder, Folder(tmp_path / "ours"), model=none)
