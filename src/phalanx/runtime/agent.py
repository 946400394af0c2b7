"""The agent: the node process of a cluster. Services (a rendezvous store, the data service, the keeper of snapshots)
and workers live below it; it does what the controller says, by way of an aggregator, and reports what becomes of it.

Nothing stops while aggregator or controller are gone: what was posted is sent when they are back. It ends with its
client, the launcher, and everything below it with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.messages import Command, Event
from phalanx.core.store import sync_folder
from phalanx.observe.progress import Reading
from phalanx.runtime import hang, kernel
from phalanx.runtime.aggregator import COMMANDS as ORDERED
from phalanx.runtime.health import Health
from phalanx.runtime.node import COMMANDS, Node, Worker, main
from phalanx.runtime.secret import Identity, load_secret
from phalanx.runtime.transport import Link, Loop, Session
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

SERVICES = {"store": -1, "data": -2, "keeper": -3}  # their worker numbers
GATHER_S = 0.002  # in which what workers report alike becomes one event
HALT_S = 8.0  # from "halt" to "parked"
LEAVE_S = 20.0  # from "leave" to the exit
AGAIN_S = (0.1, 5.0)  # before a service that died is started again: first, and at most
REASON_CHARS = 1000

#: The client's first command. `dir`: for this agent's own small files. `worker` and each of `services`: {"entry",
#: "args"}; both are also told the `host` to listen at. It, `halt_s` and `leave_s` may be left out.
SERVE: Schemas = {
    "serve": {
        "name": str,
        "domain": str,
        "secret": str,
        "aggregators": list,
        "beat_s": (int, float),
        "dir": str,
        "logs": str,
        "worker": dict,
        "services": dict,
    }
}
#: A service's first words.
FIRST: Schemas = {
    "store": {"host": str, "port": int},
    "data": {"address": str},
    "keeper": {"address": str, "port": int},
}
#: From workers; they end here, and only "committed" is relayed as well.
REPORTS: Schemas = {
    "up": {},
    "parked": {"generation": int, "step": int, "prepared": int, "made": int},
    "ready": {"generation": int, "step": int, "digest": str},
    "missing": {"generation": int, "reason": str},
    "committed": {"generation": int, "step": int},
}


@dataclass
class Service:
    name: str
    entry: str
    args: dict[str, Any]
    said: Message | None = None  # its first message; None: it is not there
    deaths: int = 0

    @property
    def number(self) -> int:
        return SERVICES[self.name]


@dataclass
class Mate:
    """A worker of the gang that lives here."""

    rank: int
    number: int
    formed: int = 0  # the last generation that it was told to form
    parked: int = -1  # the last that it has left
    said: Message | None = None  # the last report that may have to be repeated
    why: str = ""  # it is being ended


class Agent(Node):
    commands = {**COMMANDS, **SERVE}

    def __init__(self, client: Conn, lifeline: int, preload: list[str]):
        self.loop = Loop()
        self._masks: dict[Any, int] = {}
        self.link: Link | None = None
        self.name = ""
        self.incarnation = 0
        self.services: dict[str, Service] = {}
        self.mates: dict[int, Mate] = {}
        self.last: dict[int, int] = {}  # rank -> its last worker
        self.seats: dict[int, int] = {}  # rank -> its number among the ranks of this node
        self.queued: dict[int, int] = {}  # rank -> a worker that waits for the end of the one before
        self.health: Health | None = None
        self._most = 0  # ranks here at a time
        self._fenced = False
        self._left: str | None = None  # why the run is over
        self._said_left = False
        self._reset()
        super().__init__(client, lifeline, preload)

    def _reset(self) -> None:
        """With each incarnation."""
        self._welcome = False
        self._joined = self._stepped = 0  # the numbers of posts
        self._address = ("", "")  # of the store and the keeper, as they were last said
        self._gathered: dict[tuple[Any, ...], dict[int, str]] = {}
        self._asks: list[int] = []  # generations, for which the keeper was asked what it holds
        self._halted = -1
        self._done = (0, -1)  # generation, step: the last that was committed
        self._told = (0, -1)  # of that, what the controller knows
        self._pace = (0, 0.0)  # a step, and when it was committed
        self._step_ns = 0

    # -- one loop for workers and network

    def _wait(self, timeout_s: float | None) -> None:
        self.loop.turn() if timeout_s is None else self.loop.turn(timeout_s)

    def _register(self, source: Any, mask: int, callback: Any) -> None:
        if self._masks.get(source, 0) != mask:
            self.loop.watch(source, mask, callback)
            self._masks[source] = mask
            if not mask:
                del self._masks[source]

    # -- coming

    def do_serve(
        self,
        name: str,
        domain: str,
        secret: str,
        aggregators: list[Any],
        beat_s: float,
        dir: str,
        logs: str,
        worker: dict[str, Any],
        services: dict[str, Any],
        host: str = "127.0.0.1",
        halt_s: float = HALT_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        if self.name:
            raise WireError("serve came twice")
        if "store" not in services or not services.keys() <= SERVICES.keys():
            raise WireError(f"serve.services = {sorted(services)}: expected store, and perhaps data and keeper")
        self.name, self.domain, self.beat_s = name, domain, float(beat_s)
        self.halt_s, self.leave_s = float(halt_s), float(leave_s)
        self.secret = load_secret(Path(secret), create=False)
        self.aggregators = [(str(host), int(port)) for host, port in aggregators]
        self.folder, self.logs = Path(dir), Path(logs)
        self.entry, self.args = str(worker["entry"]), {**worker["args"], "host": str(host)}
        for folder in (self.folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        for key, about in services.items():
            self.services[key] = Service(key, str(about["entry"]), {**about["args"], "host": str(host)})
            self._serve(self.services[key])

    def _serve(self, service: Service) -> None:
        if self._left is None:
            log = self.logs / f"{service.name}.log"
            self.do_spawn(service.number, service.entry, service.args, str(log))

    def _boot(self) -> None:
        """As a new incarnation: nothing that was said to an earlier one counts."""
        self.incarnation = next_incarnation(self.folder)
        self._reset()
        me = Identity("agent", self.name, self.incarnation)
        seed = hash((self.name, self.incarnation))
        self.link = Link(
            self.loop,
            self.secret,
            me,
            self.aggregators,
            ORDERED,
            self._commanded,
            on_open=self._opened,
            on_close=self._closed,
            seed=seed,
        )
        self.loop.after(self.beat_s, partial(self._beat, self.incarnation))

    def _opened(self, session: Session) -> None:
        self._tell_beat()  # before anything else: it says where this node can be reached
        self._join()

    def _closed(self, session: Session) -> None:
        """An aggregator that gave this node up has forgotten how far it was with it, and ends a connection that goes on
        from there. From the beginning, some commands may come twice, which does no harm."""
        if self.link:
            self.link._sessions.clear()

    def _beat(self, incarnation: int) -> None:
        if incarnation != self.incarnation or self._fenced:
            return
        self.loop.after(self.beat_s, partial(self._beat, incarnation))
        self._tell_beat()
        self._join()
        self._tell_steps()
        if self.health is None:
            self.health = Health()
        for sign, count in self.health.look():
            self._post(messages.DeviceWarning(self.name, self.incarnation, sign, count))

    def _tell_beat(self) -> None:
        assert self.link
        readings = [self.workers[n].progress.read() for n in self.mates if n in self.workers]
        self.link.tell(
            {
                "type": "beat",
                "visit": self.link.visits,
                "generation": max((mate.formed for mate in self.mates.values()), default=0),
                "step": max([0, self._done[1], *(r.step for r in readings)]),
                "counter": sum(r.counter for r in readings),
                "step_ns": self._step_ns,
            }
        )

    def _join(self) -> None:
        """Until Welcome, and when the store has moved; not again before the last word was heard."""
        store, link = self.services["store"].said, self.link
        if link is None or link.session is None or store is None or link.outbox.acked < self._joined:
            return
        keeper = self.services["keeper"].said if "keeper" in self.services else None
        address = (f"{store['host']}:{store['port']}", f"{self.args['host']}:{keeper['port']}" if keeper else "")
        if not self._welcome or address != self._address:
            self._address = address
            self._joined = self._post(messages.NodeJoined(self.name, self.incarnation, self.domain, *address))

    def _post(self, event: Event) -> int:
        """After what was gathered: the order in which things happened is kept."""
        self._flush()
        return self.link.post({"type": "event", "event": event.to_dict()}) if self.link else 0

    # -- what is heard of services and workers

    def heard(self, w: Worker, body: Message) -> None:
        kind, mate = body.get("type"), self.mates.get(w.number)
        service = next((s for s in self.services.values() if s.number == w.number), None)
        if mate and kind in REPORTS:
            getattr(self, f"_on_{kind}")(mate, check(body, REPORTS))
            if kind != "committed":
                return
        elif service and kind == service.name:
            self._on_service(service, check(body, FIRST))
        elif service and service.name == "keeper":
            self._on_keeper(body)
        elif mate and kind == "error":
            w.error = f"{body.get('kind')}: {body.get('text')}"[:REASON_CHARS]
        super().heard(w, body)

    def _on_service(self, service: Service, body: Message) -> None:
        service.said = {key: value for key, value in body.items() if key != "type"}
        if not all(s.said for s in self.services.values()):
            return
        if self.link is None and not self._fenced:
            self._boot()
        else:
            self._join()
        self._spawn_queued()

    def _on_keeper(self, body: Message) -> None:
        if body.get("type") == "committed" and isinstance(body.get("generation"), int):
            self._post(messages.Durable(int(body["step"]), body["generation"]))
        elif body.get("type") == "held" and self._asks:
            copies = held(body)
            for generation in self._asks:
                self._post(messages.Held(self.name, self.incarnation, generation, copies))
            self._asks = []

    def _on_parked(self, mate: Mate, body: Message) -> None:
        mate.parked, mate.said = max(mate.parked, body["generation"]), body
        self._report(mate)

    def _on_up(self, mate: Mate, body: Message) -> None:
        mate.said = body
        self._report(mate)

    _on_ready = _on_missing = _on_up

    def _on_committed(self, mate: Mate, body: Message) -> None:
        generation, step = body["generation"], body["step"]
        mate.said = None
        if (generation, step) <= self._done:
            return
        now, (last, at) = time.monotonic(), self._pace
        if step > last and at and generation == self._done[0]:
            self._step_ns = round((now - at) / (step - last) * 1e9)
        self._done, self._pace = (generation, step), (step, now)
        if generation > self._told[0]:
            self._tell_steps()

    def _tell_steps(self) -> None:
        """Not again before the last word was heard: a controller that is gone for long needs no history of it."""
        if self._done > self._told and self.link and self.link.outbox.acked >= self._stepped:
            self._told = self._done
            self._stepped = self._post(messages.StepsDone(*self._done))

    def _report(self, mate: Mate) -> None:
        """Where it stands, now or again."""
        body = mate.said
        if body is None:
            return
        kind, me = body["type"], (self.name, self.incarnation)
        if kind == "missing":
            reason = body["reason"][:REASON_CHARS]
            self._post(messages.Missing(*me, body["generation"], mate.number, reason))
            return
        alike = tuple(body[key] for key in REPORTS[kind] if key != "digest")
        if not self._gathered:
            self.loop.after(GATHER_S, self._flush)
        self._gathered.setdefault((kind, *alike), {})[mate.number] = body.get("digest", "")

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        me = (self.name, self.incarnation)
        for (kind, *alike), workers in gathered.items():
            numbers = tuple(sorted(workers))
            try:
                if kind == "up":
                    self._post(messages.WorkersUp(*me, numbers))
                elif kind == "ready":
                    generation, step = alike
                    self._post(messages.Ready(*me, generation, step, workers))
                else:
                    generation, step, prepared, made = alike
                    self._post(messages.Parked(*me, generation, numbers, step, prepared, made))
            except ValueError as error:
                self._end(filter(None, map(self.mates.get, numbers)), f"has reported what cannot be: {error}")

    def ended(self, w: Worker, event: Message) -> None:
        super().ended(w, event)
        service = next((s for s in self.services.values() if s.number == w.number), None)
        mate = self.mates.pop(w.number, None)
        if service:
            self._lost(service)
        if mate:
            reason = mate.why or w.error or event["error"] or _how(event)
            self._post(messages.WorkerDied(self.name, self.incarnation, mate.number, reason[:REASON_CHARS]))
        self._spawn_queued()
        if self._fenced and not self._living():
            self._fenced = False
            self._boot()
        if self._left is not None and not self._living():
            self._say_left()

    def _lost(self, service: Service) -> None:
        """It is started again. Workers that had it open cannot go on without it, but the store they need only to
        meet."""
        service.said = None
        if service.name != "store":
            self._asks = []
            what = "data service" if service.name == "data" else "keeper"
            self._end(self.mates.values(), f"was ended: its {what} died")
        service.deaths += 1
        first, most = AGAIN_S
        self.loop.after(min(most, first * 2 ** min(service.deaths - 1, 10)), partial(self._serve, service))

    def hung(self, event: Message) -> None:
        """A worker that waits for others may wait for one on another node, whose agent sees to it. If it is still
        there much later, nobody does."""
        super().hung(event)
        culprits = [self.mates[number] for number in event["workers"] if number in self.mates]
        why = f"hangs: it {event['reason']}"
        if event["waits"]:
            readings = {mate.number: self.workers[mate.number].progress.read() for mate in culprits}
            patience_s = (hang.SOLO_FACTOR - 1) * self.watch.limit_ns / 1e9
            self.loop.after(patience_s, partial(self._still_hung, readings, why))
        else:
            self._end(culprits, why)

    def _still_hung(self, readings: dict[int, Reading], why: str) -> None:
        same = [n for n, r in readings.items() if n in self.mates and self.workers[n].progress.read() == r]
        self._end([self.mates[number] for number in same], why)

    def _end(self, mates: Iterable[Mate], why: str) -> None:
        for mate in list(mates):
            mate.why = mate.why or why
            if mate.number in self.workers:
                self.workers[mate.number].kill()

    def _living(self) -> list[int]:
        """Processes of workers, also of those that an earlier incarnation had."""
        return [number for number in self.workers if number >= 0]

    # -- what the controller says

    def _commanded(self, session: Session, number: int, body: Message) -> None:
        try:
            command = self._command_of(body["command"])
        except ValueError as error:  # of another release, perhaps
            kernel.complain(f"a command was not understood: {error}")
        else:
            getattr(self, "obey_" + type(command).__name__, lambda command: None)(command)

    def _command_of(self, body: Message) -> Command:
        """What is the same for all nodes, or for another, is left out on the way."""
        known: Any = messages.KINDS.get(str(body.get("kind")))
        absent: Message = {"nodes": [self.name], "crew": {}, "places": {}, "sources": {}}
        return Command.from_dict({**{k: v for k, v in absent.items() if known and k in codec.hints(known)}, **body})

    def _to(self, mates: Iterable[Mate], kind: str, **fields: Any) -> None:
        for mate in list(mates):
            self.do_send(mate.number, {"type": kind, **fields})

    def obey_Welcome(self, command: messages.Welcome) -> None:
        self._welcome = self._welcome or command.incarnation == self.incarnation

    def obey_Fence(self, command: messages.Fence) -> None:
        """Back when the last of them is gone: until then it may hold a device."""
        if command.incarnation != self.incarnation or self._fenced:
            return
        assert self.link
        self.link.close()
        self.link, self._fenced, self.queued, self._gathered = None, True, {}, {}
        self._end(self.mates.values(), "was fenced")
        self.mates.clear()
        for number in self._living():
            self.workers[number].kill()
        if not self._living():
            self._fenced = False
            self._boot()

    def obey_Launch(self, command: messages.Launch) -> None:
        if command.incarnation != self.incarnation or self._left is not None:
            return
        for rank, number in command.workers.items():
            if number in self.mates:
                self._report(self.mates[number])
            elif self.queued.get(rank) == number:
                pass
            elif self.last.get(rank, 0) >= number:
                self._post(messages.WorkerDied(self.name, self.incarnation, number, "has ended"))
            else:
                self.last[rank] = self.queued[rank] = number
                self._end((m for m in self.mates.values() if m.rank == rank), "was replaced")
        self._spawn_queued()

    def _spawn_queued(self) -> None:
        """Those whose rank nobody has here any more."""
        if not all(service.said for service in self.services.values()) or self._fenced:
            return
        here = {mate.rank for mate in self.mates.values()}
        ready = {rank: number for rank, number in sorted(self.queued.items()) if rank not in here}
        self.seats = {rank: seat for rank, seat in self.seats.items() if rank in here or rank in ready}
        for rank in ready:
            taken = set(self.seats.values())
            self.seats.setdefault(rank, next(i for i in range(len(taken) + 1) if i not in taken))
        self._most = max(self._most, len(self.seats))
        for rank, number in ready.items():
            del self.queued[rank]
            self.mates[number] = Mate(rank, number)
            self.client.push({"type": "launched", "worker": number, "rank": rank})
            self.do_spawn(number, self.entry, self._args(rank, number), str(self.logs / f"rank-{rank:05d}.log"))

    def _args(self, rank: int, number: int) -> dict[str, Any]:
        about = {"rank": rank, "worker": number, "local_rank": self.seats[rank], "local_ranks": self._most}
        said = {
            name: {**(self.args.get(name) or {}), **(self.services[name].said or {})} if name in self.services else None
            for name in ("data", "keeper")
        }
        return {**self.args, **about, **said, "node": self.name}

    def obey_Kill(self, command: messages.Kill) -> None:
        for number in command.workers:
            self.queued = {rank: worker for rank, worker in self.queued.items() if worker != number}
            if number in self.mates:
                self._end([self.mates[number]], "was ended")
            else:
                self._post(messages.WorkerDied(self.name, self.incarnation, number, "was ended"))

    def obey_Release(self, command: messages.Release) -> None:
        self.client.push({"type": "released"})

    def obey_Leave(self, command: messages.Leave) -> None:
        self._welcome = True
        if self._left is not None:
            return
        self._left, self.queued = command.reason, {}
        self._to(self.mates.values(), "leave", reason=command.reason)
        self.loop.after(self.leave_s, lambda: self._end(self.mates.values(), "did not leave in time"))
        if not self._living():
            self._say_left()

    def _say_left(self) -> None:
        if not self._said_left:
            self._said_left = True
            self.client.push({"type": "left", "reason": self._left})

    def obey_Halt(self, command: messages.Halt) -> None:
        generation = command.generation
        for mate in self.mates.values():
            if mate.parked >= generation:
                self._report(mate)
        self._to((m for m in self.mates.values() if m.parked < generation), "halt", generation=generation)
        if generation > self._halted:
            self._halted = generation
            self.loop.after(self.halt_s, partial(self._check_parked, self.incarnation, generation))

    def _check_parked(self, incarnation: int, generation: int) -> None:
        if incarnation == self.incarnation:
            late = [m for m in self.mates.values() if 0 < m.formed <= generation and m.parked < m.formed]
            self._end(late, f"did not leave its groups in {self.halt_s:g} s")

    def obey_Pause(self, command: messages.Pause) -> None:
        for mate in self.mates.values():
            if mate.parked >= command.generation:
                self._report(mate)
        self._to(self.mates.values(), "pause", generation=command.generation)

    def obey_Form(self, form: messages.Form) -> None:
        where: Message = {"generation": form.generation, "step": form.step, "store": form.store}
        donors = {s.number for s in form.sources.values() if s.kind == "live"} - {*form.crew.values()}
        self._to((self.mates[number] for number in donors if number in self.mates), "serve", **where)
        for rank, number in form.crew.items():
            mate = self.mates.get(number)
            if mate is None:
                self._post(messages.WorkerDied(self.name, self.incarnation, number, "has ended"))
            elif mate.formed == form.generation:
                self._report(mate)
            elif mate.formed < form.generation:
                mate.formed, mate.said = form.generation, None
                source = codec.encode(form.sources.get(rank))
                more = {"replicas": list(form.replicas), "rank": rank, "source": source, "branch": form.branch}
                self._to([mate], "form", **where, **more)

    def obey_Start(self, command: messages.Start) -> None:
        for mate in self.mates.values():
            if mate.formed == command.generation:
                if mate.said and mate.said["type"] == "parked":
                    self._report(mate)
                self._to([mate], "start", generation=command.generation)

    def obey_Ask(self, command: messages.Ask) -> None:
        keeper = self.services.get("keeper")
        if keeper and keeper.said:
            self._asks = [*{*self._asks, command.generation}]
            self.do_send(keeper.number, {"type": "held"})
        else:
            self._post(messages.Held(self.name, self.incarnation, command.generation, ()))

    def obey_Save(self, command: messages.Save) -> None:
        self._to(self.mates.values(), "save", generation=command.generation, step=command.step)


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


def held(body: Message) -> tuple[tuple[int, int, int], ...]:
    """What a keeper says that it holds: rank, step, generation. One that cannot tell the generation has {rank: [step]},
    of the first."""
    copies: set[tuple[int, int, int]] = {(int(r), int(s), int(g)) for r, s, g in body.get("copies", ())}
    if "copies" not in body:
        for rank, steps in body.get("steps", {}).items():
            made = steps if isinstance(steps, dict) else defaultdict(int, dict.fromkeys(steps, 0))
            copies |= {(int(rank), int(step), int(made[step])) for step in steps}
    return tuple(sorted(copies))


def _how(event: Message) -> str:
    if event["signal"]:
        return f"was killed by {event['signal']}"
    return f"exited with code {event['code']}"


if __name__ == "__main__":
    main(sys.argv[1:], Agent)
