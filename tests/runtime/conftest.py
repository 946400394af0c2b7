from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.core.layout import Layout
from phalanx.runtime.client import BareClient
from tests.runtime.cluster import LONG_S, Cluster

WORKERS = "tests.runtime.workers"


class Tree:
    """A client of a bare node, with the waits that tests need."""

    def __init__(self, client: BareClient, logs: Path):
        self.client, self.logs = client, logs
        self.pids: dict[int, int] = {}

    def spawn(self, worker: int, function: str, **args) -> None:
        self.client.spawn(worker, f"{WORKERS}:{function}", args, self.log(worker))

    def log(self, worker: int) -> Path:
        return self.logs / f"{worker}.log"

    def until(self, kind: str, worker: int | None = None, timeout: float = LONG_S) -> dict:
        """Return the next event of a kind; skip everything before it."""
        return self.all_until(kind, worker, timeout)[-1]

    def all_until(self, kind: str, worker: int | None = None, timeout: float = LONG_S) -> list[dict]:
        deadline, seen = time.monotonic() + timeout, []
        while event := self.client.events(max(0.0, deadline - time.monotonic())):
            seen.append(event)
            if event["type"] == "started":
                self.pids[event["worker"]] = event["pid"]
            if event["type"] == kind and worker in (None, event.get("worker")):
                return seen
            if event["type"] == "node_lost":
                break
        raise AssertionError(f"no {kind} event of worker {worker}; last: {seen[-3:]}")


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(*nodes, layout=None, **more):
        made.append(Cluster(tmp_path, layout or Layout(replica=2, ranks_per_node=1), **more))
        for name in nodes:
            made[0].start_node(name)
        return made[0]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def tree(tmp_path):
    with BareClient([WORKERS]) as client:
        yield Tree(client, tmp_path)


def alive_with(token: str) -> dict[int, str]:
    """Return the processes whose environment holds the token: pid -> command line."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def wait_gone(token: str, timeout: float = LONG_S) -> dict[int, str]:
    """Return what is left after a while; {} as soon as nothing is."""
    deadline = time.monotonic() + timeout
    while (left := alive_with(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
