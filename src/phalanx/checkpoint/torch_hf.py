"""Reads and writes Hugging Face folders (config.json and safetensors). No row is permuted, since both sides rotate the
pairs (e, e + E/2). Only the weights of a training run are exported. Both directions are streamed: a checkpoint is
imported in pieces of a limited size, as if a rank of its own had written each, and exported tensor by tensor.

Other files (tokenizer, generation config, chat template) are copied as they are: beside our checkpoint they lie in the
folder `assets`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from phalanx.checkpoint import safetensors
from phalanx.checkpoint.catalog import OnProgress, ignore
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.hf_config import (
    ARCHITECTURES,
    CONFIG,
    NO_FAMILY,
    architecture_of,
    config_in,
    config_out,
    read_json,
)
from phalanx.checkpoint.hf_names import EMBEDDING, HEAD, Piece, pieces_of, table_of
from phalanx.checkpoint.safetensors import File, Slot
from phalanx.checkpoint.torch_foreign import (
    IMAGE_BYTES,
    bytes_of,
    config_of,
    dtype_name,
    entry_of,
    new_folder,
    params_of,
    read_rows,
    write_streamed,
)
from phalanx.core.checkpoint import Manifest
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder, Store
from phalanx.core.weights import Weight
from phalanx.model.family import load_family

INDEX, SINGLE, ASSETS = "model.safetensors.index.json", "model.safetensors", "assets"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Theirs = dict[str, tuple[File, Slot]]
GENERATION = "generation_config.json"
KEPT = (  # beside the weights; config.json for its token ids, and for families with a table of their own
    CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # each of them is one


# -- in


def read(
    folder: Path,
    out: Store,
    progress: OnProgress = ignore,
    model: ModelConfig | None = None,
    image_bytes: int = IMAGE_BYTES,
) -> Manifest:
    """Convert a folder into a committed checkpoint: weights only, in their own precision, for an optimizer that starts
    anew. `model`: of a family with a table of names; config.json is then ignored."""
    config, table = (model, _own_table(model)) if model else _known(folder)
    params = params_of(config)
    with contextlib.ExitStack() as stack:
        theirs = _open_all(folder, stack)
        pieces = pieces_of(params, table, config.family)
        _check(folder, theirs, pieces, config)
        ours = {v: k for k, v in safetensors.NAMES.items()}
        dtypes = {p.ours: ours[theirs[p.theirs][1].dtype] for p in pieces}
        entries = [entry_of("weights", held, dtypes[held.name]) for held in params]
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_name.setdefault(f"weights/{piece.ours}", []).append(piece)

        def fill(name: str, first: int, room: Tensor) -> None:
            """Read rows of a tensor of ours, from `first` on."""
            for p in by_name[name]:
                low, high = max(p.first, first), min(p.last, first + len(room))
                if low < high:
                    _read_rows(*theirs[p.theirs], p, low - p.first, room[low - first : high - first])

        made = write_streamed(out, entries, Job(model=config).to_dict(), fill, progress, image_bytes)
    _keep_assets(folder, out)
    return made


def _known(folder: Path) -> tuple[ModelConfig, Sequence[Weight]]:
    name, config = config_in(folder)
    return config, table_of(ARCHITECTURES[name].model_type, config)


def _own_table(config: ModelConfig) -> Sequence[Weight]:
    table = load_family(config.family).weights
    if not table:
        raise UserError(
            "the family has no table of the names that its tensors have elsewhere",
            field="model.family",
            value=config.family,
            remedy="give Family(weights=(phalanx.Weight(theirs, ours), ...)); docs/custom-models.md",
        )
    return table


def _read_rows(file: File, slot: Slot, piece: Piece, first: int, room: Tensor) -> None:
    """Read rows of a piece, from `first` on."""
    if not piece.transpose:
        row_bytes = room[0].numel() * room.element_size()
        file.read_into(slot.start + (piece.at + first) * row_bytes, bytes_of(room))
        return
    rows, cols = piece.shape
    width = rows * room.element_size()  # of a stored row
    step = max(1, IMAGE_BYTES // 8 // width)
    for start in range(0, cols, step):
        block = torch.empty(min(step, cols - start), rows, dtype=room.dtype)
        file.read_into(slot.start + start * width, bytes_of(block))
        at = piece.at + first
        room[:, start : start + len(block)] = block[:, at : at + len(room)].t()


def _keep_assets(folder: Path, out: Store) -> None:
    """Copy the files that are not weights, and remove those of another model."""
    assets = _assets(Folder(folder))
    for name in KEPT:
        if name in assets:
            out.write(f"{ASSETS}/{name}", assets[name])
        else:
            with contextlib.suppress(FileNotFoundError):
                out.remove(f"{ASSETS}/{name}")


def _open_all(folder: Path, stack: contextlib.ExitStack) -> Theirs:
    """Map every tensor's name to its place, in the files that the index names or in all there are."""
    index = folder / INDEX
    if index.exists():
        table = read_json(index, "fetch it again")
        wanted = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(wanted, dict) or not all(_is_plain(name) for name in wanted.values()):
            what = "its weight_map does not say for each tensor in which file of this folder it is"
            raise UserError(what, field="file", value=str(index), remedy="fetch it again")
        names = sorted(set(wanted.values()))
    else:
        names = [SINGLE] if (folder / SINGLE).exists() else sorted(p.name for p in folder.glob("*.safetensors"))
        wanted = None
    if not names:
        remedy = "save it with save_pretrained(…, safe_serialization=True): files of pickles are never read"
        raise UserError("it has no *.safetensors", field="source", value=str(folder), remedy=remedy)
    found: Theirs = {}
    for name in names:
        try:
            file = stack.enter_context(File(folder / name))
        except FileNotFoundError:
            what = f"the file is missing, and {INDEX} names it"
            raise UserError(what, field="file", value=str(folder / name), remedy="fetch all files") from None
        for tensor, slot in file.tensors.items():
            if wanted is not None and wanted.get(tensor) != name:
                what = f"tensor {tensor!r} is in it, but {INDEX} has it in {wanted.get(tensor)}"
                raise UserError(what, field="file", value=str(file.path), remedy="fetch the index and its files again")
            if tensor in found:
                what = f"tensor {tensor!r} is in it, and in {found[tensor][0].path.name} as well"
                raise UserError(what, field="file", value=str(file.path), remedy="remove the file that is too much")
            found[tensor] = file, slot
    return found


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name


def _check(folder: Path, theirs: Theirs, pieces: list[Piece], config: ModelConfig) -> None:
    """Check that no tensor is missing or left over, and that each has the expected shape and a known precision."""

    def refuse(what: str, remedy: str) -> NoReturn:
        raise UserError(what, field="source", value=str(folder), remedy=remedy)

    dtypes: dict[str, str] = {}
    for piece in pieces:
        if piece.theirs not in theirs:
            remedy = "fetch all files; experts must be saved one by one, as save_pretrained does by default"
            refuse(f"tensor {piece.theirs!r} is missing", remedy)
        slot = theirs[piece.theirs][1]
        if slot.shape != piece.stored_shape:
            what = f"tensor {piece.theirs!r} has the shape {slot.shape} instead of {piece.stored_shape}"
            refuse(what, "correct config.json, or fetch the files that belong to it")
        if slot.dtype not in safetensors.NAMES.values():
            remedy = f"save it in one of {', '.join(safetensors.NAMES.values())}"
            refuse(f"tensor {piece.theirs!r} is in {slot.dtype}", remedy)
        if dtypes.setdefault(piece.ours, slot.dtype) != slot.dtype:
            refuse(f"the experts of {piece.ours!r} are not all in the same precision", "save them in one")
    left = set(theirs) - {piece.theirs for piece in pieces}
    if config.tied and HEAD in left:
        if not _equal(theirs[HEAD], theirs[EMBEDDING]):
            what = f"tie_word_embeddings is true, but {HEAD!r} differs from {EMBEDDING!r}"
            refuse(what, "set tie_word_embeddings to false in config.json")
        left.remove(HEAD)
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}  # follows from rope_theta
    if left:
        few = ", ".join(sorted(left)[:3])
        refuse(f"{len(left)} tensors have no place in the {config.family} family: {few}", NO_FAMILY)


def _equal(a: tuple[File, Slot], b: tuple[File, Slot], step: int = 1 << 24) -> bool:
    if a[1][:2] != b[1][:2]:
        return False
    size = a[1].stop - a[1].start
    for at in range(0, size, step):
        rooms = [bytearray(min(step, size - at)) for _ in range(2)]
        for (file, slot), room in zip((a, b), rooms, strict=True):
            file.read_into(slot.start + at, memoryview(room))
        if rooms[0] != rooms[1]:
            return False
    return True


# -- out


def write(
    reader: Reader,
    folder: Path,
    dtype: str = "",
    max_shard_bytes: float = 5e9,
    progress: OnProgress = ignore,
    like: Path | None = None,
) -> None:
    """Write a folder that AutoModelForCausalLM loads. `dtype` is bf16 or fp32; "": as the weights are stored. `like`:
    the folder from which it takes the tokenizer and token ids; None: the assets beside the checkpoint, if there are
    any."""
    if dtype and dtype not in DTYPES:
        raise UserError("unknown precision", field="dtype", value=dtype, remedy=f"use one of {', '.join(DTYPES)}")
    config = config_of(reader)
    assets = _assets(Folder(like)) if like else _assets(reader.store, f"{ASSETS}/")
    known = config.family in ("dense", "moe", "image")
    name = architecture_of(config) if known else ""
    table = table_of(ARCHITECTURES[name].model_type, config) if known else _own_table(config)
    stored = {e.held.name: getattr(torch, e.dtype) for e in reader.manifest.entries}
    tensors = _by_tensor(pieces_of(params_of(config), table, config.family))
    dtypes = {n: DTYPES[dtype] if dtype else stored[f"weights/{some[0].ours}"] for n, some in tensors.items()}
    shards = _shards(tensors, dtypes, max_shard_bytes)
    total = sum(_size(tensors[n], dtypes[n]) for n in tensors)
    done = 0

    def data(names: list[str]) -> Iterator[memoryview]:
        nonlocal done
        for n in names:
            rows = [read_rows(reader, f"weights/{p.ours}", p.first, p.last).to(dtypes[n]) for p in tensors[n]]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            yield bytes_of((whole.t() if tensors[n][0].transpose else whole).contiguous())
            done += _size(tensors[n], dtypes[n])
            progress(done, total)

    with new_folder(folder) as near:
        weight_map = {}
        for i, names in enumerate(shards):
            file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            listed = [(n, safetensors.NAMES[dtype_name(dtypes[n])], tensors[n][0].stored_shape) for n in names]
            safetensors.write(near / file, listed, data(names))
            weight_map.update(dict.fromkeys(names, file))
        if len(shards) > 1:
            _write_json(near / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for each, content in assets.items():
            (near / each).write_bytes(content)
        if known:
            widest = max(set(dtypes.values()), key=lambda d: d.itemsize)
            context = config.context or reader.manifest.job.get("train", {}).get("seq_len", 2048)
            table_out = config_out(config, name, dtype_name(widest), context)
            _write_json(near / CONFIG, table_out | _token_ids(assets))


def _assets(store: Store, folder: str = "") -> dict[str, bytes]:
    found = {}
    for name in KEPT:
        with contextlib.suppress(FileNotFoundError):
            found[name] = store.read(folder + name)
    return found


def _token_ids(assets: dict[str, bytes]) -> dict[str, Any]:
    """Return the ids that begin, end and pad a text, as the original folder has them."""
    try:
        table = json.loads(assets.get(CONFIG, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not JSON: {error}", field="file", value=CONFIG, remedy="fetch it again") from None
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: table[name] for name in names if isinstance(table, dict) and name in table}


def _by_tensor(pieces: list[Piece]) -> dict[str, list[Piece]]:
    """Group the pieces by tensor of theirs, in the order of its rows."""
    out: dict[str, list[Piece]] = {}
    for piece in pieces:
        out.setdefault(piece.theirs, []).append(piece)
    for some in out.values():
        some.sort(key=lambda p: p.at)
    return out


def _size(some: list[Piece], dtype: torch.dtype) -> int:
    return math.prod(some[0].shape) * dtype.itemsize


def _shards(tensors: dict[str, list[Piece]], dtypes: dict[str, torch.dtype], limit: float) -> list[list[str]]:
    """Split the tensors in order. No shard exceeds the limit, unless it is a single tensor."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, some in tensors.items():
        size = _size(some, dtypes[name])
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
