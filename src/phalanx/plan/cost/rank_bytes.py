"""Bytes on the fullest rank, by term: activations by recompute mode, state by ZeRO stage, micro-batches in flight by
schedule, logits, gathered weights, communication buffers and the allocator. Formulas and sources: docs/planner.md."""

from __future__ import annotations

import numpy as np

from phalanx.core.shape import LOSS_BYTES
from phalanx.plan.cost.bubbles import DUALPIPE, F1B, in_flight
from phalanx.plan.cost.candidates import FP32, Candidates
from phalanx.plan.cost.sizes import ModelShape, Num
from phalanx.plan.cost.software import Software

CONTEXT_BYTES = 0.75e9  # CUDA context and libraries
RECOMPUTED = 1.96  # of a layer's activations, while its backward runs (one H200)
NCCL_BYTES, NCCL_BYTES_PER_PEER = 0.5e9, 0.15e6  # about 10 GB in groups of 65,536 ranks (arXiv:2510.20171)

TERMS = {
    "weights": "2 B (fp32: 4; quantised: eight_bytes) x parameters; over shard x cp with zero 3; twice in dualpipe",
    "gradients": "grad_bytes x parameters of the rank; over shard x cp from zero 2 on; of one micro-batch on a rank "
    "alone one_pass_bytes, less the activations and logits whose room they take",
    "kept": "own gradients beside their sum over replicas, until the commit: grad_bytes x parameters; over shard x cp",
    "optimizer": "12 B (fp32 master and two moments; 10 with remainders, 8 in fp32; 4 less with moments in bf16) x "
    "parameters of the rank; over shard x cp from zero 1 on",
    "activations": "bytes per token and layer by recompute mode (fp32: twice those) x tokens x layers of the rank x "
    "batches in flight",
    "logits": "logit_bytes x tokens (fused_loss: of a chunk) x vocabulary / tp on the last stage, with a fused loss "
    "the gradients of head (several chunks: in fp32) and input besides, less the activations it holds fewer of",
    "gathered": "zero 3: two layers' weights and one layer's gradients whole, 2 B each (fp32: 4)",
    "buffers": "communication: 0.5 GB + 0.15 MB per rank of the groups it is in",
    "context": "device context and libraries: 0.75 GB",
    "allocator": "what the software reserves over what it allocates (SimuMax v1.2, 43 runs on B200: 2.8 to 9.3 %)",
}


def activation_bytes(shape: ModelShape, tp: Num, recompute: Num, soft: Software, low: Num) -> Num:
    """Return the bytes per token of all layers together, on one rank of a tp group (cp divides the tokens). With flash
    attention (no dropout): the inputs of norms, projections and products. With scores in memory: arXiv:2205.05198,
    table 2."""
    h, t = shape.hidden, tp
    split = np.where(soft.sequence_parallel, t, 1)
    flash = np.asarray(soft.attention) != "scores"
    wide = np.where(low, 1.0, 2.0)  # of a saved product's input
    gates = shape.matrices - 1
    kept = shape.layers * (4 + 2 * wide) * h / split
    projections = shape.attention_layers * (
        2 * (shape.q_width + 2 * shape.kv_heads * shape.head_dim) + wide * shape.v_width
    )
    both = np.asarray(soft.keeps_both, bool) & (wide < 2)
    projections = projections + np.where(both, 2 * shape.attention_layers * shape.v_width, 0.0)
    statistics = shape.attention_layers * 4 * shape.heads
    gated = np.where(np.asarray(soft.keeps_gated, bool), wide, 0.0)
    ffn = shape.dense_layers * (2 * gates + gated) * shape.ffn
    gates_only = shape.dense_layers * 2 * gates * shape.ffn
    # The copy of a routed token that enters an expert, and its result for the weighted sum.
    routed = shape.moe_layers * (shape.top_k * (4 * shape.expert_width + (2 * gates + gated) * shape.expert_ffn))
    routed = routed + shape.moe_layers * (2 * gates + gated) * shape.shared_ffn
    # The router's copy of the input, the scores twice, and the number, place and weight of each choice.
    chosen = shape.moe_layers * (4 * h / split + 8 * shape.experts + 48 * shape.top_k)
    kept = kept + np.where(np.asarray(soft.router_copy, bool), chosen, 0.0)
    mamba = shape.mamba_layers * 2 * 5 * shape.mamba_inner
    masks = np.where(flash, 0.0, 2 * shape.attention_layers * h)  # of two dropouts
    scores = np.where(flash, 0.0, shape.attention_layers * 5 * shape.heads * shape.seq)
    statistics = np.where(flash, statistics, 0.0) + masks
    none = kept + (projections + statistics + ffn + routed + mamba + scores) / t
    dropped = shape.moe_layers * gated * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    products = projections + gates_only + routed - dropped + mamba
    selective = kept * soft.kept_sums + (soft.kept_products * products + statistics) / t
    selective = np.where(flash, selective, none - scores / t)
    full = shape.layers * 2 * h / split
    return np.select([recompute == 2, recompute == 1], [full + (none - full) * 0, selective], none)


def zero_stage(c: Candidates, soft: Software) -> Num:
    """Return the effective ZeRO stage. Where a pipeline keeps weights and gradients whole between micro-batches, stages
    2 and 3 shard only the optimizer; over one rank they change nothing."""
    keeps = (c.pp > 1) & np.asarray(soft.pipeline_keeps, bool)
    return np.where(keeps | (c.shard * c.cp == 1), np.minimum(c.zero, 1), c.zero)


def rank_params(shape: ModelShape, c: Candidates) -> tuple[Num, Num]:
    """Return a rank's parameters outside and inside the routed experts. The first and the last stage each have a
    vocabulary matrix."""
    head = shape.head_params * np.where(c.pp > 1, 1.0, 2 - np.asarray(shape.tied, float))
    return (shape.dense_params / c.pp + head) / c.tp, shape.routed_params / (c.pp * c.ep * c.etp)


def sharded(c: Candidates, dense: Num, experts: Num) -> Num:
    """Return the share of a rank's parameters that it keeps when all ranks with the same parameters split them."""
    shards = c.shard * c.cp
    return dense / shards + experts / np.maximum(1.0, c.tp * shards / (c.ep * c.etp))


def _logits(shape: ModelShape, c: Candidates, soft: Software) -> Num:
    """Return the bytes of a micro-batch's logits on the last stage, and of what a fused loss keeps besides them."""
    tokens, vocab = c.micro_batch * shape.seq / c.cp, shape.vocab / c.tp
    item = np.where(c.precision == FP32, 4.0, soft.logit_bytes)
    rows = np.maximum(1, np.floor(LOSS_BYTES / (vocab * item) / 128) * 128)  # as core.shape.loss_rows
    head = np.where(tokens > rows, 4.0, item) * vocab * shape.hidden + item * tokens * shape.hidden
    fused = item * np.minimum(tokens, rows) * vocab + head
    return np.where(np.asarray(soft.fused_loss, bool), fused, soft.logit_bytes * tokens * vocab)


def memory_bytes(
    shape: ModelShape, c: Candidates, micro_batches: Num, soft: Software, saved: Num, one_layer: Num
) -> dict[str, Num]:
    """Return the bytes of each term. `saved`: activations of a micro-batch, all layers; `one_layer`: those of one layer
    without recomputation."""
    p = c.pp
    layers = np.ceil(shape.layers / p)
    part = layers / shape.layers
    stage = zero_stage(c, soft)
    params = rank_params(shape, c)
    whole, spread = params[0] + params[1], sharded(c, *params)
    copies = np.where((c.schedule == DUALPIPE) & (p > 1), 2.0, 1.0)
    low = (c.precision >= 1) & (c.precision <= 3)
    held = in_flight(c.schedule, p, c.vpp, micro_batches)
    once = saved * part
    on_device = np.where(soft.offload, 0.0, 1.0)
    logits = _logits(shape, c, soft)
    last = np.where((p > 1) & (c.schedule == F1B), once * (held - 1), 0.0)  # 1f1b: the last stage holds one
    wide = c.precision == FP32  # the weights are the masters
    logits = np.maximum(0.0, logits - last)
    # With a fused loss the logits are freed before a layer is recomputed; the layer's gradients come on top of it.
    both = np.maximum(0.0, RECOMPUTED * one_layer - logits)
    again = np.where(np.asarray(soft.fused_loss, bool) & (p == 1), both, one_layer)
    activations = (once * held + np.where(c.recompute == 2, again, 0.0)) * on_device
    gradients = soft.grad_bytes * copies * np.where(stage >= 2, spread, whole) * soft.trained
    alone = (np.asarray(soft.one_pass_bytes) > 0) & (micro_batches == 1) & (c.shard * c.cp * c.replica * p == 1)
    once_only = np.maximum(0.0, np.where(wide, 4.0, soft.one_pass_bytes) * whole * soft.trained - activations - logits)
    master = soft.moment_bytes + np.where(wide, 0.0, np.where(np.asarray(soft.remainders, bool), 2.0, 4.0))
    out = {
        "weights": np.where(wide, 4.0, np.where(low, soft.eight_bytes, 2.0))
        * copies
        * np.where(stage >= 3, spread, whole),
        "gradients": np.where(alone, once_only, gradients),
        "kept": np.where(soft.keeps_own & (c.replica > 1), soft.grad_bytes * spread * soft.trained, 0.0),
        "optimizer": master * np.where(stage >= 1, spread, whole) * soft.trained * on_device,
        "activations": activations,
        "logits": logits,
        "gathered": np.where(stage >= 3, 3 * c.item_bytes * whole / layers, 0.0),
        "buffers": NCCL_BYTES + NCCL_BYTES_PER_PEER * (c.tp + c.cp * c.shard + c.ep + p + c.replica),
        "context": np.broadcast_to(CONTEXT_BYTES, np.shape(p)),
    }
    out["allocator"] = (soft.reserve - 1) * (sum(out.values()) - CONTEXT_BYTES)
    return out
