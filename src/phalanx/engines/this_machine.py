"""Run all nodes on this machine: `runtime.launch.Local`."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.job import Job
from phalanx.engines.ssh import hosts_of
from phalanx.engines.table import Where, refuse_options
from phalanx.runtime.launch import Local


def adapter(where: Where, job: Job) -> Local:
    return Local(hosts_of(where.hosts) if where.hosts else None)


def submission(where: Where, job: Job, arguments: Sequence[str]) -> None:
    refuse_options(where)
