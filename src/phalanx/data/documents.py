"""Reads documents from files: text (a file is a document), JSON lines, both also as .gz and .zst, and Parquet. `plan`
cuts the inputs into parts that depend on the files alone; `read` yields the documents of a part. So the results, in
order, are the same for any number of workers. What is left out is counted; what cannot be read is refused."""

from __future__ import annotations

import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.data.tokenizer import INSTALL

STDLIB = "python-stdlib"
EMPTY, REPLACED = "empty document", "replaced character"
PART_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_KINDS |= {f".{name}.{how}": f"jsonl.{how}" for name in ("jsonl", "ndjson") for how in ("gz", "zst")}
_KINDS |= {f".json.{how}": f"json.{how}" for how in ("gz", "zst")}
_KINDS |= {f".txt.{how}": f"txt.{how}" for how in ("gz", "zst")}
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z", ".rar", ".tar", ".tgz")
_MAGIC = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\x00)|(?P<zip>PK\x03\x04)|"
    rb"(?P<zstd>\x28\xb5\x2f\xfd)|(?P<Parquet>PAR1)"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range [start, end) of a file: bytes, or row groups of a Parquet file."""

    path: str
    kind: str
    start: int
    end: int
    stamp: tuple[int, int]  # the file's size and modification time, which must not change
    weight: int  # bytes, for the progress


@dataclass(frozen=True, slots=True)
class Part:
    source: str  # its label
    pieces: tuple[Piece, ...]

    @property
    def weight(self) -> int:
        return sum(p.weight for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Text:
    """A document, or the part of it that lies in one piece."""

    data: bytes
    ends: bool


def files(source: str, left_out: Iterable[Path] = (), counts: Counter[str] | None = None) -> list[Path]:
    """List the files of a source, in an order that does not depend on the file system. `left_out`: folders inside it to
    skip, such as the records of runs. `counts` counts what else is left out."""
    counts = Counter() if counts is None else counts
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = [p for p in _walk(source, root, {"site-packages", "test"}, set(), counts) if p.suffix == ".py"]
        counts["broken link"] += sum(not p.is_file() for p in found)  # part of the system, so the user cannot fix it
        return [p for p in found if p.is_file()]
    if source and Path(source).is_dir():
        root = Path(source).resolve()
        return _walk(source, root, set(), {f.resolve() for f in left_out if root in f.resolve().parents}, counts)
    return [Path(source)]


def _walk(source: str, root: Path, names: set[str], folders: set[Path], counts: Counter[str]) -> list[Path]:
    """List all files except those below folders with these names, or below these folders. Links to folders are not
    followed, because they may form a cycle."""

    def refuse(error: OSError) -> None:
        raise refusal(source, f"cannot read the folder {error.filename}: {error.strerror}") from error

    found = []
    for folder, inside, files in os.walk(root, onerror=refuse):
        inside[:] = [name for name in inside if name not in names and Path(folder, name) not in folders]
        counts.update(f"the linked folder {path}" for name in inside if (path := Path(folder, name)).is_symlink())
        found += [Path(folder, name) for name in files]
    return sorted(found)


def told(counts: Counter[str]) -> str:
    """Describe in words what was left out."""
    words = [key if key.startswith("the ") else f"{n:,} {key}{'s' * (n > 1)}" for key, n in sorted(counts.items()) if n]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def plan(
    inputs: Iterable[tuple[str, str]],
    field: str,
    raw: bool,
    left_out: Iterable[Path] = (),
    counts: Counter[str] | None = None,
    force: bool = False,
) -> list[Part]:
    """Cut all inputs (label, path) into parts, those of a label together, in the order of the inputs. `raw`: a text may
    be cut anywhere. `counts` counts what is left out. `force`: read binary files as text."""
    by_label: dict[str, list[str]] = {}
    for label, path in inputs:
        by_label.setdefault(label, []).append(path)
    skip, parts = list(left_out), []
    counts = Counter() if counts is None else counts
    for label, paths in by_label.items():
        gathered: list[Piece] = []
        weight = 0
        for path in paths:
            found = files(path, skip, counts)
            for piece in (piece for file in found for piece in _pieces(path, file, field, raw, counts, force)):
                gathered.append(piece)
                weight += piece.weight
                if weight >= PART_BYTES:
                    parts.append(Part(label, tuple(gathered)))
                    gathered, weight = [], 0
        if gathered:
            parts.append(Part(label, tuple(gathered)))
    return parts


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _pieces(source: str, path: Path, field: str, raw: bool, counts: Counter[str], force: bool) -> Iterator[Piece]:
    if path.exists() and not path.is_file():
        raise refusal(source, f"{path} is neither a file nor a folder")  # reading a pipe may never end
    try:
        with open(path, "rb") as f:  # fail now if it cannot be read
            stamp, head = _stamp(os.fstat(f.fileno())), f.read(16)
    except OSError as error:
        raise refusal(source, f"cannot read {path}: {error.strerror}") from error
    size = stamp[0]
    kind = next((kind for ending, kind in _KINDS.items() if path.name.lower().endswith(ending)), "txt")
    if kind.endswith(".zst"):
        _zstandard(str(path))
    if kind in ("txt", "jsonl", "json"):
        _check_plain(path, head)
    if kind.startswith(("txt", "json")) and not kind.startswith("jsonl") and size:
        begins = _beginning(str(path), kind)
        if kind.startswith("json"):  # one document, or one per line
            kind = kind.replace("json", "jsonl" if _is_object(begins.partition(b"\n")[0]) else "txt")
        if b"\0" in begins and not force:
            remedy = "leave it out, or have it read as text: `phalanx data build --force` makes a data set of it"
            raise UserError(f"{path} is binary: it has a zero byte", field="SRC", value=str(path), remedy=remedy)
    if not size:
        counts["empty file"] += 1
    elif kind == "parquet":
        yield from _row_groups(str(path), stamp, field)
    elif kind == "jsonl" or (kind == "txt" and raw):
        for start in range(0, size, PART_BYTES):
            end = min(size, start + PART_BYTES)
            yield Piece(str(path), kind, start, end, stamp, end - start)
    else:
        yield Piece(str(path), kind, 0, size, stamp, size)


def _beginning(path: str, kind: str) -> bytes:
    """Return the first block, unpacked. Damage is reported when the whole file is read."""
    try:
        if kind.endswith((".gz", ".zst")):
            return next(_gunzip(path) if kind.endswith(".gz") else _unzstd(path), b"")
        with open(path, "rb") as file:
            return file.read(BLOCK_BYTES)
    except (OSError, EOFError, zlib.error, UserError):
        return b""


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _check_plain(path: Path, head: bytes) -> None:
    """Refuse a packed file that would be read as it is."""
    found = _MAGIC.match(head)
    how = found.lastgroup if found else ""
    if how == "Parquet":
        raise UserError(f"{path} is Parquet", field="SRC", value=str(path), remedy="let its name end in .parquet")
    if how or path.suffix.lower() in _PACKED:
        remedy = "unpack it, or leave it out; read as they are: .txt.gz, .txt.zst, .jsonl.gz, .jsonl.zst"
        message = f"{path} is packed ({how or path.suffix}) and would be read as text"
        raise UserError(message, field="SRC", value=str(path), remedy=remedy)


def _row_groups(path: str, stamp: tuple[int, int], field: str) -> Iterator[Piece]:
    file = _parquet(path)
    if field not in file.schema_arrow.names:
        known = ", ".join(file.schema_arrow.names)
        raise UserError(f"{path} has no column {field!r}", field="--field", value=field, remedy=f"it has {known}")
    kind = file.schema_arrow.field(field).type
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary<") else kind
    if str(kind) not in ("string", "large_string", "string_view"):
        message = f"{path}: the column is of type {kind}, not text"
        raise UserError(message, field="--field", value=field, remedy="name a column of strings")
    start = weight = 0
    for g in range(file.num_row_groups):
        weight += file.metadata.row_group(g).total_byte_size
        if weight >= PART_BYTES or g + 1 == file.num_row_groups:
            yield Piece(path, "parquet", start, g + 1, stamp, weight)
            start, weight = g + 1, 0


def read(
    part: Part, field: str, raw: bool, limit: int | None = None, counts: Counter[str] | None = None
) -> Iterator[tuple[Text, int]]:
    """Yield the non-empty texts of a part, up to `limit` bytes, each with the bytes of text up to its end. The last
    text may be cut: anywhere if `raw`, otherwise after a whole character. Its count is then `limit`. `counts` counts
    empty documents and replaced characters."""
    taken, counts = 0, Counter() if counts is None else counts
    for piece in part.pieces:
        for data, ends in _texts(piece, field, raw, counts):
            if not data:
                counts[EMPTY] += 1
                continue
            if limit is not None and taken + len(data) >= limit:
                data = data[: limit - taken]
                whole = data if raw else _whole_characters(data)
                yield Text(whole, bool(whole)), limit
                return
            taken += len(data)
            yield Text(data, ends), taken


def _texts(piece: Piece, field: str, raw: bool, counts: Counter[str]) -> Iterator[tuple[bytes, bool]]:
    path = piece.path
    try:
        if _stamp(os.stat(path)) != piece.stamp:
            raise UserError(f"{path} has changed while it was read", remedy="start again when nobody writes to it")
        if piece.kind == "txt":
            yield from _blocks(piece) if raw else _whole_text(path, Path(path).read_bytes())
        elif piece.kind == "parquet":
            yield from _rows(piece, field)
        elif piece.kind.startswith("txt"):
            yield from _last_ends(_unpacked(piece)) if raw else _whole_text(path, b"".join(_unpacked(piece)))
        else:
            for line, number in _jsonl(piece) if piece.kind == "jsonl" else _lines(piece):
                if line.strip():
                    yield _text_of(line, field, path, number, counts), True
    except (EOFError, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is None:  # how gzip reports that a file is not gzip
            raise _damaged(path, error) from None
        raise refusal(path, f"cannot read {path}: {error.strerror}") from error


def _blocks(piece: Piece) -> Iterator[tuple[bytes, bool]]:
    with open(piece.path, "rb") as f:
        f.seek(piece.start)
        for start in range(piece.start, piece.end, BLOCK_BYTES):
            end = min(piece.end, start + BLOCK_BYTES)
            yield f.read(end - start), end == piece.stamp[0]


def _last_ends(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    last = b""
    for block in filter(None, blocks):
        if last:
            yield last, False
        last = block
    yield last, True


def _whole_text(path: str, data: bytes) -> Iterator[tuple[bytes, bool]]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte {data[error.start]:#04x} at {error.start}"
        raise UserError(message, remedy="convert it, leave it out, or build with --tokenizer byte") from None
    yield data, True


def _whole_characters(data: bytes) -> bytes:
    """Drop an incomplete character at the end."""
    last = len(data) - 1
    while last > 0 and data[last] & 0xC0 == 0x80:
        last -= 1
    lead = data[last] if data else 0
    width = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return data if last + width <= len(data) else data[:last]


class _Line:
    """The number of a line, counted only when it is printed: a piece does not know how many lines precede it."""

    def __init__(self, piece: Piece, offset: int = 0, number: int = 0):
        self.piece, self.offset, self.number = piece, offset, number

    def __str__(self) -> str:
        if not self.number:
            with open(self.piece.path, "rb") as f:
                left, lines = self.offset, 1
                while left and (block := f.read(min(left, BLOCK_BYTES))):
                    lines, left = lines + block.count(b"\n"), left - len(block)
            return str(lines)
        return str(self.number)


def _jsonl(piece: Piece) -> Iterator[tuple[bytes, _Line]]:
    """Yield the lines of a piece. A line belongs to the piece in which it begins."""
    with open(piece.path, "rb") as f:
        if piece.start:
            f.seek(piece.start - 1)
            f.readline()
        at = f.tell()
        while at < piece.end and (line := f.readline()):
            yield line, _Line(piece, offset=at)
            at += len(line)


def _unpacked(piece: Piece) -> Iterator[bytes]:
    return _gunzip(piece.path) if piece.kind.endswith(".gz") else _unzstd(piece.path)


def _lines(piece: Piece) -> Iterator[tuple[bytes, _Line]]:
    number, rest = 1, b""
    for block in _unpacked(piece):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line, _Line(piece, number=number)
            number += 1
    if rest:
        yield rest, _Line(piece, number=number)


def _gunzip(path: str) -> Iterator[bytes]:
    import gzip

    with gzip.open(path) as f:
        while block := f.read(BLOCK_BYTES):
            yield block


def _unzstd(path: str) -> Iterator[bytes]:
    """Unpack frame by frame, because the library's own reader does not notice that a file is truncated."""
    zstandard = _zstandard(path)
    maker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, inside = maker.decompressobj(), False
    with open(path, "rb") as f:
        while block := f.read(BLOCK_BYTES // 4):
            while block:
                try:
                    out = frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise _damaged(path, error) from None
                yield out
                block, inside = frame.unused_data, not frame.eof
                if frame.eof:
                    frame = maker.decompressobj()
    if inside:
        raise _damaged(path, "it ends in the middle of a frame")


def _zstandard(path: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: the package zstandard is not installed", remedy=INSTALL) from None
    return zstandard


def _text_of(line: bytes, field: str, path: str, number: _Line, counts: Counter[str]) -> bytes:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} (character {error.pos})"
    except ValueError as error:
        reason = str(error)
    except RecursionError:
        reason = "it is nested too deeply"
    else:
        if isinstance(found, dict) and isinstance(found.get(field), str):
            text = found[field]
            try:
                return text.encode()
            except UnicodeEncodeError:  # half a surrogate pair
                counts[REPLACED] += sum(0xD800 <= ord(c) < 0xE000 for c in text)
                return text.encode("utf-8", "replace")
        if isinstance(found, dict) and field not in found:
            message = f"{path}, line {number}: there is no field {field!r}"
            remedy = f"it has {', '.join(map(str, found))[:200]}" if found else "mend the line"
            raise UserError(message, field="--field", value=field, remedy=remedy)
        reason = f"{field!r} is not a text" if isinstance(found, dict) else "it is not an object"
    raise UserError(f"{path}, line {number}: {reason}", remedy="mend the line, or leave it out")


def _rows(piece: Piece, field: str) -> Iterator[tuple[bytes, bool]]:
    import pyarrow as pa

    file, groups = _parquet(piece.path), range(piece.start, piece.end)
    row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=[field], use_threads=False):
            for text in batch.column(0).to_pylist():
                if text is None:
                    message = f"{piece.path}, row {row}: {field!r} is null"
                    raise UserError(message, remedy="mend the row, or leave it out")
                yield text.encode(), True
                row += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(piece.path, error) from None


def _parquet(path: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path}: the package pyarrow is not installed", remedy=INSTALL) from None
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: object) -> UserError:
    message = f"{path} is damaged: {' '.join(str(error).split())[:200]}"
    return UserError(message, remedy="get the file again, or leave it out")


def refusal(source: str, message: str) -> UserError:
    return UserError(message, field="SRC", value=source, remedy="name a readable text file, or a folder of them")
