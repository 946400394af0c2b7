"""Nodes, workers and a controller as real processes, really killed: what the gang loses when one of them goes."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.checkpoint.keeper import Keeper
from phalanx.checkpoint.memory import Slot
from phalanx.control.agent import Agent
from phalanx.control.messages import Drain, Scale
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.gate.peers import Peers
from phalanx.observe.progress import Progress
from phalanx.runtime import kernel
from phalanx.runtime import node as module
from phalanx.runtime.aggregator import COMMANDS
from phalanx.runtime.controller import read_address
from phalanx.runtime.node import Node
from phalanx.runtime.wire import WireError, check
from tests.runtime.cluster import QUICK, TOYS, S, kill, wait_for
from tests.runtime.conftest import alive_with
from tests.runtime.toys import INTERFACES

PAIRS = Layout(replica=2, shard=2, ranks_per_node=2)  # a replica per node, of two ranks


# -- coming


def test_workers_are_told_where_they_stand_and_whom_they_have(cluster):
    c = cluster("a", "b", layout=PAIRS)
    form = c.running(1)
    assert form["replicas"] == [0, 1] and form["step"] == 0 and not form["branch"]
    facts = c.facts()
    assert {r: (f["local_rank"], f["local_ranks"]) for r, f in facts.items()} == {
        0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2),
    }  # fmt: skip
    assert facts[0]["node"] == facts[1]["node"] != facts[2]["node"]
    assert facts[0]["data"] == facts[1]["data"] != facts[2]["data"] and set(facts[0]["keeper"]) == {"address", "port"}
    stores = {f"store-{pid}" for name in "ab" for pid in c.service_pids(name, "store")}
    met = {b["store"] for kind in ("in_world", "enters") for b in c.bodies(kind)}
    assert met == stores, "all meet at the store of their own node"
    assert (c.folder / "logs" / facts[0]["node"] / "rank-00000.log").exists()
    kinds = {event["body"]["type"] for event in c.of("message")}
    assert not kinds & {"up", "built", "parked", "formed", "parted"}, "what is the controller's is not the launcher's"
    for node in c.nodes.values():
        maps = Path(f"/proc/{node.pid}/maps").read_text()
        assert "torch" not in maps and "numpy" not in maps
    # One of the two on a node is replaced: it has the seat of the one before.
    kill(facts[1]["pid"])
    c.running(2)
    again = c.facts()
    assert (again[1]["local_rank"], again[1]["local_ranks"]) == (1, 2)
    assert [again[r]["pid"] for r in (0, 2, 3)] == [facts[r]["pid"] for r in (0, 2, 3)]
    entered = {b["worker"]: b["source"] for b in c.bodies("enters") if b["generation"] == 2}
    sources = [entered[again[rank]["worker"]] for rank in range(4)]
    assert sources[2:] == [None, None] and {source["kind"] for source in sources[:2]} == {"live"}
    assert [source["number"] for source in sources[:2]] == [facts[rank]["worker"] for rank in (2, 3)], (
        "a replica that was broken takes the state of one that stands"
    )


def test_torchs_ports_are_on_loopback_and_strangers_cannot_use_up_their_descriptors(cluster, monkeypatch):
    """Gloo listens where it is told to, proves nothing, and aborts a rank that can open no more files."""
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 256  # beyond what this process itself has open
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        c = cluster("a", layout=Layout())
        c.running(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    fact = c.facts()[0]
    assert fact["interfaces"] == ["lo", "lo"]
    enough = kernel.MOST_FILES if limits[1] == resource.RLIM_INFINITY else min(limits[1], kernel.MOST_FILES)
    pids = [fact["pid"], c.controller.process.pid, *c.service_pids("a", "keeper")]
    assert [resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in pids] == [enough] * 3


# -- what dies


def test_a_worker_that_is_killed_is_replaced_and_the_others_stay(cluster):
    c = cluster("a", "b")
    c.running(1)
    before = c.pids()
    kill(before[1])
    form = c.running(2)
    after = c.pids()
    assert after[0] == before[0] and after[1] != before[1]
    assert form["step"] >= 1 and form["rung"] == 1 and not form["branch"] and form["replicas"] == [0, 1]
    assert "rank 1" in form["reason"] and "SIGKILL" in form["reason"]
    assert [end["signal"] for end in c.of("exit")] == ["SIGKILL"]


def test_a_node_that_is_gone_is_replaced_by_the_spare(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    spare = next(n for n, s in c.status()["nodes"].items() if s["spare"])
    before, lost = c.pids(), c.facts()[1]["node"]
    kill(c.nodes[lost].pid)
    wait_for(lambda: not os.path.exists(f"/proc/{before[1]}"))
    form = c.running(2)
    assert c.pids()[0] == before[0] and c.facts()[1]["node"] == spare
    assert form["rung"] == 2 and lost in form["reason"]
    assert c.status()["nodes"][lost]["dead"]
    # Started again it is a spare, as a later incarnation.
    c.nodes.pop(lost).close()
    c.start_node(lost)
    c.until(lambda: c.status()["nodes"][lost]["spare"])
    assert [line["incarnation"] for line in c.lines("joined") if line["node"] == lost] == [1, 2]


def test_a_controller_that_is_killed_is_not_missed(cluster):
    c = cluster("a", "b")
    c.running(1)
    before, address = c.pids(), read_address(c.control)
    c.controller.kill()
    done = c.trained()
    c.until(lambda: c.trained() > done + 5)
    # A worker dies while nobody is there to hear it: it is handled when somebody is.
    kill(before[0])
    wait_for(lambda: not os.path.exists(f"/proc/{before[0]}"))
    c.start_controller()
    form = c.running(2)
    assert c.steps() > done + 5, "what was done meanwhile is recorded"
    assert read_address(c.control) == address, "the same ports"
    (state,) = c.lines("state")
    assert state["phase"] == "running" and state["generation"] == 1
    assert c.pids()[1] == before[1] and form["step"] > done
    times = [line["at_ns"] for each in c.controllers for line in each.lines if "at_ns" in line]
    assert times == sorted(times), "its time goes on"
    # And the next death.
    kill(c.pids()[1])
    assert c.running(3)["step"] >= form["step"]


def test_a_worker_that_is_stopped_is_ended_and_replaced(cluster):
    c = cluster("a", "b", options={"hang_s": 0.5})
    c.running(1)
    before = c.pids()
    kill(before[1], signal.SIGSTOP)
    form = c.running(2)
    assert "hangs" in form["reason"] and "SIGSTOP" in form["reason"] and "rank 1" in form["reason"]
    assert c.pids()[0] == before[0], "it only waited"


def test_a_worker_that_waits_for_nobody_is_ended_later(cluster):
    """It may wait for one on another node, so it is given time; but not for ever."""
    c = cluster("a", layout=Layout(), options={"hang_s": 0.4}, waits_forever=1)
    assert "hangs" in c.running(2)["reason"]
    assert [event["final"] for event in c.of("hang")] == [False, True] and len(c.of("exit")) == 1


def test_a_worker_that_does_not_park_is_ended(cluster):
    c = cluster("a", "b", layout=PAIRS, options={"halt_s": 1.2}, never_leaves="halt")  # Halt is said several times
    c.running(1)
    before = c.pids()
    kill(before[1])
    form = c.running(2)
    assert "did not leave its groups in 1.2 s" in form["reason"] and c.pids()[0] != before[0]
    assert [c.pids()[rank] for rank in (2, 3)] == [before[rank] for rank in (2, 3)]


def test_a_replica_that_does_not_part_is_built_anew(cluster):
    c = cluster("a", "b", policy=Policy(**{**QUICK, "park_ns": S // 2}), never_leaves="part")
    c.running(1)
    before = c.pids()
    kill(before[1])
    form = c.running(2)
    assert "replica 0 does not answer" in form["reason"] and c.pids()[0] == before[0], "its world goes, it stays"
    assert len(c.worlds(0)) == 2


def test_a_node_that_was_given_up_is_fenced_and_comes_back(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    lost, pid, worker = (c.facts()[1][key] for key in ("node", "pid", "worker"))
    kill(c.nodes[lost].pid, signal.SIGSTOP)  # its worker goes on
    form = c.running(2)
    assert form["rung"] == 2 and os.path.exists(f"/proc/{pid}")
    kill(c.nodes[lost].pid, signal.SIGCONT)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
    c.until(lambda: c.status()["nodes"][lost]["spare"])
    c.until(lambda: [event["incarnation"] for event in c.of("booted", lost)] == [1, 2])
    assert [event["worker"] for event in c.of("exit", lost)] == [worker], "its services stay"
    assert c.status()["generation"] == 2


def test_when_no_worker_has_the_state_it_comes_from_the_memory_of_nodes(cluster):
    copies = [[0, 1, 1], [1, 1, 1], [1, 3, 1]]
    c = cluster("a", "b", options={"services": {"keeper": {"entry": f"{TOYS}:keeper", "args": {"copies": copies}}}})
    c.running(1)
    c.until(lambda: c.steps() > 5)
    for pid in c.pids().values():
        kill(pid)
    form = c.running(2)
    assert form["step"] == 3 and form["branch"], "replicas are copies of each other"
    sources = {b["worker"]: b["source"] for b in c.bodies("enters") if b["generation"] == 2}
    assert {s["kind"] for s in sources.values()} == {"memory"} and {s["made"] for s in sources.values()} == {1}


def test_a_service_that_dies_is_started_again(cluster):
    c = cluster("a", "b")
    c.running(1)
    facts = c.facts()
    # Without its store a node trains on; with the next one, gangs meet there.
    for name in "ab":
        kill(c.service_pids(name, "store")[0])
        c.until(lambda name=name: len(c.service_pids(name, "store")) == 2)
    done = c.steps()
    c.until(lambda: c.steps() > done + 5)
    assert c.pids() == {rank: f["pid"] for rank, f in facts.items()}
    # Without its data service its workers cannot go on.
    kill(int(facts[0]["data"]["address"].split("-")[1]))
    form = c.running(2)
    assert "its data service died" in form["reason"]
    again = c.facts()
    assert again[0]["data"] != facts[0]["data"] and again[1]["pid"] == facts[1]["pid"]
    stores = {f"store-{c.service_pids(name, 'store')[1]}" for name in "ab"}
    assert {b["store"] for b in c.bodies("enters") if b["generation"] == 2} <= stores


def test_a_worker_that_fails_is_told_with_its_error(cluster):
    c = cluster("a", options={"entry": "broken"}, layout=Layout(), policy=Policy(**{**QUICK, "deaths": 2}))
    c.until(lambda: c.bodies("error"))
    assert c.bodies("error")[0]["text"] == "it cannot start"
    note = c.until(lambda: [n for n in c.lines("note") if "should be replaced" in n["text"]])
    assert "it failed 2 times" in note[0]["text"]


# -- leases and limits


@pytest.fixture
def told():
    """A node without processes, and a worker's progress: what it makes of a lease."""
    node, sent, progress = Node.__new__(Node), [], Progress()
    node.agent, node.loop, node._act = Agent("n", "", {}), SimpleNamespace(after=lambda s, do: None), lambda: None
    node.agent.booted(0, 1)
    node.link = SimpleNamespace(visits=1, tell=sent.append)
    node.spawner = SimpleNamespace(workers={1: SimpleNamespace(progress=progress)})

    def beat():
        node._tell_beat()
        return sent[-1]["sent_ns"]

    def lease(sent_ns, ns):
        node._commanded(None, 0, check({"type": "lease", "sent_ns": sent_ns, "ns": ns}, COMMANDS))
        return node.agent.alarms.get("lease")

    return SimpleNamespace(node=node, beat=beat, lease=lease, progress=progress)


def test_a_lease_counts_from_the_beat_that_it_answers(told):
    first, second = told.beat(), told.beat()
    assert second > first and told.lease(first, 60 * S) == first + 60 * S
    assert told.lease(second, 50 * S) == first + 60 * S, "what was granted holds"
    assert told.lease(second, 60 * S) == second + 60 * S and not told.progress.lease_ended
    with pytest.raises(WireError, match="no beat was sent then"):
        told.lease(time.monotonic_ns() + S, S)


def test_an_answer_that_comes_after_its_lease_has_ended_grants_nothing(told):
    sent = told.beat()
    assert told.lease(sent, 1) is None and told.progress.lease_ended


def test_a_node_that_is_fenced_is_given_no_lease(told):
    sent = told.beat()
    told.node.agent.living.add(1)  # it has not ended yet
    told.node.agent.reset()
    assert told.beat() == sent, "it is silent"
    assert told.lease(sent, 60 * S) is None and told.progress.lease_ended


def test_a_lease_that_ends_parks_the_workers_until_the_controller_is_back(cluster):
    c = cluster("a", "b", policy=Policy(**QUICK, lease_ns=3 * S), ignores_lease=True)
    c.running(1)
    c.controller.kill()
    done, since = c.trained(), time.monotonic()
    while time.monotonic() < since + 1:  # they have stopped
        if c.trained() > done:
            done, since = c.trained(), time.monotonic()
    before = c.pids()
    c.start_controller()
    form = c.running(2)
    assert len(c.bodies("departed")) == 2
    assert form["step"] >= done - 1 and not form["branch"] and c.pids() == before, "they have kept their state"


def test_workers_of_a_stopped_node_stop_voting_when_the_lease_ends(cluster):
    """Nobody answers, and the only replica may go on: no other begins before it cannot."""
    c = cluster("a", layout=Layout(), policy=Policy(**QUICK, lease_ns=3 * S))
    c.running(1)
    c.start_node("b")
    c.until(lambda: c.status()["nodes"].get("b", {}).get("spare"))
    kill(c.nodes["a"].pid, signal.SIGSTOP)
    c.until(lambda: c.status()["phase"] == "fencing")
    votes = lambda: len(list((c.folder / "votes").glob("1-*")))  # noqa: E731
    first = votes()
    c.until(lambda: len(c.lines("form")) == 2)
    last = votes()
    assert last > first, "it trained on while it was waited for"
    c.until(lambda: c.steps(generation=2) >= 5)
    assert votes() == last, "two generations train at the same time"
    kill(c.nodes["a"].pid, signal.SIGCONT)
    c.until(lambda: c.status()["nodes"]["a"]["spare"])
    assert c.until(lambda: c.bodies("departed"))[0]["why"] == "the lease has ended"


def test_a_node_that_nobody_listens_to_starts_anew_when_its_outbox_is_full(cluster, tmp_path):
    flood = {"entry": f"{TOYS}:keeper", "args": {"flood": str(tmp_path / "flood")}}
    c = cluster("a", layout=Layout(), options={"services": {"keeper": flood}})
    c.running(1)
    c.controller.kill()
    (tmp_path / "flood").touch()
    log = c.folder / "logs" / "a.log"
    c.until(lambda: "acknowledges none" in log.read_text())
    c.start_controller()
    c.running(2)
    assert not c.lost and [line["incarnation"] for line in c.lines("joined")] == [1, 2]


# -- by hand, and the end


def test_a_drained_node_is_replaced_and_a_gang_is_scaled(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    node = c.facts()[0]["node"]
    assert c.ask(Drain(node)) == {"type": "done"}
    form = c.running(2)
    assert "drained" in form["reason"] and not form["branch"] and form["replicas"] == [1], "it trains on meanwhile"
    assert "replicas [0] join" in c.running(3)["reason"]
    c.until(lambda: c.of("released", node))
    c.until(lambda: c.status()["nodes"][node]["place"] == -1)
    assert {f["node"] for f in c.facts().values()} == {"a", "b", "c"} - {node}
    assert len(c.worlds(1)) == 1, "the other replica has seen three generations in one world"
    assert c.ask(Scale(1)) == {"type": "done"}
    assert c.running(4)["replicas"] in ([0], [1])
    c.until(lambda: len(c.pids()) == 1)
    assert c.ask(Scale(2)) == {"type": "done"}
    assert c.running(5)["replicas"] == [0, 1]


def test_a_node_that_is_replaced_gives_its_state_to_the_next(cluster):
    c = cluster("a", layout=Layout())
    c.running(1)
    old = c.facts()[0]
    c.start_node("b")
    c.until(lambda: "b" in c.status()["nodes"])
    assert c.ask(Drain("a")) == {"type": "done"}
    form = c.running(2)
    served = c.bodies("served")[0]
    assert served["worker"] == old["worker"] and served["step"] == form["step"] > 0
    (source,) = [b["source"] for b in c.bodies("enters") if b["generation"] == 2]
    assert source == {
        "kind": "live",
        "node": "a",
        "number": old["worker"],
        "made": source["made"],
        "address": "127.0.0.1:1",
    }
    c.until(lambda: [f["node"] for f in c.facts().values()] == ["b"])


def test_the_end_is_told_and_who_stays_is_ended(cluster):
    c = cluster("a", "b", steps=8, options={"leave_s": 0.5}, stays=True)
    ended = c.until(lambda: c.lines("ended"))[0]
    assert ended["ok"] and ended["step"] == 8 and "done after step 8" in ended["reason"]
    c.until(lambda: len(c.of("left")) == 2)
    assert {event["signal"] for event in c.of("exit")} == {"SIGKILL"}
    assert c.steps() == 8 and c.status()["phase"] == "ended"


def test_nothing_stays_behind(cluster):
    c = cluster("a", "b")
    c.running(1)
    tokens = [f"{c.session}-{name}-" for name in c.nodes]
    assert all(len(alive_with(token)) >= 5 for token in tokens)
    for node in c.nodes.values():
        assert node.close()
    assert not any(alive_with(token) for token in tokens)


def test_a_device_that_warns_is_known_to_the_controller(cluster, tmp_path, monkeypatch):
    fake = tmp_path / "packages"
    fake.mkdir()
    fake.joinpath("pynvml.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(fake))
    c = cluster("a", layout=Layout())
    note = c.until(lambda: [n for n in c.lines("note") if "ecc at" in n["text"]])[0]
    assert note["text"].startswith("node a should be replaced") and note["rung"] == 0


FAKE = """
class NVMLError(Exception):
    pass


def __getattr__(name):
    if name.startswith(("nvmlDevice", "nvmlEvent", "nvmlGpm")):
        if name.endswith("Error"):
            return 8
        return refuse
    if name.startswith(("NVML", "nvml")):
        return 1
    raise AttributeError(name)


def refuse(*args):
    raise NVMLError


def nvmlInit():
    pass


def nvmlDeviceGetCount():
    return 1


def nvmlDeviceGetHandleByIndex(index):
    return index


count = 0


def nvmlDeviceGetTotalEccErrors(*args):
    global count
    count += 20
    return count
"""


# -- small parts


def test_a_keeper_says_what_it_holds_of_its_own_ranks_and_for_others(tmp_path):
    said = []
    channel = SimpleNamespace(send=said.append)
    keeper = Keeper(channel, str(tmp_path), 1, (1, 0), Peers(key="5e" * 32), False)
    mine, other = keeper._slots(0, 4096, 4096)[0], Slot(4096, 4096)
    keeper.server.copies[5] = [other, Slot(4096, 4096)]
    for slot, step, generation in ((mine, 8, 2), (other, 7, 1)):
        slot.put_hash(0)
        slot.seal({"step": step, "generation": generation})
    keeper.order({"type": "held"})
    keeper.server.close()
    assert said == [{"type": "held", "copies": [(0, 8, 2), (5, 7, 1)]}]


def test_a_node_that_joins_anew_tells_again_which_networks_it_has_lost(monkeypatch):
    """The controller refuses what an earlier incarnation says, and what comes before the new one has joined."""
    told = []
    agent = SimpleNamespace(joined=0, incarnation=2, link_changed=lambda link, up: told.append((link, up)))
    nothing = lambda *_: None  # noqa: E731
    node = SimpleNamespace(agent=agent, rails={"eth0": False, "eth1": True}, _told_rails=1, _act=nothing)
    node.loop, node._look_at_rails = SimpleNamespace(after=nothing), nothing
    monkeypatch.setattr(module, "is_up", lambda interface: interface == "eth1")
    Node._look_at_rails(node)
    assert told == []
    agent.joined = 1
    for _ in range(2):
        Node._look_at_rails(node)
    assert told == [("eth0", False)]
