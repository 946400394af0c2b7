"""Layouts that nobody has written down: `phalanx train` asks the planner for one, says why, and in the end how far off
the forecast was. The machine is as `phalanx calibrate` measured it; else an accelerator of the catalogue, or a guess at
the cores."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.spec import Resolved, load

if TYPE_CHECKING:
    from phalanx.hardware import Cluster
    from phalanx.plan.planner import Plan
    from phalanx.plan.profiles import Profile

TRIED = 200  # of the layouts that were found, until the engine takes one
UNSURE = "a guess (see `phalanx calibrate`)"
GPUS = Path("/proc/driver/nvidia/gpus")
# One core of a CPU, where nothing was measured.
CORE_FLOPS, CORE_BYTES_PER_S, LINK_BYTES_PER_S, LINK_S = 80e9, 5e9, 1e9, 30e-6


@dataclass(frozen=True, slots=True)
class Forecast:
    """`why`: two lines for people."""

    plan: Plan
    why: tuple[str, str]

    def compared(self, summary: dict[str, Any]) -> str:
        """With what was measured."""
        if not summary.get("median_step_s"):
            return ""
        step, got = self.plan.step_s, summary["median_step_s"]
        memory = f"; memory {self.plan.memory_bytes / 1e9:.2f} GB predicted"
        if summary.get("peak_memory_bytes"):
            memory += f", {summary['peak_memory_bytes'] / 1e9:.2f} measured"
        return (
            f"step {_seconds(step)} predicted ({_seconds(self.plan.step_low_s)} to {_seconds(self.plan.step_high_s)}), "
            f"{_seconds(got)} measured ({got / step - 1:+.0%}); {self.plan.tokens_per_s:,.0f} tokens/s predicted, "
            f"{summary['tokens_per_s']:,.0f} measured{memory}"
        )


def resolve(path: Path | None, sets: Sequence[str] = ()) -> tuple[Resolved, Forecast | None]:
    """The job, with a planned layout if it gives none."""
    resolved = load(path, sets)
    if not resolved.auto or resolved.job.model.family not in ("dense", "moe"):
        return resolved, None
    gpus = _gpus(resolved.job)
    ranks = resolved.ranks or max(1, len(gpus))
    if ranks == 1 and not gpus and not calibration().exists():
        return resolved, None  # nothing to choose, and nothing to go by
    return _planned(path, sets, resolved, *_machine(resolved.job, ranks, gpus))


def _planned(
    path: Path | None, sets: Sequence[str], resolved: Resolved, cluster: Cluster, profile: Profile
) -> tuple[Resolved, Forecast]:
    from phalanx.hardware import load as load_catalogue
    from phalanx.plan.advice import changed_axes, differences, runner_up
    from phalanx.plan.model import ModelShape
    from phalanx.plan.planner import Request, find, plan_of
    from phalanx.plan.refuse import impossible
    from phalanx.plan.space import Ask, Limits

    job = resolved.job
    kept = [name for name in ("micro_batch", "recompute") if resolved.origins[f"train.{name}"] != "default"]
    pins = {name: getattr(job.train, name) for name in kept}
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
            taken = load(path, [*sets, *settings(plan, kept)])
        except UserError as error:  # what the planner does not know of the engine
            refusal = refusal or error
            continue
        other = runner_up(found)
        rival = plan_of(request, found, other) if other is not None else None
        second = f"{found.considered:,} layouts were looked at, of which {len(found):,} come near; {profile.name}"
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


def settings(plan: Plan, kept: Collection[str] = ()) -> Iterator[str]:
    """Of the job, for a plan; but those of the training that are `kept`."""
    layout = plan.layout
    sizes = {name: layout[name] for name in ("replica", "shard", "tp", "pp", "cp", "ep")}
    sizes["zero"] = max(1, layout["zero"])
    if layout["pp"] > 1:
        yield f"layout.schedule={layout['schedule']}"
        sizes["chunks"] = layout["vpp"]
    for name, size in sizes.items():
        yield f"layout.{name}={size}"
    for name in ("micro_batch", "recompute"):
        if name not in kept:
            yield f"train.{name}={layout[name]}"


# -- the machine


def calibration() -> Path:
    """Where `phalanx calibrate` writes, unless told otherwise."""
    return Path(os.path.expanduser("~/.config/phalanx/calibration.json"))


def _machine(job: Job, ranks: int, gpus: list[str]) -> tuple[Cluster, Profile]:
    from phalanx.hardware import load as load_catalogue
    from phalanx.plan.calibrated import profile_from, read
    from phalanx.plan.machine import Machine
    from phalanx.plan.profiles import default_profile

    path = calibration()
    if path.exists():
        measured = read(path)
        cluster = cluster_of(measured, ranks)
        return cluster, profile_from(path, Machine.of(cluster))
    if gpus and len(gpus) >= ranks:
        cluster = load_catalogue().cluster(gpus[0] or "h100", ranks)
        profile = default_profile(cluster.node.chip.name, job.model.family == "moe")
        return cluster, profile if gpus[0] else replace(
            profile, name=f"an unknown accelerator, taken for an H100: {UNSURE}"
        )
    guessed = replace(default_profile("", job.model.family == "moe"), low=-1.0, high=1.0)
    return _cores(ranks), replace(guessed, name=f"this machine's speed is {UNSURE}")


def _gpus(job: Job) -> list[str]:
    """By the catalogue's names, "" where it has none; no names: there are none, or they are not to be used."""
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
    """The calibrated node, as a cluster of `ranks` chips: where cores are shared, more ranks have less each."""
    from phalanx.plan.calibrated import machine_from

    m = machine_from(measured)
    share = measured.machine.ranks / ranks if measured.machine.device.startswith("cpu") else 1.0
    ceiling = float(m.ceiling[0]) * share
    return _one_node(
        measured.machine.device, ranks, ceiling, float(m.ceiling[-1]) * share, float(m.memory_bytes) * share,
        float(m.memory_bytes_per_s) * share, int(m.sms), float(m.up_bytes_per_s), float(m.up_latency_s),
    )  # fmt: skip


def _cores(ranks: int) -> Cluster:
    cores = len(os.sched_getaffinity(0)) / ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / ranks
    return _one_node(
        "cpu", ranks, CORE_FLOPS * cores, CORE_FLOPS * cores, memory, CORE_BYTES_PER_S * cores, 1, LINK_BYTES_PER_S,
        LINK_S,
    )  # fmt: skip


def _one_node(
    name: str, ranks: int, bf16: float, fp32: float, memory: float, memory_per_s: float, units: int, link: float,
    latency_s: float,
) -> Cluster:  # fmt: skip
    from phalanx.hardware import Chip, Cluster, Node, ScaleUp
    from phalanx.hardware import load as load_catalogue

    catalogue = load_catalogue()
    ours = ("this machine",)
    flops = {"bf16": bf16, "fp32": fp32}
    chip = Chip(name, "", flops, int(memory), memory_per_s, units, 0.0, flops, ours)
    wires = ScaleUp("memory", "switch", ranks, link, link, latency_s, False)
    usual = catalogue.node("h100")
    node = Node(name, chip, ranks, wires, 1, link, int(memory * ranks), link, 0, 0.0, None, usual.fabric, ours)
    return Cluster(node, catalogue.fabric(usual.fabric).sized(node, 1), 1, catalogue.site("us-average"))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
