"""The attention itself, as a module of its own so that context parallelism can take its place: a
family that attends through `Attend` gets the cp axis, one that calls torch directly does not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.family import Batch


def visible(
    positions_Q: Tensor, positions_K: Tensor, documents_BQ: Tensor | None, documents_BK: Tensor | None, causal: bool
) -> Tensor | None:
    """(B or 1, 1, Q, K): true where a query may look, that is back, and inside its own document.
    None: everywhere."""
    mask: Tensor | None = None
    if documents_BQ is not None and documents_BK is not None:
        mask = documents_BQ[:, None, :, None] == documents_BK[:, None, None, :]
    if causal:
        back = (positions_Q[:, None] >= positions_K[None, :])[None, None]
        mask = back if mask is None else mask & back
    return mask


class Attend(nn.Module):
    """softmax(q k') v. Fewer key/value heads than query heads: each serves a run of them."""

    def __init__(self, causal: bool = True):
        super().__init__()
        self.causal = causal

    def forward(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        mask = self._mask(batch)
        return F.scaled_dot_product_attention(
            q_BHLE,
            k_BKLE,
            v_BKLE,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1],
        )

    def prepare(self, batch: Batch) -> None:
        """What is the same for all layers, made once per micro-batch; before the first layer, since a
        compiled block must not write to the batch."""
        self._mask(batch)

    def _mask(self, batch: Batch) -> Tensor | None:
        if batch.documents_BL is None:
            return None
        key = ("mask", self.causal)
        if key not in batch.cache:
            at = torch.arange(batch.documents_BL.shape[1], device=batch.documents_BL.device)
            batch.cache[key] = visible(at, at, batch.documents_BL, batch.documents_BL, self.causal)
        return batch.cache[key]
