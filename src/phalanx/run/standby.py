"""Let controllers share a journal: one acts, the others stand by. Each waits until the journal is free, then starts its
own job or continues the run in the journal."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.run.planned import Forecast
from phalanx.runtime.cluster import Shared, Superseded
from phalanx.runtime.journal import JournalError
from phalanx.runtime.journal_server import LEASE_S, JournalServer, Kept
from phalanx.spec.load import Resolved

PAUSE_S = 2 * LEASE_S  # pause before a controller that has left claims the journal again: others go first

Mine = tuple[Resolved, Forecast | None]


def check_options(journal: str, standby: bool, secret: Path | None) -> None:
    if journal and not journal.startswith(("postgresql://", "postgres://")):
        remedy = "write it as postgresql://USER@HOST:PORT/DATABASE; without --journal it is a file of the run's folder"
        raise UserError("it is not the address of a PostgreSQL server", field="--journal", value=journal, remedy=remedy)
    if standby and not journal:
        remedy = "name the journal that the controllers share: --journal postgresql://…"
        raise UserError("there is nothing to stand by for", field="--standby", value=True, remedy=remedy)
    if journal and secret is None:
        remedy = "name a file with --secret: the first controller makes it, the others get a copy, mode 600"
        raise UserError("controllers that share a journal share a secret", field="--secret", value="", remedy=remedy)


def take_turns(
    url: str,
    standby: bool,
    mine: Mine | None,
    say: Callable[[str], object],
    train: Callable[..., object],  # takes a job, its forecast, and `shared`
) -> None:
    """Take turns until the run is over. `mine`: the job that this controller starts if the journal has none; None: it
    only continues the runs of others."""
    journal = JournalServer(url, secrets.token_hex(8))
    while True:
        try:
            kept = journal.claim(standby, say, begins=mine is not None)
        except JournalError as error:
            raise RunFailed(
                str(error), remedy="name the server that keeps the journal, and see that it is up"
            ) from None
        if kept and kept.done and standby:
            journal.leave(done=True)
            say(f"the run {kept.name} is over")
            return
        _check(journal, kept, mine, standby)
        going = kept if kept and not kept.done else None
        if going:
            say(f"continuing the run {going.name}, which another controller began")
        job, forecast = _job_of(going) if going else mine or (None, None)
        assert job
        shared = Shared(journal, going, standby)
        try:
            train(job, forecast, shared=shared)
            return
        except Superseded as error:
            if not standby:
                raise
            if error.is_final:
                say("the run is handed over to the controllers that stand by")
                return
            say(f"standing by again: {error.reason}")
            time.sleep(PAUSE_S)


def _job_of(kept: Kept) -> Mine:
    return Resolved(Job.from_dict(kept.spec["worker"]["args"]["job"]), {}), None


def _check(journal: JournalServer, kept: Kept | None, mine: Mine | None, standby: bool) -> None:
    """Raise UserError if this controller may not touch the run in the journal."""
    if kept is None or kept.done:
        return
    message, remedy = "", ""
    if not standby:
        message = f"it holds the run {kept.name}, which is not over"
        remedy = "continue it with --standby, or name another database"
    elif mine and mine[0].job.digest() != _job_of(kept)[0].job.digest():
        message = f"it holds the run {kept.name}, which is of another job"
        remedy = "leave the job out to continue that run, or name another database"
    if message:
        journal.leave(done=False)
        raise UserError(message, field="--journal", value=journal.name, remedy=remedy)
