"""Reach hosts by ssh, or by any other command that runs a command there."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.engines.table import Where, refuse_options
from phalanx.runtime import inventory
from phalanx.runtime.launch import Adapter, Call, Seat, StartedAgent

# A cable may fail for a minute: the agent is reachable over another network, and lives as long as its ssh.
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=12")
SSH_COMMAND = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *ALIVE)


def hosts_of(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `a,b,c`, or a file with one host per line: its name and, unless that is `ssh NAME`, the command that runs
    another one there."""
    path = Path(text)
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, *prefix = shlex.split(line, comments=True) or [""]
        if name in found:
            raise UserError(f"{name} is named twice", field="--hosts", value=text, remedy="name each host once")
        if name:
            found[name] = tuple(prefix)
    if not found or any("/" in name for name in found):
        remedy = "write a,b,c, or the path of a file with a host per line"
        raise UserError("it names no hosts", field="--hosts", value=text, remedy=remedy)
    return found


def adapter(where: Where, job: Job) -> Ssh:
    return Ssh(where.hosts)


def submission(where: Where, job: Job, arguments: Sequence[str]) -> None:
    refuse_options(where)


class Ssh(Adapter):
    def __init__(self, hosts: str):
        if not hosts:
            raise UserError("which hosts?", field="--hosts", value="", remedy="name them: --hosts a,b,c or a file")
        self.hosts = hosts_of(hosts)

    def seats(self, count: int) -> list[Seat]:
        return [Seat(name) for name in self.hosts]

    def address(self) -> str:
        return inventory.address_towards(inventory.resolve(next(iter(self.hosts)), "--hosts"))

    def start(self, call: Call) -> StartedAgent:
        prefix = self.hosts[call.seat.name] or (*SSH_COMMAND, call.seat.name)
        there = shlex.join([*call.command(sys.executable), "--secret", "-"])
        return StartedAgent([*prefix, there], call.token, call.log, dict(os.environ), proves=False)
