"""Entry functions for the workers of these tests. Standard library only: the zygote preloads this module, and
most tests need no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from phalanx.observe.progress import Phase


def echo(channel, args):
    """Answer every message until the other side is gone."""
    channel.send({"hello": args})
    while (message := channel.recv()) is not None:
        channel.send({"echo": message})


def facts(channel, args):
    """Report what the bootstrap has made of this process."""
    fds = [name for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")]
    channel.send(
        {
            "fds": sorted(os.readlink(f"/proc/self/fd/{name}").partition(":")[0] for name in fds),
            "group": os.getpgid(0) == os.getpid(),
            "sigint_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "session": os.environ["PHALANX_SESSION"],
            "threads": threading.active_count(),
            "path": sys.path,
        }
    )
    print("a line without its end", end="")


def fail(channel, args):
    raise ValueError(args["text"])


def leave(channel, args):
    channel.send({"type": "last words"})
    raise SystemExit(args["code"])


def die(channel, args):
    """Die of a signal, with a last message still in the pipe."""
    channel.send({"type": "last words"})
    os.kill(os.getpid(), getattr(signal, args["signal"]))
    time.sleep(30)


def with_child(channel, args):
    """Start a process that does not care for its parent."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    channel.send({"child": child.pid})
    channel.recv()


def flood(channel, args):
    for i in range(args["messages"]):
        channel.send({"i": i, "pad": "x" * args["bytes"]})


def deaf(channel, args):
    channel.send({"deaf": True})
    time.sleep(60)


def garble(channel, args):
    """Break the protocol on purpose."""
    channel._conn.sock.send(b"\x00\x00\x00\x02[]")
    time.sleep(60)


def stand(channel, args):
    """Mark a phase, then stand still as told: wait for others, or be busy with something else."""
    progress = channel.progress
    for _ in range(args.get("moves", 1)):
        progress.mark(Phase[args.get("phase", "forward")], step=args.get("step", 3), micro=0)
    channel.send({"type": "standing"})
    if args["how"] == "wait":
        threading.Event().wait(60)
    elif args["how"] == "move":
        while True:
            progress.mark(Phase.forward)
            time.sleep(0.01)
    else:
        busy_doing_something_else()


def busy_doing_something_else():
    time.sleep(60)


def torch_rank(channel, args):
    """Be one of two ranks over gloo: reduce once, then rank 1 leaves rank 0 waiting in the next collective."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(2)
    x = torch.ones(512, 512) @ torch.ones(512, 512)  # threads after the fork
    store = dist.FileStore(args["file"], 2)
    dist.init_process_group("gloo", store=store, rank=args["rank"], world_size=2, timeout=timedelta(seconds=60))
    total = torch.full((4,), float(args["rank"] + 1))
    dist.all_reduce(total)
    channel.send({"type": "reduced", "total": total.tolist(), "x": x[0, 0].item()})
    channel.recv()
    channel.progress.mark(Phase.backward, step=7)
    if args["rank"] == 1:
        busy_doing_something_else()
    dist.all_reduce(total)
