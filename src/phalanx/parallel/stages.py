"""Assign modules to the stages of the pipeline: units in runs of nearly equal cost, and what the family calls first and
last at the ends. Modules of other stages are replaced by ones that pass their input on, so the names of parameters do
not depend on the cut."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig, balance
from phalanx.model.family import Family

EMBEDDING_COST = 0.1  # of a matrix of its size: it is looked up instead of multiplied, but it is updated too


class Absent(nn.Module):
    """Stands in for a module of another stage."""

    def forward(self, x: Any, *_: Any) -> Any:
        return x


def cost(model: nn.Module, family: Family, config: ModelConfig, name: str) -> float:
    """Return a module's cost, in matrix parameters that each token uses."""
    total = 0.0
    for inner, child in model.get_submodule(name).named_modules(prefix=name):
        share = EMBEDDING_COST if isinstance(child, nn.Embedding) else 1.0
        if family.is_expert(inner):
            share = config.top_k / config.num_experts
        total += share * sum(p.numel() for p in child.parameters(recurse=False) if p.dim() > 1)
    return total


def cut_stages(family: Family, model: nn.Module, config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Map the name of every unit and of every module of the two ends to its stage."""
    units, num = family.names(model, family.units), layout.num_stages
    if num == 1:
        return {}
    ends = {0: family.names(model, family.first), num - 1: family.names(model, family.last)}
    _check(family, model, config, layout, units, [name for names in ends.values() for name in names])
    costs = [cost(model, family, config, name) for name in units]
    for at, names in ((0, ends[0]), (-1, ends[num - 1])):
        costs[at] += sum(cost(model, family, config, name) for name in names)
    stages = {name: stage for stage, names in ends.items() for name in names}
    counts = balance(costs, num)
    assignment = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stages |= dict(zip(units, assignment, strict=True))
    _check_tied(model, config, layout, stages)
    return stages


def _check_tied(model: nn.Module, config: ModelConfig, layout: Layout, stages: dict[str, int]) -> None:
    """Refuse a parameter that would live in two stages."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if stage_of(name, stages) != stage_of(other, stages):
            raise UserError(
                f"the family {config.family!r} ties {other} to {name}, and they would be in different stages",
                field="layout.pp",
                value=layout.pp,
                remedy="untie them, or set layout.pp = 1",
            )


def stage_of(param: str, stages: dict[str, int]) -> int:
    return next((stage for name, stage in stages.items() if param.startswith(name + ".")), 0)


def end_modules(family: Family, model: nn.Module) -> list[nn.Module]:
    """Return the modules before and after the units that have a matrix to themselves: embedding and head, unless tied.
    They are gathered and reduced by themselves, so that the head's gradient travels while the units' are computed."""
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners[param] = owners.get(param, 0) + 1
    found = family.modules(model, (*family.first, *family.last))
    own = [(module, list(module.parameters())) for module in found if not isinstance(module, Absent)]
    return [m for m, params in own if any(p.dim() > 1 for p in params) and all(owners[p] == 1 for p in params)]


def keep_stage(model: nn.Module, stages: dict[str, int], stage: int) -> None:
    for name, where in stages.items():
        if where != stage:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = Absent()


def _check(
    family: Family, model: nn.Module, config: ModelConfig, layout: Layout, units: list[str], ends: list[str]
) -> None:
    if len(units) < layout.num_stages:
        raise UserError(
            f"the model has {len(units)} layers for {layout.num_stages} pipeline stages",
            field="layout.pp",
            value=layout.pp,
            remedy="lower layout.pp or layout.chunks, or take a deeper model",
        )
    if len(inspect.signature(model.forward).parameters) < 2:
        raise UserError(
            "the model's forward takes only a batch, not what the stage before made",
            field="layout.pp",
            value=layout.pp,
            remedy="write forward(batch, x=None), where x is None in the first stage, or set layout.pp = 1",
        )
    placed = tuple(f"{name}." for name in (*units, *ends))
    for name, _ in model.named_parameters():
        if not name.startswith(placed):
            raise UserError(
                f"parameter {name!r} belongs to no stage of the pipeline",
                field="model.family",
                value=config.family,
                remedy="name its module in Family.first, Family.last or Family.units, or set layout.pp = 1",
            )
