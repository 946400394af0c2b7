"""From which checkpoint a run goes on: the one that was named, or the newest good one of earlier runs of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.catalog import NAME, Catalog
from phalanx.checkpoint.files import Reader
from phalanx.core.checkpoint import BadCheckpoint, Manifest
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.store import open_store
from phalanx.observe.record import run_folders

FOLDER = "checkpoints"
OnEvent = Callable[[dict[str, Any]], None]


@dataclass
class Start:
    """Where to begin, and what to try if that is damaged."""

    catalogs: list[Catalog]  # the best first
    reader: Reader

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def place(self) -> dict[str, str]:
        return {"url": self.reader.store.url, "name": self.reader.name}

    def next(self, reason: str, on_event: OnEvent) -> Start | None:
        """After damage was found in this one."""
        found = self.catalogs[0].fall_back(self.reader.name, reason, on_event)
        return Start(self.catalogs, found) if found else _first(self.catalogs[1:], on_event)


def find_start(asked: str, job: Job, on_event: OnEvent) -> Start | None:
    """`asked`: auto, or the path of a checkpoint, of a run, or of a folder or bucket of checkpoints. None: auto has
    found nothing."""
    if asked == "auto":
        places = [job.checkpoint.dir] if job.checkpoint.dir else []
        places += [str(run / FOLDER) for run in run_folders(Path(job.run.dir), job.name)]
        return _first([Catalog(open_store(place)) for place in places], on_event)
    place, _, name = asked.rstrip("/").rpartition("/")
    try:
        if NAME.fullmatch(name):
            catalog = Catalog(open_store(place or "."))
            return Start([catalog], catalog.open(name))
        folder = Path(asked)
        inside = (folder / FOLDER).is_dir()
        start = _first([Catalog(open_store(str(folder / FOLDER) if inside else asked))], on_event)
    except FileNotFoundError:
        start = None
    except (BadCheckpoint, OSError) as error:
        remedy = "name another, or a run's folder, whose newest good one is taken; `phalanx checkpoint ls` lists them"
        raise UserError(f"it cannot be loaded: {error}", field="--resume", value=asked, remedy=remedy) from None
    if start is None:
        remedy = "name a checkpoint, a run's folder, or `auto` for the newest of this job; `phalanx checkpoint ls`"
        raise UserError("there is no good checkpoint", field="--resume", value=asked, remedy=remedy)
    return start


def _first(catalogs: list[Catalog], on_event: OnEvent) -> Start | None:
    for i, catalog in enumerate(catalogs):
        if reader := catalog.newest_good(on_event):
            return Start(catalogs[i:], reader)
    return None


def check_room(start: Start | None, job: Job) -> None:
    """That no checkpoint is in the way: the one with the highest step counts as the newest, so those of a run that
    begins before it would be the first to go."""
    if not job.checkpoint.dir or job.checkpoint.every_steps < 0:
        return
    found = Catalog(open_store(job.checkpoint.dir)).good()
    begins = start.manifest.step if start else 0
    if found and found[0].step > begins:
        raise UserError(
            f"it has a checkpoint of step {found[0].step:,}, and this run begins at {begins:,}",
            field="checkpoint.dir",
            value=job.checkpoint.dir,
            remedy="go on from it with --resume auto, or name another folder",
        )


def check_fits(start: Start, job: Job) -> None:
    """That the checkpoint is of this model; the layout may be any."""
    saved = start.manifest.job.get("model", {})
    here = job.to_dict()["model"]
    shaping = [k for k in here if k in saved and saved[k] != here[k] and k not in ("balance_loss", "balance_bias")]
    if shaping:
        field = shaping[0]
        raise UserError(
            f"the checkpoint {start.reader.name} has {field} = {saved[field]!r}",
            field=f"model.{field}",
            value=here[field],
            remedy=f"set model.{field} to that, or name a checkpoint of this model",
        )
    if start.manifest.step >= job.train.steps:
        raise UserError(
            f"the checkpoint {start.reader.name} is of step {start.manifest.step:,} already",
            field="train.steps",
            value=job.train.steps,
            remedy="raise train.steps, or name an earlier checkpoint",
        )
