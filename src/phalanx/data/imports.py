"""Reads data that other tools have made: Megatron's `.bin` with its `.idx`, token files without a header, numpy's
`.npy` and `.npz`. Files are read in blocks; none is ever held whole.

An index (`.idx`) is, little-endian: 9 bytes `MMIDIDX\\0\\0`, version 1 as u64, the type's code as u8, the numbers of
sequences and of document borders as u64; then the length of each sequence (i32), the first byte of each in the `.bin`
(i64), and for each border the sequence at which a document begins (i64), the first 0, the last past the end.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import Field
from phalanx.data.tokenizer import Vocabulary

BLOCK_ITEMS = 1 << 20
BLOCK_BYTES = 8 << 20
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


def token_blocks(path: Path, vocabulary: Vocabulary, dtype: str = "") -> Iterator[np.ndarray]:
    """Yield the ids of a file in blocks, in the type of the vocabulary. `dtype`: the type in a file that has no
    index."""
    if path.suffix == ".idx" or (path.suffix != ".npy" and path.with_suffix(".idx").exists()):
        blocks = _megatron(path.with_suffix(".bin"), path.with_suffix(".idx"), vocabulary.eos)
    elif path.suffix == ".npy":
        blocks = _npy_tokens(path)
    else:
        blocks = _raw(path, dtype)
    at = 0
    for block in blocks:
        wrong = (block < 0) | (block >= vocabulary.size)
        if wrong.any():
            first = int(np.argmax(wrong))
            raise UserError(
                f"{path}: id {int(block[first])} at {at + first} is not in [0, {vocabulary.size})",
                field="--vocab-size",
                value=vocabulary.size,
                remedy="name the tokenizer that made it, or its true size; is --dtype right?",
            )
        at += len(block)
        yield block.astype(vocabulary.dtype)


def record_blocks(inputs: Sequence[tuple[str, Path]]) -> tuple[tuple[Field, ...], Iterator[np.ndarray]]:
    """Return the fields, and the records in blocks. They come from `.npz` files, one after the other, whose arrays are
    the fields; or from `.npy` files, each of which is the field that it is labelled with."""
    if all(path.suffix == ".npz" for _, path in inputs):
        members = [{name: (path, name) for name in _names(path)} for _, path in inputs]
    elif all(path.suffix == ".npy" for _, path in inputs):
        members = [{name or "data": (path, "") for name, path in inputs}]
        if len(members[0]) != len(inputs):
            remedy = "name each field: patches=FILE.npy target=OTHER.npy"
            raise UserError("two arrays are the same field", field="FILE", value=str(inputs[0][1]), remedy=remedy)
    else:
        paths = ", ".join(str(path) for _, path in inputs)
        raise UserError("records are .npy or .npz files", field="FILE", value=paths, remedy="name only one kind")
    kinds = []
    for group in members:
        with ExitStack() as stack:
            arrays = {name: _Rows(*member, stack) for name, member in group.items()}
            kinds.append(tuple(Field(name, a.dtype.str, a.shape[1:]) for name, a in sorted(arrays.items())))
            lengths = {name: a.shape[0] for name, a in arrays.items()}
            if len(set(lengths.values())) != 1:
                remedy = "every field needs one value for each record"
                message = f"its arrays are of different lengths: {lengths}"
                raise UserError(message, field="FILE", value=str(inputs[0][1]), remedy=remedy)
    for (_, path), kind in zip(inputs, kinds, strict=False):
        if kind != kinds[0]:
            message = f"its fields are {_told(kind)}, those of {inputs[0][1]} {_told(kinds[0])}"
            raise UserError(message, field="FILE", value=str(path), remedy="import them into two data sets")
    if [(f.name, f.shape) for f in kinds[0]] == [("tokens", ())]:
        remedy = "leave --records out, or name the field otherwise"
        raise UserError("a field 'tokens' is a stream of ids", field="FILE", value=str(inputs[0][1]), remedy=remedy)
    return kinds[0], _records(members, kinds[0])


def _told(fields: Iterable[Field]) -> str:
    return ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in fields)


def _records(members: list[dict[str, tuple[Path, str]]], fields: tuple[Field, ...]) -> Iterator[np.ndarray]:
    dtype = np.dtype([(f.name, f.dtype, f.shape) for f in fields])
    step = max(1, BLOCK_BYTES // dtype.itemsize)
    for group in members:
        with ExitStack() as stack:
            arrays = {name: _Rows(*member, stack) for name, member in group.items()}
            count = next(iter(arrays.values())).shape[0]
            for first in range(0, count, step):
                out = np.empty(min(step, count - first), dtype)
                for name, rows in arrays.items():
                    out[name] = rows.read(len(out))
                yield out


def _names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None


class _Rows:
    """The rows of an array, read in order: from a `.npy`, or from a member of a `.npz`, compressed or not."""

    def __init__(self, path: Path, member: str, stack: ExitStack):
        self.path = path
        try:
            if member:
                archive = stack.enter_context(zipfile.ZipFile(path))
                self._file: IO[bytes] = stack.enter_context(archive.open(f"{member}.npy"))
            else:
                self._file = stack.enter_context(path.open("rb"))
            version = np.lib.format.read_magic(self._file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, by_column, dtype = header(self._file)
        except Exception as error:  # numpy evaluates the header as Python, which raises many kinds of errors
            raise _unreadable(path, error) from None
        self._stored, self.dtype = dtype, dtype.newbyteorder("<")
        if (by_column and len(self.shape) > 1) or dtype.hasobject or dtype.fields or not self.shape:
            remedy = "save it by rows (np.ascontiguousarray), of plain numbers, with one row for each item"
            message = f"{path} {member}: an array of {dtype} {self.shape} cannot be read by rows"
            raise UserError(message, field="FILE", value=str(path), remedy=remedy)

    def read(self, count: int) -> np.ndarray:
        shape = (count, *self.shape[1:])
        size = self._stored.itemsize * math.prod(shape)
        try:
            data = self._file.read(size)
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise _unreadable(self.path, error) from None
        if len(data) != size:
            raise _unreadable(self.path, "it ends too early")
        return np.frombuffer(data, self._stored).reshape(shape)


def _npy_tokens(path: Path) -> Iterator[np.ndarray]:
    with ExitStack() as stack:
        rows = _Rows(path, "", stack)
        if len(rows.shape) != 1 or rows.dtype.kind not in "iu":
            message = f"{path} is an array of {rows.dtype} {rows.shape}, not of ids"
            remedy = "save the ids as one row of integers, or import it with --records"
            raise UserError(message, field="FILE", value=str(path), remedy=remedy)
        for first in range(0, rows.shape[0], BLOCK_ITEMS):
            yield rows.read(min(BLOCK_ITEMS, rows.shape[0] - first))


def _raw(path: Path, dtype: str) -> Iterator[np.ndarray]:
    if dtype not in INTEGERS:
        remedy = f"say what its ids are: --dtype {'|'.join(INTEGERS)}"
        raise UserError(f"{path} does not say of what type its ids are", field="--dtype", value=dtype, remedy=remedy)
    ids = _map(path, np.dtype(dtype).newbyteorder("<"))
    for first in range(0, len(ids), BLOCK_ITEMS):
        yield ids[first : first + BLOCK_ITEMS]


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size % dtype.itemsize:
            remedy = "is --dtype right? is the file whole?"
            message = f"{path} has {size} bytes, which no number of {dtype} fills"
            raise UserError(message, field="--dtype", value=str(dtype), remedy=remedy)
        return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
    except OSError as error:
        raise _unreadable(path, error) from None


def _megatron(data: Path, index: Path, eos: int) -> Iterator[np.ndarray]:
    """Yield the ids of documents, adding `eos` to each that does not end with it."""
    if eos < 0:
        remedy = "say which id ends a document: --tokenizer, or --eos-id"
        raise UserError("its documents could not be told apart", field="FILE", value=str(data), remedy=remedy)
    dtype, lengths, pointers, borders = _index(index)
    ids = _map(data, dtype)
    first, last = 0, eos  # `last`: the previous id, `eos` where a document may begin
    while first < len(lengths):
        upto = np.cumsum(lengths[first : first + BLOCK_ITEMS], dtype=np.int64)
        count = max(1, int(np.searchsorted(upto, BLOCK_ITEMS, "right")))
        sizes, starts = np.asarray(lengths[first : first + count], np.int64), pointers[first : first + count]
        if (sizes < 0).any() or (starts < 0).any() or (starts % dtype.itemsize).any():
            raise _unreadable(index, "it has a sequence that cannot be")
        starts = np.asarray(starts, np.int64) // dtype.itemsize
        if int((starts + sizes).max()) > len(ids):
            raise _unreadable(data, f"it ends before the sequences of {index.name} do")
        # Sequences that end a document: the one before each border.
        here = slice(np.searchsorted(borders, first + 1), np.searchsorted(borders, first + count, "right"))
        closing = np.unique(np.asarray(borders[here], np.int64)) - 1 - first
        for block in _documents(ids, starts, sizes, closing, eos, last):
            last = int(block[-1])
            yield block
        first += count


def _documents(
    ids: np.ndarray, starts: np.ndarray, sizes: np.ndarray, closing: np.ndarray, eos: int, last: int
) -> Iterator[np.ndarray]:
    """Yield the ids of consecutive sequences. Those in `closing` end a document."""
    upto = np.cumsum(sizes)
    ends = np.unique(upto[closing])
    if len(ends) and ends[0] == 0:  # an empty sequence ends a document
        if last != eos:
            yield np.array([eos])
        ends = ends[1:]
    if len(sizes) == 1:  # it may be longer than a block
        start, end = int(starts[0]), int(starts[0] + sizes[0])
        for at in range(start, end, BLOCK_ITEMS):
            yield np.asarray(ids[at : min(end, at + BLOCK_ITEMS)])
        if len(ends) and ids[end - 1] != eos:
            yield np.array([eos])
    elif upto[-1]:
        if (starts[1:] == starts[:-1] + sizes[:-1]).all():
            block = np.asarray(ids[int(starts[0]) : int(starts[-1] + sizes[-1])])
        else:
            block = np.concatenate([ids[s : s + n] for s, n in zip(starts.tolist(), sizes.tolist(), strict=True)])
        yield np.insert(block.astype(np.int64), ends[block[ends - 1] != eos], eos)


def _index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    try:
        with open(path, "rb") as f:
            head = f.read(34)
        if len(head) < 34 or not head.startswith(_MAGIC):
            raise ValueError("it is not an index of Megatron's (MMIDIDX)")
        version, code, sequences, borders = struct.unpack("<QBQQ", head[9:])
        if version != 1 or code not in _CODES:
            raise ValueError(f"version {version} and type {code} are not known here")
        sizes = 4 * sequences, 8 * sequences, 8 * borders
        if path.stat().st_size < 34 + sum(sizes):
            raise ValueError("it ends too early")
        whole = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    parts, at = [], 34
    for size, dtype in zip(sizes, ("<i4", "<i8", "<i8"), strict=True):
        parts.append(whole[at : at + size].view(dtype))
        at += size
    if not borders or parts[2][0] != 0 or parts[2][-1] != sequences:
        raise _unreadable(path, "its documents do not cover its sequences")
    return np.dtype(_CODES[code]), parts[0], parts[1], parts[2]


def _unreadable(path: Path, error: object) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    message, remedy = f"cannot be read: {reason}", "name a whole file; phalanx data import --help lists the kinds"
    return UserError(message, field="FILE", value=str(path), remedy=remedy)
