"""Inject 1,000 corruptions into a small checkpoint (8 ranks, two steps), and see what a load makes of them: ours and
torch's DCP, with the same kinds and numbers for both. Each corruption is undone before the next; the seed is fixed.

Ours counts as found if Reader.verify reports it. In addition, a load of the whole state (into one rank) must raise, or
return the saved values where the damage is outside the state. DCP's load raises, silently returns wrong values, or
returns the right values; "died" is a process that ended or took longer than 60 s. DCP has no tails and no manifest, so
the last 1,024 bytes of its files (the end of a zip archive) and its .metadata are damaged instead.

Bar: 1,000 of 1,000 found by verify, no load with wrong values, no error other than BadCheckpoint, or FileNotFoundError
for a manifest that is not there."""

from common import SMOKE, finish, machine, options  # isort: skip

import random
import select
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoint_cases import Ranks, small_values

from phalanx.checkpoint.files import Reader, write_whole
from phalanx.core.checkpoint import MANIFEST, PAGE_BYTES, BadCheckpoint, Entry, Manifest, Plan, file_name
from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.core.store import Folder

LAYOUT = Layout(shard=2) if SMOKE else Layout(replica=2, shard=2, tp=2)
RANKS = LAYOUT.world_size
ENTRIES = [  # odd sizes, so that there is padding
    *(Entry(Held(f"weights/{i}", (1201 + i, 257), tp_dim=i % 2), "float32") for i in range(6)),
    *(Entry(Held(f"exp_avg/{i}", (1201 + i, 257), tp_dim=i % 2), "float32") for i in range(6)),
    *(Entry(Held(f"norm/{i}", (1021,)), "float32") for i in range(4)),
    Entry(Held("buffers/bias", (77,), whole=True), "float32"),
]
OLD, NEW = 1, 2  # steps; the older one differs in every value
SEED = 20261115

KINDS = {
    "bit flipped in the data": 250,
    "bit flipped in the tail": 110,
    "bit flipped in the manifest": 110,
    "file truncated": 90,
    "manifest truncated": 30,
    "page zeroed": 90,
    "range duplicated over another": 80,
    "files of two ranks swapped": 28,
    "a rank's file in place of another's": 40,
    "files of two steps swapped": 30,
    "stale files of the older step": 60,
    "manifest of the older step": 2,
    "files missing": 50,
    "bytes appended": 30,
}
if SMOKE:
    KINDS = dict.fromkeys(KINDS, 1)


class Target:
    """The files of both steps: the good contents in memory, the current ones on disk."""

    def __init__(self, folders: dict[int, Path], files: list[str], manifest: str, tail_of: Callable[[int, str], int]):
        self.folders, self.files, self.manifest, self.tail_of = folders, files, manifest, tail_of
        names = [*files, manifest]
        self.good = {(step, name): (folder / name).read_bytes() for step, folder in folders.items() for name in names}
        self.changed: set[tuple[int, str]] = set()

    def put(self, step: int, name: str, data: bytes | None) -> None:
        path = self.folders[step] / name
        self.changed.add((step, name))
        if data is None:
            path.unlink()
        else:
            path.unlink(missing_ok=True)  # a new inode, as a copy would be
            path.write_bytes(data)

    def undo(self) -> None:
        for step, name in self.changed:
            (self.folders[step] / name).write_bytes(self.good[step, name])
        self.changed.clear()


def flip(data: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    at, bit = rng.randrange(start, stop), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def damage(target: Target, kind: str, turn: int, rng: random.Random) -> None:
    """Apply one corruption; a draw that changes nothing is repeated."""
    while True:
        changes = draw(target, kind, turn, rng)
        if any(data != target.good[key] for key, data in changes.items()):
            break
        turn = rng.randrange(1 << 30)
    for (step, name), data in changes.items():
        target.put(step, name, data)


def draw(target: Target, kind: str, turn: int, rng: random.Random) -> dict[tuple[int, str], bytes | None]:
    good, files, manifest = target.good, target.files, target.manifest
    name = files[turn % len(files)]
    data, tail_at = good[NEW, name], target.tail_of(NEW, name)
    at_manifest = (NEW, manifest)
    if kind == "bit flipped in the data":
        return {(NEW, name): flip(data, 0, tail_at, rng)}
    if kind == "bit flipped in the tail":
        return {(NEW, name): flip(data, tail_at, len(data), rng)}
    if kind == "bit flipped in the manifest":
        return {at_manifest: flip(good[at_manifest], 0, len(good[at_manifest]), rng)}
    if kind == "file truncated":
        short = rng.choice([0, 1, PAGE_BYTES, tail_at, len(data) - 1, rng.randrange(len(data)), rng.randrange(tail_at)])
        return {(NEW, name): data[:short]}
    if kind == "manifest truncated":
        return {at_manifest: good[at_manifest][: rng.choice([0, 64, rng.randrange(len(good[at_manifest]))])]}
    if kind == "page zeroed":
        at = rng.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
        return {(NEW, name): data[:at] + bytes(min(PAGE_BYTES, len(data) - at)) + data[at + PAGE_BYTES :]}
    if kind == "range duplicated over another":
        size = rng.choice([64, 512, PAGE_BYTES, 16 * PAGE_BYTES])
        a, b = (rng.randrange((len(data) - size) // 64) * 64 for _ in range(2))
        return {(NEW, name): data[:b] + data[a : a + size] + data[b + size :]}
    pairs = [(a, b) for a in files for b in files if a != b]
    if kind == "files of two ranks swapped":
        a, b = [pair for pair in pairs if pair[0] < pair[1]][turn % (len(pairs) // 2)]
        return {(NEW, a): good[NEW, b], (NEW, b): good[NEW, a]}
    if kind == "a rank's file in place of another's":
        a, b = pairs[turn % len(pairs)]
        return {(NEW, a): good[NEW, b]}
    some = [f for i, f in enumerate(files) if (turn * 37 + 1) % (1 << len(files)) >> i & 1] or files
    if kind == "files of two steps swapped":
        return {(NEW, f): good[OLD, f] for f in some} | {(OLD, f): good[NEW, f] for f in some}
    if kind == "stale files of the older step":
        return {(NEW, f): good[OLD, f] for f in some}
    if kind == "manifest of the older step":  # alone, and with all its files
        whole = {(NEW, f): good[OLD, f] for f in files} if turn % 2 else {}
        return {at_manifest: good[OLD, manifest], **whole}
    if kind == "files missing":
        return {at_manifest: None} if turn == 0 else {(NEW, f): None for f in some}
    if kind == "bytes appended":
        return {(NEW, name): data + rng.randbytes(rng.choice([1, 16, PAGE_BYTES]))}
    raise ValueError(kind)


# -- ours


def images(step: int):
    values = [small_values(e, i, step).numpy() for i, e in enumerate(ENTRIES)]
    for rank in range(RANKS):
        plan = Plan.of(ENTRIES, LAYOUT, LAYOUT.coord(rank))
        image = bytearray(plan.own_bytes)
        for s in plan.own:
            value = values[s.entry]
            part = value[s.r0 : s.r1, s.c0 : s.c1] if value.ndim > 1 else value[s.r0 : s.r1]
            image[s.offset : s.offset + s.size] = part.tobytes()
        yield memoryview(image), b"random state of a rank"


class Ours:
    name = "ours"

    def __init__(self, folder: Path):
        self.store = Folder(folder)
        names = {step: f"step-{step:09d}-aabbccdd" for step in (OLD, NEW)}
        self.manifests = {
            step: write_whole(self.store, Manifest(name, step, LAYOUT, ENTRIES, [], step), images(step))
            for step, name in names.items()
        }
        self.truth = [small_values(e, i, NEW).numpy() for i, e in enumerate(ENTRIES)]
        own = [self.manifests[NEW].plan(rank).own_bytes for rank in range(RANKS)]
        files = [file_name(rank) for rank in range(RANKS)]
        self.target = Target(
            {step: folder / name for step, name in names.items()},
            files,
            MANIFEST,
            lambda _step, name: own[files.index(name)],
        )

    def verify(self) -> tuple[bool, str]:
        """Return whether verify reports damage, and the text of any unexpected error."""
        try:
            return bool(Reader(Folder(self.store.path), self.manifests[NEW].name).verify()), ""
        except (BadCheckpoint, FileNotFoundError):
            return True, ""
        except Exception as error:
            return True, f"verify: {error!r}"

    def load(self) -> tuple[str, str]:
        try:
            reader = Reader(Folder(self.store.path), self.manifests[NEW].name)
            found, wanted = [], []
            for entry in ENTRIES:
                held = entry.held
                room = np.zeros((held.num_rows, held.num_cols * held.inner * entry.item_bytes), np.uint8)
                found.append(room)
                wanted.append((held.name, (0, held.num_rows, 0, held.num_cols), room))
            reader.fill_blocks(wanted)
        except (BadCheckpoint, FileNotFoundError):
            return "raises", ""
        except Exception as error:
            return "raises", f"load: {error!r}"
        same = all(a.tobytes() == b.tobytes() for a, b in zip(found, self.truth, strict=True))
        return ("harmless" if same else "wrong values"), ""


# -- DCP


class Peer:
    name = "DCP"

    def __init__(self, folder: Path):
        self.tensors = [(e.held.name, e.held.shape) for e in ENTRIES]
        folders = {step: folder / f"step-{step}" for step in (OLD, NEW)}
        with Ranks("save_small", RANKS, tensors=self.tensors) as ranks:
            for step, path in folders.items():
                ranks.ask(path=str(path), salt=step)
        files = sorted(path.name for path in folders[NEW].glob("*.distcp"))
        assert len(files) == RANKS, files
        self.target = Target(folders, files, ".metadata", lambda step, name: self._size(folders[step] / name) - 1024)
        self._start()

    @staticmethod
    def _size(path: Path) -> int:
        return path.stat().st_size

    def _start(self) -> None:
        self.child = Ranks("load_small", 1, tensors=self.tensors, salts=[OLD, NEW])

    def load(self) -> str:
        self.child.tell(path=str(self.target.folders[NEW]), salt=NEW)
        (process,) = self.child.processes
        if select.select([process.stdout], [], [], 60)[0] and (line := process.stdout.readline()):
            return line.split('"found": "')[1].split('"')[0]
        process.kill()
        self.child.close()
        self._start()
        return "died"

    def close(self) -> None:
        self.child.close()


def main():
    parser = options(__doc__)
    parser.add_argument("--no-dcp", action="store_true", help="ours alone")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="phalanx-corruption-"))
    began = time.monotonic()
    try:
        (folder / "ours").mkdir()
        ours = Ours(folder / "ours")
        assert ours.verify() == (False, "") and ours.load() == ("harmless", ""), "the checkpoint is bad by itself"
        peer = None
        if not args.no_dcp:
            peer = Peer(folder / "dcp")
            assert peer.load() == "harmless", "DCP's checkpoint is bad by itself"
        size = ours.manifests[NEW].size_bytes
        print(
            f"{machine()}\n{RANKS} ranks, {size / 1e6:.1f} MB a step, {sum(KINDS.values())} corruptions, seed {SEED}\n"
        )
        print(f"{'':38}{'ours':>28}{'DCP':>36}")
        print(
            f"{'':38}{'number':>7}{'verify':>8}{'load':>7}{'wrong':>6}{'':>4}{'load raises':>13}{'wrong values':>14}"
            f"{'harmless':>10}{'died':>6}"
        )
        rng, peer_rng = random.Random(SEED), random.Random(SEED)
        total, theirs, unclean, missed = Counter(), Counter(), [], Counter()
        for kind, count in KINDS.items():
            mine, other = Counter(), Counter()
            for turn in range(count):
                damage(ours.target, kind, turn, rng)
                found, odd = ours.verify()
                became, odd_load = ours.load()
                ours.target.undo()
                mine["verify"] += found
                mine[became] += 1
                unclean += [f"{kind}: {text}" for text in (odd, odd_load) if text]
                if peer:
                    damage(peer.target, kind, turn, peer_rng)
                    other[peer.load()] += 1
                    peer.target.undo()
            missed[kind] = count - mine["verify"]
            total += mine
            theirs += other
            print(
                f"{kind:38}{count:7}{mine['verify']:8}{mine['raises']:7}{mine['wrong values']:6}{'':4}"
                f"{other['raises']:13}{other['wrong values']:14}{other['harmless']:10}{other['died']:6}"
                + ("" if not missed[kind] else "  NOT FOUND")
            )
            sys.stdout.flush()
        assert ours.verify() == (False, "") and ours.load() == ("harmless", ""), "a corruption was not undone"
        if peer:
            assert peer.load() == "harmless", "a corruption was not undone"
            peer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count = sum(KINDS.values())
    print(
        f"{'':38}{count:7}{total['verify']:8}{total['raises']:7}{total['wrong values']:6}{'':4}"
        f"{theirs['raises']:13}{theirs['wrong values']:14}{theirs['harmless']:10}{theirs['died']:6}"
    )
    print(f"\nerrors of another kind: {len(unclean)} {unclean[:3] or ''}; {time.monotonic() - began:.0f} s")
    finish(
        "checkpoint_corruption",
        count == 1000 and total["verify"] == count and not total["wrong values"] and not unclean,
        injected=count,
        found=total["verify"],
        load_raised=total["raises"],
        wrong_values=total["wrong values"],
        unclean=len(unclean),
        missed={kind: number for kind, number in missed.items() if number},
        dcp=dict(theirs),
    )


if __name__ == "__main__":
    main()
