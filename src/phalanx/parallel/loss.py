"""Replace a model's head by its loss. The linear layer and the cross-entropy run as one, chunk by chunk, and
tensor-parallel ranks may split the vocabulary. The head returns the loss scaled for the step and the summed loss. The
backward of the first finds its gradients ready (kernels/cross_entropy.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.shape import ModelConfig, even_bounds, loss_rows
from phalanx.kernels.cross_entropy import Bend, cross_entropy, linear_cross_entropy
from phalanx.model.family import Batch
from phalanx.model.head import Head
from phalanx.parallel.collectives import all_reduce

Loss = tuple[Tensor, Tensor]  # scaled for the step, and summed over the target tokens


class LossHead(Head):
    tp: dist.ProcessGroup
    vocab_size: int
    z_loss: float

    def forward(self, x_BLD: Tensor, batch: Batch) -> Loss:
        rows = loss_rows(self.vocab_size, self.tp.size(), x_BLD.element_size())
        split, bend = _split(self.tp, self.vocab_size), Bend(self.softcap, self.z_loss)
        return linear_cross_entropy(x_BLD, self.weight, self.bias, *_wanted(batch), rows=rows, bend=bend, **split)


def apply_loss(model: nn.Module, tp: dist.ProcessGroup, config: ModelConfig) -> None:
    """Make the model's head return the loss instead of logits."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    if len(heads) != 1:
        raise UserError(
            f"Family.ends_in_head is true, but the model has {len(heads)} phalanx.Head modules",
            field="model.family",
            value=config.family,
            remedy="let the model end in one, called with its input and the batch, or leave ends_in_head out",
        )
    for module in heads:
        module.__class__ = LossHead
        module.tp, module.vocab_size, module.z_loss = tp, config.vocab_size, config.z_loss


def loss_of_logits(logits: Tensor, batch: Batch, tp: dist.ProcessGroup, config: ModelConfig) -> Loss:
    """Return the loss of a model that returns logits (`Family.ends_in_head` is false)."""
    return cross_entropy(logits, *_wanted(batch), bend=Bend(z_loss=config.z_loss), **_split(tp, config.vocab_size))


def _wanted(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.ones((), device=batch.weights_BL.device) if batch.scale is None else batch.scale
    return batch.targets_BL, batch.weights_BL, scale


def _split(tp: dist.ProcessGroup, vocab_size: int) -> dict[str, Any]:
    if tp.size() == 1:
        return {}
    return {"start": even_bounds(vocab_size, tp.size(), tp.rank())[0], "reduce": partial(all_reduce, group=tp)}
