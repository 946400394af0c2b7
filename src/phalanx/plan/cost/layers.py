"""One micro-batch through all layers of a model, on one rank of its tp, cp and ep groups: time on the chip,
communication inside layers, and the bytes saved for the backward pass. These depend on few choices, so they are
computed once for each distinct combination and then spread over the candidates."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.chip import Work, work
from phalanx.plan.cost.links import Group, hide
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.rank_bytes import activation_bytes
from phalanx.plan.cost.sizes import ModelShape, Num
from phalanx.plan.cost.volumes import expert_exchanges, forward_runs, ring_messages, tensor_pairs

AGAIN, AGAIN_IN_PYTHON = 4 / 3, 1.6  # of a layer's host time when its forward runs twice


@dataclass(frozen=True, slots=True)
class Layers:
    """Seconds and bytes of all layers together. The head (logits and loss) is separate because only one stage has
    it."""

    matmul: Num
    attention: Num
    elementwise: Num
    recompute: Num
    forward: Num  # `forward`, `backward` (input's gradient, with recomputation) and `weights` (their gradient) are
    backward: Num  # times on the chip that add up to the four above
    weights: Num
    head_f: Num
    head_b: Num
    tp: Num
    cp: Num
    ep: Num
    launch: Num  # host time that nothing above hides
    host: Num  # all of it
    saved_bytes: Num  # for the backward pass, all layers
    layer_bytes: Num  # of one layer, when nothing is recomputed

    def take(self, rows: Num) -> Layers:
        return Layers(*(getattr(self, f.name)[rows] for f in fields(self)))


def layers_of(shape: ModelShape, machine: Machine, profile: Profile, c: Candidates) -> Layers:
    if np.ndim(shape.layers):  # a shape per row: nothing is shared
        return _layers(shape, machine, profile, c)
    key = np.zeros(len(c), dtype=np.int64)
    for column in (c.tp, c.cp, c.ep, c.etp, c.micro_batch, c.precision, c.recompute):
        key = key * (int(column.max()) + 1) + column
    first, back = _distinct(key)
    return _layers(shape, machine, profile, c.take(first)).take(back)


def _distinct(key: NDArray) -> tuple[NDArray, NDArray]:
    """Return a row for each distinct key, and each row's number among them. Small keys use a table, without
    sorting."""
    span = int(key.max()) + 1
    if span > 32 * len(key):
        _, first, back = np.unique(key, return_index=True, return_inverse=True)
        return first, back
    row = np.full(span, -1)
    row[key] = np.arange(len(key))
    present = np.flatnonzero(row >= 0)
    number = np.zeros(span, dtype=np.int64)
    number[present] = np.arange(len(present))
    return row[present], number[key]


def _layers(shape: ModelShape, machine: Machine, profile: Profile, c: Candidates) -> Layers:
    done, soft = work(shape, machine, profile, c), profile.software
    full, selective = c.recompute == 2, c.recompute == 1
    forward = done.matmul_f + done.attention_f + done.elementwise_f
    stored = np.asarray(soft.attention) == "scores"
    cheap = np.where(stored, done.attention_f + 0.3 * done.elementwise_f, 0.5 * done.elementwise_f)
    recompute = np.where(full, forward, np.where(selective, cheap, 0.0))
    weights = done.matmul_w * soft.trained
    backward = done.matmul_d + done.attention_b + done.elementwise_b + recompute
    around = _inside(shape, machine, c, profile, done, forward + backward + weights)
    again = np.where(np.asarray(soft.runs_ahead, bool), AGAIN_IN_PYTHON, AGAIN)
    # A layer takes at least the host's time to launch it; a layer of experts also waits for its token counts.
    host = (shape.layers * profile.layer_s + shape.moe_layers * profile.experts_s) * np.where(full, again, 1.0)
    busy = forward + backward + weights + sum(around)
    launch = np.maximum(host - busy, 0.0) + profile.stall_s * shape.moe_layers
    low = (c.precision >= 1) & (c.precision <= 3)
    held = c.micro_batch * shape.seq / c.cp * c.item_bytes / 2  # tokens, scaled by their width relative to bf16
    out = (
        done.matmul_f + done.matmul_d + weights, done.attention_f + done.attention_b,
        done.elementwise_f + done.elementwise_b, recompute, forward, backward, weights, done.head_f, done.head_b,
        *around, launch, host,
        held * activation_bytes(shape, c.tp, c.recompute, soft, low),
        held * activation_bytes(shape, c.tp, np.zeros_like(c.recompute), soft, low) / shape.layers,
    )  # fmt: skip
    return Layers(*(np.broadcast_to(x, np.shape(c.tp)) for x in out))


def _inside(
    shape: ModelShape, machine: Machine, c: Candidates, profile: Profile, done: Work, busy: Num
) -> tuple[Num, Num, Num]:
    """Return the exposed communication inside layers: tp, cp, ep. `busy`: seconds of compute that could hide it."""
    soft, tokens, item = profile.software, c.micro_batch * shape.seq / c.cp, c.item_bytes
    runs = forward_runs(c.recompute == 2)
    # Attention and FFN have a gather and a scatter each, or an all-reduce where norms are not split.
    tp = Group.of(machine, c.tp, 1, profile)
    size = item * tokens * shape.hidden
    blocks = shape.attention_layers + shape.dense_layers + shape.mamba_layers
    blocks = blocks + shape.moe_layers * (np.asarray(shape.shared_ffn) > 0)
    pair = np.where(soft.sequence_parallel, 2 * tp.gather_s(size), tp.reduce_s(size))
    around = blocks * tensor_pairs(runs) * pair * (1 - profile.hides_tp)
    # Keys and values travel round the ring while attention uses the previous ones; in backward their gradients do too.
    cp = Group.of(machine, c.cp, c.tp, profile)
    numel = 2 * tokens * np.where(np.asarray(shape.kv_lora) > 0, shape.q_width, shape.kv_heads * shape.head_dim) / c.tp
    passes = np.where((c.recompute == 1) & np.asarray(soft.reruns_ring, bool), 2, runs)  # forward
    keys, gradients = ring_messages(c.cp, passes)
    forward = keys * passes / (passes + 1) * cp.send_s(item * numel)
    backward = keys / (passes + 1) * cp.send_s(item * numel) + gradients * cp.send_s(soft.ring_grad_bytes * numel)
    ringed = hide(shape.attention_layers * forward, passes * done.attention_f, profile)
    ringed = ringed + hide(shape.attention_layers * backward, done.attention_b, profile)
    # Every routed token travels to its experts and back.
    ep = Group.of(machine, c.ep, 1, profile)
    routed = shape.imbalance * item * tokens / c.tp * shape.top_k * shape.expert_width
    exchanged = shape.moe_layers * expert_exchanges(runs) * ep.exchange_s(routed, shape.top_k)
    return around, ringed, exchanged - profile.hides_ep * np.minimum(exchanged, busy)
