"""Four hosts without a common disk, started by ssh: three that train, and a spare. Data and checkpoints are on S3.
Hosts are lost, cut off and slowed while they train, and the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import textwrap
from functools import partial
from pathlib import Path

import pytest

from phalanx.chaos.hosts import why_not
from tests.engines.submitted import PATIENCE_S, until
from tests.hosts.fleet import ENV, NETWORKS, PHALANX, SSHD, TRAINERS, Fleet, Training

missing = why_not() or ("" if SSHD else "sshd not found: apt install openssh-server")
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(missing), reason=missing)]
STEPS = 3000  # it takes a minute until the ssh of a lost host ends and the host is restarted
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
    for name, fault in FAULTS.items():
        before = len(run.read("events.jsonl"))
        host = fault(fleet, run)
        run.story[name] = (host, run.read("events.jsonl")[before:])
    run.end()
    return run


def nodes_at_work(run) -> dict[int, str]:
    """Return, by rank, the node that it runs on."""
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
    """Return the nodes whose services are up."""
    return {e["node"] for e in run.events("started") if e["service"] == "keeper"}


def links(run, said) -> int:
    """Count how often the controller has reported this of a link."""
    return sum(said in e["text"] for e in run.events("control note"))


def lose(fleet, run) -> str:
    """Cut the power of a host. It comes back with everything on it lost."""
    name = nodes_at_work(run)[1]
    fleet.hosts[name].fail()
    run.until(lambda: nodes_at_work(run)[1] != name and at_full_strength(run))
    run.goes_on()
    fleet.open_ssh(fleet.add(name))
    return name


def cut_a_link(fleet, run, rail) -> str:
    """Cut one network of a host: the first, by which it has joined, or the second, which ranks prefer."""
    name, lost, back = nodes_at_work(run)[0], f"lost its link eth{rail}", f"has again its link eth{rail}"
    before = links(run, lost), links(run, back)
    fleet.hosts[name].cut(rail)
    run.until(lambda: links(run, lost) > before[0])
    run.goes_on(40)
    mend(fleet, name, rail)
    run.until(lambda: links(run, back) > before[1] and at_full_strength(run))
    return name


def mend(fleet, name, rail) -> None:
    """Until it carries something: the kernel takes a second or two more, and the other network may be cut next."""
    host = fleet.hosts[name]
    host.mend(rail)
    dial = f"</dev/tcp/{host.addresses[rail]}/22"
    until(lambda: fleet.hosts["head"].run("timeout", "1", "bash", "-c", dial).returncode == 0)


def kill_behind_a_cut_link(fleet, run) -> str:
    """Kill a rank of a host that has lost the controller's network: it takes its state over the other one."""
    name = nodes_at_work(run)[0]
    before, again = len(run.events("control form")), links(run, "has again its link eth0")
    fleet.hosts[name].cut(0)
    run.goes_on(10)
    killed = fleet.hosts[name].run("pkill", "-KILL", "-f", "^phalanx rank 0")
    assert killed.returncode == 0, killed
    run.until(lambda: len(run.events("control form")) >= before + 2 and at_full_strength(run))
    mend(fleet, name, rail=0)
    run.until(lambda: links(run, "has again its link eth0") > again)
    return name


def slow_down(fleet, run) -> str:
    name = nodes_at_work(run)[2]
    fleet.hosts[name].slow(2)
    run.goes_on(10)
    fleet.hosts[name].hurry()
    return name


def cut_off(fleet, run) -> str:
    """Cut a host off from everybody, for longer than anybody waits for it. The host that was lost is its spare."""
    spare, slowed = run.story["lost"][0], [fleet.hosts[name] for name in nodes_at_work(run).values()]
    for host in slowed:  # a fast machine would be done before
        host.slow(1)
    run.until(lambda: sum(e["node"] == spare and e["service"] == "keeper" for e in run.events("started")) == 2)
    for host in slowed:
        host.hurry()
    name = nodes_at_work(run)[2]
    fleet.hosts[name].cut()
    run.until(lambda: nodes_at_work(run)[2] != name and at_full_strength(run))
    run.goes_on()
    fleet.hosts[name].mend()
    return name


FAULTS = {
    "lost": lose,
    "head": partial(cut_a_link, rail=0),
    "head, and a rank dies": kill_behind_a_cut_link,
    "link": partial(cut_a_link, rail=1),
    "head, which the ranks use since": partial(cut_a_link, rail=0),
    "slow": slow_down,
    "cut": cut_off,
}


def test_a_run_that_was_left_alone_trains_on_three_hosts_and_keeps_a_spare(clean):
    about = {e["node"]: e for e in clean.events("node") if e["what"] == "joined"}
    assert set(about) == {*TRAINERS}
    assert about["a"]["interfaces"] == {"lo": "127.0.0.1", "eth0": "10.77.0.3", "eth1": "10.77.1.3"}
    assert about["a"]["cores"] and about["a"]["memory_bytes"] and "numa_nodes" in about["a"]
    assert len(set(nodes_at_work(clean).values())) == 3 and len(clean.events("control form")) == 1


def test_every_host_keeps_the_chunks_that_it_has_read_from_the_bucket(fleet, clean):
    for name in {*nodes_at_work(clean).values()}:
        assert fleet.hosts[name].run("sh", "-c", "find .cache/phalanx/chunks -type f").stdout.count("\n") > 0


def test_what_ranks_wrote_on_other_hosts_is_in_the_record(broken):
    said = broken.head.run("sh", "-c", "cat runs/broken-2*/logs/*/rank-*.log").stdout
    assert "generation 1 ended at step" in said


@pytest.mark.parametrize("fault", FAULTS)
def test_the_run_goes_on(broken, fault):
    host, said = broken.story[fault]
    reasons = [e["reason"] for e in said if e["type"] == "control form"]
    if fault == "slow":
        assert not reasons, "a slow network is not a lost one"
    elif fault == "head":
        assert not reasons, "the ranks speak over the other network"
    elif fault == "head, and a rank dies":
        assert not any("did not get its state" in reason for reason in reasons), reasons
        assert {e["node"] for e in said if e["type"] == "started" and e["rank"] == 0} == {host}, "it stays on its host"
    elif fault in ("link", "head, which the ranks use since"):
        assert not any(e["type"] == "started" and e["node"] == host for e in said), "its ranks keep their processes"
        assert reasons
    else:
        assert any(f"node {host} " in reason for reason in reasons), reasons


def test_it_ends_with_the_bits_of_the_run_that_was_left_alone(clean, broken):
    a, b = clean.summary(), broken.summary()
    assert a["status"] == b["status"] == "done", broken.log.read_text()
    assert a["digests"] == b["digests"]
    assert clean.ledger() == broken.ledger() and len(clean.ledger()) == STEPS
    assert b["durable"] == STEPS


def test_by_hand_as_the_docs_say(fleet, tmp_path):
    """Follow docs/clusters.md with its job file: one node has the secret, and one has only its token."""
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    job = textwrap.dedent(text[text.index('    name = "four"') : text.index("    head$ phalanx controller job.toml")])
    head = fleet.hosts["head"]
    head.run("sh", "-c", f"echo {shlex.quote(job)} > job.toml")
    run = Training(fleet, tmp_path, "four", "job.toml", "--listen", "10.77.0.2:7700", command="controller", bare=True)
    run.until(lambda: "waiting for 3 nodes" in run.log.read_text())
    lines = [line.split() for line in head.run("cat", "/proc/net/tcp").stdout.splitlines()]
    at = {socket.inet_ntoa(bytes.fromhex(line[1][:8])[::-1]) for line in lines if line[3] == "0A"}
    assert at == {"10.77.0.2", "10.77.1.2"}, "both networks that the job names, and nothing else"
    (told,) = re.findall(r"phalanx agent --join (\S+)", run.log.read_text())
    assert told == "10.77.0.2:7700,10.77.1.2:7700", "agents are told all addresses"
    folder = head.run("sh", "-c", "echo runs/four-2*").stdout.strip()
    fleet.on_head("nodes", "token", folder, "d", "--out", "token")
    keys = {name: head.run("cat", f"{folder}/control/secret").stdout for name in TRAINERS}
    keys["d"] = head.run("cat", "token").stdout
    agents = []
    for name, key in keys.items():
        fleet.hosts[name].run("sh", "-c", f"umask 077; printf %s {shlex.quote(key)} > secret")
        join = [*PHALANX, "agent", "--join", told, "--secret", "secret"]
        agents.append(fleet.hosts[name].start(*join, env=ENV, stderr=subprocess.PIPE))
    assert "bit-identical" in run.end()
    said = [agent.communicate(timeout=PATIENCE_S)[1].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * 4, said
    assert run.summary()["status"] == "done" and len(run.ledger()) == 100
    assert {e["node"] for e in run.events("node") if e["what"] == "joined"} == {*TRAINERS}


def test_an_aggregator_and_a_relay_on_another_host(fleet, tmp_path):
    """Agents join there. The reports of their ranks go through the relay to the record, which is complete."""
    listen = ("--listen", "10.77.0.2:7702")
    run = Training(fleet, tmp_path, "far", *listen, command="controller", **VALUES | {"train.steps": 20})
    run.until(lambda: "waiting for 3 nodes" in run.log.read_text())
    folder = run.head.run("sh", "-c", "echo runs/far-2*").stdout.strip()
    secret = run.head.run("cat", f"{folder}/control/secret").stdout.strip()
    ends = dict(re.findall(r"(controller|record) (\S+:\d+)", fleet.on_head("nodes", "ls", folder).stdout))
    d, started = fleet.hosts["d"], []
    for name in TRAINERS:
        fleet.hosts[name].run("sh", "-c", f"umask 077; echo {secret} > secret")
    top = {"relay": ["--record", ends["record"]], "aggregator": ["--controller", ends["controller"]]}
    at = []
    for name, above in top.items():
        via = ["--relay", at[0]] if at else []
        command = [*PHALANX, name, "--secret", "secret", "--name", name, "--give-up-s", "5", *above, *via]
        started.append(d.start(*command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        at.append("{}:{}".format(*json.loads(started[-1].stdout.readline())))
        assert at[-1].startswith("10.77.0.6:")
    for name in TRAINERS[:3]:
        join = [*PHALANX, "agent", "--join", at[1], "--secret", "secret"]
        started.append(fleet.hosts[name].start(*join, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    assert "bit-identical" in run.end()
    said = [process.communicate(timeout=PATIENCE_S)[1].decode() for process in started]
    assert [process.returncode for process in started] == [1, 1, 0, 0, 0], said
    assert "the run was not heard of for 5 s" in said[0]
    assert run.summary()["status"] == "done" and len(run.ledger()) == 20 and run.steps() == 20
    assert set(nodes_at_work(run)) == {0, 1, 2} and len(run.events("facts")) == 1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGHUP])
def test_the_run_outlives_the_command_that_started_it(fleet, tmp_path, end):
    """It is as when a laptop is closed: nobody asked for --detach, and the run can be attached again."""
    name = f"left-{end.name.lower()}"
    started = Training(fleet, tmp_path, name, *BY_SSH, **VALUES | {"train.steps": 100_000})
    started.until(lambda: started.steps() > 5)
    started.kill(end)
    started.process.wait()
    started.process.poll = lambda: None  # what follows does not need it
    started.goes_on()
    fleet.on_head("stop", name)
    attached = started.head.run(*PHALANX, "attach", name, env=ENV)
    assert attached.returncode == 130 and "stopped after step" in attached.stderr and "model:" in attached.stdout
    assert started.summary()["durable"] > 5, "its state is saved"


def test_ctrl_c_of_the_command_ends_the_run_in_order(fleet, tmp_path):
    run = Training(fleet, tmp_path, "asked", *BY_SSH, **VALUES | {"train.steps": 100_000})
    run.until(lambda: run.steps() > 5)
    run.kill(signal.SIGINT)
    said = run.end()
    assert run.process.returncode == 130 and "stopped after step" in said and "--resume auto" in said
    assert run.summary()["status"] == "stopped" and run.summary()["durable"] > 5


def test_a_detached_run_returns_the_terminal(fleet, tmp_path):
    run = Training(fleet, tmp_path, "detached", *BY_SSH, "--detach", **VALUES | {"train.steps": 20})
    said = run.end()
    assert run.process.returncode == 0 and "phalanx attach runs/detached-2" in said
    attached = run.head.run(*PHALANX, "attach", "detached", env=ENV)
    assert attached.returncode == 0 and "bit-identical" in attached.stdout, attached.stderr
