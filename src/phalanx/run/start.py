"""Choose the checkpoint that a run continues: a named one, or the best good one of the job's earlier runs. A run that
finds checkpoints but can load none of them does not silently start over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.catalog import OWNER, Catalog, Found
from phalanx.checkpoint.files import Reader
from phalanx.core import lease
from phalanx.core.checkpoint import NAME, BadCheckpoint, Manifest, lineage_of, place_of
from phalanx.core.errors import UserError, together
from phalanx.core.job import Job
from phalanx.core.store import Store, open_store, patiently
from phalanx.observe.record import RunRecord, run_folders

FOLDER = "checkpoints"
AUTO, NEW = "auto", "new"
# Fields of [model] that do not shape its weights: losses, and positions, which change when a context is extended.
MAY_CHANGE = ("balance_", "z_loss", "context", "rope_")
OnEvent = Callable[[dict[str, Any]], None]
Candidate = tuple[Catalog, Found]


@dataclass
class Start:
    """Where to begin, and what to try if that cannot be loaded."""

    catalog: Catalog
    reader: Reader
    job: str  # name of the job
    others: list[Candidate]  # the best first

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def place(self) -> dict[str, str]:
        return {"url": self.reader.store.url, "name": self.reader.name}

    def next(self, reason: str, on_event: OnEvent) -> Start | None:
        """Return what to try after a rank could not load this checkpoint."""
        if self.catalog.judge(self.reader.name, reason, on_event):
            return Start(self.catalog, Reader(self.reader.store, self.reader.name), self.job, self.others)
        return _first(self.others, self.job, on_event)


def find_start(
    asked: str, job: Job, on_event: OnEvent, on_wait: Callable[[str], None] = lambda text: None
) -> Start | None:
    """Find where to begin. `asked`: auto, new, or the path of a checkpoint, of a run, or of a folder or bucket of
    checkpoints. A run that continues nothing begins with checkpoint.start. None: with fresh weights."""
    if asked == AUTO:
        found = _find(lambda: _auto(job, on_event), "--resume", asked, on_wait)
        if found:
            return found
    elif asked not in ("", NEW):
        return _find(lambda: _named(asked, job, on_event), "--resume", asked, on_wait)
    start = job.checkpoint.start
    return _find(lambda: _named(start, job, on_event), "checkpoint.start", start, on_wait) if start else None


def _find(find: Callable[[], Start | None], field: str, value: str, on_wait: Callable[[str], None]) -> Start | None:
    try:
        return patiently(find, on_wait)
    except FileNotFoundError:
        remedy = "name a checkpoint, a run's folder, or `auto` for the newest of this job; `phalanx checkpoint ls`"
        raise UserError("there is no good checkpoint", field=field, value=value, remedy=remedy) from None
    except OSError as error:
        remedy = (
            "make it readable (is it mounted? are the credentials right?), or name a checkpoint elsewhere, or begin "
        )
        remedy += "anew with --resume new, which deletes nothing"
        raise UserError(f"it cannot be read: {error}", field=field, value=value, remedy=remedy) from None
    except BadCheckpoint as error:
        remedy = "name another, or a run's folder, whose newest good one is taken; `phalanx checkpoint ls` lists them"
        raise UserError(f"it cannot be loaded: {error}", field=field, value=value, remedy=remedy) from None


def _named(asked: str, job: Job, on_event: OnEvent) -> Start:
    place, _, name = asked.rstrip("/").rpartition("/")
    if NAME.fullmatch(name):
        catalog = Catalog(open_store(place or "."))
        return Start(catalog, catalog.open(name), "", [])
    inside = Path(asked) / FOLDER
    candidates = _candidates([Catalog(open_store(str(inside) if inside.is_dir() else asked))])
    start = _first(candidates, "", on_event)
    if start is None:
        raise FileNotFoundError(asked)
    return start


def _auto(job: Job, on_event: OnEvent) -> Start | None:
    places = [job.checkpoint.dir] if job.checkpoint.dir else []
    records = run_folders(Path(job.run.dir), job.name)
    catalogs = [Catalog(open_store(place)) for place in [*places, *(str(run / FOLDER) for run in records)]]
    first, others = catalogs[: len(places)], catalogs[len(places) :]
    refused: list[str] = []

    def noticed(event: dict[str, Any]) -> None:
        refused.append(f"{event['checkpoint']}: {event['reason']}")
        on_event(event)

    start = _first([*_candidates(first), *_candidates(others)], job.name, noticed)
    if start:
        _tell_missing(start, records, catalogs, on_event)
        return start
    for catalog in catalogs:
        for found in catalog.newest_first():
            if found.status == "quarantined" and _is_of(found, job.name):
                refused.append(f"{found.name} is in quarantine: {found.quarantine['reason']}")
    refused = refused or [f"{record} says so, but they are not there" for record in records if _saved_names(record)]
    if refused:
        raise UserError(
            f"the job has checkpoints, and none of them can be loaded: {'; '.join(refused[:3])}",
            field="--resume",
            value=AUTO,
            remedy="bring their files back (is everything mounted?); `phalanx checkpoint verify` reads them, `release` "
            "takes a good one out of quarantine, `reindex` finds what a bucket has; or begin anew with --resume new, "
            "which deletes none of them",
        )
    return None


def _tell_missing(start: Start, records: list[Path], catalogs: list[Catalog], on_event: OnEvent) -> None:
    """Report a newer checkpoint of this lineage that a record says was saved, and that is missing."""
    m = start.manifest
    for record in records:
        names = [name for name in _saved_names(record) if NAME.fullmatch(name) and lineage_of(name) == m.lineage]
        if not names:
            continue
        newest = max(names, key=place_of)
        there = {found.name for catalog in catalogs for found in catalog.all() if found.status != "incomplete"}
        if place_of(newest) > (m.generation, m.step) and newest not in there:
            reason = f"{record} says that it was saved, and it is not there"
            on_event({"type": "checkpoint_unreadable", "checkpoint": newest, "reason": reason})
        return


def _candidates(catalogs: list[Catalog]) -> list[Candidate]:
    """List the good checkpoints. The lineage that owns the place comes first, then the lineage that came furthest;
    within a lineage the newest comes first."""
    groups: dict[tuple[int, str], list[Candidate]] = {}
    for number, catalog in enumerate(catalogs):
        for found in catalog.to_try():
            groups.setdefault((number, found.lineage), []).append((catalog, found))
    owners = [lease.read(catalog.store, OWNER).get("lineage") for catalog in catalogs]

    def rank(key: tuple[int, str]) -> tuple[bool, int, float]:
        newest = groups[key][0][1]
        return owners[key[0]] == key[1], newest.step, newest.since

    return [each for key in sorted(groups, key=rank, reverse=True) for each in groups[key]]


def _first(candidates: list[Candidate], job: str, on_event: OnEvent) -> Start | None:
    """Return the first candidate that opens. `job`: the name that the checkpoint's job must have; "": any."""
    for i, (catalog, found) in enumerate(candidates):
        reader = catalog.try_open(found.name, on_event)
        if reader and (not job or reader.manifest.job.get("name", job) == job):
            return Start(catalog, reader, job, candidates[i + 1 :])
    return None


def _is_of(found: Found, job: str) -> bool:
    try:
        return found.manifest.job.get("name", job) == job
    except (BadCheckpoint, OSError, UserError):
        return True


def _saved_names(run: Path) -> list[str]:
    """Return the checkpoints that the run made, according to its record."""
    try:
        events = RunRecord.open(run).events()
        return [str(event.get("checkpoint")) for event in events if event["type"] == "checkpoint"]
    except (OSError, ValueError, KeyError):
        return []


def check_room(start: Start | None, job: Job, asked: str, on_wait: Callable[[str], None] = lambda text: None) -> None:
    """Refuse a place that has a newer checkpoint of this lineage, or for a new lineage any checkpoint, unless the run
    is to start over."""
    if not job.checkpoint.dir or job.checkpoint.every_steps < 0 or asked == NEW:
        return
    lineage = start.manifest.lineage if start else None
    try:
        found = patiently(lambda: Catalog(_open(job)).to_try(), on_wait)
    except (BadCheckpoint, OSError) as error:
        raise _unreachable(job, error) from None
    found = [f for f in found if not start or f.lineage == lineage]
    begins = (start.manifest.generation, start.manifest.step) if start else (0, 0)
    if found and found[0].place > begins:
        raise UserError(
            f"it has a checkpoint of step {found[0].step:,}, and this run begins at {begins[1]:,}",
            field="checkpoint.dir",
            value=job.checkpoint.dir,
            remedy="continue it with --resume auto, begin anew beside it with --resume new, or name another folder",
        )


def take_place(store: Store, job: Job, lineage: str, run: str, on_wait: Callable[[str], None]) -> lease.Lease:
    """Become the only run that writes checkpoints to this place."""
    mine = lease.Lease(store, OWNER, {"job": job.name, "lineage": lineage, "run": run})

    def wait(body: lease.Body) -> None:
        on_wait(
            f"{store.url} belongs to a run on {body.get('host')}: waiting {body.get('term_s'):g} s for a sign of it"
        )

    try:
        patiently(lambda: mine.take(on_wait=wait), on_wait)
    except lease.Held as held:
        who = f"process {held.body.get('pid')} on {held.body.get('host')}"
        raise UserError(
            f"a run of {held.body.get('job')!r} writes its checkpoints there ({who})",
            field="checkpoint.dir",
            value=store.url,
            remedy="name another folder, or stop that run first",
        ) from None
    except OSError as error:
        raise _unreachable(job, error) from None
    return mine


def next_generation(store: Store, start: Start | None) -> int:
    """Return the generation after which the run begins: all that it writes must come after what exists."""
    if not start:
        return 0
    own = [f.place.generation for f in Catalog(store).all() if f.lineage == start.manifest.lineage]
    return max([start.manifest.generation, *own])


def _open(job: Job) -> Store:
    return open_store(job.checkpoint.dir)


def _unreachable(job: Job, error: Exception) -> UserError:
    return UserError(
        f"no checkpoint can be written there: {error}",
        field="checkpoint.dir",
        value=job.checkpoint.dir,
        remedy="name a folder that you may write to, on a disk with room, or a bucket that is there, with the right "
        "credentials",
    )


def check_fits(start: Start, job: Job) -> None:
    """Check that the checkpoint fits this model; its layout may differ."""
    saved = start.manifest.job.get("model", {})
    here = job.to_dict()["model"]
    shaping = [k for k in here if k in saved and saved[k] != here[k] and not k.startswith(MAY_CHANGE)]
    name = start.reader.name
    wrong = [
        UserError(
            f"the checkpoint {name} has {field} = {saved[field]!r}",
            field=f"model.{field}",
            value=here[field],
            remedy=f"set model.{field} to that, or name a checkpoint of this model",
        )
        for field in shaping
    ]
    if start.manifest.step >= job.train.steps:
        wrong.append(
            UserError(
                f"the checkpoint {name} is of step {start.manifest.step:,} already",
                field="train.steps",
                value=job.train.steps,
                remedy="raise train.steps, or name an earlier checkpoint",
            )
        )
    if wrong:
        raise together(wrong)
