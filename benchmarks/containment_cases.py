"""The ranks' part of benchmarks/containment.py: the product's worker, which also counts the engines and groups that it
makes and the CPU-seconds of each step, and dies where its arguments say."""

import json
import os
import signal
import threading
import time

from phalanx.parallel.cross import Cross
from phalanx.parallel.groups import Groups
from phalanx.parallel.reduce import Reducer
from phalanx.train import worker
from phalanx.train.engine import Engine


def main(channel, args):
    plan = args["die"]
    Notes(args["worker"], args["rank"], plan)
    if plan["point"]:
        plant(plan["point"], plan)
    worker.main(channel, args)


def write(plan, **line):
    """Append one line to the run's journal. Whole lines of several processes do not mix."""
    fd = os.open(plan["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def around(owner, name, wrapper):
    """Replace a method by a wrapper, which gets the original first."""
    original = getattr(owner, name)

    def wrapped(self, *args, **kwargs):
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


class Notes:
    """Writes a line at every commit: counts since the process began, and the CPU-seconds of the step. The CPU of
    forward and backward is the main thread's; reductions run in threads of their own."""

    def __init__(self, number, rank, plan):
        self.number, self.rank, self.plan = number, rank, plan
        self.engines = self.groups = 0
        self.apart_s = 0.0  # CPU of forward, backward and of these notes
        self.since = (0.0, 0.0)
        form = Groups.form

        def forming(*args, **kwargs):
            self.groups += 1
            return form(*args, **kwargs)

        Groups.form = staticmethod(forming)
        around(Engine, "__init__", self.making)
        around(Engine, "_forward", self.passing(plan["sleep_s"] * 0.4))
        around(Engine, "_backward", self.passing(plan["sleep_s"] * 0.6))
        around(worker.Worker, "_enter_ledger", self.committing)

    def making(self, init, engine, *args, **kwargs):
        self.engines += 1
        init(engine, *args, **kwargs)

    def passing(self, sleep_s):
        """Sleep in place of an accelerator's pass, which takes no CPU: eight ranks can do that on two cores."""

        def wrapper(run, engine, *args):
            time.sleep(sleep_s)
            began = time.thread_time()
            try:
                return run(engine, *args)
            finally:
                self.apart_s += time.thread_time() - began

        return wrapper

    def committing(self, enter, rank):
        """Write the line of a commit. Every way to commit a step calls this after the update."""
        at = time.monotonic()
        enter(rank)
        began = time.thread_time()
        total, apart = time.process_time(), self.apart_s
        line = dict(rank=self.rank, worker=self.number, step=rank.state.step, generation=rank.record.generation, at=at)
        line |= {"engines": self.engines, "groups": self.groups}
        line["outside_s"] = (total - self.since[0]) - (apart - self.since[1])
        if self.plan["digests"]:
            line["digest"] = rank.state.digest()
        write(self.plan, type="commit", **line)
        self.since = (total, apart)
        self.apart_s += time.thread_time() - began


def plant(at, plan):
    """Plant a death at that point of the third step that all replicas begin together, this rank included."""
    seen = {"steps": 0, "reduced": 0, "sums": 0}
    once = threading.Lock()

    def due():
        return seen["steps"] == 3

    def die():
        with once:
            write(plan, type="kill", point=at, at=time.monotonic(), step=seen["step"])
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    def stepping(gradients, engine, batches, dealt):
        seen["steps"] += len(dealt.replicas) == engine.job.layout.replica and not dealt.redo
        seen["step"] = engine.state.step
        return gradients(engine, batches, dealt)

    def forward(run, engine, *args):
        out = run(engine, *args)
        if due():
            die()
        return out

    def reducing(reduce, reducer, *args, **kwargs):
        """Die in the last backward, when some of the units have been handed on."""
        seen["reduced"] += due()
        if seen["reduced"] == 3:
            die()
        reduce(reducer, *args, **kwargs)

    def summing(tree_sum, cross, *args):
        """Die between two buckets, while the others wait for the second."""
        seen["sums"] += due()
        if seen["sums"] == 2:
            die()
        return tree_sum(cross, *args)

    def voting(total, groups, values, guard):
        out = total(groups, values, guard)
        if due() and values.numel() == 4:
            die()
        return out

    points = {
        "forward": (Engine, "_forward", forward),
        "backward": (Reducer, "_reduce", reducing),
        "reduction": (Cross, "tree_sum", summing),
        "vote": (Groups, "total", voting),
    }
    around(*points[at])
    around(Engine, "gradients", stepping)
