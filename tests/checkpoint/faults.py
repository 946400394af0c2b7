"""What the tests of faults share: a small state whose bytes depend on its step, a keeper in this process, and ways to
damage what is on a disk."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.files import Reader, write_whole
from phalanx.checkpoint.keeper import Keeper, Line, Rank
from phalanx.checkpoint.memory import Slot
from phalanx.core.checkpoint import BadCheckpoint, Entry, Manifest, Plan, checkpoint_name
from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.gate.peers import Peers
from tests.runtime.conftest import alive_with
from tests.system.command import Command

PEERS = Peers(key="5e" * 32)
LAYOUT = Layout(shard=2)
RNG = b"where the dice stand"


def entries_of(rows: int = 24, cols: int = 8) -> list[Entry]:
    shapes = {"weights/w": (rows, cols), "exp_avg/w": (rows, cols), "weights/norm": (5,), "weights/odd": (1, 3)}
    return [Entry(Held(name, shape), "float32") for name, shape in shapes.items()]


def plans_of(entries, layout=LAYOUT) -> list[Plan]:
    return [Plan.of(entries, layout, layout.coord(rank)) for rank in range(layout.world_size)]


def tensor_of(entry: Entry, step: int) -> np.ndarray:
    """Return rows of bytes that are different for every tensor and step."""
    held = entry.held
    seed = [step, *held.name.encode()]
    shape = (held.num_rows, held.num_cols * held.inner * entry.item_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def state_of(entries, step) -> dict[str, bytes]:
    return {e.held.name: tensor_of(e, step).tobytes() for e in entries}


def image_of(entries, plan: Plan, step: int) -> np.ndarray:
    image = np.zeros(plan.image_bytes, np.uint8)
    for s in plan.segments:
        col = entries[s.entry].held.inner * entries[s.entry].item_bytes
        part = tensor_of(entries[s.entry], step)[s.r0 : s.r1, s.c0 * col : s.c1 * col]
        image[s.offset : s.offset + s.size] = part.reshape(-1)
    return image


def manifest_of(entries, step, mark="aa", layout=LAYOUT, **more) -> Manifest:
    return Manifest(checkpoint_name(step, mark), step, layout, entries, [], updates=step, **more)


def make(store, step, entries=None, mark="aa", layout=LAYOUT) -> str:
    """Make a committed checkpoint, and return its name."""
    entries = entries or entries_of()
    images = ((memoryview(image_of(entries, plan, step))[: plan.own_bytes], RNG) for plan in plans_of(entries, layout))
    done = write_whole(store, manifest_of(entries, step, mark, layout), images)
    Catalog(store).added(done)
    return done.name


def contents(reader: Reader) -> dict[str, bytes]:
    """Read every tensor, which verifies all of it."""
    out, wanted = {}, []
    for entry in reader.manifest.entries:
        held = entry.held
        room = np.zeros((held.num_rows, held.num_cols * held.inner * entry.item_bytes), np.uint8)
        out[held.name] = room
        wanted.append((held.name, (0, held.num_rows, 0, held.num_cols), room))
    reader.fill_blocks(wanted)
    return {name: room.tobytes() for name, room in out.items()}


def load_newest(catalog: Catalog, on_event=lambda event: None) -> tuple[str, dict[str, bytes]] | None:
    """Load as a run that resumes does: the newest, or the next older one when damage is found."""
    while reader := catalog.newest_good(on_event):
        try:
            return reader.name, contents(reader)
        except BadCheckpoint as error:
            catalog.judge(reader.name, str(error), on_event)
    return None


# -- a keeper


class Channel:
    """To the process that spawned the keeper. `on_send` sees every message; recv() ends when `close` was called."""

    def __init__(self, on_send=lambda message: None):
        self.sent, self.on_send, self._lock = [], on_send, threading.Lock()
        self._ours, self._theirs = os.pipe()

    def send(self, message):
        with self._lock:
            self.sent.append(message)
        self.on_send(message)

    def fileno(self):
        return self._ours

    def recv(self, timeout=None):
        return None

    def close(self):
        os.close(self._theirs)

    def __del__(self):
        os.close(self._ours)

    def of(self, kind):
        with self._lock:
            return [message for message in self.sent if message["type"] == kind]


def wait_for(happened, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not (got := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return got


@contextlib.contextmanager
def a_keeper(url, keep=(3, 0), serve=False, peers=PEERS, ranks=LAYOUT.world_size):
    channel = Channel()
    keeper = Keeper(channel, str(url), ranks, keep, peers, has_buddy=False)
    thread = threading.Thread(target=_serve, args=(keeper,), daemon=True)
    if serve:
        thread.start()
    try:
        yield keeper
    finally:
        channel.close()
        if serve:
            thread.join(10)
        keeper.writers.shutdown()
        keeper.committer.shutdown()
        keeper.retainer.shutdown()
        keeper.server.close()
        keeper.listener.close()


def _serve(keeper):
    nice, os.nice = os.nice, lambda _: 0  # not of the process that runs the tests
    try:
        keeper.serve()
    finally:
        os.nice = nice


def lines_to(keeper, entries, layout=LAYOUT) -> list[Line]:
    base = manifest_of(entries, 0, layout=layout).to_json()
    plans = enumerate(plans_of(entries, layout))
    return [Line(keeper.address, rank, plan.image_bytes, plan.own_bytes, base) for rank, plan in plans]


def header_of(rank, step, mark="aa", world_size=LAYOUT.world_size) -> dict:
    said = {"checkpoint": checkpoint_name(step, mark), "rank": rank, "world_size": world_size, "step": step}
    return {**said, "generation": 0, "seal": seal_of(step), "rng": base64.b64encode(RNG).decode()}


def about(step, mark="aa") -> dict:
    return {"checkpoint": checkpoint_name(step, mark), "step": step, "generation": 0}


def seal_of(step) -> str:
    """Return what all ranks report alike about a step."""
    return json.dumps({"cursor": 4 * step, "ledger": "", "updates": step}, sort_keys=True)


def fill(slot: Slot, entries, plan: Plan, rank: int, step: int, mark="aa", seal=True) -> None:
    """Fill a slot as a snapshot does."""
    slot.break_seal()
    slot.array()[:] = image_of(entries, plan, step)
    for chunk in range(len(slot.bounds)):
        slot.put_hash(chunk)
    if seal:
        slot.seal(header_of(rank, step, mark))


def adopt(keeper, entries, step, mark="aa", layout=LAYOUT) -> None:
    """Give it sealed snapshots of all ranks, as if workers had been there."""
    keeper.base = json.loads(manifest_of(entries, 0, layout=layout).to_json())
    for rank, plan in enumerate(plans_of(entries, layout)):
        slot = Slot(plan.image_bytes, plan.own_bytes)
        fill(slot, entries, plan, rank, step, mark)
        keeper.ranks[rank] = Rank([slot], json.loads(json.dumps(asdict(layout))))


def order_of(shards, step, mark="aa") -> dict:
    """Return the order that a node gives when the files of all ranks are written."""
    files = [(s["size"], s["root"]) for s in sorted(shards, key=lambda s: s["rank"])]
    about = {"step": step, "generation": 0, "seal": seal_of(step)}
    return {"type": "commit", "checkpoint": checkpoint_name(step, mark), "files": files, **about}


# -- damage


def flip(path, at=0, bit=1):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def fill_disk(path, leave_bytes=0):
    """Fill a disk, then make room for `leave_bytes`. Return the file that takes up the rest."""
    file = path / "filler"
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.ftruncate(fd, max(0, os.fstat(fd).st_size - leave_bytes))
    os.close(fd)
    return file


@contextlib.contextmanager
def small_disk(path, size_kb=0, read_only=False):
    """Yield a file system of its own; None where mounting is not allowed."""
    path.mkdir()
    options = ",".join([f"size={size_kb}k,nr_inodes=1000"] * bool(size_kb) + ["ro"] * read_only) or "rw"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True).returncode
    try:
        yield None if mounted else path
    finally:
        if not mounted:
            subprocess.run(["umount", "-l", path], check=True)


# -- real runs

PATIENCE_S = 300.0  # on a busy machine


class Again(Command):
    """Another attempt in the same directory, which reports only on its own run."""

    def __init__(self, directory: Path, *args: object, **more):
        shutil.rmtree(directory / "scratch", ignore_errors=True)
        self.earlier = set((directory / "runs").glob("[!.]*"))
        super().__init__(directory, *args, **more)

    @property
    def runs(self) -> list[Path]:
        return sorted(set((self.directory / "runs").glob("[!.]*")) - self.earlier)

    def pid_of(self, who: str) -> int:
        """Return the process id of the launcher, "rank N" or "keeper-N", which is found by the log it writes; 0: not
        there."""
        if who == "launcher":
            return self.process.pid
        node, log = "*", f"rank-{int(who.split()[1]):05d}.log" if who.startswith("rank") else "keeper.log"
        if who.startswith("keeper"):
            node = f"node-{who.split('-')[1]}"
        for pid in alive_with(self.token):
            with contextlib.suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/2")).match(f"{node}/{log}"):
                    return pid
        return 0


def resumed_from(command: Command) -> int:
    """Return the step from which the run resumed; 0: from the beginning."""
    events = command.events("resume")
    return events[-1]["step"] if events else 0


def committed(directory: Path) -> list[int]:
    """Return the steps of all checkpoints of all runs in a directory."""
    return sorted(int(p.parent.name.split("-")[1]) for p in directory.glob("runs/*/checkpoints/*/manifest.json"))


_SLOW_DISK = """
import os, shutil, time
def slowly(real, at_least=0):
    def slow(first, *args, **more):
        if not at_least or len(args[0]) >= at_least:  # the run's record writes a few bytes for a step
            time.sleep(1.5)
        return real(first, *args, **more)
    return slow
os.pwrite, shutil.rmtree = slowly(os.pwrite, 64), slowly(shutil.rmtree)
"""


def slow_disk(directory: Path) -> dict[str, str]:
    """Return the environment of a run in which each write of a checkpoint takes 1.5 s (two writes for a rank's file),
    and so does removing one."""
    folder = directory / "slow"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_SLOW_DISK)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
