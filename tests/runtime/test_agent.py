"""Agents, workers and a controller as real processes, really killed: what the gang loses when one of them goes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.checkpoint.keeper import Keeper
from phalanx.checkpoint.memory import Slot
from phalanx.control.policy import WARNINGS, Policy
from phalanx.core.layout import Layout
from phalanx.runtime.agent import held, next_incarnation
from phalanx.runtime.health import Health
from tests.runtime.cluster import QUICK, TOYS, Cluster, wait_for
from tests.runtime.conftest import alive_with


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(*agents, layout=None, options=None, **more):
        made.append(Cluster(tmp_path, layout or Layout(replica=2, ranks_per_node=1), **more))
        for name in agents:
            made[0].start_agent(name, **(options or {}))
        return made[0]

    yield make
    for each in made:
        each.close()


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


# -- coming


def test_an_agent_is_heard_in_half_a_second_and_imports_no_torch(cluster):
    c, took = cluster(layout=Layout(replica=9, ranks_per_node=1)), []
    for name in "abc":  # the best of some, as other processes may be busy
        began = time.monotonic()
        agent = c.start_agent(name)
        c.until(lambda name=name: any(f"node {name} takes" in n["text"] for n in c.lines("note")))
        took.append(time.monotonic() - began)
        maps = Path(f"/proc/{agent.process.pid}/maps").read_text()
        assert "torch" not in maps and "numpy" not in maps
        waited = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # for a core
        if min(took) < 0.5 * waited:
            return
    raise AssertionError(took)


def test_workers_are_told_where_they_stand_and_whom_they_have(cluster):
    c = cluster("a", "b", layout=Layout(replica=2, shard=2, ranks_per_node=2))
    form = c.running(1)
    assert form["replicas"] == [0, 1] and form["step"] == 0 and not form["branch"]
    facts = {f["rank"]: f for f in c.facts()}
    assert {r: (f["local_rank"], f["local_ranks"]) for r, f in facts.items()} == {
        0: (0, 2), 1: (1, 2), 2: (0, 2), 3: (1, 2),
    }  # fmt: skip
    assert facts[0]["node"] == facts[1]["node"] != facts[2]["node"]
    assert facts[0]["data"] == facts[1]["data"] != facts[2]["data"] and set(facts[0]["keeper"]) == {"address", "port"}
    stores = {f"{b['host']}:{b['port']}" for b in c.bodies("store")}
    assert {b["store"] for b in c.bodies("formed")} <= stores, "they meet at the store of a node"
    log = c.folder / facts[0]["node"] / "logs" / "rank-00000.log"
    assert log.exists()
    kinds = {e["body"]["type"] for events in c.events.values() for e in events if e["type"] == "message"}
    assert not kinds & {"up", "ready", "parked"}, "what is the controller's is not the launcher's"
    # One of the two on a node is replaced: it has the seat of the one before.
    kill(facts[1]["pid"])
    c.running(2)
    again = {f["rank"]: f for f in c.facts()}
    assert (again[1]["local_rank"], again[1]["local_ranks"]) == (1, 2)
    assert [again[r]["pid"] for r in (0, 2, 3)] == [facts[r]["pid"] for r in (0, 2, 3)]
    (source,) = [b["source"] for b in c.bodies("formed") if b["generation"] == 2 and b["source"]]
    assert source["kind"] == "live" and source["number"] == facts[3]["worker"]


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
    (end,) = [e for events in c.events.values() for e in events if e["type"] == "exit"]
    assert end["signal"] == "SIGKILL"


def test_a_node_that_is_gone_is_replaced_by_the_spare(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    spare = next(n for n, s in c.status()["nodes"].items() if s["spare"])
    lost = next(f["node"] for f in c.facts() if f["rank"] == 1)
    before = c.pids()
    kill(c.agents[lost].process.pid)
    wait_for(lambda: not os.path.exists(f"/proc/{before[1]}"))
    form = c.running(2)
    facts = {f["rank"]: f for f in c.facts()}
    assert facts[0]["pid"] == before[0] and facts[1]["node"] == spare
    assert form["rung"] == 2 and lost in form["reason"]
    assert c.status()["nodes"][lost]["dead"]
    # Started again it is a spare, as a later incarnation.
    c.agents.pop(lost).close()
    c.start_agent(lost)
    c.until(lambda: c.status()["nodes"][lost]["spare"])
    assert (c.folder / lost / "incarnation").read_text() == "2"


def test_a_controller_that_is_killed_is_not_missed(cluster):
    c = cluster("a", "b")
    c.running(1)
    before, ports = c.pids(), (c.control / "controller.json").read_text().split('"pid"')[0]
    c.controller.kill()
    done = max(b["step"] for b in c.bodies("committed"))
    c.until(lambda: max(b["step"] for b in c.bodies("committed")) > done + 5)
    # A worker dies while nobody is there to hear it: it is handled when somebody is.
    kill(before[0])
    c.until(lambda: 0 not in c.pids())
    c.start_controller()
    form = c.running(2)
    assert (c.control / "controller.json").read_text().split('"pid"')[0] == ports
    (state,) = c.lines("state")
    assert state["phase"] == "running" and state["generation"] == 1
    assert c.pids()[1] == before[1] and form["step"] > done
    times = [line["at_ns"] for each in c.controllers for line in each.lines]
    assert times == sorted(times), "its time goes on"
    # And the next death.
    kill(c.pids()[1])
    assert c.running(3)["step"] >= form["step"]


def test_a_worker_that_is_stopped_is_ended_and_replaced(cluster):
    c = cluster("a", "b")
    c.running(1)
    for agent in c.agents.values():
        agent.watch(0.4)
    before = c.pids()
    kill(before[1], signal.SIGSTOP)
    form = c.running(2)
    assert "hangs" in form["reason"] and "SIGSTOP" in form["reason"] and "rank 1" in form["reason"]
    assert c.pids()[0] == before[0], "it only waited"
    assert any(e["type"] == "hang" for events in c.events.values() for e in events)


def test_a_worker_that_waits_for_nobody_is_ended_later(cluster):
    """It may wait for one on another node, so it is given time; but not for ever."""
    c = cluster("a", layout=Layout(), waits_forever=1)
    c.until(lambda: c.lines("started"))
    c.agents["a"].watch(0.4)
    c.until(lambda: any(e["type"] == "hang" for e in c.events["a"]))
    told = time.monotonic()
    c.until(lambda: any(e["type"] == "exit" for e in c.events["a"]))
    assert time.monotonic() - told > 0.7, "it is told at once, and ended after twice the limit more"
    assert "hangs" in c.running(2)["reason"]


def test_a_worker_that_does_not_park_is_ended(cluster):
    c = cluster("a", "b", options={"halt_s": 0.5}, never_parks=True)
    c.running(1)
    before = c.pids()
    kill(before[1])
    form = c.running(2)
    assert "did not leave its groups in 0.5 s" in form["reason"] and c.pids()[0] != before[0]


def test_a_node_that_was_given_up_is_fenced_and_comes_back(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    facts = {f["rank"]: f for f in c.facts()}
    lost, pid = facts[1]["node"], facts[1]["pid"]
    os.kill(c.agents[lost].process.pid, signal.SIGSTOP)  # its worker goes on
    form = c.running(2)
    assert form["rung"] == 2 and os.path.exists(f"/proc/{pid}")
    keeper = next(b for b in c.bodies("keeper") if b["address"] == facts[1]["keeper"]["address"])
    os.kill(c.agents[lost].process.pid, signal.SIGCONT)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
    c.until(lambda: c.status()["nodes"][lost]["spare"])
    assert (c.folder / lost / "incarnation").read_text() == "2"
    alive = [e["worker"] for e in c.events[lost] if e["type"] == "exit"]
    assert alive == [facts[1]["worker"]] and keeper, "its services stay"
    assert c.status()["generation"] == 2


def test_when_no_worker_has_the_state_it_comes_from_the_memory_of_nodes(cluster):
    copies = [[0, 1, 1], [1, 1, 1], [1, 3, 1]]
    c = cluster("a", "b", options={"services": {"keeper": {"entry": f"{TOYS}:keeper", "args": {"copies": copies}}}})
    c.running(1)
    c.until(lambda: max(b["step"] for b in c.bodies("committed")) > 5)
    for pid in c.pids().values():
        kill(pid)
    form = c.running(2)
    assert form["step"] == 3 and form["branch"], "replicas are copies of each other"
    sources = {b["worker"]: b["source"] for b in c.bodies("formed") if b["generation"] == 2}
    assert {s["kind"] for s in sources.values()} == {"memory"} and {s["made"] for s in sources.values()} == {1}


def test_a_service_that_dies_is_started_again(cluster):
    c = cluster("a", "b")
    c.running(1)
    facts = {f["rank"]: f for f in c.facts()}
    node, other = facts[0]["node"], facts[1]
    # Without its store a node trains on; with the next one, gangs meet there.
    old = next(e["body"]["port"] for e in c.events[node] if e["type"] == "message" and e["body"]["type"] == "store")
    kill(old)
    said = lambda: [e["body"] for e in c.events[node] if e["type"] == "message" and e["worker"] == -1]  # noqa: E731
    new = c.until(lambda: len(said()) == 2 and said()[1]["port"])
    assert c.pids()[0] == facts[0]["pid"]
    # Without its data service its workers cannot go on.
    kill(int(facts[0]["data"]["address"].split("-")[1]))
    form = c.running(2)
    assert "its data service died" in form["reason"]
    again = {f["rank"]: f for f in c.facts()}
    assert again[0]["data"] != facts[0]["data"] and again[1]["pid"] == other["pid"]
    assert {b["store"] for b in c.bodies("formed") if b["generation"] == 2} == {f"127.0.0.1:{new}"}


def test_a_worker_that_fails_is_told_with_its_error(cluster):
    c = cluster("a", options={"entry": "broken"}, layout=Layout(), policy=Policy(**{**QUICK, "deaths": 2}))
    c.until(lambda: c.bodies("error"))
    assert c.bodies("error")[0]["text"] == "it cannot start"
    note = c.until(lambda: c.lines("note") and [n for n in c.lines("note") if "should be replaced" in n["text"]])
    assert "workers died on it 2 times" in note[0]["text"]


# -- by hand, and the end


def test_a_drained_node_is_replaced_and_a_gang_is_scaled(cluster):
    c = cluster("a", "b", "c")
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 3)
    facts = {f["rank"]: f for f in c.facts()}
    node = facts[0]["node"]
    assert c.ask(kind="Drain", node=node) == {"type": "done"}
    form = c.running(2)
    assert "drained" in form["reason"] and not form["branch"]
    c.until(lambda: any(e["type"] == "released" for e in c.events[node]))
    c.until(lambda: c.status()["nodes"][node]["place"] == -1)
    assert {f["node"] for f in c.facts()} == {"a", "b", "c"} - {node}
    assert c.ask(kind="Scale", replicas=1) == {"type": "done"}
    assert c.running(3)["replicas"] in ([0], [1])
    c.until(lambda: len(c.pids()) == 1)
    assert c.ask(kind="Scale", replicas=2) == {"type": "done"}
    assert c.running(4)["replicas"] == [0, 1]


def test_a_node_that_is_replaced_gives_its_state_to_the_next(cluster):
    c = cluster("a", layout=Layout())
    c.running(1)
    old = c.facts()[0]
    c.start_agent("b")
    c.until(lambda: "b" in c.status()["nodes"])
    assert c.ask(kind="Drain", node="a") == {"type": "done"}
    form = c.running(2)
    (served,) = c.bodies("served")
    assert served["worker"] == old["worker"] and served["step"] == form["step"] > 0
    (source,) = [b["source"] for b in c.bodies("formed") if b["generation"] == 2]
    assert source == {"kind": "live", "node": "a", "number": old["worker"], "made": source["made"], "address": ""}
    c.until(lambda: [f["node"] for f in c.facts()] == ["b"])


def test_the_end_is_told_and_who_stays_is_ended(cluster):
    c = cluster("a", "b", steps=8, options={"leave_s": 0.5}, stays=True)
    ended = c.until(lambda: c.lines("ended"))[0]
    assert ended["step"] == 8 and "done after step 8" in ended["reason"]
    c.until(lambda: all(e[-1]["type"] == "left" for e in c.events.values()))
    assert {e["signal"] for events in c.events.values() for e in events if e["type"] == "exit"} == {"SIGKILL"}
    assert max(b["step"] for b in c.bodies("committed")) == 8
    assert c.status()["phase"] == "ended"


def test_nothing_stays_behind(cluster):
    c = cluster("a", "b")
    c.running(1)
    tokens = [agent.session for agent in c.agents.values()]
    assert all(len(alive_with(token)) >= 5 for token in tokens)
    for agent in c.agents.values():
        agent.close()
    assert not any(alive_with(token) for token in tokens)


# -- devices


class NVMLError(Exception):
    pass


class Nvml:
    """Two devices, as the package describes them."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 8, 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 128, 32
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_TEMPERATURE_GPU = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 2, 0, 1
    nvmlEventTypeXidCriticalError = 8
    NVMLError = NVMLError

    def __init__(self):
        self.ecc, self.reasons, self.heat = {0: [7, 0], 1: [0, 0]}, {0: 4, 1: 0}, {0: 40, 1: 40}
        self.replays, self.xids = {0: 5, 1: 0}, []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        assert timeout_ms == 0, "the agent has other things to do"
        if not self.xids:
            raise NVMLError("timeout")
        return SimpleNamespace(eventData=self.xids.pop())

    def nvmlDeviceGetTotalEccErrors(self, device, kind, counter):
        return self.ecc[device][kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return self.reasons[device]

    def nvmlDeviceGetTemperatureThreshold(self, device, kind):
        return 90

    def nvmlDeviceGetTemperature(self, device, kind):
        return self.heat[device]

    def nvmlDeviceGetPcieReplayCounter(self, device):
        return self.replays[device]

    def nvmlDeviceGetNvLinkState(self, device, link):
        raise NVMLError("not supported")


def test_what_devices_count_is_a_warning_when_it_grows():
    nvml = Nvml()
    health = Health(nvml)
    for _ in range(2):
        assert list(health.look()) == [], "what was before is not held against it, nor a limit that somebody set"
    nvml.ecc[1][0] += 2
    assert list(health.look()) == [("ecc", 2)] and list(health.look()) == []
    nvml.ecc[0][1] += 1
    assert list(health.look()) == [("ecc", 2 + WARNINGS["ecc"])], "one that was not corrected is enough"
    nvml.reasons[0], nvml.heat[1] = 64, 91
    assert list(health.look()) == [("throttle", 2)] and list(health.look()) == [("throttle", 4)]
    nvml.reasons[0], nvml.heat[1] = 4, 60
    nvml.replays[0] += 3
    assert dict([*health.look(), *health.look()]) == {"link_errors": 3}, "each device in its turn"
    nvml.xids = [31, 79]
    assert list(health.look()) == [("link_errors", 3 + WARNINGS["link_errors"])], "31 is the program's own fault"


@pytest.mark.parametrize("trouble", ["no package", "no driver"])
def test_without_devices_there_is_nothing_to_say(monkeypatch, trouble):
    nvml = Nvml()
    nvml.nvmlInit = lambda: exec("raise NVMLError('driver not loaded')", {"NVMLError": NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", nvml if trouble == "no driver" else None)
    assert list(Health().look()) == []


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
    if name.startswith("nvmlDevice") or name.startswith("nvmlEvent"):
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


def test_incarnations_grow(tmp_path):
    assert [next_incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]
    tmp_path.joinpath(".incarnation.next").write_text("torn")
    assert next_incarnation(tmp_path) == 4


def test_a_keeper_says_what_it_holds_of_its_own_ranks_and_for_others(tmp_path):
    said = []
    channel = SimpleNamespace(send=said.append)
    keeper = Keeper(channel, str(tmp_path), 1, (1, 0), "token", False)
    mine, other = keeper._slots(0, 4096, 4096)[0], Slot(4096, 4096)
    keeper.server.copies[5] = [other, Slot(4096, 4096)]
    for slot, step, generation in ((mine, 8, 2), (other, 7, 1)):
        slot.put_hash(0)
        slot.seal({"step": step, "generation": generation})
    keeper.order({"type": "held"})
    keeper.server.close()
    assert said == [{"type": "held", "steps": {"0": [8]}, "copies": [(0, 8, 2), (5, 7, 1)]}]
    assert held(said[0]) == ((0, 8, 2), (5, 7, 1))


def test_what_a_keeper_holds():
    assert held({"copies": [[1, 8, 2], [0, 8, 2]], "steps": {"0": [8]}}) == ((0, 8, 2), (1, 8, 2))
    assert held({"steps": {"3": {"8": 2, "6": 1}}}) == ((3, 6, 1), (3, 8, 2))
    assert held({"steps": {"3": [6, 8]}}) == ((3, 6, 0), (3, 8, 0))
