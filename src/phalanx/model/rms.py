"""RMS norms beyond torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.shape import ModelConfig


class CenteredNorm(nn.RMSNorm):
    """Multiplies by 1 + weight, added in fp32 at least: in bf16 small weights would be lost."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + 1
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).to(x.dtype)


def make_norm(width: int, c: ModelConfig) -> nn.RMSNorm:
    return (CenteredNorm if c.norm_centered else nn.RMSNorm)(width, eps=c.norm_eps)


class SplitNorm(nn.Module):
    """RMS norm over all heads together. A rank that holds some of them replaces `sum_squares`."""

    def __init__(self, width: int, c: ModelConfig):
        super().__init__()
        self.width, self.eps, self.offset = width, c.norm_eps, float(c.norm_centered)
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(self.sum_squares(wide) / self.width + self.eps)
        return (scaled * (self.weight.to(wide.dtype) + self.offset)).to(x.dtype)

    def sum_squares(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True)
