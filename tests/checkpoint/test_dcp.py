"""Folders of torch.distributed.checkpoint: what torch saves can be imported, torch loads what is exported, and no
pickle in them can run code."""

import dataclasses
import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from phalanx.checkpoint import torch_dcp
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.torch_foreign import MOMENTS, Image, buffers_of, entry_of, params_of, read_rows
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder
from phalanx.model.family import load_family

DENSE = ModelConfig(vocab_size=61, dim=32, ffn_dim=48, num_layers=2)
MODELS = {
    "dense": DENSE,
    "tied": dataclasses.replace(DENSE, tied=True),
    "moe": dataclasses.replace(DENSE, family="moe", num_experts=4, dense_layers=1, shared_experts=1, balance_bias=0.1),
    "image": ModelConfig(family="image", options={"image": 8, "patch": 4, "channels": 1}, dim=32, ffn_dim=48),
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def trained(tmp_path, config, moments="float32") -> Reader:
    """Make a checkpoint as a run leaves it, with random numbers."""
    torch.manual_seed(2)
    dtypes = {"weights": "float32", **dict.fromkeys(MOMENTS, moments)}
    entries = [entry_of(kind, held, dtype) for held in params_of(config) for kind, dtype in dtypes.items()]
    entries += [entry_of("buffers", held, "float32") for held in buffers_of(config)]
    job = Job(name="ours", model=config).to_dict()
    image = Image(entries, job, step=7, updates=6, cursor=112, data_version="abc")
    for entry in entries:
        image.tensor(entry.held.name).copy_(torch.randn(entry.held.shape))
    store = Folder(tmp_path / "ours")
    return Reader(store, image.commit(store).name)


def tensors(reader) -> dict[str, torch.Tensor]:
    return {e.held.name: read_rows(reader, e.held.name, 0, e.held.num_rows) for e in reader.manifest.entries}


def read(folder, tmp_path, **more) -> Reader:
    store = Folder(tmp_path / "read")
    return Reader(store, torch_dcp.read(folder, store, **more).name)


def assert_same(got: dict, want: dict) -> None:
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


# -- out and in


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_out_and_in_again_nothing_has_changed(tmp_path, name, moments):
    ours, seen = trained(tmp_path, MODELS[name], moments), []
    torch_dcp.write(ours, tmp_path / "dcp", progress=lambda *at: seen.append(at))
    back = read(tmp_path / "dcp", tmp_path, progress=lambda *at: seen.append(at))
    assert_same(tensors(back), tensors(ours))
    for field in ("step", "updates", "cursor", "data_version", "job", "entries"):
        assert getattr(back.manifest, field) == getattr(ours.manifest, field), field
    size = sum(t.nbytes for t in tensors(ours).values())
    assert seen.count((size, size)) == 2 and not back.verify()


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_torch_loads_what_goes_out(tmp_path, name):
    """It loads into the same kind of module and optimizer, with torch's own calls."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    ours = trained(tmp_path, MODELS[name])
    torch_dcp.write(ours, tmp_path / "dcp")
    model = load_family(MODELS[name].family).build(MODELS[name])
    shapes = {k: torch.empty_like(v) for k, v in model.named_parameters()}
    state = {
        "model": get_model_state_dict(model),
        "optim": {"state": {k: {m: torch.empty_like(v) for m in MOMENTS} for k, v in shapes.items()}},
        "step": torch.tensor(0),
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(model, state["model"])
    want = tensors(ours)
    for key, param in model.named_parameters():
        assert torch.equal(param, want[f"weights/{key}"])
        assert all(torch.equal(state["optim"]["state"][key][m], want[f"{m}/{key}"]) for m in MOMENTS)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, want[f"buffers/{key}"])
    assert state["step"] == 7


def steps_of_torch(config, steps=2):
    """Train a module with AdamW, as somebody else would."""
    torch.manual_seed(4)
    model = load_family(config.family).build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("word", ["optim", "optimizer"])
@pytest.mark.parametrize("name", ["dense", "tied"])
def test_what_torch_saves_is_read(tmp_path, name, word):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = steps_of_torch(MODELS[name])
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, word: state, "step": 5, "scheduler": {"last": [1, 2]}}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UserError, match=r"(?s)no phalanx\.json.*remedy"):
        read(tmp_path / "dcp", tmp_path)
    sizes = {"job": {"model": dataclasses.asdict(MODELS[name])}}
    (tmp_path / "dcp" / "phalanx.json").write_text(json.dumps(sizes))
    reader = read(tmp_path / "dcp", tmp_path)
    got = tensors(reader)
    assert (reader.manifest.step, reader.manifest.updates) == (5, 2)
    for key, param in model.named_parameters():
        assert torch.equal(got[f"weights/{key}"], param)
        assert all(torch.equal(got[f"{m}/{key}"], optimizer.state[param][m]) for m in MOMENTS)
    assert len(got) == 3 * len(list(model.parameters()))


def test_weights_alone_are_for_an_optimizer_that_starts_anew(tmp_path):
    model, _ = steps_of_torch(DENSE)
    dcp.save(model.bfloat16().state_dict(), checkpoint_id=tmp_path / "dcp")  # with no "model" before the names
    reader = read(tmp_path / "dcp", tmp_path, job=Job(model=DENSE))
    assert_same(tensors(reader), {f"weights/{k}": v for k, v in model.named_parameters()})
    assert reader.manifest.updates == 0 and {e.dtype for e in reader.manifest.entries} == {"bfloat16"}


def in_chunks(folder, state, cuts):
    """Save as several ranks do: each tensor in `cuts` = (rows, columns) chunks, in two files, with torch's own
    classes."""
    files = [(folder / f"__{i}_0.distcp").open("wb") for i in range(2)]
    described, where, count = {}, {}, 0
    for name, tensor in state.items():
        chunks = []
        for rows, row in pieces(tensor.shape[0], cuts[0]):
            for cols, col in pieces(tensor.shape[1], cuts[1]) if tensor.dim() > 1 else [(slice(None), 0)]:
                part = tensor[rows, cols] if tensor.dim() > 1 else tensor[rows]
                offset = torch.Size((row, col)[: tensor.dim()])
                file = files[count % 2]
                start, count = file.tell(), count + 1
                torch.save(part.clone(), file)
                info = _StorageInfo(os.path.basename(file.name), start, file.tell() - start)
                where[torch_metadata.MetadataIndex(name, offset, len(chunks))] = info
                chunks.append(torch_metadata.ChunkStorageMetadata(offset, part.size()))
        properties = torch_metadata.TensorProperties.create_from_tensor(tensor)
        described[name] = torch_metadata.TensorStorageMetadata(properties, tensor.size(), chunks)
    for file in files:
        file.close()
    return torch_metadata.Metadata(described, None, where, torch_metadata.StorageMeta(folder))


def pieces(size, count):
    step = -(-size // count)
    return [(slice(at, min(at + step, size)), at) for at in range(0, size, step)]


@pytest.mark.parametrize("cuts", [(3, 1), (1, 2), (4, 3)])
def test_chunks_of_many_ranks_are_put_together(tmp_path, cuts):
    want = {k: v.detach() for k, v in steps_of_torch(DENSE)[0].state_dict().items()}
    meta = in_chunks(tmp_path, want, cuts)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta))
    loaded = {k: torch.zeros_like(v) for k, v in want.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)  # torch agrees that this is what it writes
    assert_same(loaded, want)
    got = tensors(read(tmp_path, tmp_path, job=Job(model=DENSE)))
    assert_same({k.removeprefix("weights/"): v for k, v in got.items()}, want)


@pytest.mark.parametrize("what", ["missing", "twice", "beyond", "rank"])
def test_chunks_that_are_not_the_whole_are_refused(tmp_path, what):
    state = steps_of_torch(DENSE)[0].state_dict()
    meta = in_chunks(tmp_path, state, (2, 2))
    chunks = meta.state_dict_metadata["layers.0.ffn.w1.weight"].chunks
    if what == "missing":
        chunks.pop()
    elif what == "twice":
        chunks.append(chunks[0])
    elif what == "beyond":
        chunks[-1].sizes = torch.Size((25, 16))
    else:
        chunks[0].sizes = torch.Size((24,))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(UserError, match=r"(?s)layers\.0\.ffn\.w1.*not the whole"):
        read(tmp_path, tmp_path, job=Job(model=DENSE))


# -- pickles


class Runs:
    """A pickle that would run `call(*args)` when it is loaded."""

    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def attacks(target) -> dict[str, bytes]:
    name = str(target).encode()
    return {
        "os.system": pickle.dumps(Runs(os.system, f"touch {target}")),
        "builtins.eval": pickle.dumps(Runs(eval, f"open({str(target)!r}, 'w')")),
        "builtins.getattr": pickle.dumps(Runs(getattr, os.path.join, "__globals__")),
        "by protocol 0": b"cposix\nsystem\n(S'touch " + name + b"'\ntR.",
        "inside": pickle.dumps(torch_metadata.Metadata({}, planner_data=Runs(os.system, f"touch {target}"))),
        "as a part of a name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
        "through torch": b"ctorch\nload\n(V" + name + b"\ntR.",
        "through torch's modules": b"ctorch.serialization\nos\n.",
        "the classes themselves": pickle.dumps(Runs(setattr, torch_metadata.Metadata, "x", 1)),
    }


NAMES = list(attacks("x"))


@pytest.mark.parametrize("attack", NAMES)
def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path, attack):
    target = tmp_path / "ran"
    data = attacks(target)[attack]
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(UserError, match=r"(?s)\.metadata.*it is a pickle that wants .*not touched.*remedy"):
        torch_dcp.read_metadata(tmp_path)
    assert not target.exists()


def test_the_attack_works_where_pickles_are_trusted(tmp_path):
    """As a control, the same bytes do run in torch's own reader."""
    target = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(attacks(target)["inside"])
    dcp.FileSystemReader(tmp_path).read_metadata()
    assert target.exists()


def test_the_refusal_names_what_was_wanted(tmp_path):
    (tmp_path / ".metadata").write_bytes(attacks(tmp_path / "ran")["builtins.eval"])
    with pytest.raises(UserError, match=r"builtins\.eval"):
        torch_dcp.read_metadata(tmp_path)


def test_a_pickle_cannot_change_torchs_classes(tmp_path):
    """BUILD sets attributes of anything on the stack, even of a class. Here it gets the class of a stand-in."""
    module = "torch.distributed.checkpoint.metadata"
    build = f"c{module}\nMetadata\n(N(dS'version'\nS'broken'\nstb.".encode()
    (tmp_path / ".metadata").write_bytes(build)
    with pytest.raises(UserError):
        torch_dcp.read_metadata(tmp_path)
    assert torch_metadata.Metadata.version is None
    before = torch_metadata.Metadata.version
    try:
        pickle.loads(build)  # the control: plain pickle changes it
        assert torch_metadata.Metadata.version == "broken"
    finally:
        torch_metadata.Metadata.version = before


def test_a_tensor_file_that_runs_code_is_refused(tmp_path):
    reader = trained(tmp_path, DENSE)
    torch_dcp.write(reader, tmp_path / "dcp")
    saved = torch_dcp.read_metadata(tmp_path / "dcp")["model.embed.weight"].chunks[0].stored
    path, target = tmp_path / "dcp" / saved.path, tmp_path / "ran"
    torch.save(Runs(os.system, f"touch {target}"), path)
    data = path.read_bytes()
    path.write_bytes(data + bytes(max(0, saved.length - len(data))))
    with pytest.raises(UserError, match=r"cannot be read"):
        read(tmp_path / "dcp", tmp_path)
    assert not target.exists() and not (tmp_path / "read").exists()


def test_a_job_beside_it_cannot_bring_code(tmp_path, monkeypatch):
    """A family may be a file of the user's own, but not a stranger's."""
    torch_dcp.write(trained(tmp_path, DENSE), tmp_path / "dcp")
    side = tmp_path / "dcp" / "phalanx.json"
    body = json.loads(side.read_text())
    (tmp_path / "dcp" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "dcp")
    for family in ("evil.py:X", str(tmp_path / "dcp" / "evil.py:X"), "evil:X"):
        body["job"]["model"]["family"] = family
        side.write_text(json.dumps(body))
        with pytest.raises(UserError, match="code of its own"):
            read(tmp_path / "dcp", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["/etc/passwd", "../secret", "a/../../secret"])
def test_a_file_outside_of_the_folder_is_refused(tmp_path, where):
    meta = in_chunks(tmp_path, steps_of_torch(DENSE)[0].state_dict(), (1, 1))
    next(iter(meta.storage_data.values())).relative_path = where
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(UserError, match="outside of the folder"):
        torch_dcp.read_metadata(tmp_path)


# -- damaged, or not ours


def test_any_damage_to_the_metadata_is_refused_or_without_effect(tmp_path):
    reader = trained(tmp_path, ModelConfig(vocab_size=7, dim=8, ffn_dim=8, num_layers=1, num_heads=2, num_kv_heads=1))
    torch_dcp.write(reader, tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    data, want = path.read_bytes(), torch_dcp.read_metadata(tmp_path / "dcp")
    refused = 0
    for at in range(0, len(data), 61):
        path.write_bytes(data[:at])
        with pytest.raises(UserError):
            torch_dcp.read_metadata(tmp_path / "dcp")
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x21]) + data[at + 1 :])
        try:
            found = torch_dcp.read_metadata(tmp_path / "dcp")
        except UserError:
            refused += 1
        else:
            assert isinstance(found, dict)
    path.write_bytes(data)
    assert torch_dcp.read_metadata(tmp_path / "dcp") == want and refused > 15


def test_a_truncated_tensor_file_is_named(tmp_path):
    torch_dcp.write(trained(tmp_path, DENSE), tmp_path / "dcp")
    path = max((tmp_path / "dcp").glob("*.distcp"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{path.name}.*ends after"):
        read(tmp_path / "dcp", tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s["model"].pop("norm.weight"), r"no model\.norm\.weight"),
        (lambda s: s["model"].update({"norm.weight": torch.ones(31)}), r"model\.norm\.weight has the shape"),
        (lambda s: s["model"].update({"norm.weight": torch.ones(32).int()}), r"model\.norm\.weight is int32"),
        (lambda s: s["model"].update({"norm.weight": 3}), r"model\.norm\.weight has the shape"),
        (lambda s: s["model"].update({"norm.bias": torch.ones(32)}), r"no place.*model\.norm\.bias"),
        (lambda s: s["optim"]["state"]["norm.weight"].pop("exp_avg"), r"no optim\.state\.norm\.weight\.exp_avg"),
        (lambda s: s["optim"]["state"]["norm.weight"].pop("step"), r"no optim\.state\.norm\.weight\.step"),
        (lambda s: s["optim"]["state"]["norm.weight"].update(step=9), "counts differ"),
        (lambda s: s["optim"]["state"]["norm.weight"].update(max_exp_avg_sq=torch.ones(32)), "no place.*max_exp"),
        (lambda s: s.update(step=-1), "step is -1"),
        (lambda s: s.update(step=[1]), r"step is \[1\]"),
        (lambda s: s.update(step=float("nan")), "step is nan"),
    ],
)
def test_what_is_not_this_model_is_refused(tmp_path, change, match):
    model, optimizer = steps_of_torch(DENSE)
    moments = {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}
    state = {"model": dict(model.state_dict()), "optim": {"state": moments}, "step": 2}
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UserError, match=match):
        read(tmp_path / "dcp", tmp_path, job=Job(model=DENSE))


def test_a_tied_head_that_differs_is_refused(tmp_path):
    dcp.save({"model": steps_of_torch(DENSE)[0].state_dict()}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UserError, match="differs from the embedding"):
        read(tmp_path / "dcp", tmp_path, job=Job(model=MODELS["tied"]))


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"(?s)no \.metadata.*FileSystemWriter"):
        read(tmp_path, tmp_path, job=Job(model=DENSE))
    for text in ("[]", "{}", '{"job": {"model": {"size": 3}}}', "nonsense"):
        (tmp_path / "phalanx.json").write_text(text)
        with pytest.raises(UserError, match=r"(?s)phalanx\.json.*does not describe"):
            read(tmp_path, tmp_path)
