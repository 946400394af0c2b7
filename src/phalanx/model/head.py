"""The last layer of a model that predicts tokens, as a module of its own so that the loss can take its place: the
logits of a family that says so (`Family.ends_in_head`) never exist as a whole (parallel/loss.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.model.family import Batch


class Head(nn.Linear):
    """By itself it gives logits, (B, L, V). `softcap`: they are bent to stay below it, c tanh(x / c)."""

    def __init__(self, *args: Any, softcap: float = 0.0, **options: Any):
        super().__init__(*args, **options)
        self.softcap = softcap

    def forward(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        logits = super().forward(x_BLD)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits
