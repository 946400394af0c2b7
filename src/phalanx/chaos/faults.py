"""The faults: each takes the scene and a generator of random numbers, does its damage to real processes, and says what
it did. What it must undo later it hands to `later`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from phalanx.chaos.scene import Scene

Later = Callable[[float, Callable[[], None]], None]
SLOW_S, SLICE_S = 3.0, 0.2


class Impossible(Exception):
    """There is nothing to do it to right now."""


def _pick(rng: Random, among: list[int]) -> int:
    if not among:
        raise Impossible
    return rng.choice(sorted(among))


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def worker(scene: Scene, rng: Random, later: Later) -> str:
    rank = _pick(rng, list(scene.workers))
    _kill(scene.workers[rank]["pid"])
    return f"rank {rank}, pid {scene.workers[rank]['pid']}: SIGKILL"


def _member(scene: Scene, rng: Random) -> str:
    nodes = sorted({w["node"] for w in scene.workers.values()} & scene.agents.keys())
    if not nodes:
        raise Impossible
    return rng.choice(nodes)


def agent(scene: Scene, rng: Random, later: Later) -> str:
    name = _member(scene, rng)
    _kill(scene.agents[name])
    return f"agent of {name}, pid {scene.agents[name]}: SIGKILL"


def node(scene: Scene, rng: Random, later: Later) -> str:
    """Everything on it at once."""
    name = _member(scene, rng)
    pids = tree_of(scene.agents[name])
    for pid in pids:
        _kill(pid)
    return f"{name}, {len(pids)} processes: SIGKILL"


def controller(scene: Scene, rng: Random, later: Later) -> str:
    if "controller" not in scene.agents:
        raise Impossible
    _kill(scene.agents["controller"])
    return f"controller, pid {scene.agents['controller']}: SIGKILL"


def hang(scene: Scene, rng: Random, later: Later) -> str:
    rank = _pick(rng, list(scene.workers))
    _kill(scene.workers[rank]["pid"], signal.SIGSTOP)
    return f"rank {rank}, pid {scene.workers[rank]['pid']}: SIGSTOP, for good"


def slow(scene: Scene, rng: Random, later: Later) -> str:
    """Half of the time it stands still."""
    rank = _pick(rng, list(scene.workers))
    pid = scene.workers[rank]["pid"]
    for i in range(int(SLOW_S / SLICE_S)):
        later(i * SLICE_S, partial(_kill, pid, (signal.SIGSTOP, signal.SIGCONT)[i % 2]))
    later(SLOW_S, partial(_kill, pid, signal.SIGCONT))
    return f"rank {rank}: stopped half of the time, for {SLOW_S:g} s"


def memory(scene: Scene, rng: Random, later: Later) -> str:
    """No more than it has: what it asks for next it does not get."""
    rank = _pick(rng, list(scene.workers))
    pid = scene.workers[rank]["pid"]
    try:
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    except (OSError, ProcessLookupError):
        raise Impossible from None
    return f"rank {rank}: address space limited to {used >> 20} MiB"


def _service(name: str) -> Callable[[Scene, Random, Later], str]:
    def kill(scene: Scene, rng: Random, later: Later) -> str:
        at = _member(scene, rng)
        pid = scene.services.get((at, name))
        if not pid:
            raise Impossible
        _kill(pid)
        return f"the {name} of {at}, pid {pid}: SIGKILL"

    return kill


def snapshot(scene: Scene, rng: Random, later: Later) -> str:
    """A byte of what the keeper holds is flipped; then the rank dies, and would go on from it."""
    at = _member(scene, rng)
    pid = scene.services.get((at, "keeper"), 0)
    flipped = 0
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:phalanx-snapshot" in os.readlink(fd):
                with fd.open("r+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    place = rng.randrange(size)
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
                    flipped += 1
    if not flipped:
        raise Impossible
    rank = _pick(rng, [rank for rank, w in scene.workers.items() if w["node"] == at])
    _kill(scene.workers[rank]["pid"])
    return f"a bit of {flipped} snapshots on {at}; rank {rank}: SIGKILL"


FAULTS: dict[str, Callable[[Scene, Random, Later], str]] = {
    "worker": worker,
    "agent": agent,
    "node": node,
    "controller": controller,
    "hang": hang,
    "slow": slow,
    "memory": memory,
    "store": _service("store"),
    "data": _service("data"),
    "keeper": _service("keeper"),
    "snapshot": snapshot,
}


def tree_of(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    out, todo = [], [pid]
    while todo:
        out.append(todo.pop())
        todo += children.get(out[-1], [])
    return out
