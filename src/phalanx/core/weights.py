"""Rows of a table that maps tensors of other checkpoints to ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weight:
    """Maps a tensor of another checkpoint to ours, for `phalanx convert`. A `*` stands for a part of the name between
    dots, the same on both sides. Several names in `ours` are the rows of theirs, one after the other. A `#` in `theirs`
    counts experts, whose rows ours holds one after the other. `transpose`: theirs has rows and columns exchanged."""

    theirs: str
    ours: str | tuple[str, ...]
    transpose: bool = False
