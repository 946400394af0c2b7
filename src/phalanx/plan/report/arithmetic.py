"""The arithmetic of very large training runs, line by line with its formula. The figures that everyone estimates with
come from the planner's own functions and catalogue, so that a wrong one shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from phalanx.core.layout import Layout
from phalanx.hardware import Catalogue, Node
from phalanx.plan.cost.bubbles import F1B, bubble_s
from phalanx.plan.cost.goodput import DAY_S, figures, rate_per_chip_s
from phalanx.plan.cost.sizes import ModelShape

GPUS, MFU, TOKENS, PARAMS = 100_000, 0.40, 15e12, 1e12
RATE = 4e19  # FLOP/s that 100,000 of them sustain, rounded
STATE_BYTES = {"bf16 weight": 2, "bf16 gradient": 2, "fp32 master": 4, "Adam m": 4, "Adam v": 4}
DENSE_1T = ModelShape.of(128, 25600, 160, 68096, 51200, 8192, tied=True)  # arXiv:2104.04473, table 1, with SwiGLU


@dataclass(frozen=True, slots=True)
class Line:
    quantity: str
    formula: str
    result: str
    figures: dict[str, float] = field(default_factory=dict)


def lines(catalogue: Catalogue) -> list[Line]:
    node = catalogue.node("h100")
    return [
        _fleet(node.chip.peak["bf16"], node.chips),
        _state(),
        _chip(node),
        _flops(),
        _tokens(),
        Line(
            "global batch", "8,192 x 512 tokens", f"{8192 * 512 / 1e6:.1f} M tokens", {"tokens": 8192.0 * 512},
        ),
        _layout(),
        _bubble(16, 32),
        _reduce(),
        Line(
            "recovery of 20 min every 2 h", "20 / 120", f"{20 / 120:.1%} of the wall clock, before redone work",
            {"lost": 20 / 120},
        ),
        *_mtbf(catalogue),
    ]  # fmt: skip


def _fleet(peak: float, chips: int) -> Line:
    total = GPUS * peak
    return Line(
        f"{GPUS:,} H100", f"{GPUS:,} / {chips} nodes; x {peak / 1e12:.0f} TFLOP/s bf16 dense; x {MFU:.0%} MFU",
        f"{GPUS // chips:,} nodes, {total / 1e18:.0f} EFLOP/s peak, {MFU * total / 1e18:.0f} EFLOP/s",
        {"nodes": GPUS / chips, "peak": total, "sustained": MFU * total},
    )  # fmt: skip


def _state() -> Line:
    each = sum(STATE_BYTES.values())
    return Line(
        "state per parameter", " + ".join(f"{name} {size}" for name, size in STATE_BYTES.items()),
        f"{each} bytes; 1T: {each * PARAMS / 1e12:.0f} TB; 175B: {each * 175e9 / 1e12:.1f} TB; "
        f"1T needs {math.ceil(each * PARAMS / 80e9)} GPUs of 80 GB for it alone",
        {"bytes": each, "tb_1t": each * PARAMS / 1e12, "tb_175b": each * 175e9 / 1e12, "gpus": each * PARAMS / 80e9},
    )  # fmt: skip


def _chip(node: Node) -> Line:
    at = {
        "memory_gb": 80.0,
        "memory_tb_per_s": node.chip.memory_bytes_per_s / 1e12,
        "nvlink_gb_per_s": 2 * node.scale_up.bytes_per_s / 1e9,
        "gbit_per_s": 8 * node.nic_bytes_per_s / 1e9,
        "node_tbit_per_s": 8 * node.nic_bytes_per_s * node.chips / 1e12,
    }
    return Line(
        "an H100", f"catalogue: {node.name}",
        f"{at['memory_gb']:.0f} GB at {at['memory_tb_per_s']:.2f} TB/s ({node.chip.memory_bytes / 1e9:.1f} GB in bytes "
        f"that can be allocated); NVLink {at['nvlink_gb_per_s']:.0f} GB/s both ways; InfiniBand "
        f"{at['gbit_per_s']:.0f} Gb/s, {at['node_tbit_per_s']:.1f} Tb/s per node",
        at,
    )  # fmt: skip


def _flops() -> Line:
    attention = float(6 * DENSE_1T.scores / 2 / (6 * DENSE_1T.active_params))
    return Line(
        "training FLOPs", "6 x N x D (+ attention)",
        f"1T parameters, 15T tokens: {6 * PARAMS * TOKENS:.1e}; causal attention at 8,192 tokens adds {attention:.1%}",
        {"flops": 6 * PARAMS * TOKENS, "attention": attention},
    )  # fmt: skip


def _tokens() -> Line:
    per_s = RATE / (6 * PARAMS)
    return Line(
        "1T parameters at 4e19 FLOP/s", "4e19 / (6 x 1e12)",
        f"{per_s / 1e6:.1f}M tokens/s, {per_s * DAY_S:.2e} tokens/day, 15T tokens in {TOKENS / per_s / DAY_S:.0f} days",
        {"tokens_per_s": per_s, "tokens_per_day": per_s * DAY_S, "days": TOKENS / per_s / DAY_S},
    )  # fmt: skip


def _layout() -> Line:
    layout = Layout(tp=8, pp=16, replica=781)
    return Line("layout", "TP 8 x PP 16 x DP 781", f"{layout.world_size:,} GPUs", {"gpus": layout.world_size})


def _bubble(p: int, m: int) -> Line:
    one = np.array([float(p)]), np.array([1.0]), np.array([float(m)])
    idle = float(bubble_s(np.array([F1B]), *one, np.array([1.0]), np.array([1.0]), np.array([1.0]))[0])
    share = idle / (idle + 3 * m)
    return Line(
        "bubble of 1F1B", "(p-1) / (m+p-1)", f"p {p}, m {m}: {share:.1%}",
        {"share": share, "formula": (p - 1) / (m + p - 1)},
    )  # fmt: skip


def _reduce() -> Line:
    sent = {n: 2 * (n - 1) / n for n in (8, 1024)}
    return Line(
        "ring all-reduce", "each rank sends 2(N-1)/N of the data in 2(N-1) steps; a tree needs 2 log2 N",
        f"N 8: {sent[8]:.2f} x the data, 14 steps or 6; N 1,024: {sent[1024]:.3f} x, 2,046 or 20",
        {"sent_8": sent[8], "sent_1024": sent[1024], "ring_steps": 2 * 1023, "tree_steps": 2 * math.log2(1024)},
    )  # fmt: skip


def _mtbf(catalogue: Catalogue) -> list[Line]:
    cluster = catalogue.cluster("h100", GPUS)
    measured = 1 / (rate_per_chip_s(cluster) * GPUS) / 3600
    source = figures()["rates"][figures()["choice"]["usual"]]
    return [
        Line(
            "fleet MTBF, if a node lasts 5e4 h", "node MTBF / nodes",
            "0.5 h for 100,000 nodes; but 100,000 GPUs are 12,500 nodes: 4 h",
            {"nodes_100k": 5e4 / 1e5, "gpus_100k": 5e4 / (GPUS / 8)},
        ),
        Line(
            "fleet MTBF, as published", f"24 h / (nodes x {source['per_1000_node_days']} / 1000)",
            f"{measured:.2f} h for {GPUS:,} GPUs ({source['source']})", {"hours": measured},
        ),
    ]  # fmt: skip
