"""Writes, commits, reads and verifies the files of a checkpoint. A checkpoint exists once its manifest does, which is
written last; nothing is ever overwritten. Needs no torch."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np
import xxhash

from phalanx.core.checkpoint import (
    CHUNK_BYTES,
    MANIFEST,
    PAGE_BYTES,
    BadCheckpoint,
    Manifest,
    Unreadable,
    chunks,
    file_name,
    lineage_of,
    place_of,
)
from phalanx.core.errors import UserError
from phalanx.core.store import Folder, ObjectStore, Store, sync_folder

HASH_BYTES = 16
RUN_CHUNKS = 8  # per read
BUCKET_THREADS = 16
WRITE_BYTES = 8 << 20  # per write
UNREAD = "cannot be read: "  # marks a fault where the data may still exist
RETRY_S = (0.1, 0.4, 1.6, 6.4)  # pauses while a bucket does not answer


def hash_of(data: Any) -> bytes:
    return xxhash.xxh3_128_digest(data)


def hash_chunks(image: memoryview, start: int, stop: int) -> bytes:
    return b"".join(hash_of(image[a:b]) for a, b in chunks(start, stop))


# -- writing


def make_tail(header: dict[str, Any], rng: bytes, hashes: bytes) -> bytes:
    """Make the end of a file: a line that identifies it, then the hashes of the chunks before it."""
    line = json.dumps({**header, "rng": base64.b64encode(rng).decode()}, separators=(",", ":"))
    return line.encode() + b"\n" + hashes


def root_of(tail: bytes) -> str:
    return blake3.blake3(tail).hexdigest()


def write_file(store: Store, name: str, own: memoryview, tail: bytes) -> None:
    """Write a file durably: it is on the disk when this returns. Raise FileExistsError if it already exists."""
    if isinstance(store, Folder):
        _write_local(store.path / name, own, tail)
    else:
        assert isinstance(store, ObjectStore)
        pieces = [own[at : at + WRITE_BYTES] for at in range(0, len(own), WRITE_BYTES)]
        store.write_pieces(name, [*pieces, tail])


def _write_local(path: Path, own: memoryview, tail: bytes) -> None:
    """Bypass the page cache where the file system and the memory's address allow it, to save the trainer's cores."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # in one extent if the file system can
            os.posix_fallocate(fd, 0, len(own) + len(tail))
        with contextlib.suppress(OSError):
            _set_direct(fd, True)
        done = 0
        while done < len(own):
            try:
                done += os.pwrite(fd, own[done : done + WRITE_BYTES], done)
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(fd, False):
                    raise
        _set_direct(fd, False)
        done = 0
        while done < len(tail):
            done += os.pwrite(fd, tail[done:], len(own) + done)
        os.fsync(fd)
    finally:
        os.close(fd)


def _set_direct(fd: int, on: bool) -> bool:
    """Set or clear O_DIRECT; return whether that changed anything."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    if wanted != flags:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    return wanted != flags


def make_folder(store: Store, name: str) -> None:
    """Make the folder for a checkpoint's files. An object store needs none."""
    if isinstance(store, Folder):
        make_root(store.path)
        (store.path / name).mkdir(exist_ok=True)
        sync_folder(store.path)


def make_root(path: Path) -> None:
    """Make the folder of all checkpoints. If it is new, sync its parents too: its name, and those of parents that are
    just as new, must be on the disk."""
    if path.is_dir():
        return
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.parents:
        with contextlib.suppress(PermissionError):  # an unreadable one existed before
            sync_folder(parent)


def commit(store: Store, manifest: Manifest) -> None:
    """Make the checkpoint exist. Every file that the manifest names must already be on the disk."""
    if isinstance(store, Folder):
        sync_folder(store.path / manifest.name)  # the names of the files, before the name of the manifest
    body, target = manifest.to_json(), f"{manifest.name}/{MANIFEST}"
    data = root_of(body).encode() + b"\n" + body
    try:
        store.write(target, data, overwrite=False)
    except OSError as error:
        if store.is_local or not _is_there(store, target, data):
            raise error


def _is_there(store: Store, target: str, data: bytes) -> bool:
    """Return whether a bucket performed the write although its answer was lost."""
    try:
        return store.read(target) == data
    except OSError:
        return False


# -- reading


@dataclass(slots=True)
class File:
    """The verified tail of a rank's file."""

    name: str
    own_bytes: int
    header: dict[str, Any]
    rng: bytes
    hashes: bytes


class Request(NamedTuple):
    """A request to read bytes [start, stop) of a rank's own pieces into `room`. If `room` is narrower than the rows of
    `row_bytes`, only the columns that start at byte `first` and are as wide as `room` are wanted."""

    rank: int
    start: int
    stop: int
    room: np.ndarray  # (rows, bytes per row)
    row_bytes: int
    first: int = 0

    @property
    def is_whole(self) -> bool:
        return self.row_bytes == self.room.shape[1] and self.room.flags.c_contiguous

    def put(self, at: int, data: np.ndarray) -> None:
        """Copy in bytes of the file that start at `at`."""
        at -= self.start
        if self.is_whole:
            self.room.reshape(-1)[at : at + len(data)] = data
            return
        row, inside = divmod(at, self.row_bytes)
        if inside:  # the end of a row whose beginning is in another chunk
            size = min(self.row_bytes - inside, len(data))
            self._put_part(row, inside, data[:size])
            row, data = row + 1, data[size:]
        count = len(data) // self.row_bytes
        rows = data[: count * self.row_bytes].reshape(count, self.row_bytes)
        self.room[row : row + count] = rows[:, self.first : self.first + self.room.shape[1]]
        self._put_part(row + count, 0, data[count * self.row_bytes :])

    def _put_part(self, row: int, inside: int, data: np.ndarray) -> None:
        a, b = max(inside, self.first), min(inside + len(data), self.first + self.room.shape[1])
        if a < b:
            self.room[row, a - self.first : b - self.first] = data[a - inside : b - inside]


class Fault(NamedTuple):
    """Something wrong with a checkpoint. With `damage`, the bytes are not those that were written; otherwise they
    could not be read, which may be temporary."""

    text: str
    damage: bool

    @property
    def no_answer(self) -> bool:
        """Return whether the store did not answer, so that nothing is known to be missing."""
        return not self.damage and UNREAD in self.text

    @property
    def error(self) -> BadCheckpoint:
        return (BadCheckpoint if self.damage else Unreadable)(self.text)


class Reader:
    """Reads one committed checkpoint. It returns only verified data; otherwise it raises BadCheckpoint or
    Unreadable."""

    def __init__(self, store: Store, name: str, local_ranks: int = 1):
        """For a disk, split one thread per core (at most BUCKET_THREADS) among the `local_ranks` that read at the same
        time on this host. For a bucket, use BUCKET_THREADS in each rank: they mostly wait."""
        self.store, self.name = store, name
        cores = len(os.sched_getaffinity(0)) if store.is_local else BUCKET_THREADS
        self.threads = max(1, min(cores, BUCKET_THREADS) // (local_ranks if store.is_local else 1))
        self.manifest = read_manifest(store, name)
        self._files: dict[int, File] = {}

    def file(self, rank: int) -> File:
        if rank not in self._files:
            self._files[rank] = self._read_tail(rank)
        return self._files[rank]

    def _read_tail(self, rank: int) -> File:
        m, name = self.manifest, f"{self.name}/{file_name(rank)}"
        size, root = m.files[rank]
        own_bytes = m.plan(rank).own_bytes
        tail = bytes(self._range(name, own_bytes, size))
        if len(tail) != size - own_bytes:
            raise BadCheckpoint(f"{name}: has {own_bytes + len(tail)} bytes or fewer instead of {size}")
        if root_of(tail) != root:
            raise BadCheckpoint(f"{name}: its tail has the blake3 {root_of(tail)[:16]}… instead of {root[:16]}…")
        line, _, hashes = tail.partition(b"\n")
        header = json.loads(line)
        return File(name, own_bytes, header, base64.b64decode(header.pop("rng")), hashes)

    def _range(self, name: str, start: int, stop: int) -> Any:
        try:
            return _patient(self.store, lambda: self.store.read_range(name, start, stop))
        except OSError as error:
            raise _unreadable(name, error).error from None

    def fill(self, requests: Iterable[Request]) -> int:
        """Read only the chunks that are requested; return the bytes read."""
        by_rank: dict[int, list[Request]] = {}
        for request in requests:
            by_rank.setdefault(request.rank, []).append(request)
        tasks = [(rank, *task) for rank, wanted in by_rank.items() for task in _runs(wanted)]
        with ThreadPoolExecutor(self.threads, "phalanx-load") as pool:
            list(pool.map(self.file, by_rank))
            return sum(pool.map(lambda task: self._fill_run(*task), tasks))

    def _fill_run(self, rank: int, first: int, last: int, wanted: list[Request]) -> int:
        """Read chunks [first, last) of a file and hand each request its part."""
        file = self.file(rank)
        start, stop = first * CHUNK_BYTES, min(last * CHUNK_BYTES, file.own_bytes)
        only = wanted[0]
        if len(wanted) == 1 and only.is_whole and only.start <= start and stop <= only.stop:
            room = only.room.reshape(-1)[start - only.start : stop - only.start]  # read in place, without a copy
            self._read_verified(file, first, start, stop, room.data)
            return stop - start
        room = np.empty(stop - start, np.uint8)
        self._read_verified(file, first, start, stop, room.data)
        for request in wanted:
            a, b = max(start, request.start), min(stop, request.stop)
            request.put(a, room[a - start : b - start])
        return stop - start

    def _read_verified(self, file: File, first: int, start: int, stop: int, room: memoryview) -> None:
        wrong = self._read_chunks(file, first, start, stop, room)
        if wrong:
            raise max(wrong, key=lambda fault: fault.damage).error

    def _read_chunks(self, file: File, first: int, start: int, stop: int, room: memoryview) -> list[Fault]:
        """Return the faults. Ask a bucket twice: its answer may have been damaged in transit."""
        wrong = self._try_chunks(file, first, start, stop, room)
        return wrong if self.store.is_local or not wrong else self._try_chunks(file, first, start, stop, room)

    def _try_chunks(self, file: File, first: int, start: int, stop: int, room: memoryview) -> list[Fault]:
        try:
            got = read_into(self.store, file.name, start, room)
        except OSError as error:
            return [_unreadable(file.name, error, f"bytes {start} to {stop}")]
        if got < stop - start:
            return [Fault(f"{file.name}: ends after {start + got} bytes", True)]
        wrong = []
        for i, (a, b) in enumerate(chunks(start, stop), first):
            want = file.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
            found = hash_of(room[a - start : b - start])
            if found != want:
                where = f"chunk {i}, bytes {a} to {b}"
                text = f"{file.name}: {where} have the xxh3 {found.hex()} instead of {want.hex()}"
                wrong.append(Fault(text, True))
        return wrong

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor as bytes, in the shape (rows, bytes per row)."""
        entry = self.manifest.entries[self.manifest.index[name]]
        held = entry.held
        out = np.zeros((held.num_rows, held.num_cols * held.inner * entry.item_bytes), np.uint8)
        self.fill_blocks([(name, (0, held.num_rows, 0, held.num_cols), out)])
        return out

    def fill_blocks(self, wanted: Sequence[tuple[str, tuple[int, int, int, int], np.ndarray]]) -> int:
        """For each (name, (r0, r1, c0, c1), room), read those rows and columns of the tensor into `room`, which holds
        bytes in the shape (rows, bytes per row). Return the bytes read."""
        m = self.manifest
        requests = []
        for name, (r0, r1, c0, c1), room in wanted:
            if not room.size:
                continue
            item = m.entries[m.index[name]]
            col_bytes = item.held.inner * item.item_bytes
            for b in m.blocks(name, r0, r1, c0, c1):
                s = b.segment
                start, stop = s.offset + (b.r0 - s.r0) * s.row_bytes, s.offset + (b.r1 - s.r0) * s.row_bytes
                there = room[b.r0 - r0 : b.r1 - r0, (b.c0 - c0) * col_bytes : (b.c1 - c0) * col_bytes]
                requests.append(Request(b.rank, start, stop, there, s.row_bytes, (b.c0 - s.c0) * col_bytes))
        return self.fill(requests)

    def verify(
        self, on_bytes: Callable[[int], None] = lambda n: None, ranks: Iterable[int] | None = None
    ) -> list[Fault]:
        """Return all faults of the checkpoint, or of the files of `ranks`. Any of the reader's threads may call
        `on_bytes`, once per run of chunks."""
        wanted = list(range(len(self.manifest.files)) if ranks is None else ranks)
        with ThreadPoolExecutor(self.threads, "phalanx-verify") as pool:
            heads = list(pool.map(self._verify_head, wanted))
            good = [self.file(rank) for rank, fault in zip(wanted, heads, strict=True) if fault is None]
            size = RUN_CHUNKS * CHUNK_BYTES
            runs = [(f, at, on_bytes) for f in good for at in range(0, f.own_bytes, size)]
            found = pool.map(lambda run: self._verify_run(*run), runs)
            return [fault for fault in heads if fault] + [fault for faults in found for fault in faults]

    def _verify_head(self, rank: int) -> Fault | None:
        try:
            file = self.file(rank)
            self._check_header(rank, file)
            self._check_size(rank, file)
        except BadCheckpoint as error:
            return Fault(str(error), not isinstance(error, Unreadable))
        return None

    def _verify_run(self, file: File, start: int, on_bytes: Callable[[int], None]) -> list[Fault]:
        stop = min(start + RUN_CHUNKS * CHUNK_BYTES, file.own_bytes)
        room = memoryview(bytearray(stop - start))
        faults = self._read_chunks(file, start // CHUNK_BYTES, start, stop, room)
        on_bytes(stop - start)
        return faults

    def _check_size(self, rank: int, file: File) -> None:
        try:
            size, want = self.store.size(file.name), self.manifest.files[rank][0]
        except OSError as error:
            raise _unreadable(file.name, error).error from None
        if size != want:
            raise BadCheckpoint(f"{file.name}: has {size} bytes instead of {want}")

    def _check_header(self, rank: int, file: File) -> None:
        m = self.manifest
        said = file.header.get("checkpoint"), file.header.get("rank"), file.header.get("step")
        if said != (m.name, rank, m.step):
            raise BadCheckpoint(f"{file.name}: belongs to {said}, not to {(m.name, rank, m.step)}")


def _unreadable(name: str, error: OSError, what: str = "it") -> Fault:
    if isinstance(error, FileNotFoundError):
        return Fault(f"{name}: is missing", False)
    return Fault(f"{name}: {what} {UNREAD}{error.strerror or error}", False)


def _runs(wanted: list[Request]) -> list[tuple[int, int, list[Request]]]:
    """Group adjacent chunks into runs of at most RUN_CHUNKS, each with the requests that need it."""
    need: dict[int, list[Request]] = {}
    for request in wanted:
        for chunk in range(request.start // CHUNK_BYTES, -(-request.stop // CHUNK_BYTES)):
            need.setdefault(chunk, []).append(request)
    runs: list[tuple[int, int, list[Request]]] = []
    for chunk in sorted(need):
        # Only chunks with the same single request share a run, so that they can be read in place.
        if runs and runs[-1][1] == chunk and chunk - runs[-1][0] < RUN_CHUNKS and _same(runs[-1][2], need[chunk]):
            runs[-1] = (runs[-1][0], chunk + 1, runs[-1][2])
        else:
            runs.append((chunk, chunk + 1, need[chunk]))
    return runs


def _same(a: list[Request], b: list[Request]) -> bool:
    return len(a) == len(b) == 1 and a[0] is b[0]


def read_into(store: Store, name: str, start: int, room: memoryview) -> int:
    """Fill `room` from a file; return the number of bytes read, fewer if the file ends early."""
    if isinstance(store, Folder):
        done = 0
        while done < len(room):
            got = store.read_into(name, start + done, room[done:])
            if not got:
                break
            done += got
        return done
    data = memoryview(_patient(store, lambda: store.read_range(name, start, start + len(room)))).cast("B")
    room[: len(data)] = data
    return len(data)


def _patient(store: Store, call: Callable[[], Any]) -> Any:
    """Retry a call on a bucket: the store itself does not retry range reads."""
    for pause_s in () if store.is_local else RETRY_S:
        try:
            return call()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(pause_s)
    return call()


def read_manifest(store: Store, name: str) -> Manifest:
    """Raise FileNotFoundError if it was never committed, Unreadable if it cannot be read now or not by this version,
    and BadCheckpoint if it is damaged."""
    try:
        data = store.read(f"{name}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{name}/{MANIFEST} is not there") from None
    except OSError as error:
        raise _unreadable(f"{name}/{MANIFEST}", error).error from None
    root, _, body = data.partition(b"\n")
    if root.decode(errors="replace") != root_of(body):
        raise BadCheckpoint(f"{name}/{MANIFEST}: is torn or damaged: its blake3 is {root_of(body)[:16]}…")
    try:
        manifest = Manifest.from_json(body)
    except UserError as error:
        raise UserError(f"{name}: {error.message}", field=error.field, value=error.value, remedy=error.remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(  # its hash matches, so it is intact
            f"{name}/{MANIFEST}: is not damaged, but this version of Phalanx cannot read it ({error!r}); use the one "
            "that wrote it, or a newer one"
        ) from None
    said = (manifest.generation, manifest.step), manifest.lineage
    if manifest.name != name or (lineage_of(name) and said != (place_of(name), lineage_of(name))):
        raise BadCheckpoint(f"{name}/{MANIFEST}: is that of {manifest.name}")
    return manifest


def write_whole(store: Store, manifest: Manifest, images: Iterable[tuple[memoryview, bytes]]) -> Manifest:
    """Write a checkpoint at once from the (own pieces, random state) of each rank; for converters. Return the
    committed manifest."""
    make_folder(store, manifest.name)
    files = []
    for rank, (own, rng) in enumerate(images):
        assert len(own) % PAGE_BYTES == 0
        header = {"checkpoint": manifest.name, "rank": rank, "step": manifest.step}
        tail = make_tail(header, rng, hash_chunks(own, 0, len(own)))
        write_file(store, f"{manifest.name}/{file_name(rank)}", own, tail)
        files.append((len(own) + len(tail), root_of(tail)))
    done = Manifest(**{**_fields(manifest), "files": files, "made": time.time()})
    commit(store, done)
    return done


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
