"""A Form on its way to thousands of nodes. Each node is told only its part, which an aggregator cuts from columns:
making 12,500 parts, each a message, would take the controller longer than the decision."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

from phalanx.control import codec
from phalanx.control.messages import Form

OWN = ("crew", "places", "sources", "buddies", "nodes")  # what is different for each node


def shares(form: Form, homes: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """For each group of nodes: what all are told, and the rest in columns. `places`: -1 for a node without one;
    `workers`: for all ranks of each place, 0 where the rank has no part in it."""
    shared = [name for name in codec.hints(Form) if name not in OWN]
    common = {"kind": "Form"} | {name: codec.encode(getattr(form, name)) for name in shared}
    seats = {node: place for place, node in form.places.items()}
    sources: dict[str, dict[int, Any]] = {}
    for rank, source in form.sources.items():
        for node in {form.places[rank // form.ranks_per_place], source.node}:
            sources.setdefault(node, {})[rank] = codec.encode(source)
    size, get, none = form.ranks_per_place, form.crew.get, repeat(0)
    ranks = range(size * (max(form.places) + 1))
    flat = [*form.crew.values()] if len(form.crew) == len(ranks) else [*map(get, ranks, none)]
    flat += [0] * size  # of no place
    made = {}
    for home, nodes in homes.items():
        places = [seats.get(node, -1) for node in nodes]
        workers: list[int] = []
        for place in places:
            workers += flat[place * size : place * size + size] if place >= 0 else flat[-size:]
        own = {node: sources[node] for node in nodes if node in sources}
        pairs = {node: form.buddies[node] for node in nodes if node in form.buddies}
        columns = {"nodes": nodes, "places": places, "workers": workers, "sources": own, "buddies": pairs}
        made[home] = {**columns, "command": common}
    return made


def parts(share: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what each node is told: its part, as `Form.parts` has it."""
    size = share["command"]["ranks_per_place"]
    for at, (node, place) in enumerate(zip(share["nodes"], share["places"], strict=True)):
        workers = share["workers"][at * size : at * size + size]
        crew = {rank: worker for rank, worker in enumerate(workers, place * size) if worker}
        buddy = {node: share["buddies"][node]} if node in share["buddies"] else {}
        own = {"crew": crew, "places": {place: node} if place >= 0 else {}, "buddies": buddy}
        yield node, {**share["command"], **own, "sources": share["sources"].get(node, {}), "nodes": [node]}
