"""Cross-entropy that computes its gradient in the forward, in the place of the logits: a row of logits is read for its
loss and overwritten by softmax - one-hot. The linear layer before it runs with it, chunk by chunk, so the logits of a
micro-batch never exist as a whole, and never in fp32.

The gradients contain the factor by which the step multiplies its losses, so the scaled loss must be the root of the
backward. Where the vocabulary is split over ranks, `reduce(tensor, "max" | "sum")` combines their values: a row never
exists on one rank.

`Bend` changes the loss: it bends logits to stay below a cap, c tanh(x / c), and adds z logsumexp^2, which keeps the
normaliser near 1 (PaLM, arXiv:2204.02311, section 5). The second counts in the gradients only.

Shapes: T tokens, D model dim, V columns of the vocabulary that are here, the first of them `start`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import has_kernel

Reduce = Callable[[Tensor, str], Tensor]


class Bend(NamedTuple):
    softcap: float = 0.0
    z_loss: float = 0.0


STRAIGHT = Bend()


def loss_in_place(
    logits_TV: Tensor, targets_T: Tensor, factor_T: Tensor, reduce: Reduce | None = None, bend: Bend = STRAIGHT
) -> Tensor:
    """Return the loss of every row, in fp32 at least, and turn each row into its gradient times its factor. Targets are
    counted from the first column here; those outside belong to other ranks."""
    if not has_kernel(logits_TV):
        return _formula(logits_TV, targets_T, factor_T, reduce, bend)
    from phalanx.kernels import triton_cross_entropy

    if reduce is None:
        return triton_cross_entropy.loss_in_place(logits_TV, targets_T, factor_T, bend)
    top_T, total_T, wanted_T = triton_cross_entropy.statistics(logits_TV, targets_T, bend)
    highest_T = reduce(top_T, "max")
    inside_T = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    wanted_T = torch.where(inside_T, wanted_T - highest_T, 0.0)
    total_T, wanted_T = reduce(torch.stack((total_T * (top_T - highest_T).exp(), wanted_T)), "sum")
    triton_cross_entropy.gradient_in_place(logits_TV, targets_T, factor_T, highest_T, total_T, bend)
    return total_T.log() - wanted_T


def _formula(logits_TV: Tensor, targets_T: Tensor, factor_T: Tensor, reduce: Reduce | None, bend: Bend) -> Tensor:
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))  # itself, unless it is narrower
    slope_TV = None
    if bend.softcap:
        wide_TV.div_(bend.softcap).tanh_()
        slope_TV = 1 - wide_TV.square()
        wide_TV.mul_(bend.softcap)
    top_T = wide_TV.amax(-1)
    top_T = top_T if reduce is None else reduce(top_T, "max")
    wide_TV.sub_(top_T.unsqueeze(-1))
    inside_T = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    index_T1 = (targets_T * inside_T).unsqueeze(-1)
    wanted_T = wide_TV.gather(-1, index_T1).squeeze(-1) * inside_T
    wide_TV.exp_()
    both_2T = torch.stack((wide_TV.sum(-1), wanted_T))
    total_T, wanted_T = both_2T if reduce is None else reduce(both_2T, "sum")
    factor_T = factor_T.to(wide_TV.dtype)
    share_T = factor_T / total_T
    if bend.z_loss:
        share_T = share_T * (1 + 2 * bend.z_loss * (top_T + total_T.log()))
    wide_TV.mul_(share_T.unsqueeze(-1))
    wide_TV.scatter_(-1, index_T1, wide_TV.gather(-1, index_T1) - (factor_T * inside_T).unsqueeze(-1))
    if slope_TV is not None:
        wide_TV.mul_(slope_TV)
    if wide_TV is not logits_TV:
        logits_TV.copy_(wide_TV)
    return total_T.log() - wanted_T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        weights_T: Tensor,
        scale: Tensor,
        reduce: Reduce | None,
        rows: int,
        bend: Bend,
    ) -> tuple[Tensor, Tensor]:
        weights_T = weights_T.to(scale.dtype)
        factor_T, dx_TD, losses = weights_T * scale, torch.empty_like(x_TD), []
        dw_VD: Tensor | None = None
        db_V = None if bias_V is None else torch.zeros(bias_V.shape, dtype=scale.dtype, device=bias_V.device)
        for start in range(0, x_TD.shape[0], rows):
            chunk = slice(start, start + rows)
            grad_TV = F.linear(x_TD[chunk], w_VD, bias_V)  # logits, until the next line
            losses.append(loss_in_place(grad_TV, targets_T[chunk], factor_T[chunk], reduce, bend))
            torch.mm(grad_TV, w_VD, out=dx_TD[chunk])
            dw_VD = _add_product(dw_VD, grad_TV, x_TD[chunk], alone=rows >= x_TD.shape[0])
            if db_V is not None:
                db_V += grad_TV.sum(0)
            del grad_TV  # before the next ones are made
        assert dw_VD is not None
        ctx.save_for_backward(dx_TD, dw_VD.to(w_VD.dtype), None if db_V is None else db_V.to(w_VD.dtype))
        return _end(ctx, torch.cat(losses), weights_T, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        _check_root(grad)
        return *ctx.saved_tensors, None, None, None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        weights_T: Tensor,
        scale: Tensor,
        reduce: Reduce | None,
        bend: Bend,
    ) -> tuple[Tensor, Tensor]:
        weights_T = weights_T.to(scale.dtype)
        grad_TV = logits_TV.clone(memory_format=torch.contiguous_format)
        losses_T = loss_in_place(grad_TV, targets_T, weights_T * scale, reduce, bend)
        ctx.save_for_backward(grad_TV)
        return _end(ctx, losses_T, weights_T, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        _check_root(grad)
        return *ctx.saved_tensors, None, None, None, None, None


def _end(ctx: Any, losses_T: Tensor, weights_T: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = (losses_T * weights_T).sum()
    ctx.mark_non_differentiable(total)
    return total * scale, total


def _check_root(grad: Tensor) -> None:
    """Check the root, but only where reading it does not make a device wait."""
    assert grad.device.type != "cpu" or float(grad) == 1.0, "the scaled loss must be the root of the backward"


def _add_product(total: Tensor | None, grad_TV: Tensor, x_TD: Tensor, alone: bool) -> Tensor:
    """Return total + grad' x, accumulated in fp32 if there are several."""
    if alone or x_TD.dtype in (torch.float32, torch.float64):
        product = grad_TV.t() @ x_TD
        return product if total is None else total.add_(product)
    if x_TD.device.type == "cpu":
        product = (grad_TV.t() @ x_TD).float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(grad_TV.t(), x_TD, out_dtype=torch.float32)
    return torch.addmm(total, grad_TV.t(), x_TD, out_dtype=torch.float32, out=total)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    scale: Tensor,
    *,
    start: int = 0,
    reduce: Reduce | None = None,
    rows: int = 1 << 30,
    bend: Bend = STRAIGHT,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss times `scale`, to be differentiated, and the sum. `rows` of logits exist at a time."""
    x_TD, targets_T, weights_T = x.flatten(0, -2), targets.flatten() - start, weights.flatten()
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(x_TD, weight, bias, targets_T, weights_T, scale, reduce, rows, bend)
    weights_T, losses = weights_T.to(scale.dtype), []
    for at in range(0, x_TD.shape[0], rows):
        chunk = slice(at, at + rows)
        logits_TV = F.linear(x_TD[chunk], weight, bias)
        losses.append(loss_in_place(logits_TV, targets_T[chunk], weights_T[chunk], reduce, bend))
    total = (torch.cat(losses) * weights_T).sum()
    return total * scale, total


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    scale: Tensor,
    *,
    start: int = 0,
    reduce: Reduce | None = None,
    bend: Bend = STRAIGHT,
) -> tuple[Tensor, Tensor]:
    """Return the same for given logits."""
    return _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten() - start, weights.flatten(), scale, reduce, bend)
