"""The node's half of the protocol: which workers and services live here, what they are told, and what the controller
hears of them. `runtime.node` carries out its actions and reports events to it; the simulation does the same.

While the controller is gone, nothing stops until the lease ends. Then the workers part and keep their state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.messages import Command, Event, Failure
from phalanx.control.pace import Pace
from phalanx.control.policy import S

SERVICES = {"store": -1, "data": -2, "keeper": -3}  # their worker numbers
GATHER_NS = 2_000_000  # equal reports within this time become one event
WRITTEN_NS = 20_000_000  # the same for files of a checkpoint
HALT_NS = 8 * S  # from "halt" to "parked"
LEAVE_NS = 20 * S  # from "leave" to the exit
END_NS = 10 * S  # from SIGKILL to the end of a process
AGAIN_NS = (S // 10, 5 * S)  # the first and the longest pause before a dead service is restarted
REASON_CHARS = 1000
Body = dict[str, Any]

#: The reports of workers to their agent: the fields of each message, and their types.
REPORTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "up": {"port": int},
    "built": {"world": int},
    "parked": {"world": int, "step": int, "prepared": int, "made": int, "why": (dict, type(None))},
    "formed": {"world": int, "generation": int},
    "parted": {"world": int, "generation": int, "step": int, "prepared": int, "made": int, "kept": bool},
    "missing": {"generation": int, "reason": str, "damaged": bool, "groups": bool},
}


# -- actions


@dataclass(frozen=True, slots=True)
class Post:
    """Send an event to the controller, exactly once."""

    event: Event


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a service (`name`) or a worker (""). `args`: in addition to those that all processes get."""

    number: int
    name: str
    args: Body


@dataclass(frozen=True, slots=True)
class Send:
    number: int
    body: Body


@dataclass(frozen=True, slots=True)
class End:
    """Send SIGKILL. A call of `ended` follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """Call `fire` at that time. A later alarm of the same name replaces it."""

    name: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the process that started this node."""

    body: Body


@dataclass(frozen=True, slots=True)
class Watch:
    """Look for workers that stand still for this long."""

    limit_ns: int


@dataclass(frozen=True, slots=True)
class Count:
    """Count how far workers have come, and answer with `counted`."""


@dataclass(frozen=True, slots=True)
class Reboot:
    """Connect as a greater incarnation, and answer with `booted`."""


@dataclass(frozen=True, slots=True)
class Redial:
    """Drop the connection and try the next aggregator: this one has lost the controller."""


Action = Post | Spawn | Send | End | Alarm | Tell | Watch | Count | Reboot | Redial


# -- who lives here


@dataclass(slots=True)
class Service:
    said: Body | None = None  # its first message; None: it is not up
    deaths: int = 0
    error: tuple[str, str] = ("", "")


@dataclass(slots=True)
class Mate:
    """A worker of the gang."""

    rank: int
    replica: int = -1
    world: int = 0  # the last that it was told to build, or to leave
    parked: int = 0  # the last world that it has left
    formed: int = 0  # the last generation that it was told to form
    said: Body | None = None  # the last report, which may have to be repeated
    error: tuple[str, str] = ("", "")  # kind and text of its exception
    hang: str = ""
    why: str = ""  # why it is being ended


@dataclass
class Agent:
    name: str
    domain: str
    services: dict[str, Service]
    pace: Pace = field(default_factory=Pace)
    host: str = ""
    halt_ns: int = HALT_NS
    leave_ns: int = LEAVE_NS
    end_ns: int = END_NS
    incarnation: int = 0
    now_ns: int = 0
    alarms: dict[str, int] = field(default_factory=dict)
    mates: dict[int, Mate] = field(default_factory=dict)
    living: set[int] = field(default_factory=set)  # processes of workers, also of earlier incarnations
    last: dict[int, int] = field(default_factory=dict)  # rank -> its last worker
    seats: dict[int, int] = field(default_factory=dict)  # rank -> its number among the ranks of this node
    queued: dict[int, int] = field(default_factory=dict)  # rank -> a worker that waits for the end of the one before
    most: int = 0  # the most ranks that were here at a time
    fenced: bool = False
    left: str = ""  # why the run is over
    told_left: bool = False
    # Reset with each incarnation:
    linked: bool = False
    welcome: bool = False
    posted: int = 0  # events
    acked: int = 0
    joined: int = 0  # the number of the last NodeJoined
    stepped: int = 0  # the number of the last StepsDone
    address: tuple[str, str] = ("", "")  # of the workers and the keeper, as last reported
    done: tuple[int, int] = (0, -1)  # generation, step: the last that was committed
    told: tuple[int, int] = (0, -1)  # the last that was reported to the controller
    asks: list[int] = field(default_factory=list)  # generations for which the keeper was asked what it holds

    def __post_init__(self) -> None:
        self._out: list[Action] = []
        self._gathered: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._pieces: dict[tuple[int, int], dict[int, list[Any]]] = {}  # of an order to commit, by their first rank

    def take(self) -> list[Action]:
        """Return the actions to carry out, in order, and forget them."""
        out, self._out = self._out, []
        return out

    def _do(self, action: Action) -> None:
        self._out.append(action)

    def _alarm(self, name: str, after_ns: int) -> None:
        self.alarms[name] = self.now_ns + after_ns
        self._do(Alarm(name, self.alarms[name]))

    def fire(self, now_ns: int, name: str) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        if self.alarms.get(name, self.now_ns + 1) > self.now_ns:
            return
        del self.alarms[name]
        kind, _, about = name.partition(" ")
        if kind == "gather":
            self._flush()
        elif kind == "parked":
            self._check_parked(int(about))
        elif kind == "serve":
            self._serve(about)
        elif kind == "leave":
            self._end(self.mates, "did not leave in time")
            if not self.mates:  # processes of an earlier incarnation, which were killed long ago
                self._tell_left()
        elif kind == "ended":
            self._outlived(int(about))
        elif kind == "lease":
            self._lapse()
        elif kind == "redial" and self.linked:
            self._do(Redial())

    # -- coming

    def begin(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._do(Watch(self.pace.limit_ns))
        for name in self.services:
            self._serve(name)

    def _serve(self, name: str) -> None:
        if not self.left:
            self._do(Spawn(SERVICES[name], name, {}))

    def booted(self, now_ns: int, incarnation: int) -> None:
        """Begin a new incarnation: nothing that an earlier one was told counts."""
        self.now_ns, self.incarnation = max(self.now_ns, now_ns), incarnation
        self.linked = self.welcome = False
        self.posted = self.acked = self.joined = self.stepped = 0
        self.address, self.done, self.told = ("", ""), (0, -1), (0, -1)
        self.asks, self._gathered = [], {}
        self._do(Tell({"type": "booted", "incarnation": incarnation}))

    def connected(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        self.linked = True
        self._join()

    def disconnected(self) -> None:
        self.linked = False

    def acknowledged(self, number: int) -> None:
        """Note that the controller has heard all events up to this number."""
        self.acked = max(self.acked, number)

    def beat(self, now_ns: int) -> Body | None:
        """Return the content of a heartbeat. None: the node is silent until it comes back as another incarnation, which
        may take forever if the kernel does not let its workers end."""
        self.now_ns = max(self.now_ns, now_ns)
        if self.fenced:
            return None
        self._join()
        self._tell_steps()
        generation = max((mate.formed for mate in self.mates.values()), default=0)
        step_ns = next(reversed(self.pace.times.values()), 0)
        return {"generation": generation, "step": max(0, self.done[1]), "step_ns": step_ns}

    def renew(self, now_ns: int, until_ns: int) -> None:
        """Renew the lease: the controller was heard of, so the workers may train until `until_ns`."""
        self.now_ns = max(self.now_ns, now_ns)
        if until_ns > self.alarms.get("lease", self.now_ns) and not self.fenced:
            self._alarm("lease", until_ns - self.now_ns)
            self._alarm("redial", (until_ns - self.now_ns) // 2)

    def _lapse(self) -> None:
        """Stop training, and keep the state: the controller has been silent for so long that it may have given this
        node up."""
        for number, mate in self.mates.items():
            if mate.formed:
                self._do(Send(number, {"type": "part", "generation": mate.formed}))

    def _is_up(self) -> bool:
        return all(service.said is not None for service in self.services.values())

    def _join(self) -> None:
        """Announce this node until Welcome, and when the keeper has moved; not again before the last announcement was
        heard."""
        if not self.linked or self.fenced or not self._is_up() or self.acked < self.joined:
            return
        keeper = self.services["keeper"].said if "keeper" in self.services else None
        address = (self.host, f"{self.host}:{keeper['port']}" if keeper else "")
        if not self.welcome or address != self.address:
            self.address = address
            self._post(messages.NodeJoined(self.name, self.incarnation, self.domain, *address))
            self.joined = self.posted

    def _post(self, event: Event) -> None:
        """Post an event after those that were gathered, to keep the order in which things happened."""
        self._flush()
        self._do_post(event)

    def _do_post(self, event: Event) -> None:
        if self.incarnation and not self.fenced:
            self.posted += 1
            self._do(Post(event))

    # -- services

    def service_said(self, now_ns: int, name: str, body: Body) -> None:
        """Handle the first message of a service."""
        self.now_ns = max(self.now_ns, now_ns)
        self.services[name].said = {key: value for key, value in body.items() if key != "type"}
        if not self._is_up():
            return
        if not self.incarnation and not self.fenced:
            self._do(Reboot())
        else:
            self._join()
        self._spawn_queued()

    def keeper_said(self, now_ns: int, body: Body) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        kind, node, number = body.get("type"), self.name, self.incarnation
        if kind == "shard":
            about = (body["checkpoint"], body["step"], body["generation"], body["ranks"], body["seal"])
            self._gather(("written", *about), body["rank"], (body["size"], body["root"], int(body["drain_s"] * S)))
        elif kind == "checkpoint_failed" and body.get("where") != "buddy":
            reason = str(body["reason"])[:REASON_CHARS]
            name, gone = str(body.get("checkpoint", "")), bool(body.get("gone"))
            step, generation, rank = body["step"], body["generation"], body["rank"]
            self._post(messages.Unwritten(node, number, name, step, generation, rank, reason, gone))
        elif kind == "committed":
            self._post(messages.Durable(body["step"], body["generation"]))
            self.pace.committed(body["step"], int(body["drain_s"] * S))
        elif kind == "held" and self.asks:
            copies = tuple(sorted({(int(r), int(s), int(g)) for r, s, g in body["copies"]}))
            for generation in self.asks:
                self._post(messages.Held(node, number, generation, copies))
            self.asks = []

    def _to_keeper(self, body: Body) -> bool:
        keeper = self.services.get("keeper")
        if keeper is None or keeper.said is None:
            return False
        self._do(Send(SERVICES["keeper"], body))
        return True

    # -- workers

    def worker_said(self, now_ns: int, number: int, body: Body) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        mate, kind = self.mates.get(number), body.get("type")
        if mate is None:
            return
        if kind in REPORTS:
            mate.said = body
            if kind == "parked":
                mate.parked = max(mate.parked, body["world"])
            self._report(number, mate)
        elif kind == "step":
            self._on_step(mate, body)
        elif kind == "error":
            mate.error = (str(body.get("kind")), str(body.get("text")))

    def service_raised(self, name: str, kind: str, text: str) -> None:
        self.services[name].error = (kind, text)

    def _on_step(self, mate: Mate, body: Body) -> None:
        """Handle the report of a committed step. The report counts steps from 0, so the state has seen one more."""
        generation, step = body["generation"], body["step"] + 1
        mate.said = None
        taken, snapshot = int(body["time_s"] * S), body.get("snapshot")
        if taken:
            found = (snapshot["step"], int(snapshot["stall_s"] * S)) if snapshot else None
            if self.pace.step(step, taken, found):
                self._do(Watch(self.pace.limit_ns))
            for cost in self.pace.costs():
                self._post(cost)
        if (generation, step) > self.done:
            self.done = (generation, step)
            if generation > self.told[0]:
                self._tell_steps()

    def _tell_steps(self) -> None:
        """Report the last committed step, but not before the last report was heard: a controller that is gone for long
        needs no history."""
        if self.done > self.told and self.acked >= self.stepped:
            self.told = self.done
            self._post(messages.StepsDone(*self.done))
            self.stepped = self.posted

    def _report(self, number: int, mate: Mate) -> None:
        """Report where a worker stands, now or again."""
        body = mate.said
        if body is None:
            return
        kind = body["type"]
        node, me = self.name, self.incarnation
        if kind == "missing":
            about = (body["generation"], number, body["reason"][:REASON_CHARS], body["damaged"], body["groups"])
            self._post(messages.Missing(node, me, *about))
        elif kind == "formed":
            self._post(messages.Formed((mate.replica,), (body["world"],), body["generation"]))
        elif kind == "parted":
            held = (body["step"], body["prepared"], body["made"], body["kept"])
            self._post(messages.Parted((mate.replica,), (body["world"],), body["generation"], *held))
        else:
            alike = tuple(body[key] for key in REPORTS[kind] if key not in ("why", "port"))
            why = (Failure(**body["why"]) if body["why"] else None,) if kind == "parked" else ()
            self._gather((kind, mate.replica, *alike, *why), number, body.get("port"))

    def _gather(self, key: tuple[Any, ...], number: int, value: Any) -> None:
        if not self._gathered:
            self._alarm("gather", WRITTEN_NS if key[0] == "written" else GATHER_NS)
        elif key[0] != "written" and self.alarms.get("gather", 0) > self.now_ns + GATHER_NS:
            self._alarm("gather", GATHER_NS)
        self._gathered.setdefault(key, {})[number] = value

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        node, me = self.name, self.incarnation
        for (kind, *alike), found in gathered.items():
            numbers = tuple(sorted(found))
            try:
                if kind == "up":
                    self._do_post(messages.WorkersUp(node, me, numbers, tuple(found[n] for n in numbers)))
                elif kind == "built":
                    self._do_post(messages.Built((node,), (me,), (numbers,), alike[1]))
                elif kind == "parked":
                    _, world, step, prepared, made, why = alike
                    self._do_post(messages.Parked((node,), (me,), (numbers,), world, step, prepared, made, why))
                else:
                    checkpoint, step, generation, ranks, seal = alike
                    files = {rank: (size, root) for rank, (size, root, _) in found.items()}
                    drain_ns = max(drain for _, _, drain in found.values())
                    written = (checkpoint, step, generation, ranks, files, seal, drain_ns)
                    self._do_post(messages.Written(node, me, *written))
            except ValueError as error:
                self._end(numbers, f"has reported what cannot be: {error}")

    def counted(self, now_ns: int, counters: dict[int, int]) -> None:
        """Report how far workers have come, by number."""
        self.now_ns = max(self.now_ns, now_ns)
        known = {number: counter for number, counter in counters.items() if number in self.mates}
        known |= dict.fromkeys(self.queued.values(), 0)
        self._post(messages.Standing(self.name, self.incarnation, known))

    def hung(self, now_ns: int, numbers: Iterable[int], reason: str) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        for number in numbers:
            if number in self.mates:
                self.mates[number].hang = self.mates[number].hang or reason
                self._kill_process(number)

    def warn(self, sign: str, count: int) -> None:
        self._post(messages.DeviceWarning(self.name, self.incarnation, sign, count))

    def link_changed(self, link: str, up: bool) -> None:
        """Report that a network of this node came or went. Ranks that use it leave their groups."""
        kind = messages.LinkBack if up else messages.LinkLost
        self._post(kind(self.name, self.incarnation, link))
        self._to(self.mates, "link", interface=link, up=up)

    def ended(self, now_ns: int, number: int, how: Failure) -> None:
        """Handle the end of a process. `how`: its signal or code, its phase and step, and the end of its log."""
        self.now_ns = max(self.now_ns, now_ns)
        name = next((name for name, at in SERVICES.items() if at == number), "")
        if name:
            self._lost(name, how)
        self.living.discard(number)
        self.alarms.pop(f"ended {number}", None)
        mate = self.mates.pop(number, None)
        if mate:
            kind, text = mate.error
            failure = Failure(
                kind, (text or mate.why or how.text)[:REASON_CHARS], how.signal, how.code, mate.hang, how.phase,
                how.step, how.tail,
            )  # fmt: skip
            self._post(messages.WorkerDied(self.name, self.incarnation, number, failure))
        self._spawn_queued()
        if self.fenced and not self.living:
            self.fenced = False
            self._do(Reboot())
        if self.left and not self.living:
            self._tell_left()

    def _lost(self, name: str, how: Failure) -> None:
        """Restart a service. Workers that had it open cannot continue without it; they need the store only to meet."""
        service = self.services[name]
        kind, text = service.error
        service.said, service.error = None, ("", "")
        if self.left:
            return
        if name != "store":
            self.asks = []
            what = "data service" if name == "data" else "keeper"
            self._end(self.mates, f"was ended: its {what} died")
        service.deaths += 1
        failure = Failure(kind, (text or how.text)[:REASON_CHARS], how.signal, how.code, tail=how.tail)
        self._post(messages.ServiceDied(self.name, self.incarnation, name, failure))
        first, most = AGAIN_NS
        self._alarm(f"serve {name}", min(most, first << min(service.deaths - 1, 10)))

    def _end(self, numbers: Iterable[int], why: str) -> None:
        for number in list(numbers):
            if number in self.mates:
                self.mates[number].why = self.mates[number].why or why
                self._kill_process(number)

    def _kill_process(self, number: int) -> None:
        self._do(End(number))
        if f"ended {number}" not in self.alarms:
            self._alarm(f"ended {number}", self.end_ns)

    def _outlived(self, number: int) -> None:
        """Report a worker dead although its process is still there after SIGKILL. The kernel holds it, so it will do
        nothing more, and its peers need not wait for it. Its rank cannot start here before it is gone."""
        mate = self.mates.get(number)
        if mate:
            text = f"did not end in {self.end_ns / S:g} s after SIGKILL: a driver or a file system may hold it"
            failure = Failure(text=text, hang=mate.hang)
            self._post(messages.WorkerDied(self.name, self.incarnation, number, failure))
        if self.left:
            self._tell_left()

    # -- what the controller says

    def obey(self, now_ns: int, command: Command) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        OBEY.get(type(command), lambda agent, command: None)(self, command)

    def _to(self, numbers: Iterable[int], kind: str, **fields: Any) -> None:
        for number in numbers:
            self._do(Send(number, {"type": kind, **fields}))

    def _welcomed(self, command: messages.Welcome) -> None:
        self.welcome = self.welcome or command.incarnation == self.incarnation

    def _fence(self, command: messages.Fence) -> None:
        """End all workers. The node comes back when the last one is gone: until then it may hold a device."""
        if command.incarnation == self.incarnation and not self.fenced:
            self.reset()

    def reset(self) -> None:
        """End all workers, and come back as a greater incarnation."""
        self.fenced, self.queued, self._gathered = True, {}, {}
        self.alarms.pop("lease", None)
        self.mates.clear()
        for number in sorted(self.living):
            self._kill_process(number)
        if not self.living:
            self.fenced = False
            self._do(Reboot())

    def _launch(self, command: messages.Launch) -> None:
        if command.incarnation != self.incarnation or self.left or self.fenced:
            return
        for rank, number in command.workers.items():
            if number in self.mates:
                self._report(number, self.mates[number])
            elif self.queued.get(rank) == number:
                pass
            elif self.last.get(rank, 0) >= number:
                self._died(number, "has ended")
            else:
                self.last[rank] = self.queued[rank] = number
                self._end([n for n, mate in self.mates.items() if mate.rank == rank], "was replaced")
        self._spawn_queued()

    def _died(self, number: int, text: str) -> None:
        self._post(messages.WorkerDied(self.name, self.incarnation, number, Failure(text=text)))

    def _spawn_queued(self) -> None:
        """Start the queued workers whose rank nobody has here any more."""
        if not self._is_up() or self.fenced or not self.queued:
            return
        here = {mate.rank for mate in self.mates.values()}
        ready = {rank: number for rank, number in sorted(self.queued.items()) if rank not in here}
        self.seats = {rank: seat for rank, seat in self.seats.items() if rank in here or rank in ready}
        for rank in ready:
            taken = set(self.seats.values())
            self.seats.setdefault(rank, next(i for i in range(len(taken) + 1) if i not in taken))
        self.most = max(self.most, len(self.seats))
        for rank, number in ready.items():
            del self.queued[rank]
            self.mates[number] = Mate(rank)
            self.living.add(number)
            self._do(Tell({"type": "launched", "worker": number, "rank": rank}))
            about: Body = {"rank": rank, "worker": number, "node": self.name}
            about |= {"local_rank": self.seats[rank], "local_ranks": self.most}
            about |= {name: self.services[name].said if name in self.services else None for name in ("data", "keeper")}
            self._do(Spawn(number, "", about))

    def _kill(self, command: messages.Kill) -> None:
        for number in command.workers:
            self.queued = {rank: worker for rank, worker in self.queued.items() if worker != number}
            if number in self.mates:
                self._end([number], "was ended")
            else:
                self._died(number, "was ended")

    def _release(self, command: messages.Release) -> None:
        self._do(Tell({"type": "released"}))

    def _leave(self, command: messages.Leave) -> None:
        self.welcome = True
        if self.left:
            return
        self.left, self.queued = command.reason or "the run is over", {}
        self._to(self.mates, "leave", reason=self.left)
        self._alarm("leave", self.leave_ns)
        if not self.living:
            self._tell_left()

    def _tell_left(self) -> None:
        if not self.told_left:
            self.told_left = True
            self._do(Tell({"type": "left", "reason": self.left}))

    def _build(self, command: messages.Build) -> None:
        about: Body = {"world": command.world, "replica": command.replica, "store": self._store}
        for rank, number in command.crew.items():
            mate = self.mates.get(number)
            if mate is None:
                if number not in self.queued.values():
                    self._died(number, "has ended")
            elif mate.world == command.world:
                self._report(number, mate)
            elif mate.world < command.world:
                mate.world, mate.replica, mate.said = command.world, command.replica, None
                self._allow(number, f"replica {command.replica}", command.world)
                self._to([number], "build", rank=rank, **about)

    def _allow(self, number: int, what: str, meeting: int) -> None:
        """Let a worker into a meeting, and out of the one before, so that what it sets reaches no other meeting."""
        self._do(Send(SERVICES["store"], {"type": "allow", "worker": number, "scope": [what, meeting]}))

    @property
    def _store(self) -> str:
        """Return the address where workers here meet others; "": the store is being restarted."""
        return str((self.services["store"].said or {}).get("address", ""))

    def _halt(self, command: messages.Halt) -> None:
        for number in command.workers:
            mate = self.mates.get(number)
            if mate is None:
                self._died(number, "has ended")
            elif mate.parked >= command.world:
                self._report(number, mate)
            elif mate.world <= command.world:
                mate.world = command.world
                self._do(Send(number, {"type": "halt", "world": command.world}))
                if f"parked {command.world}" not in self.alarms:  # a repeated command gives no more time
                    self._alarm(f"parked {command.world}", self.halt_ns)

    def _check_parked(self, world: int) -> None:
        late = [n for n, m in self.mates.items() if m.world == world and m.parked < world]
        self._end(late, f"did not leave its groups in {self.halt_ns / S:g} s")

    def _part(self, command: messages.Part) -> None:
        for number, mate in self.mates.items():
            if mate.world in command.worlds:
                mate.formed = max(mate.formed, command.generation)
                if mate.said and mate.said["type"] == "parted" and mate.said["generation"] == command.generation:
                    self._report(number, mate)
                else:
                    self._do(Send(number, {"type": "part", "generation": command.generation}))

    def _pause(self, command: messages.Pause) -> None:
        for number, mate in self.mates.items():
            if mate.formed == command.generation:
                if mate.said and mate.said["type"] == "parted":
                    self._report(number, mate)
                self._do(Send(number, {"type": "pause", "generation": command.generation}))

    def _form(self, form: messages.Form) -> None:
        worlds = dict(zip(form.replicas, form.worlds, strict=True))
        where: Body = {"generation": form.generation, "step": form.step, "store": self._store}
        sources = form.by_rank()
        donors = {s.number for s in sources.values() if s.kind == "live"}
        if address := form.buddies.get(self.name):
            host, _, port = address.rpartition(":")
            self._to_keeper({"type": "buddy", "host": host, "port": int(port)})
        for number, mate in self.mates.items():
            gives = number in donors
            if worlds.get(mate.replica) != mate.world or mate.parked >= mate.world:
                if gives:
                    self._to([number], "serve", **where)
            elif mate.formed == form.generation:
                self._report(number, mate)
            elif mate.formed < form.generation:
                mate.formed, mate.said = form.generation, None
                self._allow(number, "gang", form.generation)
                source = codec.encode(form.every or sources.get(mate.rank))
                more = {"replicas": list(form.replicas), "world": mate.world, "rank": mate.rank, "source": source}
                more |= {"gives": gives, "joins": form.joins, "branch": form.branch, "kept": form.kept}
                self._to([number], "form", **where, **more)

    def _probe(self, command: messages.Probe) -> None:
        self._do(Count())

    def _ask(self, command: messages.Ask) -> None:
        if self._to_keeper({"type": "held"}):
            self.asks = [*{*self.asks, command.generation}]
        else:
            self._post(messages.Held(self.name, self.incarnation, command.generation, ()))

    def _save(self, command: messages.Save) -> None:
        self._to(self.mates, "save", generation=command.generation, step=command.step)

    def _write(self, command: messages.Write) -> None:
        body = {"type": "write", "step": command.step, "generation": command.generation}
        if not self._to_keeper(body):
            self._unwritten(command.step, command.generation, 0)

    def _commit(self, command: messages.Commit) -> None:
        key = (command.step, command.generation)
        found = self._pieces.get(key, {})
        found[command.first] = codec.encode(command.files)
        self._pieces = {key: found}
        if sum(map(len, found.values())) < command.ranks:
            return
        self._pieces = {}
        body = {name: getattr(command, name) for name in ("checkpoint", "step", "generation", "seal")}
        body["files"] = [file for _, files in sorted(found.items()) for file in files]
        if not self._to_keeper({"type": "commit", **body}):
            self._unwritten(command.step, command.generation, -1)

    def _unwritten(self, step: int, generation: int, rank: int) -> None:
        reason = f"the keeper of node {self.name} is not there"
        self._post(messages.Unwritten(self.name, self.incarnation, "", step, generation, rank, reason))

    def _profile(self, command: messages.Profile) -> None:
        self._to(self.mates, "profile", first=command.first, last=command.last, ranks=list(command.ranks))

    def _interval(self, command: messages.Interval) -> None:
        about = {"version": command.version, "steps": command.steps, "memory_steps": command.memory_steps}
        self._to(self.mates, "interval", **about)


OBEY: dict[type[Command], Any] = {
    messages.Welcome: Agent._welcomed,
    messages.Fence: Agent._fence,
    messages.Launch: Agent._launch,
    messages.Kill: Agent._kill,
    messages.Release: Agent._release,
    messages.Leave: Agent._leave,
    messages.Build: Agent._build,
    messages.Halt: Agent._halt,
    messages.Part: Agent._part,
    messages.Pause: Agent._pause,
    messages.Form: Agent._form,
    messages.Probe: Agent._probe,
    messages.Ask: Agent._ask,
    messages.Save: Agent._save,
    messages.Write: Agent._write,
    messages.Commit: Agent._commit,
    messages.Interval: Agent._interval,
    messages.Profile: Agent._profile,
}
