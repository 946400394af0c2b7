"""A replica of the gang: its world, which stands or falls as one, and what all its ranks hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.sources import Copy


@dataclass(slots=True)
class Replica:
    """
    out        it has no world; until its ranks are all up
    building   Build was said; until all are Built
    built      its world stands: it takes part, has parted, or waits to join
    leaving    its world is broken; until all that are left of it are Parked
    """

    phase: str = "out"
    world: int = 0  # the number of the last one
    crew: dict[int, int] = field(default_factory=dict)  # of that: rank -> worker
    nodes: tuple[str, ...] = ()  # of that
    waiting: set[int] = field(default_factory=set)  # workers whose Built or Parked is awaited
    parted: int = -1  # the generation that it has left, whole; -1: none since its world was built, or it takes part
    copy: Copy | None = None  # what all its ranks hold since
    kept: bool = False  # it keeps the gradients of its share of the next step
    failures: int = 0  # to build its world or to join, since its last step
    again_ns: int = 0  # no attempt before this time

    def build(self, world: int, crew: dict[int, int], nodes: tuple[str, ...]) -> None:
        self.phase, self.world, self.crew, self.nodes = "building", world, crew, nodes
        self.waiting = set(crew.values())
        self.parted, self.copy, self.kept = -1, None, False

    def enter(self) -> None:
        """Note that a generation with this replica was formed."""
        self.parted, self.copy, self.kept = -1, None, False

    def part(self, generation: int, copy: Copy | None, kept: bool) -> None:
        self.parted, self.copy, self.kept = generation, copy, kept

    def leave(self, waiting: set[int]) -> None:
        self.phase, self.waiting = "leaving", waiting
        self.parted, self.copy, self.kept = -1, None, False
