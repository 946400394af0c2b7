"""A failure stops only its own replica: real workers of 2, 4 and 8 replicas on CPU ranks, led by the real gang. Each
run kills a rank of replica 1 (SIGKILL) in forward, its replacement in backward, the next one in the reduction, and the
last one after the vote. Every micro-batch sleeps, as if an accelerator computed it, so that phases can be told apart
and eight ranks fit on two cores. Work per replica is the same at every width.

    next commit     from the kill until all survivors have committed a step of the next generation
    full strength   from the kill until all ranks have committed a step together with the new replica
    quiet, redo,    CPU-seconds of a survivor outside forward and backward in an undisturbed step, in the step of the
    join            kill up to its commit, and in the first step with the new replica
    pause           of a join: from the moment at which the gang orders it until all have committed the next step; and
                    how long all stood still for it, beyond a step

Bar: survivors build 0 engines and form 0 groups inside their replica after the start; weights and moments after every
step are those of an undisturbed run (exact reduction, fp32 and bf16); CPU outside forward and backward, to the next
commit, at 8 replicas at most 1.5x that at 2; next commit at 8 replicas at most 1.3x that at 2, which is judged only
where there are 16 cores: without them it is not `ok`."""

from common import SMOKE, finish, machine, options  # isort: skip

import itertools
import json
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

from phalanx.control.messages import Pause
from phalanx.core.job import DataConfig, Job, OptimizerConfig, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from tests.train.conductor import Conductor

CPU_BAR, WALL_BAR, WALL_CORES = 1.5, 1.3, 16
POINTS = ["forward", "vote"] if SMOKE else ["forward", "backward", "reduction", "vote"]
MICRO, SLEEP_S = 2, 0.02 if SMOKE else 0.2  # micro-batches of a replica, and how long each takes
WIDTHS = [(2, 1)] if SMOKE else [(2, 1), (4, 1), (8, 1), (2, 2)]  # replicas, tp
PRECISIONS = ["fp32"] if SMOKE else ["fp32", "bf16"]
SMALL = dict(vocab_size=257, dim=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=160)
LARGE = dict(vocab_size=257, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, ffn_dim=1376)  # 25 M parameters
VICTIM = 1  # the replica
MEDIANS = ("next_s", "full_s", "quiet_s", "redo_s", "join_s")  # medians over the kills of a run
ENTRY = "benchmarks.containment_cases"


class Plan:
    """Arguments of each worker, by its number: the first victim is known, the others are its replacements."""

    def __init__(self, layout, points, **common):
        self.victim, self.world = 1 + VICTIM * layout.replica_size, layout.world_size
        self.points, self.common = list(points), common

    def get(self, number):
        dies = self.points and (number == self.victim or number > self.world)
        return {**self.common, "point": self.points.pop(0) if dies else ""}


class Led(Conductor):
    """Records when a pause was ordered, and how long workers took to enter a generation."""

    def __init__(self, *args, **kw):
        self.pauses = {}  # generation that ends: when
        self.entered = []
        super().__init__(*args, **kw)

    def note(self, command):
        super().note(command)
        if isinstance(command, Pause):
            self.pauses.setdefault(command.generation, time.monotonic())

    def heard(self, event):
        super().heard(event)
        if event["type"] == "message" and event["body"].get("type") == "entered":
            self.entered.append(event["body"])


class Run:
    """The output of the workers of one run, and the forms that the gang sent."""

    def __init__(self, job, points, folder, sleep_s=SLEEP_S, digests=True, steps=0):
        """Run until all kill points were hit and all replicas are back, and for at least `steps` steps."""
        self.job, self.layout, self.journal, self.read = job, job.layout, folder / "journal.jsonl", 0
        self.commits, self.kills = [], []
        plan = Plan(job.layout, points, journal=str(self.journal), sleep_s=sleep_s, digests=digests)
        preload = ("phalanx.train.worker", "phalanx.model.dense", ENTRY)
        with Led(job, folder, preload=preload, entry=f"{ENTRY}:main", die=plan, deaths=1000) as self.led:
            self.led.until(lambda: len(self.look().kills) == len(points) and self.whole() and self.last >= steps, 180)

    def look(self):
        if self.journal.exists():
            data = self.journal.read_bytes()[self.read :]
            lines = data[: data.rfind(b"\n") + 1]
            self.read += len(lines)
            for line in map(json.loads, lines.splitlines()):
                (self.commits if line.pop("type") == "commit" else self.kills).append(line)
        return self

    def whole(self):
        """Return True if all replicas have committed two steps together since the last kill."""
        after = self.kills[-1]["at"] if self.kills else 0.0
        full = self.full_generations()
        found = [c for c in self.commits if c["at"] > after and c["generation"] in full]
        first = {c["generation"] for c in found if c["rank"] == VICTIM * self.layout.replica_size}
        return sum(c["generation"] in first for c in found) >= 2 * self.layout.world_size

    def full_generations(self):
        return {f.generation for f in self.led.forms if len(f.replicas) == self.layout.replica}

    @property
    def last(self):
        """Return the last step that all ranks have committed."""
        by_rank = [
            max((c["step"] for c in self.commits if c["rank"] == r), default=0) for r in range(self.layout.world_size)
        ]
        return min(by_rank)

    def survives(self, commit):
        return self.layout.coord(commit["rank"]).replica != VICTIM

    def first_of(self, generations, after):
        """Return the first commit of each rank in these generations after that time, by rank."""
        found = {}
        for c in sorted(self.commits, key=lambda c: c["at"]):
            if c["generation"] in generations and c["at"] > after:
                found.setdefault(c["rank"], c)
        return found

    def measure(self, kill):
        """Return the seconds after one kill, and the CPU of the survivors."""
        before = max(c["generation"] for c in self.commits if c["at"] < kill["at"])
        later = {f.generation for f in self.led.forms if f.generation > before}
        next_ = {r: c for r, c in self.first_of(later, kill["at"]).items() if self.survives(c)}
        full = self.first_of(later & self.full_generations(), kill["at"])
        said = min((at for at in self.led.pauses.values() if at > kill["at"]), default=None)
        done = max(c["at"] for c in full.values())
        joined = next(iter(full.values()))["generation"]
        last = max(c["at"] for c in self.commits if c["generation"] < joined)
        return {
            "next_s": max(c["at"] for c in next_.values()) - kill["at"],
            "full_s": done - kill["at"],
            "pause_s": done - said if said and said < done else None,
            "still_s": done - last,
            "taken_s": max(e["restore_s"] for e in self.led.entered if e["generation"] == joined),
            "redo_s": statistics.mean(c["outside_s"] for c in next_.values()),
            "join_s": statistics.mean(c["outside_s"] for c in full.values() if self.survives(c)),
        }

    def quiet(self):
        """Return the median seconds of undisturbed steps of survivors, and the median CPU-seconds outside forward and
        backward."""
        steps, outside = [], []
        for rank in range(self.layout.world_size):
            mine = [c for c in self.commits if c["rank"] == rank and self.survives(c)]
            for a, b in itertools.pairwise(mine[2:]):
                if a["generation"] == b["generation"] and b["generation"] in self.full_generations():
                    steps.append(b["at"] - a["at"])
                    outside.append(b["outside_s"])
        return statistics.median(steps), statistics.median(outside)

    def rebuilt(self):
        """Count the engines and groups that survivors have made beyond their first."""
        own = {c["rank"]: c for c in self.commits if self.survives(c)}
        return sum(c["engines"] - 1 for c in own.values()), sum(c["groups"] - 1 for c in own.values())

    def digests(self):
        """Return digests by rank and step; None: two workers differ."""
        found = {}
        for c in self.commits:
            if found.setdefault((c["rank"], c["step"]), c["digest"]) != c["digest"]:
                found[c["rank"], c["step"]] = None
        return found


def a_job(folder, model, layout, precision, seq_len=32):
    batch = MICRO * layout.replica
    return Job(
        model=ModelConfig(**model),
        layout=layout,
        train=TrainConfig(
            steps=100_000, seq_len=seq_len, global_batch=batch, micro_batch=1, precision=precision, reduction="exact",
            bucket_mb=0.45 / layout.tp,  # two buckets
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(source=str(folder / "text.txt")),
        run=RunConfig(dir=str(folder / "runs"), threads=1, device="cpu"),
    )  # fmt: skip


def loopback_bytes_s(size=(8 if SMOKE else 512) << 20):
    """Measure the speed of one connection on this machine, for bytes that are in memory at both ends."""
    data, best = bytearray(os.urandom(1 << 20)) * (size >> 20), 0.0
    room = memoryview(bytearray(size))
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        with ours, theirs:
            sender = threading.Thread(target=ours.sendall, args=(data,))
            began, at = time.perf_counter(), 0
            sender.start()
            while at < size:
                at += theirs.recv_into(room[at:])
            best = max(best, size / (time.perf_counter() - began))
            sender.join()
    return best


def contained(folder, replica, tp, precision):
    """Compare a disturbed run with an undisturbed one."""
    layout = Layout(replica=replica, tp=tp, ranks_per_node=tp)
    job = a_job(folder, SMALL, layout, precision)
    run = Run(job, POINTS, Path(tempfile.mkdtemp(dir=folder)))
    alone = Run(job, [], Path(tempfile.mkdtemp(dir=folder)), sleep_s=0.0, steps=run.last)
    want = alone.digests()
    got = {key: d for key, d in run.digests().items() if key in want}
    steps = {step for _, step in got}
    same = len(steps) >= run.last and all(d is not None and d == want[key] for key, d in got.items())
    rows = {kill["point"]: run.measure(kill) for kill in run.kills}
    step_s, quiet_s = run.quiet()
    engines, groups = run.rebuilt()
    name = f"{replica} x tp {tp}" if tp > 1 else f"{replica}"
    for point, row in rows.items():
        pause = f"{row['pause_s']:9.2f}" if row["pause_s"] else f"{'-':>9}"
        print(
            f"{name:>8} {precision:5} {point:10}{step_s:8.2f}{row['next_s']:15.2f}{row['full_s']:17.2f}{pause}"
            f"{1e3 * quiet_s:8.1f}{1e3 * row['redo_s']:8.1f}{1e3 * row['join_s']:8.1f}"
            f"{engines:9}{groups:8}{len(steps):7} {'same' if same else 'DIFFER'}",
            flush=True,
        )
    others = [w for w in run.led.died if w <= layout.world_size and layout.coord(w - 1).replica != VICTIM]
    return {
        "engines": engines,
        "groups": groups,
        "same": same,
        "died": len(others),
        "step_s": step_s,
        "quiet_s": quiet_s,
        **{key: statistics.median(row[key] for row in rows.values()) for key in MEDIANS if key != "quiet_s"},
    }


def joins(folder):
    """Measure the pause of a join with a large state."""
    job = a_job(folder, SMALL if SMOKE else LARGE, Layout(replica=2, ranks_per_node=1), "fp32", seq_len=16)
    run = Run(job, POINTS[:1], Path(tempfile.mkdtemp(dir=folder)), digests=False)
    (row,) = map(run.measure, run.kills)
    step_s, _ = run.quiet()
    size, speed = 12 * job.model.num_params, loopback_bytes_s()  # weights and two moments in fp32
    print(
        f"\na join with {size / 1e6:.0f} MB of state per rank: {row['pause_s']:.2f} s from pause to next commit;\n"
        f"all stood still for {row['still_s'] - step_s:.2f} s beyond a step of {step_s:.2f} s, the state came in "
        f"{row['taken_s']:.2f} s; bytes over loopback's {speed / 1e9:.2f} GB/s: {size / speed:.2f} s"
    )
    return {
        "join_pause_s": round(row["pause_s"], 3),
        "join_beyond_a_step_s": round(row["still_s"] - step_s, 3),
        "join_transfer_s": round(row["taken_s"], 3),
        "join_bytes_over_bandwidth_s": round(size / speed, 3),
        "join_bytes": size,
        "loopback_bytes_s": round(speed),
    }


def main():
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="2 and 8 replicas in fp32 alone, without the join")
    quick = parser.parse_args().quick
    widths, precisions = ([(2, 1), (8, 1)], ["fp32"]) if quick else (WIDTHS, PRECISIONS)
    cores = len(os.sched_getaffinity(0))
    print(f"{machine()}\n{MICRO} micro-batches of a replica, each {SLEEP_S} s at least; CPU in ms per survivor\n")
    print(
        f"{'replicas':>8} {'':5} {'killed in':10}{'step s':>8}{'next commit s':>15}{'full strength s':>17}"
        f"{'pause s':>9}{'quiet':>8}{'redo':>8}{'join':>8}{'engines':>9}{'groups':>8}{'steps':>7} bits"
    )
    with tempfile.TemporaryDirectory(prefix="phalanx-containment-") as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{i} little words of text, {i * i}.\n" for i in range(20_000)))
        cases = itertools.product(precisions, widths)
        found = {(*width, precision): contained(folder, *width, precision) for precision, width in cases}
        join = {} if quick else joins(folder)
    engines, groups, died = (sum(f[key] for f in found.values()) for key in ("engines", "groups", "died"))
    same = all(f["same"] for f in found.values())
    few, many = found[2, 1, "fp32"], found[max(r for r, _, _ in found), 1, "fp32"]
    cpu_ratio = many["redo_s"] / few["redo_s"]
    wall_ratio = many["next_s"] / few["next_s"] if cores >= WALL_CORES else None
    wall = f"{wall_ratio:.2f}" if wall_ratio else f"not measured, since there are {cores} cores and not {WALL_CORES}"
    print(f"\nsurvivors: {engines} engines built, {groups} groups formed inside their replica, {died} died")
    print(f"CPU outside forward and backward to the next commit, 8 replicas over 2: {cpu_ratio:.2f} (bar {CPU_BAR})")
    print(f"next commit, 8 replicas over 2: {wall} (bar {WALL_BAR})")
    ok = engines == groups == died == 0 and same and cpu_ratio <= CPU_BAR
    finish(
        "containment",
        ok and wall_ratio is not None and wall_ratio <= WALL_BAR,
        engines=engines,
        groups=groups,
        survivors_died=died,
        same_bits=same,
        quick=quick,
        cpu_ratio=round(cpu_ratio, 3),
        wall_ratio=wall_ratio and round(wall_ratio, 3),
        not_judged=[] if wall_ratio else ["wall_ratio"],
        **{
            key: {f"{r}x{tp} {precision}": round(f[key], 4) for (r, tp, precision), f in found.items()}
            for key in ("step_s", *MEDIANS)
        },
        **join,
    )


if __name__ == "__main__":
    main()
