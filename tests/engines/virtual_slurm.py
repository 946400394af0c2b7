"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each virtual node, two nodes to a leaf switch. It
needs Debian's slurm-wlm and munge, and root. All its files are in its folder, and `close` ends everything."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.engines.submitted import until

MARK = "PHALANX_VIRTUAL_SLURM"  # an environment variable of all its processes
CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
TopologyPlugin=topology/tree
ReturnToService=1
SlurmdTimeout=6
SlurmctldTimeout=60
InactiveLimit=0
MinJobAge=3600
KillWait=10
RebootProgram=/bin/true
"""


def why_not() -> str:
    """Explain why Slurm cannot run here; empty if it can."""
    lacking = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if not _find(name)]
    if lacking:
        return f"{', '.join(lacking)} not found: apt install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "it needs root"


def _find(name: str) -> str:
    return shutil.which(name) or shutil.which(f"/usr/sbin/{name}") or ""


def processes(**env: str) -> dict[int, str]:
    """Return the processes with one of these values in their environment, and their commands."""
    wanted, found = {f"{key}={value}".encode() for key, value in env.items()}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted & set((entry / "environ").read_bytes().split(b"\0")):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
    return found


class VirtualSlurm:
    def __init__(self, folder: Path, nodes: int = 16):
        self.folder, self.names, self.mark = (
            folder.absolute(),
            [f"n{i + 1}" for i in range(nodes)],
            secrets.token_hex(8),
        )
        host = socket.gethostname().split(".")[0]
        port = _free_ports(nodes + 1)
        text = CONF.format(host=host, port=port[0], folder=self.folder)
        for name, at in zip(self.names, port[1:], strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs=4 RealMemory=4000\n"
        text += f"PartitionName=all Nodes={','.join(self.names)} Default=YES MaxTime=60 State=UP\n"
        leaves = [self.names[i : i + 2] for i in range(0, nodes, 2)]
        tree = "".join(f"SwitchName=leaf{i + 1} Nodes={','.join(leaf)}\n" for i, leaf in enumerate(leaves))
        tree += "SwitchName=spine Switches=" + ",".join(f"leaf{i + 1}" for i in range(len(leaves))) + "\n"
        for name, body in (("slurm.conf", text), ("topology.conf", tree), ("cgroup.conf", "CgroupPlugin=autodetect\n")):
            (self.folder / name).write_text(body)
        (self.folder / "state").mkdir()
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), MARK: self.mark}
        for name in [key for key in self.env if key.startswith(("SLURM_", "SBATCH_")) and key != "SLURM_CONF"]:
            del self.env[name]
        self._munge()
        self._daemon("slurmctld", "-i")
        for name in self.names:
            self.boot(name)
        until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == f"idle {nodes}")

    def __enter__(self) -> VirtualSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        at = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        at |= {"seed-file": "munge.seed"}
        self._daemon("munged", "--force", *(f"--{name}={self.folder / str(value)}" for name, value in at.items()))

    def _daemon(self, name: str, *options: str, **env: str) -> None:
        subprocess.run([_find(name), *options], env={**self.env, **env}, check=True, capture_output=True, timeout=60)

    def boot(self, name: str) -> None:
        self._daemon("slurmd", "-N", name, VIRTUAL_NODE=name)

    def fail(self, name: str) -> None:
        """Lose a node with everything on it: the daemon, the steps and their processes."""
        for _ in range(2):  # again, for processes that were just being started
            here = processes(**{MARK: self.mark})  # another Slurm on this machine may have a node of that name
            for pid in here.keys() & processes(VIRTUAL_NODE=name, SLURMD_NODENAME=name).keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job; empty: Slurm has forgotten it."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False)

    def restarts(self, job: str) -> int:
        about = self.run("scontrol", "--oneliner", "show", "job", job)
        return int(re.search(r"Restarts=(\d+)", about)[1])

    def limit(self, job: str, minutes: int) -> None:
        """Change the time limit of a job."""
        self.run("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in processes(**{MARK: self.mark}):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 10
            while processes(**{MARK: self.mark}) and time.monotonic() < deadline:
                time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()
