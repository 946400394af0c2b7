"""The planner's part in a run: choose a layout that the job leaves open, predict the step time of one that it gives,
report the error of the prediction, and keep it for the next plan. The machine is as `phalanx calibrate` measured it, or
else an accelerator of the catalogue, or a guess from the number of cores."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.limits import num_cores
from phalanx.spec import Resolved, from_mapping, load

if TYPE_CHECKING:
    from phalanx.hardware import Cluster
    from phalanx.plan.cost.feedback import Record
    from phalanx.plan.cost.measurements import Calibration
    from phalanx.plan.cost.profiles import Profile
    from phalanx.plan.planner import Plan

TRIED = 200  # layouts to try until the engine accepts one
LEAST_STEPS = 10  # shortest run that the next plan learns from: the first steps compile and warm up
GUESS = (-1.0, 1.0)  # ln(measured / predicted) at 5 % and 95 %, without measurements
UNSURE = "a guess (see `phalanx calibrate`)"
GPUS = Path("/proc/driver/nvidia/gpus")
# One CPU core, without measurements.
CORE_FLOPS, CORE_BYTES_PER_S, LINK_BYTES_PER_S = 80e9, 5e9, 1e9


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan and its explanation. `why`: lines for display."""

    plan: Plan
    why: tuple[str, ...]

    def compared(self, summary: dict[str, Any]) -> str:
        """Compare the forecast with the measurements."""
        if not summary.get("median_step_s"):
            return ""
        step, got = self.plan.step_s, summary["median_step_s"]
        record = self.record(summary)
        memory = f"; memory {record.predicted_bytes / 1e9:.2f} GB predicted"
        if record.measured_bytes:
            memory += f", {record.measured_bytes / 1e9:.2f} measured"
        slow = record.slowest_phase()
        memory += f"; slower by {_seconds(slow[1])} in {slow[0]}" if slow else ""
        return (
            f"step {_seconds(step)} predicted ({_seconds(self.plan.step_low_s)} to {_seconds(self.plan.step_high_s)}), "
            f"{_seconds(got)} measured ({got / step - 1:+.0%}); {self.plan.tokens_per_s:,.0f} tokens/s predicted, "
            f"{summary['tokens_per_s']:,.0f} measured{memory}"
        )

    def expected(self) -> dict[str, Any]:
        """Return the part of the plan that a run's record keeps: its identity and its predictions."""
        from phalanx.plan.cost.feedback import by_phase

        plan = self.plan
        names = ("hash", "step_s", "step_low_s", "step_high_s", "tokens_per_s", "memory_bytes", "seconds", "hardware")
        return {**{name: getattr(plan, name) for name in names}, "phases": by_phase(plan.seconds)}

    def record(self, summary: dict[str, Any]) -> Record:
        """Pair predictions with measurements. The prediction is without corrections from earlier runs. Memory is that
        of the device's allocator, which does not exist for a CPU."""
        from phalanx.observe.phases import as_planned
        from phalanx.plan.cost.feedback import Record, by_phase

        plan = self.plan
        plain = by_phase({name: seconds / plan.pace for name, seconds in plan.seconds.items()})
        return Record(
            plan.hardware, plan.used, plan.model, plan.step_s / plan.pace, summary["median_step_s"], plain,
            as_planned(summary.get("phases", {})), plan.memory_bytes - plan.memory["context"] - plan.memory["buffers"],
            0.0 if plan.hardware.startswith("cpu") else float(summary.get("peak_memory_bytes", 0.0)),
        )  # fmt: skip

    def learn(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Store a finished run for the next plan, and return its predictions and measurements for its own record."""
        from phalanx.plan.cost.feedback import append

        if not summary.get("median_step_s"):
            return {}
        record = self.record(summary)
        if summary["steps"] >= LEAST_STEPS:
            with contextlib.suppress(OSError):
                append(record, feedback())
        return {"plan": self.plan.hash, **asdict(record)}


def resolve(path: Path | Mapping[str, Any] | None, sets: Sequence[str] = ()) -> tuple[Resolved, Forecast | None]:
    """Resolve a job from a file or a mapping, and forecast it if possible. The layout is planned if the job gives none;
    the precision is bf16 on accelerators if the job gives none."""
    resolved = _read(path, sets)
    if resolved.job.model.family not in ("dense", "moe"):
        return resolved, None
    gpus = _gpus(resolved.job)
    if gpus and resolved.origins["train.precision"] == "default":
        sets = [*sets, "train.precision=bf16"]
        resolved = _read(path, sets)
    job = resolved.job
    known = bool(gpus) or _measured(gpus) is not None
    if resolved.auto:
        ranks = resolved.ranks or max(1, len(gpus))
        if ranks == 1 and not known:
            return resolved, None  # there is nothing to choose
        compiled = job.train.compile != "none" or resolved.origins["train.compile"] == "default"
        return _planned(path, sets, resolved, *_machine(ranks, gpus, compiled, job))
    shared = bool(gpus) and job.run.share_devices and job.layout.world_size > len(gpus)
    if not known or shared:
        return resolved, None
    return resolved, _predicted(job, *_machine(job.layout.world_size, gpus, job.train.compile != "none", job))


def _read(path: Path | Mapping[str, Any] | None, sets: Sequence[str]) -> Resolved:
    return from_mapping(path, sets) if isinstance(path, Mapping) else load(path, sets)


def _planned(
    path: Path | Mapping[str, Any] | None, sets: Sequence[str], resolved: Resolved, cluster: Cluster, profile: Profile
) -> tuple[Resolved, Forecast]:
    from phalanx.hardware import load as load_catalogue
    from phalanx.plan.cost.sizes import ModelShape
    from phalanx.plan.planner import Request, find, plan_of
    from phalanx.plan.search.advice import changed_axes, differences, runner_up
    from phalanx.plan.search.impossible import impossible
    from phalanx.plan.search.space import Ask, Limits
    from phalanx.plan.settings import settings

    job = resolved.job
    given = [name for name in ("micro_batch", "recompute") if resolved.origins[f"train.{name}"] != "default"]
    pins = {name: getattr(job.train, name) for name in given}
    own = ("compile", "bucket_mb") if resolved.origins["train.compile"] != "default" else ("bucket_mb",)
    kept = [*given, *own, "seq_len", "global_batch", "precision"]
    precision = "bf16" if job.train.precision == "bf16" else "fp32"
    limits = Limits(use=1.0, tolerance=0.0, tp_domain=False, precisions=(precision,), pins=pins)
    ask = Ask(ModelShape.from_config(job.model, job.train.seq_len), cluster, profile, job.train.global_batch, limits)
    request = Request(job.name, ask, float(job.train.steps * job.tokens_per_step), "step")
    found = find(request)
    if not len(found):
        raise impossible(ask, load_catalogue())
    refusal: UserError | None = None
    for row in range(min(TRIED, len(found))):
        plan = plan_of(request, found, row)
        try:
            taken = _read(path, [*sets, *(f"{field}={value}" for field, value in settings(plan, kept))])
        except UserError as error:  # the engine refuses something that the planner does not model
            refusal = refusal or error
            continue
        other = runner_up(found)
        rival = plan_of(request, found, other) if other is not None else None
        second = f"{found.considered:,} layouts were compared, and {len(found):,} come near; {profile.name}"
        if rival:
            gaps = differences(plan, rival)
            most = f", {gaps[0][0]} most of all" if gaps else ""
            share = rival.step_s / plan.step_s - 1
            second = f"with {changed_axes(plan, rival)} a step would take {share:+.0%}{most}; {profile.name}"
        first = (
            f"planned: {taken.job.layout.describe()}, micro-batches of {taken.job.train.micro_batch}; a step of "
            f"{_seconds(plan.step_s)}, {plan.memory_bytes / 1e9:.2f} of {plan.capacity_bytes / 1e9:.1f} GB"
        )
        return replace(taken, auto=True), Forecast(plan, (first, second))
    assert refusal
    raise refusal


def _predicted(job: Job, cluster: Cluster, profile: Profile) -> Forecast:
    """Predict the step for the layout that the job gives."""
    from phalanx.plan.cost.candidates import Candidates
    from phalanx.plan.cost.sizes import ModelShape
    from phalanx.plan.planner import Request, costed, plan_of
    from phalanx.plan.search.space import Ask

    layout, train = job.layout, job.train
    ask = Ask(ModelShape.from_config(job.model, train.seq_len), cluster, profile, train.global_batch)
    request = Request(job.name, ask, float(train.steps * job.tokens_per_step), "step")
    given = Candidates.of(
        tp=layout.tp, pp=layout.pp, vpp=layout.num_chunks, cp=layout.cp, ep=layout.ep, replica=layout.replica,
        shard=layout.shard, zero=layout.zero, micro_batch=train.micro_batch, recompute=train.recompute,
        schedule=layout.schedule, precision=train.precision if train.precision in ("bf16", "fp8") else "fp32",
        bucket_bytes=1e6 * train.bucket_mb,
    )  # fmt: skip
    plan = plan_of(request, costed(ask, given))
    memory = f"{plan.memory_bytes / 1e9:.2f} of {plan.capacity_bytes / 1e9:.1f} GB"
    if plan.margin < 0:
        memory += f", up to {plan.memory_high_bytes / 1e9:.2f}: it may not fit"
    span = f"{_seconds(plan.step_low_s)} to {_seconds(plan.step_high_s)}"
    return Forecast(plan, (f"expected: a step of {_seconds(plan.step_s)} ({span}), {memory}; {profile.name}",))


# -- the machine


def rates(job: Job) -> dict[str, Any]:
    """Return the cost and power of a GPU of this machine, from the catalogue; {}: not known."""
    from phalanx.hardware import load as load_catalogue
    from phalanx.plan.cost.money import watts

    gpus = _gpus(job)
    if not gpus or not gpus[0]:
        return {}
    cluster = load_catalogue().cluster(gpus[0], len(gpus))
    price, power = cluster.node.dollars_per_chip_hour, watts(cluster)
    return {
        "dollars_per_gpu_hour": price.median if price else None,
        "watts_per_gpu": power / cluster.num_chips if power else None,
        "source": f"the catalogue's {gpus[0]}: the median list price, and its power while it trains",
    }


def calibration() -> Path:
    """Return the default output path of `phalanx calibrate`."""
    return Path(os.path.expanduser("~/.config/phalanx/calibration.json"))


def feedback() -> Path:
    """Return the path where finished runs record the errors of their plans: beside the calibration."""
    return calibration().with_name("feedback.jsonl")


def _machine(ranks: int, gpus: list[str], compiled: bool, job: Job) -> tuple[Cluster, Profile]:
    from phalanx.hardware import load as load_catalogue
    from phalanx.plan.cost.calibrated import known_profile, profile_from
    from phalanx.plan.cost.feedback import learned
    from phalanx.plan.cost.machine import Machine
    from phalanx.plan.cost.profiles import default_profile

    cluster = load_catalogue().cluster(gpus[0] or "h100", ranks) if gpus else _cores(ranks)
    facts: dict[str, Any] = {"fused": compiled, "moment_bytes": _moment_bytes(job)} if gpus else {}
    if measured := _measured(gpus):
        if not gpus or ranks <= measured.machine.ranks:  # otherwise it describes one node of several
            cluster = cluster_of(measured, ranks)
        profile = profile_from(calibration(), Machine.of(cluster), **facts)
    elif gpus:
        profile = known_profile(cluster, **facts)
        if not gpus[0]:
            profile = replace(profile, name=f"an unknown accelerator, taken for an H100: {UNSURE}")
    else:
        profile = default_profile(cluster.node.chip)
        profile = replace(profile, error=GUESS, name=f"this machine's speed is {UNSURE}")
    return cluster, learned(profile, cluster.node.name, feedback())


def _moment_bytes(job: Job) -> float:
    """Return the bytes of a parameter's two moments on the device."""
    if job.optimizer.offload != "none":
        return 0.0
    return 4.0 if job.optimizer.state == "bf16" else 8.0


def _measured(gpus: list[str]) -> Calibration | None:
    """Return the calibration of this machine, if it measured the device that the job uses."""
    if not calibration().exists():
        return None
    from phalanx.plan.cost.measurements import read

    found = read(calibration())
    return found if found.machine.device.startswith("cpu") != bool(gpus) else None


def _gpus(job: Job) -> list[str]:
    """Return the catalogue's name of each GPU, "" where it has none; []: there are none, or the job does not use
    them."""
    from phalanx.hardware import load as load_catalogue

    if job.run.device not in ("auto", "cuda"):
        return []
    found, known = [], load_catalogue()
    for file in sorted(GPUS.glob("*/information")):
        model = re.search(r"Model:\s*(.+)", file.read_text(errors="replace"))
        words = model[1].lower() if model else ""
        found.append(next((name for name in sorted(known.chips, key=len, reverse=True) if name in words), ""))
    return found


def cluster_of(measured: Any, ranks: int) -> Cluster:
    """Return the calibrated node as a cluster of `ranks` chips. On a CPU, the more ranks share the cores, the less each
    gets."""
    from phalanx.plan.cost.calibrated import machine_from

    m = machine_from(measured)
    share = measured.machine.ranks / ranks if measured.machine.device.startswith("cpu") else 1.0
    return _one_node(
        measured.machine.device, ranks, float(m.peak[0]) * share, float(m.peak[-1]) * share,
        float(m.memory_bytes) * share, float(m.memory_bytes_per_s) * share, int(m.sms), float(m.up_bytes_per_s),
    )  # fmt: skip


def _cores(ranks: int) -> Cluster:
    cores = num_cores() / ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks
    return _one_node(
        "cpu", ranks, CORE_FLOPS * cores, CORE_FLOPS * cores, memory, CORE_BYTES_PER_S * cores, 1, LINK_BYTES_PER_S,
    )  # fmt: skip


def _one_node(
    name: str, ranks: int, bf16: float, fp32: float, memory: float, memory_per_s: float, units: int, link: float
) -> Cluster:
    from phalanx.hardware import Chip, Cluster, Node, ScaleUp
    from phalanx.hardware import load as load_catalogue

    catalogue = load_catalogue()
    ours = ("this machine",)
    flops = {"bf16": bf16, "fp32": fp32}
    chip = Chip(name, "", flops, int(memory), memory_per_s, units, 0.0, flops, ours)
    wires = ScaleUp("memory", "switch", ranks, link, link, 0.0, False)
    usual = catalogue.node("h100")
    node = Node(name, chip, ranks, wires, 1, link, int(memory * ranks), link, 0, 0.0, None, usual.fabric, ours)
    return Cluster(node, catalogue.fabric(usual.fabric).sized(node, 1), 1, catalogue.site("us-average"))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
