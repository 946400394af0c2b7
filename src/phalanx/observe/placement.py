"""Fleet: the ranks that each node holds and the state of each node, derived from the events of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.observe.fold import Spans, spans
from phalanx.observe.story import Part, Row

#: state of a node -> what it means, from good to bad.
STATES = {
    "part": "its ranks take part",
    "spare": "stands by: it holds no rank",
    "out": "its ranks take no part at present",
    "dead": "its processes have ended",
}
NOT_ABOUT = ("time", "type", "node", "what", "incarnation", "pid")


@dataclass(slots=True)
class Node:
    name: str
    since: float = 0.0  # when its state was last reported
    alive: bool = True
    ranks: set[int] = field(default_factory=set)
    deaths: int = 0  # of the node, and of ranks on it
    why: str = ""  # of the last death
    about: Row = field(default_factory=dict)  # what it reported about itself when it joined


def fleet(part: Part) -> Row:
    """Return the nodes of a run and their ranks, as of the last events."""
    nodes = _nodes(part.events)
    size, forms = part.layout.replica_size, part.incidents.forms
    present = {int(replica) for replica in (forms[-1].get("replicas") or ())} if forms else set()
    of = {rank: name for name, node in nodes.items() for rank in node.ranks}
    return {
        "running": part.state == "running",
        "ranks": part.layout.world_size,
        "replica_size": size,
        "axes": {axis: getattr(part.layout, axis) for axis in part.layout.AXES},
        "replicas": spans(present),
        "nodes": [_row(node, {rank // size for rank in node.ranks} <= present) for node in nodes.values()],
        "unplaced": spans(set(range(part.layout.world_size)) - set(of)) if of else [],
    }


def headline(found: Row) -> str:
    """Answer: is any of it missing?"""
    nodes, replicas = found["nodes"], found["axes"]["replica"]
    count = {state: sum(node["state"] == state for node in nodes) for state in STATES}
    there = sum(last - first for first, last in found["replicas"])
    if not nodes:
        return "No node has joined yet."
    whole = "all replicas" if there == replicas else f"{there:,} of {replicas:,} replicas"
    words = {"part": "at work", "spare": "standing by", "out": "out", "dead": "dead"}
    rest = ", ".join(f"{number:,} {words[state]}" for state, number in count.items() if number)
    when = "Now" if found["running"] else "At the end"
    return f"{when} {whole} {'take' if found['running'] else 'took'} part; nodes: {rest}."


def _nodes(events: list[Row]) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    where: dict[int, Node] = {}
    for event in events:
        kind, name, at = event.get("type"), str(event.get("node", "")), float(event.get("time") or 0.0)
        if kind not in ("node", "started", "exit") or name in ("", "controller"):
            continue
        node = nodes.setdefault(name, Node(name, at))
        rank = event.get("rank", -1)
        if kind == "node":
            what = str(event.get("what", ""))
            if what.startswith("died"):
                node.alive, node.ranks, node.why = False, set(), what
                node.deaths, node.since = node.deaths + 1, at
            elif what in ("started", "joined"):
                node.alive, node.since = True, at
                node.about |= {key: value for key, value in event.items() if key not in NOT_ABOUT}
        elif isinstance(rank, int) and rank >= 0 and not event.get("service"):
            if kind == "started":
                if rank in where:
                    where[rank].ranks.discard(rank)
                where[rank] = node
                node.ranks.add(rank)
                node.alive = True
            elif event.get("signal") or event.get("code"):
                node.deaths, node.since = node.deaths + 1, at
                node.why = f"rank {rank}: {event.get('signal') or event.get('code')}"
    return nodes


def _row(node: Node, present: bool) -> Row:
    state = "dead" if not node.alive else "spare" if not node.ranks else "part" if present else "out"
    ranks: Spans = spans(node.ranks)
    about: dict[str, Any] = {"name": node.name, "state": state, "ranks": ranks, "since": node.since}
    return {**about, "deaths": node.deaths, "why": node.why, "about": node.about}
