"""The worker's part of benchmarks/observe_overhead.py."""

import os
import resource
import socket
import time

from phalanx.observe.progress import RECORD_BYTES, Phase, Progress
from phalanx.runtime.forked import Channel
from phalanx.train.engine import Pass
from phalanx.train.timed import Timed
from tests.cases import connect


def in_turns(args):
    """Run steps of the real engine, with and without the calls that a worker makes for metrics."""
    rank = connect(args)
    channel = _channel()
    own = [0.0, 0]  # seconds in the calls, and number of marks

    def mark(phase, step=None, micro=None):
        began = time.thread_time()
        channel.progress.mark(phase, step, micro)
        own[0] += time.thread_time() - began
        own[1] += 1

    def nothing(phase, step=None, micro=None):
        return None

    out = {"on": [], "off": [], "own": [], "marks": 0}
    device, timed = rank.engine.device, rank.engine._timed
    per_pass = _pass_s(device)
    warm_up = 5
    for i in range(args["pairs"] + warm_up):
        for kind in ("on", "off") if i % 2 else ("off", "on"):
            batches = rank.batches(i)
            rank.engine.mark = mark if kind == "on" else nothing
            rank.engine._timed = timed if kind == "on" else lambda phase, run: run
            own[:] = [0.0, 0]
            cpu = _cpu_s()
            result = rank.engine.step(batches)
            loss, norm = float(result.loss_sums.sum()), float(result.grad_norm)
            if kind == "on":
                for phase in (Phase.loading, Phase.optimizer):
                    mark(phase, i)
                began = time.thread_time()
                marks = (*(device.moment() for _ in range(5)),)
                phases = Timed(i, 0.0, result.passes, marks, 0.0).phases(device.seconds_between)
                channel.send(_report(i, loss, norm, phases))
                own[0] += time.thread_time() - began + per_pass * len(result.passes)
            out[kind].append(_cpu_s() - cpu)
            if kind == "on":
                out["own"].append(own[0])
                out["marks"] = own[1]
    for kind in ("on", "off", "own"):
        del out[kind][:warm_up]
    rank.close()
    return out


def _pass_s(device):
    """Return the cost of timing one forward or backward."""
    passes, count, began = [], 10_000, time.thread_time()
    for _ in range(count):
        begin = device.moment()
        passes.append(Pass(Phase.forward, begin, device.moment()))
    return (time.thread_time() - began) / count


def _report(step, loss, norm, phases):
    whole = {"loss_sums": [loss], "tokens": 2048, "data_digest": "0123456789abcdef"}
    return {
        "type": "step", "step": step, "rank": 0, "generation": 1, "time_s": 0.1, "grad_norm": norm, "lr": 1e-3,
        "data_wait_s": 0.0, "data_ready": 4, "served": {"python-stdlib": 8}, "whole": whole,
        "phases": phases, "held": {"memory": step},
    }  # fmt: skip


def _channel():
    """Return a worker's own channel, with a process that reads from it."""
    mine, other = socket.socketpair()
    if os.fork() == 0:
        mine.close()
        while other.recv(1 << 16):
            pass
        os._exit(0)
    other.close()
    return Channel(mine, Progress(bytearray(RECORD_BYTES)))


def _cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
