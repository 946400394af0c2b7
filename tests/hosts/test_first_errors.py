"""The errors that a first run on several hosts meets, each made on purpose: the message names the cause and the remedy.
docs/clusters.md shows them."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys

import pytest

from phalanx.chaos.hosts import installed, why_not
from tests.engines.submitted import PATIENCE_S, until
from tests.hosts.fleet import ENV, SSHD, TRAINERS, Fleet, Training

missing = why_not() or ("" if SSHD else "sshd not found: apt install openssh-server")
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(missing), reason=missing)]
BY_SSH = ("--on", "ssh", "--hosts", ",".join(TRAINERS))
AGENT = [sys.executable, "-P", "-m", "phalanx.runtime.node"]


@pytest.fixture(scope="module")
def fleet():
    with Fleet() as fleet:
        yield fleet


@pytest.fixture
def train(fleet, tmp_path, request):
    def run(*args, **values):
        started = Training(fleet, tmp_path, f"e{request.node.name[5:20].replace('_', '')}", *args, **values)
        said = started.end()
        assert "Traceback" not in said, said
        return started.process.returncode, said

    return run


def agent(host, *args, give_up_s=3, secret="0" * 64, **env):
    host.run("sh", "-c", f"umask 077; echo {secret} > secret")
    done = host.run(
        *AGENT, "--secret", "secret", "--give-up-s", str(give_up_s), *args, env=ENV | env, timeout=PATIENCE_S
    )
    assert "Traceback" not in done.stderr, done.stderr
    print(done.stderr)
    return done.returncode, done.stderr


@pytest.fixture
def waiting(fleet, tmp_path):
    """Start a controller that waits for agents. Return the fleet, and the controller's secret."""
    run = Training(fleet, tmp_path, "waiting", "--listen", "10.77.0.2:7700", command="controller")
    run.until(lambda: "waiting for 3 nodes" in run.log.read_text())
    secret = run.head.run("sh", "-c", "cat runs/waiting-2*/control/secret").stdout.strip()
    yield fleet, secret
    pid = run.head.run("sh", "-c", "cat runs/waiting-2*/head.json").stdout
    run.head.run("sh", "-c", f"kill {pid.split(':')[1].split(',')[0]}")
    run.end()
    run.head.run("sh", "-c", "rm -r runs/waiting-2*")


def test_wrong_interface(train):
    code, said = train(*BY_SSH, **{"run.networks": '["10.99.0.0/16"]'})
    assert code == 1 and "no interface of this host is in it; it has lo 127.0.0.1, eth0 10.77.0." in said
    assert "run.networks = '10.99.0.0/16'" in said and "correct run.networks" in said


@pytest.mark.skipif(not shutil.which("nft"), reason="nft not found: apt install nftables")
def test_firewall(waiting):
    fleet, secret = waiting
    head = fleet.hosts["head"]
    only_b = fleet.on_head("firewall", "10.77.0.4", "--interface", "eth0").stdout
    assert head.run("nft", "-f", "-", input=only_b).returncode == 0
    code, said = agent(fleet.hosts["a"], "--join", "10.77.0.2:7700", secret=secret, give_up_s=8)
    head.run("nft", "flush", "ruleset")
    assert code == 2 and "did not answer in 5 s (does a firewall drop what comes" in said


def test_a_cable_that_is_out(waiting):
    fleet, secret = waiting
    a = fleet.hosts["a"]
    a.cut(0)
    code, said = agent(a, "--join", "10.77.0.2:7700", secret=secret, give_up_s=8)
    a.mend(0)
    assert code == 2 and ("No route" in said or "cannot be reached" in said or "did not answer" in said)
    assert "ip route get" in said or "firewall" in said


def test_nobody_listens_there(fleet):
    code, said = agent(fleet.hosts["a"], "--join", "10.77.0.2:7711")
    assert code == 2 and "Connection refused (nobody listens there: is the controller up" in said


def test_another_secret(waiting):
    fleet, _ = waiting
    code, said = agent(fleet.hosts["a"], "--join", "10.77.0.2:7700")
    assert code == 2 and "is the cluster's secret the same there?" in said


def test_clock(waiting):
    """A wrong clock does not matter to the run, since no decision compares the clocks of two hosts, but it does to
    S3."""
    fleet, secret = waiting
    a = fleet.hosts["a"]
    a.run(
        "sh",
        "-c",
        "mkdir -p late; echo 'import time; t = time.time; time.time = lambda: t() - 3600' > late/sitecustomize.py",
    )
    late = {"PYTHONPATH": f"/root/late:{ENV['PYTHONPATH']}"}
    a.run("sh", "-c", f"umask 077; echo {secret} > secret")
    with joining(a, env=ENV | late):
        told = said_of(fleet, "the clock of node a is 3,6")
    assert "behind this host's" in told and "chrony" in told


@contextlib.contextmanager
def joining(host, *prefix, env):
    """Start an agent that joins, and keep it for a while."""
    join = [*prefix, *AGENT, "--join", "10.77.0.2:7700", "--secret", "secret", "--attached"]
    process = host.start(*join, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    yield
    process.stdin.close()
    process.wait(PATIENCE_S)


def said_of(fleet, text):
    """Return what the user of the waiting controller is told."""
    told = lambda: [line for line in events_of(fleet).splitlines() if '"told"' in line and text in line]  # noqa: E731
    return until(lambda: "".join(told()))


def events_of(fleet):
    return fleet.hosts["head"].run("sh", "-c", "cat runs/waiting-2*/events.jsonl").stdout


def test_version(waiting):
    fleet, secret = waiting
    a = fleet.hosts["a"]
    a.run("sh", "-c", f"rm -rf mine; cp -r {installed()[2]} mine; echo '# changed' >> mine/phalanx/core/job.py")
    code, said = agent(a, "--join", "10.77.0.2:7700", secret=secret, PYTHONPATH="/root/mine")
    assert code == 2 and "it runs phalanx 0.1.0+" in said and "and the controller runs 0.1.0+" in said
    assert "install the same code on both" in said


def test_another_torch(waiting):
    fleet, secret = waiting
    a, b = fleet.hosts["a"], fleet.hosts["b"]
    for host in (a, b):
        host.run("sh", "-c", f"umask 077; echo {secret} > secret")
    old = "mkdir -p old/torch-2.1.0.dist-info; cd old/torch-2.1.0.dist-info"
    a.run("sh", "-c", f"{old}; printf 'Name: torch\\nVersion: 2.1.0\\n' > METADATA")
    with joining(b, env=ENV):
        until(lambda: '"what": "joined"' in events_of(fleet))
        code, said = agent(a, "--join", "10.77.0.2:7700", secret=secret, PYTHONPATH=f"/root/old:{ENV['PYTHONPATH']}")
    assert code == 2 and "it runs torch 2.1.0, and the other nodes run 2." in said


def test_the_same_name_twice(waiting):
    fleet, secret = waiting
    fleet.hosts["b"].run("sh", "-c", f"umask 077; echo {secret} > secret")
    with joining(fleet.hosts["b"], env=ENV):
        until(lambda: '"service": "keeper"' in events_of(fleet))
        code, said = agent(fleet.hosts["a"], "--join", "10.77.0.2:7700", "--name", "b", secret=secret)
    assert code == 2 and "a node with the name b is here already, at 10.77.0.4" in said and "--name" in said


def test_name_resolution(fleet, train):
    code, said = agent(fleet.hosts["a"], "--join", "haed:7700")
    assert code == 2 and "this name has no address here" in said and "haed" in said and "/etc/hosts" in said
    code, said = train("--on", "ssh", "--hosts", "a,b,q")
    assert code == 1 and "Could not resolve hostname q" in said


def test_no_shared_disk(train):
    code, said = train(*BY_SSH, **{"checkpoint.dir": ""})
    assert code == 2 and "every host would write its part of a checkpoint to its own disk" in said
    code, said = train(*BY_SSH, **{"checkpoint.dir": "/root/checkpoints"})
    assert code == 1 and "this host does not see what the run has written there: it is another disk" in said
    code, said = train(*BY_SSH, **{"data.source": "/root/text"})
    assert code == 1 and "data" in said and "may not join" in said


def test_port_in_use(fleet, train):
    head = fleet.hosts["head"]
    taken = head.start("python3", "-c", "import socket; s = socket.create_server(('0.0.0.0', 7733)); input()", stdin=-1)
    until(lambda: ":1E35" in head.run("cat", "/proc/net/tcp").stdout)
    code, said = train(*BY_SSH, "--listen", "10.77.0.2:7733")
    taken.kill()
    taken.wait()
    taken.stdin.close()
    assert code == 2 and "nothing can listen there: Address already in use" in said and "--listen" in said


def test_gpu_missing(train):
    code, said = train(*BY_SSH, **{"run.device": "cuda"})
    assert code in (1, 2) and "no such device on this host (accelerator found: none)" in said


def test_too_few_hosts(train):
    code, said = train("--on", "ssh", "--hosts", "a,b")
    assert code == 2 and "the layout asks for 3 hosts of 1 ranks" in said


GPU = """
nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda i: i
nvmlDeviceGetName = lambda handle: "a GPU that is not there"
"""


def test_memory_lock_limit(waiting):
    """The host believes that it has a GPU."""
    fleet, secret = waiting
    a = fleet.hosts["a"]
    a.run("sh", "-c", f"umask 077; echo {secret} > secret; mkdir -p gpu; echo {shlex.quote(GPU)} > gpu/pynvml.py")
    with joining(a, "prlimit", "--memlock=8388608", env=ENV | {"PYTHONPATH": f"/root/gpu:{ENV['PYTHONPATH']}"}):
        told = said_of(fleet, "may lock only")
    assert "node a may lock only 8 MiB of memory" in told and "ulimit -l unlimited" in told
