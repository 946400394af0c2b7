"""Reads and writes the safetensors format: 8 bytes with the length of the header, the header in JSON, then the tensors'
bytes without a gap (github.com/huggingface/safetensors, README, "Format"). No header is trusted before it has been
checked against the file's size. Needs no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from phalanx.core.errors import UserError

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # ours -> theirs
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
REMEDY = "fetch or save the file again: it is damaged, or was not written to its end"


class Slot(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class File:
    """A file that is open for reading, with its header checked."""

    def __init__(self, path: Path):
        self.path, self._fd = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, start: int, room: memoryview) -> None:
        done = 0
        while done < len(room):
            got = os.preadv(self._fd, [room[done:]], start + done)
            if not got:
                self._refuse(f"it ends after {start + done} bytes")
            done += got

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(what, field="file", value=str(self.path), remedy=REMEDY)

    def _read_header(self) -> dict[str, Slot]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            self._refuse(f"it has {size} bytes, too few for a safetensors file")
        length = bytearray(8)
        self.read_into(0, memoryview(length))
        num = int.from_bytes(length, "little")
        if num > min(MAX_HEADER_BYTES, size - 8):
            self._refuse(f"its header would have {num} bytes, but the file has {size}")
        text = bytearray(num)
        self.read_into(8, memoryview(text))
        try:
            header = json.loads(text.decode(), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is not JSON: {error}")
        if not isinstance(header, dict):
            self._refuse("its header is not a table of tensors")
        header.pop("__metadata__", None)
        tensors = {name: self._slot(name, said, 8 + num) for name, said in header.items()}
        self._check_no_gap(tensors, 8 + num, size)
        return tensors

    def _slot(self, name: str, said: Any, base: int) -> Slot:
        if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"its header says {said!r} of {name!r}, instead of dtype, shape and data_offsets")
        dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self._refuse(f"tensor {name!r} has the dtype {dtype!r}, which is none of {', '.join(ITEM_BYTES)}")
        if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            self._refuse(f"tensor {name!r} has the shape {shape!r} and the offsets {offsets!r}")
        start, stop = offsets
        want = math.prod(shape) * ITEM_BYTES[dtype]
        if stop - start != want:
            self._refuse(f"tensor {name!r} has {stop - start} bytes, but {dtype} of shape {shape} needs {want}")
        return Slot(dtype, tuple(shape), base + start, base + stop)

    def _check_no_gap(self, tensors: dict[str, Slot], base: int, size: int) -> None:
        at = base
        for name, slot in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if slot.start != at:
                self._refuse(f"tensor {name!r} begins at byte {slot.start} instead of {at}")
            at = slot.stop
        if at != size:
            self._refuse(f"it has {size} bytes, but its tensors end at {at}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def write(path: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]], data: Iterable[memoryview]) -> None:
    """Write a new file of (name, dtype, shape) and, in the same order, their bytes. It is not synced to disk yet."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes, at = [], 0
    for name, dtype, shape in tensors:
        sizes.append(math.prod(shape) * ITEM_BYTES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + sizes[-1]]}
        at += sizes[-1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for size, piece in zip(sizes, data, strict=True):
            assert len(piece) == size, (len(piece), size)
            _write_all(file.fileno(), piece)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
