"""A gang with agents that obey at once but never part by themselves. Node i fills place i."""

from __future__ import annotations

from phalanx.control import invariants
from phalanx.control.gang import Gang
from phalanx.control.messages import (
    Build,
    Built,
    Failure,
    Form,
    Formed,
    Halt,
    Kill,
    Launch,
    NodeDead,
    NodeJoined,
    Parked,
    Parted,
    SetTimer,
    TimerFired,
    WorkerDied,
    WorkersUp,
)  # fmt: skip
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

S = 10**9


def died(node, worker):
    return WorkerDied(node, 1, worker, Failure(signal="SIGKILL"))


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


class Crew:
    def __init__(self, replicas=2, shards=1, per_node=1, spares=0, steps=100, check=invariants.check, **policy):
        self.gang = Gang.of(Layout(replica=replicas, shard=shards, ranks_per_node=per_node), steps, Policy(**policy))
        self.now, self.mute, self.check = 0, (), check
        self.holds = {}  # rank -> step, prepared and made of the worker that leaves its world
        for i in range(replicas * shards // per_node + spares):
            self.say(NodeJoined(f"n{i}", 1, "rack"))
        assert self.gang.phase == "running" and self.gang.generation == 1

    def say(self, *events):
        """Apply events, and answer the commands that follow unless their kind is in `mute`. Return all commands but
        timers."""
        told, todo = [], list(events)
        while todo:
            event = todo.pop(0)
            self.now += 1
            for command in self.gang.apply(self.now, event):
                self.check(self.gang)
                if not isinstance(command, SetTimer):
                    told.append(command)
                    todo += () if self.mute and isinstance(command, self.mute) else self.answers(command)
        return told

    def fire(self, timer):
        self.now = self.gang.desk.timers[timer]
        return self.say(TimerFired(timer))

    def answers(self, command):
        nodes = self.gang.members.nodes
        if isinstance(command, Launch):
            workers = tuple(command.workers.values())
            yield WorkersUp(command.node, command.incarnation, workers, workers)
        elif isinstance(command, Build):
            incarnation = nodes[command.node].incarnation
            yield Built((command.node,), (incarnation,), (tuple(command.crew.values()),), command.world)
        elif isinstance(command, Form):
            yield Formed(command.replicas, command.worlds, command.generation)
        elif isinstance(command, Halt):
            for worker in command.workers:
                held = self.holds.get(self.gang.members.workers[worker].rank, (-1, -1, 0))
                yield Parked((command.node,), (nodes[command.node].incarnation,), ((worker,),), command.world, *held)
        elif isinstance(command, Kill):
            for worker in command.workers:
                yield died(command.node, worker)

    # -- events

    def worker(self, rank):
        return self.gang.worlds.replicas[rank // self.gang.members.replica_size].crew[rank]

    def node(self, rank):
        return self.gang.members.workers[self.worker(rank)].node

    def dies(self, rank):
        return died(self.node(rank), self.worker(rank))

    def dead(self, rank):
        return NodeDead(self.node(rank), 1, "burnt")

    def parked(self, rank, step, prepared=None):
        """Return the event that a rank has left its world."""
        world = self.gang.worlds.replicas[rank // self.gang.members.replica_size].world
        prepared = step if prepared is None else prepared
        about = ((self.node(rank),), (1,), ((self.worker(rank),),))
        return Parked(*about, world, step, prepared, self.gang.generation)

    def parted(self, replica, step, prepared=None, made=None, kept=False):
        world, generation = self.gang.worlds.replicas[replica].world, self.gang.generation
        prepared, made = step if prepared is None else prepared, generation if made is None else made
        return Parted((replica,), (world,), generation, step, prepared, made, kept)
