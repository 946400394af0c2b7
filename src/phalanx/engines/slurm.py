"""Run on Slurm. Outside an allocation the run is submitted as one batch job, spares included, whose script is the same
command. Inside an allocation that command is the run, and starts an agent on each node by srun. A node that fails ends
its step, not the job (--no-kill). Before the time limit the run saves and requeues itself.

A heterogeneous job has its controller on the first component, and agents on the others.

The first node runs the controller. If that node is lost, Slurm keeps the job for the sake of its other nodes, and does
not notice that the script is gone. Agents that lose their controller therefore ask Slurm, and requeue such a job
(`python -m` this module)."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.engines.hostlist import expand, paths
from phalanx.engines.table import Where
from phalanx.runtime import inventory
from phalanx.runtime.launch import GIVE_UP_S, Adapter, Call, Seat, StartedAgent

COMMAND_S = 60.0  # timeout of a Slurm command
LEAVE_S = 30.0  # added to recovery.grace_s between warning and end: all leave, and the job is requeued
LATE_S = 60.0  # Slurm may send its signal this much early
LEAST_S = 60.0  # shortest time worth training
JOB = "SLURM_JOB_ID"  # set inside an allocation
TASK = "SLURM_ARRAY_TASK_ID"
REQUEUE = "requeue"  # the only option that is not sbatch's
OURS = {
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "no-kill",
    "no-requeue",
    "signal",
    "wrap",
    "parsable",
    "wait",
    "open-mode",
}
AGENT = "agent-"  # prefix of a node's step name
HEAD = "head."  # prefix of a key for the controller's component, in a heterogeneous job
SHARED = ("time", "account", "qos", "reservation")  # options shared by all components of a job
#: Options that take the whole node, each with the options by which a user overrides it.
WHOLE = {
    ("exclusive", ""): {"exclusive", "cpus-per-task", "oversubscribe"},
    ("mem", "0"): {"mem", "mem-per-cpu", "mem-per-gpu"},
}
SRUN = ("--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--unbuffered", "--export=ALL")
#: Slurm signals the batch process, which must ignore the signal until the command handles it.
SCRIPT = """#!/bin/bash
trap '' USR1
exec {command}
"""
LEFT_OUT = ("--detach", "--dry-run")  # options dropped when the job runs the command
GPUS = {"gres", "gpus", "gpus-per-node", "gpus-per-task"}
KEY = re.compile(r"[a-z][a-z0-9-]*")
OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "")


def ask(*command: str, given: str = "") -> str:
    """Run a Slurm command and return its output. `given`: its standard input."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=COMMAND_S)
    except FileNotFoundError:
        remedy = f"run this where {command[0]} is, or choose another --on"
        raise UserError(f"{command[0]} was not found", field="--on", value="slurm", remedy=remedy) from None
    except subprocess.TimeoutExpired:
        remedy = "is slurmctld up? `scontrol ping` says so"
        raise RunFailed(f"{shlex.join(command)} did not answer in {COMMAND_S:g} s", remedy=remedy) from None
    if done.returncode:
        remedy = "see what Slurm says; `sinfo` shows its nodes and partitions"
        raise UserError(f"{command[0]}: {done.stderr.strip()}", field="--on", value="slurm", remedy=remedy)
    return done.stdout.strip()


def seconds(text: str) -> float:
    """Parse a Slurm time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        remedy = "write minutes, hours:minutes:seconds or days-hours, as sbatch takes it"
        raise UserError("it is not a time", field="--engine time", value=text, remedy=remedy)
    has_days, has_hours = match[1] is not None, match[4] is not None
    days, first, second, third = (int(part or 0) for part in match.groups())
    hours, minutes, secs = (first, second, third) if has_days or has_hours else (0, first, second)
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + secs


def lead_s(job: Job) -> int:
    """Return how long before its end a run must be warned."""
    return math.ceil(job.recovery.grace_s + LEAVE_S)


# -- outside of an allocation


@dataclass(frozen=True)
class Submission:
    """Options of `sbatch`, and the script for its standard input."""

    options: list[str]
    script: str
    is_array: bool

    def text(self) -> str:
        return f"{shlex.join(['sbatch', *self.options])} <<'PHALANX'\n{self.script}PHALANX"

    def send(self) -> str:
        return ask("sbatch", *self.options, given=self.script).partition(";")[0]  # the cluster's name may follow the id


def sets(where: Where, given: Sequence[str]) -> list[str]:
    """Replace %a by the task number of a job array. The tasks of an array are different runs, so their names and
    checkpoint folders must differ."""
    task = os.environ.get(TASK, "")
    if task or "array" in where.options:
        for field, example in (("name", "NAME-%a"), ("checkpoint.dir", "DIR/%a")):
            if not any(each.startswith(f"{field}=") and "%a" in each for each in given):
                message = "the tasks of a job array would all have the same"
                raise UserError(message, field=field, remedy=f"say --set {field}={example}: %a is the task's number")
    return [each.replace("%a", task or "0") for each in given]


def submission(where: Where, job: Job, arguments: Sequence[str]) -> Submission | None:
    if where.hosts:
        raise UserError("Slurm chooses the nodes", field="--hosts", value=where.hosts, remedy="say --engine nodelist=")
    given, head = _options(where)
    if JOB in os.environ:
        return None
    lead = lead_s(job)
    if "time" in given and seconds(given["time"]) < lead + LATE_S + LEAST_S:
        raise UserError(
            f"a run is told to save {lead} s before its end (recovery.grace_s, and {LEAVE_S:g} s to leave), or up to "
            f"{LATE_S:g} s earlier: too little is left to train",
            field="--engine time",
            value=given["time"],
            remedy=f"ask for {math.ceil((lead + LATE_S + LEAST_S) / 60)} minutes at least, or lower recovery.grace_s",
        )
    is_array = "array" in given
    output = Path(job.run.dir).absolute() / ("slurm-%A_%a.out" if is_array else "slurm-%j.out")
    ours = {
        "parsable": "",
        "job-name": job.name,
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
        "open-mode": "append",
        "requeue" if where.options.get(REQUEUE, "yes") == "yes" else "no-requeue": "",
        "signal": f"B:USR1@{lead}",
    }
    nodes = {"nodes": str(num_nodes(job.layout) + job.recovery.spares), "ntasks-per-node": "1", "no-kill": ""}
    agents = {**nodes, **_whole(given), **_gpus(job, given), **given}
    if head:
        shared = {key: given[key] for key in SHARED if key in given}
        first = {"nodes": "1", "ntasks": "1", "no-kill": "", **shared, **head}
        options = [*_words({**ours, **first}), ":", *_words(agents)]
    else:
        options = _words({**ours, **agents})
    command = [sys.executable, "-P", "-m", "phalanx.cli.main", *(each for each in arguments if each not in LEFT_OUT)]
    return Submission(options, SCRIPT.format(command=shlex.join(command)), is_array)


def _options(where: Where) -> tuple[dict[str, str], dict[str, str]]:
    """Split the user's sbatch options into those for the agents' nodes, and those for a controller node of its own."""
    agents, head = dict[str, str](), dict[str, str]()
    for name, value in where.options.items():
        key = name.removeprefix(HEAD)
        if name == REQUEUE:
            if value not in ("yes", "no"):
                raise UserError("expected yes or no", field=f"--engine {REQUEUE}", value=value, remedy="choose one")
            continue
        if not KEY.fullmatch(key) or key in OURS:
            why = "the layout and the job say that" if key in OURS else "it is no option of sbatch"
            remedy = "name a long option of sbatch without its dashes: partition=gpu, or exclusive= if it has no value"
            raise UserError(why, field="--engine", value=f"{name}={value}", remedy=remedy)
        (agents if key == name else head)[key] = value
    if head and "array" in agents:
        raise UserError(
            "Slurm has no arrays of heterogeneous jobs",
            field="--engine array",
            value=agents["array"],
            remedy=f"leave out what begins with {HEAD}",
        )
    return agents, head


def _whole(given: dict[str, str]) -> dict[str, str]:
    """Request whole nodes, unless the user says otherwise."""
    return {key: value for (key, value), others in WHOLE.items() if others.isdisjoint(given)}


def _gpus(job: Job, given: dict[str, str]) -> dict[str, str]:
    wanted = job.run.device == "cuda" and GPUS.isdisjoint(given)
    return {"gpus-per-node": str(job.layout.ranks_per_node)} if wanted else {}


def _words(options: dict[str, str]) -> list[str]:
    return [f"--{key}={value}" if value else f"--{key}" for key, value in options.items()]


def fields_of(reference: str) -> dict[str, str]:
    """Return the fields that Slurm shows for a job; for a heterogeneous one, those of the component with the script."""
    lines = ask("scontrol", "--oneliner", "show", "job", reference).splitlines()
    about = next((line for line in lines if "BatchFlag=1" in line.split()), lines[0])
    return dict(part.partition("=")[::2] for part in about.split())


def queue_again(reference: str, about: dict[str, str]) -> bool:
    """Requeue a job if Slurm allows it; return True if it did."""
    may = about.get("BatchFlag") == "1" and about.get("Requeue") == "1"
    if may:
        ask("scontrol", "requeue", reference)
    return may


def queue_again_if_headless(reference: str) -> bool:
    """Requeue a job that runs without the node of its script."""
    about = fields_of(reference)
    is_headless = about.get("JobState") == "RUNNING" and about.get("BatchHost") not in expand(about["NodeList"])
    return is_headless and queue_again(reference, about)


def state(reference: str) -> str:
    """Return the state of a job, in Slurm's words; "": it is over."""
    try:
        said = ask("squeue", "--noheader", "--states=all", f"--jobs={reference}", "--format=%T (%r)")
    except UserError as error:
        if "Invalid job id" in str(error):
            return ""
        raise
    word = said.partition("\n")[0]
    return "" if word.partition(" ")[0] in OVER else word


def stop(reference: str, now: bool) -> None:
    """Ask the run to save and end; a job that has not begun is cancelled."""
    if now or state(reference).startswith("PENDING"):
        ask("scancel", reference)
    else:
        ask("scancel", "--batch", "--signal=TERM", reference)


# -- inside of one


def adapter(where: Where, job: Job) -> Slurm:
    return Slurm(where.options.get(REQUEUE, "yes") == "yes")


class Slurm(Adapter):
    """The allocation around this process. `requeues`: True if the job may be requeued."""

    def __init__(self, requeues: bool = True):
        self.id, self.requeues = os.environ[JOB], requeues
        if task := os.environ.get(TASK, ""):  # its plain id would name the whole array when it is the last task
            self.id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
        self.restarted = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0

    @cached_property
    def groups(self) -> dict[str, str]:
        """Map the nodes for agents to their component of a heterogeneous job; "": there is only one component."""
        components = int(os.environ.get("SLURM_HET_SIZE", "1"))
        if components == 1:
            return dict.fromkeys(expand(os.environ["SLURM_JOB_NODELIST"]), "")
        lists = {str(i): os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{i}"] for i in range(1, components)}
        return {name: group for group, text in lists.items() for name in expand(text)}

    def _end_left_agents(self) -> None:
        """Kill the agents of a lost controller, which would hold the devices. When only the controller's component
        fails, Slurm restarts that one and leaves the others alone."""
        others = ",".join(os.environ[f"SLURM_JOB_ID_HET_GROUP_{group}"] for group in sorted({*self.groups.values()}))
        said = ask("squeue", "--noheader", "--steps", f"--jobs={others}", "--format=%i %j")
        steps = [line.split() for line in said.splitlines()]
        if left := sorted({step for step, name in steps if name.startswith(AGENT)}):
            ask("scancel", "--signal=KILL", *left)

    @cached_property
    def _seats(self) -> list[Seat]:
        if self.restarted and any(self.groups.values()):
            self._end_left_agents()
        found = paths(ask("scontrol", "show", "topology"), self.groups)
        return sorted((Seat(name, found[name]) for name in self.groups), key=lambda seat: seat.topology)

    def seats(self, count: int) -> list[Seat]:
        """Return the seats so that neighbours in the network are adjacent; below one switch they are in Slurm's
        order."""
        return self._seats

    def address(self) -> str:
        said = ask("scontrol", "--oneliner", "show", "node", next(iter(self.groups)))
        fields = dict(part.partition("=")[::2] for part in said.split())
        return inventory.address_towards(inventory.resolve(fields["NodeAddr"], "the first node of the allocation"))

    def start(self, call: Call) -> StartedAgent:
        name = call.seat.name
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", *SRUN, f"--job-name={AGENT}{name}"]
        if self.groups[name]:
            step.append(f"--het-group={self.groups[name]}")
        command = [*step, "--", *call.command(sys.executable), "--secret", "-", *self._when_alone]
        return StartedAgent(command, call.token, call.log, {**os.environ, **call.env}, proves=False)

    @cached_property
    def _when_alone(self) -> list[str]:
        """Return options that let an agent outlast the time that Slurm needs to notice the loss of the controller's
        node."""
        if not self.requeues:
            return []
        down = re.search(r"SlurmdTimeout\s*=\s*(\d+)", ask("scontrol", "show", "config"))
        give_up_s = GIVE_UP_S + float(down[1] if down else 0)
        command = shlex.join([sys.executable, "-P", "-m", "phalanx.engines.slurm", self.id])
        return ["--give-up-s", f"{give_up_s:g}", "--when-alone", command]

    def time_left_s(self, job: Job) -> float:
        said = ask("squeue", "--noheader", f"--jobs={self.id}", "--format=%L").split()  # one line per component
        left_s = min((seconds(text) for text in said if text not in ("INVALID", "NOT_SET")), default=math.inf)
        free_s = left_s - lead_s(job)
        if free_s < LEAST_S:
            remedy = "ask for more, as by --engine time=4:00:00, or lower recovery.grace_s"
            text = f"the allocation ends in {left_s:g} s, and to save and leave takes {lead_s(job)} s"
            raise UserError(text, field="the time limit", value=f"{left_s:g} s", remedy=remedy)
        return free_s

    def run_again(self) -> str:
        is_queued = self.requeues and queue_again(self.id, fields_of(self.id))
        return f"job {self.id} is in the queue again" if is_queued else ""

    def reference(self) -> dict[str, str]:
        return {"on": "slurm", "id": self.id}


if __name__ == "__main__":
    queue_again_if_headless(sys.argv[1])
