"""Simulate hosts on one machine with namespaces. Each has its own networks, processes, host name and file systems, and
its interfaces can be cut and slowed. A host that is not `whole` has only its own networks; `phalanx chaos` uses those.

The switch is one more namespace, with a bridge per network (rail). Everything ends with the process that created it,
even if that is killed: the namespace holders read from a pipe of that process and exit when it closes.

Needs Linux with `ip`, `tc`, `unshare` and `nsenter` (iproute2 and util-linux), and the right to create namespaces."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from phalanx.core.errors import UserError

TOOLS = ("ip", "tc", "unshare", "nsenter")
MOST_HOSTS = 200
HIDDEN = ("/tmp", "/home", "/var", "/root", "/run", "/mnt", "/srv")  # noqa: S108
SHARED_ROOTS = ("usr", "lib", "lib64", "bin", "sbin", "etc", "opt")  # paths below these are visible to all hosts
TMPFS = "mount -t tmpfs -o size=1g tmpfs"
# The first process of a host. It ends when the pipe closes, and reaps orphans.
INIT = """
import os, select
print(flush=True)
while True:
    if select.select([0], [], [], 0.2)[0] and not os.read(0, 1):
        break
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def why_not() -> str:
    """Explain why hosts cannot be created here; empty if they can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and util-linux"
    if os.geteuid():
        return "only root may make namespaces"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True)  # noqa: S607
    return f"no namespace can be made: {made.stderr.decode().strip()}" if made.returncode else ""


def installed() -> list[Path]:
    """Return the paths that all hosts share read-only: the interpreter, its packages and this one."""
    package = Path(__file__).parents[2]
    return [Path(sys.base_prefix), Path(sys.prefix), package]


class Host:
    """One host on the switch. `addresses`: one per rail, on eth0, eth1, and so on."""

    def __init__(self, switch: Switch, name: str, number: int, holder: subprocess.Popen[bytes], pid: int):
        self.name, self.number, self.pid = name, number, pid
        self.addresses = [switch.address(rail, number) for rail in range(switch.rails)]
        self._switch, self._holder = switch, holder
        wires = [f"link add {self._cable(r)} type veth peer name eth{r} netns {pid}" for r in range(switch.rails)]
        wires += [f"link set {self._cable(r)} master rail{r} up" for r in range(switch.rails)]
        switch.ip(wires)
        own = ["link set lo up"]
        for rail, address in enumerate(self.addresses):
            own += [f"address add {address}/24 dev eth{rail}", f"link set eth{rail} up"]
        _ip(pid, own)

    def _cable(self, rail: int) -> str:
        return f"h{self.number}r{rail}"

    def command(self, *command: str, cwd: str = "/root", **env: str) -> list[str]:
        """Return the command line that runs a command on the host."""
        inside = ["sh", "-c", f'cd {shlex.quote(cwd)} && exec "$@"', "sh", "env", *(f"{k}={v}" for k, v in env.items())]
        return ["nsenter", "-t", str(self.pid), "-a", "--", *inside, *command]

    def start(self, *command: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(*command, **(env or {})), **options)

    def run(self, *command: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*command, **(env or {})), capture_output=True, text=True, **options)

    # -- what befalls it

    def cut(self, rail: int = -1) -> None:
        """Pull a cable, or all of them (-1): the host sees that the carrier is gone."""
        self._switch.ip([f"link set {self._cable(r)} down" for r in self._rails(rail)])

    def mend(self, rail: int = -1) -> None:
        self._switch.ip([f"link set {self._cable(r)} up" for r in self._rails(rail)])

    def slow(self, mbit: int, rail: int = -1) -> None:
        """Limit the rate in both directions."""
        rate = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "400ms"]
        for r in self._rails(rail):
            for pid, device in ((self._switch.pid, self._cable(r)), (self.pid, f"eth{r}")):
                _run("nsenter", "-n", "-t", str(pid), "tc", "qdisc", "replace", "dev", device, *rate)

    def hurry(self, rail: int = -1) -> None:
        for r in self._rails(rail):
            for pid, device in ((self._switch.pid, self._cable(r)), (self.pid, f"eth{r}")):
                with contextlib.suppress(OSError):  # it was not slowed
                    _run("nsenter", "-n", "-t", str(pid), "tc", "qdisc", "delete", "dev", device, "root")

    def fail(self) -> None:
        """Cut the power. Peers are not notified, because the cables are gone before the kernel could close
        connections."""
        self._switch.ip([f"link delete {self._cable(r)}" for r in self._rails(-1)], force=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        self.end()

    def end(self) -> None:
        assert self._holder.stdin and self._holder.stdout
        for end in (self._holder.stdin, self._holder.stdout):
            end.close()
        self._holder.wait()
        self._switch.hosts.pop(self.name, None)

    def _rails(self, rail: int) -> Iterable[int]:
        return range(self._switch.rails) if rail < 0 else [rail]


class Switch:
    """The networks and the hosts on them. `names`: all hosts that will ever exist, as they appear in /etc/hosts."""

    def __init__(self, rails: int = 1, names: Sequence[str] = (), net: int = 77):
        if len(names) > MOST_HOSTS:
            remedy = "ask for fewer nodes, or leave out the faults cut and link"
            raise UserError(f"{len(names)} hosts: expected {MOST_HOSTS} at most", remedy=remedy)
        self.rails, self.names, self.hosts, self._net = rails, list(names), dict[str, Host](), net
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-hosts-")
        holder = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
        self._holder = subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout
        self._holder.stdout.readline()  # the namespace exists now
        self.pid = self._holder.pid
        self.ip(["link set lo up"])
        for rail in range(rails):
            address = f"address add {self.address(rail)}/24 dev rail{rail}"
            self.ip([f"link add rail{rail} type bridge", address, f"link set rail{rail} up"])

    def address(self, rail: int = 0, number: int = 0) -> str:
        """Return the address of a host; 0: that of the switch itself, shared by every process in its namespace."""
        return f"10.{self._net}.{rail}.{number + 1}"

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command at the switch: in its networks, but otherwise on this machine."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def add(self, name: str, whole: bool = True) -> Host:
        """Create a host. A name used before gives the same host with all its data lost."""
        number = self.names.index(name) + 1
        if whole:
            holder, pid = self._boot(name)
        else:
            command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
            holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert holder.stdout
            holder.stdout.readline()
            pid = holder.pid
        self.hosts[name] = Host(self, name, number, holder, pid)
        return self.hosts[name]

    def _boot(self, name: str) -> tuple[subprocess.Popen[bytes], int]:
        folder = Path(self._folder.name) / f"{name}-{time.monotonic_ns()}"
        folder.mkdir()
        command = ["unshare", "-n", "-m", "-p", "-u", "-i", "-C", "--fork", "--kill-child", "sh", "-ec"]
        script = "\n".join(self._setup(name, folder))
        run = [*command, script, "sh", sys.executable, "-I", "-c", INIT]
        holder = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert holder.stdout
        if holder.stdout.readline() != b"\n":
            raise OSError(f"the host {name} did not start")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return holder, int(children[0])

    def _setup(self, name: str, folder: Path) -> Iterable[str]:
        """Yield the shell commands that build the host's file systems and start its first process."""
        root, shown = folder / "root", {path.resolve(): path for path in installed()}
        hidden = {*HIDDEN, *(f"/{p.parts[1]}" for p in [*shown, *shown.values()] if p.parts[1] not in SHARED_ROOTS)}
        yield f"mount --make-rprivate /; {TMPFS} {folder}; mkdir {root} {folder}/shown"
        yield f"mount --bind / {root}; mount -o remount,bind,ro {root}"
        for i, path in enumerate(shown):
            aside = f"{folder}/shown/{i}"
            yield f"mkdir {aside}; mount --bind {path} {aside}; mount -o remount,bind,ro {aside}"
        yield f"mount --rbind /dev {root}/dev; mount -t proc proc {root}/proc; mount -t sysfs -o ro sysfs {root}/sys"
        yield f"mount --bind {root}/proc/sys {root}/proc/sys; mount -o remount,bind,ro {root}/proc/sys"
        for place in sorted([*hidden, "/dev/shm"]):  # noqa: S108
            yield f"{TMPFS} {root}{place}"
        for i, (path, named) in enumerate(shown.items()):
            yield f"mkdir -p {root}{path}; mount --move {folder}/shown/{i} {root}{path}"
            if named != path:
                yield f"mkdir -p {root}{named.parent}; [ -e {root}{named} ] || ln -s {path} {root}{named}"
        known = "127.0.0.1 localhost\\n" + "".join(
            f"{self.address(0, i + 1)} {each}\\n" for i, each in enumerate(self.names)
        )
        for file, text in (("hosts", known), ("hostname", f"{name}\\n"), ("machine-id", f"{os.urandom(16).hex()}\\n")):
            target = f"{root}/etc/{file}"
            yield f"printf '{text}' > {folder}/{file}; [ ! -e {target} ] || mount --bind {folder}/{file} {target}"
        yield f"hostname {name}; cd {root}; mkdir run/old; pivot_root . run/old; umount -l /run/old; cd /"
        yield 'exec "$@"'

    def ip(self, lines: Iterable[str], force: bool = False) -> None:
        _ip(self.pid, lines, force)

    def close(self) -> None:
        for host in list(self.hosts.values()):
            host.end()
        assert self._holder.stdin and self._holder.stdout
        for end in (self._holder.stdin, self._holder.stdout):
            end.close()
        self._holder.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ip(pid: int, lines: Iterable[str], force: bool = False) -> None:
    command = ["nsenter", "-n", "-t", str(pid), "ip", *(["-force"] if force else []), "-batch", "-"]
    _run(*command, text="\n".join(lines) + "\n", check=not force)


def _run(*command: str, text: str = "", check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    if done.returncode and check:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
