"""The nouns of the catalogue: chips, nodes, fabrics, sites, and the cluster made of them. Figures are in SI units
(bytes, seconds, watts; GB is 1e9), one way, dense; what is not published is zero or None. Only tiers of a network
are known here, no paths."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    vendor: str
    peak: dict[str, float]  # FLOP/s by precision, without sparsity
    memory_bytes: int  # what a process can allocate from, where that is published
    memory_bytes_per_s: float
    sms: int  # units that the tiles of a matrix product are dealt to
    watts: float  # 0: not published
    mamf: dict[str, float]  # measured achievable FLOP/s by precision
    source: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScaleUp:
    """The fast network inside a domain of chips."""

    name: str
    shape: str  # switch | mesh | torus
    domain: int  # chips that reach each other on it
    bytes_per_s: float  # one way, per chip, over all its links
    link_bytes_per_s: float  # one way, between two neighbours
    latency_s: float  # between neighbours
    sharp: bool  # the switch reduces (NVLS)
    dims: tuple[int, ...] = ()  # of the largest torus


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for one chip for one hour."""

    median: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Node:
    """One host with its chips; a domain of the scale-up network may be many of them."""

    name: str
    chip: Chip
    chips: int
    scale_up: ScaleUp
    nics: int
    nic_bytes_per_s: float  # one way, per chip: its share of the node's network cards
    host_memory_bytes: int
    host_link_bytes_per_s: float  # one way, per chip
    nvme_bytes: int  # scratch disks of the node
    watts: float  # the whole node, at most; 0: not published
    dollars_per_chip_hour: Price | None
    fabric: str  # the one it usually stands in
    source: tuple[str, ...]

    @property
    def domain_nodes(self) -> int:
        """Return the number of nodes in one scale-up domain."""
        return max(1, self.scale_up.domain // self.chips)

    def share(self, chips: int) -> Node:
        """Return a part of the node, with its part of everything but the scale-up links."""
        part = chips / self.chips
        return replace(
            self,
            chips=chips,
            scale_up=replace(self.scale_up, domain=chips, dims=(chips,) if self.scale_up.dims else ()),
            nics=math.ceil(self.nics * part),
            host_memory_bytes=int(self.host_memory_bytes * part),
            nvme_bytes=int(self.nvme_bytes * part),
            watts=self.watts * part,
        )


@dataclass(frozen=True, slots=True)
class Tier:
    """The network that a group sees if all its nodes are within `span_nodes` of each other."""

    name: str
    span_nodes: int  # 0 in the catalogue: as many as the radix of the switches gives
    bytes_per_s_factor: float  # of the node's network cards: 1 / oversubscription
    latency_s: float  # one way, a small message


@dataclass(frozen=True, slots=True)
class Fabric:
    """The network between nodes. In the catalogue tiers may lack their span; `sized` gives it to them."""

    name: str
    kind: str  # rail | fat-tree | torus | dragonfly
    technology: str
    tiers: tuple[Tier, ...]  # from near to far
    sharp: bool  # the switches reduce
    radix: int  # ports of a switch; 0: the spans are given
    planes: int  # separate networks that share the cards of a node
    larger: str  # the fabric that takes over where this one ends; empty: none
    source: tuple[str, ...]

    def tier_of(self, num_nodes: int) -> Tier:
        """Return the tier over which a group of that many neighbouring nodes communicates."""
        return next((tier for tier in self.tiers if num_nodes <= tier.span_nodes), self.tiers[-1])

    def tiers_of(self, num_nodes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return bandwidth factors and latencies (s) for groups of so many nodes each."""
        import numpy as np

        spans = [tier.span_nodes for tier in self.tiers[:-1]]
        index = np.searchsorted(spans, num_nodes, side="left")
        factors = np.array([tier.bytes_per_s_factor for tier in self.tiers])
        return factors[index], np.array([tier.latency_s for tier in self.tiers])[index]

    def sized(self, node: Node, nodes: int) -> Fabric:
        """Return the fabric wired for so many nodes, every tier with its span. UserError: it cannot join them."""
        if self.kind == "torus":  # the first tier is the scale-up network itself
            rate = node.scale_up.bytes_per_s / node.nic_bytes_per_s
            pod = replace(self.tiers[0], span_nodes=node.domain_nodes, bytes_per_s_factor=rate)
            tiers = [pod, *self.tiers[1:]]
        else:
            spans = itertools.accumulate(self._spans(node.nics / self.planes, nodes), max)
            tiers = [replace(tier, span_nodes=span) for tier, span in zip(self.tiers, spans, strict=False)]
        largest = tiers[-1].span_nodes
        if nodes > largest:
            how = f"{len(tiers)} tiers of switches with {self.radix} ports" if self.radix else "its tiers"
            raise UserError(
                f"{nodes:,} nodes of {node.chips} are more than the {largest:,} that {how} can join",
                field="fabric",
                value=self.name,
                remedy=f"ask for at most {largest * node.chips:,} chips, or for a fabric with more ports or planes",
            )
        return replace(self, tiers=tuple(tiers))

    def _spans(self, ports_per_node: float, nodes: int) -> list[int]:
        """Return the number of nodes within each tier that is built. Switches of radix K that use a share of their
        ports downwards join K^2/2 ports in two tiers and K^3/4 in three; a dragonfly has K/4 ports on a switch, K^2/8
        in a group, and one group less than that many (arXiv 2505.09343, table of topologies)."""
        group = self.radix**2 // 8
        ports, spans = 1.0, list[int]()
        for level, tier in enumerate(self.tiers):
            above = self.tiers[level + 1].bytes_per_s_factor if level + 1 < len(self.tiers) else 0.0
            if tier.span_nodes:
                spans.append(tier.span_nodes)
            elif self.kind == "dragonfly":
                spans.append(int([self.radix // 4, group, group * (group - 1)][level] / ports_per_node))
            elif level and (not above or ports * self.radix >= nodes * ports_per_node):
                # The last tier gives all its ports downwards.
                return [*spans, int(ports * self.radix / ports_per_node)]
            else:
                # Oversubscribed w times, K w / (1 + w) of the ports go down: half of them where w = 1.
                ports *= round(self.radix / (1 + above / tier.bytes_per_s_factor))
                # On rails every card of a node has a leaf of its own.
                spans.append(int(ports if self.kind == "rail" and not level else max(1.0, ports / ports_per_node)))
        return spans


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    pue: float  # power of the site over power of its computers
    grams_co2_per_kwh: float
    dollars_per_kwh: float
    source: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    node: Node
    fabric: Fabric
    nodes: int
    site: Site

    @property
    def num_chips(self) -> int:
        return self.nodes * self.node.chips
