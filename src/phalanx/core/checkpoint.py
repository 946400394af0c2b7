"""The shape of a checkpoint: which bytes of the state lie where. A rank's state is one image in memory: first its own
pieces, which are its file, then what other ranks write. The offsets follow from the layout, so a reader who has the
manifest finds any byte of any rank without asking anybody.

    image of a rank   | own pieces, 64-byte aligned | the rest of its slices |      cut in chunks, each with its hash
    file of a rank    | own pieces                  | tail: who, when, random state, hashes of the chunks |
    manifest          | hash of what follows | step, layout, tensors, and for each file its size and the tail's hash |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from phalanx.core import document
from phalanx.core.held import Held
from phalanx.core.layout import Coord, Layout

FORMAT = 1
CHUNK_BYTES = 1 << 20  # hashed as one
ALIGN_BYTES = 64
PAGE_BYTES = 4096
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
MANIFEST = "manifest.json"


NAME = re.compile(r"step-(\d{9,})-(?:g(\d+)-)?(?:([0-9a-f]{8})-)?[A-Za-z0-9._-]+")


class BadCheckpoint(Exception):
    """A checkpoint that must not be loaded. Its message says which file is wrong, and in what."""


class Unreadable(BadCheckpoint):
    """A checkpoint that cannot be read now: a file is missing, the disk fails, or a newer version has written it. That
    may pass, so nothing is wrong with the checkpoint itself."""


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state."""

    held: Held
    dtype: str

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def word_of(size: int) -> str:
    """Return the integer type as which that many bytes are summed: the widest that fits, which a device adds the
    fastest."""
    return next(word for width, word in ((8, "int64"), (4, "int32"), (2, "int16"), (1, "uint8")) if size % width == 0)


class Segment(NamedTuple):
    """A block of a tensor, row by row, at a place in the image."""

    entry: int
    r0: int
    r1: int
    c0: int
    c1: int
    offset: int
    row_bytes: int

    @property
    def size(self) -> int:
        return (self.r1 - self.r0) * self.row_bytes


@dataclass(slots=True)
class Plan:
    """The places of a rank's slices in its image."""

    segments: list[Segment]
    num_own: int  # how many of the first are its own
    own_bytes: int
    image_bytes: int

    @staticmethod
    def of(entries: list[Entry], layout: Layout, coord: Coord) -> Plan:
        own, rest, at = [], [], 0
        stages = set(layout.stages_of(coord.pp))
        for i, entry in enumerate(entries):
            held = entry.held
            if held.stage not in stages:
                continue
            r0, r1, c0, c1 = held.bounds(layout, coord)
            row_bytes = (c1 - c0) * held.inner * entry.item_bytes
            if r0 == r1 or not row_bytes:
                continue
            first, last = held.own_rows(layout, coord, i)
            if first < last:
                own.append(Segment(i, first, last, c0, c1, at, row_bytes))
                at += _up((last - first) * row_bytes, ALIGN_BYTES)
            for a, b in ((r0, first), (last, r1)):
                if a < b:
                    rest.append((i, a, b, c0, c1, row_bytes))
        own_bytes = at = _up(at, PAGE_BYTES)
        segments = own
        num_own = len(own)
        for i, a, b, c0, c1, row_bytes in rest:
            segments.append(Segment(i, a, b, c0, c1, at, row_bytes))
            at += _up((b - a) * row_bytes, ALIGN_BYTES)
        return Plan(segments, num_own, own_bytes, _up(at, PAGE_BYTES))

    @property
    def own(self) -> list[Segment]:
        return self.segments[: self.num_own]

    def chunks(self) -> list[tuple[int, int]]:
        """Return [start, stop) of the chunks that are hashed as one: first those of the file."""
        return chunks(0, self.own_bytes) + chunks(self.own_bytes, self.image_bytes)


def chunks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + CHUNK_BYTES, stop)) for at in range(start, stop, CHUNK_BYTES)]


class Block(NamedTuple):
    """What a reader needs of one file: rows and columns of a tensor, and the segment that they lie in."""

    rank: int
    segment: Segment
    r0: int
    r1: int
    c0: int
    c1: int


@dataclass(frozen=True)
class Manifest:
    """The manifest of a committed checkpoint."""

    name: str
    step: int
    layout: Layout
    entries: list[Entry]
    files: list[tuple[int, str]]  # by rank: size, and the blake3 of its tail
    updates: int  # of the optimizer; 0: it has no moments, and starts anew
    cursor: int = 0  # samples served before it
    order: dict[str, Any] = field(default_factory=dict)  # of the data, which the cursor counts in
    data_version: str = ""
    seq_len: int = 0  # length of a sample
    lineage: str = ""  # the run that it belongs to, with all that continue it; "": imported
    generation: int = 0
    ledger: str = ""  # the hash of the last committed step
    recent: list[float | None] = field(default_factory=list)  # losses, as `train.skips` keeps them
    job: dict[str, Any] = field(default_factory=dict)
    made: float = 0.0  # seconds since 1970
    format: int = FORMAT

    @cached_property
    def index(self) -> dict[str, int]:
        return {entry.held.name: i for i, entry in enumerate(self.entries)}

    @cached_property
    def _plans(self) -> dict[int, tuple[Plan, dict[int, Segment]]]:
        return {}

    def plan(self, rank: int) -> Plan:
        return self._planned(rank)[0]

    def _planned(self, rank: int) -> tuple[Plan, dict[int, Segment]]:
        if rank not in self._plans:
            plan = Plan.of(self.entries, self.layout, self.layout.coord(rank))
            self._plans[rank] = plan, {s.entry: s for s in plan.own}
        return self._plans[rank]

    def blocks(self, name: str, r0: int, r1: int, c0: int, c1: int) -> Iterator[Block]:
        """Yield the blocks that together are these rows and columns."""
        i = self.index[name]
        for rank in self.entries[i].held.writers(self.layout, i, (r0, r1)):
            s = self._planned(rank)[1].get(i)
            if s is None:  # the rank has those rows, but no column of them
                continue
            rows, cols = (max(r0, s.r0), min(r1, s.r1)), (max(c0, s.c0), min(c1, s.c1))
            if rows[0] < rows[1] and cols[0] < cols[1]:
                yield Block(rank, s, *rows, *cols)

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _ in self.files)

    def to_json(self) -> bytes:
        body = dataclasses.asdict(self)
        body["entries"] = [[*dataclasses.astuple(e.held), e.dtype] for e in self.entries]
        return json.dumps(body, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        body = json.loads(data)
        document.check_version(body, FORMAT, "the manifest")
        entries = [_entry(*row) for row in body["entries"]]
        files = [(int(size), str(root)) for size, root in body["files"]]
        layout = document.make(Layout, body["layout"])
        return document.make(Manifest, {**body, "layout": layout, "entries": entries, "files": files})


def _entry(name: str, shape: list[int], *rest: Any) -> Entry:
    """Make an entry from a manifest's row. A newer minor version may say more before the type, which comes last."""
    *how, dtype = rest
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: there is no type {dtype!r}")
    return Entry(Held(name, tuple(shape), *how[: len(dataclasses.fields(Held)) - 2]), dtype)


def file_name(rank: int) -> str:
    return f"rank-{rank:06d}.bin"


@dataclass(frozen=True, slots=True)
class Facts:
    """What all checkpoints of a run have in common."""

    lineage: str = ""
    data_version: str = ""
    order: dict[str, Any] = field(default_factory=dict)
    first_step: int = 0  # where the run began,
    first_place: int = 0  # and how many samples had been served before

    def cursor(self, step: int, global_batch: int) -> int:
        """Return how many samples were served before `step`."""
        return self.first_place + (step - self.first_step) * global_batch


class Place(NamedTuple):
    """The place of a checkpoint among those of its lineage. A later generation goes before a higher step, since steps
    that a later generation lacks were abandoned."""

    generation: int
    step: int


def checkpoint_name(step: int, mark: str, generation: int = 0, lineage: str = "") -> str:
    """Name a checkpoint. No name is used twice: `mark` is random, and the same on all ranks."""
    parts = [f"step-{step:09d}"] + [f"g{generation:04d}"] * bool(generation or lineage) + [lineage] * bool(lineage)
    return "-".join([*parts, mark])


def place_of(name: str) -> Place:
    found = NAME.fullmatch(name)
    assert found, name
    return Place(int(found[2] or 0), int(found[1]))


def lineage_of(name: str) -> str:
    found = NAME.fullmatch(name)
    assert found, name
    return found[3] or ""


def buddies(domains: list[str]) -> list[int | None]:
    """Return for each node the one that keeps a copy of its snapshots: the next in another failure domain (`domains`
    names each node's). While the domains are alike, every node keeps as many as it gives. None: there is no other."""
    if len({*domains}) < 2:
        return [None] * len(domains)
    out: list[int | None] = []
    other = 0
    for node, domain in enumerate(domains):
        other = max(other, node + 1)
        while domains[other % len(domains)] == domain:
            other += 1
        out.append(other % len(domains))
    return out
