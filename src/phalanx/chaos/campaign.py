"""Compare a run with faults to one without. Both start as a user would start them. Faults come at steps that the seed
draws, and each is followed until the gang has committed a step again. At the end weights and ledgers are compared."""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from phalanx.chaos import door
from phalanx.chaos.faults import FAULTS, ON_THE_NETWORK, Impossible, save
from phalanx.chaos.hosts import Switch, why_not
from phalanx.chaos.scene import GONE, Event, Scene
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.core.ledger import Record
from phalanx.observe.record import RunRecord, run_folders
from phalanx.runtime import kernel

LOOK_S = 0.01
LATE_S = 0.3  # longest delay after the step of a fault is reached
RECOVERY_LIMIT_S = 120.0
START_LIMIT_S = 300.0
SETS = ["recovery.deaths_per_node=1000000"]  # injected deaths must not take a node out
# After these faults the gang may continue without a new generation.
NO_GENERATION = ("controller", "stopped", "slow", "memory", "store", "clock", "disk", "cut", "link")
SETTLE_S = 1.0  # wait after such a fault
PHASES = ("start", "restore", "save")  # phases of a run in which extra faults may be requested


@dataclass
class Fault:
    kind: str
    step: int
    text: str = ""
    at: float = 0.0  # seconds since 1970, like the times below
    generation: int = 0
    detected: float = 0.0
    decided: float = 0.0
    started: float = 0.0
    committed: float = 0.0
    restore_s: float = 0.0
    reason: str = ""
    rung: int = -1

    def seconds(self) -> dict[str, float | None]:
        marks = [self.at, self.detected, self.decided, self.started, self.committed]
        names = ("detect", "decide", "re-form", "redo")
        parts = {name: b - a if a and b else None for name, a, b in zip(names, marks, marks[1:], strict=False)}
        total = self.committed - self.at if self.committed else None
        return {**parts, "restore": self.restore_s or None, "total": total}


@dataclass
class Outcome:
    faults: list[Fault] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    clean: Path = Path()
    broken: Path = Path()
    steps: int = 0
    lost_steps: int = 0  # steps that were done and then abandoned

    @property
    def ok(self) -> bool:
        return not self.differences


class Started:
    """`phalanx train` in another process."""

    def __init__(
        self,
        job_file: Path | None,
        sets: list[str],
        job: Job,
        name: str,
        log: Path,
        env: dict[str, str] | None = None,
        network: Switch | None = None,
        more: Sequence[str] = (),
    ):
        command = [sys.executable, "-P", "-m", "phalanx.cli.main", "train", *([str(job_file)] if job_file else [])]
        for text in (*sets, f"name={name}"):
            command += ["--set", text]
        command += more
        if network:
            command = network.command(*command)
        root = Path(job.run.dir)
        before = set(run_folders(root, name)) if root.is_dir() else set()
        self.log = log
        with log.open("wb") as out:
            me = os.getpid()
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=lambda: kernel.die_with_parent(me),
            )
        deadline = time.monotonic() + START_LIMIT_S
        while not (new := set(run_folders(root, name)) - before if root.is_dir() else set()):
            self.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"the run did not start in {START_LIMIT_S:g} s", remedy=f"see {log}")
            time.sleep(0.05)
        (self.folder,) = new

    def check(self) -> bool:
        """Return True if it is over; raise RunFailed if it failed."""
        code = self.process.poll()
        if code:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise RunFailed(f"the run ended with code {code}\n{tail}", remedy=f"see {self.log}")
        return code is not None

    def stop(self) -> None:
        if self.process.poll() is None:
            for _ in range(2):  # the second signal ends the grace period
                self.process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def _running(*args: Any) -> Iterator[Started]:
    run = Started(*args)
    try:
        yield run
    finally:
        run.stop()


def check(job: Job, kinds: list[str]) -> None:
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        raise UserError("no such fault", field="--kinds", value=unknown[0], remedy=f"choose among {', '.join(FAULTS)}")
    if {*kinds} & {*ON_THE_NETWORK} and (why := why_not()):
        raise UserError(why, field="--kinds", value=", ".join(kinds), remedy="leave out cut and link")
    if not job.recovery.on:
        remedy = "set recovery.on = true"
        raise UserError("a fault would end the run", field="recovery.on", value=job.recovery.on, remedy=remedy)
    if job.train.reduction != "exact":
        raise UserError(
            "with fewer replicas the last bits would differ, so nothing could be compared",
            field="train.reduction",
            value=job.train.reduction,
            remedy='set train.reduction = "exact"',
        )


def run(
    job_file: Path | None,
    sets: list[str],
    job: Job,
    seed: int,
    count: int,
    kinds: list[str],
    say: Callable[[str], None],
    phases: Sequence[str] = (),
) -> Outcome:
    """Run the campaign. `phases`: a subset of PHASES; each adds one fault."""
    check(job, kinds)
    sets = SETS + sets
    rng, out = Random(seed), Outcome(steps=job.train.steps)  # noqa: S311
    plan = draw(rng, job.train.steps, count, kinds)
    root = Path(job.run.dir)
    root.mkdir(parents=True, exist_ok=True)
    say("the clean run")
    with _running(job_file, sets, job, f"{job.name}-clean", root / f"{job.name}-clean.log") as clean:
        while not clean.check():
            time.sleep(0.1)
        out.clean = clean.folder
    say(f"the run with {count} faults")
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-chaos-")))
        network, more = None, list[str]()
        if {*kinds} & {*ON_THE_NETWORK}:
            names = [f"node-{i}" for i in range(num_nodes(job.layout) + job.recovery.spares)]
            network = stack.enter_context(Switch(1, names))
            more = ["--hosts", str(_write_hosts(network, private / "hosts")), "--listen", network.address()]
        env, log = door.environment(private / "door"), root / f"{job.name}-chaos.log"
        broken = stack.enter_context(_running(job_file, sets, job, f"{job.name}-chaos", log, env, network, more))
        out.broken = broken.folder
        scene = Scene(broken.folder, private / "door", network, job.recovery.beat_s)
        _Injector(broken, scene, rng, plan, out, say, phases).go()
    out.differences = _compare(out)
    return out


def draw(rng: Random, last: int, count: int, kinds: list[str]) -> list[Fault]:
    """Draw which faults come, and at which steps. Their targets are drawn when they come."""
    gap = last / (count + 1)
    drawn = [kind for _ in range(-(-count // len(kinds))) for kind in rng.sample(kinds, len(kinds))]  # each in turn
    steps = [max(2, round(gap * (i + 1) + rng.uniform(-0.3, 0.3) * gap)) for i in range(count)]
    return [Fault(kind, step) for kind, step in zip(drawn, steps, strict=False)]


def _write_hosts(network: Switch, path: Path) -> Path:
    """Create the hosts, and write the file that tells the run how to start a process on each."""
    hosts = [network.add(name, whole=False) for name in network.names]
    path.write_text("".join(f"{h.name} nsenter --net=/proc/{h.pid}/ns/net\n" for h in hosts))
    return path


class _Injector:
    def __init__(
        self,
        run: Started,
        scene: Scene,
        rng: Random,
        plan: list[Fault],
        out: Outcome,
        say: Callable[[str], None],
        phases: Sequence[str],
    ):
        self.run, self.scene, self.rng, self.plan, self.out, self.say = run, scene, rng, plan, out, say
        self.phases = phases
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    def go(self) -> None:
        if "start" in self.phases:
            self._when(lambda: bool(self.scene.workers), "worker", "while the run starts")
        for at, fault in enumerate(self.plan):
            while not self._over() and (self.scene.step < fault.step or not self.scene.generation):
                pass
            if self._over():
                break
            if at == 0 and "restore" in self.phases:
                known = len(self.scene.forms)
                self._when(lambda: True, "worker", "to be recovered from")
                self._when(partial(self._has_formed, known), "worker", "while the others restore")
            self._inject(fault)
        if "save" in self.phases:
            self._when(lambda: self.scene.step >= self.out.steps - 1, "save", "in the last save")
        while not self._over():
            pass
        forms = self.scene.forms
        self.out.lost_steps = sum(form["last"] - form["step"] for form in forms if form["branch"])

    def _has_formed(self, known: int) -> bool:
        return len(self.scene.forms) > known

    def _when(self, ready: Callable[[], bool], kind: str, text: str) -> None:
        """Inject a fault as soon as the run is ready, without waiting for the outcome."""
        while not ready() and not self._over():
            pass
        fault = Fault(kind, self.scene.step, at=time.time(), generation=self.scene.generation)
        with contextlib.suppress(Impossible):
            do = save if kind == "save" else FAULTS[kind]
            fault.text = f"{text}: {do(self.scene, self.rng, self._after)}"
            self.out.faults.append(fault)
            self.say(fault.text)

    def _over(self) -> bool:
        self.scene.look()
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if self.run.check():
            return True
        time.sleep(LOOK_S)
        return False

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, len(self._later) + int(1e6 * seconds), call))

    def _inject(self, fault: Fault) -> None:
        time.sleep(self.rng.uniform(0.0, LATE_S))  # land anywhere in a step
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while True:
            self.scene.look()
            fault.at, fault.generation = time.time(), self.scene.generation
            try:
                fault.text = FAULTS[fault.kind](self.scene, self.rng, self._after)
                break
            except Impossible:
                if self._over() or time.monotonic() > deadline:
                    return
        self.out.faults.append(fault)
        seen, settle = len(self.scene.events), time.monotonic() + SETTLE_S
        while not self._over() and not fault.committed and time.monotonic() < deadline:
            for event in self.scene.events[seen:]:
                _follow(fault, event)
            if fault.kind in NO_GENERATION and time.monotonic() > settle and not self._later and not fault.decided:
                break
        parts = " ".join(f"{name} {s:.2f}" for name, s in fault.seconds().items() if s is not None)
        self.say(f"step {self.scene.step}: {fault.kind}: {fault.text}: {parts or 'the gang continued'}")


def _follow(fault: Fault, event: Event) -> None:
    kind, at = event["type"], event["time"]
    if at < fault.at:
        return
    died = kind in ("exit", "hang") or (kind == "node" and event["what"].startswith(GONE))
    if died and not fault.detected:
        fault.detected = at
    elif kind == "control form" and event["generation"] > fault.generation:
        fault.detected = fault.detected or at
        fault.decided, fault.started, fault.committed = fault.decided or at, 0.0, 0.0
        fault.reason, fault.rung = event["reason"], max(fault.rung, event["rung"])
    elif kind == "control started" and fault.decided and not fault.committed:
        fault.started = at
    elif kind == "entered" and fault.decided:
        fault.restore_s = max(fault.restore_s, event["restore_s"])
    elif kind == "first commit" and event["generation"] > fault.generation and fault.decided:
        fault.started = fault.started or at  # the ranks' report may come before the controller's
        fault.committed = at


def _compare(out: Outcome) -> list[str]:
    """List the differences between the two runs."""
    summaries = [RunRecord.open(path).summary for path in (out.clean, out.broken)]
    if not all(summaries):
        return ["a run left no summary"]
    differences = []
    a, b = ({(d["weights"], d["optimizer"]) for d in s["digests"] if d} for s in summaries if s)
    if not a or not b:
        differences.append("a run reported no digests of its weights")
    elif a != b:
        differences.append("the weights or the optimizer's state differ")
    ledgers = [_ledger(path / "ledger.jsonl") for path in (out.clean, out.broken)]
    for step in range(out.steps):
        one, other = ledgers[0].get(step), ledgers[1].get(step)
        if one is None or one != other:
            differences.append(f"the ledgers differ from step {step} on: {one} and {other}")
            break
    return differences


def _ledger(path: Path) -> dict[int, tuple[Any, ...]]:
    """Return the finally committed steps: a later record of a step replaces an abandoned one."""
    records = [Record.from_line(line) for line in path.read_text().splitlines()]
    return {r.step: (r.samples, r.data_version, r.loss_bits, r.norm_bits) for r in records}


def table(out: Outcome) -> str:
    names = ("detect", "decide", "re-form", "restore", "redo", "total")
    lines = [f"{'fault':11}{'step':>5}" + "".join(f"{name:>9}" for name in names) + "  rung  what"]
    lines.append("-" * len(lines[0]))
    for fault in out.faults:
        seconds = fault.seconds()
        cells = "".join(f"{s:9.2f}" if (s := seconds[name]) is not None else f"{'-':>9}" for name in names)
        lines.append(f"{fault.kind:11}{fault.step:5}{cells}  {fault.rung if fault.rung >= 0 else '-':>4}  {fault.text}")
    return "\n".join(lines)
