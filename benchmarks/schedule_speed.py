"""How fast the gang scheduler decides.

First the queue of Kueue's own performance test with topology (kueue, test/performance/scheduler/configs/tas: 640 nodes
in one block of 10 racks of 64, 15,000 gangs of 2, 4 and 8 pods, each for some seconds): from the submission of a gang
to its start in the journal, which is durable when the start counts. Kueue publishes 401.5 s, 37.4 gangs a second.
Second, one gang of 100,000 GPUs on a cluster of 125,000 nodes of 8.

Third, the same short queue (150 gangs of 2, 4 and 8 of 16 nodes, each `true` on its first node) through Debian's Slurm,
live on this machine with 16 slurmd of their own (root, slurm-wlm and munge), and through our scheduler with the same
processes: from the release of all to the end of the last.

Bars: at least 10 times Kueue's rate in wall time, waits for the disk included; less than a second for the large gang;
no slower than Slurm, without which it is not `ok`. The rate per CPU-second is printed too: the machine may have other
work."""

from common import SMOKE, finish, machine, options  # isort: skip

import os
import random
import subprocess
import tempfile
import time
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Rules, S
from phalanx.control.schedule.cells import Cells
from phalanx.control.schedule.promises import check
from phalanx.control.schedule.scheduler import Scheduler
from phalanx.runtime.journal import Journal
from tests.engines.submitted import until
from tests.engines.virtual_slurm import VirtualSlurm, why_not

KUEUE = 37.4  # gangs a second: 15,000 in 401.5 s, see above
GANGS = 300 if SMOKE else 15_000
BIG = (1_250, 1_000) if SMOKE else (125_000, 100_000)  # nodes of 8, GPUs
BAR, BIG_BAR_S = 10, 1.0
NODES, SHORT = (8, 5) if SMOKE else (16, 150)  # the queue that Slurm also runs


def kueue_cells() -> Cells:
    return Cells(1, ("rack", "block"), [(f"rack-{n // 64}", "block-0") for n in range(640)])


def rate(gangs: int, folder: Path) -> tuple[float, float, int]:
    """Return gangs per second of wall time and of CPU time, and the number started. Simulated jobs end after 1 to 4 s
    of the cluster's own time, so that the queue is always longer than the room."""
    scheduler = Scheduler(kueue_cells(), [f"n{n}" for n in range(640)], Rules(), ())
    draw, ends, started = random.Random(0), [], 0
    journal = Journal(folder / "journal")
    now_ns, wall, cpu = 0, time.monotonic(), time.process_time()

    def tell(event: asks.Event, kind: str) -> None:
        nonlocal started
        for command in scheduler.apply(now_ns, event):
            if isinstance(command, asks.Start):
                seats = [node for replica in command.replicas for node, _ in replica]
                journal.append("start", {"job": command.job, "nodes": seats}, now_ns)
                heappush(ends, (now_ns + draw.randrange(1, 5) * S, command.job))
                started += 1
        journal.append(kind, {"job": getattr(event, "job", "")}, now_ns)

    for number in range(gangs):
        pods = draw.choice((2, 4, 8))
        level = draw.choice(("rack", "", ""))  # required, preferred, unconstrained
        tell(asks.Submit(Ask(f"g{number}", f"cq-{number % 30}", nodes=pods, gpus=1, level=level)), "submit")
    while ends:
        now_ns, job = heappop(ends)
        tell(asks.Ended(job), "ended")
    journal.wait(journal.number)
    took = gangs / (time.monotonic() - wall), gangs / (time.process_time() - cpu)
    journal.close()
    check(scheduler)
    assert all(not used for used in (account.used for account in scheduler.accounts.values()))
    return *took, started


def big(nodes: int, gpus: int) -> tuple[float, int]:
    """Return the CPU seconds to place one gang, replicas of 128 nodes, in a cluster with holes; and the leaves that it
    spans."""
    cells = Cells(8, ("leaf", "pod"), [(f"l{n // 64}", f"p{n // 2048}") for n in range(nodes)])
    draw = random.Random(1)
    cells.take([(node, draw.randrange(1, 9)) for node in draw.sample(range(nodes), nodes // 20)])
    replica = 5 if SMOKE else 125
    ask = Ask("big", replicas=gpus // 8 // replica, nodes=replica, gpus=8)
    began = time.process_time()
    found = cells.place(ask, ask.replicas)
    assert found
    cells.take([spot for spots in found[0] for spot in spots])
    took = time.process_time() - began
    return took, len({cells.domain[0][node] for spots in found[0] for node, _ in spots})


def short_queue() -> list[int]:
    """Return the number of nodes of each gang."""
    draw = random.Random(2)
    return [draw.choice((2, 4, 8)) for _ in range(SHORT)]


def by_slurm(folder: Path) -> float:
    """Return gangs per second. They are submitted on hold and released at once, so that submission does not count."""
    with VirtualSlurm(folder, NODES) as slurm:
        words = ("sbatch", "--parsable", "--hold", "--exclusive", "--output=/dev/null", "--wrap=true")
        jobs = [slurm.run(*words, f"--nodes={nodes}") for nodes in short_queue()]
        began = time.monotonic()
        slurm.run("scontrol", "release", ",".join(jobs))
        left = partial(slurm.run, "squeue", "-h", "-t", "PD,R,CG", "-o", "%i")
        until(lambda: not left(), changes=left)
        took = time.monotonic() - began
        done = slurm.run("squeue", "-h", "-t", "CD", "-o", "%i").split()
        assert len(done) == SHORT, f"{len(done)} of {SHORT} ended well"
    return SHORT / took


def by_ours(folder: Path) -> float:
    """Return gangs per second. Every event is journaled before it is acted on, as the queue of a machine does."""
    cells = Cells(1, ("leaf",), [(f"leaf-{n // 2}",) for n in range(NODES)])
    scheduler = Scheduler(cells, [f"n{n}" for n in range(NODES)], Rules(), ())
    journal, going = Journal(folder / "short"), dict[int, tuple[str, subprocess.Popen[bytes]]]()

    def tell(event: asks.Event, job: str) -> None:
        journal.wait(journal.append(type(event).__name__, {"job": job}, time.time_ns()))
        for command in scheduler.apply(time.time_ns(), event):
            if isinstance(command, asks.Start):
                process = subprocess.Popen(["true"])
                going[process.pid] = (command.job, process)

    began = time.monotonic()
    for number, nodes in enumerate(short_queue()):
        tell(asks.Submit(Ask(f"g{number}", nodes=nodes, gpus=1)), f"g{number}")
    while going:
        pid, status = os.wait()
        job, process = going.pop(pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        tell(asks.Ended(job, ok=not status), job)
    took = time.monotonic() - began
    journal.close()
    check(scheduler)
    assert all(gang.notes[-1][1] == "done" for gang in scheduler.gangs.values())
    return SHORT / took


def main() -> None:
    options(__doc__).parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu, started = rate(GANGS, Path(folder))
    print(f"{started:,} gangs started: {wall:,.0f} a second ({cpu:,.0f} per CPU-second), Kueue {KUEUE}")
    took, leaves = big(*BIG)
    print(f"one gang of {BIG[1]:,} GPUs on {BIG[0]:,} nodes: {took:.3f} s of CPU time, {leaves:,} leaves")
    ok, slurm = wall >= BAR * KUEUE and took < BIG_BAR_S and started == GANGS, 0.0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slurm").mkdir()
        ours = by_ours(Path(folder))
        if lacking := "smoke" if SMOKE else why_not():
            print(f"Slurm is not measured: {lacking}")
        else:
            slurm = by_slurm(Path(folder) / "slurm")
    print(f"{SHORT} short gangs on {NODES} nodes, to the last end: ours {ours:,.1f} a second, Slurm {slurm:,.1f}")
    finish("schedule_speed", ok and 0 < slurm <= ours, gangs=started, gangs_per_s=round(wall, 1),
           gangs_per_cpu_s=round(cpu, 1), kueue=KUEUE, times_kueue=round(wall / KUEUE, 1), bar=BAR, big_gpus=BIG[1],
           big_nodes=BIG[0], big_s=round(took, 4), big_bar_s=BIG_BAR_S, big_leaves=leaves, short_gangs=SHORT,
           short_gangs_per_s=round(ours, 2), slurm_gangs_per_s=round(slurm, 2) or None)  # fmt: skip


if __name__ == "__main__":
    main()
