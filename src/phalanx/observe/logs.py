"""Merge the logs of many ranks: show a line that all ranks print once, along with the ranks that differ."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

RANK = re.compile(r"rank-(\d+)\.log")
#: The parts that differ between ranks in otherwise equal lines: numbers, addresses.
VOLATILE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")
MOST_BYTES = 1 << 20  # read from the end of each log
MOST_IN_ALL, LEAST_BYTES = 16 << 20, 1 << 10  # of all logs, and of each one that is read
MOST_TEXTS = 200_000  # distinct lines kept to compare ranks
MOST_LINES = 2000
MOST_ODD = 3  # ranks that are named because their numbers differ from the others'


class _Line:
    """Lines that are equal except for their numbers."""

    def __init__(self) -> None:
        self.ranks: Counter[int] = Counter()
        self.texts: dict[str, list[int]] = {}  # as they are written -> ranks that wrote it

    def told(self, ranks: list[int]) -> list[dict[str, Any]]:
        """Return one line for most ranks, and one for each text that a few ranks wrote in place of the usual one."""
        usual = [text for text, those in self.texts.items() if 2 * len(those) > len(self.ranks)]
        has = Counter(rank for text in usual for rank in self.texts[text])
        own: dict[int, str] = {}
        for text, those in self.texts.items():
            for rank in those if 2 * len(those) <= len(self.ranks) else ():
                if has[rank] < max(1, len(usual)):  # it lacks a usual text, rather than having an extra one
                    own.setdefault(rank, text)
        varies = len(own) > MOST_ODD or not usual
        odd = [] if varies else sorted(own)
        most = sorted(self.ranks.keys() - set(odd))
        who = describe(most, ranks)
        if odd and len(self.ranks) == len(ranks):
            names = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {_spans(odd)} differ"
            who = f"{len(most):,} of {len(ranks):,} ranks; {names}"
        text = usual[0] if usual else next(iter(self.texts))
        lines = [_told(text, most, sum(self.ranks[rank] for rank in most), f"{who}; numbers differ" if varies else who)]
        for text in dict.fromkeys(own[rank] for rank in odd):
            those = [rank for rank in odd if own[rank] == text]
            lines.append(_told(text, those, len(those), describe(those, ranks)))
        return [{**line, "varies": varies} for line in lines]


def _told(text: str, ranks: list[int], count: int, who: str) -> dict[str, Any]:
    return {"text": text, "ranks": _spans(ranks), "on": len(ranks), "count": count, "who": who}


def folded(folder: Path, grep: str = "", rank: int | None = None) -> dict[str, Any]:
    """Return {"ranks": how many have a log, "lines": [{"text", "who", "ranks", "on", "count", "varies"}], "cut": what
    was left out, in words}. Lines are in the order of their first occurrence."""
    seen: dict[str, _Line] = {}
    logs = find_logs(folder)
    ranks = sorted({number for number, _ in logs})
    asked = [log for log in logs if rank in (None, log[0])]
    read = asked[: MOST_IN_ALL // LEAST_BYTES]
    size = min(MOST_BYTES, MOST_IN_ALL // max(1, len(read)))
    kept, cut = 0, [f"the last {len(asked) - len(read):,} logs are not read"] if len(read) < len(asked) else []
    were_cut = 0
    for number, path in read:
        text, was_cut = _end(path, size)
        were_cut += was_cut
        for line in text.splitlines():
            if not line.strip() or (grep and grep not in line):
                continue
            one = seen.setdefault(VOLATILE.sub("#", line), _Line())
            one.ranks[number] += 1
            if those := one.texts.get(line):
                if those[-1] != number:
                    those.append(number)
            elif kept < MOST_TEXTS or not one.texts:
                one.texts[line] = [number]
                kept += 1
    if were_cut:
        cut.append(f"older lines of {were_cut:,} logs are left out: the last {size:,} bytes of each are read")
    if kept >= MOST_TEXTS:
        cut.append("there are too many different lines to compare them all")
    if len(seen) > MOST_LINES:
        cut.append(f"only the last {MOST_LINES:,} kinds of lines are shown")
    lines = [line for one in list(seen.values())[-MOST_LINES:] for line in one.told(ranks)]
    return {"ranks": len(ranks), "lines": lines, "cut": "; ".join(cut)}


def describe(some: list[int], ranks: list[int]) -> str:
    """Say which of all ranks these are: 'all 8 ranks', 'rank 3', '7 of 8 ranks; not rank 5'."""
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
    """Find the logs of ranks, sorted by rank. A rank that moved has one for each of its nodes."""
    found = [(int(match[1]), path) for path in folder.glob("*/rank-*.log") if (match := RANK.fullmatch(path.name))]
    return sorted(found)


def _spans(numbers: list[int]) -> str:
    """Format numbers like `1-3, 7`."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    text = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out[:20])
    return text if len(out) <= 20 else f"{text}, ..."


def _end(path: Path, most: int) -> tuple[str, bool]:
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(max(0, size - most))
            data = f.read(most)
    except OSError:
        return "", False
    if size > most:
        data = data.partition(b"\n")[2]
    return data.decode(errors="replace"), size > most
