"""Published runs as columns: one evaluation covers all candidates of all runs. A run's prediction is the weighted mean
over the layouts that its row leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import Costs, evaluate, step_seconds
from phalanx.plan.cost.intervals import memory_interval
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.numbers import numbers
from phalanx.plan.cost.profiles import Kind, Profile, profile_of
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import Software
from phalanx.plan.lab.runs import Run

UNLIKELY = 0.02  # weight of a layout that the memory model refuses: the model may be wrong
TUNED = 0.15  # published runs were tuned: a layout slower than the run's best by this much (ln) is e times rarer


@dataclass(frozen=True, slots=True)
class RunTable:
    runs: list[Run]
    owner: NDArray  # run of each candidate
    shape: ModelShape
    machine: Machine
    candidates: Candidates
    batch: NDArray
    kind: Kind  # of each run's chip
    software: Software  # of each run
    weight: NDArray  # of a candidate within its run

    @classmethod
    def of(cls, runs: list[Run]) -> RunTable:
        owner = np.concatenate([np.full(len(run.options), i) for i, run in enumerate(runs)])
        layouts = [option.layout for run in runs for option in run.options]
        columns = {key: [layout[key] for layout in layouts] for key in layouts[0]}
        table = cls(
            runs, owner, ModelShape.stack([run.shape for run in runs]).take(owner),
            Machine.stack([Machine.of(run.cluster) for run in runs]).take(owner), Candidates.of(**columns),
            np.array([run.global_batch for run in runs], dtype=float)[owner],
            Kind.stack([Kind.of(run.cluster.node.chip) for run in runs]),
            Software.stack([run.software for run in runs]),
            np.array([option.weight for run in runs for option in run.options]),
        )  # fmt: skip
        return table._weighed()

    def _weighed(self) -> RunTable:
        """Reweight the candidates by their cost under the priors: a layout that does not fit is unlikely, and so is one
        that is needlessly slow. The weights of a run add up to one."""
        costs = self.evaluate({number.name: number.prior for number in numbers()})
        possible = self.possible(costs)
        logs = np.log(costs.step_s)
        best = np.full(len(self.runs), np.inf)
        np.minimum.at(best, self.owner, np.where(possible, logs, np.inf))
        slower = np.where(np.isfinite(best)[self.owner], logs - best[self.owner], 0.0)
        weight = self.weight * np.where(possible, np.exp(-np.maximum(slower, 0.0) / TUNED), UNLIKELY)
        return replace(self, weight=weight / np.bincount(self.owner, weight, len(self.runs))[self.owner])

    def possible(self, costs: Costs) -> NDArray:
        """Return whether each candidate may fit, judged by the lower end of its memory interval."""
        low = np.exp([memory_interval(run.engine)[0] for run in self.runs])[self.owner]
        allocated = costs.memory_bytes - costs.memory["allocator"] - costs.memory["context"]
        return np.asarray(low * allocated + costs.memory["context"] <= costs.capacity_bytes)

    def profile(self, numbers: Mapping[str, float]) -> Profile:
        """Return the profile with a row for each candidate."""
        return profile_of(self.kind, self.software, numbers).take(self.owner)

    def evaluate(self, numbers: Mapping[str, float]) -> Costs:
        return evaluate(self.shape, self.machine, self.candidates, self.batch, self.profile(numbers))

    def log_step(self, numbers: Mapping[str, float]) -> NDArray:
        """Return ln of each run's predicted step seconds: the weighted mean over its candidates."""
        terms = step_seconds(self.shape, self.machine, self.candidates, self.batch, self.profile(numbers))
        return np.bincount(self.owner, self.weight * np.log(sum(terms.values())), len(self.runs))

    @property
    def published(self) -> NDArray:
        return np.log(np.array([run.step_s for run in self.runs]))
