"""Attention of some queries to some keys, with the log-sum-exp that lets results be merged, and its
backward given the log-sum-exp over all keys. The fused kernel of the device where it takes the case,
else the formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_aten = torch.ops.aten


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a further block's result into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    seen = torch.isfinite(total)  # a query that has met no visible key yet has none
    old, new = ((t - total).exp().where(seen, 0.0).unsqueeze(-1) for t in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(total)


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """(B, H, Q, E) and (B, H, Q). A query that sees none of these keys gets 0 and -inf."""
    k, v = _for_all_heads(q, k), _for_all_heads(q, v)
    if _cpu_kernel(q):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_bias(mask, q))
        return out, lse if mask is None else lse.masked_fill(~mask.any(-1), float("-inf"))
    if _device_kernel(q, k):
        bias = _bias(mask, q, k.shape[2])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
        lse = lse[:, :, : q.shape[2]]
        if mask is None:
            return out, lse
        blind = ~mask.any(-1)
        return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))
    scores = _scores(q, k, mask, causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return p @ v.to(p.dtype), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of this block in the gradients of q, k and v; `out` and `lse` are over all blocks."""
    keys, values = _for_all_heads(q, k), _for_all_heads(q, v)
    if _cpu_kernel(q):
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [t.contiguous() for t in (grad, q, keys, values, out, lse)]
        dq, dk, dv = backward(*parts, 0.0, causal, attn_mask=_bias(mask, q))
    elif _device_kernel(q, keys):
        dq, dk, dv = _device_backward(grad, q, keys, values, out, lse, mask, causal)
    else:
        p = (_scores(q, keys, mask, causal) - lse.unsqueeze(-1)).exp()
        g = grad.to(p.dtype)
        dv = p.mT @ g
        delta = (g * out.to(p.dtype)).sum(-1, keepdim=True)
        ds = p * (g @ values.to(p.dtype).mT - delta) / math.sqrt(q.shape[-1])
        dq, dk = ds @ keys.to(p.dtype), ds.mT @ q.to(p.dtype)
    return dq, _back_to_heads(dk, k), _back_to_heads(dv, v)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _for_all_heads(q: Tensor, k: Tensor) -> Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _back_to_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _bias(mask: Tensor | None, q: Tensor, keys: int = 0) -> Tensor | None:
    """What a kernel adds to the scores."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    return bias.expand(q.shape[0], q.shape[1] if keys else 1, *bias.shape[2:])


def _cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _device_kernel(q: Tensor, k: Tensor) -> bool:
    """The memory-efficient kernel: no fp64, and biases want rows of whole 16 bytes."""
    return q.dtype in (torch.float32, torch.bfloat16) and k.shape[2] % 8 == 0 and q.shape[-1] % 8 == 0


def _device_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if mask is not None:  # with a bias its bf16 version gives wrong gradients of q and k (torch 2.11, H200)
        grad, q, k, v, out = (t.float() for t in (grad, q, k, v, out))
    padding = -q.shape[2] % 32  # as the kernel's own forward would hand it over
    lse = torch.nn.functional.pad(lse.float(), (0, padding), value=float("inf"))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    bias = _bias(mask, q, k.shape[2])
    backward = _aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    dq, dk, dv, _ = backward(grad, q, k, v, bias, out, lse, seed, seed, 0.0, wanted, causal)
    return dq, dk, dv
