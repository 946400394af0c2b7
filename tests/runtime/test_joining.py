"""Who may join, and as which incarnation."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from phalanx.control.journaled import Plan
from phalanx.control.messages import NodeJoined
from phalanx.control.policy import Policy
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.engines.ssh import hosts_of
from phalanx.gate.proof import Identity, Token
from phalanx.runtime import inventory, node
from phalanx.runtime.controller import Controller, Printer, read_address, write_plan, write_spec
from phalanx.runtime.secret import load_secret
from phalanx.runtime.transport import Link
from tests.runtime.cluster import has_ended, wait_for


def test_a_node_with_other_code_is_refused_with_both_versions(cluster):
    c = cluster(layout=Layout())
    c.controller.kill()
    write_spec(c.control, {"version": "0.0.9+old"})
    c.start_controller()
    node = c.start_node("a")
    wait_for(lambda: has_ended(node))
    assert node.was_refused()
    said = (c.folder / "logs" / "a.log").read_text()
    assert inventory.version() in said and "0.0.9+old" in said and "install the same code on both" in said


def test_nobody_else_can_read_what_nodes_are_told(tmp_path):
    """It contains the key with which ranks hand each other their state."""
    mask = os.umask(0)
    try:
        write_spec(tmp_path, {"version": "x"})
    finally:
        os.umask(mask)
    assert (tmp_path / "serve.json").stat().st_mode & 0o777 == 0o600


def test_the_version_is_that_of_the_code(tmp_path, monkeypatch):
    before = inventory.version()
    assert before == inventory.version() and before.startswith("0.1.0+")
    copy = tmp_path / "phalanx" / "runtime"
    copy.mkdir(parents=True)
    (copy / "inventory.py").write_text("# other code")
    monkeypatch.setattr(inventory, "__file__", str(copy / "inventory.py"))
    assert inventory.version() != before


def test_a_node_that_has_joined_has_a_pulse(cluster, tmp_path):
    """The pulse shows that a node lives to those who cannot ask it."""
    c, pulse = cluster(layout=Layout()), tmp_path / "pulse"
    ((host, port),) = read_address(c.control)["aggregators"]
    command = [sys.executable, "-m", "phalanx.runtime.node", "--join", f"{host}:{port}", "--secret", c.secret.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it serves toys of these tests
    process = subprocess.Popen([*command, "--name", "a", "--pulse", pulse], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_for(pulse.exists)
        before = pulse.stat().st_mtime_ns
        wait_for(lambda: pulse.stat().st_mtime_ns > before)
    finally:
        process.terminate()
        process.wait()


QUICKLY = "import sys; from phalanx.runtime import node; node.ALONE_S = 0.3; sys.exit(node.main())"


def test_a_node_runs_the_command_of_its_starter_only_while_no_controller_is_heard_of(cluster, tmp_path):
    c, pulse, asked = cluster(layout=Layout()), tmp_path / "pulse", tmp_path / "asked"
    ((host, port),) = read_address(c.control)["aggregators"]
    command = [sys.executable, "-c", QUICKLY, "--join", f"{host}:{port}", "--secret", c.secret.path, "--name", "a"]
    command += ["--pulse", pulse, "--when-alone", shlex.join(["sh", "-c", f"echo asked >> {asked}"])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        wait_for(pulse.exists)
        before = asked.read_text() if asked.exists() else ""  # joining may have taken longer than that
        for _ in range(10):
            last = pulse.stat().st_mtime_ns
            wait_for(lambda last=last: pulse.stat().st_mtime_ns > last)
        assert (asked.read_text() if asked.exists() else "") == before
        c.controller.kill()
        wait_for(lambda: asked.exists() and asked.read_text().count("asked") >= before.count("asked") + 2)
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("said", "place"), [("", ""), (".", ""), (".zone-a", "zone-a"), ("east.zone-a", "east.zone-a")]
)
def test_a_node_whose_starter_knows_a_part_of_its_place_says_that_part(monkeypatch, tmp_path, said, place):
    found = []
    monkeypatch.setattr(
        node, "Node", lambda options, _: found.append(options) or SimpleNamespace(run=str, stopped=None)
    )
    load_secret(tmp_path / "secret")
    node.main(["--join", "127.0.0.1:7", "--secret", str(tmp_path / "secret"), "--topology", said])
    assert found[0].topology == place


@pytest.mark.parametrize("name", ["büro", "a b", "\udcff"])
def test_a_node_with_a_name_that_no_run_takes_is_told_so_here(tmp_path, capsys, name):
    load_secret(tmp_path / "secret")
    assert node.main(["--join", "127.0.0.1:7", "--secret", str(tmp_path / "secret"), "--name", name]) == 2
    assert "--name" in capsys.readouterr().err


@pytest.fixture
def controller(tmp_path):
    write_plan(tmp_path, Plan(Layout(replica=2, ranks_per_node=1), 10, 0, 0, Policy(save=False)))
    null = os.open(os.devnull, os.O_WRONLY)
    made = Controller(tmp_path, load_secret(tmp_path / "secret"), printer=Printer(null))
    yield made
    made.close()
    os.close(null)


def join(controller, node, life, address, **about):
    return controller._admit({"node": node, "life": life, "about": {"address": address, **about}})


def has_joined(controller, node, incarnation):
    controller._take("event", {"event": NodeJoined(node, incarnation, "d", address="h").to_dict()})


def test_a_host_that_comes_back_under_its_name_is_a_new_incarnation(controller):
    assert join(controller, "a", "1", "10.0.0.1") == {"node": "a", "type": "serve", "incarnation": 1}
    has_joined(controller, "a", 1)
    # Its agent was restarted, or the host has lost everything: it need not remember who it was.
    assert join(controller, "a", "2", "10.0.0.1")["incarnation"] == 2
    assert join(controller, "a", "2", "10.0.0.1")["incarnation"] == 3, "nobody knows whether it has heard"
    assert join(controller, "b", "3", "10.0.0.2")["incarnation"] == 1


def test_a_node_cannot_speak_to_the_controller_itself(controller, tmp_path):
    """With its token, and the name of an aggregator, it would take the aggregator's place."""
    token = Token("agent", "local", load_secret(tmp_path / "secret").token_of("agent", "local"))
    me = Identity("agent", "local", 1 << 40)
    link = Link(controller.loop, token, me, [controller.server.address], {}, lambda *_: None)
    deadline = time.monotonic() + 20
    while not controller.server.refused:
        assert time.monotonic() < deadline, "it is let in"
        controller.loop.turn(0.05)
    assert "expected aggregator or user" in controller.server.trouble and "local" not in controller.server.sessions
    link.close()


def test_nodes_with_another_torch_are_refused_with_both_versions(controller):
    assert join(controller, "a", "1", "10.0.0.1", torch="2.13.0+cu130")["type"] == "serve"
    assert join(controller, "b", "2", "10.0.0.2", torch="2.13.0+cu130")["type"] == "serve"
    refused = join(controller, "c", "3", "10.0.0.3", torch="2.11.0")
    assert refused["type"] == "refused" and refused["final"]
    assert "it runs torch 2.11.0, and the other nodes run 2.13.0+cu130" in refused["reason"]


def test_a_first_node_with_the_wrong_torch_does_not_keep_the_others_out_for_ever(controller):
    join(controller, "a", "1", "10.0.0.1", torch="2.11.0")
    has_joined(controller, "a", 1)
    assert join(controller, "b", "2", "10.0.0.2", torch="2.13.0")["type"] == "refused"
    assert join(controller, "a", "3", "10.0.0.1", torch="2.13.0")["type"] == "serve", "it was repaired"
    has_joined(controller, "a", 2)
    assert join(controller, "b", "4", "10.0.0.2", torch="2.13.0")["type"] == "serve"
    has_joined(controller, "b", 1)
    controller.gang.members.nodes["a"].dead = True
    assert join(controller, "c", "5", "10.0.0.3", torch="2.11.0")["type"] == "refused", "b has another"


def test_after_a_restart_of_the_controller_a_live_nodes_name_is_still_its_own(controller):
    controller._take("event", {"event": NodeJoined("a", 1, "d", address="10.0.0.1,10.1.0.1").to_dict()})
    assert not controller._joined, "as after a restart"
    refused = join(controller, "a", "2", "10.0.0.9")
    assert refused["type"] == "refused" and not refused["final"] and "10.0.0.1" in refused["reason"]
    assert join(controller, "a", "1", "10.0.0.1")["incarnation"] == 2
    assert join(controller, "a", "1", "10.0.0.9")["incarnation"] == 3, "the same process, over another network"


def test_a_node_says_what_it_has(monkeypatch):
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", "spine0.leaf3.n7")
    said = inventory.about("127.0.0.1")
    assert said["address"] == "127.0.0.1" and said["interfaces"]["lo"] == "127.0.0.1" and said["torch"]
    assert said["cores"] >= 1 and said["memory_bytes"] > 1 << 28 and said["numa_nodes"] >= 1
    assert said["topology"] == "spine0.leaf3" and inventory.about("x", "rack7")["topology"] == "rack7"


def test_two_hosts_with_one_name_are_told_apart(controller):
    join(controller, "a", "1", "10.0.0.1")
    has_joined(controller, "a", 1)
    refused = join(controller, "a", "2", "10.0.0.9")
    assert refused["type"] == "refused" and not refused["final"] and "10.0.0.1" in refused["reason"]
    assert "--name" in refused["reason"]
    controller.gang.members.nodes["a"].dead = True  # it was given up
    assert join(controller, "a", "2", "10.0.0.9")["incarnation"] == 2


def test_hosts_come_from_a_list_or_from_a_file_that_says_how_to_get_there(tmp_path):
    assert hosts_of("a,b") == {"a": (), "b": ()}
    file = tmp_path / "hosts"
    file.write_text("# the trainers\na\nb   ssh -p 2222 me@b  # another port\n\n")
    assert hosts_of(str(file)) == {"a": (), "b": ("ssh", "-p", "2222", "me@b")}
    for text in ("", "a,a", "no/such/file"):
        with pytest.raises(UserError, match="--hosts"):
            hosts_of(text)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000"])
def test_an_address_that_is_none_is_named(text):
    with pytest.raises(UserError, match="--join"):
        inventory.parse_address(text, "--join")


@pytest.mark.parametrize(("network", "remedy"), [("10.77.1.3/24", "10.77.1.0/24"), ("rack 7", "10.1.0.0/16")])
def test_what_is_no_network_is_named_with_one_that_is(network, remedy):
    with pytest.raises(UserError, match=f'run.networks = {network!r}: it is no network.*\n.*write it as "{remedy}"'):
        inventory.inside(network)


def test_a_node_joins_by_the_first_address_to_which_there_is_a_route(monkeypatch):
    near = inventory._address_towards

    def towards(host):
        if host.startswith("203.0.113."):
            raise UserError(f"{host} cannot be reached from here")
        return near(host)

    monkeypatch.setattr(inventory, "_address_towards", towards)
    assert inventory.address_towards("203.0.113.1", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"203\.0\.113\.2 cannot be reached"):
        inventory.address_towards("203.0.113.1", "203.0.113.2")


def test_a_node_knows_its_interfaces(monkeypatch):
    assert inventory.interfaces()["lo"] == "127.0.0.1" and inventory.address_towards("127.0.0.1") == "127.0.0.1"
    assert inventory.rails([], "127.0.0.1") == [{"interface": "lo", "address": "127.0.0.1"}]
    assert inventory.rails(["127.0.0.0/8"], "x") == [{"interface": "lo", "address": "127.0.0.1"}]
    with pytest.raises(UserError, match=r"run\.networks = '203\.0\.113\.0/24'.*lo 127\.0\.0\.1"):
        inventory.rails(["203.0.113.0/24"], "x")
