"""From kill -9 of a worker until training continues: ours against torchrun's elastic restart and torchft, in turns, on
the model of examples/quickstart.toml with two data-parallel replicas of one CPU rank each, over Gloo. Batches are two
sequences per replica, since the clocks measure the recovery and not the step that is redone.

    next commit     from the kill to the next step that all its members have finished, beyond those finished before
    full strength   from the kill to the next such step with two members

Each kill hits a job that has just run some steps, at a random moment of a step and of a random replica (the same seeds
for all). A step counts when every member has reported that its optimizer did it; one that a member had begun to report
before the kill doesn't. Silence means death after the same time for all (--heartbeat). The settings of each:

    torchrun    DDP, a checkpoint after every step in memory (/dev/shm), 0.1 s between looks at the workers (default),
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which no restart over Gloo succeeds
    torchft     its lighthouse, Manager, DDP and Optimizer wrapper, over Gloo; quorum ticks and heartbeats every 100 ms
                (defaults), 10 s for stragglers to join (README); the killed replica is restarted at the moment of the
                kill; the survivor continues with half the batch. In 0.2.0 its DDP fails in the survivor when Gloo
                does: fixed in recovery_peers/ft.py
    quick join  the same with 1 s for stragglers: once the new replica is there, both continue without waiting for the
                dead one's heartbeats to time out. The better of the two at the next commit is the peer
    ours        the job with its defaults

Bar: next commit at least 10x faster than torchrun's and no slower than torchft's, medians. The interpreter that has
torchft is named by PHALANX_PEERS_PYTHON. The peers listen on all interfaces, so everything runs in a network namespace
of its own (needs unshare and ip)."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from phalanx.chaos.scene import Scene

REPLICAS, WARM_UP, ROUNDS = (2, 3, 1) if SMOKE else (2, 8, 10)  # WARM_UP: steps at full strength before a kill
HEARTBEAT_S, JOIN_MS, TICK_MS = 5.0, 10_000, 100  # torchft's default, its README's value, its default
QUICK_JOIN_MS = 1000
PATIENCE_S = 300.0 if SMOKE else 120.0
BARS = {"torchrun": 10, "torchft": 1}  # their time to the next commit over ours
PEERS = os.environ.get("PHALANX_PEERS_PYTHON")
HERE = Path(__file__).parent / "recovery_peers"
LOOPBACK = 'hostname localhost && ip link set lo up && exec "$@"'
NAMESPACE = ["unshare", "--map-root-user", "--net", "--uts", "sh", "-c", LOOPBACK, "sh"]


@dataclass
class Kill:
    replica: int
    moment: float  # after a commit, in steps


@dataclass
class Job:
    folder: Path  # empty; in memory if /dev/shm exists
    heartbeat_s: float
    step_s: list[float] = field(default_factory=list)  # undisturbed steps, for the report

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def tail(self) -> str:
        return f"the log ends\n{self.log.read_text()[-3000:]}"


@dataclass
class Commit:
    step: int
    members: int
    generation: int
    began: float  # when the first member reported it
    at: float  # when the last member reported it


def can_unshare() -> bool:
    try:
        return not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    except FileNotFoundError:
        return False


def shot(pid: int) -> float:
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


class Processes:
    """Processes that start here, and end with the block; their children end with them."""

    def __init__(self, job: Job):
        self._job, self._all = job, []

    def start(self, *command: object, **environment: str) -> None:
        threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._job.log.open("ab") as log:
            said = {"stdout": log, "stderr": log, "env": os.environ | threads | environment}
            self._all.append(subprocess.Popen([str(part) for part in command], **said))

    def check(self) -> None:
        """Check that none has ended, except by kill -9."""
        for process in self._all:
            if process.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"{process.args} ended with {process.returncode}: {self._job.tail()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self._all):
            process.terminate()
        for process in self._all:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Watch:
    """Reads the lines that the workers append to the journal, and waits for them."""

    def __init__(self, job: Job, processes: Processes):
        self._job, self._processes, self._read = job, processes, 0
        self.lines: list[dict] = []

    def until(self, found: Callable[[], object]):
        deadline = time.monotonic() + PATIENCE_S
        while not (out := found()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing for {PATIENCE_S:.0f} s: {self._job.tail()}")
            self._processes.check()
            time.sleep(0.01)  # this does not affect the figures, which come from the lines
            if self._job.journal.exists():
                data = self._job.journal.read_bytes()[self._read :]
                whole = data[: data.rfind(b"\n") + 1]
                self._read += len(whole)
                self.lines += map(json.loads, whole.splitlines())
        return out

    def last(self, kind: str, **what) -> dict | None:
        """Return the latest line of this type."""
        same = (line for line in reversed(self.lines) if line["type"] == kind)
        return next((line for line in same if what.items() <= line.items()), None)

    def commits(self) -> list[Commit]:
        """Return the steps that all their members have finished."""
        said: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
        for line in self.lines:
            if line["type"] == "commit":
                said[line["generation"], line["step"], line["members"]][line["replica"]] = line["at"]
        all_said = ((key, at.values()) for key, at in said.items() if len(at) == key[2])
        return sorted((Commit(k[1], k[2], k[0], min(at), max(at)) for k, at in all_said), key=lambda c: c.at)

    def measure(self, kill: Kill, shoot: Callable[[int], float], late_lines: bool = False) -> dict[str, float]:
        """Wait for undisturbed steps, let `shoot` kill that replica and return the time, and wait for both clocks. With
        `late_lines` a step may be reported after the kill that was finished before: only one of a later generation
        counts."""
        start = time.monotonic()

        def full() -> list[Commit]:
            return [c for c in self.commits() if c.began > start and c.members == REPLICAS]

        before = self.until(lambda: (found := full())[WARM_UP:] and found)
        took = [b.at - a.at for a, b in itertools.pairwise(before[2:])]
        self._job.step_s += took
        time.sleep(max(0, before[-1].at + kill.moment * statistics.median(took) - time.monotonic()))
        killed = shoot(kill.replica)
        generation = before[-1].generation if late_lines else -1

        def after(members: int) -> Commit | None:
            done = [c.step for c in self.commits() if c.began <= killed]
            late = (c for c in self.commits() if c.began > killed and c.step > max(done) and c.members >= members)
            return next((c for c in late if c.generation > generation), None)

        return {
            "next_commit_s": self.until(lambda: after(1)).at - killed,
            "full_strength_s": self.until(lambda: after(REPLICAS)).at - killed,
        }


def torchrun(job: Job, kills: list[Kill]) -> list[dict[str, float]]:
    keep_alive = f"keep_alive_interval=1,keep_alive_max_attempt={max(1, round(job.heartbeat_s))}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 1, "--nproc-per-node", REPLICAS]
    agent += ["--max-restarts", len(kills), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    agent += ["--rdzv-conf", keep_alive, "--local-addr", "localhost"]
    with Processes(job) as processes:
        worker = [HERE / "elastic.py", job.journal, job.folder / "checkpoint"]
        processes.start(*agent, *worker, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        watch = Watch(job, processes)
        return [watch.measure(kill, lambda r: shot(watch.last("start", replica=r)["pid"])) for kill in kills]


def torchft(job: Job, kills: list[Kill], join_ms: int = JOIN_MS) -> list[dict[str, float]]:
    with Processes(job) as processes:
        times = round(1000 * job.heartbeat_s), join_ms, TICK_MS
        processes.start(PEERS, HERE / "ft.py", "lighthouse", job.journal, *times)
        watch = Watch(job, processes)
        address = watch.until(lambda: watch.last("lighthouse"))["address"]

        def start(replica: int) -> None:
            processes.start(PEERS, HERE / "ft.py", "replica", job.journal, address, replica)

        def shoot(replica: int) -> float:
            killed = shot(watch.last("start", replica=replica)["pid"])
            start(replica)
            return killed

        for replica in range(REPLICAS):
            start(replica)
        return [watch.measure(kill, shoot) for kill in kills]


def ours(job: Job, kills: list[Kill]) -> list[dict[str, float]]:
    """Run `phalanx train` with two nodes of one rank each and no spare. A step counts as committed when it is in the
    run's metrics, some milliseconds after all ranks have done it."""
    values = {
        "layout.tp": 1,
        "layout.ranks_per_node": 1,
        "recovery.spares": 0,
        "recovery.on": "true",
        "recovery.beat_s": job.heartbeat_s / 3,  # a node is dead after three missed beats
        "train.steps": 100_000,
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "run.dir": job.folder,
        "checkpoint.every_steps": -1,
    }
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    over = threading.Event()
    with Processes(job) as processes:
        processes.start(sys.executable, "-m", "phalanx.cli.main", "train", *sets)
        watch = Watch(job, processes)
        while not (found := list(job.folder.glob("quickstart-*"))):
            processes.check()
            time.sleep(0.05)
        scene = Scene(found[0])
        relay = threading.Thread(target=_relay, args=(scene, job, over))
        relay.start()
        try:
            return [watch.measure(kill, lambda r: shot(scene.workers[r]["pid"]), late_lines=True) for kill in kills]
        finally:
            over.set()
            relay.join()


def _relay(scene: Scene, job: Job, over: threading.Event) -> None:
    """Relay every row of the metrics as commits of its members."""
    seen = 0
    with job.journal.open("a", buffering=1) as journal:
        while not over.wait(0.002):
            scene.look()
            now = time.monotonic()
            forms = {form["generation"]: form["replicas"] for form in scene.forms}
            for row in scene.rows[seen:]:
                members = forms[row["generation"]]
                about = {"at": now, "step": row["step"], "generation": row["generation"], "members": len(members)}
                journal.write("".join(json.dumps({"type": "commit", "replica": r, **about}) + "\n" for r in members))
            seen = len(scene.rows)


def main():
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_S, help="seconds of silence that mean death")
    parser.add_argument("--peers-only", action="store_true", help="without ours; not ok then")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kinds: dict[str, Callable[[Job, list[Kill]], list[dict[str, float]]]] = {"torchrun": torchrun}
    if not args.inside:
        if not SMOKE or can_unshare():
            os.execvp(NAMESPACE[0], [*NAMESPACE, sys.executable, *sys.argv, "--inside"])
        print("peers: not measured, since no network namespace can be made")
        kinds.clear()
    elif PEERS:
        kinds |= {"torchft": torchft, "torchft, quick join": partial(torchft, join_ms=QUICK_JOIN_MS)}
    else:
        print("torchft: not measured, since PHALANX_PEERS_PYTHON names no interpreter")
    if not args.peers_only:
        kinds["ours"] = ours
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    steps: dict[str, list[float]] = {name: [] for name in kinds}
    rng, memory = random.Random(args.seed), Path("/dev/shm")
    for round_ in range(args.rounds):
        kill, names = Kill(rng.randrange(REPLICAS), rng.random()), list(kinds)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            folder = Path(tempfile.mkdtemp(prefix="phalanx-recovery-", dir=memory if memory.exists() else None))
            try:
                job = Job(folder, args.heartbeat)
                (row,) = kinds[name](job, [kill])
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            rows[name].append(row)
            steps[name] += job.step_s
            took = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
            step_s, load = statistics.median(job.step_s), os.getloadavg()[0]
            print(
                f"round {round_ + 1}, {name}: {took}; step {step_s:.2f}, load {load:.0f}", file=sys.stderr, flush=True
            )
    report(rows, steps, args)


def report(rows: dict[str, list[dict[str, float]]], steps: dict[str, list[float]], args: argparse.Namespace) -> None:
    print(f"{machine()}\n{args.rounds} kills each, in turns; heartbeats time out after {args.heartbeat:g} s; ", end="")
    print("medians, [lowest, highest]\n")
    print(f"{'':22}{'step s':>8}{'next commit s':>22}{'less a step':>13}{'full strength s':>22}")
    medians: dict[str, dict[str, float]] = {}
    for name, found in rows.items():

        def cell(key: str, found=found) -> str:
            values = [row[key] for row in found]
            return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"

        medians[name] = {key: statistics.median(row[key] for row in found) for key in found[0]}
        medians[name]["step_s"] = statistics.median(steps[name])
        less = medians[name]["next_commit_s"] - medians[name]["step_s"]
        print(f"{name:22}{medians[name]['step_s']:8.2f}{cell('next_commit_s'):>22}{less:13.2f}", end="")
        print(f"{cell('full_strength_s'):>22}")
    print()
    ratios = {}
    for peer, bar in BARS.items():
        settings = [name for name in rows if name.startswith(peer)]
        if settings and "ours" in rows:
            best = min(settings, key=lambda name: medians[name]["next_commit_s"])
            ratios[peer] = medians[best]["next_commit_s"] / medians["ours"]["next_commit_s"]
            pairs = zip(rows[best], rows["ours"], strict=True)
            middle, low, high = bootstrap([a["next_commit_s"] / b["next_commit_s"] for a, b in pairs])
            print(f"{best} over ours, next commit: {ratios[peer]:.1f} (bar {bar}); ", end="")
            print(f"by round {middle:.1f} (95 % {low:.1f} to {high:.1f})")
    finish(
        "recovery",
        all(ratios.get(peer, 0) >= bar for peer, bar in BARS.items()),
        rounds=args.rounds,
        heartbeat_s=args.heartbeat,
        over_ours={peer: round(ratio, 2) for peer, ratio in ratios.items()},
        medians={name: {key: round(value, 3) for key, value in found.items()} for name, found in medians.items()},
    )


if __name__ == "__main__":
    main()
