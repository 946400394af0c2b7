"""Whoever is killed, whenever: nothing stays behind. Each case kills one real process of a real tree."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from phalanx.runtime import kernel
from phalanx.runtime.client import NodeClient
from tests.runtime.conftest import alive_with, wait_gone

CLIENT = """
import sys
from pathlib import Path
from phalanx.runtime.client import NodeClient
logs = Path(sys.argv[1])
with NodeClient(["tests.runtime.workers"], log=logs / "node.log") as client:
    for worker, entry in enumerate(sys.argv[2:]):
        client.spawn(worker, "tests.runtime.workers:" + entry, {}, logs / "w.log")
    silent = len(sys.argv[2:])
    while (event := client.events(60))["type"] != "node_lost":
        silent -= event["type"] == "message"
        if not silent:
            print("up", flush=True)
"""


class Victim:
    """A client in a process of its own, with its node, zygote and three workers."""

    def __init__(self, directory: Path, *entries: str):
        self.token = uuid.uuid4().hex
        self.directory = directory
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        env = {**os.environ, "PHALANX_TOKEN": self.token, "TMPDIR": str(self.scratch)}
        self.client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(directory), *entries], env=env, stdout=subprocess.PIPE
        )

    def wait_up(self) -> None:
        assert self.client.stdout.readline() == b"up\n"

    def find(self, part: str) -> int:
        parts = {"node": "runtime.node", "zygote": "runtime.zygote"}
        pids = sorted(pid for pid, line in alive_with(self.token).items() if parts[part] in line)
        return pids[0] if pids else 0  # a worker has the zygote's command line, and comes after it

    def end(self) -> None:
        for pid in alive_with(self.token):
            os.kill(pid, signal.SIGKILL)
        self.client.wait()
        self.client.stdout.close()


@pytest.fixture
def victim(tmp_path):
    v = Victim(tmp_path, "echo", "deaf", "with_child")
    yield v
    v.end()


@pytest.mark.parametrize("who, number", [
    ("client", signal.SIGKILL), ("node", signal.SIGKILL), ("zygote", signal.SIGKILL),
    ("client", signal.SIGINT), ("node", signal.SIGTERM), ("node", signal.SIGINT), ("zygote", signal.SIGTERM),
])  # fmt: skip
def test_one_death_ends_all(victim, who, number):
    victim.wait_up()
    deadline = time.monotonic() + 5  # a process amid its exec shows no environment
    while len(alive_with(victim.token)) != 7:  # client, node, zygote, three workers, one child of a worker
        assert time.monotonic() < deadline, alive_with(victim.token)
    os.kill(victim.client.pid if who == "client" else victim.find(who), number)
    assert wait_gone(victim.token) == {}
    assert list(victim.scratch.iterdir()) == [], "a file was left behind"
    assert {p.name for p in victim.directory.iterdir()} == {"scratch", "node.log", "w.log"}


def test_the_tree_falls_without_the_help_of_a_living_client(victim):
    """The kernel ends zygote and workers with their parents; the client, stopped here, cannot."""
    victim.wait_up()
    node = victim.find("node")
    victim.client.send_signal(signal.SIGSTOP)
    os.kill(node, signal.SIGKILL)
    deadline = time.monotonic() + 2
    # Only what a worker itself had started is beyond the kernel's order: the client sees to it when it wakes.
    while left := [x for x in alive_with(victim.token).values() if "phalanx.runtime." in x and "-m" in x]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    victim.client.send_signal(signal.SIGCONT)
    assert wait_gone(victim.token) == {}


def test_a_zygote_amid_its_imports_goes_with_its_node(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    client = NodeClient(["slow_module"])
    deadline = time.monotonic() + 5
    while not any("runtime.zygote" in line for line in alive_with(client.session).values()):
        assert time.monotonic() < deadline
    time.sleep(0.3)
    client.process.kill()
    assert wait_gone(client.session) == {}
    client.close()


def test_a_process_whose_parent_is_gone_already_ends_itself():
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent(parent=1 << 22)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_kill_at_any_moment_of_the_start(tmp_path):
    """Between two lines of any of the processes: the window in which nobody has set up anything yet."""
    rng = random.Random(4)
    for i in range(12):
        (tmp_path / str(i)).mkdir()
        v = Victim(tmp_path / str(i), "echo", "deaf")
        try:
            who = ("client", "node", "zygote")[i % 3]
            deadline = time.monotonic() + 5
            pid = v.client.pid if who == "client" else 0
            while not pid and time.monotonic() < deadline:
                pid = v.find(who)
            time.sleep(rng.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert wait_gone(v.token) == {}, who
        finally:
            v.end()


@pytest.mark.parametrize("who, said", [("node", "killed by SIGKILL"), ("zygote", "zygote ended (killed by SIGKILL)")])
def test_the_client_is_told_of_the_loss(tree, who, said):
    tree.spawn(0, "echo")
    tree.until("message")
    line = {"node": "runtime.node", "zygote": "runtime.zygote"}[who]
    pids = [pid for pid, text in alive_with(tree.client.session).items() if line in text]
    os.kill(min(pids), signal.SIGKILL)
    event = tree.until("node_lost")
    assert said in event["reason"]
    assert tree.client.events(0) == event, "the loss cannot be missed"
    tree.spawn(1, "echo")  # harmless
    tree.client.close()
    assert wait_gone(tree.client.session, timeout=0.0) == {}
