"""Kill any process at any time: nothing stays behind. Each case kills one real process of a real tree."""

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
from phalanx.runtime.bare import BareClient
from tests.runtime.cluster import wait_for
from tests.runtime.conftest import alive_with, wait_gone

CLIENT = """
import sys
from pathlib import Path
from phalanx.runtime.bare import BareClient
logs = Path(sys.argv[1])
with BareClient(["tests.runtime.workers"], log=logs / "node.log") as client:
    for worker, entry in enumerate(sys.argv[2:]):
        client.spawn(worker, "tests.runtime.workers:" + entry, {}, logs / "w.log")
    silent = len(sys.argv[2:])
    while (event := client.events(60))["type"] != "node_lost":
        silent -= event["type"] == "message"
        if not silent:
            print("up", flush=True)
"""
PARTS = {"node": "-m phalanx.runtime.bare", "zygote": "-m phalanx.runtime.zygote"}


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
        """Return the pid of a part. Workers have the zygote's command line, but higher pids."""
        return min((pid for pid, line in alive_with(self.token).items() if PARTS[part] in line), default=0)

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
    # Client, node, zygote, three workers, one child of a worker. A process amid its exec shows no environment.
    wait_for(lambda: len(alive_with(victim.token)) == 7)
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
    # The kernel does not end what a worker itself had started: the client does so when it wakes.
    wait_for(lambda: not any(part in x for x in alive_with(victim.token).values() for part in PARTS.values()))
    victim.client.send_signal(signal.SIGCONT)
    assert wait_gone(victim.token) == {}


def test_a_zygote_amid_its_imports_goes_with_its_node(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    client = BareClient(["slow_module"])
    wait_for(lambda: any("runtime.zygote" in line for line in alive_with(client.session).values()))
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
    """The kill comes between two lines of any of the processes, while nobody has set up anything yet."""
    rng = random.Random(4)
    for i in range(12):
        (tmp_path / str(i)).mkdir()
        v = Victim(tmp_path / str(i), "echo", "deaf")
        try:
            who = ("client", "node", "zygote")[i % 3]
            pid = v.client.pid if who == "client" else wait_for(lambda who=who, v=v: v.find(who))
            time.sleep(rng.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert wait_gone(v.token) == {}, who
        finally:
            v.end()


@pytest.mark.parametrize("who, said", [("node", "killed by SIGKILL"), ("zygote", "zygote ended (killed by SIGKILL)")])
def test_the_client_is_told_of_the_loss(tree, who, said):
    tree.spawn(0, "echo")
    tree.until("message")
    os.kill(min(pid for pid, line in alive_with(tree.client.session).items() if PARTS[who] in line), signal.SIGKILL)
    event = tree.until("node_lost")
    assert said in event["reason"]
    assert tree.client.events(0) == event, "the loss cannot be missed"
    tree.spawn(1, "echo")  # harmless
    tree.client.close()
    assert wait_gone(tree.client.session, timeout=0.0) == {}
