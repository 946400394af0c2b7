"""The last layer of a model that predicts tokens, as a module of its own so that the loss can take its place: the
logits of a family that says so (`Family.ends_in_head`) never exist as a whole (parallel/loss.py)."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.model.family import Batch


class Head(nn.Linear):
    """By itself it gives logits, (B, L, V)."""

    def forward(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        return super().forward(x_BLD)
