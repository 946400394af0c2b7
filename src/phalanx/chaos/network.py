"""A network of its own for each node of a run, so that it can be cut and slowed: a namespace per node, a virtual cable
from each to one bridge. All of it ends with this process: the namespaces are held by children, and the bridge is in a
namespace that this process has moved to.

Linux, with `ip`, `tc`, `unshare` and `nsenter` (iproute2 and util-linux), and the right to make namespaces."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

from phalanx.core.errors import UserError

CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "tc", "unshare", "nsenter")
BRIDGE, PREFIX = "phalanx0", "10.77.0."
HEAD = PREFIX + "1"
MOST_NODES = 200


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid():
        return "only root may make network namespaces"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True)  # noqa: S607
    return f"no namespace can be made: {made.stderr.decode().strip()}" if made.returncode else ""


class Network:
    """Nodes have numbers. This process, and what it starts, is reached at HEAD from then on, and nowhere else."""

    def __init__(self, nodes: int):
        if nodes > MOST_NODES:
            raise UserError(f"{nodes} nodes: expected {MOST_NODES} at most", remedy="leave out the kinds cut and link")
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace can be made")
        self._holders: list[subprocess.Popen[bytes]] = []
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{HEAD}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for number in range(nodes):
            self._add(number)

    def _add(self, number: int) -> None:
        command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout
        holder.stdout.readline()  # it is there
        self._holders.append(holder)
        inside = self.prefix(number)
        _run("ip", "link", "add", _cable(number), "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        _run("ip", "link", "set", _cable(number), "master", BRIDGE, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "address", "add", f"{self.host(number)}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")

    def prefix(self, number: int) -> list[str]:
        """The prefix of a command that runs on a node."""
        return ["nsenter", f"--net=/proc/{self._holders[number].pid}/ns/net"]

    def host(self, number: int) -> str:
        return f"{PREFIX}{number + 2}"

    def write(self, path: Path) -> None:
        """As run.hosts has it."""
        nodes = [
            {"host": self.host(number), "interface": "eth0", "prefix": self.prefix(number)}
            for number in range(len(self._holders))
        ]
        path.write_text(json.dumps({"host": HEAD, "nodes": nodes}))

    def cut(self, number: int) -> None:
        _run("ip", "link", "set", _cable(number), "down")

    def mend(self, number: int) -> None:
        _run("ip", "link", "set", _cable(number), "up")

    def slow(self, number: int, mbit: int) -> None:
        """What goes to the node; one way is enough for whoever waits for an answer."""
        rate = ["tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "400ms"]
        _run("tc", "qdisc", "replace", "dev", _cable(number), "root", *rate)

    def hurry(self, number: int) -> None:
        _run("tc", "qdisc", "delete", "dev", _cable(number), "root")

    def close(self) -> None:
        for holder in self._holders:
            assert holder.stdin and holder.stdout
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()


def _cable(number: int) -> str:
    return f"phx{number}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
