"""Tensor parallelism with sequence and loss parallelism, on plain tensors. Between blocks a rank
holds a slice of the sequence; a block gathers it, works on a slice of the features, and scatters the
sum back. The styles are those of `phalanx.model.family`.

Written out rather than through DTensor: sizes that the degree does not divide (an odd vocabulary, an
odd FFN) are then plain arithmetic, FSDP2 sees ordinary parameters, and no dispatch is paid per op.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.shape import even_bounds
from phalanx.model.family import Family
from phalanx.parallel.collectives import all_gather, all_reduce, reduce_scatter

SPLIT_DIM = {"column": 0, "head": 0, "vocab": 0, "row": 1, "input": 1}
SEQUENCE_DIM = 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, SEQUENCE_DIM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, SEQUENCE_DIM, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, SEQUENCE_DIM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, SEQUENCE_DIM, ctx.group), None


class RowLinear(nn.Linear):
    """Input features split. The bias, if any, is added once, after the sum."""

    tp: dist.ProcessGroup
    multiply = staticmethod(F.linear)  # a pipeline without a bubble puts its own here

    def forward(self, x: Tensor) -> Tensor:
        out = _Scatter.apply(self.multiply(x, self.weight), self.tp)
        return out if self.bias is None else out + self.bias


class InputLinear(RowLinear):
    """The same for raw features, which every rank has whole: it reads [start, start + columns) of them."""

    start: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.narrow(-1, self.start, self.weight.shape[1]))


class VocabEmbedding(nn.Embedding):
    """Rows [start, start + rows) of the vocabulary; other ids contribute zeros to the sum."""

    tp: dist.ProcessGroup
    start: int

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        inside = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local * inside, self.weight)
        return _Scatter.apply(rows * inside.unsqueeze(-1), self.tp)


class _VocabCrossEntropy(torch.autograd.Function):
    """Per-token cross-entropy of logits whose last dim is split over the group: the full row never
    exists on one rank. Three small all-reduces, no gather."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        top = all_reduce(logits.amax(-1), "max", group)
        exp = (logits - top.unsqueeze(-1)).exp()
        local = targets - start
        inside = (local >= 0) & (local < logits.shape[-1])
        index = (local * inside).unsqueeze(-1)
        wanted = (logits.gather(-1, index).squeeze(-1) - top) * inside
        both = all_reduce(torch.stack((exp.sum(-1), wanted)), "sum", group)
        ctx.save_for_backward(exp.div_(both[0].unsqueeze(-1)), index, inside)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, inside = ctx.saved_tensors
        out = softmax.scatter_add(-1, index, -inside.unsqueeze(-1).to(softmax.dtype))
        return out.mul_(grad.unsqueeze(-1)), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None, vocab_size: int) -> Tensor:
    """Per-token loss in fp32 (fp64 stays), from whole or vocabulary-split logits."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if group is None or group.size() == 1:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
    start, _ = even_bounds(vocab_size, group.size(), group.rank())
    return _VocabCrossEntropy.apply(logits, targets, start, group)


def apply_tensor_parallel(model: nn.Module, family: Family, tp: dist.ProcessGroup) -> None:
    """Cut the parameters of `model` (on the meta device) and swap in the modules that communicate."""
    if tp.size() == 1:
        return
    cut: dict[int, nn.Parameter] = {}  # by identity, so that tied weights stay tied
    for name, module in list(model.named_modules()):
        style = family.style_of(name)
        if style in ("gather", "head"):
            module.register_forward_pre_hook(lambda _, args: (_Gather.apply(args[0], tp), *args[1:]))
        if style in SPLIT_DIM:
            _split_module(module, style, tp, cut)


def _split_module(module: nn.Module, style: str, tp: dist.ProcessGroup, cut: dict[int, nn.Parameter]) -> None:
    size = module.weight.shape[SPLIT_DIM[style]]
    if size < tp.size():
        raise UserError(
            f"a layer of the style {style!r} has only {size} features to split",
            field="layout.tp",
            value=tp.size(),
            remedy="lower layout.tp, or make the layer wider",
        )
    start, stop = even_bounds(size, tp.size(), tp.rank())
    for key, param in list(module.named_parameters(recurse=False)):
        if style in ("row", "input") and key == "bias":
            continue
        if id(param) not in cut:
            part = param.narrow(SPLIT_DIM[style], start, stop - start)
            cut[id(param)] = nn.Parameter(torch.empty_like(part, memory_format=torch.contiguous_format))
            cut[id(cut[id(param)])] = cut[id(param)]
        setattr(module, key, cut[id(param)])
    if style == "row":
        module.__class__ = RowLinear
        module.tp = tp
    elif style in ("vocab", "input"):
        module.__class__ = VocabEmbedding if style == "vocab" else InputLinear
        module.tp, module.start = tp, start
