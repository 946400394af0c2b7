"""Hugging Face folders: a model of `transformers` computes the same here and goes back bit for bit. A model that would
compute something else is refused."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch

from phalanx.checkpoint import safetensors, torch_hf
from phalanx.checkpoint.files import Reader, write_whole
from phalanx.checkpoint.hf_config import config_in
from phalanx.checkpoint.torch_foreign import entry_of, params_of, read_rows
from phalanx.core.checkpoint import Manifest
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder
from phalanx.model.family import Batch, load_family
from phalanx.parallel.schema import describe
from tests import hf_models

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,  # large enough that attention is far from uniform
)
VARIANTS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-3)),
    "llama, wide heads": ("Llama", dict(head_dim=16, num_key_value_heads=4, rope_theta=500.0)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral, tied": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True)),
}
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers")
    module.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="module")
def saved(transformers, tmp_path_factory):
    """Save each variant with transformers; return the model and the folder."""
    made = {}
    for i, (name, (kind, more)) in enumerate(VARIANTS.items()):
        torch.manual_seed(i)
        config = getattr(transformers, f"{kind}Config")(**SIZES | more)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for param in model.parameters():
            if param.dim() == 1:  # norms, which start as ones
                torch.nn.init.uniform_(param, 0.5, 1.5)
        folder = tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder)
        made[name] = model, folder
    return made


def convert(folder, tmp_path) -> Reader:
    store = Folder(tmp_path / "ours")
    return Reader(store, torch_hf.read(folder, store).name)


def weights(reader) -> dict[str, torch.Tensor]:
    held = [e.held for e in reader.manifest.entries if e.held.name.startswith("weights/")]
    return {h.name.removeprefix("weights/"): read_rows(reader, h.name, 0, h.num_rows) for h in held}


def our_logits(config, params, dtype=torch.float32) -> torch.Tensor:
    model = load_family(config.family).build(config).to(dtype).eval()
    missing, unexpected = model.load_state_dict(params, strict=False)
    assert not unexpected and set(missing) <= ({"head.weight"} if config.tied else set())
    with torch.no_grad():
        return model(Batch(TOKENS, TOKENS, torch.ones(TOKENS.shape)))


def their_logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def error(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def config_of(reader) -> ModelConfig:
    return ModelConfig(**reader.manifest.job["model"])


# -- the same model


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_of_transformers_has_the_same_logits_here(saved, tmp_path, name):
    model, folder = saved[name]
    reader = convert(folder, tmp_path)
    assert error(our_logits(config_of(reader), weights(reader)), their_logits(model)) < 3e-6
    assert (reader.manifest.step, reader.manifest.updates) == (0, 0)
    assert Job.from_dict(reader.manifest.job).model == config_of(reader)
    assert not reader.verify()


QUICK = ("Llama 3.1", "Gemma 2", "OLMo 3", "Phi-4-mini, partial rotary", "Qwen 3 MoE")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in hf_models.MODELS]
)
def test_in_fp64_they_agree_to_rounding(transformers, name):
    """Logits and gradients agree on both sides, transformers loads our export, and a second round trip changes nothing.
    benchmarks/hf_parity.py has all figures in a table."""
    row = hf_models.compare(transformers, name)
    assert max(row["logits"], row["gradients"], row["logits_out"]) < 1e-12, row
    assert row["same_weights"] and row["same_config"], row


@pytest.mark.parametrize("name", VARIANTS)
def test_it_goes_back_bit_for_bit(transformers, saved, tmp_path, name):
    model, folder = saved[name]
    reader = convert(folder, tmp_path)
    torch_hf.write(reader, tmp_path / "back", max_shard_bytes=20e3)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    ours, theirs = back.state_dict(), model.state_dict()
    assert set(ours) == set(theirs) and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert torch.equal(their_logits(back.eval()), their_logits(model))


@pytest.mark.parametrize("name", ["llama, tied", "mixtral"])
def test_files_in_shards_are_the_same_checkpoint(saved, tmp_path, name):
    model, folder = saved[name]
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    whole, shards = weights(convert(folder, tmp_path)), weights(convert(tmp_path / "shards", tmp_path / "2"))
    assert list(whole) == list(shards) and all(torch.equal(whole[k], shards[k]) for k in whole)
    (tmp_path / "shards" / "model.safetensors.index.json").unlink()
    shards = weights(convert(tmp_path / "shards", tmp_path / "3"))
    assert all(torch.equal(whole[k], shards[k]) for k in whole)


def interleaved(w, heads):
    """Order rows as in Meta's own files, which rotate the pairs (2e, 2e + 1)."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


MISTAKES = {
    "rotary pairs": lambda p: {
        k: interleaved(v, v.shape[0] // 8) if k.endswith(("wq.weight", "wk.weight")) else v for k, v in p.items()
    },
    "gate and up": lambda p: {k: p[k.replace("w1", "w9").replace("w3", "w1").replace("w9", "w3")] for k in p},
    "order of the experts": lambda p: {
        k: v.unflatten(0, (4, -1)).flip(0).flatten(0, 1) if ".experts." in k else v for k, v in p.items()
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_mapping_would_be_seen(saved, tmp_path, mistake):
    """The control: agreement would prove nothing if it survived a mistake."""
    model, folder = saved["mixtral"]
    reader = convert(folder, tmp_path)
    wrong = MISTAKES[mistake](weights(reader))
    assert error(our_logits(config_of(reader), wrong), their_logits(model)) > 1e-2


def test_the_precision_is_kept_and_can_be_chosen(transformers, saved, tmp_path):
    model, _ = saved["mixtral"]
    half = copy.deepcopy(model).bfloat16()
    half.save_pretrained(tmp_path / "bf16")
    reader = convert(tmp_path / "bf16", tmp_path)
    assert {e.dtype for e in reader.manifest.entries} == {"bfloat16"}
    want = half.state_dict()
    for dtype, kept in {"": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}.items():
        torch_hf.write(reader, tmp_path / f"out-{dtype}", dtype=dtype)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{dtype}")
        got = back.state_dict()
        assert back.dtype == kept and all(torch.equal(got[k].bfloat16(), want[k]) for k in want)
    with pytest.raises(UserError, match=r"(?s)dtype = 'int4'.*bf16, fp32"):
        torch_hf.write(reader, tmp_path / "out", dtype="int4")


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(replica=2, shard=3), Layout(tp=2, shard=2), Layout(pp=2, tp=2), Layout(shard=4, ep=2)],
    ids=["one", "replica, shard", "tp, shard", "pp, tp", "shard, ep"],
)
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_a_checkpoint_of_any_layout_goes_out_whole(transformers, tmp_path, layout, family):
    config = ModelConfig(family=family, vocab_size=61, dim=32, ffn_dim=48, num_layers=2, num_experts=4)
    torch.manual_seed(1)
    params = {h.name: 0.2 * torch.randn(h.shape) for h in params_of(config)}
    torch_hf.write(saved_in(tmp_path, config, layout, params), tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert error(our_logits(config, params), their_logits(back)) < 3e-6
    assert back.config.eos_token_id is None and back.config.max_position_embeddings == Job().train.seq_len


def saved_in(tmp_path, config, layout, params) -> Reader:
    """Save as the ranks of a run in this layout would."""
    held = describe(load_family(config.family), config, layout)
    entries = [entry_of("weights", h, "float32") for h in held]
    job = Job(model=config, layout=layout).to_dict()
    manifest = Manifest("step-000000003-x", 3, layout, entries, [], 3, job=job)
    images = []
    for rank in range(layout.world_size):
        plan = manifest.plan(rank)
        image = bytearray(plan.own_bytes)
        for s in plan.own:
            part = params[entries[s.entry].held.name.removeprefix("weights/")][s.r0 : s.r1]
            part = part[:, s.c0 : s.c1] if part.dim() > 1 else part
            image[s.offset : s.offset + s.size] = part.numpy().tobytes()
        images.append((memoryview(image), b""))
    store = Folder(tmp_path / "ours")
    write_whole(store, manifest, images)
    return Reader(store, manifest.name)


# -- what is refused


REFUSED = {
    "other class": (dict(architectures=["GPT2LMHeadModel"]), "architectures.*learned positions"),
    "deepseek": (dict(architectures=["DeepseekV3ForCausalLM"]), "architectures.*MLA"),
    "no class": (dict(architectures=None), "architectures"),
    "code": (dict(auto_map={"AutoModel": "x.y"}), "auto_map.*never run"),
    "quantized": (dict(quantization_config={"bits": 4}), "quantization_config.*quantized"),
    "activation": (dict(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "bias": (dict(attention_bias=True), "q_proj.bias.*missing"),
    "mlp bias": (dict(mlp_bias=True), "gate_proj.bias.*missing"),
    "layer types": (dict(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
    "rope of version 5": (
        dict(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
        "rope_parameters.*original_max_position_embeddings",
    ),
    "rope of version 4": (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_scaling.*'dynamic'"),
    "partial rope": (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    "rope theta": (dict(rope_parameters={"rope_theta": -1}), "rope_theta.*positive"),
    "heads": (dict(num_key_value_heads=3), "num_key_value_heads = 3.*divide"),
    "head width": (dict(head_dim=7), "head_dim = 7.*even"),
    "size": (dict(hidden_size="32"), "hidden_size = '32'"),
    "norm": (dict(rms_norm_eps=0), "rms_norm_eps"),
    "shape": (dict(vocab_size=60), "embed_tokens.*shape"),
    "layers missing": (dict(num_hidden_layers=3), "layers.2.*missing"),
    "layers left over": (dict(num_hidden_layers=1), "no place.*layers.1"),
    "tied": (dict(tie_word_embeddings=True), "tie_word_embeddings.*differs"),
}


def change(folder, target, **fields):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_compute_something_else_is_refused(saved, tmp_path, what):
    fields, match = REFUSED[what]
    with pytest.raises(UserError, match=rf"(?s){match}.*remedy: "):
        convert(change(saved["llama"][1], tmp_path / "changed", **fields), tmp_path)
    assert not (tmp_path / "ours").exists()


def test_a_window_is_taken_over(saved, tmp_path):
    folder = saved["mistral"][1]
    windowed = change(folder, tmp_path / "7", sliding_window=7)
    assert config_in(windowed)[1].window == 7
    config = json.loads((folder / "config.json").read_text())
    del config["sliding_window"]  # transformers takes it for 4096
    (windowed / "config.json").write_text(json.dumps(config))
    assert config_in(windowed)[1].window == 4096 and config_in(folder)[1].window == 0


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ("sfsf", dict(window_from=0, full_every=2)),
        ("sssf", dict(window_from=0, full_every=4)),
        ("ffss", dict(window_from=2, full_every=0)),
        ("ssss", dict(window_from=0, full_every=0)),
        ("sffs", None),
    ],
)
def test_which_layers_have_a_window(transformers, tmp_path, kinds, want):
    types = {"s": "sliding_attention", "f": "full_attention"}
    layers = [types[kind] for kind in kinds]
    transformers.Qwen3Config(
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=layers,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)
    if want is None:
        with pytest.raises(UserError, match=r"layer_types.*every n-th"):
            config_in(tmp_path)
        return
    config = config_in(tmp_path)[1]
    assert {name: getattr(config, name) for name in want} == want and config.window == 7


def test_a_config_of_transformers_4_means_the_same(saved, tmp_path):
    _, folder = saved["llama, wide heads"]
    old = change(folder, tmp_path / "old", rope_theta=500.0, rope_scaling=None, rope_parameters=None)
    assert config_in(old) == config_in(folder)
    assert config_in(folder)[1].rope_theta == 500.0


def test_a_tied_head_that_is_saved_as_well_must_be_the_embedding(saved, tmp_path):
    _, folder = saved["llama"]
    with safetensors.File(folder / "model.safetensors") as file:
        data = {}
        for name, slot in file.tensors.items():
            data[name] = bytearray(slot.stop - slot.start)
            file.read_into(slot.start, memoryview(data[name]))
        tensors = [(name, slot.dtype, slot.shape) for name, slot in file.tensors.items()]
    data["lm_head.weight"] = data["model.embed_tokens.weight"]
    target = change(folder, tmp_path / "both", tie_word_embeddings=True)
    (target / "model.safetensors").unlink()
    safetensors.write(target / "model.safetensors", tensors, [memoryview(data[name]) for name, _, _ in tensors])
    assert "head.weight" not in weights(convert(target, tmp_path))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (dict(family="image"), "model.family = 'image'"),
        (dict(family="moe", scoring="sigmoid"), "model.scoring = 'sigmoid'"),
        (dict(family="moe", shared_experts=1), "model.shared_experts = 1"),
        (dict(family="moe", dense_layers=1), "model.dense_layers = 1"),
        (dict(family="moe", route_scale=2.5), "model.route_scale = 2.5"),
        (dict(family="moe", balance_bias=1e-3), "model.balance_bias = 0.001"),
        (dict(num_heads=5, head_width=8), "model.num_heads = 5"),
    ],
)
def test_what_transformers_cannot_compute_does_not_go_out(saved, tmp_path, fields, match):
    reader = convert(saved["llama"][1], tmp_path)
    reader.manifest.job["model"] = dataclasses.asdict(ModelConfig(**fields))
    with pytest.raises(UserError, match=match):
        torch_hf.write(reader, tmp_path / "out")


def test_nothing_is_overwritten_and_nothing_half_written_is_left(saved, tmp_path):
    reader = convert(saved["llama"][1], tmp_path)
    (tmp_path / "out").mkdir()
    torch_hf.write(reader, tmp_path / "out")  # empty, so it may be used

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(UserError, match="never overwritten"):  # and before any work
        torch_hf.write(reader, tmp_path / "out", progress=stop)
    with pytest.raises(KeyboardInterrupt):
        torch_hf.write(reader, tmp_path / "stopped", progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours", "out"]


def test_progress_reaches_the_end(saved, tmp_path):
    seen = []
    store = Folder(tmp_path / "ours")
    manifest = torch_hf.read(saved["mixtral"][1], store, lambda *at: seen.append(at))
    torch_hf.write(Reader(store, manifest.name), tmp_path / "out", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] == sum(e.held.numel * 4 for e in manifest.entries)
    assert seen.count(seen[-1]) == 2


# -- the files


def test_an_index_may_not_point_outside(saved, tmp_path):
    target = change(saved["llama"][1], tmp_path / "in")
    (target / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="weight_map"):
        convert(target, tmp_path)


def test_a_missing_file_is_named(saved, tmp_path):
    model, _ = saved["llama"]
    model.save_pretrained(tmp_path / "in", max_shard_size="10KB")
    lost = sorted((tmp_path / "in").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"{lost.name}.*missing"):
        convert(tmp_path / "in", tmp_path)


def test_pickles_are_never_read(saved, tmp_path):
    target = change(saved["llama"][1], tmp_path / "in")
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        convert(target, tmp_path)


def with_header(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape=(2,), start=0, stop=8, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


DAMAGED = {
    "empty": b"",
    "short": b"\1\0\0",
    "header beyond the end": (1 << 40).to_bytes(8, "little") + b"{}",
    "header cut": with_header({"a": tensor()})[:-5],
    "data cut": with_header({"a": tensor()}, bytes(7)),
    "data too long": with_header({"a": tensor()}, bytes(9)),
    "no JSON": with_header(b"{'a'"),
    "no text": with_header(b"\xff\xfe{}"),
    "deep JSON": with_header(b"[" * 200_000),
    "a list": with_header([]),
    "twice": with_header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "no table": with_header({"a": 3}),
    "a field missing": with_header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "dtype": with_header({"a": tensor(dtype="F31")}, bytes(8)),
    "dtype no text": with_header({"a": tensor(dtype=[])}, bytes(8)),
    "shape": with_header({"a": tensor(shape=(3,))}, bytes(8)),
    "negative shape": with_header({"a": tensor(shape=(-1, -2))}, bytes(8)),
    "shape of floats": with_header({"a": tensor(shape=(2.0,))}, bytes(8)),
    "offsets backwards": with_header({"a": tensor(shape=(0,), start=8, stop=0)}, bytes(8)),
    "offsets beyond": with_header({"a": tensor(start=8, stop=16)}, bytes(8)),
    "overlap": with_header({"a": tensor(), "b": tensor(start=4, stop=12)}, bytes(12)),
    "gap": with_header({"a": tensor(), "b": tensor(start=12, stop=20)}, bytes(20)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path, what):
    path = tmp_path / "x.safetensors"
    path.write_bytes(DAMAGED[what])
    with pytest.raises(UserError, match=r"(?s)x\.safetensors.*remedy: fetch or save"):
        safetensors.File(path)


def test_a_whole_header_is_taken(tmp_path):
    """The control for the tests above."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({"a": tensor(), "b": tensor((0,), 8, 8), "__metadata__": {"x": "y"}}, bytes(8)))
    with safetensors.File(path) as file:
        assert file.tensors["a"][:2] == ("F32", (2,)) and file.tensors["b"].shape == (0,)


def test_the_format_is_that_of_the_safetensors_package(tmp_path):
    theirs = pytest.importorskip("safetensors.torch")
    want = {"a": torch.randn(3, 5), "ü": torch.randn(7).bfloat16(), "none": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    theirs.save_file(want, tmp_path / "theirs")
    with safetensors.File(tmp_path / "theirs") as file:
        listed = [(name, slot.dtype, slot.shape) for name, slot in file.tensors.items()]
        data = []
        for slot in file.tensors.values():
            room = bytearray(slot.stop - slot.start)
            file.read_into(slot.start, memoryview(room))
            data.append(memoryview(room))
    safetensors.write(tmp_path / "ours", listed, data)
    got = theirs.load_file(tmp_path / "ours")
    assert set(got) == set(want) and all(torch.equal(got[k], want[k]) for k in want)
