"""Explain the result of a search: why a layout lost, what limits the best one, and which change to the cluster or the
batch would pay. Each gain comes from a second search with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.hardware import Catalogue, Cluster
from phalanx.plan.planner import Plan, Request
from phalanx.plan.search.exhaustive import Found
from phalanx.plan.search.objective import best
from phalanx.plan.search.space import Ask

AXES = ("tp", "cp", "pp", "vpp", "ep", "shard", "replica", "zero", "micro_batch", "recompute", "schedule", "precision")
NOTICED = 0.002  # gains below are not worth a line


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the cluster or the batch and its gain: +0.04 is 4 % more tokens for the objective."""

    what: str
    gain: float
    layout: dict[str, Any]


def runner_up(found: Found) -> int | None:
    """Return the row of the best layout with other degrees, rather than another split of the same data ranks."""
    first = found.candidates.row(0)
    for row in range(1, len(found)):
        other = found.candidates.row(row)
        if any(first[a] != other[a] for a in ("tp", "cp", "pp", "ep", "recompute", "micro_batch")):
            return row
    return None


def differences(first: Plan, other: Plan) -> list[tuple[str, float]]:
    """Return how many more seconds per step each term takes in `other` for the same tokens, largest first."""
    scale = first.global_batch / other.global_batch
    gaps = {name: other.seconds[name] * scale - s for name, s in first.seconds.items()}
    return sorted(((n, g) for n, g in gaps.items() if abs(g) > 1e-3 * first.step_s), key=lambda item: -abs(item[1]))


def changed_axes(first: Plan, other: Plan) -> str:
    return ", ".join(f"{a} {other.layout[a]}" for a in AXES if first.layout[a] != other.layout[a]) or "the same layout"


def changes(request: Request, found: Found, catalogue: Catalogue) -> list[Change]:
    """Search again with one thing improved at a time and return the changes, best gain first. A change that allows no
    new layouts searches only the cores that came near."""
    out = []
    cheap = request.objective == "cost"
    before = float(found.value[0]) / (found.ask.cluster.num_chips if cheap else 1)
    for what, ask in _better(found.ask, catalogue):
        opens = (
            ask.batch != found.ask.batch or ask.cluster.node.scale_up.domain != found.ask.cluster.node.scale_up.domain
        )
        better = best(ask, "time" if cheap else request.objective, 1.0, space=None if opens else found.near)
        gain = before / float(better.value[0]) - 1 if len(better) else 0.0
        if gain > NOTICED:
            out.append(Change(what, gain, better.candidates.row(0)))
    return sorted(out, key=lambda change: -change.gain)


def _better(ask: Ask, catalogue: Catalogue) -> Iterator[tuple[str, Ask]]:
    cluster = ask.cluster
    node, up, chip = cluster.node, cluster.node.scale_up, cluster.node.chip
    if cluster.num_chips > up.domain:
        yield "2x network", ask.at(replace(cluster, node=replace(node, nic_bytes_per_s=2 * node.nic_bytes_per_s)))
    if any(t.bytes_per_s_factor < 1 for t in cluster.fabric.tiers):
        flat = tuple(replace(t, bytes_per_s_factor=max(1.0, t.bytes_per_s_factor)) for t in cluster.fabric.tiers)
        yield "no oversubscription", ask.at(replace(cluster, fabric=replace(cluster.fabric, tiers=flat)))
    if up.domain > 1:
        faster = replace(up, bytes_per_s=2 * up.bytes_per_s, link_bytes_per_s=2 * up.link_bytes_per_s)
        yield "2x scale-up links", ask.at(replace(cluster, node=replace(node, scale_up=faster)))
    if up.domain < 72 < cluster.num_chips and up.shape == "switch":
        yield "scale-up domain of 72", ask.at(replace(cluster, node=replace(node, scale_up=replace(up, domain=72))))
    kin = [c.memory_bytes for c in catalogue.chips.values() if c.vendor == chip.vendor]
    larger = sorted(size for size in kin if size > 1.3 * chip.memory_bytes)
    if larger:
        yield f"{larger[0] / 1e9:.0f} GB of memory", ask.at(with_memory(cluster, larger[0]))
    swift = replace(chip, memory_bytes_per_s=1.5 * chip.memory_bytes_per_s)
    yield "1.5x memory bandwidth", ask.at(replace(cluster, node=replace(node, chip=swift)))
    yield "2x batch", replace(ask, batch=2 * ask.batch)


def with_memory(cluster: Cluster, size: int) -> Cluster:
    return replace(cluster, node=replace(cluster.node, chip=replace(cluster.node.chip, memory_bytes=size)))


GROUPS = {  # terms of a step by what they wait for
    "compute": ("matmul", "attention", "head", "recompute"),
    "memory bandwidth": ("elementwise", "optimizer"),
    "scale-up network": ("tp",),
    "network": ("cp", "ep", "fsdp", "pp", "dp"),
    "pipeline bubble": ("bubble",),
    "stragglers and host": ("straggler", "launch", "fixed"),
}


def shares(plan: Plan) -> dict[str, float]:
    """Return the shares of a step by what it waits for, largest first."""
    parts = {group: sum(plan.seconds[t] for t in terms) / plan.step_s for group, terms in GROUPS.items()}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def binds(plan: Plan, found: Found, gains: list[Change]) -> list[str]:
    """Say in one sentence each what limits the plan."""
    out = []
    limit = (1 - found.ask.limits.margin) * plan.capacity_bytes
    free = next((c.gain for c in gains if c.what.endswith("of memory")), 0.0)
    if free:
        near = f"{plan.memory_high_bytes / 1e9:.1f} of the {limit / 1e9:.1f} GB allowed may be used (P95)"
        out.append(f"memory: {near}, and more of it would gain {free:.1%}")
    group, share = next(iter(shares(plan).items()))
    out.append(f"{group}: {share:.0%} of the step")
    if plan.micro_batches < 4 * plan.layout["pp"] and plan.layout["pp"] > 1:
        part = plan.seconds["bubble"] / plan.step_s
        out.append(
            f"batch: {plan.micro_batches} micro-batches for {plan.layout['pp']} stages leave a bubble of {part:.1%}"
        )
    if plan.goodput["share"] < 0.95:
        out.append(f"failures: one every {plan.goodput['mtbf_s'] / 60:.0f} min takes {1 - plan.goodput['share']:.1%}")
    if plan.used < plan.chips:
        why = "" if found.ask.limits.tolerance else f": a batch of {found.ask.batch:,} does not divide over more"
        out.append(f"chips: {plan.chips - plan.used:,} are left over and can stand by as spares{why}")
    return out
