"""Collectives in closed form: seconds for a group of ranks `stride` apart, on a machine with a scale-up domain and a
network of several tiers between nodes. Covers ring, tree, hierarchical, in-switch (NVLS, SHARP), all-to-all and torus,
and takes the fastest that machine and software support. Formulas: docs/planner.md."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.sizes import Num

NVLS_SHARE = 0.8  # of a ring's rate that a reduction in the scale-up switch reaches (8 x H100: bus of 480 GB/s)
SHARP_SHARE = 0.9  # of the cards' rate that a reduction in the switches reaches (NCCL, CollNet)


def hide(sent_s: Num, window: Num, profile: Profile, interference: Num | None = None) -> Num:
    """Return the cost of communication beside compute that could hide it: the exposed part, plus what it takes from
    compute."""
    lost = profile.interference if interference is None else interference
    return sent_s - (1 - lost) * np.minimum(sent_s, window)


@dataclass(frozen=True, slots=True)
class Group:
    """The placement of a group: its ranks inside one domain, its domains, and the bandwidth and latency of each."""

    ranks: Num
    local: Num
    domains: Num
    up: Num  # bytes/s of a rank inside the domain
    out: Num  # bytes/s of a rank between domains
    up_hop_s: Num
    out_hop_s: Num
    machine: Machine
    profile: Profile

    @classmethod
    def of(cls, machine: Machine, ranks: Num, stride: Num, profile: Profile) -> Group:
        """Place a group. Ranks are neighbours in the order tp, cp, shard, pp, replica, so a group's stride is the
        product of the axes before it. Between domains, the network cards of all `local` ranks carry one ring each."""
        local = np.clip(np.floor(machine.domain / stride), 1, ranks)
        factor, latency = machine.tier(ranks * stride)
        return cls(
            ranks, local, np.ceil(ranks / local), machine.up_bytes_per_s * profile.up,
            machine.nic_bytes_per_s * factor * profile.nic, profile.up_hop_s, latency + profile.out_hop_s,
            machine, profile,
        )  # fmt: skip

    @property
    def bus(self) -> Num:
        """Bytes/s of a rank in a ring through all ranks: the slower of the link inside the domain and its cards."""
        cards = np.where(self.profile.software.one_card, 1.0, self.local)
        return np.where(self.domains > 1, np.minimum(self.up, cards * self.out), self.up)

    def gather_s(self, size_bytes: Num, calls: Num = 1.0) -> Num:
        """Return the seconds of an all-gather or reduce-scatter of `size_bytes` in total, in `calls` calls:
        (n-1)/n S/B + a hop per step. Where the software can and it is faster, domains communicate hierarchically:
        between domains first, in a tree."""
        n = self.ranks
        hops = (n - self.domains) * self.up_hop_s + (self.domains - 1) * self.out_hop_s
        ring = (n - 1) / n * size_bytes / self.bus + calls * hops
        tree = (
            (self.local - 1) / self.local * size_bytes / self.up
            + (self.domains - 1) / self.domains * size_bytes / (self.local * self.out)
            + calls * ((self.local - 1) * self.up_hop_s + np.ceil(np.log2(self.domains)) * self.out_hop_s)
        )
        best = np.where(self.profile.software.hierarchical, np.minimum(ring, tree), ring)
        return np.where(n > 1, calls * self.profile.call_s + best, 0.0)

    def reduce_s(self, size_bytes: Num, calls: Num = 1.0) -> Num:
        """Return the seconds of an all-reduce: a ring's 2(n-1)/n S/B. In the switch of a domain (NVLS) each byte goes
        up and down once. Between domains the latency is a tree's, and SHARP halves the bytes."""
        switched = np.logical_and(self.machine.nvls, self.local > 4)
        up_bytes = np.where(switched, (1.0 + 1.0 / self.local) / NVLS_SHARE, 2 * (self.local - 1) / self.local)
        inside = np.where(self.local > 1, up_bytes * size_bytes / self.up, 0.0)
        out_bytes = np.where(self.machine.sharp, 1 / SHARP_SHARE, 2 * (self.domains - 1) / self.domains)
        between = np.where(self.domains > 1, out_bytes * size_bytes / (self.local * self.out), 0.0)
        hops = 2 * (self.local - 1) * self.up_hop_s + 2 * np.ceil(np.log2(self.domains)) * self.out_hop_s
        # The phases are pipelined in pieces: they take between the larger of them and their sum (measured: halfway).
        both = 0.5 * (inside + between) + 0.5 * np.maximum(inside, between)
        return np.where(self.ranks > 1, calls * (self.profile.call_s + hops) + both, 0.0)

    def exchange_s(self, size_bytes: Num, picks: Num) -> Num:
        """Return the seconds of an all-to-all of tokens to experts: each rank sends `size_bytes` in total, `picks`
        copies of every token. The picks hit D (1 - (1 - 1/D)^picks) of D domains on average. DeepEP and HybridEP send a
        token to a domain once, over the sender's own card, and distribute the copies inside. Both directions run at
        once."""
        p, m = self.profile, self.machine
        once = np.asarray(p.software.dispatcher) == "flex"
        hit = self.domains * (1 - (1 - 1 / self.domains) ** picks)
        copies = np.where(once, np.minimum(hit / np.maximum(picks, 1), 1.0), 1.0)
        out, up = self.out / p.nic * p.exchange, m.up_bytes_per_s * p.exchange
        between = size_bytes * copies * (1 - 1 / self.domains) / out
        inside = (self.local - 1) / self.local * size_bytes / up
        hops = np.log2(self.local) * self.up_hop_s + np.log2(self.domains) * self.out_hop_s
        # On a torus a byte crosses a quarter of each side on average, sharing the links with as many others.
        far = np.where(m.torus, np.maximum(1.0, np.sqrt(self.local) / 4), 1.0)
        return np.where(self.ranks > 1, p.call_s + np.maximum(between, far * inside) + hops, 0.0)

    def send_s(self, size_bytes: Num) -> Num:
        """Return the seconds to send to the group's next rank: over the network card if the group spans domains."""
        out = self.domains > 1
        took = size_bytes / np.where(out, self.out, self.up) + np.where(out, self.out_hop_s, self.up_hop_s)
        return np.where(self.ranks > 1, took, 0.0)
