"""Services and workers for the tests of the node, without torch: the zygote preloads this module. Workers meet by files
in a shared folder: those of a replica in its world, all of them in a generation. A step has a sum and then a vote per
rank; when all votes are there, it is committed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from phalanx.control.member import Member, in_common
from phalanx.control.messages import Source
from phalanx.observe.progress import Phase

POLL_S = 0.005
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where torch listens
SHARD = dict(checkpoint="x", step=1, generation=1, ranks=1, rank=0, size=1, root="", drain_s=0.0)


def store(channel, args):
    """Serve an address that contains the pid, so that a restarted store has another."""
    channel.send({"type": "store", "address": f"store-{os.getpid()}"})
    while channel.recv() is not None:
        pass


def data(channel, args):
    channel.send({"type": "data", "address": f"data-{os.getpid()}"})
    while channel.recv() is not None:
        pass


def keeper(channel, args):
    """Hold what the arguments list, and send far too much when the file `flood` exists."""
    channel.send({"type": "keeper", "address": f"keeper-{os.getpid()}", "port": 1})
    flood = Path(args.get("flood", "/nowhere"))
    while True:
        try:
            order = channel.recv(0.1)
        except TimeoutError:
            if flood.exists():
                flood.unlink()
                for i in range(20):
                    channel.send({"type": "shard", **SHARD, "seal": f"{i}" + "x" * (4 << 20)})
            continue
        if order is None:
            return
        if order["type"] == "held":
            channel.send({"type": "held", "copies": args.get("copies", [])})


def broken(channel, args):
    raise ValueError("it cannot start")


class Halted(Exception):
    """The worker's world is over."""


class Trainee:
    """A worker that behaves as `train.worker` does: its groups are files that it waits for, and it listens while it
    waits."""

    def __init__(self, channel, args):
        self.channel, self.args, self.rank = channel, args, args["rank"]
        self.folder, self.size = Path(args["folder"]), args["replica_size"]
        self.replica, inside = divmod(self.rank, self.size)
        self.member = Member(args["worker"], args["steps"], speaks=inside == 0)
        self.peers = [self.replica * self.size + i for i in range(self.size)]
        self.crew: list[int] = []  # of the generation
        self.inbox: deque[dict] = deque()
        self.halted = self.parting = self.pausing = -1

    def main(self):
        facts = {
            key: self.args[key] for key in ("rank", "worker", "local_rank", "local_ranks", "node", "data", "keeper")
        }
        interfaces = [os.environ.get(name) for name in INTERFACES]
        self.channel.send({"type": "born", "pid": os.getpid(), "interfaces": interfaces, **facts})
        self.channel.send({"type": "up", "port": 1})
        while True:
            try:
                if self.member.phase == "running":
                    self.step()
                    continue
                while not self.inbox:
                    self.listen(None)
                message = self.inbox.popleft()
                getattr(self, "on_" + message.pop("type"))(**message)
            except Halted:
                self.on_halt(self.halted)

    def listen(self, timeout):
        """Take one message. Halts, parts and pauses count at once, even in the middle of a step."""
        try:
            message = self.channel.recv(timeout)
        except TimeoutError:
            return
        kind = message["type"] if message else "leave"
        if kind == "leave":
            if message and self.args.get("stays"):
                time.sleep(60)
            raise SystemExit(0)
        if self.args.get("never_leaves") == kind:
            return
        if kind == "halt":
            self.halted = max(self.halted, message["world"])
        elif kind == "part":
            self.parting = max(self.parting, message["generation"])
        elif kind == "pause":
            self.pausing = max(self.pausing, message["generation"])
        if kind != "pause":
            self.inbox.append(message)

    def say(self):
        if said := self.member.standing():
            self.channel.send(said)

    # -- groups

    def put(self, point, value):
        near = self.folder / f".{self.member.worker}"
        near.write_text(json.dumps(value))
        near.rename(self.folder / f"{point}-{self.rank}")

    def wait(self, point, ranks, is_over=lambda: False):
        """Wait as in a collective. Return what each rank has put there; None: it is over."""
        paths = [self.folder / f"{point}-{rank}" for rank in ranks]
        while not all(path.exists() for path in paths):
            threading.Event().wait(POLL_S)
            self.listen(0)
            if self.halted >= self.member.world:
                raise Halted
            if is_over():
                return None
        return [json.loads(path.read_text()) for path in paths]

    def agree(self, point, *values):
        """Return the least of each value among the ranks of the replica."""
        self.put(f"w{self.member.world}-{point}", values)
        return [min(column) for column in zip(*self.wait(f"w{self.member.world}-{point}", self.peers), strict=True)]

    def is_parting(self):
        return self.parting >= self.member.generation

    # -- what it is told

    def on_build(self, world, replica, rank, store):
        assert (replica, rank) == (self.replica, self.rank) and store, (replica, rank, store)
        if self.member.build(world):
            self.channel.send({"type": "builds", "world": world})
            while Path(self.args.get("gate", "/nowhere")).exists():
                self.channel.progress.mark(Phase.idle)  # it is slow, and does not hang
                self.listen(POLL_S)
                if self.halted >= world:
                    raise Halted
            self.agree("built")
            self.member.built()
            self.channel.send({"type": "in_world", "world": world, "store": store})
        if world == self.member.world:
            self.say()

    def on_halt(self, world):
        was_in = self.member.phase != "parked"
        if self.member.halt(world):
            self.channel.progress.mark(Phase.idle)
            if was_in:
                self.channel.send({"type": "out_of_world", "world": world})
            self.say()

    def on_form(self, generation, step, replicas, world, rank, store, source, kept, **more):
        assert rank == self.rank and store, (rank, store)
        m = self.member
        if not m.form(generation, world, Source(**source) if source else None):
            if generation == m.generation:
                self.say()
            return
        self.channel.progress.mark(Phase.idle)
        about = {"world": world, "store": store, "source": source, "kept": kept}
        self.channel.send({"type": "enters", "generation": generation, **about})
        self.crew = [r * self.size + i for r in replicas for i in range(self.size)]
        self.agree_to_enter(generation, self.enter(generation, step, source))

    def enter(self, generation, step, source):
        m = self.member
        if source is None:
            try:
                m.settle(step)
            except ValueError as error:
                m.lack(str(error))
                self.say()
                return False
        m.restored(step)
        self.put(f"form{generation}", step)
        found = self.wait(f"form{generation}", self.crew, self.is_parting)
        assert found is None or set(found) == {step}, "all begin from the same step"
        return found is not None

    def agree_to_enter(self, generation, entered):
        """Enter with all ranks of the replica, or with none."""
        m = self.member
        entered, *held, minus_made = self.agree(f"enter{generation}", entered, m.step, m.prepared, m.made, -m.made)
        if not entered:
            self.depart(generation, in_common(*held, -minus_made))
        else:
            m.formed(m.step)
            self.say()

    def on_part(self, generation):
        m = self.member
        if m.phase == "built" and generation > m.generation:
            m.generation = generation
            self.agree_to_enter(generation, False)
        elif m.phase == "built":
            self.say()

    def depart(self, generation, held, kept=False, why=""):
        if self.member.part(generation, held, kept):
            self.channel.progress.mark(Phase.idle)
            self.channel.send({"type": "departed", "generation": generation, "world": self.member.world, "why": why})
            self.say()

    def on_serve(self, generation, step, store):
        if not self.member.may_serve(generation):
            return
        self.channel.send({"type": "served", "generation": generation, "step": step})
        with suppress(ValueError):
            self.member.settle(step)

    # -- a step

    def step(self):
        m = self.member
        generation, step = m.generation, m.step + 1
        self.channel.progress.mark(Phase.forward, step=step, micro=0)
        began = time.monotonic()
        while time.monotonic() < began + self.args.get("step_s", 0.02):
            self.listen(POLL_S)
            if self.halted >= m.world:
                raise Halted
        if m.worker == self.args.get("waits_forever"):
            threading.Event().wait(60)
        point, votes = f"{generation}-{step}", None
        self.channel.progress.mark(Phase.reduce)
        self.put(f"sum{point}", self.rank)
        summed = self.wait(f"sum{point}", self.crew, self.is_parting)
        lapsed = self.channel.progress.lease_ended and not self.args.get("ignores_lease")
        (may,) = self.agree(f"sum{point}", summed is not None and not lapsed and not self.is_parting())
        if may:
            self.put(point, bool(m.vote() or self.pausing >= generation))
            votes = self.wait(point, self.crew, self.is_parting)
        unseen, *held = self.agree(f"vote{point}", votes is None, m.step, m.prepared, m.made)
        if unseen:
            self.depart(generation, tuple(held), kept=True, why="the lease has ended" if lapsed else "others are gone")
            return
        goes_on = m.commit(any(self.wait(point, self.crew)))  # if one rank has seen all votes, they are there
        took = {"time_s": time.monotonic() - began, "grad_norm": 1.0, "lr": 0.1, "whole": None}
        self.channel.send({"type": "step", "generation": generation, "step": step - 1, **took})
        if not goes_on:
            self.channel.progress.mark(Phase.idle)
            self.agree(f"end{generation}")
            self.say()


def trainee(channel, args):
    Trainee(channel, args).main()
