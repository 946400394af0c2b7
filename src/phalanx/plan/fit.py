"""Fits the three numbers of every profile to published runs. A cluster's numbers are a product of factors: of all
runs, of its software, of its chip, of both together, and its own; a model of experts has one more, for the path that
its software has for it; each factor is drawn towards 1 the more the fewer
runs speak for it (ridge), so that what no run has shown is a sensible default. Gauss-Newton on ln(predicted /
published), with Huber weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.hardware import load
from phalanx.plan.profiles import BOUNDS, CONSTANTS, Constants, keys_of
from phalanx.plan.reading import read_runs
from phalanx.plan.runs import Run
from phalanx.plan.table import RunTable

# Standard deviation of ln(factor) before any run is seen, by level: of matmul, other, network. Networks and their
# software differ most. Chosen among a few by cross-validation.
LEVELS = {
    "all": (1.0, 1.0, 1.0),
    "software": (0.15, 0.2, 0.5),
    "chip": (0.10, 0.10, 0.2),
    "software and chip": (0.05, 0.05, 0.15),
    "model": (0.3, 0.3, 0.3),
    "cluster": (0.10, 0.10, 0.25),
}
ERROR = 0.04  # what the model itself may be off by, ln
ROUNDS = 40
HUBER = 2.0  # residuals beyond so many times ERROR count linearly
START = np.log([0.85, 1.0, 1.0])


def _keys(run: Run) -> dict[str, str]:
    return keys_of(run.framework, run.chip, run.family, run.source)


@dataclass(frozen=True, slots=True)
class Fit:
    factors: dict[tuple[str, str], NDArray]  # (level, key) -> ln of matmul, other, network
    loss: float = 0.0

    def efficiency(self, runs: list[Run], known: bool = True) -> NDArray:
        """Of each run: the product of its factors; `known` uses its own cluster's too."""
        levels = [level for level in LEVELS if known or level != "cluster"]
        zero = np.zeros(3)
        logs = [sum((self.factors.get((lv, _keys(r)[lv]), zero) for lv in levels), START) for r in runs]
        return np.exp(np.clip(np.array(logs), *BOUNDS))


def fit(
    table: RunTable, use: NDArray | None = None, k: Constants = CONSTANTS, start: Fit | None = None,
    enough: float = 1.0,
) -> Fit:  # fmt: skip
    """`use`: which runs count. `start`: where to begin. `enough`: it ends when a round gains less of the loss."""
    use = np.ones(len(table.runs), bool) if use is None else use
    table = table.subset(use)
    effects = sorted({(level, key) for run in table.runs for level, key in _keys(run).items()})
    index = {effect: i for i, effect in enumerate(effects)}
    design = np.zeros((len(table.runs), len(effects)))
    for i, run in enumerate(table.runs):
        for effect in _keys(run).items():
            design[i, index[effect]] = 1 if effect[1] else 0
    beta = np.zeros((len(effects), 3))
    if start:
        for effect, i in index.items():
            beta[i] = start.factors.get(effect, beta[i])
    ridge = np.array([LEVELS[level] for level, _ in effects]).ravel() ** -2.0
    published = table.published

    def residuals(beta: NDArray, offset: NDArray | float = 0.0) -> NDArray:
        return table.log_step(np.exp(np.clip(START + design @ beta + offset, *BOUNDS)), k) - published

    def loss(beta: NDArray, left: NDArray) -> float:
        size = np.abs(left) / ERROR
        huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        return float(huber.sum() + 0.5 * (ridge * beta.ravel() ** 2).sum())

    here = residuals(beta)
    best, damping = loss(beta, here), 0.01
    for _ in range(ROUNDS):
        before = best
        slopes = np.stack([(residuals(beta, 0.02 * np.eye(3)[i]) - here) / 0.02 for i in range(3)], 1)
        weight = np.minimum(1.0, HUBER * ERROR / np.maximum(np.abs(here), 1e-9)) / ERROR**2
        jacobian = (design[:, :, None] * slopes[:, None, :]).reshape(len(here), -1)
        curve = jacobian.T @ (weight[:, None] * jacobian)
        slope = -jacobian.T @ (weight * here) - ridge * beta.ravel()
        while damping < 1e4:  # Levenberg-Marquardt: smaller steps until one helps
            step = np.linalg.solve(curve + np.diag(ridge * (1 + damping) + damping * np.diag(curve)), slope)
            tried = beta + step.reshape(-1, 3)
            after = residuals(tried)
            value = loss(tried, after)
            if value < best:
                beta, here, best, damping = tried, after, value, damping / 5
                break
            damping *= 5
        if before - best < enough:
            break
    return Fit({effect: beta[i] for effect, i in index.items()}, best)


def left_out(table: RunTable, whole: Fit) -> NDArray:
    """ln efficiencies of each run, fitted without any run of its source. The fit starts where the one of all runs ended
    (in other valleys the loss is higher), but for every factor that the source had a part in."""
    sources = np.array([run.source for run in table.runs])
    out = np.zeros((len(sources), 3))
    for source in np.unique(sources):
        mine = [run for run in table.runs if run.source == source]
        its = {effect for run in mine for effect in _keys(run).items()}
        start = Fit({effect: row for effect, row in whole.factors.items() if effect not in its})
        without = fit(table, sources != source, start=start, enough=0.3)
        out[sources == source] = np.log(without.efficiency(mine))
    return out


def folds(table: RunTable, whole: Fit, count: int = 10) -> NDArray:
    """ln(published / predicted) of each run, fitted without it and a tenth of the others: what a new run of a known
    cluster meets."""
    fold = np.random.default_rng(7).permutation(len(table.runs)) % count
    out = np.zeros(len(table.runs))
    for i in range(count):
        mine = fold == i
        part = table.subset(mine)
        without = fit(table, ~mine, start=whole)
        out[mine] = part.published - part.log_step(without.efficiency(part.runs))
    return out


def spread(strata: list[str], error: NDArray, known: str, tail: float) -> dict[str, list[float]]:
    """What `tail` of the errors of a stratum lie below, and above; two percent at least."""
    out = {}
    for stratum in sorted(set(strata)):
        low, high = np.quantile(error[np.array(strata) == stratum], [tail, 1 - tail])
        out[f"{stratum}|{known}"] = [round(float(min(low, -0.02)), 4), round(float(max(high, 0.02)), 4)]
    return out


def main() -> None:
    """Writes profiles.toml from published_runs.csv."""
    folder = Path(__file__).parent
    runs, _ = read_runs(folder / "published_runs.csv", load())
    table = RunTable.of(runs)
    whole = fit(table, enough=0.05)
    strata = [run.stratum for run in runs]
    without = left_out(table, whole)
    new = table.published - table.log_step(np.exp(without))
    # Cross-validated errors are larger than those on the fitted rows, which the intervals are scored on too.
    error = spread(strata, folds(table, whole), "known", 0.065) | spread(strata, new, "new", 0.05)
    lines = [
        "# Written by `python -m phalanx.plan.fit`; ln of the factors on matmul, other, network.",
        f"start = {_row(START)}",
    ]
    lines += ["", "[error]"] + [f'"{key}" = {value}' for key, value in sorted(error.items())]
    for level in LEVELS:
        lines += ["", f'[factors."{level}"]']
        lines += [f'"{key}" = {_row(v)}' for (lv, key), v in sorted(whole.factors.items()) if lv == level and key]
    clusters = {_keys(run)["cluster"] + "|" + run.family: row for run, row in zip(runs, without, strict=True)}
    lines += ["", "[left_out]"] + [f'"{key}" = {_row(row)}' for key, row in sorted(clusters.items())]
    (folder / "profiles.toml").write_text("\n".join(lines) + "\n")


def _row(values: NDArray) -> list[float]:
    return [round(float(v), 4) for v in values]


if __name__ == "__main__":
    main()
