"""Backward in two halves, for the schedules without a bubble: first the gradients of the inputs, which the previous
stage waits for, later those of the weights. A linear layer hands in its weight's gradient as work to be done;
everything else (norms, embeddings, biases) is cheap and done at once.

torch's own split walks the autograd graph for parameters, finds none while FSDP2 has them resharded, and silently loses
their gradients. Here nothing is looked for, so every ZeRO stage works: the weights themselves are not needed for their
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from phalanx.model.grouped import grouped_linear, input_gradient, weight_gradient
from phalanx.model.moe import Experts
from phalanx.parallel.reduce import Reducer
from phalanx.parallel.tensor import OpenLinear

Work = tuple[nn.Parameter, Callable[[], Tensor]]  # a weight, and what computes its gradient


class WeightGradients:
    """The work that the running backward puts off; None: nothing is put off."""

    def __init__(self) -> None:
        self.work: list[Work] | None = None

    def put_off(self, weight: nn.Parameter, gradient: Callable[[], Tensor]) -> Tensor | None:
        """Return the gradient, or None if it comes later."""
        if self.work is None:
            return gradient()
        self.work.append((weight, gradient))
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, deferred: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.deferred = weight, deferred
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dw = ctx.deferred.put_off(ctx.weight, lambda: grad.flatten(0, -2).t() @ x.flatten(0, -2))
        return dx, dw, None


class _GroupedLinear(torch.autograd.Function):
    """`_Linear` for the experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, counts: Tensor, deferred: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.weight, ctx.deferred = weight, deferred
        return grouped_linear(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        dx = input_gradient(grad, weight, counts)
        return dx, ctx.deferred.put_off(ctx.weight, lambda: weight_gradient(x, grad, counts)), None, None


def apply_deferral(model: nn.Module, deferred: WeightGradients) -> None:
    def multiply(x: Tensor, weight: nn.Parameter) -> Tensor:
        return _Linear.apply(x, weight, deferred)

    def multiply_grouped(x: Tensor, weight: nn.Parameter, counts: Tensor) -> Tensor:
        return _GroupedLinear.apply(x, weight, counts, deferred)

    for module in model.modules():
        if isinstance(module, Experts):
            module.multiply = multiply_grouped
        if isinstance(module, nn.Linear):
            module.multiply = multiply
            if type(module) is nn.Linear:
                module.__class__ = OpenLinear


class Halves(Protocol):
    """The two halves of one stage's backward."""

    def inputs(self, micro: int, backward: Callable[[], None]) -> None: ...

    def weights(self, micro: int, reduce: bool) -> None: ...


def halves(model: nn.Module, deferred: WeightGradients, reducer: Reducer) -> Halves:
    return ShardedHalves(model, deferred) if isinstance(model, FSDPModule) else WholeHalves(model, deferred, reducer)


class WholeHalves:
    """The halves on a rank that holds all parameters: gradients are kept from the reducer until they are complete."""

    def __init__(self, model: nn.Module, deferred: WeightGradients, reducer: Reducer):
        self.deferred, self.reducer, self.params = deferred, reducer, list(model.parameters())
        self.kept: dict[int, tuple[list[Work], dict[nn.Parameter, Tensor]]] = {}

    def inputs(self, micro: int, backward: Callable[[], None]) -> None:
        before, work = self._take(), list[Work]()
        self.deferred.work, self.reducer.held_back = work, True
        try:
            backward()
        finally:
            self.deferred.work, self.reducer.held_back = None, False
        self.kept[micro] = (work, self._take())
        for param, grad in before.items():
            param.grad = grad

    @torch.no_grad()
    def weights(self, micro: int, reduce: bool) -> None:
        work, grads = self.kept.pop(micro)
        while work:
            weight, gradient = work.pop()
            value = gradient()
            grads[weight] = value if weight not in grads else grads[weight].add_(value)
        for param, grad in grads.items():
            param.grad = grad if param.grad is None else param.grad.add_(grad)
        self.reducer.complete(self.params)

    def _take(self) -> dict[nn.Parameter, Tensor]:
        taken = {p: p.grad for p in self.params if p.grad is not None}
        for param in taken:
            param.grad = None
        return taken


class ShardedHalves:
    """The halves under FSDP2, which may free the parameters after the first. The gradients that it holds by then are
    taken from it, and returned with the rest before it reduces them, micro-batch by micro-batch."""

    def __init__(self, model: FSDPModule, deferred: WeightGradients):
        self.deferred = deferred
        self.root = fully_shard.state(model)
        states = self.root._state_ctx.all_states
        # torch 2.13 allows several groups in a module, 2.11 has one
        groups = [getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] for s in states]
        self.groups = [g for some in groups for g in some if g is not None]
        self.params = [p for g in self.groups for p in g.fsdp_params]
        self.kept: dict[int, tuple[list[Work], dict[int, Tensor]]] = {}

    def inputs(self, micro: int, backward: Callable[[], None]) -> None:
        work: list[Work] = []
        self.deferred.work = work
        try:
            backward()
        finally:
            self.deferred.work = None
        early = {}
        for p in self.params:
            parts = [g for g in (p.unsharded_accumulated_grad, p._unsharded_param.grad) if g is not None]
            p.unsharded_accumulated_grad = p._unsharded_param.grad = None
            if parts:
                early[id(p._unsharded_param)] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        self.kept[micro] = (work, early)

    def weights(self, micro: int, reduce: bool) -> None:
        work, grads = self.kept.pop(micro)
        while work:
            weight, gradient = work.pop()
            value = gradient()
            grads[id(weight)] = value if id(weight) not in grads else grads[id(weight)].add_(value)
        for p in self.params:
            if (grad := grads.pop(id(p._unsharded_param), None)) is not None:
                grad = grad if p.reduce_dtype is None else grad.to(p.reduce_dtype)
                held = p.unsharded_accumulated_grad
                p.unsharded_accumulated_grad = grad if held is None else held.add_(grad)
        assert not grads, "a weight gradient belongs to no parameter"
        if reduce:
            for group in reversed(self.groups):
                group.post_backward()
            self.root._root_post_backward_final_callback()
