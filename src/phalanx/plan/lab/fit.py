"""Fits the numbers of cost/numbers.py to published runs, all at once: the likeliest values given their priors and the
errors ln(predicted / published), with Huber's loss, by Gauss-Newton steps inside the bounds.
`python -m phalanx.plan.lab.fit` writes fitted.toml with intervals: quantiles of the errors that remain when each source
in turn is left out of the fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.intervals import kind_of
from phalanx.plan.cost.numbers import numbers
from phalanx.plan.cost.profiles import Kind
from phalanx.plan.cost.software import OWN
from phalanx.plan.lab.columns import RunTable
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.lab.runs import Run

ERROR = 0.05  # ln: the error expected of the model itself
HUBER = 1.5  # errors beyond this many times ERROR count linearly
ROUNDS = 30
STEP = 0.01  # ln: the step of a finite difference
TAIL = 0.04  # share of the errors left out on each side of an interval: a little under 5 %, because rows are few
LEAST = 0.05  # ln: no interval is narrower
OWN_MEMORY = [-0.05, 0.15]  # of this engine: 17 shapes on one H200 lie from -0.01 to 0.13 (benchmarks/plan_truth.py)
NAMES = [number.name for number in numbers()]
PRIOR, LOW, HIGH = (np.log([getattr(n, side) for n in numbers()]) for side in ("prior", "low", "high"))
RIDGE = np.array([n.spread for n in numbers()]) ** -2.0


@dataclass(frozen=True, slots=True)
class Fit:
    logs: NDArray
    loss: float

    @property
    def numbers(self) -> dict[str, float]:
        return dict(zip(NAMES, np.exp(self.logs).tolist(), strict=True))


def fit(table: RunTable, use: NDArray | None = None) -> Fit:
    """`use`: which runs count."""
    table = table if use is None else subset(table, use)
    published = table.published

    def off(logs: NDArray) -> NDArray:
        return table.log_step(dict(zip(NAMES, np.exp(logs), strict=True))) - published

    def loss(logs: NDArray, left: NDArray) -> float:
        return float(huber(left).sum() + 0.5 * (RIDGE * (logs - PRIOR) ** 2).sum())

    logs = PRIOR.copy()
    left = off(logs)
    best, damping = loss(logs, left), 0.01
    for _ in range(ROUNDS):
        before = best
        slopes = np.stack([(off(logs + STEP * unit) - left) / STEP for unit in np.eye(len(logs))], 1)
        weight = np.minimum(1.0, HUBER * ERROR / np.maximum(np.abs(left), 1e-9)) / ERROR**2
        curve = slopes.T @ (weight[:, None] * slopes)
        slope = -slopes.T @ (weight * left) - RIDGE * (logs - PRIOR)
        while damping < 1e5:  # Levenberg-Marquardt: smaller steps until one helps
            step = np.linalg.solve(curve + np.diag(RIDGE + damping * (np.diag(curve) + RIDGE)), slope)
            tried = np.clip(logs + step, LOW, HIGH)
            after = off(tried)
            value = loss(tried, after)
            if value < best:
                logs, left, best, damping = tried, after, value, max(damping / 4, 1e-4)
                break
            damping *= 4
        if before - best < 0.5:
            break
    return Fit(logs, best)


def huber(left: NDArray) -> NDArray:
    size = np.abs(left) / ERROR
    return np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))


def subset(table: RunTable, use: NDArray) -> RunTable:
    return RunTable.of([run for run, keep in zip(table.runs, use, strict=True) if keep])


def left_out(table: RunTable, groups: NDArray) -> NDArray:
    """Predict ln(time) of each run from a fit without its group. Each fit begins at the prior, so that nothing of the
    group leaks into it."""
    out = np.zeros(len(table.runs))
    for group in np.unique(groups):
        mine = groups == group
        out[mine] = subset(table, mine).log_step(fit(table, ~mine).numbers)
    return out


def publisher(source: str) -> str:
    """Return who published a source: tables of one publisher share clusters and habits."""
    names = ("Megatron-Bridge", "dgxc", "llm-foundry", "torchtitan", "maxtext", "MegaScale", "Megatron-LM")
    return next((name for name in names if name in source), source)


def kinds(runs: list[Run]) -> list[str]:
    """Label each run, so that runs with one label are about equally well known."""
    return [
        kind_of(bool(run.shape.experts), run.precision, str(Kind.of(run.cluster.node.chip).generation)) for run in runs
    ]


def engine_on_chip(run: Run) -> str:
    return f"{run.engine} on {Kind.of(run.cluster.node.chip).generation}"


def intervals(kind: list[str], near: NDArray, far: NDArray) -> dict[str, list[float]]:
    """Return quantiles of ln(published / predicted) by kind of run: `near` with the source left out, `far` with its
    publisher."""
    out = {}
    for name in sorted(set(kind)):
        mine = np.array(kind) == name
        for level, error in (("seen", near), ("unseen", far)):
            low, high = np.quantile(error[mine], [TAIL, 1 - TAIL])
            out[f"{name}, {level}"] = [round(float(min(low, -LEAST)), 4), round(float(max(high, LEAST)), 4)]
    return out


def peaks(runs: list[Run], table: RunTable, found: Fit) -> dict[str, list[float]]:
    """Return the range of ln(peak / predicted) by software, over runs that state their whole layout."""
    costs = table.evaluate(found.numbers)
    errors: dict[str, list[float]] = {}
    for i, run in enumerate(runs):
        if run.peak_bytes and len(run.options) == 1:
            row = int(np.flatnonzero(table.owner == i)[0])
            errors.setdefault(run.engine, []).append(float(np.log(run.peak_bytes / costs.memory_bytes[row])))
    several = {name: sorted(e) for name, e in errors.items() if len(e) >= 5}
    return {name: [round(e[0], 4), round(e[-1], 4)] for name, e in several.items()}


def main() -> None:
    from phalanx.plan.lab.validate import leave_out, store

    runs, _ = read_runs(packaged(), load_packaged())
    table = RunTable.of(runs)
    whole = fit(table)
    near, far = leave_out(table)
    errors = intervals(kinds(runs), table.published - near, table.published - far)
    seen = sorted(Counter(map(engine_on_chip, runs)).items())
    lines = [
        "# Written by `python -m phalanx.plan.lab.fit`. What each number is, its prior and its bounds: numbers.toml."
    ]
    lines += ["", "[numbers]", *(f'"{name}" = {value:.6g}' for name, value in whole.numbers.items())]
    lines += [
        "",
        "# ln(published / predicted) at 5 % and 95 %, the source (seen) or its publisher (unseen) left out.",
        "[errors]",
    ]
    lines += [f'"{name}" = {value}' for name, value in errors.items()]
    lines += [
        "",
        "# ln(peak / predicted memory): the range over runs that state their whole layout; phalanx: measured here.",
        "[memory]",
    ]
    lines += [f'"{name}" = {value}' for name, value in (peaks(runs, table, whole) | {OWN: OWN_MEMORY}).items()]
    lines += ["", "# Published runs by software and generation of chips.", "[seen]"]
    lines += [f'"{name}" = {count}' for name, count in seen]
    (Path(str(resources.files("phalanx.plan.cost"))) / "fitted.toml").write_text("\n".join(lines) + "\n")
    rounded = {name: float(f"{value:.6g}") for name, value in whole.numbers.items()}
    store(table.log_step(rounded), near, far)


if __name__ == "__main__":
    main()
