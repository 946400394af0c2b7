from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from phalanx.runtime.client import NodeClient

WORKERS = "tests.runtime.workers"


class Tree:
    """A node client with the waiting that tests need."""

    def __init__(self, client: NodeClient, logs: Path):
        self.client, self.logs = client, logs
        self.pids: dict[int, int] = {}

    def spawn(self, worker: int, function: str, **args) -> None:
        self.client.spawn(worker, f"{WORKERS}:{function}", args, self.log(worker))

    def log(self, worker: int) -> Path:
        return self.logs / f"{worker}.log"

    def until(self, kind: str, worker: int | None = None, timeout: float = 10.0) -> dict:
        """The next event of a kind; everything before it is passed over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            event = self.client.events(max(0.0, deadline - time.monotonic()))
            if event and event["type"] == "started":
                self.pids[event["worker"]] = event["pid"]
            if event and event["type"] == kind and worker in (None, event.get("worker")):
                return event
            if event and event["type"] == "node_lost":
                break
        raise AssertionError(f"no {kind} event of worker {worker}; last: {event}")


@pytest.fixture
def tree(tmp_path):
    with NodeClient([WORKERS]) as client:
        yield Tree(client, tmp_path)


def alive_with(token: str) -> dict[int, str]:
    """Processes whose environment holds the token: pid -> command line."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def wait_gone(token: str, timeout: float = 2.0) -> dict[int, str]:
    """What is left after a while; {} as soon as nothing is."""
    deadline = time.monotonic() + timeout
    while (left := alive_with(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
