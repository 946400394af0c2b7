"""Services and workers for the tests of the agent, without torch: the zygote preloads this module. Workers train by
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
    """Holds what the folder says that it does, and commits what it is told to."""
    channel.send({"type": "keeper", "address": f"keeper-{os.getpid()}", "port": 1})
    while (order := channel.recv()) is not None:
        if order["type"] == "held":
            channel.send({"type": "held", "steps": {}, "copies": args.get("copies", [])})
        elif order["type"] == "commit":
            channel.send({"type": "committed", "step": order["step"], "generation": order["generation"]})


def broken(channel, args):
    raise ValueError("it cannot start")


def asleep(channel, args):
    """Comes up, and never answers again."""
    channel.send({"type": "up"})
    time.sleep(60)


class Trainee:
    def __init__(self, channel, args):
        self.channel, self.args, self.rank = channel, args, args["rank"]
        self.folder, self.size = Path(args["folder"]), args["replica_size"]
        self.member = Member(args["worker"], args["steps"])
        self.crew: list[int] = []
        self.lacks = False

    def main(self):
        facts = {
            key: self.args[key] for key in ("rank", "worker", "local_rank", "local_ranks", "node", "data", "keeper")
        }
        self.channel.send({"type": "facts", "pid": os.getpid(), **facts})
        self.channel.send({"type": "up"})
        while True:
            if self.member.phase == "running":
                self.step()
            elif not self.hear(None):
                return

    def hear(self, timeout):
        """One message. False: it is over."""
        try:
            message = self.channel.recv(timeout)
        except TimeoutError:
            return True
        if message is None or message["type"] == "leave":
            if message and self.args.get("stays"):
                time.sleep(60)
            raise SystemExit(0)
        getattr(self, "on_" + message.pop("type"))(**message)
        return True

    # -- what it is told

    def on_form(self, generation, step, replicas, rank, store, source, branch):
        assert rank == self.rank and ":" in store, (rank, store)
        if not self.member.form(generation, step, Source(**source) if source else None):
            return
        self.channel.send({"type": "formed", "generation": generation, "store": store, "source": source})
        self.crew = [r * self.size + i for r in replicas for i in range(self.size)]
        if source is None:
            try:
                self.member.settle(step)
            except ValueError as error:
                self.channel.send({"type": "missing", "generation": generation, "reason": str(error)})
                return
        self.member.restored(step)
        digest = hashlib.blake2b(f"{self.rank % self.size}/{step}".encode(), digest_size=8).hexdigest()
        self.channel.send({"type": "ready", "generation": generation, "step": step, "digest": digest})

    def on_serve(self, generation, step, store):
        if not self.member.may_serve(generation):
            return
        self.channel.send({"type": "served", "generation": generation, "step": step})
        with suppress(ValueError):
            self.member.settle(step)

    def on_start(self, generation):
        if self.member.start(generation):
            self.channel.send({"type": "running", "generation": generation, "worker": self.member.worker})

    def on_halt(self, generation):
        if self.args.get("never_parks"):
            return
        if self.member.halt(generation):
            self.park()

    def on_pause(self, generation):
        self.member.ask_pause(generation)

    def on_save(self, generation, step):
        if self.member.phase == "parked" and self.member.generation == generation:
            self.channel.send({"type": "saved", "step": step})

    def park(self):
        m = self.member
        self.channel.progress.mark(Phase.idle)
        said = {"generation": m.generation, "step": m.step, "prepared": m.prepared, "made": m.made}
        self.channel.send({"type": "parked", **said})

    # -- a step

    def step(self):
        m = self.member
        generation, step = m.generation, m.step + 1
        self.channel.progress.mark(Phase.forward, step=step, micro=0)
        deadline = time.monotonic() + self.args.get("step_s", 0.02)
        while time.monotonic() < deadline:
            self.hear(POLL_S)
            if m.phase != "running":
                return
        if m.worker == self.args.get("waits_forever"):
            threading.Event().wait(60)
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
        self.channel.send({"type": "committed", "generation": generation, "step": step})
        if not go_on:
            self.park()


def trainee(channel, args):
    Trainee(channel, args).main()
