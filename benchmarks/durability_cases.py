"""Histories of two savers, a retention, a resume and a reader in one place, one store request at a time, in an order
that a seed draws. Requests fail before or after they took effect, and actors die. Invariants are checked at the end."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from phalanx.checkpoint import catalog, files, second
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.files import Reader, commit, hash_chunks, make_folder, make_tail, root_of, write_file
from phalanx.core.checkpoint import MANIFEST, BadCheckpoint, Entry, Manifest, Plan, checkpoint_name, file_name
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.job import CheckpointConfig, Job, RunConfig
from phalanx.core.layout import Layout
from phalanx.core.store import Folder
from phalanx.run import start as start_of

catalog.THREADS = files.BUCKET_THREADS = 1  # one request per actor at a time, so that a seed determines the history
files.RETRY_S = catalog.PAUSES_S = ()
LAYOUT, KEEP = Layout(shard=2), 2
ENTRIES = [Entry(Held("weights/w", (6, 5)), "float32"), Entry(Held("exp_avg/w", (6, 5)), "float32")]
PLANS = [Plan.of(ENTRIES, LAYOUT, LAYOUT.coord(rank)) for rank in range(2)]
JOBS = {"aaaaaaaa": "mine", "bbbbbbbb": "theirs"}  # by lineage
FAILS, DIES = 0.03, 0.01  # of requests
OPERATIONS = ("read", "read_tagged", "replace", "read_range", "write", "write_pieces", "remove", "size", "folders")


class Died(BaseException):
    """The actor's process was killed."""


class Turns:
    """Lets one actor at a time make one request."""

    def __init__(self, seed: int):
        self.random, self.changed = random.Random(seed), threading.Condition()
        self.waiting: dict[str, bool] = {}
        self.chosen = ""
        self.failures = self.deaths = self.requests = 0
        self.failed: Counter[str] = Counter()  # by actor

    def take(self, actor: str) -> str:
        """Wait for a turn; return how the request fails, or ""."""
        with self.changed:
            self.waiting[actor] = True
            self._choose()
            self.changed.wait_for(lambda: self.chosen == actor)
            self.waiting[actor], self.chosen = False, ""
            self.requests += 1
            drawn = self.random.random()
            if drawn < DIES:
                self.deaths += 1
                return self.random.choice(("die before", "die after"))
            if drawn < DIES + FAILS:
                self.failures += 1
                self.failed[actor] += 1
                return self.random.choice(("before", "after"))
            return ""

    def _choose(self) -> None:
        """Choose the next actor, once all that are alive wait."""
        if not self.chosen and self.waiting and all(self.waiting.values()):
            self.chosen = self.random.choice(sorted(self.waiting))
            self.changed.notify_all()

    def leave(self, actor: str) -> None:
        with self.changed:
            del self.waiting[actor]
            self._choose()


def turned(store, turns: Turns, actor: str):
    """Wrap the store for one actor."""
    kind = type(store)

    def wrap(name):
        def call(self, *args, **more):
            how = turns.take(actor)
            if how.endswith("before"):
                raise Died if how.startswith("die") else OSError(5, f"injected before {name}")
            answer = getattr(kind, name)(self, *args, **more)
            if how:
                raise Died if how.startswith("die") else OSError(5, f"injected after {name}")
            return answer

        return call

    methods = {name: wrap(name) for name in OPERATIONS if hasattr(kind, name)}
    return type("Turned", (kind,), methods)(store.path if isinstance(store, Folder) else store.url)


def image(lineage: str, step: int, rank: int) -> memoryview:
    return memoryview(np.random.default_rng([int(lineage, 16), step, rank]).bytes(PLANS[rank].own_bytes))


@dataclass
class World:
    store: object
    seed: int
    turns: Turns
    committed: set[str] = field(default_factory=set)
    removed: dict[str, set[str]] = field(default_factory=dict)  # lineage that removed -> removed names
    wrong: list[str] = field(default_factory=list)
    loaded: int = 0

    def save(self, store, lineage: str, generation: int, steps: range) -> None:
        for step in steps:
            name = checkpoint_name(step, f"{self.seed:x}", generation, lineage)
            try:
                Catalog(store).begun(name, 2)
                make_folder(store, name)
                made = []
                for rank in range(2):
                    own = image(lineage, step, rank)
                    header = {"checkpoint": name, "rank": rank, "step": step}
                    tail = make_tail(header, b"", hash_chunks(own, 0, len(own)))
                    write_file(store, f"{name}/{file_name(rank)}", own, tail)
                    made.append((len(own) + len(tail), root_of(tail)))
                whose = {"lineage": lineage, "generation": generation, "job": {"name": JOBS[lineage]}}
                manifest = Manifest(name, step, LAYOUT, ENTRIES, made, step, **whose)
                commit(store, manifest)
                self.committed.add(name)
                Catalog(store).added(manifest)
            except (OSError, Died) as error:  # its manifest may exist all the same
                with contextlib.suppress(OSError):
                    self.store.size(f"{name}/{MANIFEST}")
                    self.committed.add(name)
                if isinstance(error, Died):
                    raise

    def retain(self, store, lineage: str) -> None:
        for _ in range(4):
            try:
                removed = Catalog(store).retain(KEEP, lineage=lineage)
            except (OSError, BadCheckpoint):
                continue
            self.removed.setdefault(lineage, set()).update(removed)

    def resume(self, store, lineage: str) -> None:
        """Load what `--resume auto` chooses for this lineage's job."""
        for _ in range(3):
            before, failed = self._newest(lineage), self.turns.failed["resume"]
            try:
                loaded = self._resume_once(store, lineage)
            except (OSError, BadCheckpoint, UserError):
                continue
            # Without failed requests, a checkpoint that existed all the time must not be passed over.
            if before and self.turns.failed["resume"] == failed and _place(loaded) < _place(before):
                with contextlib.suppress(FileNotFoundError):
                    self.store.size(f"{before}/{MANIFEST}")
                    self.wrong.append(f"{loaded or 'nothing'} was loaded, and {before} was there")

    def _newest(self, lineage: str) -> str:
        return max((n for n in self.committed if n.split("-")[3] == lineage), key=_place, default="")

    def _resume_once(self, store, lineage: str) -> str:
        """Return the name of the checkpoint that was loaded; "": there is nothing to continue."""
        job = Job(JOBS[lineage], run=RunConfig(dir="/nowhere"), checkpoint=CheckpointConfig(dir=store.url))
        with mock.patch.object(start_of, "open_store", lambda url: store):
            start = start_of.find_start(start_of.AUTO, job, catalog.ignore)
            while start and (reason := self._load(start.reader, lineage)):
                start = start.next(reason, catalog.ignore)
        return start.reader.name if start else ""

    def _load(self, reader: Reader, lineage: str) -> str:
        """Return why it cannot be loaded; "": it was loaded."""
        m = reader.manifest
        try:
            for rank in range(2):
                own, want = np.zeros(PLANS[rank].own_bytes, np.uint8), image(m.lineage, m.step, rank)
                file = reader.file(rank)
                reader._read_verified(file, 0, 0, file.own_bytes, own.data)
                if own.tobytes() != bytes(want):
                    self.wrong.append(f"{m.name} was loaded with other bytes")
        except BadCheckpoint as error:
            return str(error)
        if m.lineage != lineage:
            self.wrong.append(f"{m.name} was loaded by a run of {lineage}")
        self.loaded += 1
        return ""

    def read(self, store) -> None:
        for _ in range(2):
            try:
                Catalog(store).scrub()
            except (OSError, BadCheckpoint, UserError):
                continue

    def check(self) -> None:
        """Check that no committed checkpoint is lost: the newest of each lineage stay, and none removed another's."""
        here = Catalog(self.store)
        if here.index:
            here.index.rebuild()
        there = {found.name: found for found in here.all()}
        whole = {name for name, found in there.items() if found.status == "good"}
        for name in there:
            if there[name].status == "quarantined":
                self.wrong.append(f"{name} is in quarantine, though nothing was damaged")
        for name in whole:
            if second.read_again(self.store, name):
                self.wrong.append(f"{name} is not whole")
        for lineage in {name.split("-")[3] for name in self.committed}:
            mine = sorted((n for n in self.committed if n.split("-")[3] == lineage), key=_place)
            for name in mine[-KEEP:]:
                if name not in whole:
                    self.wrong.append(f"{name}, one of the newest {KEEP}, is lost")
            for other, names in self.removed.items():
                if other != lineage and names & set(mine):
                    self.wrong.append(f"{lineage} lost {names & set(mine)} to {other}")


def _place(name: str) -> tuple[int, int]:
    if not name:
        return -1, -1
    _, step, generation, *_ = name.split("-")
    return int(generation[1:]), int(step)


def interleave(store, seed: int) -> tuple[World, Turns]:
    """Run one history. The second saver is of another job; for odd seeds, it is a stale writer of the same lineage."""
    turns = Turns(seed)
    world = World(store, seed, turns)
    mine, other, generation = ("aaaaaaaa", "aaaaaaaa", 2) if seed % 2 else ("aaaaaaaa", "bbbbbbbb", 3)
    actors = {
        "saver": lambda s: world.save(s, mine, 3, range(10, 60, 10)),
        "other saver": lambda s: world.save(s, other, generation, range(15, 85, 15)),
        "retention": lambda s: world.retain(s, mine),
        "resume": lambda s: world.resume(s, mine),
        "reader": lambda s: world.read(s),
    }
    turns.waiting = dict.fromkeys(actors, False)

    def act(name: str) -> None:
        try:
            actors[name](turned(store, turns, name))
        except Died:
            pass
        except Exception as error:
            world.wrong.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            turns.leave(name)

    threads = [threading.Thread(target=act, args=(name,)) for name in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.check()
    return world, turns
