"""The controller process: the shell around `control.journaled`. It journals the messages of aggregators and users and
folds them into the state. Once the entries are durable, it sends the commands that follow and acknowledges the
messages. It may be killed at any instruction: the next controller folds the same journal, listens on the same ports,
and repeats what was not answered. If the state machine raises on an entry, the controller sets the entry aside and
folds the state again without it.

Its folder holds `gang.json` and `serve.json` (what agents that join are told), both written before the first start;
`journal.db`, unless the journal is on a server; and `controller.json`, which says where it listens. It prints each
decision as a line of JSON, and a sign of life every second.

Where several controllers share a journal, the active one holds a lease on it (`journal_server`). It sends nothing once
that lease may have ended, and exits when it loses all its nodes at once, because another controller may reach them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.gang import Gang
from phalanx.control.journaled import Plan, Poison, State, fences, form
from phalanx.control.liveness import DEAD, Liveness, Orphans, Roster
from phalanx.control.messages import Command, Event, Form
from phalanx.core.errors import UserError
from phalanx.core.store import sync_folder
from phalanx.gate.hub import Hub
from phalanx.runtime import kernel
from phalanx.runtime.aggregator import BEAT_S, ITEMS, PASSED, PING_S, Aggregator, Sending
from phalanx.runtime.journal import Entry, Fenced, Journal, JournalError, Tables
from phalanx.runtime.journal_server import JournalServer
from phalanx.runtime.secret import READ, Identity, Secret, load_secret
from phalanx.runtime.transport import ODD, Link, Loop, Server, Session, in_parts
from phalanx.runtime.wire import Message, Schemas, WireError, check

URGENT_S = 0.1  # to wait for a decision to become durable before other messages are read
ENDING = (signal.SIGTERM, signal.SIGINT)
TIDY_S = 15.0
RETRY_S = 1.0  # while the journal cannot be written
TICK_S = 0.25  # between two checks for silent nodes
PINGS = 16  # a second, from all aggregators together
ALIVE_S = 1.0  # between two signs of life
TEXT_CHARS = 1000  # at most, of a text that is printed
UNREAD_LINES = 1000  # kept while nobody reads standard output
SNAPSHOT_EVERY = 10_000  # entries
LATE = 4  # after this many times SNAPSHOT_EVERY, a snapshot no longer waits for a quiet moment
ASIDE_S = 10.0  # to wait for the journal when an entry is set aside
FENCED = 3  # the exit code of a controller that another has replaced, or may
MOST_ASIDE = 100  # entries that may be set aside; more mean that the program is broken

#: Posted by users. The answer to "ask" is "done" or "refused", and the answer to "status" is "status".
ASKED: Schemas = {"ask": {"event": dict}, "status": {}}
ANSWERS: Schemas = {
    "done": {},
    "refused": {"reason": str},
    "status": {"phase": str, "generation": int, "step": int, "replicas": list, "nodes": dict, "why": str},
}


# -- files


def write_plan(folder: Path, plan: Plan) -> None:
    """Write gang.json. The launcher does this before the first start."""
    _write(Path(folder) / "gang.json", codec.encode(plan))


def read_plan(folder: Path) -> Plan:
    path = Path(folder) / "gang.json"
    try:
        return codec.decode(Plan, json.loads(path.read_bytes()), "gang.json")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", remedy="the launcher writes it first") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}", remedy="begin in a new folder") from None


def write_spec(folder: Path, spec: Message) -> None:
    """Write what agents that join are to serve: see SPEC in `runtime.node`."""
    _write(Path(folder) / "serve.json", spec)


def read_address(folder: Path) -> Message:
    """Return the contents of controller.json. Before the first start, ports are 0."""
    try:
        said = json.loads((Path(folder) / "controller.json").read_bytes())
        (aggregators, port) = said["aggregators"], said["port"]
        return {"host": str(said["host"]), "port": int(port), "aggregators": [(str(h), int(p)) for h, p in aggregators]}
    except FileNotFoundError:
        return {"host": "", "port": 0, "aggregators": []}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"controller.json in {folder} cannot be used: {error}", remedy="delete it") from None


def _write(path: Path, body: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    near = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(near, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # the spec has a key in it
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())
    near.replace(path)
    sync_folder(path.parent)


# -- outgoing messages


OWN = ("sources", "takers", "gifts", "buddies")  # fields of a Form that differ from node to node


def body_of(command: Command) -> Message:
    """Return the part of a command that is the same for all nodes."""
    kind: Any = type(command)
    kept = [name for name in codec.hints(kind) if name != "nodes"]
    body = {"kind": kind.__name__, **{name: codec.encode(getattr(command, name)) for name in kept}}
    return body | {name: {} for name in OWN} if isinstance(command, Form) else body


def brief(command: Command) -> Message:
    """Return what the journal keeps of a decision. Only people read it: the state is the fold of the events."""
    body = body_of(command) | {"nodes": "all" if command.to == messages.EVERYONE else len(command.to)}
    return {name: value for name, value in body.items() if name not in ("files", "crew", *OWN)}


def orders(commands: list[Command], roster: Roster) -> dict[str, list[Message]]:
    """Return the orders for each aggregator. Nodes that no aggregator is known to reach are left out."""
    out: dict[str, list[Message]] = {}
    for command in commands:
        everyone = command.to == messages.EVERYONE
        homes = {home: [*command.to] for home in roster.aggregators} if everyone else roster.homes(command.to)
        common, own = body_of(command), command.own() if isinstance(command, Form) else {}
        owners = roster.homes(own)
        for home, nodes in homes.items():
            more = {node: own[node] for node in owners.get(home, ()) if everyone or node in nodes}
            out.setdefault(home, []).append({"type": "command", "nodes": nodes, "command": common, "own": more})
    return out


def _post_commands(session: Session, items: list[Message]) -> None:
    in_parts(lambda part: session.post({"type": "commands", "items": part}), items)


class Printer:
    """Prints lines for the process that started this one. It keeps a limited number unread, and drops the oldest."""

    def __init__(self, fd: int = 1):
        self._fd, self._lines = fd, deque[bytes](maxlen=UNREAD_LINES)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def say(self, kind: str, **fields: Any) -> None:
        self._lines.append(json.dumps({"type": kind, **fields}).encode() + b"\n")
        self.flush()

    def alive(self) -> None:
        """Print a sign of life, unless lines are still unread."""
        if not self._lines:
            self.say("alive")

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            while self._lines and self._poll.poll(0):  # a writable pipe takes 4 KiB without blocking
                os.write(self._fd, self._lines.popleft())


# -- the process


def _tells_steps(item: Message) -> bool:
    return item["type"] == "event" and item["event"].get("kind") == "StepsDone"


@dataclass
class Heard:
    """A message on its way through the journal."""

    kind: str
    entry: Message
    time_ns: int
    commands: list[Command]  # that follow from it
    session: Session | None  # the sender, who waits for an acknowledgement
    number: int

    @property
    def is_news(self) -> bool:
        return self.kind != "reports" or bool(self.entry["items"])


class Controller:
    """The controller. With `aggregate`, it also serves agents, as a separate aggregator would."""

    def __init__(
        self,
        folder: Path,
        secret: Secret,
        host: str = "127.0.0.1",
        port: int = 0,
        aggregate: bool = False,
        beat_s: float = BEAT_S,
        snapshot_every: int = SNAPSHOT_EVERY,
        printer: Printer | None = None,
        join_port: int = 0,
        recorder: tuple[str, int] | None = None,
        tables: Tables | None = None,
    ):
        self.folder, self.loop, self.printer = Path(folder), Loop(), printer or Printer()
        path = self.folder / "serve.json"
        self._spec: Message = json.loads(path.read_bytes()) if path.exists() else {}
        self._recorder = list(recorder or ())
        self._given: dict[str, int] = {}  # node -> the last incarnation that it was given
        self._joined: dict[str, tuple[str, str]] = {}  # node -> its life and address
        self._torch = ""  # the torch version of the nodes that are alive
        self.over = ""  # why this controller ends
        self.fenced = False  # another controller acts, or may act
        self.plan = read_plan(self.folder)
        self.journal = Journal(tables or self.folder / "journal.db", snapshot_every, form=form())
        self.aside: dict[int, str] = {}  # the entries that the state machine raised on -> why
        self.state = self._fold()
        self.state.check(codec.encode(self.plan))
        self._base_ns = self.state.time_ns - time.monotonic_ns()
        self._waiting: deque[tuple[int, Heard]] = deque()  # until an entry is durable
        self._unwritten: deque[Heard] = deque()  # while the journal cannot be written
        self._trouble = self._complained = ""
        self._seen_steps: dict[str, tuple[int, int]] = {}  # aggregator -> the furthest generation and step there
        self._speaker = (-1, "")  # a generation, and the aggregator that reports its finished steps
        self._told = (self.gang.generation, self.gang.phase in ("running", "ended"), False)
        self._began_ns, self._has_nodes = time.monotonic_ns(), False
        self._beat_ns = round(beat_s * 1e9)
        self._homes = Liveness(round(PING_S * 1e9))  # of aggregators
        self._orphans = Orphans(self.state.roster, self._beat_ns)
        old = read_address(self.folder)
        me = Identity("controller", "controller", self.journal.term)
        self.server = Server(
            self.loop,
            secret,
            me,
            {**PASSED, **ASKED},
            self._heard,
            on_open=self._opened,
            on_close=self._closed,
            host=host,
            port=port or old["port"],
            roles=("aggregator", "user"),
            exact=True,  # an error may leave the state half changed: the next controller folds the journal again
        )
        self.hub = Hub(Sending(self.loop, self.server.sessions.get).add, newest=self._newest)
        self.aggregator: Aggregator | None = None
        if aggregate:
            near = Identity("aggregator", "local", self.journal.term)
            at = join_port or (old["aggregators"][0][1] if old["aggregators"] else 0)
            about: dict[str, Any] = {"seed": self.journal.term, "beat_s": beat_s, "newest": self._newest}
            self.aggregator = Aggregator(self.loop, secret, near, [self.server.address], host, at, **about)
        self.loop.watch(self.journal, READ, lambda mask: self._settle())
        self._lose_absent()
        self._tick()
        self._say_alive()
        for number, why in self.aside.items():
            self._take("aside", {"entry": number, "why": why})
        for command in self.gang.set_timers():
            self._set(command)
        if not self.journal.number:
            self._take("plan", {"plan": self.state.plan})
        else:
            gang = self.gang
            about = {"phase": gang.phase, "generation": gang.generation, "step": gang.committed}
            self.printer.say("state", **about, at_ns=self.state.time_ns)
            if tables and gang.form:
                self._tell_again(gang.form)
            if gang.phase == "ended":
                for last in gang.outstanding():
                    self._tell(last, self.state.time_ns)
        _write(
            self.folder / "controller.json",
            {
                "host": self.server.address[0],
                "port": self.server.address[1],
                "pid": os.getpid(),
                "aggregators": [self.aggregator.server.address] if self.aggregator else [],
                "recorder": self._recorder,
            },
        )

    def _fold(self) -> State:
        """Return the state at the end of the journal, without the entries that the state machine raises on."""

        def take(state: State, entry: Entry) -> None:
            if entry.kind == "aside" and entry.body.get("entry", 0) not in {0, *self.aside}:
                self.aside[entry.body["entry"]] = entry.body["why"]
                raise Poison  # all later decisions were made without that entry
            if entry.number not in self.aside:
                try:
                    state.take(entry.kind, entry.body, entry.time_ns)
                except Poison as error:
                    self.aside[entry.number] = f"{error}\n{traceback.format_exc(limit=-5)}"
                    raise

        plan = self.plan
        while len(self.aside) <= MOST_ASIDE:
            with contextlib.suppress(Poison):
                state = self.journal.recover(lambda data: State.from_bytes(data) if data else State.of(plan), take)
                if state.aside > MOST_ASIDE:
                    break
                return state
        raise JournalError(f"the state machine raises on more than {MOST_ASIDE} entries of the journal")

    @property
    def gang(self) -> Gang:
        return self.state.gang

    def now_ns(self) -> int:
        """Return the time, continued from where the last controller stopped: the gap between them does not count."""
        return self._base_ns + time.monotonic_ns()

    def run(self) -> None:
        while not self.over:
            self.loop.turn()
        self.close()

    def close(self) -> None:
        if self.aggregator:
            self.aggregator.close()
        self.server.close()
        with contextlib.suppress(JournalError):
            self.journal.close()

    # -- peers

    def _opened(self, session: Session) -> None:
        """Bring an aggregator up to date: a new one, or one that lost its connection, may have missed anything."""
        if session.peer.role == "aggregator":
            name = session.peer.name
            self._orphans.find(name)
            if self._spec:
                about = {"recorder": self._recorder, "ranks": self.plan.layout.world_size}
                session.post({"type": "spec", "spec": self._spec, **about})
            nodes = self.state.roster.expected(name)
            session.post({"type": "expect", "nodes": nodes, "grace_ns": self._grace_ns()})
            commands = [*self.gang.members.fences(nodes), *self.gang.outstanding()]
            said = orders(commands, self.state.roster).get(name)
            if said:
                _post_commands(session, said)

    def _closed(self, session: Session) -> None:
        if session.peer.role == "user":
            self.server.forget(session.peer.name)
        elif session.peer.role == "aggregator":
            self.hub.lose(session.peer.name)
            self._lose_home(session.peer.name)
        self._seen_steps.pop(session.peer.name, None)
        if self._speaker[1] == session.peer.name:
            self._speaker = (-1, "")

    def _grace_ns(self) -> int:
        """Return how much longer than usual nodes may be silent: they may still wait for a cut-off controller."""
        since_ns = time.monotonic_ns() - self._began_ns
        return max(0, self.gang.policy.lease_ns // 2 - since_ns) if self.journal.tables.lease_s else 0

    def _lose_home(self, name: str) -> None:
        """Note that an aggregator is gone: its nodes will soon speak to another one, or are dead."""
        self._homes.forget(name)
        self._orphans.lose(name, time.monotonic_ns() + self._grace_ns())

    def _lose_absent(self) -> None:
        """Count the aggregators that nodes speak to as lost until they connect."""
        here = {name for name, session in self.server.sessions.items() if session.conn}
        for name in {known[2] for known in self.state.roster.to_dict().values()} - here - {""}:
            self._lose_home(name)

    def _tick(self) -> None:
        if self.over:
            return
        self.loop.after(TICK_S, self._tick)
        now_ns = time.monotonic_ns()
        if self.journal.tables.lease_s:
            self._check_lease()
        for edge in list(self._homes.tick(now_ns)):
            if edge.edge == DEAD:
                self.server.forget(edge.node)
                self._lose_home(edge.node)
        for home, item in self._orphans.tick(now_ns):
            self._take("reports", {"from": home, "items": [item]})

    def _check_lease(self) -> None:
        """End this controller if another may act, or should. If it loses all its nodes at once, it ends before it takes
        them for dead. If it never heard of any node, it stays: otherwise controllers would pass a dead fleet to each
        other for ever."""
        if not self.journal.is_held:
            self._step_down("the lease on the journal has ended: another controller may have taken over")
            return
        if self.aggregator is None:
            return
        near = [seen for seen in self.aggregator.liveness.nodes.values() if seen.visit]
        if any(not seen.suspect for seen in near):
            self._has_nodes = True
        elif (
            self._has_nodes
            and self.gang.phase != "ended"
            and any(not node.dead for node in self.gang.members.nodes.values())
        ):
            self._step_down("no node is heard of here any more: another controller may reach them")

    def _step_down(self, why: str) -> None:
        self.over, self.fenced = self.over or why, True

    def _say_alive(self) -> None:
        if not self.over:
            self.printer.alive()
            self.loop.after(ALIVE_S, self._say_alive)

    def _heard(self, session: Session, number: int, body: Message) -> None:
        kind, role = body["type"], session.peer.role
        if role != ("user" if kind in ASKED else "aggregator"):
            raise WireError(f"{kind} from a peer with the role {role!r}")
        if kind == "reports":
            items = [check(item, ITEMS) for item in body["items"]]
            if self._speaker[0] != self.gang.generation and any(map(_tells_steps, items)):
                self._speaker = (self.gang.generation, session.peer.name)
            self._take("reports", {"from": session.peer.name, "items": items}, session, number)
        elif kind == "status":
            session.post(self.status())
            session.ack(number)
        elif kind == "ask":
            self._ask(session, number, body["event"])
        else:
            try:
                self._hear_in_passing(session, body)
            except ODD as error:
                raise WireError(f"{kind} from {session.peer.name}: {error!r}") from error

    def _hear_in_passing(self, session: Session, body: Message) -> None:
        """Handle a message that is not journaled."""
        if body["type"] == "ping":
            self._pinged(session, body)
        elif body["type"] == "joins":
            admitted = [self._admit(item) for item in body["items"]]
            in_parts(lambda part: session.tell({"type": "admitted", "items": part}), admitted)
        else:
            for item in body["items"]:
                self.hub.take(session.peer.name, item)

    def _newest(self, what: str) -> int | None:
        """Return the number of the last meeting to which nodes were sent."""
        if what == "gang":
            return self.gang.generation
        return self.gang.worlds.last if what.startswith("replica ") else None

    def _pinged(self, session: Session, body: Message) -> None:
        """Renew a lease. Pings become rarer as aggregators are added, but several still fit in a lease."""
        if not self.journal.is_held:
            return
        name, lease_ns = session.peer.name, self.gang.policy.lease_ns
        self._seen_steps[name] = (body["generation"], body["step"])
        again_ns = round(min(max(PING_S, len(self._seen_steps) / PINGS) * 1e9, max(PING_S * 1e9, lease_ns / 4)))
        self._homes.beat_ns = again_ns
        for _ in self._homes.beat(name, session.peer.incarnation, 1, time.monotonic_ns()):
            pass
        speaks = self._speaker[0] != self.gang.generation or self._speaker[1] == name
        about = {"ns": lease_ns, "sent_ns": body["sent_ns"], "again_ns": again_ns, "speaks": speaks}
        session.tell({"type": "lease", **about})

    def _admit(self, join: Message) -> Message:
        """Give a joining node its incarnation, which is greater than all earlier ones of its name."""
        node, life, about, asker = str(join["node"]), str(join["life"]), join["about"], {"node": join["node"]}
        known, address = self.gang.members.nodes.get(node), str(about.get("address"))
        before, at = self._joined.get(node, ("", ""))
        if known and not before:  # an earlier controller admitted it, not this one
            at = known.address
        if known and not known.dead and at and before != life and address not in at.split(","):
            reason = (
                f"a node with the name {node} is here already, at {at}: give this one another name by --name, "
                "or wait until that one is given up"
            )
            return {**asker, "type": "refused", "reason": reason, "final": False}
        torch = str(about.get("torch", ""))
        if self._torch not in ("", torch) and self._has_other(node):  # rarely reached, and it goes through all nodes
            reason = f"it runs torch {torch}, and the other nodes run {self._torch}: install the same on all of them"
            return {**asker, "type": "refused", "reason": reason, "final": True}
        self._torch = torch
        number = self._given[node] = max(known.incarnation if known else 0, self._given.get(node, 0)) + 1
        self._joined[node] = (life, address)
        self.printer.say("joined", node=node, incarnation=number, about=about)
        return {**asker, "type": "serve", "incarnation": number}

    def _has_other(self, node: str) -> bool:
        """Return whether another admitted node is alive, or has yet to speak."""
        nodes = self.gang.members.nodes
        return any(name != node and not (name in nodes and nodes[name].dead) for name in self._joined)

    def _ask(self, session: Session, number: int, body: Message) -> None:
        try:
            event = Event.from_dict(body)
            self.state.check_user(event)
        except ValueError as error:
            session.post({"type": "refused", "reason": str(error)})
            session.ack(number)
        else:
            self._take("event", {"event": event.to_dict()}, session, number)

    def status(self) -> Message:
        gang, members = self.gang, self.gang.members
        seen = [step for generation, step in self._seen_steps.values() if generation == gang.generation]
        nodes = {
            name: {"place": n.place, "dead": n.dead, "drained": n.drained, "spare": name in members.spares}
            for name, n in members.nodes.items()
        }
        return {
            "type": "status",
            "phase": gang.phase,
            "generation": gang.generation,
            "step": max([gang.committed, *seen]),
            "replicas": list(gang.form.replicas) if gang.form else [],
            "nodes": nodes,
            "why": gang.gen.pausing or gang.desk.said or (gang.form.reason if gang.form else ""),
        }

    # -- from incoming messages to commands

    def _take(self, kind: str, body: Message, session: Session | None = None, number: int = 0) -> None:
        now = self.now_ns()
        try:
            news, commands = self.state.take(kind, body, now)
        except Poison as error:
            self._set_aside(kind, body, str(error), now, session, number)
            return
        said = []
        for command in commands:
            if isinstance(command, messages.SetTimer):
                self._set(command)
            else:
                said.append(command)
        # One entry for all of it: each entry costs the committing thread time.
        entry = {**news, "decisions": [brief(command) for command in said]}
        self._unwritten.append(Heard(kind, entry, now, said, session, number))
        if self.state.refused:
            kernel.complain(f"refused, from {self.state.refused}")
            self.state.refused = ""
        if not self._trouble:
            self._write_down(urgent=any(command.to for command in said))

    def _set_aside(self, kind: str, body: Message, why: str, now: int, session: Session | None, number: int) -> None:
        """Journal an event as set aside, and fold the state again without it. People can still read about it, and it is
        acknowledged so that its sender does not repeat it for ever. Several items are tried one by one."""
        items = body.get("items", [])
        if len(items) < 2:
            kernel.complain(f"set aside: {str(body)[:TEXT_CHARS]}\n{traceback.format_exc()}")
            note, entry = messages.Note(-1, f"set aside: {why}"), {"kind": kind, "body": body, "why": why}
            self._unwritten.append(Heard("aside", entry, now, [note], session, number))
            if not self._trouble:
                self._write_down()
        try:
            self.journal.wait(self.journal.number, ASIDE_S)
            self.state = self._fold()
            for command in self.gang.set_timers():
                self._set(command)
            self._orphans = Orphans(self.state.roster, self._beat_ns)
            self._lose_absent()
            if len(items) < 2:
                self._post([*fences(body), *self.gang.outstanding()])
        except (TimeoutError, JournalError) as error:
            self.over = f"an event was set aside, and the rest cannot be folded: {error}"
            return
        if len(items) > 1:
            for item in items[:-1]:
                self._take(kind, {**body, "items": [item]})
            self._take(kind, {**body, "items": items[-1:]}, session, number)

    def _write_down(self, urgent: bool = False) -> None:
        """Append to the journal. With `urgent`, a node waits for the decision, so wait briefly until it is durable."""
        try:
            while self._unwritten:
                heard = self._unwritten[0]
                if heard.is_news:
                    self.journal.append(heard.kind, heard.entry, heard.time_ns)
                self._waiting.append((self.journal.number, self._unwritten.popleft()))
            if urgent:
                with contextlib.suppress(TimeoutError):
                    self.journal.wait(self.journal.number, URGENT_S)
        except JournalError as error:
            self._troubled(error)
        self._settle()
        late = self.journal.number - self.journal.snapshot_number >= LATE * self.journal.snapshot_every
        if self.journal.snapshot_due and not self._trouble and (late or self.gang.calm):
            with contextlib.suppress(JournalError):  # the next entry reports it
                self.journal.snapshot(self.state.to_bytes())

    def _settle(self) -> None:
        """Send the commands whose entries have become durable, and acknowledge the messages behind them."""
        try:
            durable = self.journal.settled()
        except JournalError as error:
            return self._troubled(error)
        if self._complained and not self._trouble and self._waiting and self._waiting[0][0] <= durable:
            self._complained = ""
            self.printer.say("trouble", text="")
        while self._waiting and self._waiting[0][0] <= durable and self.journal.is_held:
            _, heard = self._waiting.popleft()
            for command in heard.commands:
                self._tell(command, heard.time_ns)
            self._post(heard.commands)
            if heard.session:
                if heard.session.peer.role == "user":
                    failed = heard.kind == "aside"
                    answer = {"type": "refused", "reason": heard.entry["why"]} if failed else {"type": "done"}
                    heard.session.post(answer)
                heard.session.ack(heard.number)
        return None

    def _post(self, commands: list[Command]) -> None:
        for home, items in orders(commands, self.state.roster).items():
            if home in self.server.sessions:
                _post_commands(self.server.sessions[home], items)

    def _troubled(self, error: JournalError) -> None:
        """Send nothing more, and acknowledge nothing, until the journal can be written."""
        if isinstance(error, Fenced):
            self._step_down(str(error))
        elif not self._trouble:
            self.loop.after(RETRY_S, self._retry)
            if str(error) != self._complained:
                kernel.complain(error)
                self.printer.say("trouble", text=str(error)[:TEXT_CHARS])
        self._trouble = self._complained = str(error)

    def _retry(self) -> None:
        self._trouble = ""
        self._write_down()

    # -- time

    def _set(self, command: messages.SetTimer) -> None:
        self.loop.after(max(0, command.at_ns - self.now_ns()) / 1e9, partial(self._fire, command))

    def _fire(self, command: messages.SetTimer) -> None:
        if self.gang.desk.timers.get(command.timer) != command.at_ns:
            return  # it was put off, or is no longer needed
        if self.now_ns() < command.at_ns:
            self._set(command)  # the loop's clock counts in floats
        else:
            self._take("event", {"event": messages.TimerFired(command.timer).to_dict()})

    # -- for people

    def _tell(self, command: Command, at_ns: int) -> None:
        """Print a command once, however often it is repeated, with its time in the journal."""
        generation, started, ended = self._told
        if isinstance(command, messages.Note):
            self.printer.say("note", rung=command.rung, text=command.text[:TEXT_CHARS], at_ns=at_ns)
        elif isinstance(command, messages.Report):
            self.printer.say("report", about=command.about, body=json.loads(command.body), at_ns=at_ns)
        elif isinstance(command, Form) and command.generation > generation:
            self._told = (command.generation, False, False)
            kept = {name: codec.encode(getattr(command, name)) for name in ("generation", "step", "replicas", "rung")}
            more = {"reason": command.reason[:TEXT_CHARS], "branch": command.branch, "last": command.last}
            self.printer.say("form", **kept, **more, at_ns=at_ns)
        elif isinstance(command, messages.Started) and command.generation == generation and not started:
            self._told = (generation, True, ended)
            self.printer.say("started", generation=generation, at_ns=at_ns)
        elif isinstance(command, messages.Ended) and not ended:
            self._told = (generation, started, True)
            self.printer.say("ended", **codec.encode(command), at_ns=at_ns)

    def _tell_again(self, form: Form) -> None:
        """Print the current generation again, for a process that starts to keep the record."""
        self._told = (form.generation - 1, False, False)
        self._tell(dataclasses.replace(form, branch=False, rung=-1), self.state.time_ns)
        if self.gang.phase == "running":
            self._tell(messages.Started(form.generation), self.state.time_ns)


def ask(folder: Path, secret: Secret, message: Message, timeout_s: float = 10.0) -> Message:
    """Send a user's message to the controller: {"type": "ask", "event": {...}} or {"type": "status"}. TimeoutError."""
    at = read_address(folder)
    if not at["port"]:
        raise UserError(f"there is no controller.json in {folder}", remedy="start the controller first")
    loop, answers = Loop(), list[Message]()
    me = Identity("user", f"user-{secrets.token_hex(8)}", 1)

    def answered(session: Session, number: int, body: Message) -> None:
        answers.append(body)

    link = Link(loop, secret, me, [(at["host"], at["port"])], ANSWERS, answered)
    deadline = time.monotonic() + timeout_s
    try:
        link.post(message)
        while not answers:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer from the controller in {timeout_s:g} s; {link.trouble}")
            loop.turn(left)
    finally:
        link.close()
    return answers[0]


def tidy(controller: Controller) -> None:
    """Collect garbage while nothing is under way, and only among new objects. A gang has a million objects, and to scan
    them all takes longer than any decision."""
    gc.disable()
    if controller.gang.calm:
        gc.collect()
        gc.freeze()
    controller.loop.after(TIDY_S, partial(tidy, controller))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m phalanx.runtime.controller")
    parser.add_argument("--dir", type=Path, required=True, help="with gang.json; the journal is kept there")
    parser.add_argument("--secret", type=Path, required=True, help="the file with the cluster's secret")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens")
    parser.add_argument("--port", type=int, default=0, help="0: as the last time")
    parser.add_argument("--aggregate", action="store_true", help="serve agents too, for a small cluster")
    parser.add_argument("--join-port", type=int, default=0, help="where agents join; 0: as the last time")
    parser.add_argument("--recorder", default="", metavar="HOST:PORT", help="where the run's record is kept")
    parser.add_argument("--journal", default="", metavar="URL", help="of a PostgreSQL server; default: in --dir")
    parser.add_argument("--holder", default="", help="of the journal: the same through all restarts")
    parser.add_argument("--beat-s", type=float, default=BEAT_S, help="between two heartbeats of an agent")
    parser.add_argument("--attached", action="store_true", help="end when standard input does")
    args = parser.parse_args(argv)
    kernel.allow_files()
    recorder_host, _, recorder_port = args.recorder.rpartition(":")
    try:
        controller = Controller(
            args.dir,
            load_secret(args.secret, create=False),
            args.host,
            args.port,
            args.aggregate,
            args.beat_s,
            join_port=args.join_port,
            recorder=(recorder_host, int(recorder_port)) if recorder_host else None,
            tables=JournalServer(args.journal, args.holder or str(os.getpid())) if args.journal else None,
        )
    except Fenced as error:
        print(error, file=sys.stderr)
        sys.exit(FENCED)
    except (JournalError, UserError, OSError) as error:
        sys.exit(f"the controller cannot start: {error}")
    tidy(controller)
    signals, wakeup = socket.socketpair()
    for end in (signals, wakeup):
        end.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())

    def stop(mask: int) -> None:
        numbers = {*signals.recv(4096)} & {*ENDING}
        if numbers:
            controller.over = kernel.signal_name(min(numbers))

    for number in ENDING:
        signal.signal(number, lambda *_: None)  # what matters is the number in the socket
    controller.loop.watch(signals, READ, stop)

    def hear(mask: int) -> None:
        if not os.read(0, 4096):
            controller.over = signal.SIGTERM.name

    if args.attached:
        controller.loop.watch(0, READ, hear)
    controller.run()
    if controller.fenced:
        print(controller.over, file=sys.stderr)
        sys.exit(FENCED)
    if controller.over not in [number.name for number in ENDING]:
        sys.exit(controller.over)


if __name__ == "__main__":
    main()
