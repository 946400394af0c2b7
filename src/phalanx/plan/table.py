"""Published runs as columns: all candidates of all runs in one evaluation, and each run's prediction as the weighted
mean over what it leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.candidates import Candidates
from phalanx.plan.cost import Costs, evaluate, step_seconds
from phalanx.plan.machine import Machine
from phalanx.plan.model import ModelShape
from phalanx.plan.profiles import CONSTANTS, Constants, Profile, traits_of
from phalanx.plan.runs import Run

UNLIKELY = 0.02  # of a layout that the memory model refuses: it may be the memory model that errs
TUNED = 0.15  # published runs were tuned: a layout that is slower by so much (ln) than the run's best is e times rarer


@dataclass(frozen=True, slots=True)
class RunTable:
    runs: list[Run]
    owner: NDArray  # run of each candidate
    shape: ModelShape
    machine: Machine
    candidates: Candidates
    batch: NDArray
    traits: dict[str, Any]
    weight: NDArray  # of a candidate within its run

    @classmethod
    def of(cls, runs: list[Run]) -> RunTable:
        owner = np.concatenate([np.full(len(run.options), i) for i, run in enumerate(runs)])
        layouts = [option.layout for run in runs for option in run.options]
        columns = {key: [layout[key] for layout in layouts] for key in layouts[0]}
        machine = Machine.stack([Machine.of(run.cluster) for run in runs]).take(owner)
        traits = [traits_of(run.framework, run.chip) | run.traits for run in runs]
        table = cls(
            runs, owner, ModelShape.stack([run.shape for run in runs]).take(owner), machine, Candidates.of(**columns),
            np.array([run.global_batch for run in runs], dtype=float)[owner],
            {name: np.array([t[name] for t in traits])[owner] for name in traits[0]},
            np.array([option.weight for run in runs for option in run.options]),
        )  # fmt: skip
        return table._weighed()

    def _weighed(self) -> RunTable:
        """Weights after a look at the costs: what does not fit is unlikely, and so is what is slow without need. Those
        of a run add up to one."""
        costs = self.evaluate(np.ones((len(self.runs), 3)))
        fits = costs.possible
        logs = np.log(costs.step_s)
        best = np.full(len(self.runs), np.inf)
        np.minimum.at(best, self.owner, np.where(fits, logs, np.inf))
        slower = np.where(np.isfinite(best)[self.owner], logs - best[self.owner], 0.0)
        weight = self.weight * np.where(fits, np.exp(-np.maximum(slower, 0.0) / TUNED), UNLIKELY)
        weight = weight / np.bincount(self.owner, weight, len(self.runs))[self.owner]
        return RunTable(
            self.runs, self.owner, self.shape, self.machine, self.candidates, self.batch, self.traits, weight
        )

    def subset(self, runs: NDArray) -> RunTable:
        """Some of the runs (a mask)."""
        rows = runs[self.owner]
        owner = (np.cumsum(runs) - 1)[self.owner[rows]]
        return RunTable(
            [run for run, keep in zip(self.runs, runs, strict=True) if keep], owner, self.shape.take(rows),
            self.machine.take(rows), self.candidates.take(rows), self.batch[rows],
            {k: v[rows] for k, v in self.traits.items()}, self.weight[rows],
        )  # fmt: skip

    def evaluate(self, efficiency: NDArray, k: Constants = CONSTANTS) -> Costs:
        """`efficiency`: matmul, other, network of each run."""
        return evaluate(self.shape, self.machine, self.candidates, self.batch, self._profile(efficiency), k)

    def log_step(self, efficiency: NDArray, k: Constants = CONSTANTS) -> NDArray:
        """ln of the predicted step seconds of each run: the mean over its candidates."""
        terms = step_seconds(self.shape, self.machine, self.candidates, self.batch, self._profile(efficiency), k)
        logs = np.log(sum(terms.values()))
        return np.bincount(self.owner, self.weight * logs, len(self.runs))

    def _profile(self, efficiency: NDArray) -> Profile:
        matmul, other, network = efficiency[self.owner].T
        return Profile(matmul, other, network, **self.traits)

    @property
    def published(self) -> NDArray:
        return np.log(np.array([run.step_s for run in self.runs]))
