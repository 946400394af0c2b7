"""Activation checkpointing, unit by unit. `full` keeps a unit's input and runs its forward again in
backward; `selective` keeps the results of matrix products, attention and (not on Gloo) collectives,
and redoes only the cheap rest. Parameter names do not change."""

from __future__ import annotations

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


def apply_recompute(units: list[nn.Module], mode: str) -> None:
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for unit in units:
        unit.forward = partial(checkpoint, unit.forward, **options)
