"""Attention as a module of its own, so that context parallelism can replace it: a family that attends through `Attend`
gets the cp axis, one that calls torch directly does not.

Documents that are packed into one row do not see each other, and a query may see only the keys in a window behind it.
On accelerators a kernel gets the offsets of documents (`packed`) and the width of the window; elsewhere a mask says for
every query and key whether it may look. No kernel bends scores by a softcap: FlexAttention makes one on accelerators;
elsewhere the formula is written out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from phalanx.model import softcap
from phalanx.model.family import Batch

_aten = torch.ops.aten
# torch 2.11 takes fewer key/value heads without a flag; from 2.12 on it needs one.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
CUDNN_WIDTH = 128  # the widest head
FEWEST_DOCUMENTS = 16  # room in the offsets, at first


def document_offsets(documents_BL: Tensor) -> Tensor:
    """Return where each run of equal numbers begins in the rows laid end to end, and the end."""
    opens_BL = torch.ones_like(documents_BL, dtype=torch.bool)
    opens_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    starts = opens_BL.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([documents_BL.numel()]))).to(torch.int32)


def kernel_takes(head_dim: int, widest: int = 256) -> bool:
    """Return whether torch's flash attention has a kernel for heads of this width."""
    return head_dim % 8 == 0 and head_dim <= widest


class _TwoKernels(torch.autograd.Function):
    """cuDNN's forward with flash attention's backward, because cuDNN's backward adds in any order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        lse, seed = lse.view(q.shape[:3]), torch.zeros(2, dtype=torch.uint64, device=q.device)  # for a dropout of 0
        backward, length = _aten._scaled_dot_product_flash_attention_backward, q.shape[2]
        return *backward(grad, q, k, v, out, lse, None, None, length, length, 0.0, ctx.causal, seed, seed), None


class Attend(nn.Module):
    """softmax(q k') v. If there are fewer key/value heads than query heads, each serves a run of them. `window` is the
    number of keys that a query sees, its own the last; 0: all. `softcap` turns scores s into c tanh(s / c); 0: none."""

    packed = False  # whether the kernel for packed documents can be used: an accelerator, bf16
    two_kernels = False  # whether to take the fastest forward and backward that give the same bits twice
    flexible = False  # whether FlexAttention can be used

    def __init__(self, causal: bool = True, window: int = 0, softcap: float = 0.0):
        super().__init__()
        assert causal or not window, "a window looks back"
        self.causal, self.window, self.softcap = causal, window, softcap
        self.room = FEWEST_DOCUMENTS

    @property
    def kind(self) -> tuple[bool, int, float]:
        """Return the key under which modules share what `prepare` makes."""
        return self.causal, self.window, self.softcap

    def forward(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        length, width = q_BHLE.shape[2:]
        if self.softcap and self.flexible:
            return softcap.flex(q_BHLE, k_BKLE, v_BKLE, self.softcap, batch.cache[("blocks", *self.kind)])
        if self.softcap:
            return softcap.dense(q_BHLE, k_BKLE, v_BKLE, self.softcap, self._mask(batch, length), self.causal)
        if self.packed and kernel_takes(width) and (batch.documents_BL is not None or self._hides(length)):
            return self._attend_packed(q_BHLE, k_BKLE, v_BKLE, batch)
        mask = self._mask(batch, length)
        if self.two_kernels and mask is None and kernel_takes(width, CUDNN_WIDTH):
            return _TwoKernels.apply(q_BHLE, k_BKLE, v_BKLE, self.causal)
        return F.scaled_dot_product_attention(
            q_BHLE,
            k_BKLE,
            v_BKLE,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1],
        )

    def prepare(self, batch: Batch, documents_BL: Tensor | None, put: Callable[[Tensor], Tensor]) -> None:
        """Make what all layers share, once per micro-batch and before the first layer, because a compiled block must
        not write to the batch. `documents_BL` are the batch's, on the host; `put` brings a tensor to the device."""
        length = self.whole_length(batch.positions().shape[0])
        if self.softcap and self.flexible:
            key = ("blocks", *self.kind)
            if key not in batch.cache:
                window = self.window if self._hides(length) else 0
                where = batch.weights_BL.device
                batch.cache[key] = softcap.blocks(batch.documents_BL, length, self.causal, window, where)
        elif not self.packed or self.softcap:
            self._mask(batch, length)
        elif documents_BL is not None and "offsets" not in batch.cache:
            offsets_N = document_offsets(documents_BL)
            while offsets_N.numel() > self.room + 1:  # doubled, so that a compiled block sees few lengths
                self.room *= 2
            empty = (0, self.room + 1 - offsets_N.numel())  # documents without a token, at the end
            batch.cache["offsets"] = put(F.pad(offsets_N, empty, value=documents_BL.numel()))

    def whole_length(self, length: int) -> int:
        """Return the length of a whole sequence, given that of this rank's part."""
        return length

    def _hides(self, length: int) -> bool:
        """Return whether the window hides any part of a sequence."""
        return 0 < self.window < length

    def _attend_packed(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        length = q_BHLE.shape[2]
        q_THE, k_TKE, v_TKE = [t.transpose(1, 2).flatten(0, 1) for t in (q_BHLE, k_BKLE, v_BKLE)]
        if batch.documents_BL is not None:
            offsets_N = batch.cache["offsets"]
        else:  # every row is one document
            end = q_THE.shape[0]
            offsets_N = torch.arange(0, end + length, length, dtype=torch.int32, device=q_THE.device)
        back = self.window - 1 if self._hides(length) else -1
        window = (back, 0) if self.causal else (-1, -1)
        out_THE = varlen_attn(q_THE, k_TKE, v_TKE, offsets_N, offsets_N, length, length, window_size=window, **GROUPED)
        return out_THE.unflatten(0, (-1, length)).transpose(1, 2)

    def _mask(self, batch: Batch, length: int) -> Tensor | None:
        """Return a mask (B or 1, 1, L, L), true where a query may look: inside its own document, within its window and,
        if causal, not ahead. None: the kernels need no mask, because at most the causal limit applies."""
        documents_BL, hides = batch.documents_BL, self._hides(length)
        if documents_BL is None and not hides:
            return None
        key = ("mask", self.causal, self.window if hides else 0)
        if key not in batch.cache:
            if documents_BL is not None:
                mask = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
            else:
                mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=batch.weights_BL.device)
            mask = mask.tril() if self.causal else mask
            batch.cache[key] = mask.triu(1 - self.window) if hides else mask
        return batch.cache[key]
