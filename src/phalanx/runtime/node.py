"""The node process, one per host. Anything may start it: `phalanx agent --join HOST:PORT --secret FILE`. It takes stock
of the host, joins, learns what to serve, and carries out what `control.agent` decides: it forks services and workers,
speaks with an aggregator, and watches for hangs. It ends when the run is over, when it has heard no controller for too
long, or, with `--attached`, when its standard input ends. All processes below it end with it.

It has one thread and one loop, and never blocks: a slow record holds back the workers' messages, not the node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.control import agent as machine
from phalanx.control import codec, messages
from phalanx.control.agent import Agent, Service
from phalanx.control.messages import Command, Failure
from phalanx.control.pace import Pace
from phalanx.control.policy import MISSED_BEATS
from phalanx.core.carrier import is_up
from phalanx.core.errors import UserError
from phalanx.observe.fold import fold_of
from phalanx.runtime import inventory, kernel, zygote
from phalanx.runtime.aggregator import COMMANDS, tell_store
from phalanx.runtime.forked import Channel
from phalanx.runtime.health import Monitor
from phalanx.runtime.hosting import Host
from phalanx.runtime.joining import Joiner, Refusal
from phalanx.runtime.launch import GIVE_UP_S
from phalanx.runtime.log_tail import Logs
from phalanx.runtime.reports import Reporter
from phalanx.runtime.secret import NAME, READ, Identity, Keys, load_keys, read_token
from phalanx.runtime.spawner import Spawner, Stop, Warm, Worker
from phalanx.runtime.telemetry import Telemetry
from phalanx.runtime.transport import Link, Session, in_parts
from phalanx.runtime.wire import Message, Schemas, WireError, check

STDIN = "-"
LAST_WORDS_S = 10.0  # to finish the record after the run
RAILS_S = 0.25  # between two checks of the interfaces
ALONE_S = 15.0  # between two checks whether any controller can be heard
FULL_BYTES = 1 << 20  # sent but not recorded; beyond that, logs wait

#: Sent by the controller to a node that joins. `worker` and each of `services`: {"entry", "args"}; they also get the
#: `host` to listen at. `hang_s`: 0 derives the limit from the steps. `env`: variables of the ranks, unless the host
#: sets them. `networks`: those that ranks use among themselves. `limits`: halt_s and leave_s, if they differ from the
#: defaults.
SPEC: Schemas = {
    "spec": {
        "version": str,
        "beat_s": (int, float),
        "hang_s": (int, float),
        "preload": list,
        "env": dict,
        "networks": list,
        "worker": dict,
        "services": dict,
        "limits": dict,
    }
}
#: The first message of each service.
FIRST: Schemas = {
    "store": {"address": str},
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


@dataclass(frozen=True, slots=True)
class Options:
    """How a node was started."""

    join: list[tuple[str, int]]
    secret: Keys
    name: str
    folder: Path  # for its own files, and for the logs of its processes unless `logs` is given
    logs: Path | None = None  # in the run's record, if that is on this host
    attached: bool = False  # it ends when standard input does
    shared: bool = False  # the job's other nodes are on this machine too: ranks divide its cores and devices
    topology: str = ""  # where it stands in the network, if its starter knows
    pulse: Path | None = None  # a file that is touched with every beat, for those who watch the process
    give_up_s: float = GIVE_UP_S
    when_alone: tuple[str, ...] = ()  # a command of its starter's, to run while no controller can be heard


class Node(Host):
    def __init__(self, options: Options, warm: Warm | None = None):
        """`warm` is its zygote, if it already has one."""
        super().__init__()
        self._warm = warm
        self.options, self.name, self.life = options, options.name, secrets.token_hex(8)
        self.address = inventory.address_towards(*(host for host, _ in options.join))
        self.about = inventory.about(self.address, options.topology)
        self.agent: Agent | None = None
        self.link: Link | None = None
        self.health = Monitor()
        self.telemetry = Telemetry(self.health)
        self.ranks: dict[int, int] = {}  # worker -> rank
        self.rails: dict[str, bool] = {}  # interface -> whether it is up, if there are several
        self._told_rails = 0  # the incarnation that last reported the interfaces that are down
        self.reporter = Reporter(self.loop, self.life, self._tell_record, self._check_done)
        self.logs = options.logs or options.folder / "logs"
        self.shipped = None if options.logs else Logs(self.logs)
        self._granted = 0  # the incarnation that it may have next
        self._terms: dict[str, int] = {}  # of controllers: those with an older one are refused
        self._leaving = self._joining = False
        self._heard_at = time.monotonic()  # when there was last a connection
        self._leased_at = time.monotonic()  # when the last lease came over it
        self._asking: subprocess.Popen[bytes] | None = None  # the starter's command
        self.logs.mkdir(parents=True, exist_ok=True)
        if options.when_alone:
            self.loop.after(ALONE_S, self._ask_when_alone)
        self._join()

    def listen(self) -> None:
        if self.options.attached:
            self._register(0, READ, self._on_input)

    def _on_input(self, mask: int) -> None:
        if not os.read(0, 4096):
            raise Stop

    @property
    def backlog_bytes(self) -> int:
        return self.reporter.size_bytes

    # -- joining

    def _join(self) -> None:
        self._joining = True
        about = {"life": self.life, "version": inventory.version(), "about": self.about}
        o = self.options
        Joiner(self.loop, o.secret, self.name, o.join, about, self._served, o.give_up_s, self._terms)

    def _served(self, incarnation: int, spec: Message) -> None:
        self._granted, self._joining = incarnation, False
        if self.agent:
            self._boot()
        else:
            self._serve(check({"type": "spec", **spec}, SPEC))

    def _serve(self, spec: Message) -> None:
        services = spec["services"]
        if "store" not in services or not services.keys() <= machine.SERVICES.keys():
            raise WireError(f"spec.services = {sorted(services)}: expected store, and perhaps data and keeper")
        self.beat_s = float(spec["beat_s"])
        try:
            rails = inventory.rails(spec["networks"], self.address)
        except UserError as error:
            raise Refusal(str(error)) from None
        self.rails = {rail["interface"]: True for rail in rails if len(rails) > 1}
        # Ranks and keepers hand state to each other over any network that both ends have.
        host = ",".join(dict.fromkeys([self.address, *(rail["address"] for rail in rails)]))
        more = {"host": host, "shared": self.options.shared, "rails": rails}
        entries = {"": spec["worker"], **services}
        self.entries = {key: (str(e["entry"]), {**e["args"], **more}) for key, e in entries.items()}
        wanted = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), rails[0]["interface"])
        for name, value in (spec["env"] | wanted).items():
            os.environ.setdefault(name, value)
        self.spawner = Spawner(self, [str(name) for name in spec["preload"]], self._warm)
        times: dict[str, Any] = {f"{key.removesuffix('_s')}_ns": int(v * 1e9) for key, v in spec["limits"].items()}
        pace = Pace(int(spec["hang_s"] * 1e9), int(self.beat_s * 1e9))
        domain = ".".join(filter(None, (self.about["topology"], self.about["domain"]))) or self.name
        known = {key: Service() for key in services}
        self.agent = Agent(self.name, domain, known, pace, host, **times)
        self.agent.begin(time.monotonic_ns())
        self._act()
        if self.rails:
            self._look_at_rails()

    def _look_at_rails(self) -> None:
        assert self.agent
        self.loop.after(RAILS_S, self._look_at_rails)
        if self.agent.joined and self._told_rails != self.agent.incarnation:
            self._told_rails = self.agent.incarnation
            for interface in [interface for interface, was_up in self.rails.items() if not was_up]:
                self.agent.link_changed(interface, up=False)  # reports of an earlier incarnation do not count
        for interface, was_up in self.rails.items():
            up = is_up(interface)
            if up != was_up:
                self.rails[interface] = up
                self.agent.link_changed(interface, up)
                if not up:
                    self._leave_rail(interface)
        self._act()

    def _leave_rail(self, interface: str) -> None:
        """Leave an interface that is down at once: by the time silence shows it, this node counts as dead."""
        if (
            self.link
            and len(self.options.join) > 1
            and self.link.local_address == inventory.interfaces().get(interface)
        ):
            self.link.drop(f"{interface} has no carrier, and there are other addresses")

    # -- actions of the agent

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
        except OverflowError as error:  # the aggregator has not acknowledged for very long
            kernel.complain(f"the node starts anew: {error}")
            self.agent.reset()

    def _spawn(self, action: machine.Spawn) -> None:
        assert self.spawner
        entry, args = self.entries[action.name]
        args = {**args, **action.args}
        for name in ("data", "keeper"):  # what all ranks get about a service, and what the service said itself
            if action.args.get(name) and self.entries[""][1].get(name):
                args[name] = {**self.entries[""][1][name], **action.args[name]}
        log = self.logs / (f"{action.name}.log" if action.name else f"rank-{action.args['rank']:05d}.log")
        self.spawner.spawn(action.number, entry, args, str(log))

    def _send(self, action: machine.Send) -> None:
        assert self.spawner
        body = action.body
        if body["type"] == "allow":  # the kernel reports the pid behind a connection
            w = self.spawner.workers.get(body["worker"])
            body = {**body, "pid": w.pid if w else 0}
        self.spawner.send(action.number, body)

    def _end(self, action: machine.End) -> None:
        assert self.spawner
        self.spawner.kill(action.number)

    def _alarm(self, action: machine.Alarm) -> None:
        self.loop.after(max(0, action.at_ns - time.monotonic_ns()) / 1e9, partial(self._fire, action))

    def _fire(self, action: machine.Alarm) -> None:
        assert self.agent
        if self.agent.alarms.get(action.name) != action.at_ns:
            return  # it was put off, or is no longer needed
        now_ns = time.monotonic_ns()
        if now_ns < action.at_ns:
            self._alarm(action)  # the loop's clock counts in floats
            return
        self.agent.fire(now_ns, action.name)
        if action.name == "lease":
            self._set_lease(EXPIRED_NS)
        self._act()

    def _tell(self, action: machine.Tell) -> None:
        body = action.body
        if body["type"] == "launched":
            self.ranks[body["worker"]] = body["rank"]
            return
        self._say({**body})
        if body["type"] == "left":
            self._leaving = True
            for item in self.shipped.rest() if self.shipped else ():
                self._say(item)
            self.loop.after(LAST_WORDS_S, self._leave)

    def _leave(self) -> None:
        raise Stop

    def _check_done(self) -> None:
        if self._leaving:
            raise Stop

    def _say(self, item: Message) -> None:
        """Send an item for the run's record."""
        self.reporter.say({**item, "node": self.name})

    def _tell_record(self, body: Message) -> bool:
        return self.link is not None and self.link.tell(body)

    def _watch(self, action: machine.Watch) -> None:
        self.watch.set(action.limit_ns / 1e9)

    def _count(self, action: machine.Count) -> None:
        assert self.agent and self.spawner
        counters = {n: w.progress.read().counter for n, w in self.spawner.workers.items() if n >= 0}
        self.agent.counted(time.monotonic_ns(), counters)

    def _redial(self, action: machine.Redial) -> None:
        if self.link:
            self.link.drop("the controller was not heard of through this aggregator")

    def _reboot(self, action: machine.Reboot) -> None:
        """Close the link, so that nothing sent to an earlier incarnation counts, and start the next one."""
        if self.link:
            self.link.close()
            self.link = None
        if self._granted:
            self._boot()
        elif not self._joining:
            self._join()

    def _boot(self) -> None:
        assert self.agent
        incarnation, self._granted = self._granted, 0
        self.agent.booted(time.monotonic_ns(), incarnation)
        self.link = Link(
            self.loop,
            self.options.secret,
            Identity("agent", self.agent.name, incarnation),
            self.options.join,
            COMMANDS,
            self._commanded,
            on_open=self._opened,
            on_close=self._closed,
            on_ack=self.agent.acknowledged,
            seed=hash((self.agent.name, incarnation)),
            retry_s=self.beat_s,  # an aggregator that is back must hear of this node before it takes it for dead
            known=self._terms,
        )
        self.loop.after(self.beat_s, partial(self._beat, incarnation))
        self._act()

    # -- the link

    def _opened(self, session: Session) -> None:
        assert self.agent
        self._leased_at = time.monotonic()
        self._tell_beat()  # first of all, because it says where this node can be reached
        self.reporter.opened()
        assert self.spawner
        self.spawner.send(machine.SERVICES["store"], {"type": "resync"})
        self.agent.connected(time.monotonic_ns())
        self._act()

    def _closed(self, session: Session) -> None:
        assert self.agent
        self.agent.disconnected()

    def _beat(self, incarnation: int) -> None:
        assert self.agent
        if incarnation != self.agent.incarnation or self.link is None:
            return
        self.loop.after(self.beat_s, partial(self._beat, incarnation))
        self._tell_beat()
        if self.options.pulse:
            self.options.pulse.touch()
        self._check_alone()
        if self.shipped and self.reporter.size_bytes < FULL_BYTES:
            for item in self.shipped.look():
                self._say(item)
        for sign, count in self.health.look():
            self.agent.warn(sign, count)
        self.telemetry.look()
        self._act()

    def _ask_when_alone(self) -> None:
        """Run the starter's command: the starter may know that no controller will come back."""
        self.loop.after(ALONE_S, self._ask_when_alone)
        is_alone = self._joining or (self.link is not None and not self.link.session)
        is_running = self._asking is not None and self._asking.poll() is None
        if is_alone and not is_running:
            self._asking = subprocess.Popen(self.options.when_alone, stdin=subprocess.DEVNULL)

    def _check_alone(self) -> None:
        assert self.link
        now = time.monotonic()
        if self.link.session:
            self._heard_at = now
            if len(self.options.join) > 1 and now - self._leased_at > MISSED_BEATS * self.beat_s:
                self.link.drop("nobody answers there, and there are other addresses")
        elif now - self._heard_at > self.options.give_up_s:
            raise Refusal(f"no controller was heard of for {self.options.give_up_s:g} s: {self.link.trouble}")

    def _tell_beat(self) -> None:
        assert self.link and self.agent and self.spawner
        readings = [w.progress.read() for n, w in self.spawner.workers.items() if n >= 0]
        sent_ns = time.monotonic_ns()
        said = self.agent.beat(sent_ns)
        if said is None:
            return
        said["step"] = max([said["step"], *(r.step for r in readings)])
        said["counter"] = sum(r.counter for r in readings)
        self.link.tell({"type": "beat", "visit": self.link.visits, "sent_ns": sent_ns, **said})

    def _commanded(self, session: Session, number: int, body: Message) -> None:
        assert self.agent
        if body["type"] == "recorded":
            self.reporter.recorded(body["upto"])
            return
        if body["type"] == "store":
            assert self.spawner
            self.spawner.send(machine.SERVICES["store"], body)
            return
        if body["type"] == "lease":
            now_ns = time.monotonic_ns()
            if body["sent_ns"] > now_ns:
                raise WireError(f"lease.sent_ns = {body['sent_ns']}: no beat was sent then, it is {now_ns}")
            self._leased_at = time.monotonic()
            self.agent.renew(now_ns, body["sent_ns"] + body["ns"])
            self._set_lease(self.agent.alarms.get("lease", EXPIRED_NS))
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
        """Decode a command, and fill in its addressee, which is left out on the way."""
        assert self.agent
        known: Any = messages.KINDS.get(str(body.get("kind")))
        sent = {"nodes": [self.agent.name]} if known and "nodes" in codec.hints(known) else {}
        return Command.from_dict({**sent, **body})

    def _set_lease(self, until_ns: int) -> None:
        """Write the lease where workers read it before they vote, so that they obey it even if this process hangs."""
        assert self.spawner
        for w in self.spawner.workers.values():
            w.progress.lease(until_ns)

    # -- services and workers

    def started(self, w: Worker) -> None:
        if self.agent and w.number >= 0:
            w.progress.lease(self.agent.alarms.get("lease", 0))
        self._say({"type": "started", **self._who(w.number), "pid": w.pid})

    def _who(self, number: int) -> Message:
        return {"rank": self.ranks.get(number, -1), "worker": number, "service": NAMES.get(number, "")}

    def heard(self, w: Worker, body: Message) -> None:
        assert self.agent
        now_ns, kind, service = time.monotonic_ns(), body.get("type"), NAMES.get(w.number, "")
        if service and kind == service:
            self.agent.service_said(now_ns, service, check(body, FIRST))
        elif service == "store" and kind == "relay":
            if self.link:
                in_parts(partial(tell_store, self.link), body["items"])
            return
        elif service and kind == "error" and body.get("kind") == UserError.__name__ and not self.agent.incarnation:
            raise Refusal(f"this node may not join: {body.get('text')}")
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
            fold = fold_of(self.ranks[w.number], body, self.telemetry.values) if w.number in self.ranks else None
            if fold:
                self.reporter.say(fold)
            else:
                self._say({"type": "message", **self._who(w.number), "body": body})
        self._act()

    def ended(self, w: Worker, code: int, error: str) -> None:
        assert self.agent
        reading = w.progress.read()
        name = kernel.signal_name(-code) if code < 0 else ""
        about = {"signal": name or None, "code": code if code >= 0 else None}
        self._say({"type": "exit", **self._who(w.number), **about})
        failure = Failure(
            text=error, signal=name, code=max(0, code), phase=reading.phase.name, step=reading.step, tail=w.tail()
        )
        self.agent.ended(time.monotonic_ns(), w.number, failure)
        self._act()

    def hung(self, event: Message) -> None:
        assert self.agent
        said = {key: event[key] for key in ("reason", "progress", "final")}
        self._say({"type": "hang", **self._who(event["worker"]), **said})
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


def main_forked(channel: Channel, args: dict[str, Any]) -> None:
    """Run a node in a fork that already has its ranks' imports (`runtime.nursery`). It ends with its channel."""
    pid, control = zygote.fork_off(close=[channel.fileno()])
    os.dup2(channel.fileno(), 0)
    code = main(args["argv"], Warm(pid, control, dict(os.environ)))
    with contextlib.suppress(OSError):  # its starter may be gone
        channel.send({"type": "ended", "code": code})
    sys.exit(code)


def main(argv: list[str] | None = None, warm: Warm | None = None) -> int:
    """Run a node. Return 0 when the run is over or its starter is gone, 2 when it may not join, 1 on other errors."""
    parser = argparse.ArgumentParser(prog="phalanx agent", description="Join a run, and do what its controller says.")
    parser.add_argument("--join", required=True, metavar="HOST:PORT[,...]", help="where the controller takes agents in")
    parser.add_argument(
        "--secret", required=True, metavar="FILE", help="the run's secret, or this node's token; -: on standard input"
    )
    parser.add_argument("--name", default="", help="of this node, in the run (default: the host's name)")
    parser.add_argument("--dir", type=Path, help="for its files and logs (default: a temporary folder)")
    parser.add_argument("--logs", type=Path, help="write logs there: the run's record is on this host")
    parser.add_argument("--attached", action="store_true", help="end when standard input does")
    parser.add_argument("--shared", action="store_true", help="the job's other nodes are on this machine too")
    parser.add_argument(
        "--topology", default="", metavar="SPINE.LEAF", help="where it stands in the network, from the top"
    )
    parser.add_argument(
        "--pulse", type=Path, metavar="FILE", help="touch it with every beat, once this node has joined"
    )
    parser.add_argument(
        "--give-up-s", type=float, default=GIVE_UP_S, help="without a controller (default: %(default)g)"
    )
    parser.add_argument(
        "--when-alone",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="run it now and then while no controller is heard of",
    )
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        try:
            secret = read_token(0) if args.secret == STDIN else load_keys(Path(args.secret))
            join = [inventory.parse_address(each, "--join") for each in args.join.split(",")]
            folder = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-")))
            name = args.name or socket.gethostname()
            if not NAME.fullmatch(name):
                remedy = "give it one of letters, digits, '.', '_' and '-' by --name"
                raise UserError("that is no name of a node", field="--name", value=name, remedy=remedy)
            place = ".".join(filter(None, args.topology.split(".")))  # its starter may not know all parts
            options = Options(join, secret, name, folder, args.logs, args.attached, args.shared, place)
            times = {"pulse": args.pulse, "give_up_s": args.give_up_s}
            node = Node(replace(options, **times, when_alone=tuple(args.when_alone)), warm)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        reason = node.run()
    if reason:
        print(reason, file=sys.stderr)
    return 2 if isinstance(node.stopped, Refusal) else 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
