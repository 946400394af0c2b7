"""A rank of `wire.py`: it joins the world that the real controller builds, and forms one group after another there, in
turns over the rendezvous of its node and over TCPStore."""

import time
from datetime import timedelta

import torch.distributed as dist

from phalanx.gate.meeting import serve as store  # noqa: F401  (with the two below: the services of a node)
from phalanx.parallel.rendezvous import MeetingStore
from tests.runtime.toys import data, keeper  # noqa: F401

LONG = timedelta(seconds=60)


def member(channel, args):
    channel.send({"type": "up", "port": 1})
    while (message := channel.recv()) is not None:
        if message["type"] == "build":
            channel.send({"type": "formed groups", **measure(args, message)})


def measure(args, build):
    rank, ranks, times = args["rank"], args["ranks"], {"ours": [], "tcp": []}
    ours = MeetingStore(build["store"], ("replica 0", build["world"]))
    if rank == 0:
        tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
        ours.set("port", str(tcp.port))
    else:
        tcp = dist.TCPStore("127.0.0.1", int(ours.get("port")), is_master=False, timeout=LONG)
    for number in range(2 * args["groups"] + 2):
        kind = ("ours", "tcp", "tcp", "ours")[number % 4]
        together(tcp, f"begin {number}", ranks)
        began = time.perf_counter()
        group = dist.ProcessGroupGloo(dist.PrefixStore(f"{number}", ours if kind == "ours" else tcp), rank, ranks, LONG)
        took = time.perf_counter() - began
        if number > 1:  # skip the first two, which are slow
            times[kind].append(took)
        together(tcp, f"end {number}", ranks)  # otherwise a slow rank would see its connections end
        del group
    return times


def together(tcp, name, ranks):
    tcp.add(name, 1)
    while tcp.add(name, 0) < ranks:
        time.sleep(0.0005)
