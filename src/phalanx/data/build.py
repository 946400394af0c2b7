"""Builds data sets from documents or from arrays. A build of documents may be killed at any moment and started again:
finished work is not repeated, and the result depends on the inputs alone.

    parts of the inputs -> workers -> a file of ids each -> one writer, in order -> shards -> manifest

The staging folder holds the parts that are not in a shard yet, and `state.json`, which is replaced after every shard:
it records the shards so far, and where in the parts the next one begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from phalanx.core.errors import UserError
from phalanx.core.lease import Held, Lease
from phalanx.core.manifest import HASH_BYTES, Field, Manifest
from phalanx.core.store import Folder, Store
from phalanx.data import documents, workers
from phalanx.data.address import open_set
from phalanx.data.shard_file import ShardWriter, version_of
from phalanx.data.target import Target
from phalanx.data.tokenizer import Tokenizer, Vocabulary

BUILDING = "building.json"  # the lease of the build that writes to the set
AHEAD = 4  # parts per worker that may be done before their turn

Built = tuple[Manifest, str]


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int  # of the inputs, as stored on disk
    total_bytes: int
    text_bytes: int  # read in this call


@dataclass
class _State:
    """What is finished. The items of every extent but the last are known; the last is being written."""

    plan: str
    base: str  # the version that was there before
    items: list[int] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    shards: int = 0  # of the last extent
    part: int = 0  # the first that is still needed
    skip: int = 0  # its items that are already in shards
    taken: int = 0  # bytes of text of the extent before it
    empty: int = 0  # empty documents before it
    replaced: int = 0  # replaced characters before it
    notes: list[str] = field(default_factory=list)  # for the user
    version: str = ""  # of the manifest that is about to be written


def build(
    inputs: Sequence[tuple[str, str]],
    out: Store | Path | str,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    workers: int = 0,
    staging: Path | None = None,
    append: bool = False,
    max_bytes: int | None = None,
    chunk_items: int | None = None,
    shard_chunks: int | None = None,
    left_out: Iterable[Path] = (),
    force: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> Built:
    """Tokenize documents into a data set. `inputs`: the label of a source, and a file, a folder or `python-stdlib`;
    each label is an extent. `max_bytes`: of text, per source. `workers`: 0 is one per core; 1 is this process.
    `left_out`: folders to skip. `on_progress` may raise to stop; the next call continues from there. `on_note` is
    called at the end with what else was left out, `on_wait` as soon as the build has to wait for another one."""
    for _, path in inputs:
        if not path:
            raise documents.refusal(path, "it is empty")
    with _alone(out, on_wait) as (store, lease):
        return _build(
            inputs, store, lease, tokenizer, field, workers, staging, append, max_bytes, chunk_items, shard_chunks,
            left_out, force, on_progress, on_note,
        )  # fmt: skip


def _build(
    inputs: Sequence[tuple[str, str]],
    store: Store,
    lease: Lease,
    tokenizer: Tokenizer,
    field: str,
    workers: int,
    staging: Path | None,
    append: bool,
    max_bytes: int | None,
    chunk_items: int | None,
    shard_chunks: int | None,
    left_out: Iterable[Path],
    force: bool,
    on_progress: Callable[[Progress], None] | None,
    on_note: Callable[[str], None],
) -> Built:
    sources = list(dict.fromkeys(label for label, _ in inputs))
    target = Target(
        store,
        (Field("tokens", tokenizer.vocabulary.dtype),),
        sources,
        append=append,
        vocabulary=tokenizer.vocabulary,
        tokenizer_file=tokenizer.file,
        chunk_items=chunk_items,
        shard_chunks=shard_chunks,
    )
    own = [staging] if staging else []
    if isinstance(target.store, Folder):
        own.append(target.store.path)
        for _, path in inputs:
            if Path(path).is_dir() and Path(path).resolve() == target.store.path.resolve():
                remedy = "name a folder that is not an input"
                raise UserError("a data set cannot lie in its own input", field="--out", value=path, remedy=remedy)
    counts: Counter[str] = Counter()
    parts = documents.plan(inputs, field, tokenizer.raw, [*left_out, *own], counts, force)
    with _staged(target.store, staging) as folder:
        made = _Build(target, tokenizer, field, inputs, parts, folder, max_bytes, on_progress)
        done = made.already()
        try:
            if not done:
                with made.pool(workers):
                    done = made.run()
        except UserError as refused:
            if not isinstance(refused.__cause__, OSError):  # a full disk can be fixed, and the build then continues
                _remove(folder)
                target.undo(not lease.holds())
            raise
        _remove(folder)
    counts[documents.EMPTY] += made.state.empty
    replaced = f"{made.state.replaced:,} characters were replaced, as UTF-8 has none for half a surrogate pair"
    notes = [*made.state.notes, replaced * bool(made.state.replaced)]
    for note in (*notes, f"left out: {documents.told(counts)}" * bool(counts.total())):
        if note:
            on_note(note)
    return done


class _Build:
    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        field: str,
        inputs: Sequence[tuple[str, str]],
        parts: list[documents.Part],
        folder: Path,
        max_bytes: int | None,
        on_progress: Callable[[Progress], None] | None,
    ):
        self.target, self.tokenizer, self.inputs, self.parts = target, tokenizer, inputs, parts
        self.folder = folder
        self.max_bytes, self.on_progress = max_bytes, on_progress or (lambda progress: None)
        facts: list[object] = [target.empty.encode().decode(), target.sources, max_bytes, field, target.append]
        facts += [workers.TRAILER, *map(asdict, parts)]
        plan = blake3(json.dumps(facts).encode()).hexdigest()
        ids = folder / f"parts-{plan[:16]}"
        self.job = workers.Job(ids, field, tokenizer.file, tokenizer.vocabulary.eos)
        self.state = self._load(plan)
        ids.mkdir(exist_ok=True)
        self.sent = 0
        self.total_bytes = sum(part.weight for part in parts)
        self.done_bytes = sum(part.weight for part in parts[: self.state.part])
        self.text_bytes = 0

    def already(self) -> Built | None:
        """Return the manifest and its version if the last call got as far as writing it."""
        if self.target.base and self.target.version == self.state.version:
            return self.target.base, self.target.version
        return None

    def pool(self, count: int) -> workers.Workers | workers.Here:
        count = min(count or len(os.sched_getaffinity(0)), max(1, len(self.parts) - self.state.part))
        self._pool: workers.Workers | workers.Here
        if count == 1:
            self._pool = workers.Here(self.job, self.tokenizer, self._report)
        else:
            self._pool = workers.Workers(self.job, count, self._report)
        return self._pool

    def run(self) -> Built:
        for extent in range(len(self.state.items), len(self.target.sources)):
            self._extent(extent)
        roots = np.frombuffer(bytes.fromhex("".join(self.state.roots)), np.uint8).reshape(-1, HASH_BYTES)
        manifest = self.target.manifest(self.state.items, roots)
        self.state.version = version_of(manifest.encode())
        self._save(self.state)
        return self.target.commit(manifest)

    def _extent(self, extent: int) -> None:
        state, empty, source = self.state, self.target.empty, self.target.sources[extent]
        last = max((i + 1 for i, part in enumerate(self.parts) if part.source == source), default=state.part)
        put, finishing = self.target.put(extent), False
        # Per part: index, first item, and the bytes of text, empty documents and replaced characters before it.
        starts: deque[tuple[int, int, int, int, int]] = deque()

        def on_shard(number: int, path: Path, root: bytes) -> None:
            put(number, path, root)
            state.roots.append(root.hex())
            if finishing:
                return  # saved with the end of the extent
            end = (number + 1) * empty.shard_items
            while len(starts) > 1 and starts[1][1] <= end:
                starts.popleft()
            done = state.part
            state.part, begin, state.taken, state.empty, state.replaced = starts[0]
            state.skip, state.shards = end - begin, number + 1
            self._save(state)
            self._drop(done, state.part)

        here = state.roots[len(state.roots) - state.shards :]
        writer = _writer(self.target, self.folder, on_shard, [bytes.fromhex(root) for root in here])
        try:
            self.sent, taken, skip, at = state.part, state.taken, state.skip, writer.items - state.skip
            blank, odd = state.empty, state.replaced
            for i in range(state.part, last):
                if self.max_bytes is not None and taken >= self.max_bytes:
                    break
                ids, size, few, changed = self._ids(i, last, None if self.max_bytes is None else self.max_bytes - taken)
                starts.append((i, at, taken, blank, odd))
                at, taken, blank, odd = at + len(ids), taken + size, blank + few, odd + changed
                writer.add(ids[skip:])
                skip = 0
                self.done_bytes += self.parts[i].weight
                self._report(0)
            finishing = True
            writer.finish()
        finally:
            writer.abort()
        if not writer.items:
            first = "" if self.max_bytes is None else f" in its first {self.max_bytes:,} bytes (--max-mb)"
            paths = ", ".join(path for label, path in self.inputs if label == source)
            raise documents.refusal(paths, f"there is no text{first}")
        if self.max_bytes is not None and taken >= self.max_bytes:
            size = sum(part.weight for part in self.parts if part.source == source)
            used = f"the first {self.max_bytes / 1e6:,g} MB of text of {source} are used"
            state.notes.append(f"cut by --max-mb: {used}; its files hold {size / 1e6:,.1f} MB")
        done, state.part = state.part, last
        state.items.append(writer.items)
        state.shards, state.skip, state.taken, state.empty, state.replaced = 0, 0, 0, blank, odd
        self._save(state)
        self._drop(done, last)

    def _ids(self, index: int, last: int, limit: int | None) -> tuple[np.ndarray, int, int, int]:
        """Return the ids of a part, their bytes of text (at most `limit`), and the numbers of empty documents and of
        replaced characters."""
        pool = self._pool
        while True:
            pool.listen(block=False)
            while pool.idle and self.sent < min(last, index + AHEAD * pool.num_workers):
                if not self.job.path(self.sent).exists():
                    pool.give(self.sent, self.parts[self.sent], limit)
                self.sent += 1
            if self.job.path(index).exists():
                break
            pool.listen(block=True)
        found = workers.load(self.job, index, self.tokenizer.vocabulary.dtype)
        if found is None or (limit is not None and found[1] > limit):
            # Half written in a power failure, or tokenized before the limit was known.
            workers.tokenize(self.job, self.tokenizer, index, self.parts[index], limit, lambda size: None)
            found = workers.load(self.job, index, self.tokenizer.vocabulary.dtype)
            assert found, index
        return found

    def _report(self, text_bytes: int) -> None:
        self.text_bytes += text_bytes
        self.on_progress(Progress(self.done_bytes, self.total_bytes, self.text_bytes))

    def _drop(self, first: int, last: int) -> None:
        for i in range(first, last):
            self.job.path(i).unlink(missing_ok=True)

    def _load(self, plan: str) -> _State:
        """Load the state of the last call with this plan. If there is none, remove all that other plans have left."""
        path, base = self.folder / "state.json", self.target.version
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            state = _State(**json.loads(path.read_bytes()))
            if state.plan == plan and (state.base == base or state.version == base):
                return state
        for other in self.folder.iterdir():
            if other.is_dir():
                shutil.rmtree(other)
            elif other.name != "lock":
                other.unlink()
        state = _State(plan, base)
        self._save(state)
        return state

    def _save(self, state: _State) -> None:
        Folder(self.folder).write("state.json", json.dumps(asdict(state)).encode())


def _writer(
    target: Target, folder: Path, on_shard: Callable[[int, Path, bytes], None], roots: Sequence[bytes] = ()
) -> ShardWriter:
    """Make a writer that also passes each shard's root to `on_shard`."""
    m = target.empty
    writer = ShardWriter(
        folder,
        m.dtype,
        m.overlap,
        m.chunk_items,
        m.shard_chunks,
        lambda number, path: on_shard(number, path, writer.roots[-1]),
        roots,
    )
    return writer


def write_arrays(
    out: Store | Path | str,
    fields: tuple[Field, ...],
    streams: Sequence[tuple[str, Iterable[np.ndarray]]],
    *,
    vocabulary: Vocabulary | None = None,
    tokenizer_file: bytes = b"",
    staging: Path | None = None,
    append: bool = False,
    chunk_items: int | None = None,
    shard_chunks: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_wait: Callable[[str], None] = lambda text: None,
) -> Built:
    """Write streams of items as they come, each under the label of its source. `on_progress` gets the number of items
    so far and may raise; `on_wait` is called when the build has to wait for another one."""
    items: list[int] = []
    roots: list[np.ndarray] = []
    with _alone(out, on_wait) as (store, lease), _staged(store, staging) as folder:
        target = Target(
            store,
            fields,
            [label for label, _ in streams],
            append=append,
            vocabulary=vocabulary,
            tokenizer_file=tokenizer_file,
            chunk_items=chunk_items,
            shard_chunks=shard_chunks,
        )
        try:
            for extent, (label, arrays) in enumerate(streams):
                writer = _writer(target, folder, target.put(extent))
                try:
                    for array in arrays:
                        writer.add(array)
                        if on_progress:
                            on_progress(sum(items) + writer.items)
                    roots.append(writer.finish())
                finally:
                    writer.abort()
                if not writer.items:
                    remedy = "name files that hold something"
                    raise UserError("there is nothing in it", field="--source", value=label, remedy=remedy)
                items.append(writer.items)
            done = target.commit(target.manifest(items, np.concatenate(roots)))
        except BaseException:
            _remove(folder)
            target.undo(not lease.holds())  # the next call starts from the beginning
            raise
        _remove(folder)
    return done


def write_records(
    out: Store | Path | str,
    source: str,
    fields: tuple[Field, ...],
    batches: Iterable[Mapping[str, np.ndarray] | np.ndarray],
    *,
    staging: Path | None = None,
    append: bool = False,
    chunk_items: int | None = None,
    shard_chunks: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Built:
    """Write records with any fields, such as the patches of an image and its class. A batch maps each field's name to
    an array of its values, or is one structured array. Raises ValueError if a batch does not fit the fields."""
    empty = Manifest(fields, (), np.empty((0, HASH_BYTES), np.uint8), 1, 1)
    if empty.is_tokens:
        raise ValueError("a single field named 'tokens' is a stream of tokens, not of records: name it otherwise")

    def arrays() -> Iterator[np.ndarray]:
        for batch in batches:
            names = batch.dtype.names or () if isinstance(batch, np.ndarray) else tuple(batch)
            if sorted(names) != sorted(f.name for f in fields):
                raise ValueError(f"a batch has the fields {names}, not {tuple(f.name for f in fields)}")
            out = np.empty(len(batch[names[0]]), empty.dtype)
            for f in fields:
                values = np.asarray(batch[f.name])
                if values.shape != out[f.name].shape or not np.can_cast(values.dtype, f.dtype, "same_kind"):
                    want = f"{out[f.name].shape} of {f.dtype}"
                    raise ValueError(f"field {f.name!r} of a batch is {values.shape} of {values.dtype}, not {want}")
                out[f.name] = values
            yield out

    return write_arrays(
        out,
        fields,
        [(source, arrays())],
        staging=staging,
        append=append,
        chunk_items=chunk_items,
        shard_chunks=shard_chunks,
        on_progress=on_progress,
    )


@contextlib.contextmanager
def _alone(out: Store | Path | str, on_wait: Callable[[str], None]) -> Iterator[tuple[Store, Lease]]:
    """Yield the store of the data set and the lease on it. While one build writes, a second one waits for it."""
    store = open_set(str(out), "--out") if isinstance(out, str | Path) else out
    made: list[Path] = []  # folders that did not exist before
    if isinstance(store, Folder):
        path = store.path
        made = [folder for folder in (path / "shards", path, *path.parents) if not folder.exists()]
    lease = Lease(store, BUILDING, {})
    try:
        lease.take(True, lambda body: on_wait(f"waiting for the build of process {body['pid']} on {body['host']}"))
    except Held:
        remedy = "wait until it has ended, or name another --out"
        raise UserError("another build is writing to it", field="--out", value=store.url, remedy=remedy) from None
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            field="--out",
            value=store.url,
            remedy="name a folder or bucket that you may write to, with space left",
        ) from error
    try:
        yield store, lease
    finally:
        lease.close(remove=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty


@contextlib.contextmanager
def _staged(store: Store, staging: Path | None) -> Iterator[Path]:
    """Yield a folder that belongs to this data set, and to one build at a time."""
    field, inside = "--staging", staging is None and isinstance(store, Folder)
    if isinstance(store, Folder) and inside:
        staging, field = store.path / ".staging", "--out"
    elif staging is None:
        staging = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "staging"
    value = store.url if inside else str(staging)
    folder = staging / f"build-{blake3(store.url.encode()).hexdigest()[:16]}"
    with _writing(folder, field, value):
        folder.mkdir(parents=True, exist_ok=True)
    with _writing(folder, field, value), open(folder / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait until it has ended, or name another --out"
            raise UserError("another build is writing to it", field="--out", value=store.url, remedy=remedy) from None
        if isinstance(store, Folder):
            for left in (*store.path.glob(".*.tmp"), *store.path.glob("shards/.*.tmp")):
                left.unlink()  # of a build that was killed while moving a file there
        yield folder


@contextlib.contextmanager
def _writing(folder: Path, field: str, value: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # raised by a callback
            raise
        raise UserError(
            f"cannot be written: {error.strerror or error} ({error.filename or folder})",
            field=field,
            value=value,
            remedy="name a folder that you may write to, on a disk with space left; the build then goes on",
        ) from error


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # unless another build's folder is in it
