"""Read from a run's record its failures and how long things took, so that the twin can replay the run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median

from phalanx.core.errors import UserError
from phalanx.observe.incidents import Event
from phalanx.observe.story import Part
from phalanx.twin.past import LONGEST_S, Durations, Mishap, Past

WARM_UP = 3  # first steps of a run and of each generation, which take longer


def past_of(folder: Path) -> Past:
    part = Part(folder)
    part.update()
    layout, train = part.layout, part.settings.get("train") or {}
    rows, began = part.rows, part.incidents.ready
    if not began or len(rows) <= WARM_UP:
        remedy = "name a run that has trained"
        raise UserError(f"it has {len(rows)} steps", field="RUN", value=folder.name, remedy=remedy)
    full = {f.get("generation") for f in part.incidents.forms if len(f.get("replicas") or ()) == layout.replica}
    calm = [float(row["time_s"]) for row in _calm(rows) if row.get("generation") in full]
    per_rank = int(train.get("micro_batch") or 1) * layout.replica * layout.shard
    committed = {row["step"] for row in rows}
    return Past(
        name=folder.name,
        replicas=layout.replica,
        replica_size=layout.replica_size,
        ranks_per_node=layout.ranks_per_node or layout.world_size,
        spares=_spares(part),
        steps=len(committed),
        step_s=median(calm or [float(row["time_s"]) for row in rows]),
        micro_batches=max(1, int(train.get("global_batch") or per_rank) // per_rank),
        length_s=max(row["time"] for row in rows) - began,
        mishaps=tuple(_mishaps(part)),
        took=_durations(part),
        deaths=int((part.settings.get("recovery") or {}).get("deaths_per_node") or 3),
    )


def _calm(rows: list[Event]) -> list[Event]:
    """Leave out the first steps of the run and of each generation."""
    first: dict[int, int] = {}
    for index, row in enumerate(rows):
        first.setdefault(row.get("generation", 0), index)
    return [row for index, row in enumerate(rows) if index >= first[row.get("generation", 0)] + WARM_UP]


def _spares(part: Part) -> int:
    there = {str(e["node"]) for e in part.events if e.get("type") == "node" and e.get("what") == "joined"}
    layout = part.layout
    return max(0, len(there) - -(-layout.world_size // (layout.ranks_per_node or layout.world_size)))


def _mishaps(part: Part) -> Iterable[Mishap]:
    """Yield what failed while the run trained. A hung rank is killed, and that exit is not a failure of its own."""
    homes: dict[int, str] = {}  # rank -> node
    ended, hung, began = set[int](), set[int](), part.incidents.ready
    over = part.rows[-1]["time"]
    ends = [row["time"] for row in part.rows]
    for index, event in enumerate(part.events):
        kind, at, worker = event.get("type"), float(event.get("time") or 0.0), int(event.get("worker") or 0)
        if kind == "started" and isinstance(event.get("rank"), int) and event["rank"] >= 0:
            homes[event["rank"]] = str(event.get("node"))
        if not began <= at <= over:
            continue
        since = at - max((t for t in ends if t <= at), default=began)
        later = part.events[index:]
        if kind == "hang" and event.get("rank", -1) >= 0 and event.get("final", True):
            hung.add(worker)
            yield Mishap(at - began, "hang", event["rank"], since, launch_s=_launch(later, event["rank"]))
        elif kind == "exit" and event.get("rank", -1) >= 0 and not event.get("service") and worker not in hung | ended:
            if event.get("signal") or event.get("code"):
                ended.add(worker)
                yield Mishap(at - began, "worker", event["rank"], launch_s=_launch(later, event["rank"]))
        elif kind == "node" and str(event.get("what")).startswith("died") and event.get("node") in homes.values():
            name = str(event["node"])
            back = next((e["time"] - at for e in later if _joins(e, name)), LONGEST_S)
            rank = min(r for r, node in homes.items() if node == name)
            yield Mishap(at - began, "node", rank, 0.0, back, _launch(later, rank))
            homes = {rank: node for rank, node in homes.items() if node != name}


def _launch(later: list[Event], rank: int) -> float:
    """Return how long it took until a process ran as the rank again, not counting the wait for its node to join; 0: it
    never did."""
    at = float(later[0]["time"])
    up = next((e for e in later if _starts(e, {rank})), None)
    if up is None:
        return 0.0
    joined = [e["time"] for e in later if _joins(e, str(up.get("node"))) and e["time"] <= up["time"]]
    return float(up["time"]) - max([at, *joined])


def _joins(event: Event, name: str) -> bool:
    return event.get("type") == "node" and event.get("node") == name and event.get("what") == "joined"


def _durations(part: Part) -> Durations:
    """Return how long each part of a recovery took, as medians."""
    events, incidents = part.events, part.incidents
    stopped = [one for one in incidents.all if one.stops and one.decided]
    starts = {e.get("generation"): e["time"] for e in events if e.get("type") == "control started"}
    later = incidents.forms[1:]
    forms = [starts[f["generation"]] - f["time"] for f in later if f.get("generation") in starts]
    live = [float(e["restore_s"]) for e in events if e.get("type") == "entered" and e.get("source") == "live"]
    launches, builds = [], []
    for one in stopped:
        ranks = {e["rank"] for e in one.evidence if isinstance(e.get("rank"), int)}
        up = next((e["time"] for e in events if e["time"] > one.at and _starts(e, ranks)), 0.0)
        joined = next((f["time"] for f in later if f["time"] > up and " join" in str(f.get("reason"))), 0.0)
        if up and joined:
            launches.append(up - one.at)
            builds.append(max(0.0, joined - up))
    saved = [e for e in events if e.get("type") == "checkpoint" and "step" in e]
    gaps = [b["time"] - a["time"] for a, b in pairwise(saved)]
    ready = next((e for e in events if e.get("type") == "ready"), {})
    return Durations(
        decide=min((max(0.0, one.decided - one.at) for one in stopped), default=None),
        form=_middle(forms),
        launch=_middle(launches),
        build=_middle(builds),
        live=_middle(live),
        start=float(ready["start_s"]) if "start_s" in ready else None,
        stall=_middle([float(e.get("stall_s") or 0.0) for e in saved]) or 0.0,
        drain=_middle([float(e.get("drain_s") or 0.0) for e in saved]) or 0.0,
        interval=_middle(gaps) or 0.0,
    )


def _starts(event: Event, ranks: set[int]) -> bool:
    return event.get("type") == "started" and not event.get("service") and event.get("rank") in ranks


def _middle(values: list[float]) -> float | None:
    return median(values) if values else None
