"""Explains why nothing fits: which constraint binds, by how much, and what would lift it. It searches again with one
constraint relaxed at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.layout import SPLIT_BACKWARD
from phalanx.hardware import Catalogue
from phalanx.plan.cost.candidates import PRECISIONS, RECOMPUTE, SCHEDULES, Candidates
from phalanx.plan.search.advice import with_memory
from phalanx.plan.search.exhaustive import evaluate_rows, search
from phalanx.plan.search.objective import resized
from phalanx.plan.search.runnable import splits_backward_in_fp8, takes_tied_pipelines
from phalanx.plan.search.space import Ask, children, cores, size_of, tensor_degrees

NAMED = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "precision": PRECISIONS}
PINS = (*(f.name for f in fields(Candidates) if f.name != "etp"), "dp")  # dp: replica x shard


def parse_pins(text: str, field: str) -> dict[str, int | float | str]:
    """Parse text like "tp=8,pp=4,recompute=full"; `field`: the option that it came from."""
    pins: dict[str, int | float | str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in PINS or not equals:
            raise UserError("no such axis", field=field, value=item, remedy=f"name=value of {', '.join(PINS)}")
        if name in pins:
            raise UserError("it is given twice", field=field, value=item, remedy=f"give {name} once")
        if name in NAMED:
            if value not in NAMED[name]:
                remedy = f"one of {', '.join(NAMED[name])}"
                raise UserError(f"no such {name}", field=field, value=item, remedy=remedy)
            pins[name] = value
        elif not value.isdecimal() or (int(value) < 1 and name != "zero") or (name == "zero" and int(value) > 3):
            remedy = "zero is 0 to 3, every other degree a whole number from 1 on"
            raise UserError("that is no degree", field=field, value=item, remedy=remedy)
        else:
            pins[name] = int(value)
    return pins


def impossible(ask: Ask, catalogue: Catalogue) -> UserError:
    """Return the error for a question that has no answer."""
    pins, chips = ask.limits.pins, ask.cluster.num_chips
    size = math.prod(int(pins.get(axis, 1)) for axis in ("tp", "cp", "pp", "shard", "replica", "dp"))
    if size > chips:
        return UserError(
            f"the degrees make {size:,} ranks, and there are {chips:,} chips",
            field="layout",
            value=", ".join(f"{k}={v}" for k, v in pins.items()),
            remedy="lower one of them, or take more chips",
        )
    return _too_large(ask, catalogue) if _exists(ask) else _no_layout(ask)


def _exists(ask: Ask) -> bool:
    """Return whether any layout divides as it must, whether it fits or not."""
    core, batch = cores(ask)
    return len(core) > 0 and size_of(ask, core, batch) > 0


def _too_large(ask: Ask, catalogue: Catalogue) -> UserError:
    least = _least_bytes(ask)
    capacity = float(ask.cluster.node.chip.memory_bytes)
    limit = (1 - ask.limits.margin) * capacity
    ways = [text for text, other in _lighter(ask, catalogue) if len(search(other, slack=1.0))]
    chips = f"{ask.cluster.num_chips:,} x {ask.cluster.node.chip.name}"
    return UserError(
        f"{float(ask.shape.params) / 1e9:,.1f} B parameters do not fit: the leanest layout of {chips} needs "
        f"{least / 1e9:.1f} GB on a chip (P95), {(least - limit) / 1e9:.1f} GB more than "
        + (f"the {limit / 1e9:.1f} GB that {ask.limits.margin:.0%} margin leave of " if ask.limits.margin else "its ")
        + f"{capacity / 1e9:.1f} GB",
        field="memory",
        value=f"{least / 1e9:.1f} GB",
        remedy="; or ".join(ways) if ways else "a smaller model, or shorter sequences",
    )


def _least_bytes(ask: Ask) -> float:
    """Return the least bytes of any layout at P95: each core with all its data ranks in one shard, or as pinned."""
    pins = ask.limits.pins
    lean = replace(ask, limits=replace(ask.limits, pins={"replica": 1} | pins))
    found, batch = children(lean, *cores(lean))
    if not len(found):
        found, batch = children(ask, *cores(ask))
    costs = evaluate_rows(ask, found, batch)
    return float(np.min(costs.memory_interval(ask.profile)[1][costs.valid], initial=np.inf))


def _lighter(ask: Ask, catalogue: Catalogue) -> Iterator[tuple[str, Ask]]:
    """Yield ways to make it fit, the smallest change of each kind first."""
    if ask.limits.pins:
        yield "leave the layout to the search", replace(ask, limits=replace(ask.limits, pins={}))
    if ask.limits.margin:
        yield "set the margin to 0", replace(ask, limits=replace(ask.limits, margin=0.0))
    own = ask.cluster.node.chip
    larger = [c for c in catalogue.chips.values() if c.vendor == own.vendor and c.memory_bytes > own.memory_bytes]
    for size in sorted({c.memory_bytes for c in larger}):
        other = ask.at(with_memory(ask.cluster, size))
        if len(search(other, slack=1.0)):
            names = [c.name for c in larger if c.memory_bytes == size]
            yield f"take chips with {size / 1e9:.0f} GB ({', '.join(names[:3])})", other
            break
    for times in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        chips = times * ask.cluster.num_chips
        other = replace(ask.at(resized(ask.cluster, times * ask.cluster.nodes)), batch=max(ask.batch, chips // 8))
        if len(search(other, slack=1.0)):
            yield f"take {chips:,} of them", other
            break
    if ask.shape.seq > 1024:
        yield "halve the sequence", replace(ask, shape=replace(ask.shape, seq=ask.shape.seq // 2))


def _no_layout(ask: Ask) -> UserError:
    """Find which constraint, alone or with those before it, keeps every combination from dividing as it must."""
    relaxed, together = ask, []
    ways = list(_looser(ask))
    for field, value, change, remedy in ways:
        if _exists(change(ask)):
            return UserError(
                f"no layout of {ask.cluster.num_chips:,} chips has it", field=field, value=value, remedy=remedy
            )
    for field, value, change, remedy in ways:
        relaxed = change(relaxed)
        together.append((field, value, remedy))
        if _exists(relaxed):
            break
    names = ", ".join(f"{field} = {value}" for field, value, _ in together[:-1])
    field, value, remedy = together[-1]
    return UserError(
        f"no layout of {ask.cluster.num_chips:,} chips has it together with {names}" if names else "nothing divides",
        field=field,
        value=value,
        remedy=remedy,
    )


def _looser(ask: Ask) -> Iterator[tuple[str, object, Callable[[Ask], Ask], str]]:
    """Yield each constraint: its name, its value, how to relax it, and what to do about it."""
    tied = ask.limits.engine and ask.shape.tied and not takes_tied_pipelines()
    for name, value in ask.limits.pins.items():
        hint = "leave it out"
        if tied and (name == "schedule" or (name == "pp" and int(value) > 1)):
            hint = "the engine keeps a tied embedding in one stage: set model.tied = false, or pp = 1"
        elif ask.limits.engine and _splits_in_fp8(ask, name):
            hint = f"{' and '.join(SPLIT_BACKWARD)} do not run in fp8: take bf16, or another schedule"
        if name == "tp":
            able = tensor_degrees(replace(ask, limits=replace(ask.limits, pins={})))
            hint = f"it can be {', '.join(map(str, able))}"
        yield name, value, partial(_without, name=name), hint
    good = _near_batch(ask)
    hint = f"{good:,} would do" if good else "take another batch"
    yield "global_batch", ask.batch, lambda a: _with_batch(a, good or a.batch), hint
    used = f"allow fewer of the {ask.cluster.num_chips:,} chips to be used (--use 0.5)"
    yield "use", ask.limits.use, lambda a: replace(a, limits=replace(a.limits, use=min(0.5, a.limits.use))), used


def _splits_in_fp8(ask: Ask, name: str) -> bool:
    """Return whether this pin asks for a schedule that splits the backward pass, in fp8 only."""
    pins = ask.limits.pins
    precisions = {pins["precision"]} if "precision" in pins else set(ask.limits.precisions)
    together = pins.get("schedule") in SPLIT_BACKWARD and precisions == {"fp8"}
    return name in ("schedule", "precision") and together and not splits_backward_in_fp8()


def _without(ask: Ask, name: str) -> Ask:
    return replace(ask, limits=replace(ask.limits, pins={k: v for k, v in ask.limits.pins.items() if k != name}))


def _with_batch(ask: Ask, batch: int) -> Ask:
    return replace(ask, batch=batch, limits=replace(ask.limits, tolerance=0.25))


def _near_batch(ask: Ask) -> int:
    """Return the nearest batch that some layout divides; 0: none below 64 samples per chip."""
    for power in range(40):
        if ask.batch << power > 64 * ask.cluster.num_chips + ask.batch:
            return 0
        _, batches = cores(_with_batch(ask, ask.batch << power))
        if len(batches):
            return int(batches[np.argmin(np.abs(batches - ask.batch))])
    return 0
