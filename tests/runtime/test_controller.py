"""The controller process, killed and started again, between nodes that say what the tests want and users who ask."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from phalanx.control import journaled, messages
from phalanx.control.gang import Gang
from phalanx.control.journaled import Plan, State
from phalanx.control.messages import Failure
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime import controller as module
from phalanx.runtime import gathering, secret, transport
from phalanx.runtime.aggregator import COMMANDS, Aggregator
from phalanx.runtime.controller import ANSWERS, FENCED, PINGS, Printer, ask, orders, read_address, write_plan
from phalanx.runtime.controller import Controller as InProcess
from phalanx.runtime.journal import Journal, JournalError, read
from phalanx.runtime.secret import Identity, Secret, load_secret
from phalanx.runtime.transport import Link, Loop
from tests.runtime.cluster import BEAT_S, LONG_S, QUICK, Controller, S, wait_for

LAYOUT = Layout(replica=2, ranks_per_node=1)


class Puppet:
    """A node that joins and beats, decides nothing, and remembers what it was told."""

    def __init__(self, loop, secret, name, addresses, incarnation=1):
        self.loop, self.name, self.incarnation = loop, name, incarnation
        self.told: list[dict] = []
        me = Identity("agent", name, incarnation)
        self.link = Link(loop, secret, me, addresses, COMMANDS, self._heard, on_open=self._opened)
        self._beat()

    def _heard(self, session, number, body):
        if body["type"] == "command":
            self.told.append(body["command"])

    def _opened(self, session):
        self._tell()
        if not self.told:
            self.post(messages.NodeJoined(self.name, self.incarnation, "", f"{self.name}:1"))

    def _beat(self):
        self._tell()
        self.loop.after(BEAT_S, self._beat)

    def _tell(self):
        about = {"visit": self.link.visits, "sent_ns": 0, "generation": 0, "step": 0, "counter": 0, "step_ns": 0}
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
        self.plan(Policy(**QUICK))
        self.loop, self.controllers = Loop(), []

    def plan(self, policy, steps=100):
        write_plan(self.folder, Plan(LAYOUT, steps, 0, 0, policy))

    def start(self, *more, log=None):
        new = Controller(self.folder, self.secret.path, *more, log=log)
        self.controllers.append(new)
        new.wait_up(self.folder)
        return new

    def agent(self, name, incarnation=1, at=None):
        addresses = [at.server.address] if at else read_address(self.folder)["aggregators"]
        return Puppet(self.loop, self.secret, name, addresses, incarnation)

    def aggregate(self, name):
        at = read_address(self.folder)
        me = Identity("aggregator", name, 1)
        return Aggregator(self.loop, self.secret, me, [(at["host"], at["port"])], beat_s=BEAT_S)

    def until(self, what):
        def look():
            self.loop.turn(0.01)
            for each in self.controllers:
                if each.process.poll() is None and not each.process.stdout.closed:
                    each.read()
            return what()

        return wait_for(look)

    def lines(self, kind):
        return [line for each in self.controllers for line in each.lines if line["type"] == kind]

    def ask(self, message):
        return ask(self.folder, self.secret, message, LONG_S)

    def status(self):
        return self.ask({"type": "status"})

    def launched(self, *agents):
        self.until(lambda: all(agent.of("Launch") for agent in agents))
        return {agent.name: next(iter(agent.of("Launch")[0]["workers"].items())) for agent in agents}


@pytest.fixture
def play(tmp_path):
    made = Play(tmp_path)
    yield made
    for each in made.controllers:
        each.close()


def built(play, *agents):
    """Up to Form: the worker of each agent, and the world of its replica."""
    workers = play.launched(*agents)
    for agent in agents:
        agent.post(messages.WorkersUp(agent.name, 1, (workers[agent.name][1],), (9,)))
    play.until(lambda: all(agent.of("Build") for agent in agents))
    worlds = {agent.name: agent.of("Build")[0]["world"] for agent in agents}
    for agent in agents:
        agent.post(messages.Built((agent.name,), (1,), ((workers[agent.name][1],),), worlds[agent.name]))
    play.until(lambda: all(agent.of("Form") for agent in agents))
    return workers, worlds


def form(play, *agents):
    """Up to a generation that runs."""
    workers, worlds = built(play, *agents)
    for agent in agents:
        agent.post(messages.Formed((int(workers[agent.name][0]),), (worlds[agent.name],), 1))
    play.until(lambda: play.lines("started"))
    return workers, worlds


# -- what is heard is journalled, and then done


def test_from_nodes_that_join_to_a_gang_that_runs(play):
    play.start("--aggregate")
    a, b = play.agent("a"), play.agent("b")
    workers, worlds = form(play, a, b)
    assert [*dict.fromkeys(a.kinds())] == ["Welcome", "Launch", "Build", "Form"]
    told = a.of("Build")[0]
    assert told["crew"] == {workers["a"][0]: workers["a"][1]}, "a world of its own"
    told = a.of("Form")[0]
    assert dict(zip(told["replicas"], told["worlds"], strict=True)) == {
        int(workers[name][0]): worlds[name] for name in "ab"
    }
    assert told["generation"] == 1
    kinds = [line["type"] for line in play.controllers[0].lines]
    assert [kind for kind in kinds if kind not in ("note", "alive")] == ["form", "started"]
    entries = list(read(play.folder / "journal.db"))
    decided = [d["kind"] for e in entries for d in e.body["decisions"]]
    assert [k for k in decided if k in ("Form", "Started")] == ["Form", "Started"] and decided.count("Launch") == 2
    status = play.status()
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
    a.post(messages.WorkersUp("a", 1, (workers["a"][1],), (9,)))  # nobody is there
    play.start("--aggregate")
    assert read_address(play.folder) == before, "the same ports"
    # What was said and not answered is said again, and what was not heard is heard now.
    play.until(lambda: len(b.of("Launch")) > 1)
    assert b.of("Launch")[0] == b.of("Launch")[1]
    b.post(messages.WorkersUp("b", 1, (workers["b"][1],), (9,)))
    play.until(lambda: a.of("Build") and b.of("Build"))
    assert play.lines("state")[0]["phase"] == "gathering"
    a.post(messages.Built(("a",), (1,), ((workers["a"][1],),), a.of("Build")[0]["world"]))
    play.until(lambda: a.link.outbox.acked == a.link.outbox.last)
    play.controllers[1].kill()
    play.start("--aggregate")
    play.until(lambda: len(b.of("Build")) > 1)
    assert b.of("Build")[0] == b.of("Build")[1], "the same world"
    b.post(messages.Built(("b",), (1,), ((workers["b"][1],),), b.of("Build")[0]["world"]))
    play.until(lambda: a.of("Form") and b.of("Form"))
    play.until(lambda: play.lines("form"))
    play.controllers[2].kill()
    play.start("--aggregate")
    play.until(lambda: len(a.of("Form")) > 1)
    assert len(play.lines("form")) == 1, "a decision is told once"
    assert play.lines("state")[2]["phase"] == "forming" and play.lines("state")[2]["generation"] == 1


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
    assert times[0] < 60 * S, "and counts from the first start"


def test_timers_go_on_after_a_restart(play):
    """Launch is never answered: after launch_ns, with a restart between, the worker is asked after, and given up."""
    play.plan(Policy(**{**QUICK, "launch_ns": S, "ask_ns": S // 10}))
    play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)
    play.controllers[0].kill()
    play.start("--aggregate")
    play.until(lambda: a.of("Kill"))
    events = [e for e in read(play.folder / "journal.db") if e.kind == "event"]
    fired = [e for e in events if e.body["event"]["timer"] == "launch"]
    set_ns = next(e.time_ns for e in read(play.folder / "journal.db") if "Launch" in str(e.body["decisions"]))
    assert fired[0].term == 2 and fired[0].time_ns - set_ns >= S and a.kinds().index("Probe") < a.kinds().index("Kill")


def test_commands_find_their_nodes_through_several_aggregators(play):
    play.start()
    assert read_address(play.folder)["aggregators"] == []
    x, y = play.aggregate("x"), play.aggregate("y")
    agents = [play.agent("a", at=x), play.agent("b", at=y)]
    form(play, *agents)
    # One moves to the other aggregator, and is reached there.
    agents[0].link.addresses[:] = [y.server.address]
    x.close()
    play.until(lambda: agents[0].link.session and agents[0].link.visits == 2)
    assert play.ask({"type": "ask", "event": {"kind": "Stop", "grace_ns": 20 * S}}) == {"type": "done"}
    play.until(lambda: all(agent.of("Pause") for agent in agents))


def cut(aggregator):
    """It cannot reach the controller any more; returns where that is."""
    addresses = aggregator.link.addresses[:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        aggregator.link.addresses[:] = [free.getsockname()]
    return addresses


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_an_aggregator_that_is_lost_with_its_nodes_is_noticed(play, how):
    play.start()
    x, y = play.aggregate("x"), play.aggregate("y")
    a, b = play.agent("a", at=x), play.agent("b", at=y)
    form(play, a, b)
    cut(x)
    if how == "dies":
        x.close()
        a.link.close()
    else:
        x.link.tell = lambda body: None  # it says nothing more, and its connection stays
    play.until(lambda: play.status()["nodes"]["a"]["dead"])
    assert not play.status()["nodes"]["b"]["dead"]


def test_an_aggregator_that_finds_the_controller_again_says_who_lives(play):
    """Its nodes were given up meanwhile: they must hear of it."""
    play.start()
    x, y = play.aggregate("x"), play.aggregate("y")
    a, b = play.agent("a", at=x), play.agent("b", at=y)
    form(play, a, b)
    addresses = cut(x)
    x.link.drop("it was cut")
    play.until(lambda: play.status()["nodes"]["a"]["dead"])
    x.link.addresses[:] = addresses
    play.until(lambda: a.of("Fence"))
    assert a.link.visits == 1 and not b.of("Fence")


# -- users and strangers


def test_what_users_may_ask(play):
    play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)

    def refused(**event):
        answer = play.ask({"type": "ask", "event": event})
        assert answer["type"] == "refused"
        return answer["reason"]

    assert "Drain.node = 'nobody'" in refused(kind="Drain", node="nobody", off=False)
    assert "expected 1 to 2" in refused(kind="Scale", replicas=3)
    assert "nothing that can be asked for" in refused(
        kind="NodeJoined", node="b", incarnation=1, domain="", address="", memory=""
    )
    assert "expected a kind" in refused(kind="Explode")
    assert "Trace.last = 3: expected 6 to 105" in refused(kind="Trace", first=5, last=3, ranks=[0])
    assert "Trace.ranks = [99]" in refused(kind="Trace", first=5, last=7, ranks=[99])
    assert play.ask({"type": "ask", "event": messages.Trace(5, 7, (0, 1)).to_dict()}) == {"type": "done"}
    play.until(lambda: a.of("Profile"))
    assert play.ask({"type": "ask", "event": messages.Scale(1).to_dict()}) == {"type": "done"}


def test_a_drained_node_that_restarts_stays_drained(play):
    play.start("--aggregate")
    play.launched(play.agent("c"))
    assert play.ask({"type": "ask", "event": messages.Drain("c").to_dict()}) == {"type": "done"}
    again = play.agent("c", incarnation=2)
    play.until(lambda: again.of("Welcome"))
    play.launched(play.agent("a"), play.agent("b"))
    assert play.status()["nodes"]["c"] == {"place": -1, "dead": False, "drained": True, "spare": True}
    assert not again.of("Launch")


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
    assert play.status()["phase"] == "gathering"


# -- beginnings and ends


def test_it_ends_when_told_and_its_journal_can_be_read(play):
    controller = play.start("--aggregate")
    play.launched(play.agent("a"))
    controller.process.send_signal(signal.SIGTERM)
    assert controller.process.wait(LONG_S) == 0
    assert controller.process.stderr.read() == b""
    assert list(read(play.folder / "journal.db"))


def test_a_later_controller_fences_it(play):
    controller = play.start("--aggregate")
    a = play.agent("a")
    play.launched(a)
    (play.folder / "journal.db.lock").unlink()  # as on a file system without locks
    with Journal(play.folder / "journal.db", form=journaled.form()):
        a.post(messages.WorkerDied("a", 1, 1, Failure(text="x")))
        play.until(lambda: controller.process.poll() is not None)
    assert controller.process.returncode == FENCED and b"was taken over" in controller.process.stderr.read()


def test_a_second_one_beside_it_does_not_start(play):
    play.start("--aggregate")
    second = play.start("--aggregate")
    assert second.process.wait(LONG_S) == 1
    assert b"is held by the controller with pid" in second.process.stderr.read()


def test_without_a_reader_it_goes_on(play):
    controller = play.start("--aggregate")
    controller.process.stdout.close()
    a = play.agent("a")
    play.loop.turn(0)
    wait_for(lambda: play.loop.turn(0.01) or a.of("Launch"))
    assert controller.process.poll() is None
    assert play.status()["nodes"]["a"]


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
    play.plan(Policy(**QUICK), steps=101)
    second = play.start("--aggregate")
    assert (
        second.process.wait(LONG_S) == 1
        and b"gang.json is not what the journal began with" in second.process.stderr.read()
    )
    (play.folder / "gang.json").unlink()
    third = play.start("--aggregate")
    assert third.process.wait(LONG_S) == 1 and b"the launcher writes it first" in third.process.stderr.read()


# -- small parts, in this process


@pytest.fixture
def inside(play):
    """Controllers in this process, one after the other."""
    made, (reading, writing) = [], os.pipe()

    def start(**options):
        while made:
            made.pop().close()
        made.append(InProcess(play.folder, play.secret, beat_s=BEAT_S, printer=Printer(writing), **options))
        return made[0]

    yield start
    while made:
        made.pop().close()
    os.close(reading)
    os.close(writing)


def turn_until(loop, what):
    return wait_for(lambda: loop.turn(0.01) or what())


def test_a_node_cannot_end_the_meeting_of_the_others(play, inside):
    """It has a token, and names a generation that is far away."""
    made = inside(aggregate=True)
    at = made.aggregator.server.address
    heard = []
    hear = lambda session, number, body: heard.extend(body.get("items", ()))  # noqa: E731
    good, bad = (Link(made.loop, play.secret, Identity("agent", name, 1), [at], COMMANDS, hear) for name in "ab")
    made.gang.gen.number = made.gang.worlds.last = 1
    turn_until(made.loop, lambda: made.aggregator.link.session and good.session and bad.session)
    for what in ("gang", "replica 0"):
        good.tell({"type": "store", "items": [["set", what, 1, "room/k", "dg=="]]})
        bad.tell({"type": "store", "items": [["join", what, 10**9, "room"]]})
    turn_until(made.loop, lambda: len(heard) == 2)
    bad.tell({"type": "store", "items": [["join", "gang", 1, "room"], ["join", "replica 0", 1, "room"]]})
    turn_until(made.loop, lambda: len(heard) == 4)
    assert sorted(item[0] for item in heard) == ["have", "have", "over", "over"]
    good.close(), bad.close()


def test_a_snapshot_is_the_same_as_the_journal(play, inside):
    made = inside(snapshot_every=3)
    events = [messages.NodeJoined(name, 1, "", f"{name}:1") for name in "abcdefgh"]
    for number, event in enumerate(events):
        about = {"node": event.node, "incarnation": 1}
        items = [
            {"type": "edge", **about, "visit": 1, "edge": "seen"},
            {"type": "event", **about, "number": number + 1, "event": json.loads(json.dumps(event.to_dict()))},
        ]
        made._take("reports", {"from": "x", "items": items})
    made.journal.wait(made.journal.number, 5)
    was = made.state.to_bytes()
    again = inside()
    assert again.state.to_bytes() == was and again.now_ns() >= made.state.time_ns
    whole = State.of(again.plan)
    for entry in read(play.folder / "journal.db"):
        whole.take(entry.kind, entry.body, entry.time_ns)
    assert whole.to_bytes() == was, "from a snapshot or from nothing"


def broken_apply(monkeypatch, kind=messages.DeviceWarning):
    """A bug in the state machine: it changes something, and raises."""
    real = Gang.apply

    def apply(self, now_ns, event):
        commands = real(self, now_ns, event)
        if isinstance(event, kind):
            raise RuntimeError("a bug")
        return commands

    monkeypatch.setattr(Gang, "apply", apply)


QUIET = Policy(resend_ns=1000 * S, launch_ns=1000 * S, save=False)  # no timer changes the state meanwhile


def test_an_entry_on_which_the_state_machine_raises_never_happened(play, inside, monkeypatch, capsys):
    broken_apply(monkeypatch)
    play.plan(QUIET)
    made = inside(aggregate=True)
    a = Puppet(made.loop, play.secret, "a", [made.aggregator.server.address])
    turn_until(made.loop, lambda: a.of("Launch"))
    was = made.gang.to_bytes()
    last = a.post(messages.DeviceWarning("a", 1, "ecc", 99))
    turn_until(made.loop, lambda: a.link.outbox.acked == last)
    assert made.gang.to_bytes() == was and "a bug" in capsys.readouterr().err
    up = a.post(messages.WorkersUp("a", 1, (1,), (9,)))
    turn_until(made.loop, lambda: a.link.outbox.acked == up)
    assert made.gang.members.workers[1].up
    # What came with it is heard.
    joined = event(messages.NodeJoined("b", 1, "", "b:1"), "b")
    wrong = event(messages.DeviceWarning("a", 1, "ecc", 100), number=up + 1)
    made._take("reports", {"from": "local", "items": [edge("seen", "b"), wrong, joined, wrong]})
    was = made.gang.to_bytes()
    assert not made.gang.members.nodes["a"].fault and "b" in made.gang.members.nodes
    a.link.close()
    again = inside()
    assert again.gang.to_bytes() == was and not again.state.roster.take("local", wrong), "it need not be sent again"


def test_what_a_restart_sets_aside_stays_aside(play, inside, monkeypatch):
    play.plan(QUIET)
    made = inside()

    def hear(*items):
        made._take("reports", {"from": "x", "items": list(items)})
        return made.gang.to_bytes()

    joined = hear(edge("seen"), event(messages.NodeJoined("a", 1, "", "a:1")))
    warned = hear(event(messages.DeviceWarning("a", 1, "ecc", 99), number=2))
    with monkeypatch.context() as broken:
        broken_apply(broken)
        made = inside()
        assert made.gang.to_bytes() == joined != warned
    made = inside()
    assert made.gang.to_bytes() == joined, "decisions were made without it"
    assert hear(event(messages.DeviceWarning("a", 1, "ecc", 100), number=3)) != joined


def test_a_timer_on_which_the_state_machine_raises_fires_later_and_not_for_ever(play, inside, monkeypatch):
    broken_apply(monkeypatch, messages.TimerFired)
    monkeypatch.setattr(module, "MOST_ASIDE", 5)
    play.plan(Policy(resend_ns=20_000_000, launch_ns=1000 * S, save=False))
    made = inside()
    made._take("reports", {"from": "x", "items": [edge("seen"), event(messages.NodeJoined("a", 1, "", "a:1"))]})
    turn_until(made.loop, lambda: made.state.aside)
    assert min(made.gang.desk.timers.values()) > made.state.time_ns, "it is put off"
    turn_until(made.loop, lambda: made.over)
    assert "raises on more than 5 entries" in made.over
    with pytest.raises(JournalError, match="more than 5"):
        inside()


def test_what_a_user_asks_for_is_refused_when_it_is_set_aside(play, inside, monkeypatch):
    broken_apply(monkeypatch, messages.Scale)
    made = inside()
    answers, me = [], Identity("user", "user-1", 1)
    link = Link(made.loop, play.secret, me, [made.server.address], ANSWERS, lambda s, n, body: answers.append(body))
    link.post({"type": "ask", "event": messages.Scale(1).to_dict()})
    turn_until(made.loop, lambda: answers)
    assert answers[0]["type"] == "refused" and "a bug" in answers[0]["reason"]
    link.close()


def test_a_lost_aggregator_is_missed_also_when_an_entry_is_set_aside(play, inside, monkeypatch):
    broken_apply(monkeypatch)
    made = inside()
    x = Aggregator(made.loop, play.secret, Identity("aggregator", "x", 1), [made.server.address], beat_s=BEAT_S)
    a = Puppet(made.loop, play.secret, "a", [x.server.address])
    turn_until(made.loop, lambda: a.of("Launch"))
    x.close()
    turn_until(made.loop, lambda: not made.server.sessions["x"].conn)
    made._take("reports", {"from": "y", "items": [event(messages.DeviceWarning("a", 1, "ecc", 99), number=9)]})
    assert not made.gang.staff.suspects
    turn_until(made.loop, lambda: made.gang.staff.suspects == {"a"})
    a.link.close()


def test_what_the_controller_hears_while_nothing_happens_does_not_grow_with_the_fleet(play, inside):
    made = inside()
    homes = {}
    for name in (f"r{i}" for i in range(64)):
        me = Identity("aggregator", name, 1)
        homes[name] = Aggregator(made.loop, play.secret, me, [made.server.address], beat_s=BEAT_S)
    turn_until(made.loop, lambda: len(made._seen_steps) == 64)
    for each in homes.values():
        each._say_ping()
    turn_until(made.loop, lambda: {each._ping_s for each in homes.values()} == {64 / PINGS})
    assert all(each._speaks for each in homes.values()), "nobody has said a step yet"
    for name in ("r7", "r8"):
        items = [{"type": "event", "node": f"of {name}", "incarnation": 1, "number": 1, "event": {}}]
        items[0]["event"] = messages.StepsDone(made.gang.generation, 1).to_dict()
        homes[name]._post_reports(items)
        turn_until(made.loop, lambda home=homes[name]: not home.link.outbox.frames)
    for each in homes.values():
        each._say_ping()
    turn_until(made.loop, lambda: [name for name, each in homes.items() if each._speaks] == ["r7"])
    homes.pop("r7").close()
    turn_until(made.loop, lambda: "r7" not in made._seen_steps)
    homes["r9"]._say_ping()
    turn_until(made.loop, lambda: homes["r9"]._speaks)
    for each in homes.values():
        each.close()


def test_an_aggregator_that_takes_nothing_is_given_up_and_the_controller_lives(play, inside, monkeypatch):
    monkeypatch.setattr(transport, "OUTBOX_BYTES", 20_000)
    made = inside()
    x = Aggregator(made.loop, play.secret, Identity("aggregator", "x", 1), [made.server.address], beat_s=BEAT_S)
    a = Puppet(made.loop, play.secret, "a", [x.server.address])
    turn_until(made.loop, lambda: a.of("Launch"))
    addresses = cut(x)
    x.link.drop("it was cut")
    turn_until(made.loop, lambda: not made.server.sessions["x"].conn)
    joined = messages.NodeJoined("a", 1, "", "a:1")
    for number in range(100, 300):  # each is answered
        made._take("reports", {"from": "x", "items": [event(joined, number=number)]})
    assert "x" not in made.server.sessions and not made.over
    x.link.addresses[:] = addresses
    count = len(a.of("Launch"))
    turn_until(made.loop, lambda: len(a.of("Launch")) > count)
    x.close()


def test_commands_that_one_message_cannot_hold_travel_as_several(play, inside, monkeypatch):
    """The files of 100,000 ranks: the controller ended by them, again after each restart."""
    made = inside(aggregate=True)
    a = Puppet(made.loop, play.secret, "a", [made.aggregator.server.address])
    turn_until(made.loop, lambda: a.of("Launch"))
    monkeypatch.setattr(secret, "FRAME_BYTES", 30_000)
    files = ((10**9, "0" * 64),) * 100
    cuts = [messages.Commit("a", "c", 1, 1, 500, first, files, "s") for first in range(0, 500, 100)]
    made._post(cuts)
    turn_until(made.loop, lambda: len(a.of("Commit")) == 5)
    assert [command["first"] for command in a.of("Commit")] == [0, 100, 200, 300, 400]


def test_what_an_aggregator_cannot_keep_its_agents_keep(play, inside, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(transport, "OUTBOX_BYTES", 20_000)
    monkeypatch.setattr(gathering, "MOST", 20)
    made = inside(aggregate=True)
    with full_disk(made, monkeypatch):
        agents = [Puppet(made.loop, play.secret, name, [made.aggregator.server.address]) for name in "abcd"]
        for agent in agents:
            for count in range(50):
                agent.post(messages.DeviceWarning(agent.name, 1, "slow", count))
                agent.post(messages.Parted((7,), (count,), 0, 3, 3, 0))
                made.loop.turn(0)
        turn_until(made.loop, lambda: any(agent.link.visits > 1 for agent in agents))
    turn_until(made.loop, lambda: all(agent.link.outbox.acked == agent.link.outbox.last for agent in agents))
    items = [item for e in read(play.folder / "journal.db") for item in e.body.get("items", ())]
    heard = [(item["node"], item["number"]) for item in items if item["type"] == "event"]
    heard += [(name, number) for item in items if item["type"] == "many" for name, _, number in item["said"]]
    for agent in agents:
        assert sorted(n for name, n in heard if name == agent.name) == list(range(1, agent.link.outbox.last + 1))


@contextlib.contextmanager
def full_disk(controller, monkeypatch):
    def append(*args):
        raise JournalError("no space left on device")

    with monkeypatch.context() as full:
        full.setattr(controller.journal, "append", append)
        yield


def test_while_the_journal_cannot_be_written_nothing_is_said(play, inside, monkeypatch, capsys):
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    made = inside(aggregate=True)
    a = Puppet(made.loop, play.secret, "a", [made.aggregator.server.address])
    with full_disk(made, monkeypatch):
        turn_until(made.loop, lambda: made._trouble)
        enough = time.monotonic() + 0.3
        turn_until(made.loop, lambda: time.monotonic() > enough)
        assert a.link.session and not a.told and a.link.outbox.acked == 0
    turn_until(made.loop, lambda: a.of("Launch") and a.link.outbox.acked == a.link.outbox.last)
    assert capsys.readouterr().err.count("no space left") == 1
    was = made.gang.to_bytes()
    a.link.close()
    assert inside().gang.to_bytes() == was


def test_a_full_disk_stops_neither_the_controller_nor_those_who_wait_for_it(play, tmp_path):
    """Its log is on that disk too."""
    with (tmp_path / "log").open("wb") as log:
        play.start("--aggregate", log=log)
    a, b = play.agent("a"), play.agent("b")
    workers = play.launched(a, b)
    controller = play.controllers[0].process
    old = resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    last = a.post(messages.WorkersUp("a", 1, (workers["a"][1],), (9,)))
    enough = time.monotonic() + 0.5
    play.until(lambda: time.monotonic() > enough)
    assert controller.poll() is None and a.link.outbox.acked < last
    resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, old)
    b.post(messages.WorkersUp("b", 1, (workers["b"][1],), (9,)))
    play.until(lambda: a.of("Build") and b.of("Build"))


def heard(state, item, at=0):
    return state.take("reports", {"from": "x", "items": [item]}, at)


def edge(kind, node="a", visit=1):
    return {"type": "edge", "node": node, "incarnation": 1, "visit": visit, "edge": kind}


def event(body, node="a", number=1):
    return {"type": "event", "node": node, "incarnation": 1, "number": number, "event": body.to_dict()}


@pytest.fixture
def state():
    state = State.of(Plan(LAYOUT, 100, 0, 0, Policy(**QUICK)))
    for name in "abc":
        heard(state, edge("seen", name))
        heard(state, event(messages.NodeJoined(name, 1, "", ""), name))
    return state


@pytest.mark.parametrize(
    "body",
    [
        messages.TimerFired("resend"),
        messages.Drain("a"),
        messages.WorkerDied("b", 1, 1, Failure(text="not his")),
        messages.WorkerDied("a", 2, 1, Failure(text="not yet")),
        messages.NodeDead("b", 1, ""),
        messages.NodeSuspect("b", 1),
    ],
)
def test_an_agent_speaks_for_itself(state, body):
    before = state.gang.to_bytes()
    news, commands = heard(state, event(body, number=2), at=0)
    assert news["items"] == [] and commands == [] and state.refused.startswith("a: ")
    assert state.gang.to_bytes() == before


def test_only_what_replicas_say_can_be_of_many(state):
    said, before = [["a", 1, 2], ["b", 1, 2]], state.gang.to_bytes()
    died = messages.WorkerDied("c", 1, 1, Failure(text="not theirs")).to_dict()
    news, commands = heard(state, {"type": "many", "said": said, "event": died})
    assert news["items"] == [] and commands == [] and "nothing that many say alike" in state.refused
    assert state.gang.to_bytes() == before
    built = messages.Built(("a", "c"), (1, 1), ((1,), (2,)), 1).to_dict()
    news, _ = heard(state, {"type": "many", "said": [["a", 1, 3], ["b", 1, 3]], "event": built})
    assert news["items"] == [] and "Built.nodes has one that has not said it" in state.refused


@pytest.mark.parametrize("kind", ["event", "many"])
def test_a_node_speaks_for_replicas_that_are_on_it(state, kind):
    for node, found in [(w.node, number) for number, w in state.gang.members.workers.items()]:
        heard(state, event(messages.WorkersUp(node, 1, (found,), (9,)), node, number=1 + found))
    own, before = state.gang.worlds.replicas, state.gang.to_bytes()
    assert [own[r].nodes for r in (0, 1)] == [("a",), ("b",)]

    def say(number, *replicas):
        body = messages.Formed(replicas, tuple(own[r].world for r in replicas), 1)
        item = event(body, number=number)
        if kind == "many":
            item = {"type": "many", "said": [["a", 1, number]], "event": item["event"]}
        return heard(state, item)[0]["items"]

    assert not say(10, 1) and "Formed.replicas has 1, which is on other nodes" in state.refused
    assert not say(11, 0, 1)
    assert state.gang.to_bytes() == before
    assert say(12, 0)


def test_a_silent_node_that_comes_by_another_way_is_clear(state):
    heard(state, edge("suspect"))
    assert state.gang.staff.suspects == {"a"}
    heard(state, edge("seen", visit=2))
    assert not state.gang.staff.suspects


def test_a_controller_that_ends_before_it_has_fenced_a_node_fences_it_when_it_is_back(play, inside):
    """The journal has it that the node is back, and nobody has told it."""
    made = inside()
    x = Aggregator(made.loop, play.secret, Identity("aggregator", "x", 1), [made.server.address], beat_s=BEAT_S)
    a = Puppet(made.loop, play.secret, "a", [x.server.address])
    turn_until(made.loop, lambda: a.of("Launch"))
    made.state.take("event", {"event": messages.NodeDead("a", 1, "it is off").to_dict()}, made.state.time_ns)
    assert made.gang.members.nodes["a"].dead and made.state.roster.home("a") == "x" and not a.of("Fence")
    x.link.drop("the controller has ended")
    turn_until(made.loop, lambda: a.of("Fence"))
    x.close()
    a.link.close()


def test_a_dead_node_that_comes_by_another_way_is_fenced(state):
    heard(state, edge("suspect"))
    heard(state, edge("dead"))
    assert state.gang.members.nodes["a"].dead
    _, commands = heard(state, edge("seen", visit=2))
    assert commands == [messages.Fence("a", 1)]
    assert "x" in orders(commands, state.roster), "and can be told"


def test_what_is_for_a_node_that_nobody_reaches_is_left_out(state):
    assert orders([messages.Welcome("nobody", 1)], state.roster) == {}
