"""Logs of many ranks as one: lines that all ranks print are shown once, with those that differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RANK = re.compile(r"rank-(\d+)\.log")
#: What differs between ranks in otherwise equal lines: numbers, addresses.
VOLATILE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
MOST_BYTES = 1 << 20  # read from the end of each log
MOST_LINES = 2000


def folded(folder: Path, grep: str = "", rank: int | None = None) -> dict[str, Any]:
    """{"ranks": how many have a log, "lines": [{"text", "who", "ranks", "on", "count", "varies"}], "cut": whether older
    lines were left out}. Lines are in the order in which they are met first."""
    seen: dict[str, dict[str, Any]] = {}
    logs = find_logs(folder)
    ranks = sorted({number for number, _ in logs})
    cut = False
    for number, path in logs:
        if rank is not None and number != rank:
            continue
        text, was_cut = _end(path)
        cut |= was_cut
        for line in text.splitlines():
            if not line.strip() or (grep and grep not in line):
                continue
            key = VOLATILE.sub("#", line)
            one = seen.setdefault(key, {"text": line, "who": set(), "count": 0, "variants": 0, "_last": line})
            one["count"] += 1
            one["who"].add(number)
            if line != one["_last"]:
                one["variants"], one["_last"] = one["variants"] + 1, line
    lines = [
        {"text": one["text"], "ranks": _spans(sorted(one["who"])), "on": len(one["who"]), "count": one["count"],
         "varies": bool(one["variants"]), "who": describe(sorted(one["who"]), ranks)}
        for one in list(seen.values())[-MOST_LINES:]
    ]  # fmt: skip
    return {"ranks": len(ranks), "lines": lines, "cut": cut or len(seen) > MOST_LINES}


def describe(some: list[int], ranks: list[int]) -> str:
    """Say which of all ranks these are: 'all 8 ranks', 'rank 3', '7 of 8 ranks; rank 5 differs'."""
    if len(some) == len(ranks) > 1:
        return f"all {len(ranks):,} ranks"
    if len(some) == 1:
        return f"rank {some[0]}"
    others = sorted(set(ranks) - set(some))
    if len(others) <= 3:
        names = ", ".join(map(str, others))
        return f"{len(some):,} of {len(ranks):,} ranks; not {'rank' if len(others) == 1 else 'ranks'} {names}"
    return f"{len(some):,} of {len(ranks):,} ranks: {_spans(some)}"


def find_logs(folder: Path) -> list[tuple[int, Path]]:
    """The logs of ranks, by rank. A rank that moved has one on each of its nodes."""
    found = [(int(match[1]), path) for path in folder.glob("*/rank-*.log") if (match := RANK.fullmatch(path.name))]
    return sorted(found)


def _spans(numbers: list[int]) -> str:
    """1-3, 7"""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    text = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out[:20])
    return text if len(out) <= 20 else f"{text}, ..."


def _end(path: Path) -> tuple[str, bool]:
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(max(0, size - MOST_BYTES))
            data = f.read(MOST_BYTES)
    except OSError:
        return "", False
    if size > MOST_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace"), size > MOST_BYTES
