"""Kernels for operations in which torch makes too many passes over memory. Each has a plain PyTorch formula and, for
accelerators, a Triton kernel that computes the same (`triton_*.py`, imported when it is first needed: a CPU has no
Triton).

Functions here take and return plain tensors and know nothing of models, axes or jobs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def operator(function: Callable[..., Any]) -> Any:
    """Turn a function that launches Triton kernels into an operator. A compiler looks inside and puts the launches
    among its own: dispatching an operator in Python costs as much host time as ten launches."""
    if importlib.util.find_spec("triton") is None:  # nobody will call it
        return function
    return torch.library.triton_op(f"phalanx::{function.__name__.strip('_')}", function, mutates_args=())


def has_kernel(tensor: Tensor) -> bool:
    """Return whether a Triton kernel takes this tensor. They compute in fp32, so fp64 stays with the formulas, and
    nothing can be launched for a tensor without elements."""
    return tensor.device.type != "cpu" and tensor.dtype != torch.float64 and tensor.numel() > 0
