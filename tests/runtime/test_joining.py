"""Who may join, and as which incarnation."""

from __future__ import annotations

import os

import pytest

from phalanx.control.fold import Plan
from phalanx.control.messages import NodeJoined
from phalanx.control.policy import Policy
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.runtime import inventory
from phalanx.runtime.controller import Controller, Printer, write_plan, write_spec
from phalanx.runtime.launch import hosts_of
from phalanx.runtime.secret import load_secret


def test_a_node_with_other_code_is_refused_with_both_versions(cluster):
    c = cluster(layout=Layout())
    c.controller.kill()
    write_spec(c.control, {"version": "0.0.9+old"})
    c.start_controller()
    assert c.start_node("a").process.wait(30) == 2
    said = (c.folder / "logs" / "a.log").read_text()
    assert inventory.version() in said and "0.0.9+old" in said and "install the same code on both" in said


def test_the_version_is_that_of_the_code(tmp_path, monkeypatch):
    before = inventory.version()
    assert before == inventory.version() and before.startswith("0.1.0+")
    copy = tmp_path / "phalanx" / "runtime"
    copy.mkdir(parents=True)
    (copy / "inventory.py").write_text("# other code")
    monkeypatch.setattr(inventory, "__file__", str(copy / "inventory.py"))
    assert inventory.version() != before


@pytest.fixture
def controller(tmp_path):
    write_plan(tmp_path, Plan(Layout(replica=2, ranks_per_node=1), 10, 0, 0, Policy(save=False)))
    null = os.open(os.devnull, os.O_WRONLY)
    made = Controller(tmp_path, load_secret(tmp_path / "secret"), printer=Printer(null))
    yield made
    made.close()
    os.close(null)


def join(controller, node, life, address):
    return controller._admit({"node": node, "life": life, "about": {"address": address}})


def has_joined(controller, node, incarnation):
    controller._take("event", {"event": NodeJoined(node, incarnation, "d", address="h").to_dict()})


def test_a_host_that_comes_back_under_its_name_is_a_new_incarnation(controller):
    assert join(controller, "a", "1", "10.0.0.1") == {"node": "a", "type": "serve", "incarnation": 1}
    has_joined(controller, "a", 1)
    # Its agent was started again, or the host has lost everything: it need not remember who it was.
    assert join(controller, "a", "2", "10.0.0.1")["incarnation"] == 2
    assert join(controller, "a", "2", "10.0.0.1")["incarnation"] == 3, "nobody knows whether it has heard"
    assert join(controller, "b", "3", "10.0.0.2")["incarnation"] == 1


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


def test_a_node_knows_its_interfaces(monkeypatch):
    assert inventory.interfaces()["lo"] == "127.0.0.1" and inventory.address_towards("127.0.0.1") == "127.0.0.1"
    assert inventory.rails([], "127.0.0.1") == [{"interface": "lo", "address": "127.0.0.1"}]
    assert inventory.rails(["127.0.0.0/8"], "x") == [{"interface": "lo", "address": "127.0.0.1"}]
    with pytest.raises(UserError, match=r"run\.networks = '203\.0\.113\.0/24'.*lo 127\.0\.0\.1"):
        inventory.rails(["203.0.113.0/24"], "x")
