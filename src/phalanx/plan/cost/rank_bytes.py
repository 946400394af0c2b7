"""Bytes on the fullest rank, by term. Activations per recompute mode, state per ZeRO stage, micro-batches in flight per
schedule, logits, gathered weights, communication buffers, allocator. Formulas and sources: docs/planner.md."""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.bubbles import DUALPIPE, F1B, in_flight
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.sizes import ModelShape, Num
from phalanx.plan.cost.software import Software

CONTEXT_BYTES = 0.75e9  # CUDA context and libraries
NCCL_BYTES, NCCL_BYTES_PER_PEER = 0.5e9, 0.15e6  # about 10 GB in groups of 65,536 ranks (arXiv:2510.20171)

TERMS = {
    "weights": "2 B (quantised: eight_bytes) x parameters of the rank; over shard x cp with zero 3; twice in dualpipe",
    "gradients": "grad_bytes x parameters of the rank; over shard x cp from zero 2 on",
    "kept": "own gradients beside their sum over replicas, until the commit: grad_bytes x parameters; over shard x cp",
    "optimizer": "12 B (fp32 master and two moments) x parameters of the rank; over shard x cp from zero 1 on",
    "activations": "bytes per token and layer by recompute mode x tokens x layers of the rank x batches in flight",
    "logits": "logit_bytes x tokens x vocabulary / tp on the last stage, less the activations it holds fewer of",
    "gathered": "zero 3: two layers' weights and one layer's gradients whole, 2 B each",
    "buffers": "communication: 0.5 GB + 0.15 MB per rank of the groups it is in",
    "context": "device context and libraries: 0.75 GB",
    "allocator": "what the software reserves over what it allocates (SimuMax v1.2, 43 runs on B200: 2.8 to 9.3 %)",
}


def activation_bytes(shape: ModelShape, tp: Num, recompute: Num, soft: Software, low: Num) -> Num:
    """Per token, all layers together, on a rank of its tp group (cp divides the tokens). Without dropout, flash
    attention: inputs of norms, projections and products. With scores in memory: arXiv:2205.05198, table 2."""
    h, t = shape.hidden, tp
    split = np.where(soft.sequence_parallel, t, 1)
    flash = np.asarray(soft.attention) != "scores"
    wide = np.where(low, 1.0, 2.0)  # of a saved product's input
    gates = shape.matrices - 1
    kept = shape.layers * (4 + 2 * wide) * h / split
    projections = shape.attention_layers * (
        2 * (shape.q_width + 2 * shape.kv_heads * shape.head_dim) + wide * shape.v_width
    )
    statistics = shape.attention_layers * 4 * shape.heads
    ffn = shape.dense_layers * (2 * gates + wide) * shape.ffn
    gates_only = shape.dense_layers * 2 * gates * shape.ffn
    # A routed token's copy in, and its result for the weighted sum.
    routed = shape.moe_layers * (shape.top_k * (4 * shape.expert_width + (2 * gates + wide) * shape.expert_ffn))
    routed = routed + shape.moe_layers * (2 * gates + wide) * shape.shared_ffn
    mamba = shape.mamba_layers * 2 * 5 * shape.mamba_inner
    masks = np.where(flash, 0.0, 2 * shape.attention_layers * h)  # of two dropouts
    scores = np.where(flash, 0.0, shape.attention_layers * 5 * shape.heads * shape.seq)
    statistics = np.where(flash, statistics, 0.0) + masks
    none = kept + (projections + statistics + ffn + routed + mamba + scores) / t
    dropped = shape.moe_layers * wide * (shape.top_k * shape.expert_ffn + shape.shared_ffn)
    products = projections + gates_only + routed - dropped + mamba
    selective = kept / 2 + (soft.kept_products * products + statistics) / t
    selective = np.where(flash, selective, none - scores / t)
    full = shape.layers * 2 * h / split
    return np.select([recompute == 2, recompute == 1], [full + (none - full) * 0, selective], none)


def zero_stage(c: Candidates, soft: Software) -> Num:
    """What is really sharded: where a pipeline keeps weights and gradients whole between micro-batches, zero 2 and 3
    shard the optimizer alone."""
    return np.where((c.pp > 1) & (c.zero > 1) & np.asarray(soft.pipeline_keeps, bool), 1, c.zero)


def rank_params(shape: ModelShape, c: Candidates) -> tuple[Num, Num]:
    """Parameters of a rank, outside and inside the routed experts; the first and the last stage have a matrix of the
    vocabulary each."""
    head = shape.head_params * np.where(c.pp > 1, 1.0, 2 - np.asarray(shape.tied, float))
    return (shape.dense_params / c.pp + head) / c.tp, shape.routed_params / (c.pp * c.ep * c.etp)


def sharded(c: Candidates, dense: Num, experts: Num) -> Num:
    """Parameters of a rank whose state is spread over all that hold the same."""
    shards = c.shard * c.cp
    return dense / shards + experts / np.maximum(1.0, c.tp * shards / (c.ep * c.etp))


def memory_bytes(
    shape: ModelShape, c: Candidates, micro_batches: Num, soft: Software, saved: Num, one_layer: Num
) -> dict[str, Num]:
    """`saved`: activations of a micro-batch, all layers; `one_layer`: of one layer, nothing recomputed."""
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
    logits = soft.logit_bytes * c.micro_batch * shape.seq * shape.vocab / (c.cp * c.tp)
    last = np.where((p > 1) & (c.schedule == F1B), once * (held - 1), 0.0)  # 1f1b: the last stage holds one
    out = {
        "weights": np.where(low, soft.eight_bytes, 2.0) * copies * np.where(stage >= 3, spread, whole),
        "gradients": soft.grad_bytes * copies * np.where(stage >= 2, spread, whole) * soft.trained,
        "kept": np.where(soft.keeps_own & (c.replica > 1), soft.grad_bytes * spread * soft.trained, 0.0),
        "optimizer": 12 * np.where(stage >= 1, spread, whole) * soft.trained * on_device,
        "activations": (once * held + np.where(c.recompute == 2, one_layer, 0.0)) * on_device,
        "logits": np.maximum(0.0, logits - last),
        "gathered": np.where(stage >= 3, 6 * whole / layers, 0.0),
        "buffers": NCCL_BYTES + NCCL_BYTES_PER_PEER * (c.tp + c.cp * c.shard + c.ep + p + c.replica),
        "context": np.broadcast_to(CONTEXT_BYTES, np.shape(p)),
    }
    out["allocator"] = (soft.reserve - 1) * (sum(out.values()) - CONTEXT_BYTES)
    return out
