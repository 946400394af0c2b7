"""The controller process, killed and started again, between agents that the tests play and users who ask."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.control import messages
from phalanx.control.gang import Gang
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime import controller as module
from phalanx.runtime.aggregator import COMMANDS, Aggregator
from phalanx.runtime.controller import Controller as InProcess
from phalanx.runtime.controller import Plan, Printer, State, ask, orders, read_address, write_plan
from phalanx.runtime.journal import Journal, JournalError, read
from phalanx.runtime.secret import Identity, Secret, load_secret
from phalanx.runtime.transport import Link, Loop
from tests.runtime.cluster import BEAT_S, QUICK, Controller, S, wait_for

LAYOUT = Layout(replica=2, ranks_per_node=1)


class Agent:
    """Joins, obeys nothing, and remembers what it was told."""

    def __init__(self, loop, secret, name, addresses, incarnation=1):
        self.loop, self.name, self.incarnation = loop, name, incarnation
        self.told: list[dict] = []
        me = Identity("agent", name, incarnation)
        self.link = Link(loop, secret, me, addresses, COMMANDS, self._heard, on_open=self._opened)
        self._beat()

    def _heard(self, session, number, body):
        self.told.append(body["command"])

    def _opened(self, session):
        self._tell()
        if not self.told:
            self.post(messages.NodeJoined(self.name, self.incarnation, "", f"{self.name}:1"))

    def _beat(self):
        self._tell()
        self.loop.after(BEAT_S, self._beat)

    def _tell(self):
        about = {"visit": self.link.visits, "generation": 0, "step": 0, "counter": 0, "step_ns": 0}
        self.link.tell({"type": "beat", **about})

    def post(self, event):
        return self.link.post({"type": "event", "event": event.to_dict()})

    def kinds(self):
        return [command["kind"] for command in self.told]

    def of(self, kind):
        return [command for command in self.told if command["kind"] == kind]


class Play:
    def __init__(self, folder):
        self.folder, self.secret = folder / "control", load_secret(folder / "secret")
        write_plan(self.folder, LAYOUT, 100, 0, Policy(**QUICK))
        self.loop, self.controllers = Loop(), []

    def start(self, *more, log=None):
        new = Controller(self.folder, self.secret.path, *more, log=log)
        self.controllers.append(new)
        path = self.folder / "controller.json"
        wait_for(
            lambda: new.process.poll() or (path.exists() and json.loads(path.read_text())["pid"] == new.process.pid)
        )
        return new

    def agent(self, name, incarnation=1):
        return Agent(self.loop, self.secret, name, read_address(self.folder)["aggregators"], incarnation)

    def until(self, what, timeout=8.0):
        def look():
            self.loop.turn(0.01)
            for each in self.controllers:
                if each.process.poll() is None and not each.process.stdout.closed:
                    each.read()
            return what()

        return wait_for(look, timeout)

    def lines(self, kind):
        return [line for each in self.controllers for line in each.lines if line["type"] == kind]

    def ask(self, message):
        return ask(self.folder, self.secret, message, 5.0)

    def launched(self, *agents):
        self.until(lambda: all(agent.of("Launch") for agent in agents))
        return {agent.name: next(iter(agent.of("Launch")[0]["workers"].items())) for agent in agents}


@pytest.fixture
def play(tmp_path):
    made = Play(tmp_path)
    yield made
    for each in made.controllers:
        each.close()


def form(play, *agents):
    """Up to Start."""
    workers = play.launched(*agents)
    for agent in agents:
        agent.post(messages.WorkersUp(agent.name, 1, (workers[agent.name][1],)))
    play.until(lambda: all(agent.of("Form") for agent in agents))
    for agent in agents:
        agent.post(messages.Ready(agent.name, 1, 1, 0, {workers[agent.name][1]: "same"}))
    play.until(lambda: all(agent.of("Start") for agent in agents))
    return workers


# -- what is heard is journalled, and then done


def test_from_nodes_that_join_to_a_gang_that_runs(play):
    play.start("--aggregate")
    a, b = play.agent("a"), play.agent("b")
    workers = form(play, a, b)
    assert a.kinds() == ["Welcome", "Launch", "Form", "Start"]
    told = a.of("Form")[0]
    assert told["crew"] == {workers["a"][0]: workers["a"][1]}, "its own part of it"
    assert told["store"] in ("a:1", "b:1") and told["generation"] == 1
    play.until(lambda: play.lines("started"))
    kinds = [line["type"] for line in play.controllers[0].lines]
    assert [kind for kind in kinds if kind != "note"] == ["form", "started"]
    entries = list(read(play.folder / "journal.db"))
    decided = [d["kind"] for e in entries for d in e.body["decisions"]]
    assert [k for k in decided if k in ("Form", "Start")] == ["Form", "Start"] and decided.count("Launch") == 2
    status = play.ask({"type": "status"})
    assert status["phase"] == "running" and status["replicas"] == [0, 1] and status["why"] == "all are there"
    assert status["nodes"]["a"] == {
        "place": status["nodes"]["a"]["place"],
        "dead": False,
        "drained": False,
        "spare": False,
    }


def test_a_killed_controller_goes_on_where_it_was(play):
    play.start("--aggregate")
    a, b = play.agent("a"), play.agent("b")
    workers = play.launched(a, b)
    before = read_address(play.folder)
    play.controllers[0].kill()
    a.post(messages.WorkersUp("a", 1, (workers["a"][1],)))  # nobody is there
    play.start("--aggregate")
    assert read_address(play.folder) == before, "the same ports"
    # What was said and not answered is said again, and what was not heard is heard now.
    play.until(lambda: len(b.of("Launch")) > 1)
    assert b.of("Launch")[0] == b.of("Launch")[1]
    b.post(messages.WorkersUp("b", 1, (workers["b"][1],)))
    play.until(lambda: a.of("Form") and b.of("Form"))
    assert play.lines("state")[0]["phase"] == "gathering"
    play.until(lambda: play.lines("form"))
    play.controllers[1].kill()
    play.start("--aggregate")
    play.until(lambda: len(a.of("Form")) > 1)
    assert len(play.lines("form")) == 1, "a decision is told once"
    assert play.lines("state")[1]["phase"] == "forming" and play.lines("state")[1]["generation"] == 1


def test_nothing_is_lost_or_heard_twice_over_many_kills(play):
    rng = random.Random(3)
    play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)
    for round_ in range(4):
        for count in range(40):
            last = a.post(messages.DeviceWarning("a", 1, "slow", 40 * round_ + count))
            if count == 20 and round_ < 3:
                enough = last - rng.randrange(20)  # some are heard, and some are on their way
                play.until(lambda enough=enough: a.link.outbox.acked >= enough)
                play.controllers[-1].kill()
                play.start("--aggregate")
    play.until(lambda: a.link.outbox.acked == last)
    items = [item for e in read(play.folder / "journal.db") for item in e.body.get("items", ())]
    counts = [i["event"]["count"] for i in items if i["type"] == "event" and i["event"]["kind"] == "DeviceWarning"]
    assert counts == list(range(160))
    entries = list(read(play.folder / "journal.db"))
    times = [entry.time_ns for entry in entries]
    assert times == sorted(times) and len({entry.term for entry in entries}) == 4, "time goes on"
    assert times[-1] < 60 * S, "and counts from the first start"


def test_timers_go_on_after_a_restart(play):
    """Launch is never answered: after launch_ns, with a restart between, it is given up."""
    write_plan(play.folder, LAYOUT, 100, 0, Policy(**{**QUICK, "launch_ns": S}))
    play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)
    play.controllers[0].kill()
    play.start("--aggregate")
    play.until(lambda: a.of("Kill"))
    events = [e for e in read(play.folder / "journal.db") if e.kind == "event"]
    fired = [e for e in events if e.body["event"]["timer"] == "launch"]
    set_ns = next(e.time_ns for e in read(play.folder / "journal.db") if "Launch" in str(e.body["decisions"]))
    assert fired[0].term == 2 and fired[0].time_ns - set_ns == pytest.approx(S, abs=S // 2)


def test_commands_find_their_nodes_through_several_aggregators(play):
    play.start()
    at = read_address(play.folder)
    assert at["aggregators"] == []
    made = [
        Aggregator(play.loop, play.secret, Identity("aggregator", name, 1), [(at["host"], at["port"])], beat_s=BEAT_S)
        for name in ("x", "y")
    ]
    agents = [
        Agent(play.loop, play.secret, name, [aggregator.server.address])
        for name, aggregator in zip("ab", made, strict=True)
    ]
    form(play, *agents)
    # One moves to the other aggregator, and is reached there.
    agents[0].link.addresses[:] = [made[1].server.address]
    made[0].close()
    play.until(lambda: agents[0].link.session and agents[0].link.visits == 2)
    assert play.ask({"type": "ask", "event": {"kind": "Stop", "grace_ns": 20 * S}}) == {"type": "done"}
    play.until(lambda: all(agent.of("Pause") for agent in agents))


# -- users and strangers


def test_what_users_may_ask(play):
    play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)

    def refused(**event):
        answer = play.ask({"type": "ask", "event": event})
        assert answer["type"] == "refused"
        return answer["reason"]

    assert "Drain.node = 'nobody'" in refused(kind="Drain", node="nobody")
    assert "expected 1 to 2" in refused(kind="Scale", replicas=3)
    assert "nothing that can be asked for" in refused(
        kind="NodeJoined", node="b", incarnation=1, domain="", address="", memory=""
    )
    assert "expected a kind" in refused(kind="Explode")
    assert play.ask({"type": "ask", "event": {"kind": "Drain", "node": "a"}}) == {"type": "done"}
    assert play.ask({"type": "status"})["nodes"]["a"]["drained"]


def test_a_stranger_gets_nothing_and_a_user_is_no_aggregator(play, tmp_path):
    play.start("--aggregate")
    at = read_address(play.folder)
    for port in (at["port"], at["aggregators"][0][1]):
        with socket.create_connection((at["host"], port)) as sock:
            sock.sendall(b"\x00\x00\x00\x02{}")
            sock.settimeout(2)
            with pytest.raises((ConnectionError, AssertionError)):
                assert sock.recv(100)
    with pytest.raises(TimeoutError):
        ask(play.folder, Secret(Path("x"), bytes(32)), {"type": "status"}, 0.3)
    with pytest.raises(TimeoutError):
        ask(play.folder, play.secret, {"type": "reports", "items": []}, 0.3)
    assert play.ask({"type": "status"})["phase"] == "gathering"


# -- beginnings and ends


def test_it_ends_when_told_and_its_journal_can_be_read(play):
    controller = play.start("--aggregate")
    play.launched(play.agent("a"))
    controller.process.send_signal(signal.SIGTERM)
    assert controller.process.wait(5) == 0
    assert controller.process.stderr.read() == b""
    assert list(read(play.folder / "journal.db"))


def test_a_later_controller_fences_it(play):
    controller = play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)
    (play.folder / "journal.db.lock").unlink()  # as on a file system without locks
    with Journal(play.folder / "journal.db"):
        a.post(messages.WorkerDied("a", 1, 1, "x"))
        play.until(lambda: controller.process.poll() is not None)
    assert controller.process.returncode == 1 and b"was taken over" in controller.process.stderr.read()


def test_a_second_one_beside_it_does_not_start(play):
    play.start("--aggregate")
    second = play.start("--aggregate")
    assert second.process.wait(5) == 1
    assert b"is held by the controller with pid" in second.process.stderr.read()


def test_without_a_reader_it_goes_on(play):
    controller = play.start("--aggregate")
    controller.process.stdout.close()
    a = play.agent("a")
    play.loop.turn(0)
    end = time.monotonic() + 5
    while not a.of("Launch") and time.monotonic() < end:
        play.loop.turn(0.01)
    assert a.of("Launch") and controller.process.poll() is None
    assert play.ask({"type": "status"})["nodes"]["a"]


def test_a_reader_that_stands_still_does_not_hold_it_up():
    reading, writing = os.pipe()
    printer = Printer(writing)
    for i in range(2000):
        printer.say("note", text="x" * 100, i=i)
    data = b""
    os.set_blocking(reading, False)
    for _ in range(200):
        printer.flush()
        try:
            data += os.read(reading, 1 << 16)
        except BlockingIOError:
            break
    found = [json.loads(line)["i"] for line in data.splitlines()]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 1999, "the newest are kept"
    os.close(reading)
    printer.say("note", text="to nobody")
    os.close(writing)


def test_a_plan_that_changed_is_refused(play):
    play.start("--aggregate")
    play.launched(play.agent("a"))
    play.controllers[0].kill()
    write_plan(play.folder, LAYOUT, 101, 0, Policy(**QUICK))
    second = play.start("--aggregate")
    assert (
        second.process.wait(5) == 1 and b"gang.json is not what the journal began with" in second.process.stderr.read()
    )
    (play.folder / "gang.json").unlink()
    third = play.start("--aggregate")
    assert third.process.wait(5) == 1 and b"the launcher writes it first" in third.process.stderr.read()


# -- small parts, in this process


def test_a_snapshot_is_the_same_as_the_journal(play):
    reading, writing = os.pipe()
    made = InProcess(play.folder, play.secret, snapshot_every=3, printer=Printer(writing))
    events = [messages.NodeJoined(name, 1, "", f"{name}:1") for name in "abcdefgh"]
    for number, event in enumerate(events):
        about = {"node": event.node, "incarnation": 1}
        items = [
            {"type": "edge", **about, "visit": 1, "edge": "seen", "silent_ns": 0},
            {"type": "event", **about, "number": number + 1, "event": json.loads(json.dumps(event.to_dict()))},
        ]
        made._take("reports", {"from": "x", "items": items})
    made.journal.wait(made.journal.number, 5)
    was = made.state.to_bytes()
    made.close()
    again = InProcess(play.folder, play.secret, printer=Printer(writing))
    assert again.state.to_bytes() == was and again.now_ns() >= made.state.time_ns
    again.close()
    whole = State.of(Plan(LAYOUT, 100, 0, Policy(**QUICK)))
    for entry in read(play.folder / "journal.db"):
        whole.take(entry.kind, entry.body, entry.time_ns)
    assert whole.to_bytes() == was, "from a snapshot or from nothing"
    os.close(reading)
    os.close(writing)


def test_while_the_journal_cannot_be_written_nothing_is_said(play, monkeypatch, capsys):
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    reading, writing = os.pipe()
    made = InProcess(play.folder, play.secret, aggregate=True, beat_s=BEAT_S, printer=Printer(writing))
    real, full = made.journal.append, [True]

    def append(*args):
        if full[0]:
            raise JournalError("no space left on device")
        return real(*args)

    monkeypatch.setattr(made.journal, "append", append)
    a = Agent(made.loop, play.secret, "a", [made.aggregator.server.address])
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        made.loop.turn(0.01)
    assert a.link.session and not a.told and a.link.outbox.acked == 0
    full[0] = False
    wait_for(lambda: made.loop.turn(0.01) or a.of("Launch"))
    wait_for(lambda: made.loop.turn(0.01) or a.link.outbox.acked == a.link.outbox.last)
    assert capsys.readouterr().err.count("no space left") == 1
    was = made.state.gang.to_bytes()
    a.link.close()
    made.close()
    again = InProcess(play.folder, play.secret, printer=Printer(writing))
    assert again.state.gang.to_bytes() == was
    again.close()
    os.close(reading)
    os.close(writing)


def test_a_full_disk_stops_neither_the_controller_nor_those_who_wait_for_it(play, tmp_path):
    """Its log is on that disk too."""
    with (tmp_path / "log").open("wb") as log:
        play.start("--aggregate", log=log)
    a, b = play.agent("a"), play.agent("b")
    workers = play.launched(a, b)
    controller = play.controllers[0].process
    old = resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    last = a.post(messages.WorkersUp("a", 1, (workers["a"][1],)))
    enough = time.monotonic() + 0.5
    play.until(lambda: time.monotonic() > enough)
    assert controller.poll() is None and a.link.outbox.acked < last
    resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, old)
    b.post(messages.WorkersUp("b", 1, (workers["b"][1],)))
    play.until(lambda: a.of("Form") and b.of("Form"))


def heard(state, item, at=0):
    return state.take("reports", {"from": "x", "items": [item]}, at)


def edge(kind, node="a", visit=1):
    return {"type": "edge", "node": node, "incarnation": 1, "visit": visit, "edge": kind, "silent_ns": 0}


def event(body, node="a", number=1):
    return {"type": "event", "node": node, "incarnation": 1, "number": number, "event": body.to_dict()}


@pytest.fixture
def state():
    state = State.of(Plan(LAYOUT, 100, 0, Policy(**QUICK)))
    for name in "abc":
        heard(state, edge("seen", name))
        heard(state, event(messages.NodeJoined(name, 1, "", ""), name))
    return state


@pytest.mark.parametrize(
    "body",
    [
        messages.TimerFired("resend"),
        messages.Drain("a"),
        messages.WorkerDied("b", 1, 1, "not his"),
        messages.WorkerDied("a", 2, 1, "not yet"),
        messages.NodeDead("b", 1, ""),
        messages.NodeSuspect("b", 1),
    ],
)
def test_an_agent_speaks_for_itself(state, body):
    before = state.gang.to_bytes()
    news, commands = heard(state, event(body, number=2), at=0)
    assert news["items"] == [] and commands == [] and state.refused.startswith("a: ")
    assert state.gang.to_bytes() == before


def test_a_silent_node_that_comes_by_another_way_is_clear(state):
    heard(state, edge("suspect"))
    assert state.gang.suspects == {"a"}
    heard(state, edge("seen", visit=2))
    assert not state.gang.suspects


def test_a_dead_node_that_comes_by_another_way_is_fenced(state):
    heard(state, edge("suspect"))
    heard(state, edge("dead"))
    assert state.gang.members.nodes["a"].dead
    _, commands = heard(state, edge("seen", visit=2))
    assert commands == [messages.Fence("a", 1)]
    assert "x" in orders(commands, state.roster), "and can be told"


def test_what_is_for_a_node_that_nobody_reaches_is_left_out(state):
    assert orders([messages.Welcome("nobody", 1)], state.roster) == {}
    assert isinstance(state.gang, Gang)


def test_it_starts_without_torch():
    code = "import phalanx.runtime.controller, phalanx.runtime.agent, sys; print({'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
