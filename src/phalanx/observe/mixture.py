"""Mixture: which sources the samples of a run came from, compared with what its data order plans."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from phalanx.observe.story import Part, Row, Story, read_json

POINTS = 120  # in the curve of each source's share over the steps


def mixture(story: Story) -> Row:
    """Count samples by source: in total, over the steps, and as planned for each stage (a stage begins at a sample)."""
    counts = [(row["step"], row["served"]) for row in story.rows if isinstance(row.get("served"), dict)]
    names = list(dict.fromkeys(name for _, served in counts for name in served))
    size = max(1, -(-len(counts) // POINTS))
    pieces = [counts[i : i + size] for i in range(0, len(counts), size)]
    sums = [{name: sum(_count(served.get(name)) for _, served in piece) for name in names} for piece in pieces]
    return {
        "sources": names,
        "samples": {name: sum(each[name] for each in sums) for name in names},
        "steps": [piece[-1][0] for piece in pieces],
        "shares": {name: [each[name] / (sum(each.values()) or 1) for each in sums] for name in names},
        "done": _count(story.rows[-1].get("cursor")) if story.rows else 0,
        "stages": _stages(story.part),
        "substituted": sum(e.get("type") == "data_substitute" for part in story.parts for e in part.events),
        "version": read_json(story.part.path / "data.json").get("version", ""),
    }


def stage_starts(story: Story) -> list[Row]:
    """List when each data stage after the first began: step, time and the share of each source."""
    cursors, out = [_count(row.get("cursor")) for row in story.rows], []
    for number, stage in enumerate(_stages(story.part)[1:], 2):
        at = bisect_right(cursors, stage["first"])
        if at < len(story.rows):
            out.append({"number": number, "step": story.rows[at]["step"], "at": story.rows[at]["time"], **stage})
    return out


def _stages(part: Part) -> list[Row]:
    """List the stages: the sample that each begins with, and the planned share of each source."""
    order = read_json(part.path / "data.json").get("order")
    try:
        names = [str(stream[0]) for stream in order["streams"]]  # type: ignore[index]
        stages: list[Any] = order["stages"]  # type: ignore[index]
        return [
            {"first": int(first), "shares": {n: q / (sum(quotas) or 1) for n, q in zip(names, quotas, strict=True)}}
            for first, quotas in stages
        ]
    except (KeyError, TypeError, ValueError, IndexError):
        return []


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
