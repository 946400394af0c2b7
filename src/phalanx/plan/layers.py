"""One micro-batch through all layers of a model on one rank of its tp, cp and ep groups: time on the chip, the
communication inside layers, and the bytes it leaves for the backward pass. All of it depends on few choices, so it is
computed for their distinct combinations and spread over the candidates."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.candidates import Candidates
from phalanx.plan.compute import Work, work
from phalanx.plan.machine import Machine
from phalanx.plan.memory import activation_bytes
from phalanx.plan.model import ModelShape, Num
from phalanx.plan.network import Group, hide
from phalanx.plan.profiles import Constants, Profile


@dataclass(frozen=True, slots=True)
class Layers:
    """Seconds of all layers together, and bytes; the head (logits and loss) apart, since one stage has it alone."""

    matmul: Num
    attention: Num
    elementwise: Num
    again: Num  # recomputation
    forward: Num  # on the chip: `forward`, `backward` (input's gradient, with recomputation) and `weights` (theirs) add
    backward: Num  # up to the four above
    weights: Num
    head_f: Num
    head_b: Num
    tp: Num
    cp: Num
    ep: Num
    launch: Num  # host time that nothing above hides
    saved_bytes: Num  # for the backward pass, all layers
    layer_bytes: Num  # of one layer, when nothing is recomputed

    def take(self, rows: Num) -> Layers:
        return Layers(*(getattr(self, f.name)[rows] for f in fields(self)))


def layers_of(shape: ModelShape, machine: Machine, profile: Profile, k: Constants, c: Candidates) -> Layers:
    if np.ndim(shape.layers):  # a shape per row: nothing is shared
        return _layers(shape, machine, profile, k, c)
    key = np.zeros(len(c), dtype=np.int64)
    for column in (c.tp, c.cp, c.ep, c.etp, c.micro_batch, c.precision, c.recompute):
        key = key * (int(column.max()) + 1) + column
    first, back = _distinct(key)
    return _layers(shape, machine, profile, k, c.take(first)).take(back)


def _distinct(key: NDArray) -> tuple[NDArray, NDArray]:
    """A row for each distinct key, and each row's number among them. By a table where keys are small: no sorting."""
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


def _layers(shape: ModelShape, machine: Machine, profile: Profile, k: Constants, c: Candidates) -> Layers:
    on = work(shape, machine, profile, k, c.tp, c.cp, c.ep, c.etp, c.micro_batch, c.precision)
    full, selective = c.recompute == 2, c.recompute == 1
    forward = on.matmul_f + on.attention_f + on.elementwise_f
    cheap = np.where(profile.flash, 0.5 * on.elementwise_f, on.attention_f + 0.3 * on.elementwise_f)
    again = np.where(full, forward, np.where(selective, cheap, 0.0))
    weights = on.matmul_w * profile.trained
    backward = on.matmul_d + on.attention_b + on.elementwise_b + again
    talk = _inside(shape, machine, c, profile, k, on)
    # A layer takes no less than the host needs to launch it.
    few = np.logical_and(profile.fused, profile.flash)  # kernels
    host = shape.layers * k.layer_s * np.where(few, 1.0, k.eager) + shape.moe_layers * k.moe_layer_s
    host = host * np.where(full, 4 / 3, 1.0)
    launch = np.maximum(host - (forward + backward + weights + sum(talk)), 0.0)
    low = (c.precision >= 1) & (c.precision <= 3)
    tokens = c.micro_batch * shape.seq / c.cp
    out = (
        on.matmul_f + on.matmul_d + weights, on.attention_f + on.attention_b, on.elementwise_f + on.elementwise_b,
        again, forward, backward, weights, on.head_f, on.head_b, *talk, launch,
        tokens * activation_bytes(shape, c.tp, c.recompute, profile, low),
        tokens * activation_bytes(shape, c.tp, np.zeros_like(c.recompute), profile, low) / shape.layers,
    )  # fmt: skip
    return Layers(*(np.broadcast_to(x, np.shape(c.tp)) for x in out))


def _inside(
    shape: ModelShape, machine: Machine, c: Candidates, profile: Profile, k: Constants, on: Work
) -> tuple[Num, Num, Num]:
    """Exposed communication inside layers: tp, cp, ep."""
    tokens = c.micro_batch * shape.seq / c.cp
    tp = Group.of(machine, c.tp, 1, profile.network, k)
    size = 2 * tokens * shape.hidden
    # Around attention and FFN a gather and a scatter forward and backward each; all-reduces where norms are not split.
    pairs = shape.attention_layers + shape.dense_layers + shape.mamba_layers
    pairs = pairs + shape.moe_layers * (np.asarray(shape.shared_ffn) > 0)
    times = np.where(c.recompute == 2, 3.0, 2.0)
    split = np.where(profile.sequence_parallel, 2 * tp.gather_s(size, k), tp.reduce_s(size, k))
    around = pairs * times * split * (1 - profile.hides_tp)
    # Keys and values travel around the ring while attention works on the last ones; backward their gradients too.
    cp = Group.of(machine, c.cp, c.tp, profile.network, k)
    keys = np.where(np.asarray(shape.kv_lora) > 0, shape.q_width, shape.kv_heads * shape.head_dim)
    ring = shape.attention_layers * (c.cp - 1) * cp.send_s(2 * 2 * tokens * keys / c.tp)
    ringed = hide(ring, on.attention_f, k) + hide(2 * ring, on.attention_b, k)
    # Every routed token to its experts and back.
    ep = Group.of(machine, c.ep, 1, profile.network, k)
    routed = shape.imbalance * 2 * tokens / c.tp * shape.top_k * shape.expert_width
    return around, ringed, shape.moe_layers * 2 * times * ep.exchange_s(routed, shape.top_k, k)
