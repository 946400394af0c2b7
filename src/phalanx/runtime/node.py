"""The node process: one per host. It carries out what `control.agent` decides: forks services and workers, speaks with
an aggregator, and watches for hangs. It ends with its client, the launcher, and everything below it with it.

One thread, one loop, nothing that blocks: a slow client holds back the workers' messages, not the node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.control import agent as machine
from phalanx.control import codec, messages
from phalanx.control.agent import Agent, Service
from phalanx.control.messages import Command, Failure
from phalanx.control.pace import Pace
from phalanx.core.store import sync_folder
from phalanx.runtime import kernel
from phalanx.runtime.aggregator import COMMANDS
from phalanx.runtime.health import Health
from phalanx.runtime.secret import Identity, load_secret
from phalanx.runtime.spawner import READ, WRITE, Spawner, Stop, Worker
from phalanx.runtime.transport import Link, Loop, Session
from phalanx.runtime.watch import Watch
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLIENT_BACKLOG_BYTES = 16 << 20  # unread by the client: workers are not read either, and wait in send

#: The client's first command. `dir`: for this node's own small files. `worker` and each of `services`: {"entry",
#: "args"}; both are also told the `host` to listen at. `hang_s`: 0 derives the limit from the steps.
SERVE: Schemas = {
    "serve": {
        "name": str,
        "domain": str,
        "secret": str,
        "aggregators": list,
        "beat_s": (int, float),
        "hang_s": (int, float),
        "dir": str,
        "logs": str,
        "host": str,
        "worker": dict,
        "services": dict,
    }
}
#: The first words of services.
FIRST: Schemas = {
    "store": {"host": str, "port": int},
    "data": {"address": str},
    "keeper": {"address": str, "port": int},
}
#: From workers, for the agent.
REPORTS: Schemas = {
    **machine.REPORTS,
    "step": {"generation": int, "step": int, "time_s": (int, float)},
}
#: From keepers, for the agent.
KEPT: Schemas = {
    "shard": {
        "checkpoint": str,
        "step": int,
        "generation": int,
        "ranks": int,
        "seal": str,
        "rank": int,
        "size": int,
        "root": str,
        "drain_s": (int, float),
    },
    "committed": {"checkpoint": str, "step": int, "generation": int, "drain_s": (int, float)},
    "checkpoint_failed": {"rank": int, "reason": str, "step": int, "generation": int},
    "held": {"copies": list},
}
NAMES = {number: name for name, number in machine.SERVICES.items()}
EXPIRED_NS = 1  # a lease that has ended


class Host(ABC):
    """A process with a client, a zygote and workers. What the client's messages and the workers' mean is for others to
    say: `obey`, `started`, `heard`, `ended` and `hung`."""

    def __init__(self, client: Conn, lifeline: int, preload: list[str]):
        self.client, self.loop, self.watch = client, Loop(), Watch()
        self._masks: dict[Any, int] = {}
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # what matters is the number in the socket
        self.spawner = Spawner(self, lifeline, preload)

    def run(self) -> str:
        """Serve until something ends the node; returns what it was."""
        try:
            while True:
                self._listen()
                tick_s = self.watch.tick_s()
                self.loop.turn() if tick_s is None else self.loop.turn(tick_s)
                if self.client.pending_bytes > CLIENT_BACKLOG_BYTES:
                    self.watch.forgive()  # workers may stand still because their messages are not taken
                for event in self.watch.look(self.spawner.workers.values()):
                    self.hung(event)
        except Stop as e:
            return str(e)
        except Exception:
            return f"the node process failed:\n{traceback.format_exc()}"
        finally:
            kernel.end_all_children(timeout=5.0)

    # -- who speaks

    def _listen(self) -> None:
        self._register(self._signals, READ, self._on_signal)
        self._register(self.client, READ | (WRITE if self.client.pending_bytes else 0), self._on_client)
        self.spawner.listen(self._register, may_read=self.client.pending_bytes <= CLIENT_BACKLOG_BYTES)

    def _register(self, source: Any, mask: int, callback: Callable[[int], None]) -> None:
        if self._masks.get(source, 0) != mask:
            self.loop.watch(source, mask, callback)
            self._masks[source] = mask
            if not mask:
                del self._masks[source]

    def _on_signal(self, mask: int) -> None:
        for number in self._signals.recv(4096):
            if number in ENDING:
                raise Stop(f"the node process was ended by {kernel.signal_name(number)}")
        self.spawner.reap()

    def _on_client(self, mask: int) -> None:
        self.client.flush()
        for message in self.client.pull() if mask & READ else ():
            self.obey(message)
        if self.client.eof:
            raise Stop

    @abstractmethod
    def obey(self, message: Message) -> None: ...

    @abstractmethod
    def started(self, w: Worker) -> None: ...

    @abstractmethod
    def heard(self, w: Worker, body: Message) -> None: ...

    @abstractmethod
    def ended(self, w: Worker, code: int, error: str) -> None: ...

    @abstractmethod
    def hung(self, event: Message) -> None: ...


class Node(Host):
    def __init__(self, client: Conn, lifeline: int, preload: list[str]):
        self.agent: Agent | None = None
        self.link: Link | None = None
        self.health: Health | None = None
        self._sent_ns = 0  # when the last beat was
        super().__init__(client, lifeline, preload)

    def obey(self, message: Message) -> None:
        command = check(message, SERVE)
        del command["type"]
        self._serve(**command)

    def _serve(
        self,
        name: str,
        domain: str,
        secret: str,
        aggregators: list[Any],
        beat_s: float,
        hang_s: float,
        dir: str,
        logs: str,
        host: str,
        worker: dict[str, Any],
        services: dict[str, Any],
        **limits: float,
    ) -> None:
        """`limits`: halt_s and leave_s, if others than the usual ones are wanted."""
        if self.agent:
            raise WireError("serve came twice")
        if "store" not in services or not services.keys() <= machine.SERVICES.keys():
            raise WireError(f"serve.services = {sorted(services)}: expected store, and perhaps data and keeper")
        self.beat_s, self.secret = float(beat_s), load_secret(Path(secret), create=False)
        self.aggregators = [(str(host), int(port)) for host, port in aggregators]
        self.folder, self.logs = Path(dir), Path(logs)
        entries = {"": worker, **services}
        self.entries = {key: (str(e["entry"]), {**e["args"], "host": host}) for key, e in entries.items()}
        for folder in (self.folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        times: dict[str, Any] = {f"{key.removesuffix('_s')}_ns": int(value * 1e9) for key, value in limits.items()}
        pace = Pace(int(hang_s * 1e9), int(self.beat_s * 1e9))
        self.agent = Agent(name, domain, {key: Service() for key in services}, pace, host, **times)
        self.agent.begin(time.monotonic_ns())
        self._act()

    # -- what the agent asks for

    def _act(self) -> None:
        assert self.agent
        while actions := self.agent.take():
            for action in actions:
                DO[type(action)](self, action)

    def _post(self, action: machine.Post) -> None:
        assert self.agent
        if self.link is None:
            return
        try:
            self.link.post({"type": "event", "event": action.event.to_dict()})
        except OverflowError as error:  # nobody has listened for very long
            kernel.complain(f"the node starts anew: {error}")
            self.agent.reset()

    def _spawn(self, action: machine.Spawn) -> None:
        entry, args = self.entries[action.name]
        args = {**args, **action.args}
        for name in ("data", "keeper"):  # what all ranks are told of a service, and what it said itself
            if action.args.get(name) and self.entries[""][1].get(name):
                args[name] = {**self.entries[""][1][name], **action.args[name]}
        log = self.logs / (f"{action.name}.log" if action.name else f"rank-{action.args['rank']:05d}.log")
        self.spawner.spawn(action.number, entry, args, str(log))

    def _send(self, action: machine.Send) -> None:
        self.spawner.send(action.number, action.body)

    def _end(self, action: machine.End) -> None:
        self.spawner.kill(action.number)

    def _alarm(self, action: machine.Alarm) -> None:
        self.loop.after(max(0, action.at_ns - time.monotonic_ns()) / 1e9, partial(self._fire, action))

    def _fire(self, action: machine.Alarm) -> None:
        assert self.agent
        if self.agent.alarms.get(action.name) != action.at_ns:
            return  # it was put off, or is not needed any more
        now_ns = time.monotonic_ns()
        if now_ns < action.at_ns:
            self._alarm(action)  # the loop's clock counts in floats
            return
        self.agent.fire(now_ns, action.name)
        if action.name == "lease":
            self._set_lease(EXPIRED_NS)
        self._act()

    def _tell(self, action: machine.Tell) -> None:
        self.client.push(action.body)

    def _watch(self, action: machine.Watch) -> None:
        self.watch.set(action.limit_ns / 1e9)

    def _count(self, action: machine.Count) -> None:
        assert self.agent
        counters = {n: w.progress.read().counter for n, w in self.spawner.workers.items() if n >= 0}
        self.agent.counted(time.monotonic_ns(), counters)

    def _redial(self, action: machine.Redial) -> None:
        if self.link:
            self.link.drop("the controller was not heard of through this aggregator")

    def _reboot(self, action: machine.Reboot) -> None:
        """Nothing that was said to an earlier incarnation counts."""
        assert self.agent
        if self.link:
            self.link.close()
        incarnation = next_incarnation(self.folder)
        self.agent.booted(time.monotonic_ns(), incarnation)
        self.link = Link(
            self.loop,
            self.secret,
            Identity("agent", self.agent.name, incarnation),
            self.aggregators,
            COMMANDS,
            self._commanded,
            on_open=self._opened,
            on_close=self._closed,
            on_ack=self.agent.acknowledged,
            seed=hash((self.agent.name, incarnation)),
            retry_s=self.beat_s,  # an aggregator that is back must hear of this node before it takes it for dead
        )
        self.loop.after(self.beat_s, partial(self._beat, incarnation))

    # -- the link

    def _opened(self, session: Session) -> None:
        assert self.agent
        self._tell_beat()  # before anything else: it says where this node can be reached
        self.agent.connected(time.monotonic_ns())
        self._act()

    def _closed(self, session: Session) -> None:
        assert self.agent
        self.agent.disconnected()

    def _beat(self, incarnation: int) -> None:
        assert self.agent
        if incarnation != self.agent.incarnation:
            return
        self.loop.after(self.beat_s, partial(self._beat, incarnation))
        self._tell_beat()
        if self.health is None:
            self.health = Health()
        for sign, count in self.health.look():
            self.agent.warn(sign, count)
        self._act()

    def _tell_beat(self) -> None:
        assert self.link and self.agent
        readings = [w.progress.read() for n, w in self.spawner.workers.items() if n >= 0]
        self._sent_ns = time.monotonic_ns()
        said = self.agent.beat(self._sent_ns)
        said["step"] = max([said["step"], *(r.step for r in readings)])
        said["counter"] = sum(r.counter for r in readings)
        self.link.tell({"type": "beat", "visit": self.link.visits, **said})

    def _commanded(self, session: Session, number: int, body: Message) -> None:
        assert self.agent
        if body["type"] == "lease":
            until_ns = self._sent_ns + body["ns"]
            self.agent.renew(time.monotonic_ns(), until_ns)
            self._set_lease(until_ns)
            self._act()
            return
        try:
            command = self._command_of(body["command"])
        except ValueError as error:  # of another release, perhaps
            kernel.complain(f"a command was not understood: {error}")
        else:
            self.agent.obey(time.monotonic_ns(), command)
            self._act()

    def _command_of(self, body: Message) -> Command:
        """Fill in to whom it is sent, which is left out on the way."""
        assert self.agent
        known: Any = messages.KINDS.get(str(body.get("kind")))
        sent = {"nodes": [self.agent.name]} if known and "nodes" in codec.hints(known) else {}
        return Command.from_dict({**sent, **body})

    def _set_lease(self, until_ns: int) -> None:
        """Workers look at it before they vote: they obey it even if this process hangs."""
        for w in self.spawner.workers.values():
            w.progress.lease(until_ns)

    # -- what is heard of services and workers

    def started(self, w: Worker) -> None:
        if self.agent and w.number >= 0:
            w.progress.lease(self.agent.alarms.get("lease", 0))
        about = {"service": NAMES.get(w.number, "")}
        self.client.push({"type": "started", "worker": w.number, "pid": w.pid, **about})

    def heard(self, w: Worker, body: Message) -> None:
        assert self.agent
        now_ns, kind, service = time.monotonic_ns(), body.get("type"), NAMES.get(w.number, "")
        if service and kind == service:
            self.agent.service_said(now_ns, service, check(body, FIRST))
        elif service and kind == "error":
            self.agent.service_raised(service, str(body.get("kind")), str(body.get("text")))
        elif service == "keeper" and kind in KEPT:
            self.agent.keeper_said(now_ns, check(body, KEPT))
        elif not service and (kind in REPORTS or kind == "error"):
            if kind == "parked" and isinstance(body.get("why"), dict) and "kind" in body["why"]:
                body["why"]["tail"] = w.tail()
            self.agent.worker_said(now_ns, w.number, check(body, REPORTS) if kind in REPORTS else body)
        for_agent = kind == service or kind in KEPT if service else kind in machine.REPORTS
        if not for_agent:
            self.client.push({"type": "message", "worker": w.number, "body": body})
        self._act()

    def ended(self, w: Worker, code: int, error: str) -> None:
        assert self.agent
        reading = w.progress.read()
        name = kernel.signal_name(-code) if code < 0 else ""
        about = {"signal": name or None, "code": code if code >= 0 else None}
        self.client.push({"type": "exit", "worker": w.number, **about, "service": NAMES.get(w.number, "")})
        failure = Failure(
            text=error, signal=name, code=max(0, code), phase=reading.phase.name, step=reading.step, tail=w.tail()
        )
        self.agent.ended(time.monotonic_ns(), w.number, failure)
        self._act()

    def hung(self, event: Message) -> None:
        assert self.agent
        self.client.push(event)
        if event["final"]:
            self.agent.hung(time.monotonic_ns(), event["workers"], event["reason"])
            self._act()


DO: dict[type[Any], Callable[[Node, Any], None]] = {
    machine.Post: Node._post,
    machine.Spawn: Node._spawn,
    machine.Send: Node._send,
    machine.End: Node._end,
    machine.Alarm: Node._alarm,
    machine.Tell: Node._tell,
    machine.Watch: Node._watch,
    machine.Count: Node._count,
    machine.Reboot: Node._reboot,
    machine.Redial: Node._redial,
}


def next_incarnation(folder: Path) -> int:
    """Greater than all before it, also after a crash at any point."""
    path = folder / "incarnation"
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    near = path.with_name(".incarnation.next")
    with near.open("w") as file:
        file.write(str(last + 1))
        file.flush()
        os.fsync(file.fileno())
    near.replace(path)
    sync_folder(folder)
    return last + 1


def main(argv: list[str], kind: type[Host] = Node) -> None:
    client_fd, lifeline = int(argv[0]), int(argv[1])
    for fd in (client_fd, lifeline):
        os.set_inheritable(fd, False)
    client = Conn(socket.socket(fileno=client_fd))
    reason = kind(client, lifeline, argv[2:]).run()
    if reason:
        print(reason, file=sys.stderr)
        with contextlib.suppress(OSError):  # nobody may be left to be told
            client.send({"type": "node_lost", "reason": reason}, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
