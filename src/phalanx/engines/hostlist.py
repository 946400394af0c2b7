"""Parse Slurm's output about nodes and the network: `n[1-3,07]` into names, `scontrol show topology` into a path for
each node."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

_PART = re.compile(r"([^,\[]*)(?:\[([^\]]*)\])?")


def expand(text: str) -> list[str]:
    """Expand `a[1-3]-[x,y],b` to a1-x, a1-y, a2-x, and so on, in the order of the list, with leading zeros."""
    out: list[str] = []
    for item in _items(text):
        parts = [(m[1], list(_numbers(m[2])) if m[2] is not None else [""]) for m in _PART.finditer(item) if m[0]]
        for chosen in itertools.product(*([f"{prefix}{n}" for n in numbers] for prefix, numbers in parts)):
            out.append("".join(chosen))
    return out


def _items(text: str) -> Iterator[str]:
    """Split at commas outside brackets."""
    yield from (item for item in re.split(r",(?![^\[]*\])", text) if item)


def _numbers(text: str) -> Iterator[str]:
    for item in text.split(","):
        low, sign, high = item.partition("-")
        if not sign:
            yield low
            continue
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def paths(topology: str, nodes: Iterable[str]) -> dict[str, str]:
    """Map each node to the switches or blocks above it, the largest first: spine.leaf3. `topology`: the output of
    `scontrol show topology` for a tree or blocks. A node that no line names has an empty path."""
    wanted = set(nodes)
    above: dict[str, list[tuple[int, str]]] = {name: [] for name in wanted}
    for line in topology.splitlines():
        fields = dict(part.partition("=")[::2] for part in line.split())
        name = fields.get("SwitchName") or fields.get("BlockName") or fields.get("AggregatedBlock")
        if name:
            there = expand(fields.get("Nodes", ""))
            for node in wanted.intersection(there):
                above[node].append((-len(there), name))
    return {node: ".".join(name for _, name in sorted(some)) for node, some in above.items()}
