"""Time on the chip: products by shape, attention and memory-bound work, for one micro-batch through all layers of a
model, forward and backward. It depends on few choices, so layers.py calls it only for their distinct combinations.
Formulas: docs/planner.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.cost.candidates import FP32, Candidates
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.sizes import ModelShape, Num

TILE_M, TILE_N = 128, 256  # rows and columns of a product's tile (cuBLAS on Hopper)
BACKWARD = 2.5  # products of attention, backward over forward: backward computes the scores again
KERNELS, EAGER_KERNELS = 8.0, 20.0  # elementwise kernels of a layer, forward
CLAMPED = 3.0  # passes of biased, clamped experts, relative to plain ones


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one micro-batch on one rank, all layers together. The head (logits and loss) is separate because only
    one stage has it. `d` computes the input's gradient, `w` the weights'."""

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
    """Speeds of a machine under a profile, for columns of candidates."""

    def __init__(self, machine: Machine, profile: Profile, precision: Num):
        bf16 = np.zeros_like(precision)
        peak, wide = machine.of_precision(machine.peak, precision), machine.of_precision(machine.peak, bf16)
        wide = np.minimum(peak, wide)  # unquantised work runs in bf16, or in fp32 when everything does
        self.profile = profile
        self.matmul = peak * machine.of_precision(profile.gemm, precision)
        self.bf16 = wide * machine.of_precision(profile.gemm, bf16)
        self.attention_f, self.attention_b = wide * profile.attention_fwd, wide * profile.attention_bwd
        self.memory = machine.memory_bytes_per_s * profile.memory
        self.sms = machine.sms
        self.casts = machine.of_precision(profile.casts, precision)
        low = (precision >= 1) & (precision <= 3)  # quantised operands
        self.item_bytes = np.where(precision == FP32, 4.0, 2.0)  # of what is never quantised
        self.operand_bytes = np.where(low, np.where(precision == 3, 0.5, 1.0), self.item_bytes)

    def gemm_s(self, m: Num, n: Num, inner: Num, groups: Num = 1.0, low: bool = True, out_bytes: Num = 0.0) -> Num:
        """Return the seconds of `groups` products of (m x inner) by (inner x n). Tiles are dealt to the SMs in waves,
        and the last wave is not full. A tile pays a prologue worth k_half of inner width; operands and result cross
        memory once."""
        p = self.profile
        tiles = np.ceil(m / TILE_M) * np.ceil(n / TILE_N) * groups
        waves = tiles / self.sms
        idle = 1 + p.quantised * (np.ceil(waves) / waves - 1)
        # Tiles over an edge waste only part of their work, as the last wave does: other kernels have smaller tiles.
        padded = tiles * (TILE_M * TILE_N)
        exact = groups * m * n
        flops = 2 * ((1 - p.quantised) * exact + p.quantised * padded) * (inner + p.k_half)
        width = self.operand_bytes if low else self.item_bytes
        size = groups * ((m * inner + n * inner) * width + np.maximum(out_bytes, self.item_bytes) * m * n)
        rate = self.matmul if low else self.bf16
        return np.maximum(flops * idle / rate, size / self.memory) + p.kernel_s

    def stream_s(self, size_bytes: Num, kernels: Num) -> Num:
        return size_bytes / self.memory + kernels * self.profile.kernel_s


def work(shape: ModelShape, machine: Machine, profile: Profile, c: Candidates) -> Work:
    chip = Chip(machine, profile, c.precision)
    tokens = c.micro_batch * shape.seq / c.cp
    forward, d, w = _products(shape, chip, profile, c, tokens)
    attention_f, attention_b = _attention(shape, chip, profile, c, tokens)
    elementwise_f, elementwise_b = _elementwise(shape, chip, profile, c, tokens)
    head_f, head_b = _head(shape, chip, profile, c, tokens)
    out = (forward, d, w, attention_f, attention_b, elementwise_f, elementwise_b, head_f, head_b)
    return Work(*(np.broadcast_to(x, np.shape(tokens)) for x in out))


def _products(shape: ModelShape, chip: Chip, profile: Profile, c: Candidates, tokens: Num) -> tuple[Num, Num, Num]:
    """Return the seconds of products with weights: forward, input gradient, weight gradient. The table lists (count, n,
    inner) of forward. The input's gradient swaps n and inner; the weights' gradient has the tokens as inner width, and
    reads and writes fp32 where the product accumulates it."""
    h, t, gates = shape.hidden, c.tp, shape.matrices - 1
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
    summed = np.where(np.asarray(profile.software.accumulates, bool), 8.0, 0.0)
    forward: Num = 0.0
    d: Num = 0.0
    w: Num = 0.0
    for count, n, inner in products:
        present = np.asarray(count * n * inner) > 0
        if not present.any():
            continue
        n, inner = np.maximum(n, 1), np.maximum(inner, 1)
        forward = forward + present * count * chip.gemm_s(tokens, n, inner)
        d = d + present * count * chip.gemm_s(tokens, inner, n)
        w = w + present * count * chip.gemm_s(n, inner, tokens, out_bytes=summed)
    routed = np.asarray(shape.experts) > 0
    if not routed.any():
        return forward, d, w
    # Routed experts: every rank keeps its number of tokens, dealt to experts / ep groups. With sequence parallelism
    # a rank routes only its own tokens.
    groups = np.maximum(shape.experts / c.ep, 1)
    rows = np.maximum(shape.imbalance * tokens / t * shape.top_k * c.etp / groups, 1)
    width, inner = np.maximum(shape.expert_ffn / c.etp, 1), np.maximum(shape.expert_width, 1)
    times = routed * shape.moe_layers / np.where(groups > 1, profile.grouped, 1.0)
    for n, i in ((gates * width, inner), (inner, width)):
        forward = forward + times * chip.gemm_s(rows, n, i, groups)
        d = d + times * chip.gemm_s(rows, i, n, groups)
        w = w + times * chip.gemm_s(n, i, rows, groups, out_bytes=summed)
    return forward, d, w


def _attention(shape: ModelShape, chip: Chip, profile: Profile, c: Candidates, tokens: Num) -> tuple[Num, Num]:
    """Return the seconds of attention and of scans, forward and backward. Causal attention computes half of the scores.
    A ring works on short pieces of a sequence and merges one part per hop."""
    seen = shape.keys * np.where(shape.causal, 0.5, 1.0)
    scores = 2 * tokens * seen * (shape.q_width + shape.v_width) / c.tp
    piece = shape.context / np.where(c.cp > 1, 2 * c.cp, 1)
    speed = piece / (piece + profile.length_half) * shape.head_dim / (shape.head_dim + profile.width_half)
    merged = (
        np.where(c.cp > 1, c.cp, 0)
        * tokens
        * shape.attention_layers
        * shape.v_width
        / c.tp
        * profile.software.merge_bytes
    )
    scan = tokens * shape.mamba_layers * shape.mamba_inner / c.tp * profile.scan_bytes
    forward = scores / (chip.attention_f * speed) + (merged + scan) / chip.memory
    backward = BACKWARD * scores / (chip.attention_b * speed) + (merged + 2 * scan) / chip.memory
    return forward, backward


def _elementwise(shape: ModelShape, chip: Chip, profile: Profile, c: Candidates, tokens: Num) -> tuple[Num, Num]:
    """Return the seconds of memory-bound work, forward and backward, counted in bytes per token. Norm and residual:
    2 x (read x and the branch, write the sum and the norm)."""
    h, t, gates, soft, item = shape.hidden, c.tp, shape.matrices - 1, profile.software, c.item_bytes
    split = np.where(soft.sequence_parallel, t, 1)  # what norms and residuals are split over
    active = profile.expert_passes * np.where(shape.biased, CLAMPED, 1.0)
    streams = 2 * 4 * h / split * shape.layers
    streams = streams + shape.attention_layers * (2 * (shape.q_width + shape.kv_heads * shape.head_dim)) / t
    streams = streams + shape.dense_layers * (gates + 1) * shape.ffn / t
    streams = (
        streams + shape.moe_layers * (gates + 1) * (shape.shared_ffn + active * shape.top_k * shape.expert_ffn) / t
    )
    streams = item * (streams + shape.mamba_layers * 6 * shape.mamba_inner / t)
    permuted = item * profile.permute_passes * shape.moe_layers * shape.top_k * 4 * shape.expert_width / t
    # Scores in memory are written, then pass softmax and dropout: fp16 and fp32 passes over s x s per head.
    stored = np.asarray(soft.attention) == "scores"
    scores = np.where(stored, shape.attention_layers * 2 * 8 * shape.heads / t * shape.seq, 0.0)
    # Quantising reads 2 bytes and writes 1 (twice: rows and columns) of every operand: activations and gradients.
    dense = shape.attention_layers * (2 * h / split + shape.v_width / t) + shape.dense_layers * (
        h / split + shape.ffn / t
    )
    experts = (shape.top_k + (np.asarray(shape.shared_ffn) > 0)) * (shape.expert_width + shape.expert_ffn) / t
    casts = chip.casts * 4 * (dense + profile.expert_casts * shape.moe_layers * experts)
    kernels = np.where(soft.fused, KERNELS, EAGER_KERNELS) * shape.layers
    forward = chip.stream_s(tokens * (streams * profile.passes + permuted + scores + casts), kernels)
    backward = chip.stream_s(tokens * (2 * (streams * profile.passes + scores + casts) + permuted), 2 * kernels)
    return forward, backward


def _head(shape: ModelShape, chip: Chip, profile: Profile, c: Candidates, tokens: Num) -> tuple[Num, Num]:
    """Return the seconds of logits and loss, forward and backward. Logits are as wide as activations; the loss is in
    fp32 (write, read, exp, gradient: about 16 bytes per bf16 logit when fused)."""
    vocab, h, predictions = shape.vocab / c.tp, shape.hidden, 1 + shape.mtp
    loss = chip.stream_s(tokens * (4 + 2 * c.item_bytes) * vocab * profile.loss_passes, 4)
    forward = chip.gemm_s(tokens, vocab, h, low=False) + loss
    backward = chip.gemm_s(tokens, h, vocab, low=False) + chip.gemm_s(vocab, h, tokens, low=False) + loss
    return predictions * forward, predictions * backward
