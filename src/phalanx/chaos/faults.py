"""The faults. Each takes the scene and a random generator, damages real processes, and describes what it did. It
schedules what must be undone through `later`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

from phalanx.chaos import door
from phalanx.chaos.scene import Scene

Later = Callable[[float, Callable[[], None]], None]
SLOW_S, SLICE_S = 2.0, 0.2
LINK_MBIT = 20
LATE_S = 1.0  # delay of control messages
JUMP_S = 3600.0


class Impossible(Exception):
    """The fault has no target right now."""


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
    """Kill everything on a node at once."""
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


def stopped(scene: Scene, rng: Random, later: Later) -> str:
    """Stop the controller: it stays alive but silent."""
    if "controller" not in scene.agents:
        raise Impossible
    _kill(scene.agents["controller"], signal.SIGSTOP)
    return f"controller, pid {scene.agents['controller']}: SIGSTOP, for good"


def hang(scene: Scene, rng: Random, later: Later) -> str:
    rank = _pick(rng, list(scene.workers))
    _kill(scene.workers[rank]["pid"], signal.SIGSTOP)
    return f"rank {rank}, pid {scene.workers[rank]['pid']}: SIGSTOP, for good"


def slow(scene: Scene, rng: Random, later: Later) -> str:
    """Stop a rank half of the time."""
    rank = _pick(rng, list(scene.workers))
    pid = scene.workers[rank]["pid"]
    for i in range(int(SLOW_S / SLICE_S)):
        later(i * SLICE_S, partial(_kill, pid, (signal.SIGSTOP, signal.SIGCONT)[i % 2]))
    later(SLOW_S, partial(_kill, pid, signal.SIGCONT))
    return f"rank {rank}: stopped half of the time, for {SLOW_S:g} s"


def lock(scene: Scene, rng: Random, later: Later) -> str:
    """Block all threads of a process that stays alive."""
    rank = _pick(rng, list(scene.workers))
    _order(scene, scene.workers[rank]["pid"], "lock")
    return f"rank {rank}, pid {scene.workers[rank]['pid']}: holds the interpreter's lock, for good"


def clock(scene: Scene, rng: Random, later: Later) -> str:
    """Move the clock of all processes of a node at once, or of the controller."""
    names = sorted({w["node"] for w in scene.workers.values()} & scene.agents.keys())
    names += ["controller"] * ("controller" in scene.agents)
    if not names:
        raise Impossible
    name, seconds = rng.choice(names), rng.choice((-JUMP_S, JUMP_S))
    for pid in tree_of(scene.agents[name]):
        _order(scene, pid, "clock", seconds=seconds)
    return f"{name}: its clock jumps by {seconds:+g} s"


def messages(scene: Scene, rng: Random, later: Later) -> str:
    """Garble an agent's or the controller's messages, and kill a worker so that there is something to report."""
    name = _member(scene, rng)
    rank = _pick(rng, [rank for rank, w in scene.workers.items() if w["node"] == name])
    teller = name if rng.random() < 0.5 or "controller" not in scene.agents else "controller"
    _order(scene, scene.agents[teller], "messages", seconds=LATE_S)
    _kill(scene.workers[rank]["pid"])
    return f"{teller}: what it says comes twice, and up to {LATE_S:g} s late; rank {rank}: SIGKILL"


def _order(scene: Scene, pid: int, kind: str, **more: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        if _takes_orders(pid):
            door.order(scene.door, pid, kind, **more)


def _takes_orders(pid: int) -> bool:
    """Return True if the process catches the signal, which would end any other process."""
    try:
        caught = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (door.SIGNAL - 1) & 1)


def disk(scene: Scene, rng: Random, later: Later) -> str:
    """Let no file of a writing process grow: a full disk for that process alone."""
    there = keepers(scene)
    if "controller" in scene.agents:
        there.append(("the controller", scene.agents["controller"]))
    if not there:
        raise Impossible
    name, pid = rng.choice(there)
    _fill_disk(pid, later)
    return f"{name}: no file can grow, for {SLOW_S:g} s"


def keepers(scene: Scene) -> list[tuple[str, int]]:
    return sorted((f"the keeper of {at}", pid) for (at, name), pid in scene.services.items() if name == "keeper")


def _fill_disk(pid: int, later: Later) -> None:
    try:
        old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, old[1]))
    except (OSError, ProcessLookupError):
        raise Impossible from None
    later(SLOW_S, partial(_unlimit, pid, old))


def save(scene: Scene, rng: Random, later: Later) -> str:
    """Make the last checkpoint fail at first, and kill a worker meanwhile."""
    there = keepers(scene)
    if not there:
        raise Impossible
    for _, pid in there:
        _fill_disk(pid, later)
    rank = _pick(rng, list(scene.workers))
    later(SLOW_S / 2, partial(_kill, scene.workers[rank]["pid"]))
    return f"no keeper can write, for {SLOW_S:g} s; rank {rank}: SIGKILL meanwhile"


def _unlimit(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def cut(scene: Scene, rng: Random, later: Later) -> str:
    """Cut a node off: either too briefly to be declared dead, or longer, so that it comes back and is ignored."""
    if not scene.network:
        raise Impossible
    name = _member(scene, rng)
    host, seconds = scene.network.hosts[name], scene.beat_s * rng.choice((0.5, 6.0))
    host.cut()
    later(seconds, host.mend)
    return f"{name}: cut off from all others for {seconds:g} s"


def link(scene: Scene, rng: Random, later: Later) -> str:
    if not scene.network:
        raise Impossible
    name = _member(scene, rng)
    scene.network.hosts[name].slow(LINK_MBIT)
    later(SLOW_S, scene.network.hosts[name].hurry)
    return f"{name}: {LINK_MBIT} Mbit/s to it and from it, for {SLOW_S:g} s"


def memory(scene: Scene, rng: Random, later: Later) -> str:
    """Limit a rank to the memory that it has: its next allocation fails."""
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
    """Flip a bit in each snapshot that the keeper holds, then kill a rank that would continue from one."""
    at = _member(scene, rng)
    pid = scene.services.get((at, "keeper"), 0)
    flipped = 0
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:phalanx-snapshot" in os.readlink(fd):
                with fd.open("r+b") as file:
                    size = file.seek(0, os.SEEK_END)
                    if not size:
                        continue  # still being written
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
    "stopped": stopped,
    "hang": hang,
    "slow": slow,
    "memory": memory,
    "store": _service("store"),
    "data": _service("data"),
    "keeper": _service("keeper"),
    "snapshot": snapshot,
    "lock": lock,
    "clock": clock,
    "messages": messages,
    "disk": disk,
    "cut": cut,
    "link": link,
}
ON_THE_NETWORK = ("cut", "link")


def tree_of(pid: int) -> list[int]:
    """List the process and all its descendants."""
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
