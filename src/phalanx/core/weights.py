"""Rows of a table that says which tensor of another checkpoint is which of ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weight:
    """Which tensor of another checkpoint is which of ours; for `phalanx convert`. A `*` stands for a part of the name
    between dots, the same on both sides. Several of ours are the rows of theirs, one after the other. A `#` in theirs
    counts experts, whose rows ours holds one after the other. `transpose`: theirs has rows and columns exchanged."""

    theirs: str
    ours: str | tuple[str, ...]
    transpose: bool = False
