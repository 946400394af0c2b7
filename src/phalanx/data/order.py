"""The order of samples as arithmetic: a position in, a sample out, with nothing in memory that grows with the
data and nothing that depends on the number of ranks.

    position of the run                                   the cursor: one integer
      -> past the skipped ranges                          absolute ranges, such as what made the loss jump
      -> group g, index i in the group                    position mod G: a node that owns g reads g's chunks only
      -> stage, block, place in the block                 a stage has a quota of each block for every extent
      -> extent, and the number of this draw from it      exact, and continued from stage to stage
      -> epoch, place in the epoch                        all groups' draws count through the extent together
      -> lane of the group in the epoch, window           so that a group stays in one window at a time
      -> place in the window, shuffled                    keyed bijection over the window's samples
      -> unit of chunks, shuffled                         keyed bijection over all units of the extent

The keyed bijection is an unbalanced Feistel network of 6 rounds over splitmix64's finaliser that walks until it
lands inside. `VERSION` names all of this: a change in any of it gets another number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VERSION = 1
ROUNDS = 6
BLOCK, MAX_BLOCK = 1 << 12, 1 << 16  # draws of one group in which the quotas of a stage are met exactly
_U = np.uint64
_PHI, _MUL1, _MUL2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


def mix(x: Any) -> Any:
    """Apply splitmix64's finaliser to a uint64 or an array of them."""
    with np.errstate(over="ignore"):
        x = x + _PHI
        x ^= x >> _U(30)
        x *= _MUL1
        x ^= x >> _U(27)
        x *= _MUL2
        x ^= x >> _U(31)
        return x


def key_of(*parts: Any) -> Any:
    """Combine several integers (or arrays of them) into one key, each bit of which depends on all of them."""
    key = _U(0)
    for part in parts:
        key = mix(key ^ mix(np.asarray(part).astype(_U)))
    return key


def permute(index: Any, size: Any, key: Any) -> np.ndarray:
    """Map each `index` of [0, size) to its place under its key, a bijection. Sizes and keys may differ by element;
    scalars are not expanded into arrays, which is faster."""
    index, size, key = np.atleast_1d(np.asarray(index, np.int64)), np.asarray(size, np.int64), np.asarray(key)
    out = np.broadcast_to(index, np.broadcast_shapes(index.shape, size.shape, key.shape)).astype(_U)
    bits = np.maximum(2, _bit_length(size - 1)).astype(_U)
    wide, size = bits - (bits >> _U(1)), size.astype(_U)
    keys = mix(np.add.outer(np.arange(ROUNDS, dtype=_U), key))
    # The halves swap places and widths each round, so both are mixed when bits is odd.
    rounds = [(k, wide, bits - wide) if r % 2 else (k, bits - wide, wide) for r, k in enumerate(keys)]
    # A half has few values: if all share one key, each is mixed once and then looked up.
    few = not size.ndim and not key.ndim and 1 << int(wide) <= len(out)
    known = [_mixed(np.arange(1 << int(low), dtype=_U), k, high) for k, low, high in rounds] if few else []
    todo: Any = slice(None)  # those that have not landed inside
    while True:
        x = out[todo]
        for r in range(ROUNDS):
            k, low_bits, high_bits = (_at(part, todo) for part in rounds[r])
            low = x & ((_U(1) << low_bits) - _U(1))
            x >>= low_bits
            x ^= known[r].take(low.view(np.int64)) if few else _mixed(low, k, high_bits)
        out[todo] = x
        todo = np.flatnonzero(out >= size)
        if not len(todo):
            return out.astype(np.int64)


def _mixed(low: np.ndarray, key: Any, high_bits: Any) -> np.ndarray:
    """Return what a round XORs into the high half: the mixed low half, with the low half itself above it."""
    mixed = mix(low ^ key)
    mixed &= (_U(1) << high_bits) - _U(1)
    mixed |= low << high_bits
    return mixed


def _at(values: Any, where: Any) -> Any:
    return values[where] if np.ndim(values) else values


def _bit_length(x: np.ndarray) -> np.ndarray:
    """Return exact bit lengths: a float's exponent would be off by one for some integers above 2**53."""
    x, length = x.astype(_U), np.zeros(x.shape, np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        large = x >> _U(shift) != 0
        length += np.where(large, shift, 0)
        x = np.where(large, x >> _U(shift), x)
    return length + (x != 0)


@dataclass(frozen=True, slots=True)
class Stream:
    """An extent as the order sees it."""

    source: str
    num_samples: int
    per_unit: int  # samples that lie together and are read together
    window: int  # units that are shuffled together


@dataclass(frozen=True, slots=True)
class Stage:
    """From position `start` on, every block of a group's draws takes its quota from each stream."""

    start: int
    quotas: tuple[int, ...]  # 0 for a stream that was added later

    @property
    def block(self) -> int:
        return sum(self.quotas)


@dataclass
class Order:
    seed: int
    groups: int
    streams: tuple[Stream, ...]
    stages: tuple[Stage, ...]
    skips: tuple[tuple[int, int], ...] = ()  # [from, to) of positions, ascending, disjoint
    version: int = VERSION
    _patterns: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)
    _drawn: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"{self.groups} groups; at least one is needed")
        starts, ends = [s.start for s in self.stages], [end for skip in self.skips for end in skip]
        if starts[:1] != [0] or sorted(set(starts)) != starts:
            raise ValueError(f"stages begin at {starts}; the first must at 0, and each after the one before")
        if sorted(ends) != ends:
            raise ValueError(f"skipped ranges {list(self.skips)} are not in order, or overlap")
        for s in self.stages:
            if len(s.quotas) != len(self.streams) or not BLOCK <= s.block <= MAX_BLOCK or min(s.quotas) < 0:
                raise ValueError(f"quotas {s.quotas} do not share a block of draws among {len(self.streams)} streams")

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "seed": self.seed,
            "groups": self.groups,
            "streams": [[s.source, s.num_samples, s.per_unit, s.window] for s in self.streams],
            "stages": [[s.start, list(s.quotas)] for s in self.stages],
            "skips": [list(s) for s in self.skips],
        }

    @staticmethod
    def from_dict(d: Mapping[str, Any]) -> Order:
        if d["version"] != VERSION:
            raise ValueError(f"order version {d['version']}; this program knows version {VERSION}")
        return Order(
            seed=d["seed"],
            groups=d["groups"],
            streams=tuple(Stream(*s) for s in d["streams"]),
            stages=tuple(Stage(start, tuple(quotas)) for start, quotas in d["stages"]),
            skips=tuple((a, b) for a, b in d["skips"]),
        )

    def position(self, served: Any) -> np.ndarray:
        """Map the n-th served sample to its position in the order."""
        at = np.array(served, np.int64)
        for first, end in self.skips:
            at = np.where(at >= first, at + (end - first), at)
        return at

    def stage(self, position: np.ndarray) -> np.ndarray:
        """Return the stage in which each of these positions lies."""
        return np.searchsorted([s.start for s in self.stages], position, side="right") - 1

    def epochs(self, served: int) -> dict[str, float]:
        """Return how often each source, going by its weights, has been read once this many samples are served."""
        at, drawn = int(self.position(served)), np.zeros(len(self.streams))
        for number, stage in enumerate(self.stages):
            end = self.stages[number + 1].start if number + 1 < len(self.stages) else at
            drawn += max(0, min(end, at) - stage.start) * np.array(stage.quotas) / stage.block
        sizes, counts = dict[str, int](), dict[str, float]()
        for stream, count in zip(self.streams, drawn.tolist(), strict=True):
            sizes[stream.source] = sizes.get(stream.source, 0) + stream.num_samples
            counts[stream.source] = counts.get(stream.source, 0.0) + count
        return {source: counts[source] / size for source, size in sizes.items() if size}

    def locate(self, served: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream and the sample that the run serves at each of these places."""
        at = np.atleast_1d(self.position(served))
        index, group = _divmod(at, self.groups)
        stage = self.stage(at)
        stream, draw = np.empty(at.shape, np.int64), np.empty(at.shape, np.int64)
        for s, here in _each(stage):
            stream[here], draw[here] = self._draws(s, group[here], index[here])
        sample = np.empty(at.shape, np.int64)
        for d, here in _each(stream):
            sample[here] = self._sample(d, draw[here] * self.groups + group[here])
        return stream.reshape(np.shape(served)), sample.reshape(np.shape(served))

    def _draws(self, stage: int, group: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map indices of groups to the stream that each draws from, and the number of the group's draw from it."""
        quotas = np.array(self.stages[stage].quotas)
        groups, which = np.unique(group, return_inverse=True) if stage else (np.zeros(1, np.int64), 0)
        before = np.array([self._drawn_before(stage, g) for g in groups.tolist()])
        index = index - self._first_index(stage, group)
        only = np.flatnonzero(quotas)
        if len(only) == 1:
            return np.full(index.shape, only[0]), before[which, only[0]] + index
        block, place = _divmod(index, self.stages[stage].block)
        blocks, pattern = np.unique(block * self.groups + group, return_inverse=True)
        patterns = [self._pattern(stage, b % self.groups, b // self.groups) for b in blocks.tolist()]
        stream, rank = (np.stack(part)[pattern, place] for part in zip(*patterns, strict=True))
        return stream, before[which, stream] + block * quotas[stream] + rank

    def _first_index(self, stage: int, group: Any) -> Any:
        return -((group - self.stages[stage].start) // self.groups)

    def _drawn_before(self, stage: int, group: int) -> np.ndarray:
        """Return how often the group has drawn from each stream when the stage begins."""
        if stage == 0:
            return np.zeros(len(self.streams), np.int64)
        if (stage, group) not in self._drawn:
            length = self._first_index(stage, group) - self._first_index(stage - 1, group)
            blocks, rest = divmod(length, self.stages[stage - 1].block)
            quotas = np.array(self.stages[stage - 1].quotas)
            part = np.bincount(self._pattern(stage - 1, group, blocks)[0][:rest], minlength=len(quotas))
            self._drawn[stage, group] = self._drawn_before(stage - 1, group) + blocks * quotas + part
        return self._drawn[stage, group]

    def _pattern(self, stage: int, group: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the stream of each place of a block, and how many earlier places have the same stream."""
        known = self._patterns.get((stage, group, block))
        if known is None:
            size = self.stages[stage].block
            shuffled = permute(np.arange(size), size, key_of(self.seed, 1, stage, group, block))
            quotas = np.array(self.stages[stage].quotas)
            streams = np.repeat(np.arange(len(quotas), dtype=np.int16), quotas)[shuffled]
            ranks = np.empty(size, np.int16 if size <= 1 << 15 else np.int32)
            firsts = np.cumsum(quotas) - quotas
            ranks[np.argsort(streams, kind="stable")] = np.arange(size) - np.repeat(firsts, quotas)
            known = streams, ranks
            while len(self._patterns) >= max(64, (1 << 19) // size):
                self._patterns.pop(next(iter(self._patterns)))
            self._patterns[stage, group, block] = known
        return known

    def _sample(self, stream: int, ordinal: np.ndarray) -> np.ndarray:
        """Map ordinals, which count all groups' draws from a stream, to its samples."""
        s = self.streams[stream]
        epoch, place = _divmod(ordinal, s.num_samples)
        # Lanes: the places of one group are consecutive.
        step, lane = _divmod(place, self.groups)
        place = lane * (s.num_samples // self.groups) + np.minimum(lane, s.num_samples % self.groups) + step
        size = s.window * s.per_unit
        window, inside = _divmod(place, size)
        epoch, window = _same(epoch), _same(window)
        sizes = np.minimum(size, s.num_samples - window * size)
        place = window * size + permute(inside, sizes, key_of(self.seed, 2, stream, epoch, window))
        unit, k = _divmod(place, s.per_unit)
        whole = s.num_samples // s.per_unit  # the last unit may be short: it stays last
        if whole:
            key, at = key_of(self.seed, 3, stream, epoch), np.minimum(unit, whole - 1)
            first, count = at.min(), at.max() - at.min() + 1
            if count < len(at) and not np.ndim(key):  # many samples of few units
                moved = permute(first + np.arange(count), whole, key)[at - first]
            else:
                moved = permute(at, whole, key)
            unit = np.where(unit < whole, moved, unit)
        return unit * s.per_unit + k


def continued(served: Order, cursor: int, wanted: Order) -> Order:
    """Join two orders: `served` up to the cursor, and from there on the weights, skipped ranges and added streams of
    `wanted`. No sample is served again before its turn, and none is left out."""
    at, added = int(served.position(cursor)), len(wanted.streams) - len(served.streams)
    assert wanted.streams[: len(served.streams)] == served.streams and wanted.groups == served.groups, "checked before"
    stages = [Stage(s.start, s.quotas + (0,) * added) for s in served.stages if s.start < at or s.start == 0]
    now = [s for s in wanted.stages if s.start <= at][-1]
    if now.quotas != stages[-1].quotas:
        stages = [s for s in stages if s.start < at] + [Stage(at, now.quotas)]
    stages += [s for s in wanted.stages if s.start > at]
    skips = [skip for skip in served.skips if skip[1] <= at]
    skips += [(max(first, at), end) for first, end in wanted.skips if end > at]
    return Order(served.seed, served.groups, wanted.streams, tuple(stages), tuple(skips))


def _divmod(a: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Do what np.divmod does, which is slower: it does not vectorise division by a scalar."""
    quotient = a // b
    return quotient, a - quotient * b


def _each(values: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield the distinct values, each with an index of its places."""
    if len(values) and (values == values[0]).all():
        yield int(values[0]), slice(None)
    else:
        for value in np.unique(values).tolist():
            yield value, values == value


def _same(values: np.ndarray) -> Any:
    """Return a single value if all are the same."""
    return values[0] if (values == values[0]).all() else values


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Round weights (by the largest remainder) to integers that add up to a block: the smallest one in which every
    weight gets a place. A weight that is worth less than half a place of the largest block may get none."""
    total, block = sum(weights), BLOCK
    if not total:
        raise ValueError("all weights are 0")
    while min(w for w in weights if w > 0) * block < total / 2 and block < MAX_BLOCK:
        block *= 2
    exact = [block * w / total for w in weights]
    floors = [int(x) for x in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (floors[i] - exact[i], i))
    for i in by_rest[: block - sum(floors)]:
        floors[i] += 1
    for i, w in enumerate(weights):
        if w > 0 and not floors[i] and 2 * block * w >= total:
            floors[i], floors[floors.index(max(floors))] = 1, max(floors) - 1
    return tuple(floors)
