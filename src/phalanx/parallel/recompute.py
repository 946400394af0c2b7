"""Activation checkpointing, unit by unit. `full` keeps a unit's input and runs its forward again in
backward; `selective` keeps the results of matrix products, attention and (not on Gloo) collectives,
and redoes only the cheap rest. Parameter names do not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten, _comm = torch.ops.aten, torch.ops._c10d_functional
KEEP = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _comm.all_gather_into_tensor.default,
    _comm.reduce_scatter_tensor.default,
    _comm.wait_tensor.default,
}


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(units: list[nn.Module], experts: list[nn.Module], mode: str) -> None:
    """`experts` are FSDP2 modules of their own inside the units. What FSDP2 does around them differs when
    it is done again, which selective recomputation takes for a mistake: it goes round them."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        units = [piece for unit in units for piece in _pieces(unit, experts)]
    for unit in units:
        unit.forward = _again(unit.forward, options)


def _again(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:  # a function, not a partial: torch.compile looks into the one only
        return checkpoint(forward, *args, **options)

    return run


def apply_compile(units: list[nn.Module], experts: list[nn.Module], backend: str) -> None:
    """Each block by itself, inside FSDP2's hooks, so that equal blocks share one compilation and no name
    of a group or generation is baked in. Recomputation is compiled with the block. Not the experts: how
    many rows they get differs every time, and their kernel is one already."""
    if backend == "none":
        return
    for piece in (piece for unit in units for piece in _pieces(unit, experts)):
        if not any(piece is e for e in experts):
            piece.forward = torch.compile(piece.forward, backend=backend, dynamic=False)


def _pieces(module: nn.Module, experts: list[nn.Module]) -> list[nn.Module]:
    """The largest parts of a module that have no experts inside, and the experts."""
    inner = [m for m in module.modules() if m is not module]
    if any(e is m for e in experts for m in inner):
        return [piece for child in module.children() for piece in _pieces(child, experts)]
    return [module]
