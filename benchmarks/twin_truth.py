"""The twin against real processes: `phalanx chaos` breaks a run of four nodes and a spare, and the twin of that cluster
gets the same seed of faults. The same code in both draws which faults come, at which step and to whom. All durations of
the twin come from another run, with another seed. A pass waits instead of computing, as a host does for an accelerator,
so that four ranks need not have a core each.

Bar: goodput within 3 points, and the same decisions: the same replicas in the same order of generations, on the same
rungs of the ladder."""

from common import SMOKE, finish, machine, options  # isort: skip

import dataclasses
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from random import Random

from phalanx.chaos import campaign
from phalanx.cli.history import past_of
from phalanx.observe.story import Part
from phalanx.run.planned import resolve
from phalanx.twin.agenda import S
from phalanx.twin.fleet import Fault
from phalanx.twin.gang_job import Job, policy_of
from phalanx.twin.past import finish as until_done

STEPS, FAULTS, PASS_S = (12, 1, 0.05) if SMOKE else (100, 4, 0.1)
KINDS = ["worker", "node"]
BAR = 0.03
JOB = """
name = "truth"
[model]
family = "{family}:FAMILY"
dim = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
ffn_dim = 64
[model.options]
pass_s = {pass_s}
[layout]
replica = 4
ranks_per_node = 1
[recovery]
spares = 1
restart_s = 1
[train]
steps = {steps}
seq_len = 32
global_batch = 16
micro_batch = 1
reduction = "exact"
[data]
max_mb = 0.2
[checkpoint]
every_steps = 1000000
[run]
dir = "{folder}"
share_devices = true
"""


class Twin:
    """The twin of a run's cluster, with the faults of a seed."""

    def __init__(self, past, names, seed, steps):
        """Build the twin. `past`: a run that provides the durations. `names`: the real nodes, by place, spares last."""
        scenario = past.scenario("contained").checked()
        times = past.times("contained")
        policy = dataclasses.replace(policy_of(scenario), deaths=10**6)
        self.past, self.job = past, Job(scenario, 0, True, script=(), times=times, policy=policy)
        self.names = {f"n{place:06}": name for place, name in enumerate(names)}
        self.rng = Random(seed)
        self.plan = campaign.draw(self.rng, steps, FAULTS, KINDS)
        self.target_ns = steps * self.job.progress.step_ns
        self.job.agenda.after(0, self._look)

    def _look(self):
        job, now = self.job, self.job.agenda.now
        job.progress.advance(now)
        if (
            self.plan
            and job.progress.step >= self.plan[0].step
            and job.gang.gen.stepped
            and job.gang.phase == "running"
        ):
            late_ns = int(self.rng.uniform(0.0, campaign.LATE_S) * S)
            job.agenda.after(late_ns, self._strike, self.plan.pop(0).kind)
        elif self.plan:
            job.agenda.after(int(campaign.LOOK_S * S), self._look)

    def _strike(self, kind):
        members = self.job.gang.members
        up = sorted(w.rank for w in members.workers.values() if w.up)
        if kind == "worker":
            rank = self.rng.choice(up)
        else:
            there = {self.names[w.node]: w.rank for w in members.workers.values() if w.up}
            rank = there[self.rng.choice(sorted(there))]
        back = statistics.median([m.back_s for m in self.past.mishaps if m.kind == "node"] or [3600.0])
        proof = "its processes have ended"
        self.job.strike(Fault(kind, kind, rank=rank, repair_ns=int(back * S), proof=proof))
        self._wait(self.job.gang.generation)

    def _wait(self, generation):
        """Wait for the next fault until training continues, as in a real campaign."""
        gen = self.job.gang.gen
        ready = gen.number > generation and gen.stepped
        self.job.agenda.after(int(campaign.LOOK_S * S), *((self._look,) if ready else (self._wait, generation)))

    def run(self):
        return until_done(self.job, self.target_ns) / S


def names_of(folder):
    """Return the nodes of a run by their first places, then the spares, and its forms."""
    part = Part(folder)
    part.update()
    first = {}
    for event in part.events:
        if event.get("type") == "started" and event.get("rank", -1) >= 0:
            first.setdefault(event["rank"], event["node"])
    joined = [e["node"] for e in part.events if e.get("type") == "node" and e.get("what") == "joined"]
    placed = [first[rank] for rank in sorted(first)]
    return placed + [name for name in dict.fromkeys(joined) if name not in placed], part.incidents.forms[1:]


def main():
    options(__doc__).parse_args()
    print(f"{machine()}\n", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="phalanx-truth-"))
    try:
        file = folder / "truth.toml"
        family = Path(__file__).parent / "twin_truth_cases.py"
        file.write_text(JOB.format(family=family, pass_s=PASS_S, steps=STEPS, folder=folder / "runs"))
        job = resolve(file, [])[0].job
        runs = [
            campaign.run(file, [], job, seed, FAULTS, KINDS, lambda text: print(text, flush=True)) for seed in (1, 2)
        ]
        measured, real = (past_of(run.broken) for run in runs)
        names, forms = names_of(runs[1].broken)
        twin = Twin(measured, names, 2, STEPS)
        seconds = twin.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # For each, the share of its time that its steps take undisturbed: machine speed varies over time.
    shares = {"real": real.effective, "twin": STEPS * measured.step_s / seconds}
    decided = {
        "real": [(tuple(form["replicas"]), form["rung"]) for form in forms],
        "twin": [(form.replicas, form.rung) for form in twin.job.forms],
    }
    print(f"\n{'':8}{'seconds':>9}{'goodput':>9}  replicas and rung of each generation")
    for name, length in (("real", real.length_s), ("twin", seconds)):
        print(f"{name:8}{length:9.2f}{shares[name]:9.1%}  {' '.join(f'{r}:{g}' for r, g in decided[name])}")
    took = {key: value for key, value in dataclasses.asdict(measured.took).items() if value}
    print(f"durations, from the other run: {', '.join(f'{k} {v:.3f} s' for k, v in took.items())}")
    same, off = decided["real"] == decided["twin"], abs(shares["real"] - shares["twin"])
    print(f"decisions {'the same' if same else 'DIFFER'}; goodput {100 * off:.1f} points apart, bar {100 * BAR:g}")
    figures = {name: round(share, 4) for name, share in shares.items()}
    finish("twin_truth", same and off <= BAR, **figures, same_decisions=same, generations=len(forms))


if __name__ == "__main__":
    sys.exit(main())
