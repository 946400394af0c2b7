"""Four hosts to train on, one for the controller and one for S3 (moto): they share no disk, and reach each other by two
networks. Hosts are entered by ssh where sshd is installed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from phalanx.chaos.hosts import Host, Switch, installed
from tests.engines.submitted import PHALANX, until

TRAINERS = ("a", "b", "c", "d")
NETWORKS = ["10.77.1.0/24", "10.77.0.0/24"]  # ranks prefer the second rail; the controller is on the first
S3 = "http://s3:9000"
ENV = {
    "PYTHONPATH": str(installed()[2]),
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ENDPOINT_URL": S3,
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "PATH": os.environ["PATH"],
}
JOB = {  # patient: a busy machine is no fault
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 2, "model.ffn_dim": 32,
    "layout.replica": 3, "layout.shard": 1, "layout.tp": 1, "layout.ranks_per_node": 1,
    "train.seq_len": 32, "train.global_batch": 24, "train.micro_batch": 1, "train.reduction": "exact",
    "data.source": "s3://bucket/data", "checkpoint.every_steps": 100,
    "recovery.on": "true", "recovery.beat_s": 1.0, "recovery.restart_s": 1.0, "run.hang_timeout_s": 10.0,
}  # fmt: skip
MAKE_BUCKET = (
    "import urllib.request as u; u.urlopen(u.Request('http://s3:9000/bucket', method='PUT', data=b''), timeout=2)"
)
SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")


class Fleet(Switch):
    def __init__(self):
        super().__init__(2, ["head", *TRAINERS, "s3"])
        self.processes: list[subprocess.Popen] = []
        for name in self.names:
            self.add(name)
        s3, quiet = self.hosts["s3"], {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        moto = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"]
        self.processes.append(s3.start(*moto, env=ENV, **quiet))
        head = self.hosts["head"]
        head.run("sh", "-c", "mkdir -p -m 700 .ssh; ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519")
        relaxed = "Host *\\n StrictHostKeyChecking no\\n UserKnownHostsFile /dev/null\\n LogLevel ERROR\\n"
        head.run("sh", "-c", f"printf '{relaxed}' > .ssh/config; chmod 600 .ssh/config")
        self.key = head.run("cat", ".ssh/id_ed25519.pub").stdout
        for name in TRAINERS:
            self.open_ssh(self.hosts[name])
        until(lambda: head.run(sys.executable, "-c", MAKE_BUCKET).returncode == 0)
        text = "mkdir text; for f in /usr/share/common-licenses/*; do cp $f text/$(basename $f).txt; done"
        head.run("sh", "-c", text)
        build = ["data", "build", "text", "--out", "s3://bucket/data", "--tokenizer", "byte", "--workers", "1"]
        self.on_head(*build)

    def open_ssh(self, host: Host) -> None:
        setup = f"mkdir -p -m 700 .ssh; echo {shlex.quote(self.key)} > .ssh/authorized_keys; mkdir -p /run/sshd"
        host.run("sh", "-c", f"{setup}; ssh-keygen -q -t ed25519 -N '' -f hostkey")
        options = ["-f", "/dev/null", "-h", "/root/hostkey", "-o", "StrictModes=no", "-o", "PidFile=none"]
        options += ["-o", "SetEnv=" + " ".join(f'{key}="{value}"' for key, value in ENV.items())]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        self.processes.append(host.start(SSHD, "-D", *options, **quiet))

    def on_head(self, *args: object) -> subprocess.CompletedProcess[str]:
        done = self.hosts["head"].run(*PHALANX, *map(str, args), env=ENV)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.wait()


class Training:
    """`phalanx train`, or `phalanx controller`, on the head. `bare`: it is told `args` and no more."""

    def __init__(
        self, fleet: Fleet, folder: Path, name: str, *args: str, command="train", bare=False, **values: object
    ):
        self.head, self.name = fleet.hosts["head"], name
        values = {} if bare else JOB | {"name": name, "checkpoint.dir": f"s3://bucket/{name}"} | values
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = self.head.start(
                *PHALANX, command, *sets, *args, env=ENV, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def kill(self, number: int) -> None:
        """Send a signal to the command itself, which is the child of the process that entered the host."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(child), number)

    def read(self, file: str) -> list[dict]:
        text = self.head.run("sh", "-c", f"cat runs/{self.name}-2*/{file}").stdout
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def summary(self) -> dict:
        return json.loads(self.head.run("sh", "-c", f"cat runs/{self.name}-2*/summary.json").stdout)

    def events(self, kind: str) -> list[dict]:
        return [event for event in self.read("events.jsonl") if event["type"] == kind]

    def until(self, what):
        """Wait for it, while the command is there."""

        def look():
            found = what()
            assert found or self.process.poll() is None, self.log.read_text()[-4000:]
            return found

        return until(look, self._told, self._size)

    def _told(self) -> str:
        return f"{self.log.read_text()[-3000:]}\n{self.read('events.jsonl')[-12:]}"

    def _size(self) -> str:
        """Of what was said so far."""
        return self.head.run("sh", "-c", f"cat runs/{self.name}-2*/*.jsonl | wc -c").stdout

    def steps(self) -> int:
        return len(self.read("metrics.jsonl"))

    def goes_on(self, steps: int = 15) -> None:
        """Until it has committed some more."""
        done = self.steps()
        self.until(lambda: self.steps() >= done + steps)

    def end(self) -> str:
        until(lambda: self.process.poll() is not None, self._told, self._size)
        return self.log.read_text()

    def ledger(self) -> dict[int, tuple]:
        return {r["step"]: (r["samples"], r["loss_bits"], r["norm_bits"]) for r in self.read("ledger.jsonl")}
