"""A process that obeys one client: spawn, send, kill. It has the same zygote, channels and watch as a node, but no
cluster. It is for measurements that are over in minutes, and for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.control.messages import Failure
from phalanx.control.verdict import Evidence, remedy
from phalanx.core.errors import RunFailed
from phalanx.runtime import kernel
from phalanx.runtime.client import BareClient
from phalanx.runtime.hosting import Host
from phalanx.runtime.spawner import READ, WRITE, Spawner, Stop, Worker
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

GATHER_S = 0.5  # for the deaths that belong to the first one seen
COMMANDS: Schemas = {
    "spawn": {"worker": int, "entry": str, "args": dict, "log": str},
    "send": {"worker": int, "body": dict},
    "kill": {"worker": int},
    "watch": {"timeout_s": (int, float)},
}


class Bare(Host):
    spawner: Spawner

    def __init__(self, client: Conn, preload: list[str]):
        super().__init__()
        self.client = client
        self.spawner = Spawner(self, preload)

    @property
    def backlog_bytes(self) -> int:
        return self.client.pending_bytes

    def listen(self) -> None:
        self._register(self.client, READ | (WRITE if self.client.pending_bytes else 0), self._on_client)

    def _on_client(self, mask: int) -> None:
        self.client.flush()
        for message in self.client.pull() if mask & READ else ():
            self._obey(message)
        if self.client.eof:
            raise Stop

    def _obey(self, message: Message) -> None:
        command = check(message, COMMANDS)
        kind = command.pop("type")
        if kind == "spawn":
            try:
                self.spawner.spawn(command["worker"], command["entry"], command["args"], command["log"])
            except WireError as error:
                self.client.push({"type": "message", "worker": command["worker"], "body": {"refused": str(error)}})
        elif kind == "send":
            self.spawner.send(command["worker"], command["body"])
        elif kind == "kill":
            self.spawner.kill(command["worker"])
        else:
            self.watch.set(command["timeout_s"])

    def started(self, w: Worker) -> None:
        self.client.push({"type": "started", "worker": w.number, "pid": w.pid, "service": ""})

    def heard(self, w: Worker, body: Message) -> None:
        self.client.push({"type": "message", "worker": w.number, "body": body})

    def ended(self, w: Worker, code: int, error: str) -> None:
        how = {"code": None, "signal": kernel.signal_name(-code)} if code < 0 else {"code": code, "signal": None}
        more = {"service": "", "error": error, "progress": w.progress.read().to_dict(), "tail": w.tail()}
        self.client.push({"type": "exit", "worker": w.number, **how, **more})

    def hung(self, event: Message) -> None:
        self.client.push(event)


class Together:
    """Processes that live and die together. When one fails, its peers fail milliseconds later as a consequence: these
    deaths are gathered, and the first cause is named. A process succeeds when it exits with code 0."""

    def __init__(self, client: BareClient):
        self.client, self._names, self._errors = client, dict[int, str](), dict[int, tuple[str, str]]()
        self._failed: list[Evidence] = []
        self._judge_at = 0.0

    def spawn(self, worker: int, name: str, entry: str, args: dict[str, Any], log: Path) -> None:
        self._names[worker] = name
        self.client.spawn(worker, entry, args, log)

    def next(self, timeout: float) -> Message | None:
        """Return the next event, None after `timeout`. Raise RunFailed once one of the processes has failed."""
        event = self.client.events(timeout)
        if event is None:
            pass
        elif event["type"] == "node_lost":
            raise RunFailed(f"the processes of this machine were lost: {event['reason']}")
        elif event["type"] == "message" and event["body"].get("type") == "error":
            self._errors[event["worker"]] = (str(event["body"].get("kind")), str(event["body"].get("text")))
        elif event["type"] == "exit" and event["code"] != 0:
            self._fail(event)
        if self._failed and time.monotonic() > self._judge_at:
            first = min(self._failed, key=lambda e: e.severity)
            about = {"log_tail": first.failure.tail, "remedy": remedy(first.failure)}
            raise RunFailed(first.sentence(), rank=first.rank if first.rank >= 0 else None, **about)
        return event

    def _fail(self, event: Message) -> None:
        worker = event["worker"]
        kind, text = self._errors.get(worker, ("", event["error"]))
        failure = Failure(kind, text, event["signal"] or "", event["code"] or 0, tail=event["tail"])
        if not self._failed:
            self._judge_at = time.monotonic() + GATHER_S
        self._failed.append(Evidence(worker, self._names.get(worker, f"process {worker}"), failure, True))


def main(argv: list[str]) -> None:
    client = Conn(socket.socket(fileno=int(argv[0])))
    os.set_inheritable(client.fileno(), False)
    reason = Bare(client, argv[1:]).run()
    if reason:
        print(reason, file=sys.stderr)
        with contextlib.suppress(OSError):  # nobody may be left to be told
            client.send({"type": "node_lost", "reason": reason}, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
