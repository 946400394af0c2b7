"""The last layer of a model that predicts tokens, as a module of its own so that the loss can replace it. The logits of
a family with `Family.ends_in_head` then never exist as a whole (parallel/loss.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.family import Batch


class Head(nn.Linear):
    """Returns logits, (B, L, V). A `softcap` c bends them to c tanh(x / c), so that they stay below it."""

    def __init__(self, *args: Any, softcap: float = 0.0, **options: Any):
        super().__init__(*args, **options)
        self.softcap = softcap

    def forward(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        logits = super().forward(x_BLD)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
