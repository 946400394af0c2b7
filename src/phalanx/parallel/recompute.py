"""Activation checkpointing, unit by unit. `full` keeps a unit's input and runs its forward again in backward.
`selective` keeps the results of matrix products, attention and (except on Gloo) collectives, and recomputes only the
cheap rest. Parameter names do not change."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.core.job import Job
from phalanx.parallel.device import Device

_aten, _comm = torch.ops.aten, torch.ops._c10d_functional
KEEP = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    _comm.all_gather_into_tensor.default,
    _comm.reduce_scatter_tensor.default,
    _comm.wait_tensor.default,
}


OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEEP else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products(units: list[nn.Module], experts: list[nn.Module]) -> None:
    """Apply selective recomputation. Call it before blocks are compiled, since the compiler must see what is kept.
    `experts` are FSDP2 modules of their own inside the units. FSDP2 does other work around them the second time, which
    selective recomputation would take for an error, so experts and the rest are wrapped separately."""
    context = partial(create_selective_checkpoint_contexts, _policy)
    for piece in (piece for unit in units for piece in _pieces(unit, experts)):
        piece.forward = _again(piece.forward, {**OPTIONS, "context_fn": context})


def keep_inputs(units: list[nn.Module]) -> None:
    """Apply full recomputation, after blocks are compiled: inside, the compiler would keep what our functions save."""
    for unit in units:
        unit.forward = _again(unit.forward, OPTIONS)


def _again(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:  # a function, because torch.compile does not look into a partial
        return checkpoint(forward, *args, **options)

    return run


def compiler(job: Job, device: Device) -> str:
    """Return the backend that compiles the blocks. `auto` is inductor on accelerators, except where a schedule splits
    the backward (a compiled block has one) and where ranks share a device (their collectives go through the host)."""
    if job.train.compile != "auto":
        return job.train.compile
    alone = not device.is_cpu and device.backend != "gloo"
    return "inductor" if alone and not job.layout.splits_backward else "none"


@contextlib.contextmanager
def importing(backend: str) -> Iterator[None]:
    """Import the compiler in a thread: it takes seconds of Python, which long work outside of Python hides."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._inductor.compile_fx",))
    if backend == "inductor":
        thread.start()
    yield
    if backend == "inductor":
        thread.join()


def apply_compile(units: list[nn.Module], experts: list[nn.Module], backend: str) -> None:
    """Compile each block by itself, inside FSDP2's hooks, so that equal blocks share one compilation and no name of a
    group or generation is baked in. Experts are left out: their number of rows differs every time, and their kernel is
    one already."""
    if backend == "none":
        return
    for piece in (piece for unit in units for piece in _pieces(unit, experts)):
        if not any(piece is e for e in experts):
            piece.forward = torch.compile(piece.forward, backend=backend, dynamic=False)


def _pieces(module: nn.Module, experts: list[nn.Module]) -> list[nn.Module]:
    """Return the experts of a module, and its largest parts that have no experts inside."""
    inner = [m for m in module.modules() if m is not module]
    if any(e is m for e in experts for m in inner):
        return [piece for child in module.children() for piece in _pieces(child, experts)]
    return [module]
