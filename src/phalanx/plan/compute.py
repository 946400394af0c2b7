"""Time on the chip: matrix products by shape, attention, memory-bound work, for one micro-batch through all layers of a
model, forward and backward. It depends on few distinct (tp, cp, ep, etp, micro-batch, precision): layers.py calls it
on those alone. Formulas: docs/planner.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.machine import Machine
from phalanx.plan.model import ModelShape, Num
from phalanx.plan.profiles import Constants, Profile


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch on one rank, all layers of the model together; the head (logits and loss) apart,
    since one pipeline stage has it alone. `d` computes the input's gradient, `w` the weights'."""

    matmul_f: Num
    matmul_d: Num
    matmul_w: Num
    attention_f: Num
    attention_b: Num
    elementwise_f: Num
    elementwise_b: Num
    head_f: Num
    head_b: Num


class Chip:
    """The speeds of a machine under a profile, for columns of candidates."""

    def __init__(self, machine: Machine, profile: Profile, precision: Num, k: Constants):
        self.k = k
        bf16 = np.zeros_like(precision)
        share = np.array([1.0, k.fp8, k.mxfp8, k.nvfp4, 1.0])[precision]
        self.matmul = machine.of_precision(machine.ceiling, precision) * profile.matmul * share
        # What is never quantised: in bf16, or in fp32 when all is.
        wide = np.minimum(machine.of_precision(machine.ceiling, bf16), machine.of_precision(machine.ceiling, precision))
        self.bf16 = wide * profile.matmul
        self.attention = wide * profile.other * profile.attention
        self.memory = machine.memory_bytes_per_s * k.memory * profile.other
        self.sms = machine.sms
        self.casts = np.array([0.0, k.fp8_cast, k.mx_cast, k.mx_cast, 0.0])[precision]
        self.low = (precision == 1) | (precision == 2) | (precision == 3)  # quantised operands
        self.operand_bytes = np.where(self.low, np.where(precision == 3, 0.5, 1.0), 2.0)

    def gemm_s(self, m: Num, n: Num, inner: Num, groups: Num = 1.0, low: bool = True) -> Num:
        """`groups` products of (m x inner) by (inner x n). Tiles are dealt to the SMs in waves, the last of
        them not full; a tile pays a prologue worth k_half of inner width; operands and result cross HBM once."""
        k = self.k
        tiles = np.ceil(m / k.tile_m) * np.ceil(n / k.tile_n) * groups
        waves = tiles / self.sms
        idle = 1 + k.quantised * (np.ceil(waves) / waves - 1)
        flops = 2 * tiles * k.tile_m * k.tile_n * (inner + k.k_half)
        # Of tiles that hang over an edge, as of the last wave, a part is wasted: other kernels have smaller tiles.
        exact = 2 * groups * m * n * (inner + k.k_half)
        rate = self.matmul if low else self.bf16
        width = self.operand_bytes if low else 2.0
        size = groups * ((m * inner + n * inner) * width + 2 * m * n)
        busy = (1 - k.quantised) * exact + k.quantised * flops
        return np.maximum(busy * idle / rate, size / self.memory) + k.kernel_s

    def stream_s(self, size_bytes: Num, kernels: float) -> Num:
        return size_bytes / self.memory + kernels * self.k.kernel_s


def work(
    shape: ModelShape, machine: Machine, profile: Profile, k: Constants,
    tp: Num, cp: Num, ep: Num, etp: Num, micro_batch: Num, precision: Num,
) -> Work:  # fmt: skip
    chip = Chip(machine, profile, precision, k)
    tokens = micro_batch * shape.seq / cp
    h, t = shape.hidden, tp
    split = np.where(profile.sequence_parallel, t, 1)  # what norms and residuals are split over
    gates = shape.matrices - 1

    # Products with weights: (count, n, inner) forward; the input's gradient swaps n and inner, the weights' has the
    # tokens as inner width.
    latent = np.asarray(shape.kv_lora) > 0
    q_in = np.where(np.asarray(shape.q_lora) > 0, shape.q_lora, h)
    heads = np.where(latent, shape.q_width, shape.head_dim * (shape.heads + 2 * shape.kv_heads))
    products = [
        (shape.attention_layers, heads / t, np.where(latent, q_in, h)),
        (shape.attention_layers * latent, shape.q_lora + shape.kv_lora + shape.rope_dim + 0.0 * t, h),
        (shape.attention_layers * latent, (shape.heads * shape.head_dim + shape.v_width) / t, shape.kv_lora),
        (shape.attention_layers, h, shape.v_width / t),
        (shape.dense_layers, gates * shape.ffn / t, h),
        (shape.dense_layers, h, shape.ffn / t),
        (shape.moe_layers, gates * shape.shared_ffn / t, h),
        (shape.moe_layers, h, shape.shared_ffn / t),
        (shape.mamba_layers, (2 * shape.mamba_inner + 16 * shape.mamba_state) / t, h),
        (shape.mamba_layers, h, shape.mamba_inner / t),
        (2 * shape.moe_layers * (np.asarray(shape.latent) > 0), shape.latent, h),
    ]  # fmt: skip
    forward = d = w = 0.0
    for count, n, inner in products:
        present = np.asarray(count * n * inner) > 0
        if not present.any():
            continue
        n, inner = np.maximum(n, 1), np.maximum(inner, 1)
        forward = forward + present * count * chip.gemm_s(tokens, n, inner)
        d = d + present * count * chip.gemm_s(tokens, inner, n)
        w = w + present * count * chip.gemm_s(n, inner, tokens)

    # Routed experts: as many tokens as before on every rank, dealt to experts / ep groups.
    routed = np.asarray(shape.experts) > 0
    if routed.any():
        groups = np.maximum(shape.experts / ep, 1)
        # With sequence parallelism a rank routes its own tokens.
        rows = np.maximum(shape.imbalance * tokens / t * shape.top_k * etp / groups, 1)
        width, inner = np.maximum(shape.expert_ffn / etp, 1), np.maximum(shape.expert_width, 1)
        for count, n, i in ((shape.moe_layers, gates * width, inner), (shape.moe_layers, inner, width)):
            forward = forward + routed * count * chip.gemm_s(rows, n, i, groups) / k.grouped
            d = d + routed * count * chip.gemm_s(rows, i, n, groups) / k.grouped
            w = w + routed * count * chip.gemm_s(n, i, rows, groups) / k.grouped

    # Attention: half of the scores when causal; backward computes them again: 2.5 times the forward products.
    seen = shape.context * np.where(shape.causal, 0.5, 1.0)
    scores = 2 * tokens * seen * (shape.q_width + shape.v_width) / t * shape.attention_layers
    attention_f = scores / (chip.attention * k.attention_fwd)
    attention_b = 2.5 * scores / (chip.attention * k.attention_bwd)
    scan = 2 * tokens * shape.mamba_layers * shape.mamba_inner * (2 * shape.mamba_state + 256) / t
    attention_f = attention_f + scan / (chip.attention * k.scan)
    attention_b = attention_b + 2.5 * scan / (chip.attention * k.scan)

    # Memory-bound: bytes per token. Norm and residual: 2 x (read x and the branch, write both sums and norms).
    streams = 2 * 4 * 2 * h / split * shape.layers
    streams = streams + shape.attention_layers * (2 * 2 * (shape.q_width + shape.kv_heads * shape.head_dim)) / t
    streams = streams + shape.dense_layers * 2 * (gates + 1) * shape.ffn / t
    streams = streams + shape.moe_layers * 2 * (gates + 1) * (shape.shared_ffn / t + shape.top_k * shape.expert_ffn / t)
    streams = streams + shape.mamba_layers * 2 * 6 * shape.mamba_inner / t
    # Dispatch and combine write and read each routed token; slower than a stream.
    permuted = shape.moe_layers * shape.top_k * 2 * 4 * shape.expert_width / t * (k.memory / k.permute)
    kernels = np.where(profile.fused, 8.0, 20.0) * shape.layers
    eager = np.where(profile.fused, 1.0, 1.8)
    # Scores in memory: written, softmax, dropout: fp16 and fp32 passes over s x s per head.
    unfused = np.where(profile.flash, 0.0, shape.attention_layers * 2 * 8 * shape.heads / t * shape.seq)
    # Quantising: read 2 bytes, write 1 (twice: rows and columns), of every operand: activations in, gradients back.
    operands = (
        shape.attention_layers * (2 * h / split + shape.v_width / t)
        + shape.dense_layers * (h / split + shape.ffn / t)
        + shape.moe_layers
        * (shape.top_k + (np.asarray(shape.shared_ffn) > 0))
        * (shape.expert_width + shape.expert_ffn)
        / t
    )
    casts = chip.casts * 4 * operands
    elementwise_f = chip.stream_s(tokens * (streams * eager + permuted + unfused + casts), kernels)
    elementwise_b = chip.stream_s(tokens * (2 * streams * eager + permuted + 2 * unfused + 2 * casts), 2 * kernels)

    # Head: logits in bf16, loss in fp32 (write, read, exp, gradient: about 16 bytes a logit).
    vocab = shape.vocab / t
    predictions = 1 + shape.mtp
    loss = chip.stream_s(tokens * 8 * vocab, 4)
    head_f = predictions * (chip.gemm_s(tokens, vocab, h, low=False) + loss)
    head_b = predictions * (chip.gemm_s(tokens, h, vocab, low=False) + chip.gemm_s(vocab, h, tokens, low=False) + loss)
    out = (forward, d, w, attention_f, attention_b, elementwise_f, elementwise_b, head_f, head_b)
    return Work(*(np.broadcast_to(x, np.shape(tokens)) for x in out))
