"""Collectives in closed form: seconds for a group of ranks that lie `stride` apart, on a machine with a scale-up
domain and tiers of a network between nodes. Ring, tree, hierarchical, in-switch (NVLS, SHARP), all-to-all and torus;
the fastest that the machine has is taken. Formulas: docs/planner.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.machine import Machine
from phalanx.plan.model import Num
from phalanx.plan.profiles import Constants


def hide(talk: Num, window: Num, k: Constants) -> Num:
    """What communication costs beside compute that could hide it: what sticks out, and what it takes from compute."""
    hidden = np.minimum(talk, window)
    return talk - (1 - k.interference) * hidden


@dataclass(frozen=True, slots=True)
class Group:
    """Where its ranks lie, and what that gives: ranks inside one domain, domains, bandwidth and latency between."""

    ranks: Num
    local: Num
    domains: Num
    up: Num  # bytes/s of a rank inside the domain
    out: Num  # bytes/s of a rank between domains
    up_hop_s: Num
    out_hop_s: Num
    nvls: Num
    sharp: Num
    torus: Num

    @classmethod
    def of(cls, machine: Machine, ranks: Num, stride: Num, network: Num, k: Constants) -> Group:
        """Ranks are neighbours in the order tp, cp, shard, pp, replica: a group's stride is the product of the axes
        before it. Between domains all `local` ranks' network cards carry one ring each."""
        local = np.clip(np.floor(machine.domain / stride), 1, ranks)
        domains = np.ceil(ranks / local)
        factor, latency = machine.tier(ranks * stride)
        up = machine.up_bytes_per_s * k.up_share * network
        out = machine.nic_bytes_per_s * factor * k.nic_share * network
        return cls(
            ranks, local, domains, up, out,
            machine.up_latency_s + k.hop_s, latency + k.hop_s, machine.nvls, machine.sharp, machine.torus,
        )  # fmt: skip

    @property
    def bus(self) -> Num:
        """Bytes/s of a rank in a ring through all ranks: the slower of the link inside and the cards of the domain."""
        return np.where(self.domains > 1, np.minimum(self.up, self.local * self.out), self.up)

    def gather_s(self, size_bytes: Num, k: Constants) -> Num:
        """All-gather, or reduce-scatter, of `size_bytes` in all: (n-1)/n S/B + a hop per step. Many domains go
        hierarchically when that is faster: between domains first (log2 steps, as PAT), then inside."""
        n = self.ranks
        hops = (n - self.domains) * self.up_hop_s + (self.domains - 1) * self.out_hop_s
        ring = (n - 1) / n * size_bytes / self.bus + hops
        tree = (
            (self.local - 1) / self.local * size_bytes / self.up
            + (self.domains - 1) / self.domains * size_bytes / (self.local * self.out)
            + (self.local - 1) * self.up_hop_s
            + np.ceil(np.log2(self.domains)) * self.out_hop_s
        )
        return np.where(n > 1, k.launch_s + np.minimum(ring, tree), 0.0)

    def reduce_s(self, size_bytes: Num, k: Constants) -> Num:
        """All-reduce: a ring's 2(n-1)/n S/B; in the switch of a domain (NVLS) each byte goes up and down once; trees
        between domains for latency; SHARP halves what crosses between them."""
        n = self.ranks
        up_bytes = np.where(
            np.logical_and(self.nvls, self.local > 4), 1.0 + 1.0 / self.local, 2 * (self.local - 1) / self.local
        )
        inside = np.where(self.local > 1, up_bytes * size_bytes / self.up, 0.0)
        out_bytes = np.where(self.sharp, 1 / 0.9, 2 * (self.domains - 1) / self.domains)
        between = np.where(self.domains > 1, out_bytes * size_bytes / (self.local * self.out), 0.0)
        hops = 2 * (self.local - 1) * self.up_hop_s + 2 * np.ceil(np.log2(self.domains)) * self.out_hop_s
        # The phases run one behind the other in pieces: between the larger of them and their sum (measured halfway).
        both = 0.5 * (inside + between) + 0.5 * np.maximum(inside, between)
        return np.where(n > 1, k.launch_s + both + hops, 0.0)

    def exchange_s(self, size_bytes: Num, picks: Num, k: Constants) -> Num:
        """All-to-all of tokens to experts: each rank sends `size_bytes` in all, `picks` copies of every token. A domain
        gets a token once, over the sender's own card, and hands out the copies inside (as DeepEP does): of D domains
        picks hit D (1 - (1 - 1/D)^picks) on average. Both ways at once."""
        hit = self.domains * (1 - (1 - 1 / self.domains) ** picks)
        between = size_bytes * np.minimum(hit / np.maximum(picks, 1), 1.0) * (1 - 1 / self.domains) / self.out
        inside = (self.local - 1) / self.local * size_bytes / self.up
        hops = np.log2(self.local) * self.up_hop_s + np.log2(self.domains) * self.out_hop_s
        # On a torus a byte crosses a quarter of each side on average, and shares the links with as many.
        far = np.where(self.torus, np.maximum(1.0, np.sqrt(self.local) / 4), 1.0)
        return np.where(self.ranks > 1, k.launch_s + np.maximum(between, far * inside) + hops, 0.0)

    def send_s(self, size_bytes: Num) -> Num:
        """To the next rank of the group; where the group leaves a domain, over the card."""
        out = self.domains > 1
        return np.where(
            self.ranks > 1,
            size_bytes / np.where(out, self.out, self.up) + np.where(out, self.out_hop_s, self.up_hop_s),
            0.0,
        )
