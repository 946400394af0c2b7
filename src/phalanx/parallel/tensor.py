"""Tensor parallelism with sequence parallelism, on plain tensors. Between blocks a rank holds a slice of the sequence;
a block gathers the sequence, works on a slice of the features, and scatters the sum back. The styles are those of
`phalanx.model.family`.

This is written out rather than built on DTensor: sizes that the degree does not divide (an odd vocabulary, an odd FFN)
are then plain arithmetic, FSDP2 sees ordinary parameters, and no op pays for dispatch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.shape import even_bounds
from phalanx.model.dense import Attention
from phalanx.model.family import Family
from phalanx.model.rms import SplitNorm
from phalanx.parallel.collectives import all_gather, all_reduce, reduce_scatter

SPLIT_DIM = {"column": 0, "head": 0, "vocab": 0, "norm": 0, "row": 1, "input": 1}
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


class _GatherFeatures(torch.autograd.Function):
    """Gathers the ranks' features; each rank's use of them contributes to their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, x.dim() - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, grad.dim() - 1, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group), None


class OpenLinear(nn.Linear):
    """A linear layer whose product can be replaced: by one in fp8, or one that defers the weight's gradient."""

    multiply = staticmethod(F.linear)

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias


class RowLinear(OpenLinear):
    """A Linear whose input features are split. The bias, if any, is added once, after the sum."""

    tp: dist.ProcessGroup

    def scatter(self, out: Tensor) -> Tensor:
        return _Scatter.apply(out, self.tp)

    def forward(self, x: Tensor) -> Tensor:
        out = self.scatter(self.multiply(x, self.weight))
        return out if self.bias is None else out + self.bias


class InputLinear(RowLinear):
    """A RowLinear for raw features, which every rank has whole: it reads [start, start + columns) of them."""

    start: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.narrow(-1, self.start, self.weight.shape[1]))


class SummedNorm(SplitNorm):
    """A norm whose features are split; it sums the squares of all of them."""

    tp: dist.ProcessGroup

    def sum_squares(self, x: Tensor) -> Tensor:
        return _Sum.apply(super().sum_squares(x), self.tp)


class SharedKeys(Attention):
    """Attention with more ranks than key/value heads. A head's projection is split over the ranks that need it, like
    any other. The outputs are gathered, and each rank takes the head that its queries look at."""

    tp: dist.ProcessGroup

    def whole_heads(self, y_BLF: Tensor) -> Tensor:
        rank, width = self.tp.rank(), self.tp.size()
        all_BLF = _GatherFeatures.apply(y_BLF, self.tp)
        head = rank * all_BLF.shape[-1] // (width * self.head_dim)
        return all_BLF.narrow(-1, head * self.head_dim, self.head_dim)


class VocabEmbedding(nn.Embedding):
    """Rows [start, start + rows) of the vocabulary; other ids contribute zeros to the sum."""

    tp: dist.ProcessGroup
    start: int

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        inside = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local * inside, self.weight)
        return _Scatter.apply(rows * inside.unsqueeze(-1), self.tp)


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
        if isinstance(module, Attention) and module.num_kv_heads % tp.size():
            module.__class__, module.tp = SharedKeys, tp


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
    elif style == "norm":
        module.__class__, module.tp = SummedNorm, tp
    elif style in ("vocab", "input"):
        module.__class__ = VocabEmbedding if style == "vocab" else InputLinear
        module.tp, module.start = tp, start
