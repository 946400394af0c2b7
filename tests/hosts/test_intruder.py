"""A stranger on the network of a running job scans all ports and tries to get in. The job continues, recovers from a
killed worker meanwhile, and ends as it would have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from phalanx.gate.porch import MAX_STRANGERS
from phalanx.runtime.firewall import rules
from tests.engines.submitted import PATIENCE_S
from tests.hosts.intruder import SAID
from tests.runtime.cluster import wait_for

HOME, STRANGER = "10.79.0.1", "10.79.0.2"
REPO = Path(__file__).parents[2]
TINY = {
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 2, "model.ffn_dim": 32,
    "train.seq_len": 32, "train.global_batch": 4, "train.micro_batch": 2, "train.steps": 100_000, "data.max_mb": 0.1,
    "layout.replica": 2, "layout.tp": 1, "layout.ranks_per_node": 1, "recovery.spares": 0,
    "checkpoint.memory_every_steps": 50,
}  # fmt: skip


def why_not() -> str:
    missing = [tool for tool in ("ip", "unshare", "nsenter", "prlimit") if not shutil.which(tool)]
    if missing:
        return f"{', '.join(missing)} not found: apt install iproute2 util-linux"
    if os.geteuid():
        return "only root may make network namespaces"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"no namespace can be made: {made.stderr.strip()}" if made.returncode else ""


pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]


class Town:
    """Two network namespaces and a cable: the job's home, and the stranger's."""

    def __init__(self):
        self.holders = [
            subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1) for _ in range(2)
        ]
        for holder in self.holders:
            holder.stdout.readline()
        home, stranger = (holder.pid for holder in self.holders)
        self.run(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(stranger))
        for who, address in enumerate((HOME, STRANGER)):
            self.run(who, "ip", "link", "set", "lo", "up")
            self.run(who, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self.run(who, "ip", "link", "set", "eth0", "up")
        self.home = home

    def command(self, who, *command):
        return ["nsenter", f"--net=/proc/{self.holders[who].pid}/ns/net", *command]

    def run(self, who, *command, text=None):
        done = subprocess.run(self.command(who, *command), capture_output=True, text=True, input=text, cwd=REPO)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def intrude(self, *command):
        return json.loads(self.run(1, sys.executable, "-m", "tests.hosts.intruder", *map(str, command)))

    def start(self, *command):
        return subprocess.Popen(
            self.command(1, sys.executable, "-m", "tests.hosts.intruder", *map(str, command)),
            cwd=REPO, stdin=-1, stdout=-1,
        )  # fmt: skip

    def listeners(self):
        """Return the listening sockets in the job's home: port -> address, and the inode of the socket."""
        found = {}
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.home}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                address, port = fields[1].split(":")
                if fields[3] == "0A":
                    host = ".".join(str(b) for b in reversed(bytes.fromhex(address))) if name == "tcp" else address
                    found[int(port, 16)] = (host, fields[9])
        return found

    def strangers(self):
        """Count, by port, the stranger's connections that a process in the job's home has accepted; others have no
        inode."""
        theirs = "".join(f"{int(part):02X}" for part in reversed(STRANGER.split(".")))
        lines = [line.split() for line in Path(f"/proc/{self.home}/net/tcp").read_text().splitlines()[1:]]
        taken = (fields for fields in lines if fields[2].startswith(theirs) and int(fields[9]))
        return Counter(int(fields[1].split(":")[1], 16) for fields in taken)

    def close(self):
        for holder in self.holders:
            holder.stdin.close()
            holder.wait()


class Job:
    """The run and its output. It may open few files until it raises the limit itself."""

    def __init__(self, town, folder):
        sets = [f"--set={key}={value}" for key, value in TINY.items()]
        few = ["prlimit", "--nofile=256:20000"]
        command = [*few, sys.executable, "-m", "phalanx.cli.main", "train", "--listen", HOME, *sets]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            town.command(0, *command), cwd=folder, stdout=self.log, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": f"{REPO / 'src'}:{REPO}"}, start_new_session=True,
        )  # fmt: skip
        self.folder = folder
        try:
            wait_for(lambda: self.steps() > 5, PATIENCE_S)
        except BaseException:
            self.close()
            raise
        (self.run,) = (path.parent for path in folder.glob("runs/*/metrics.jsonl"))

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def steps(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()[-3000:]
        found = [*self.folder.glob("runs/*/metrics.jsonl")]
        return sum(1 for _ in found[0].open()) if found else 0

    def goes_on(self):
        done = self.steps()
        wait_for(lambda: self.steps() > done + 20, PATIENCE_S)

    def events(self):
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    def workers(self):
        """Return rank -> pid of the workers that live."""
        return {e["rank"]: e["pid"] for e in self.events() if e["type"] == "started" and e["rank"] >= 0}


@pytest.fixture(scope="module")
def town():
    town = Town()
    yield town
    town.close()


@pytest.fixture(scope="module")
def job(town, tmp_path_factory):
    job = Job(town, tmp_path_factory.mktemp("job"))
    yield job
    job.close()


@pytest.fixture(scope="module")
def ports(town, job):
    """Return the ports that a stranger can reach: ours, and those of Gloo."""
    found, there = town.intrude("scan", HOME), town.listeners()
    assert {*found} == {port for port, (host, _) in there.items() if host == HOME}
    owners = {}
    for pid in {*job.workers().values()}:
        owners |= {os.readlink(f"/proc/{pid}/fd/{fd}"): pid for fd in os.listdir(f"/proc/{pid}/fd")}
    ours = town.intrude("speaks_tls", HOME, *found)
    gloo = [port for port in found if port not in ours]
    assert all(f"socket:[{there[port][1]}]" in owners for port in gloo), "only ranks, and only torch, listen in clear"
    return {"ours": ours, "gloo": gloo}


def test_nothing_listens_on_all_interfaces(town, job):
    assert {host for host, _ in town.listeners().values()} <= {HOME, "127.0.0.1"}


def test_no_store_and_no_clear_port_but_torchs_own(ports, job):
    """These speak TLS: controller, aggregator, record, the keeper of each node, the state of each rank. Gloo's ports do
    not."""
    nodes = {e["node"] for e in job.events() if e["type"] == "node"} - {"controller"}
    assert len(ports["ours"]) == 3 + len(nodes) + len(job.workers()) and ports["gloo"]


def test_strangers_and_malformed_frames_get_nothing(town, ports, job):
    for port, heard in town.intrude("knock", HOME, *ports["ours"]).items():
        assert len(heard) == 2 * len(SAID) + 3, "in clear, under TLS, and with another secret"
        assert {name: said for name, said in heard.items() if said} == {}, f"port {port} answered"
    job.goes_on()


def test_a_captured_token_opens_one_name(town, job, ports):
    at = json.loads((job.run / "control" / "controller.json").read_text())["aggregators"][0][1]
    role, name, key = (job.run / "control" / "node-1" / "token").read_text().split()
    assert (role, name) == ("agent", "node-1")
    assert town.intrude("claim", HOME, at, key, "token", "node-9", "node-0") == {"node-9": False, "node-0": False}
    secret = (job.run / "control" / "secret").read_text().strip()
    assert town.intrude("claim", HOME, at, secret, "secret", "node-9") == {"node-9": True}, "it was not even tried"
    job.goes_on()


def test_what_a_member_said_is_not_taken_once_more(town, job):
    """The recorded answer was to another challenge: nothing is sent, and nobody is let in."""
    at = json.loads((job.run / "control" / "controller.json").read_text())["aggregators"][0][1]
    secret = (job.run / "control" / "secret").read_text().strip()
    assert town.intrude("replay", HOME, at, secret, "node-9") == [2, 0]
    job.goes_on()


def test_a_crowd_on_every_port_while_a_worker_dies(town, job, ports):
    """There are a thousand half-open connections to each port, Gloo's too, for as long as this lasts. A rank is killed.
    Its next worker gets through to the state of a peer, because strangers have to make way."""
    before = job.workers()
    crowd = town.start("crowd", HOME, 1000, *ports["ours"], *ports["gloo"])
    try:
        wait_for(lambda: town.strangers().keys() >= {*ports["ours"]}, PATIENCE_S)
        job.goes_on()
        assert job.workers() == before, "a stranger has ended a rank"
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: job.workers()[1] != before[1], PATIENCE_S)
        wait_for(lambda: any(e.get("source") == "live" for e in job.events() if e.get("type") == "entered"), PATIENCE_S)
        for _ in range(5):
            job.goes_on()
            taken = town.strangers()
            most = 3 * MAX_STRANGERS  # they come and go while the kernel lists them
            assert max(taken[port] for port in ports["ours"]) <= most, "they are let in without a bound"
        assert crowd.poll() is None
    finally:
        opened = json.loads(crowd.communicate()[0])  # its standard input ends
    assert opened > 1000 * len(ports["ours"]), "they were not many"
    assert job.workers()[0] == before[0], "a stranger has ended a rank"


@pytest.mark.skipif(not shutil.which("nft"), reason="nft not found: apt install nftables")
def test_behind_the_rules_nothing_is_to_be_seen(town, job):
    town.run(0, "nft", "-f", "-", text=rules([HOME], ["eth0"], keep=()))
    ports = [port for port, (host, _) in town.listeners().items() if host == HOME]
    assert town.intrude("scan", HOME, min(ports), min(ports)) == []
    assert all(town.intrude("scan", HOME, port, port) == [] for port in ports)
    job.goes_on()


def test_it_ends_as_it_would_have(job):
    job.process.send_signal(signal.SIGTERM)
    wait_for(lambda: job.process.poll() is not None, PATIENCE_S)
    assert (job.run / "summary.json").is_file()
