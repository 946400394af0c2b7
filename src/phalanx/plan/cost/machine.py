"""The figures of a cluster that the cost model uses, kept flat so that clusters can be columns too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from phalanx.plan.cost.candidates import PRECISIONS
from phalanx.plan.cost.sizes import Num

if TYPE_CHECKING:
    from phalanx.hardware import Cluster

TIERS = 6  # a fabric with fewer repeats its last one
# A precision computes at the first of these published peaks that the chip has; without any, matmuls stay in bf16.
PEAKS = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "int8"),
    "mxfp8": ("fp8",),
    "nvfp4": ("nvfp4", "fp8"),
    "fp32": ("tf32", "fp32"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    peak: Num  # FLOP/s as published, a row per precision
    memory_bytes: Num
    memory_bytes_per_s: Num
    sms: Num
    domain: Num  # chips on one scale-up network
    up_bytes_per_s: Num  # one way, per chip
    nvls: Num  # the scale-up switch reduces
    torus: Num
    nic_bytes_per_s: Num  # one way, per chip
    sharp: Num  # the switches between nodes reduce
    node: Num  # chips of one node
    chips: Num
    span_chips: Num  # the number of neighbouring chips within which a tier's figures hold, a row per tier
    tier_factor: Num
    tier_latency_s: Num

    @classmethod
    def of(cls, cluster: Cluster) -> Machine:
        node, chip, up = cluster.node, cluster.node.chip, cluster.node.scale_up
        bf16 = chip.peak["bf16"]
        peak = []
        for precision in PRECISIONS:
            name = next((p for p in PEAKS[precision] if p in chip.peak), "bf16")
            none = precision == "fp32" and name == "bf16"  # no matrix units for it
            peak.append(bf16 / 8 if none else chip.peak[name])
        tiers = [*cluster.fabric.tiers[:TIERS]]
        tiers += [tiers[-1]] * (TIERS - len(tiers))
        return cls(
            np.array(peak), chip.memory_bytes, chip.memory_bytes_per_s, max(1, chip.sms),
            min(up.domain, cluster.num_chips), up.bytes_per_s, up.sharp, up.shape == "torus",
            node.nic_bytes_per_s, cluster.fabric.sharp, node.chips, cluster.num_chips,
            np.array([t.span_nodes * float(node.chips) for t in tiers]),
            np.array([t.bytes_per_s_factor for t in tiers]),
            np.array([t.latency_s for t in tiers]),
        )  # fmt: skip

    @classmethod
    def stack(cls, machines: list[Machine]) -> Machine:
        """Return one machine whose fields have a column (the last axis) for each of `machines`."""
        return cls(*(np.stack([np.asarray(getattr(m, f.name), float) for m in machines], -1) for f in fields(cls)))

    def take(self, rows: Num) -> Machine:
        return Machine(*(np.asarray(getattr(self, f.name))[..., rows] for f in fields(self)))

    def of_precision(self, table: Num, precision: Num) -> Num:
        """Look up each candidate's precision in a table with a row per precision (`peak`, or one of a profile)."""
        table = np.asarray(table)
        return table[precision] if table.ndim == 1 else np.take_along_axis(table, precision[None, :], 0)[0]

    def tier(self, extent: Num) -> tuple[Num, Num]:
        """Return bandwidth factor and latency (s) between nodes for a group whose ranks lie within `extent` chips."""
        if self.span_chips.ndim == 1:
            index = np.searchsorted(self.span_chips[:-1], extent)
            return self.tier_factor[index], self.tier_latency_s[index]
        factor, latency = self.tier_factor[-1], self.tier_latency_s[-1]
        for i in range(TIERS - 2, -1, -1):
            near = extent <= self.span_chips[i]
            factor = np.where(near, self.tier_factor[i], factor)
            latency = np.where(near, self.tier_latency_s[i], latency)
        return factor, latency
