"""Services and workers for the tests of the node, without torch: the zygote preloads this module. Workers train by
files in a folder that all share: a vote per step and rank; when all are there, the step is committed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from phalanx.control.member import Member
from phalanx.control.messages import Source
from phalanx.observe.progress import Phase

POLL_S = 0.005
SHARD = dict(checkpoint="x", step=1, generation=1, ranks=1, rank=0, size=1, root="", drain_s=0.0)


def store(channel, args):
    """Its port is its pid, so that one that was started again has another."""
    channel.send({"type": "store", "host": "127.0.0.1", "port": os.getpid()})
    while channel.recv() is not None:
        pass


def data(channel, args):
    channel.send({"type": "data", "address": f"data-{os.getpid()}"})
    while channel.recv() is not None:
        pass


def keeper(channel, args):
    """Holds what its arguments say, and says too much when the file `flood` is there."""
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


class Trainee:
    def __init__(self, channel, args):
        self.channel, self.args, self.rank = channel, args, args["rank"]
        self.folder, self.size = Path(args["folder"]), args["replica_size"]
        self.member = Member(args["worker"], args["steps"])
        self.crew: list[int] = []

    def main(self):
        facts = {
            key: self.args[key] for key in ("rank", "worker", "local_rank", "local_ranks", "node", "data", "keeper")
        }
        self.channel.send({"type": "facts", "pid": os.getpid(), **facts})
        self.channel.send({"type": "up"})
        while True:
            if self.member.phase == "running":
                self.step()
            else:
                self.hear(None)

    def hear(self, timeout):
        """One message."""
        try:
            message = self.channel.recv(timeout)
        except TimeoutError:
            return
        if message is None or message["type"] == "leave":
            if message and self.args.get("stays"):
                time.sleep(60)
            raise SystemExit(0)
        getattr(self, "on_" + message.pop("type"))(**message)

    def say(self, digest=""):
        if said := self.member.standing(digest):
            self.channel.send(said)

    # -- what it is told

    def on_form(self, generation, step, replicas, rank, store, source, branch):
        assert rank == self.rank and ":" in store, (rank, store)
        if not self.member.form(generation, step, Source(**source) if source else None):
            if generation == self.member.generation:
                self.say()
            return
        self.channel.send({"type": "formed", "generation": generation, "store": store, "source": source})
        self.crew = [r * self.size + i for r in replicas for i in range(self.size)]
        if source is None:
            try:
                self.member.settle(step)
            except ValueError as error:
                self.member.lack(str(error))
                self.say()
                return
        self.member.restored(step)
        self.say(hashlib.blake2b(f"{self.rank % self.size}/{step}".encode(), digest_size=8).hexdigest())

    def on_serve(self, generation, step, store):
        if not self.member.may_serve(generation):
            return
        self.channel.send({"type": "served", "generation": generation, "step": step})
        with suppress(ValueError):
            self.member.settle(step)

    def on_start(self, generation):
        if not self.member.start(generation) and self.member.phase == "parked":
            self.say()

    def on_halt(self, generation):
        if not self.args.get("never_parks"):
            self.leave(generation)

    def on_pause(self, generation):
        self.member.ask_pause(generation)

    def leave(self, generation, why=None):
        if self.member.halt(generation, why):
            self.channel.progress.mark(Phase.idle)
            self.channel.send({"type": "halted", "generation": generation, "why": why})
            self.say()

    # -- a step

    def step(self):
        m = self.member
        generation, step = m.generation, m.step + 1
        self.channel.progress.mark(Phase.forward, step=step, micro=0)
        began = time.monotonic()
        while time.monotonic() < began + self.args.get("step_s", 0.02):
            self.hear(POLL_S)
            if m.phase != "running":
                return
        if m.worker == self.args.get("waits_forever"):
            threading.Event().wait(60)
        if self.channel.progress.lease_ended and not self.args.get("ignores_lease"):
            self.leave(generation, {"text": "the lease has ended"})
            return
        pause = m.vote()
        near = self.folder / f".{m.worker}"
        near.write_text("pause" if pause else "yes")
        near.rename(self.folder / f"{generation}-{step}-{self.rank}")
        self.channel.progress.mark(Phase.reduce)
        while not all((self.folder / f"{generation}-{step}-{rank}").exists() for rank in self.crew):
            threading.Event().wait(POLL_S)  # as one waits in a collective
            self.hear(0)
            if m.phase != "running":
                return
        votes = [(self.folder / f"{generation}-{step}-{rank}").read_text() for rank in self.crew]
        go_on = m.commit("pause" in votes)
        took = {"time_s": time.monotonic() - began}
        self.channel.send({"type": "step", "generation": generation, "step": step - 1, **took})
        if not go_on:
            self.channel.progress.mark(Phase.idle)
            self.say()


def trainee(channel, args):
    Trainee(channel, args).main()
