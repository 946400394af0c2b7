"""Attention that bends scores s to c tanh(s / c), so that none is larger than c (Gemma 2, arXiv:2408.00118, section 2).
No torch kernel does that. FlexAttention makes one; where it cannot run, the formula is written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def bend(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores / cap) * cap


def dense(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, cap: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Compute the formula with all scores in memory. `mask`: where a query may look; None: everywhere, or back."""
    each = q_BHLE.shape[1] // k_BKLE.shape[1]
    k_BHLE, v_BHLE = (t if each == 1 else t.repeat_interleave(each, dim=1) for t in (k_BKLE, v_BKLE))
    wide = torch.promote_types(q_BHLE.dtype, torch.float32)
    scores = bend((q_BHLE @ k_BHLE.mT).to(wide) / math.sqrt(q_BHLE.shape[-1]), cap)
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1).to(v_BHLE.dtype) @ v_BHLE


def blocks(documents_BL: Tensor | None, length: int, causal: bool, window: int, device: torch.device) -> Any:
    """Build FlexAttention's mask of who sees whom, block by block."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k if causal else q == q
        if window:
            seen = seen & (q - k < window)
        return seen if documents_BL is None else seen & (documents_BL[b, q] == documents_BL[b, k])

    rows = None if documents_BL is None else documents_BL.shape[0]
    return create_block_mask(sees, rows, None, length, length, device=device)


@cache
def _kernel() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, cap: float, blocks: Any) -> Tensor:
    def bent(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return _kernel()(
        q_BHLE, k_BKLE, v_BKLE, score_mod=bent, block_mask=blocks, enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1]
    )
