"""The ranks' part of benchmarks/exact.py and benchmarks/compression.py."""

import dataclasses
import os
import resource
import socket
import struct

import torch.distributed as dist

from phalanx.train.engine import Engine
from phalanx.train.state import State
from tests.cases import connect


def tcp_sent_bytes() -> int:
    """Count the acknowledged bytes that this process has sent on its open TCP sockets, as the kernel counts them
    (tcp_info.tcpi_bytes_acked, at offset 120)."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6):
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                    total += struct.unpack_from("=Q", info, 120)[0]
        except OSError:
            continue
    return total


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def price(args):
    """Run steps of the fast and the exact reduction in turns, on the same ranks, groups and batches."""
    rank = connect(args)
    out, engines = {}, {}
    for kind in ("fast", "exact"):
        job = dataclasses.replace(rank.job, train=dataclasses.replace(rank.job.train, reduction=kind))
        state = State.create(job, rank.family, rank.coord, rank.device)
        engines[kind] = Engine(job, rank.family, rank.coord, rank.groups, state, rank.device)
        out[kind] = {"cpu_s": [], "sent_bytes": []}
    for step in range(args["steps"] + 2):
        batches = rank.batches(step)
        for kind in ("fast", "exact") if step % 2 else ("exact", "fast"):
            dist.barrier()
            before_cpu, before_sent = _cpu_s(), tcp_sent_bytes()
            engines[kind].step(batches)
            cpu = _cpu_s() - before_cpu
            dist.barrier()
            if step >= 2:
                out[kind]["cpu_s"].append(cpu)
                out[kind]["sent_bytes"].append(tcp_sent_bytes() - before_sent)
    out["exact"]["pending_bytes"] = engines["exact"].reducer.peak_pending_bytes
    for engine in engines.values():
        engine.close()
    rank.close()
    return out


def losses(args):
    """Run a short training; return its losses, and cross-replica bytes per step by the kernel's count."""
    rank = connect(args)
    out = {"losses": [], "sent_bytes": 0}
    before = tcp_sent_bytes()
    for step in range(args["steps"]):
        result = rank.engine.step(rank.batches(step % args["distinct"]))
        out["losses"].append(float(result.loss_sums.sum()) / int(result.tokens))
    out["sent_bytes"] = (tcp_sent_bytes() - before) / args["steps"]
    rank.close()
    return out
