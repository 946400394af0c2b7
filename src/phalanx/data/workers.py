"""Turns parts into ids, each in a file of its own that appears whole or not at all. The work is done in this process,
or in new processes (never forked) that end when this one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import RunFailed, UserError
from phalanx.data import documents
from phalanx.data.documents import Part
from phalanx.data.shard_file import fast_hash
from phalanx.data.tokenizer import Bytes, FromFile, Tokenizer

BATCH_BYTES = 1 << 20
TRAILER = 40  # bytes of text, empty documents, replaced characters, and a hash of all that precedes


@dataclass(frozen=True)
class Job:
    """Where parts go, and how they are read."""

    folder: Path
    field: str
    tokenizer_file: bytes
    eos: int

    def tokenizer(self) -> Tokenizer:
        return FromFile(self.tokenizer_file, "tokenizer.json", eos_id=self.eos) if self.tokenizer_file else Bytes()

    def path(self, index: int) -> Path:
        return self.folder / f"{index:07d}.ids"


def tokenize(
    job: Job, tokenizer: Tokenizer, index: int, part: Part, limit: int | None, on_bytes: Callable[[int], None]
) -> None:
    """Write the file of a part. `on_bytes` is called for every MB of text, and may raise."""
    partial = job.path(index).with_suffix(f".{os.getpid()}.tmp")
    taken, texts, held = 0, [], 0
    pieces: list[bytes] = []
    counts: Counter[str] = Counter()
    for text, upto in documents.read(part, job.field, tokenizer.raw, limit, counts):
        texts.append(text)
        held += len(text.data)
        taken = upto
        if held >= BATCH_BYTES:
            pieces.append(tokenizer.encode([t.data for t in texts], [t.ends for t in texts]).tobytes())
            on_bytes(held)
            texts, held = [], 0
    if texts:
        pieces.append(tokenizer.encode([t.data for t in texts], [t.ends for t in texts]).tobytes())
        on_bytes(held)
    figures = (taken, counts[documents.EMPTY], counts[documents.REPLACED])
    body = b"".join(pieces) + b"".join(figure.to_bytes(8, "little") for figure in figures)
    try:
        partial.write_bytes(body + fast_hash(body))
        os.replace(partial, job.path(index))
    finally:
        partial.unlink(missing_ok=True)


def load(job: Job, index: int, dtype: str) -> tuple[np.ndarray, int, int, int] | None:
    """Load the ids of a part, and its numbers of text bytes, empty documents and replaced characters; None if the file
    is missing or incomplete."""
    try:
        data = job.path(index).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < TRAILER or fast_hash(data[:-16]) != data[-16:]:
        return None
    end = len(data) - TRAILER
    taken, empty, replaced = (int.from_bytes(data[at : at + 8], "little") for at in range(end, end + 24, 8))
    return np.frombuffer(data[:-TRAILER], dtype), taken, empty, replaced


class Here:
    """A single worker: this process."""

    def __init__(self, job: Job, tokenizer: Tokenizer, on_bytes: Callable[[int], None]):
        self.job, self._tokenizer, self._on_bytes = job, tokenizer, on_bytes
        self.num_workers = 1
        self._given: tuple[int, Part, int | None] | None = None

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def idle(self) -> bool:
        return self._given is None

    def give(self, index: int, part: Part, limit: int | None) -> None:
        self._given = index, part, limit

    def listen(self, block: bool) -> None:
        if block and self._given:
            given, self._given = self._given, None
            tokenize(self.job, self._tokenizer, *given, self._on_bytes)


class Workers:
    """Several worker processes. An error in one of them is raised here."""

    def __init__(self, job: Job, num_workers: int, on_bytes: Callable[[int], None]):
        self.job, self.num_workers, self._on_bytes = job, num_workers, on_bytes
        self._busy: set[Connection] = set()
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Workers:
        try:
            for _ in range(self.num_workers):
                self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _start(self) -> None:
        mine, theirs = Pipe()
        with theirs:
            code = f"from phalanx.data.workers import serve; serve({theirs.fileno()})"
            # Only this process handles Ctrl-C; the library's own threads would compete with the workers for the cores.
            env = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            self._processes[mine] = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=os.environ | env,
                process_group=0,
                stdin=subprocess.DEVNULL,
            )
        mine.send(self.job)

    @property
    def idle(self) -> bool:
        return len(self._busy) < len(self._processes)

    def give(self, index: int, part: Part, limit: int | None) -> None:
        connection = next(c for c in self._processes if c not in self._busy)
        self._busy.add(connection)
        try:
            connection.send((index, part, limit))
        except OSError:
            raise self._ended(connection) from None

    def listen(self, block: bool) -> None:
        """Handle the messages that have arrived; wait for one if `block`."""
        if not self._busy:
            return
        for connection in wait(list(self._busy), None if block else 0):
            assert isinstance(connection, Connection)
            try:
                told: dict[str, Any] = connection.recv()
            except (EOFError, OSError):
                raise self._ended(connection) from None
            if "bytes" in told:
                self._on_bytes(told["bytes"])
                continue
            self._busy.discard(connection)
            if "mistake" in told:
                message, field, value, remedy = told["mistake"]
                raise UserError(message, field=field, value=value, remedy=remedy)
            if "os" in told:  # an I/O error, raised as if it had happened here
                raise OSError(*told["os"])
            if "failed" in told:
                raise RunFailed(f"a worker of the build failed: {told['failed']}")

    def _ended(self, connection: Connection) -> RunFailed:
        code = self._processes[connection].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        remedy = "run the command again, and it continues from here; with fewer --workers if memory ran out"
        return RunFailed(f"a worker of the build {how}", remedy=remedy)


def serve(fd: int) -> None:
    """Work until the other end is closed."""
    with Connection(fd) as connection:
        try:
            job: Job = connection.recv()
            tokenizer = job.tokenizer()
            while True:
                index, part, limit = connection.recv()
                connection.send(_answer(job, tokenizer, index, part, limit, connection))
        except (EOFError, ConnectionError):
            pass


def _answer(job: Job, tokenizer: Tokenizer, index: int, part: Part, limit: int | None, up: Connection) -> dict:
    try:
        tokenize(job, tokenizer, index, part, limit, lambda size: up.send({"bytes": size}))
        return {"done": index}
    except UserError as e:
        return {"mistake": (e.message, e.field, e.value, e.remedy)}
    except ConnectionError:
        raise
    except OSError as error:
        return {"os": (error.errno, error.strerror or str(error), error.filename or str(job.path(index)))}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
