"""Attention of some queries to some keys, with the log-sum-exp by which results are merged, and its backward given the
log-sum-exp over all keys. The device's fused kernel is used where it takes the case, the formulas elsewhere. Every
query sees every key, or with `causal` those up to its own place. Documents are a matter of which queries and keys are
brought together (context.py). Windows and softcaps, which the kernels do not know, are a `Bend`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.model.attention import kernel_takes

_aten = torch.ops.aten
Offsets = tuple[Tensor, int]  # where documents begin in the rows laid end to end, and the length of the longest


class Bend(NamedTuple):
    """Limits that the kernels do not know. A query sees only `window` keys, its own the last (0: all), and a `softcap`
    c bends scores s to c tanh(s / c) (0: none). `gap` is the place of the first query minus that of the first key."""

    gap: int
    window: int
    softcap: float


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge another block's result into `out` and `lse`, in place. A log-sum-exp of minus infinity: nothing was
    seen."""
    total = torch.logaddexp(lse, part_lse)
    before, after = (((x - total).exp().masked_fill(x.isneginf(), 0.0)).unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(before).add_(part * after)
    lse.copy_(total)


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, bend: Bend | None = None) -> tuple[Tensor, Tensor]:
    """Return the result (B, H, Q, E) and the log-sum-exp (B, H, Q)."""
    if bend:
        k, v = _for_all_heads(q, k), _for_all_heads(q, v)
        scores, _ = _scores(q, k, causal, bend)
        lse = scores.logsumexp(-1)
        return (scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1)).exp() @ v.to(scores.dtype), lse
    if flash_takes(q):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    k, v = _for_all_heads(q, k), _for_all_heads(q, v)
    if _cpu_kernel(q):
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _device_kernel(q):
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        return out, lse[:, :, : q.shape[2]]
    scores, _ = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bend: Bend | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of q, k and v. `out` and `lse` are over all blocks."""
    if flash_takes(q) and not bend:
        backward, seed = _aten._scaled_dot_product_flash_attention_backward, _no_dropout(q)
        lengths, lse = (q.shape[2], k.shape[2]), lse.contiguous()
        return backward(grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, seed, seed)
    keys, values = _for_all_heads(q, k), _for_all_heads(q, v)
    if _cpu_kernel(q) and not bend:
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [t.contiguous() for t in (grad, q, keys, values, out, lse)]
        dq, dk, dv = backward(*parts, 0.0, causal)
    elif _device_kernel(q) and not bend:
        padding = -q.shape[2] % 32  # as the kernel's own forward pads it
        lse = torch.nn.functional.pad(lse.float(), (0, padding), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        backward = _aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        dq, dk, dv, _ = backward(grad, q, keys, values, None, out, lse, seed, seed, 0.0, wanted, causal)
    else:
        scores, slope = _scores(q, keys, causal, bend)
        p = (scores - lse.unsqueeze(-1)).exp()
        g = grad.to(p.dtype)
        dv = p.mT @ g
        delta = (g * out.to(p.dtype)).sum(-1, keepdim=True)
        ds = p * (g @ values.to(p.dtype).mT - delta) / math.sqrt(q.shape[-1])
        if slope is not None:
            ds *= slope
        dq, dk = ds @ keys.to(p.dtype), ds.mT @ q.to(p.dtype)
    return dq, _back_to_heads(dk, k), _back_to_heads(dv, v)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, causal: bool) -> tuple[Tensor, Tensor]:
    """Do what `attend_block` does, document by document. The case must be one that `flash_takes`."""
    starts, longest = offsets
    forward = _aten._flash_attention_forward
    out, lse, *_ = forward(_flat(q), _flat(k), _flat(v), starts, starts, longest, longest, 0.0, causal, False)
    return _unflat(out, q), lse.unflatten(-1, (q.shape[0], -1)).transpose(0, 1)


def attend_documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Offsets, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    starts, longest = offsets
    parts, flat_lse = [_flat(t) for t in (grad, q, k, v, out)], lse.transpose(0, 1).flatten(1).contiguous()
    backward, seed = _aten._flash_attention_backward, _no_dropout(q)
    grads = backward(*parts, flat_lse, starts, starts, longest, longest, 0.0, causal, seed, seed)
    dq, dk, dv = (_unflat(d, t) for d, t in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def flash_takes(q: Tensor) -> bool:
    """Return whether the flash kernel takes the case. It needs no copies of key/value heads that query heads share."""
    return q.device.type != "cpu" and q.dtype in (torch.bfloat16, torch.float16) and kernel_takes(q.shape[-1])


def _flat(x: Tensor) -> Tensor:
    """Reshape (B, H, L, E) to (B L, H, E)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(flat: Tensor, like: Tensor) -> Tensor:
    return flat.unflatten(0, (like.shape[0], -1)).transpose(1, 2)


def _no_dropout(q: Tensor) -> Tensor:
    """Return a stand-in for the generator state from which flash attention would have drawn."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device)


def _scores(q: Tensor, k: Tensor, causal: bool, bend: Bend | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the scores and, with a softcap, their derivative by the scores before it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores, slope = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1]), None
    gap, window, softcap = bend or Bend(0, 0, 0.0)
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent.square()
    if causal or window:
        places = torch.arange(q.shape[2], device=q.device)[:, None] + gap - torch.arange(k.shape[2], device=q.device)
        hidden = places < 0
        if window:
            hidden |= places >= window
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


def _for_all_heads(q: Tensor, k: Tensor) -> Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _back_to_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape[1] == k.shape[1] else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _device_kernel(q: Tensor) -> bool:
    """Return whether the memory-efficient kernel takes the case: no fp64, and rows of whole 16 bytes."""
    return q.dtype in (torch.float32, torch.bfloat16) and q.shape[-1] % 8 == 0
