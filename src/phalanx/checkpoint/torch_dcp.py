"""Reads and writes folders of torch.distributed.checkpoint, in one process and without a process group.

    model.<name>                     parameters and buffers, by their names in the module
    optim.state.<name>.exp_avg       the moments, as torch's get_optimizer_state_dict names them
    optim.state.<name>.exp_avg_sq
    optim.state.<name>.step          updates so far
    step, cursor                     of the run, and in the order of the data
    phalanx.json, a file beside      the job, and the version of the data

`.metadata` is a pickle, which could run any code. It is read with stand-ins for the classes that torch puts there; they
keep their arguments and do nothing. Any other name in it is refused. The tensors are read with `weights_only`."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.catalog import OnProgress, ignore
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.torch_foreign import (
    MOMENTS,
    Image,
    buffers_of,
    config_of,
    dtype_name,
    entry_of,
    new_folder,
    params_of,
    read_rows,
)
from phalanx.core.checkpoint import Entry, Manifest
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.job import Job
from phalanx.core.shape import FAMILIES, ModelConfig
from phalanx.core.store import Store

METADATA, SIDE = ".metadata", "phalanx.json"
FLOATS = ("float64", "float32", "bfloat16", "float16")
AGAIN = "save or fetch it again: it is damaged, or was not written to its end"

# -- .metadata

STAND_INS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # Python 3.13
}


class Stored(NamedTuple):
    """Where a chunk of a tensor, or an object, lies."""

    path: str
    offset: int
    length: int


class Chunk(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


class Saved(NamedTuple):
    """A tensor, or another object, which has an empty `dtype` and one chunk."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class _StandIn:
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Creates only stand-ins, whose classes live no longer than it does; sizes become tuples, dtypes names."""

    def __init__(self, path: Path):
        super().__init__(io.BytesIO(path.read_bytes()))
        self._path = path
        self._made: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            if name == "Size":
                return tuple
            if isinstance(getattr(torch, name, None), torch.dtype):
                return name
        if name not in STAND_INS.get(module, ()):
            what = f"it is a pickle that wants {module}.{name}, which has no place in it and was not touched"
            remedy = "do not load it anywhere, unless you know who made it; torch's own FileSystemWriter writes others"
            raise UserError(what, field="file", value=str(self._path), remedy=remedy)
        return self._made.setdefault((module, name), type(name, (_StandIn,), {}))


def read_metadata(folder: Path) -> dict[str, Saved]:
    """Return what the folder holds, by flat key. It is checked, so that reading it fills every element."""
    path = folder / METADATA
    if not path.exists():
        remedy = "name the folder that torch.distributed.checkpoint.save wrote, with its default FileSystemWriter"
        raise UserError(f"it has no {METADATA}", field="source", value=str(folder), remedy=remedy)
    try:
        root = _Unpickler(path).load()
    except UserError:
        raise
    except Exception as error:  # damaged bytes may raise anything
        what = f"it cannot be read: {type(error).__name__}: {error}"
        raise UserError(what, field="file", value=str(path), remedy=AGAIN) from None
    try:
        return dict(_saved(root))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"it does not say what it must: {error}", field="file", value=str(path), remedy=AGAIN) from None


def _saved(root: Any) -> Iterator[tuple[str, Saved]]:
    fields = _state(root, "Metadata")
    where: dict[tuple[str, tuple[int, ...]], Stored] = {}
    for key, info in fields["storage_data"].items():
        index, said = _state(key, "MetadataIndex"), _state(info, "_StorageInfo")
        if said.get("transform_descriptors"):
            raise ValueError(f"{index['fqn']} is transformed by {said['transform_descriptors']}; save it without")
        name, offset = str(index["fqn"]), index.get("offset")
        plain = str(said["relative_path"])
        if Path(plain).is_absolute() or ".." in Path(plain).parts:
            raise ValueError(f"{name} would lie outside of the folder, in {plain}")
        start, length = _counts([said["offset"], said["length"]])
        where[name, () if offset is None else _counts(offset)] = Stored(plain, start, length)
    for name, said in fields["state_dict_metadata"].items():
        if type(said).__name__ == "BytesStorageMetadata":
            yield str(name), Saved("", (), [Chunk((), (), where[name, ()])])
            continue
        tensor = _state(said, "TensorStorageMetadata")
        shape = _counts(tensor["size"])
        chunks = []
        for one in tensor["chunks"]:
            chunk = _state(one, "ChunkStorageMetadata")
            offsets = _counts(chunk["offsets"])
            chunks.append(Chunk(offsets, _counts(chunk["sizes"]), where[name, offsets]))
        if not _covered(shape, chunks):
            raise ValueError(f"the chunks of {name} are not the whole of it, each element once")
        yield str(name), Saved(str(_state(tensor["properties"], "TensorProperties", tuple)[0]), shape, chunks)


def _state(thing: Any, kind: str, is_a: type = dict) -> Any:
    if not isinstance(thing, _StandIn) or type(thing).__name__ != kind or not isinstance(thing.state, is_a):
        raise TypeError(f"{thing!r:.80} where {kind} belongs")
    return thing.state


def _counts(values: Any) -> tuple[int, ...]:
    out = tuple(values)
    if not all(type(v) is int and v >= 0 for v in out):
        raise ValueError(f"{out!r:.80} are no sizes")
    return out


def _covered(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """Return whether every element is in exactly one chunk."""
    if any(not len(c.offsets) == len(c.sizes) == len(shape) for c in chunks):
        return False
    cuts = []
    for dim, size in enumerate(shape):
        ends = {at for c in chunks for at in (c.offsets[dim], c.offsets[dim] + c.sizes[dim])}
        if max(ends, default=0) > size:
            return False
        cuts.append(sorted(ends | {0, size}))
    if 0 in shape:
        return True
    cells = np.zeros([len(c) - 1 for c in cuts], np.int64)
    for c in chunks:
        spans = zip(c.offsets, c.sizes, cuts, strict=True)
        cells[tuple(slice(cut.index(at), cut.index(at + size)) for at, size, cut in spans)] += 1
    return bool((cells == 1).all())


# -- in


def read(folder: Path, out: Store, progress: OnProgress = ignore, job: Job | None = None) -> Manifest:
    """Convert a folder into a committed checkpoint. Without moments it is for an optimizer that starts anew. `job`:
    describes the model in place of phalanx.json."""
    job, version = (job, "") if job else _side(folder)
    source = _Source(folder)
    params = params_of(job.model)
    keys = source.claim(params, buffers_of(job.model), job.model)
    image = Image(
        [entry_of(kind, held, source.saved[key].dtype) for kind, held, key in keys],
        job.to_dict(),
        step=source.number("step"),
        updates=source.updates(params) if any(kind in MOMENTS for kind, _, _ in keys) else 0,
        cursor=source.number("cursor"),
        data_version=version,
    )
    done = 0
    for kind, held, key in keys:
        room = image.tensor(f"{kind}/{held.name}")
        for place, part in source.chunks(key):
            room[place] = part
            done += part.nbytes
            progress(done, image.size_bytes)
    if _is_tied(params):
        source.check_tied(image)
    return image.commit(out)


def _side(folder: Path) -> tuple[Job, str]:
    """Read the job, and the version of its data."""
    path = folder / SIDE
    remedy = f'put a {SIDE} there with {{"job": {{"model": {{…}}}}}}, the sizes of your model'
    try:
        side = json.loads(path.read_bytes())
        if not side["job"]["model"]:
            raise ValueError("job.model is empty")
        if unknown := side["job"]["model"].keys() - {field.name for field in dataclasses.fields(ModelConfig)}:
            raise ValueError(f"a model has no {min(unknown)!r}")  # it may be written by hand
        job, version = Job.from_dict(side["job"]), str(side.get("data_version", ""))
    except FileNotFoundError:
        what = f"it does not say which model it holds: there is no {SIDE}"
        raise UserError(what, field="source", value=str(folder), remedy=remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it does not describe a job: {error}"
        raise UserError(what, field="file", value=str(path), remedy=remedy) from None
    if job.model.family not in FAMILIES:
        what = f"its model is code of its own, {job.model.family}, which is not run because a file says so"
        raise UserError(what, field="file", value=str(path), remedy="give the job yourself")
    return job, version


def _is_tied(params: list[Held]) -> bool:
    """Return whether the embedding is also the head, which a module's state then has as well."""
    names = {held.name for held in params}
    return "embed.weight" in names and "head.weight" not in names


class _Source:
    """A folder of DCP's, its keys, and the names we give them."""

    def __init__(self, folder: Path):
        self.folder, self.saved = folder, read_metadata(folder)
        has = {key.partition(".")[0] for key in self.saved}
        self.model = "model." if "model" in has else ""
        self.optim = "optimizer.state." if "optimizer" in has else "optim.state."

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise UserError(what, field="source", value=str(self.folder), remedy=remedy)

    def claim(self, params: list[Held], buffers: list[Held], config: ModelConfig) -> list[tuple[str, Held, str]]:
        """Return the key of each of our tensors. Refuse other keys of the model or the optimizer."""
        has_moments = any(key.startswith(self.optim) and key.endswith(MOMENTS) for key in self.saved)
        keys = []
        for held in params:
            keys.append(("weights", held, self.model + held.name))
            if has_moments:
                keys += [(kind, held, f"{self.optim}{held.name}.{kind}") for kind in MOMENTS]
        keys += [("buffers", held, self.model + held.name) for held in buffers]
        for _, held, key in keys:
            self._check(key, held)
        known = {key for _, _, key in keys} | {f"{self.optim}{held.name}.step" for held in params}
        if _is_tied(params):
            known.add(f"{self.model}head.weight")
        prefixes = (self.model, self.optim) if self.model else (self.optim,)
        left = sorted(key for key in self.saved if key.startswith(prefixes) and key not in known)
        if left:
            what = f"{len(left)} keys have no place in the {config.family} family and AdamW: {', '.join(left[:3])}"
            self.refuse(what, "correct the job, or leave them out")
        return keys

    def _check(self, key: str, held: Held) -> None:
        if key not in self.saved:
            self.refuse(f"it has no {key}", "save all of the model's state, and of the optimizer's all or nothing")
        saved = self.saved[key]
        if saved.shape != held.shape:
            self.refuse(f"{key} has the shape {saved.shape} instead of {held.shape}", "correct the job's sizes")
        if saved.dtype not in FLOATS:
            self.refuse(f"{key} is {saved.dtype or 'no tensor'}", f"save it as one of {', '.join(FLOATS)}")

    def chunks(self, key: str) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield the parts of a tensor, and where they belong."""
        saved = self.saved[key]
        for offsets, sizes, stored in saved.chunks:
            part = self._load(stored)
            if not isinstance(part, Tensor) or (tuple(part.shape), dtype_name(part.dtype)) != (sizes, saved.dtype):
                self.refuse(f"{stored.path} has something else where {key} should be", AGAIN)
            yield tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)), part

    def check_tied(self, image: Image) -> None:
        """Check that the head, if it is saved as well, is the embedding."""
        key = f"{self.model}head.weight"
        if key not in self.saved:
            return
        embedding = image.tensor("weights/embed.weight")
        same = self.saved[key].shape == tuple(embedding.shape)
        if not same or not all(torch.equal(embedding[place], part) for place, part in self.chunks(key)):
            self.refuse(f"{key} differs from the embedding, but the job's model.tied is true", "set it to false")

    def number(self, key: str) -> int:
        """Read a count; 0 if there is none."""
        if key not in self.saved:
            return 0
        value = self._load(self.saved[key].chunks[0].stored)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = int(value) if type(value) is float and value.is_integer() else value
        if type(value) is not int or value < 0:
            self.refuse(f"{key} is {value!r:.80}, and no count", "save a whole number")
        return value

    def updates(self, params: list[Held]) -> int:
        keys = [f"{self.optim}{held.name}.step" for held in params]
        if missing := [key for key in keys if key not in self.saved]:
            self.refuse(f"it has moments, but no {missing[0]}", "save the optimizer's whole state")
        counts = {self.number(key) for key in keys}
        if len(counts) > 1:
            self.refuse(f"the optimizer's step counts differ: {sorted(counts)[:5]}", "train with one optimizer for all")
        return counts.pop()

    def _load(self, stored: Stored) -> Any:
        path = self.folder / stored.path
        try:
            with path.open("rb") as file:
                file.seek(stored.offset)
                data = file.read(stored.length)
            if len(data) < stored.length:
                raise EOFError(f"it ends after {stored.offset + len(data)} bytes")
            if not data.startswith(b"PK"):
                raise ValueError(f"byte {stored.offset} is not the start of what torch.save writes")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds
            what = f"it cannot be read: {error}"
            raise UserError(what, field="file", value=str(path), remedy=AGAIN) from None


# -- out


def write(reader: Reader, folder: Path, progress: OnProgress = ignore) -> None:
    """Export all of a checkpoint in its stored precision. Each tensor gets a file, because torch keeps what goes to one
    file in memory."""
    import torch.distributed.checkpoint as dcp

    config_of(reader)  # without a model it could not be read again
    manifest, done = reader.manifest, 0
    entries = {_key(e): e for e in manifest.entries}
    total = sum(e.held.numel * e.item_bytes for e in manifest.entries)

    class Planner(dcp.DefaultSavePlanner):
        """Reads a tensor when torch asks for it."""

        def resolve_data(self, write_item: Any) -> Any:
            nonlocal done
            entry = entries.get(write_item.index.fqn)
            if entry is None:
                return super().resolve_data(write_item)
            done += entry.held.numel * entry.item_bytes
            progress(done, total)
            return read_rows(reader, entry.held.name, 0, entry.held.num_rows)

    with new_folder(folder) as near:
        files = dcp.FileSystemWriter(near, single_file_per_rank=False, sync_files=False, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            dcp.save(_nested(manifest), storage_writer=files, planner=Planner(), no_dist=True)
        side = {"job": manifest.job, "data_version": manifest.data_version}
        (near / SIDE).write_text(json.dumps(side, indent=2) + "\n", encoding="utf-8")


def _key(entry: Entry) -> str:
    kind, _, name = entry.held.name.partition("/")
    return f"optim.state.{name}.{kind}" if kind in MOMENTS else f"model.{name}"


def _nested(manifest: Manifest) -> dict[str, Any]:
    """Return the state as users of torch nest it, with tensors that have no memory."""
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for entry in manifest.entries:
        kind, _, name = entry.held.name.partition("/")
        empty = torch.empty(entry.held.shape, dtype=getattr(torch, entry.dtype), device="meta")
        if kind in MOMENTS:
            moments.setdefault(name, {"step": torch.tensor(float(manifest.updates))})[kind] = empty
        else:
            model[name] = empty
    state: dict[str, Any] = {"model": model, "optim": {"state": moments}} if moments else {"model": model}
    return state | {"step": torch.tensor(manifest.step), "cursor": torch.tensor(manifest.cursor)}
