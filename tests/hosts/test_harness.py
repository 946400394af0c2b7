"""Hosts made of namespaces: each sees only what is its own; cables can be pulled; nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.chaos.hosts import Switch, installed, why_not
from tests.runtime.cluster import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]
CARRIER = "cat /sys/class/net/eth0/carrier /sys/class/net/eth1/carrier"
ANSWER = "import socket; s = socket.create_server(('0.0.0.0', 7)); print(flush=True); s.accept()[0].recv(1)"
ASK = "import socket, sys; c = socket.create_connection((sys.argv[1], 7), 1); print('there')"


def asks(host, address):
    return host.run(sys.executable, "-c", ASK, address).stdout.strip()


@pytest.fixture(scope="module")
def switch():
    with Switch(2, ["a", "b"]) as switch:
        for name in switch.names:
            switch.add(name)
        yield switch


def test_hosts_have_nothing_in_common_but_what_is_installed(switch):
    a, b = switch.hosts["a"], switch.hosts["b"]
    a.run("sh", "-c", "echo mine > /tmp/file; echo mine > /dev/shm/file; sleep 60 >/dev/null 2>&1 & exit 0")
    assert a.run("cat", "/tmp/file", "/dev/shm/file").stdout == "mine\nmine\n"
    shown = {path.relative_to("/tmp").parts[0] for path in installed() if path.is_relative_to("/tmp")}
    assert b.run("ls", "/dev/shm").stdout == "" and {*b.run("ls", "/tmp").stdout.split()} == shown
    assert [h.run("hostname").stdout for h in (a, b)] == ["a\n", "b\n"]
    assert "sleep" in a.run("ps", "ax").stdout and "sleep" not in b.run("ps", "ax").stdout
    script = f"import phalanx, sys; open({str(installed()[2] / 'x')!r}, 'w')"
    done = a.run(sys.executable, "-c", script, env={"PYTHONPATH": str(installed()[2])})
    assert "Read-only file system" in done.stderr
    assert "Read-only" in a.run("sh", "-c", "echo 1 > /proc/sys/vm/swappiness").stderr


def test_a_cable_is_pulled_and_the_other_one_stays(switch):
    a, b = switch.hosts["a"], switch.hosts["b"]
    server = b.start(sys.executable, "-c", ANSWER, stdout=subprocess.PIPE)
    server.stdout.readline()
    b.cut(1)
    assert b.run("sh", "-c", CARRIER).stdout.split() == ["1", "0"]
    assert asks(a, b.addresses[1]) == "" and asks(a, "b") == "there", "names are of the first rail"
    b.mend(1)
    assert b.run("sh", "-c", CARRIER).stdout.split() == ["1", "1"]
    server.kill()
    server.wait()
    server.stdout.close()


def test_a_host_that_lost_power_says_nothing_and_comes_back_empty(switch):
    a, b = switch.hosts["a"], switch.hosts["b"]
    b.run("touch", "/root/mine")
    listen = f"{ANSWER}; print('end', flush=True)"
    server = a.start(sys.executable, "-c", listen, stdout=subprocess.PIPE)
    server.stdout.readline()
    b.start(sys.executable, "-c", f"{ASK}; import time; time.sleep(60)", a.addresses[0], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    b.fail()
    time.sleep(0.5)
    assert server.poll() is None, "a process that ends says so to its peers; a machine without power does not"
    server.kill()
    server.wait()
    server.stdout.close()
    assert switch.add("b").run("ls", "/root").stdout == ""


def test_nothing_outlives_a_harness_that_is_killed(tmp_path):
    script = (
        "from phalanx.chaos.hosts import Switch\ns = Switch(1, ['a'], net=78)\nprint(s.add('a').pid, s.pid)\ninput()"
    )
    harness = subprocess.Popen([sys.executable, "-uc", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in harness.stdout.readline().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(harness.pid, signal.SIGKILL)
    harness.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
