"""Four hosts without a common disk, three that train and a spare, started by ssh; data and checkpoints on S3. Hosts are
lost, cut off and slowed while they train, and the run ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from phalanx.chaos.hosts import why_not
from tests.hosts.fleet import ENV, NETWORKS, PHALANX, SSHD, TRAINERS, Fleet, Training

missing = why_not() or ("" if SSHD else "sshd not found: install openssh-server")
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(missing), reason=missing)]
STEPS = 900
VALUES = {"run.networks": json.dumps(NETWORKS), "train.steps": STEPS}
BY_SSH = ("--on", "ssh", "--hosts", ",".join(TRAINERS))


@pytest.fixture(scope="module")
def fleet():
    with Fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def clean(fleet, tmp_path_factory):
    run = Training(fleet, tmp_path_factory.mktemp("clean"), "clean", *BY_SSH, **VALUES)
    assert "bit-identical" in run.end(), run.log.read_text()
    return run


@pytest.fixture(scope="module")
def broken(fleet, tmp_path_factory):
    run = Training(fleet, tmp_path_factory.mktemp("broken"), "broken", *BY_SSH, **VALUES)
    run.story = {}
    run.until(lambda: run.steps() > 10 and all(joined(run, name) for name in TRAINERS))
    run.until(lambda: len(ready_nodes(run)) == len(TRAINERS))
    for name, fault in (("lost", lose), ("link", cut_a_link), ("slow", slow_down), ("cut", cut_off)):
        before = len(run.read("events.jsonl"))
        host = fault(fleet, run)
        run.story[name] = (host, run.read("events.jsonl")[before:])
    run.end()
    return run


def nodes_at_work(run) -> dict[int, str]:
    """By rank: where it runs."""
    where: dict[int, str] = {}
    for event in run.read("events.jsonl"):
        if event["type"] == "started" and event["rank"] >= 0:
            where[event["rank"]] = event["node"]
    return where


def at_full_strength(run) -> bool:
    forms, started = run.events("control form"), run.events("control started")
    return len(forms[-1]["replicas"]) == 3 and started[-1]["generation"] == forms[-1]["generation"]


def joined(run, name) -> list[dict]:
    return [e for e in run.events("node") if e["node"] == name and e["what"] == "joined"]


def ready_nodes(run) -> set[str]:
    """Those whose services are up."""
    return {e["node"] for e in run.events("started") if e["service"] == "keeper"}


def lose(fleet, run) -> str:
    """Its power; and it comes back with everything on it lost."""
    name = nodes_at_work(run)[1]
    fleet.hosts[name].fail()
    run.until(lambda: nodes_at_work(run)[1] != name and at_full_strength(run))
    run.goes_on()
    fleet.open_ssh(fleet.add(name))
    run.until(lambda: len(joined(run, name)) == 2)
    return name


def cut_a_link(fleet, run) -> str:
    """The network that ranks prefer, of one host."""
    name = nodes_at_work(run)[0]
    fleet.hosts[name].cut(1)
    run.until(lambda: any("lost its link eth1" in e["text"] for e in run.events("control note")))
    run.until(lambda: at_full_strength(run))
    run.goes_on(40)
    fleet.hosts[name].mend(1)
    run.until(lambda: any("has again its link eth1" in e["text"] for e in run.events("control note")))
    return name


def slow_down(fleet, run) -> str:
    name = nodes_at_work(run)[2]
    fleet.hosts[name].slow(2)
    run.goes_on(10)
    fleet.hosts[name].hurry()
    return name


def cut_off(fleet, run) -> str:
    """From everybody, for longer than it is waited for."""
    name = nodes_at_work(run)[2]
    fleet.hosts[name].cut()
    run.until(lambda: nodes_at_work(run)[2] != name and at_full_strength(run))
    run.goes_on()
    fleet.hosts[name].mend()
    return name


def test_a_run_that_was_left_alone_trains_on_three_hosts_and_keeps_a_spare(clean):
    about = {e["node"]: e for e in clean.events("node") if e["what"] == "joined"}
    assert set(about) == {*TRAINERS}
    assert about["a"]["interfaces"] == {"lo": "127.0.0.1", "eth0": "10.77.0.3", "eth1": "10.77.1.3"}
    assert about["a"]["cores"] and about["a"]["memory_bytes"] and "numa_nodes" in about["a"]
    assert len(set(nodes_at_work(clean).values())) == 3 and len(clean.events("control form")) == 1


def test_what_ranks_wrote_on_other_hosts_is_in_the_record(broken):
    said = broken.head.run("sh", "-c", "cat runs/broken-2*/logs/*/rank-*.log").stdout
    assert "generation 1 ended at step" in said


@pytest.mark.parametrize("fault", ["lost", "link", "slow", "cut"])
def test_the_run_goes_on(broken, fault):
    host, said = broken.story[fault]
    reasons = [e["reason"] for e in said if e["type"] == "control form"]
    if fault == "slow":
        assert not reasons, "a slow network is not a lost one"
    elif fault == "link":
        assert not any(e["type"] == "started" and e["node"] == host for e in said), "its ranks keep their processes"
        assert reasons
    else:
        assert any(host in reason for reason in reasons), reasons


def test_it_ends_with_the_bits_of_the_run_that_was_left_alone(clean, broken):
    a, b = clean.summary(), broken.summary()
    assert a["status"] == b["status"] == "done", broken.log.read_text()
    assert a["digests"] == b["digests"]
    assert clean.ledger() == broken.ledger() and len(clean.ledger()) == STEPS
    assert b["durable"] == STEPS


def test_a_run_whose_agents_are_started_by_hand(fleet, tmp_path):
    """As docs/clusters.md says."""
    run = Training(
        fleet, tmp_path, "hand", "--listen", "10.77.0.2:7700", command="controller", **VALUES | {"train.steps": 20}
    )
    run.until(lambda: "waiting for 3 nodes" in run.log.read_text())
    secret = run.head.run("sh", "-c", "cat runs/hand-2*/control/secret").stdout.strip()
    agents = []
    for name in TRAINERS:
        fleet.hosts[name].run("sh", "-c", f"umask 077; echo {secret} > secret")
        join = [*PHALANX, "agent", "--join", "10.77.0.2:7700", "--secret", "secret"]
        agents.append(fleet.hosts[name].start(*join, env=ENV, stderr=subprocess.PIPE))
    assert "bit-identical" in run.end()
    said = [agent.communicate(timeout=60)[1].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * 4, said
    assert run.summary()["status"] == "done" and len(run.ledger()) == 20


def test_a_detached_run_needs_no_terminal(fleet, tmp_path):
    started = Training(fleet, tmp_path, "detached", *BY_SSH, "--detach", **VALUES | {"train.steps": 100_000})
    started.until(lambda: started.steps() > 5)
    started.process.send_signal(signal.SIGKILL)
    started.process.wait()
    started.process.poll = lambda: None  # what follows does not need it
    started.goes_on()
    folder = started.head.run("sh", "-c", "ls -d runs/detached-2*").stdout.strip()
    fleet.on_head("stop", folder)
    started.until(lambda: "summary.json" in started.head.run("ls", folder).stdout)
    attached = started.head.run(*PHALANX, "attach", folder, env=ENV)
    assert attached.returncode == 130 and "stopped after step" in attached.stdout
