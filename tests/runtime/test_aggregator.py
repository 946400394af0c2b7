"""The aggregator: heartbeats end there; who falls silent is told once, what agents post arrives once, also when it is
killed or a node moves to another."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control.liveness import Edge, Liveness, Roster, event_of
from phalanx.control.messages import EVERYONE, Event, Form, Formed, Parked, Parted, Source
from phalanx.observe.fold import fold_of
from phalanx.runtime import aggregator as module
from phalanx.runtime import inventory, secret
from phalanx.runtime.aggregator import COMMANDS, ITEMS, PASSED, WELCOME, Aggregator, merged
from phalanx.runtime.controller import orders
from phalanx.runtime.gathering import Rounds
from phalanx.runtime.secret import Identity, Secret, load_secret
from phalanx.runtime.transport import Link, Loop, Server
from phalanx.runtime.wire import WireError, check

SECRET = Secret(Path("secret"), bytes(range(32)))
S = 10**9


# -- who is silent


def edges(liveness: Liveness, *times_s: float) -> list[tuple[str, str]]:
    return [(e.node, e.edge) for t in times_s for e in liveness.tick(round(t * S))]


def beating(beats: dict[str, list[float]], beat_s=5.0) -> Liveness:
    liveness = Liveness(round(beat_s * S))
    for t, node in sorted((t, node) for node, times in beats.items() for t in times):
        list(liveness.beat(node, 1, 1, round(t * S)))
    return liveness


def test_a_node_is_suspect_after_half_the_time_out_and_dead_after_all_of_it():
    liveness = beating({"a": [0, 5, 10], "b": [0, 5, 10, 15]})
    assert edges(liveness, 17.4) == []
    assert edges(liveness, 17.6) == [("a", "suspect")]
    assert edges(liveness, 22.4) == []
    assert edges(liveness, 22.6) == [("b", "suspect")]
    assert edges(liveness, 24.9) == []
    assert edges(liveness, 25.1) == [("a", "dead")]
    assert edges(liveness, 100) == [("b", "dead")] and not liveness.nodes


def test_a_suspect_that_speaks_is_clear_and_told_once():
    liveness = beating({"a": [0, 5]})
    assert edges(liveness, 12.6, 13) == [("a", "suspect")]
    assert [e.edge for e in liveness.beat("a", 1, 1, 16 * S)] == ["clear"]
    assert [e.edge for e in liveness.beat("a", 1, 1, 21 * S)] == []


def test_a_slow_network_is_given_more_time():
    slow = beating({"a": [i * 12 for i in range(20)]})
    assert edges(slow, 19 * 12 + 11.9) == [] and edges(slow, 19 * 12 + 12.1) == [("a", "suspect")]
    assert edges(slow, 19 * 12 + 23.9) == [] and edges(slow, 19 * 12 + 24.1) == [("a", "dead")]


def test_one_long_gap_is_forgotten_in_time():
    liveness = beating({"a": [0, 40, *range(45, 500, 5)]})
    assert edges(liveness, 495 + 7.4, 495 + 7.6) == [("a", "suspect")]


def test_a_later_incarnation_is_seen_and_the_old_one_is_not_mourned():
    liveness = beating({"a": [0]})
    assert list(liveness.beat("a", 2, 1, 3 * S)) == [Edge("a", 2, 1, "seen")]
    assert edges(liveness, 10.4, 10.6) == [("a", "suspect")]
    assert [e.incarnation for e in liveness.tick(19 * S)] == [2]


def test_a_node_that_is_expected_and_never_comes_is_dead():
    liveness = Liveness(5 * S)
    liveness.expect("a", 3, 100 * S)
    assert edges(liveness, 107.4, 107.6, 114.9, 115.1) == [("a", "suspect"), ("a", "dead")]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 8 * S)), max_size=60), st.integers(1, 30 * S))
def test_it_agrees_with_a_scan_of_all_nodes(beats, wait):
    liveness, now, last, gap = Liveness(5 * S), 0, {}, {}
    for node, pause in beats:
        now += pause
        for n in list(last):  # none may pass its deadline unseen
            list(liveness.tick(now))
            if now - last[n] >= max(15 * S, 2 * gap[n]):
                del last[n], gap[n]
        list(liveness.beat(node, 1, 1, now))
        if node in last:
            gap[node] = max(now - last[node], gap[node] - (gap[node] - (now - last[node])) // 16)
        else:
            gap[node] = 5 * S - 5 * S // 16
        last[node] = now
    list(liveness.tick(now + wait))
    list(liveness.tick(now + wait))
    dead = {n for n in last if now + wait - last[n] >= max(15 * S, 2 * gap[n])}
    assert set(liveness.nodes) == set(last) - dead


def test_a_beat_costs_the_same_with_a_hundred_nodes_and_with_ten_thousand():
    """Looks at nodes, counted: each is looked at when its deadline passes, not at each tick."""

    class Counting(Liveness):
        looks = 0

        def _due(self, seen):
            Counting.looks += 1
            return super()._due(seen)

    per_beat = []
    for count in (100, 10_000):
        liveness, Counting.looks = Counting(5 * S), 0
        for t in range(0, 100, 5):
            for i in range(count):
                list(liveness.beat(f"n{i}", 1, 1, t * S + i))
            for tick in range(20):
                assert list(liveness.tick((t * 20 + 5 * tick) * S // 20 + count)) == []
        per_beat.append(Counting.looks / (20 * count))
    assert per_beat[0] == pytest.approx(per_beat[1], rel=0.1) and per_beat[1] < 3


# -- the controller's end


def edge(node, kind, visit=1, incarnation=1):
    return {"type": "edge", "node": node, "incarnation": incarnation, "visit": visit, "edge": kind}


def event(node, number, incarnation=1):
    return {"type": "event", "node": node, "incarnation": incarnation, "number": number, "event": {}}


def test_an_event_counts_once_by_whatever_way_it_comes():
    roster = Roster()
    assert [roster.take("r1", event("a", 1)), roster.take("r2", event("a", 1))] == [True, False]
    assert [roster.take("r2", event("a", 2)), roster.take("r1", event("a", 2, 2))] == [True, True]
    assert not roster.take("r2", event("a", 3, 1)), "of a process that was replaced"


def many(*numbers):
    """Of the nodes a, b, ..., each with a replica."""
    replicas = tuple(range(len(numbers)))
    said = [["abc"[i], 1, number] for i, number in enumerate(numbers)]
    return {"type": "many", "said": said, "event": as_json(Parted(replicas, replicas, 2, 3, 3, 2))}


def as_json(message):
    return json.loads(json.dumps(message.to_dict()))


def test_what_many_say_is_news_while_one_of_them_was_not_heard_before():
    roster = Roster()
    roster.take("r1", event("b", 7))
    assert roster.take("r2", many(1, 7, 1)) and not roster.take("r1", many(1, 7, 1))
    assert not roster.take("r1", event("a", 1)) and roster.take("r1", many(2, 7, 1))
    assert not roster.take("r1", event("a", 2)) and roster.take("r1", event("b", 8))


@pytest.mark.parametrize("one", [["a", 1], ["a", 1, "2"], [3, 1, 1], ["a", 1, 1, 1], 3])
def test_who_said_it_must_be_told(one):
    with pytest.raises(ValueError, match=r"many\.said"):
        Roster().take("r1", {**many(1, 1), "said": [["b", 1, 1], one]})


# -- what replicas say alike


def item(node, number, said, incarnation=1):
    return {"type": "event", "node": node, "incarnation": incarnation, "number": number, "event": as_json(said)}


def parted(replica, generation=1, step=3):
    return Parted((replica,), (10 + replica,), generation, step, step, generation)


def test_what_replicas_say_alike_becomes_one():
    items = [item("a", 1, parted(0)), item("b", 4, parted(1)), item("c", 9, parted(2, step=4)), item("d", 2, parted(3))]
    first, other = merged(items)
    assert first["said"] == [["a", 1, 1], ["b", 1, 4], ["d", 1, 2]] and other["said"] == [["c", 1, 9]]
    assert Event.from_dict(event_of(first)) == Parted((0, 1, 3), (10, 11, 13), 1, 3, 3, 1)
    assert Event.from_dict(event_of(other)) == parted(2, step=4)
    assert items[0]["event"]["replicas"] == [0], "what the agents are waiting for stays as it was"


def test_what_nodes_say_alike_becomes_one():
    def parked(node, worker, world=5):
        return Parked((node,), (1,), ((worker,),), world, 3, 3, 1)

    lie = item("d", 2, parked("a", 7))
    items = [item("a", 1, parked("a", 1)), item("b", 4, parked("b", 2)), item("c", 9, parked("c", 3, world=6)), lie]
    first, other, passed = merged(items)
    assert first["said"] == [["a", 1, 1], ["b", 1, 4]] and passed == lie, "a node speaks for itself"
    assert Event.from_dict(event_of(first)) == Parked(("a", "b"), (1, 1), ((1,), (2,)), 5, 3, 3, 1)
    assert Event.from_dict(event_of(other)) == parked("c", 3, world=6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["Formed", "Parted", "died"])), max_size=12))
def test_nobody_overtakes_himself(said):
    """A node may have several replicas, and something else to say in between."""
    counts, items = dict.fromkeys("abc", 0), []
    for at, (node, kind) in enumerate(said):
        counts[node] += 1
        about = {"Formed": Formed((at,), (at,), 1), "Parted": parted(at)}
        body = as_json(about[kind]) if kind in about else {"kind": "WorkerDied"}
        items.append({"type": "event", "node": node, "incarnation": 1, "number": counts[node], "event": body})
    roster, out = Roster(), merged(items)
    heard = [(name, number) for i in out for name, _, number in i.get("said", [[i.get("node"), 1, i.get("number")]])]
    for node in "abc":
        assert [number for name, number in heard if name == node] == list(range(1, counts[node] + 1))
    assert all(roster.take("r1", i) for i in out), "all of it is news"
    replicas = sorted(r for i in out for r in i["event"].get("replicas", ()))
    assert replicas == [at for at, (_, kind) in enumerate(said) if kind != "died"]


@pytest.mark.parametrize("change", [{"replicas": [1, 2]}, {"worlds": "1"}, {"replicas": ["1"]}, {"replicas": None}])
def test_columns_that_do_not_fit_do_not_spoil_those_of_others(change):
    wrong = item("b", 1, parted(1))
    wrong["event"] |= change
    first, passed = merged([item("a", 1, parted(0)), wrong, item("c", 1, parted(2))])
    assert passed == wrong and Event.from_dict(event_of(first)).replicas == (0, 2)
    with pytest.raises(ValueError, match="Parted"):
        Event.from_dict(event_of(passed))


def test_only_the_aggregator_that_a_node_speaks_to_can_call_it_dead():
    roster = Roster()
    assert roster.take("r1", edge("a", "seen", 1)) and roster.take("r2", edge("a", "seen", 2))
    assert roster.homes(["a"]) == {"r2": ["a"]} and not roster.take("r1", edge("a", "dead", 1))
    assert roster.take("r1", edge("a", "seen", 3))
    assert not roster.take("r2", edge("a", "seen", 2)), "it came late"
    assert not roster.take("r2", edge("a", "suspect", 2)) and roster.expected("r1") == {"a": 1}
    assert roster.take("r1", edge("a", "dead", 3)) and roster.homes(["a"]) == {} and roster.expected("r1") == {}
    assert roster.take("r1", edge("a", "seen", 4)) and roster.homes(["a"]) == {"r1": ["a"]}
    assert roster.homes(["b"]) == {} and roster.aggregators == {"r1", "r2"}


def test_the_roster_comes_back_from_json():
    roster = Roster()
    roster.take("r1", edge("a", "seen"))
    roster.take("r1", event("a", 7))
    again = Roster(json.loads(json.dumps(roster.to_dict())))
    assert (
        again.expected("r1") == {"a": 1}
        and again.aggregators == {"r1"}
        and not again.take("r1", event("a", 7))
        and again.take("r1", event("a", 8))
    )


# -- over sockets


class Cluster:
    """A controller, some aggregators and agents in one loop; beats every 100 ms."""

    BEAT_S = 0.1

    def __init__(self):
        self.loop, self.roster, self.news = Loop(), Roster(), []
        self.controller = Server(
            self.loop, SECRET, Identity("controller", "controller", 1), PASSED, self._hear, on_open=self._opened
        )
        self.aggregators: dict[str, Aggregator] = {}
        self.agents: dict[str, Link] = {}
        self.commands: dict[str, list[int]] = {}
        self.incarnation = 0

    def _hear(self, session, number, body):
        for item in body.get("items", ()):
            if self.roster.take(session.peer.name, check(item, ITEMS)):
                self.news.append((item["node"], item.get("edge") or item["event"]["value"]))
        if number:
            session.ack(number)

    def _opened(self, session):
        session.post({"type": "expect", "nodes": self.roster.expected(session.peer.name), "grace_ns": 0})

    def aggregate(self, name, port=0):
        self.incarnation += 1
        me = Identity("aggregator", name, self.incarnation)
        made = Aggregator(self.loop, SECRET, me, [self.controller.address], port=port, beat_s=self.BEAT_S)
        self.aggregators[name] = made
        return made

    def agent(self, name, *aggregators, incarnation=1, beats=True):
        addresses = [a.server.address for a in aggregators or self.aggregators.values()]
        got = self.commands.setdefault(name, [])

        def beat(*_):
            if link.visits and self.agents.get(name) is link:
                about = {"visit": link.visits, "sent_ns": 1, "generation": 1, "step": 1, "counter": 1, "step_ns": 1}
                link.tell({"type": "beat", **about})

        def again():
            beat()
            if self.agents.get(name) is link:
                self.loop.after(self.BEAT_S, again)

        link = self.agents[name] = Link(
            self.loop,
            SECRET,
            Identity("agent", name, incarnation),
            addresses,
            COMMANDS,
            lambda session, number, body: got.append(body["command"]["value"]) if "command" in body else None,
            on_open=beat if beats else lambda session: None,
            seed=len(self.agents),
        )
        if beats:
            again()
        return link

    def command(self, aggregator, nodes, value):
        order = {"type": "command", "nodes": nodes, "command": {"value": value}, "own": {}}
        self.controller.sessions[aggregator].post({"type": "commands", "items": [order]})

    def bundle(self, count):
        """The first aggregator sends what agents have posted when it has so many events."""
        first, kept = self.aggregators["r1"], []
        reports, send = first._reports, first._reports._send
        reports._send = kept.extend
        self.until(lambda: sum(agent is not None for _, agent in kept) == count)
        reports._send = send
        reports.put_back(kept, 0.0)
        reports.flush()

    def kill(self, name):
        self.agents.pop(name).close()

    def until(self, happened, timeout=60.0):
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, self.news
            self.loop.turn(0.02)

    def run(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.loop.turn(0.02)

    def of(self, node):
        return [what for who, what in self.news if who == node]


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 0.01)
    monkeypatch.setattr(module, "STALL_S", 0.05)  # all are in one process, on a machine that may be busy
    made = Cluster()
    made.aggregate("r1")
    return made


def test_the_controller_hears_edges_and_no_beats(cluster):
    for name in "abc":
        cluster.agent(name)
    cluster.run(0.6)
    assert sorted(cluster.news) == [(name, "seen") for name in "abc"]
    silent = cluster.agents.pop("b")
    cluster.until(lambda: cluster.of("b") == ["seen", "suspect", "dead"])
    cluster.until(lambda: sorted(cluster.aggregators["r1"].beats) == ["a", "c"])
    assert cluster.of("a") == cluster.of("c") == ["seen"]
    silent.close()
    cluster.agent("b", incarnation=2)
    cluster.until(lambda: cluster.of("b") == ["seen", "suspect", "dead", "seen"])


def test_a_connection_that_ends_is_told_unless_there_is_a_new_one_at_once(cluster):
    cluster.BEAT_S = 1.0  # in which a busy machine connects
    r2 = cluster.aggregate("r2")
    cluster.agent("a", r2), cluster.agent("b", r2)
    cluster.until(lambda: len(cluster.news) == 2)
    cluster.kill("a")
    r2.server.sessions["b"].conn.sock.shutdown(2)
    cluster.until(lambda: cluster.of("a") == ["seen", "gone"])
    cluster.run(0.2)
    assert cluster.of("b") == ["seen", "seen"]


def test_what_agents_post_and_are_told_passes_through(cluster):
    a, b = cluster.agent("a"), cluster.agent("b")
    for i in range(50):
        a.post({"type": "event", "event": {"value": i}})
    a.flush(60)
    cluster.until(lambda: cluster.roster.homes(["b"]) == {"r1": ["b"]})
    for i in range(50):
        cluster.command("r1", ["b"], i)
    cluster.command("r1", ["a", "nobody", "b"], 50)
    cluster.until(lambda: len(cluster.commands["b"]) == 51 and cluster.commands["a"])
    assert [v for v in cluster.of("a") if v != "seen"] == list(range(50))
    assert cluster.commands == {"a": [50], "b": list(range(51))} and b.outbox.last == 0


def test_reports_that_one_message_cannot_hold_travel_as_several(cluster, monkeypatch, capsys):
    """Each fits by itself. A report that fits nowhere is dropped, and does not stop the others."""
    limit = 30_000
    monkeypatch.setattr(secret, "FRAME_BYTES", limit)
    link, news = cluster.agent("a", beats=False), cluster.news
    cluster.until(lambda: link.session)
    for i in range(5):
        link.post({"type": "event", "event": {"value": i, "big": "x" * (limit // 3)}})
    cluster.bundle(5)
    link.flush(60)
    assert [value for _, value in news] == [0, 1, 2, 3, 4]
    filled = {"type": "event", "event": {"value": 5, "big": ""}}
    filled["event"]["big"] = "x" * (limit - len(json.dumps({"type": "post", "seq": 9, "body": filled})))
    link.post(filled)
    link.post({"type": "event", "event": {"value": 6}})
    link.flush(60)
    assert [value for _, value in news] == [0, 1, 2, 3, 4, 6]
    assert "dropped: {'type': 'event', 'node': 'a'" in capsys.readouterr().err


def test_what_is_said_in_passing_travels_as_several_if_one_message_cannot_hold_it(cluster, monkeypatch):
    """Nodes that join, and values on their way up and down: the process ended by it, often that of the controller."""
    limit = 30_000
    monkeypatch.setattr(secret, "FRAME_BYTES", limit)
    first, joined, stored = cluster.aggregators["r1"], [], []

    def hear(session, number, body):
        items = body.get("items", ())
        joined.extend(item["node"] for item in items if body["type"] == "joins")
        stored.extend(item[3] for item in items if body["type"] == "store" and item[0] == "set")

    cluster.controller._on_message = hear
    first._learn({"version": "v"}, [], 1)
    cluster.until(lambda: first.link.session)
    asking = [cluster.agent(name, incarnation=0, beats=False) for name in "xyz"]
    about = ABOUT | {"system": "x" * (limit // 2)}
    cluster.until(lambda: all(link.session for link in asking))
    for link in asking:
        link.tell({"type": "join", "life": "1", "version": "v", "about": about})
    cluster.until(lambda: sorted(joined) == ["x", "y", "z"])
    for name in "abc":
        cluster.agent(name)
    cluster.until(lambda: all(cluster.agents[name].session for name in "abc"))
    heard = []
    cluster.agents["c"]._on_message = lambda session, number, body: heard.extend(body.get("items", ()))
    for name in "ab":
        value = "x" * (limit // 2 + 1000)
        cluster.agents[name].tell({"type": "store", "items": [["set", "gang", 1, f"room/{name}", value]]})
    cluster.until(lambda: sorted(stored) == ["room/a", "room/b"])
    cluster.agents["c"].tell({"type": "store", "items": [["join", "gang", 1, "room"]]})
    cluster.until(lambda: sorted(item[3] for item in heard) == ["room/a", "room/b"])


def test_what_all_replicas_say_at_once_travels_as_one(cluster):
    """And each of their nodes hears that it was heard, when the controller has heard it."""
    bundles = []

    def hear(session, number, body):
        if items := [item for item in body.get("items", ()) if item["type"] != "edge"]:
            bundles.append((number, items))

    cluster.controller._on_message = hear
    agents = {name: cluster.agent(name) for name in "abcde"}
    for at, (name, agent) in enumerate(agents.items()):
        agent.post({"type": "event", "event": parted(at).to_dict()})
        if name == "d":
            agent.post({"type": "event", "event": {"kind": "WorkerDied"}})
    cluster.bundle(6)
    cluster.until(lambda: bundles)
    ((number, items),) = bundles
    (all_of_them,) = [item for item in items if item["type"] == "many"]
    assert sorted(name for name, _, _ in all_of_them["said"]) == [*"abcde"] and len(items) == 2
    assert sorted(all_of_them["event"]["replicas"]) == [0, 1, 2, 3, 4]
    assert not any(agent.outbox.acked for agent in agents.values())
    cluster.controller.sessions["r1"].ack(number)
    for agent in agents.values():
        agent.flush(60)


def test_which_steps_are_done_is_passed_on_once_and_all_hear_that_it_was_heard(cluster):
    """Every node says so: a controller that reads each would read 12,500 times the same."""
    said = []

    def hear(session, number, body):
        if body["type"] == "reports":
            items = [item for item in body["items"] if item["type"] == "event"]
            said.extend((item["node"], item["event"]["kind"], item["event"].get("step")) for item in items)
        session.ack(number)

    cluster.controller._on_message = hear
    agents = {name: cluster.agent(name) for name in "abc"}

    def done(name, step):
        agents[name].post({"type": "event", "event": {"kind": "StepsDone", "generation": 1, "step": step}})

    done("a", 4)
    cluster.until(lambda: said == [("a", "StepsDone", 4)])
    agents["b"].post({"type": "event", "event": {"kind": "WorkerDied"}})
    done("b", 4)
    done("c", 3)
    for agent in agents.values():
        agent.flush(60)
    assert said == [("a", "StepsDone", 4), ("b", "WorkerDied", None)], "in order, and no old news"
    done("c", 5)
    agents["c"].flush(60)
    assert said[2:] == [("c", "StepsDone", 5)]
    lease = {"type": "lease", "ns": 60 * S, "sent_ns": 0, "again_ns": S, "speaks": False}
    cluster.controller.sessions["r1"].tell(lease)
    cluster.until(lambda: not cluster.aggregators["r1"]._speaks)
    done("a", 6)
    done("a", 7)
    agents["a"].flush(60)
    assert len(said) == 3, "another aggregator says it"
    agents["b"].post({"type": "event", "event": {"kind": "StepsDone", "generation": 2, "step": 7}})
    agents["b"].flush(60)
    assert said[3:] == [("b", "StepsDone", 7)], "the first of a generation is said by all"


def test_a_node_has_a_lease_once_the_controller_has_acknowledged_that_it_is_there(cluster):
    """It may have been given up: what it is told then comes before. A controller that is slow costs it nothing."""
    first, late, got, slow = cluster.aggregators["r1"], [], [], [True]

    def hear(session, number, body):
        if body["type"] == "ping":
            about = {"ns": 60 * S, "sent_ns": body["sent_ns"], "again_ns": S // 10, "speaks": True}
            session.tell({"type": "lease", **about})
        elif slow[0]:
            late.append((session, number, body))
        else:
            cluster._hear(session, number, body)

    cluster.controller._on_message = hear
    link = cluster.agent("a")
    link._on_message = lambda session, number, body: got.append(body)
    leases = lambda: [body for body in got if body["type"] == "lease"]  # noqa: E731
    cluster.until(lambda: late and first._lease_ns)
    cluster.run(0.5)
    assert "a" in first.beats and not got
    cluster.command("r1", ["a"], "fence")
    slow[0] = False
    cluster._hear(*late.pop())
    cluster.until(lambda: len(got) >= 2)
    assert got[0]["type"] == "command" and got[1]["type"] == "lease" and got[1]["sent_ns"] == 1

    slow[0] = True
    first.link.drop("it was cut off")
    cluster.until(lambda: late)
    before, seen = len(leases()), first.liveness.nodes["a"]
    cluster.until(lambda: len(leases()) > before + 2)
    cluster.until(lambda: first._lease_ns > seen.lease_ns)
    assert leases()[-1]["ns"] <= seen.lease_ns - time.monotonic_ns() + S, "what it had before, and no more"

    link.drop("it was cut off")
    cluster.until(lambda: seen.visit == link.visits > 1)
    before = len(leases())
    cluster.run(0.5)
    assert len(leases()) == before, "the controller has not heard that it is back"
    slow[0] = False
    for one in late:
        cluster._hear(*one)
    cluster.until(lambda: len(leases()) > before)


def test_a_form_for_everyone_is_sent_once_and_each_node_is_told_what_is_its_own(cluster):
    got = {}
    for name in "abc":
        cluster.agent(name)._on_message = lambda session, number, body, name=name: (
            got.update({name: body["command"]}) if "command" in body else None
        )
    cluster.until(lambda: cluster.roster.homes("abc").get("r1", []) == [*"abc"])
    live = Source("live", "b", 6)
    about = dict(generation=1, step=0, replicas=(0, 1), worlds=(1, 2), every=None)
    more = dict(kept=(), branch=False, last=0, rung=-1, reason="", nodes=EVERYONE)
    form = Form(**about, **more, sources={0: live}, takers={0: "a"}, buddies={"b": "c:1"}, joins=True)
    (order,) = orders([form], cluster.roster)["r1"]
    assert order["nodes"] == ["*"] and not order["command"]["sources"], "not each node's part to all"
    cluster.controller.sessions["r1"].post({"type": "commands", "items": [order]})
    cluster.until(lambda: len(got) == 3)
    sources = {name: {*command["sources"]} for name, command in got.items()}
    assert sources == {"a": {"0"}, "b": {"0"}, "c": set()}, "who takes, and who gives"
    assert {name: command["buddies"] for name, command in got.items()} == {"a": {}, "b": {"b": "c:1"}, "c": {}}
    assert {command["generation"] for command in got.values()} == {1}
    assert all(command["joins"] for command in got.values()), "who neither takes nor gives compares states too"


def test_an_agent_hears_that_it_was_heard_when_the_controller_has(cluster):
    """Not before: the aggregator may die with what it has not passed on."""
    cluster.controller._on_message = lambda session, number, body: None  # it has not reached the journal
    a = cluster.agent("a")
    a.post({"type": "event", "event": {"value": 1}})
    with pytest.raises(TimeoutError):
        a.flush(0.3)
    cluster.controller.sessions["r1"].ack(cluster.aggregators["r1"].link.outbox.last)
    a.flush(60)


def test_an_aggregator_that_is_killed_loses_nothing(cluster):
    dice, count = random.Random(5), 0
    agents = [cluster.agent(name) for name in "abc"]
    for _ in range(6):
        for _ in range(20):
            agents[count % 3].post({"type": "event", "event": {"value": count}})
            count += 1
            for _ in range(dice.randrange(4)):
                cluster.loop.turn(0.001)
        port = cluster.aggregators["r1"].server.address[1]
        cluster.aggregators["r1"].close()
        cluster.aggregate("r1", port)
    for agent in agents:
        agent.flush(60)
    for i, name in enumerate("abc"):
        assert [v for v in cluster.of(name) if isinstance(v, int)] == list(range(i, count, 3))
    cluster.run(0.3)
    assert "dead" not in [what for _, what in cluster.news]


def test_a_node_that_dies_with_its_aggregator_is_missed_by_the_next(cluster):
    cluster.agent("a"), cluster.agent("b")
    cluster.until(lambda: len(cluster.news) == 2)
    port = cluster.aggregators["r1"].server.address[1]
    cluster.aggregators["r1"].close()
    cluster.kill("b")
    cluster.aggregate("r1", port)
    cluster.until(lambda: cluster.of("b") == ["seen", "suspect", "dead"])
    assert "dead" not in cluster.of("a")


def test_a_node_that_moves_to_another_aggregator_is_not_dead(cluster):
    cluster.BEAT_S = 1.0  # in which a busy machine connects
    first, second = cluster.aggregate("r2"), cluster.aggregate("r3")
    cluster.agent("a", first, second)
    cluster.until(lambda: cluster.roster.homes(["a"]) == {"r2": ["a"]})
    first.server.sessions["a"].conn.sock.shutdown(2)
    cluster.until(lambda: cluster.roster.homes(["a"]) == {"r3": ["a"]})
    cluster.until(lambda: "a" not in first.liveness.nodes)
    cluster.run(0.1)
    assert cluster.of("a") == ["seen", "seen"]
    cluster.command("r3", ["a"], 9)
    cluster.until(lambda: cluster.commands["a"] == [9])


def test_its_own_standstill_is_not_the_nodes_silence(cluster):
    for name in "abc":
        cluster.agent(name)
    cluster.until(lambda: len(cluster.news) == 3)
    time.sleep(0.5)  # all of them stand still; the aggregator looks before it reads
    cluster.run(0.1)
    assert [what for _, what in cluster.news] == ["seen"] * 3


def test_a_controller_that_is_away_misses_no_edge(cluster):
    cluster.agent("a"), cluster.agent("b")
    cluster.until(lambda: len(cluster.news) == 2)
    old = cluster.controller
    old.close()
    cluster.kill("b")
    cluster.run(0.5)
    cluster.controller = Server(
        cluster.loop,
        SECRET,
        Identity("controller", "controller", 2),
        PASSED,
        cluster._hear,
        on_open=cluster._opened,
        port=old.address[1],
        positions=old.positions(),
    )
    cluster.until(lambda: cluster.of("b") == ["seen", "gone"])
    assert cluster.of("a") == ["seen"]


def test_no_node_speaks_for_another_in_the_record(cluster):
    first = cluster.aggregators["r1"]
    taken, first.folder.take = [], lambda name, items, recorded: taken.append((name, items))
    cluster.agent("a", first)
    cluster.until(lambda: "a" in first.server.sessions)
    numbered = {"life": "x", "n": 1}
    own, other = ({"type": "log", "node": name, "file": "x.log", "text": "!", **numbered} for name in "ab")
    for items in ([own, other], ["b"]):
        with pytest.raises(WireError, match="a speaks for another node"):
            first._reported(first.server.sessions["a"], 0, {"type": "said", "upto": 1, "items": items})
    first._reported(first.server.sessions["a"], 0, {"type": "said", "upto": 1, "items": [own]})
    assert taken == [("a", [own])]


@pytest.mark.parametrize("role", ["user", "aggregator", "controller"])
def test_it_hears_agents_alone(cluster, role):
    first = cluster.aggregators["r1"]
    link = Link(cluster.loop, SECRET, Identity(role, "a", 1), [first.server.address], COMMANDS, lambda *_: None)
    link.post({"type": "event", "event": {"value": 5}})
    cluster.until(lambda: first.server.refused, 20)
    assert "expected agent" in first.server.trouble and cluster.of("a") == []
    link.close()


@pytest.mark.parametrize("incarnation", [0, 1])
def test_who_has_not_joined_can_only_ask_to(cluster, incarnation):
    """It has no incarnation yet, by which what was said before could be told from what is said now."""
    first = cluster.aggregators["r1"]
    first._learn({"version": "v"}, [], 1)
    link = cluster.agent("a", first, incarnation=incarnation, beats=False)
    cluster.until(lambda: link.session)
    join = {"type": "join", "life": "1", "version": "v", "about": {}}
    link.tell(join if incarnation else {"type": "event", "event": {"value": 5}})
    cluster.until(lambda: first.server.refused, 20)
    assert (
        f"from incarnation {incarnation}" in first.server.trouble and not first._joins.items and cluster.of("a") == []
    )


LEFT = {"type": "left", "life": "x", "n": 1, "node": "bad", "reason": ""}
STEP = fold_of(0, {"type": "step", "step": 1, "lr": 0.1, "time_s": 1.0, "grad_norm": 1.0, "whole": None})
NONSENSE = [
    {"type": "said", "upto": 1, "items": [{}]},
    {"type": "said", "upto": 1, "items": [{"type": ["step"]}]},
    {"type": "said", "upto": 1, "items": [LEFT | {"n": "1"}]},
    {"type": "said", "upto": 1, "items": [LEFT | {"n": None}]},
    {"type": "said", "upto": 1, "items": [{key: LEFT[key] for key in ("type", "life", "n", "reason")}]},
    {"type": "said", "upto": 1, "items": [LEFT | {"type": "started", "rank": 0, "worker": "0", "pid": 1}]},
    {"type": "said", "upto": 1, "items": [STEP | {"norms": {}}]},
    {"type": "said", "upto": 1, "items": [STEP | {"bins": {"0": "1"}}]},
    {"type": "store", "items": ["x"]},
    {"type": "store", "items": [["call", "gang", 1, 0, "add", []]]},
]


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: str(body["items"][0]))
def test_a_node_that_talks_nonsense_ends_its_own_connection_alone(cluster, body):
    """Whoever has captured its token: the aggregator, often in one process with the controller, lives on."""
    first = cluster.aggregators["r1"]
    bad, good = cluster.agent("bad", first), cluster.agent("good", first)
    cluster.until(lambda: bad.session and good.session and first.link.session)
    bad.tell(body)
    cluster.until(lambda: first.server.refused, 20)
    good.post({"type": "event", "event": {"value": 5}})
    cluster.until(lambda: 5 in cluster.of("good"))


ABOUT = inventory.about("127.0.0.1") | {"clock_s": 0.0}


@pytest.mark.parametrize(
    "about",
    [
        *({}, ABOUT | {"incarnation": 9}, ABOUT | {"clock_s": "now"}),
        *(ABOUT | more for more in ({"clock_s": 10**400}, {"memlock_bytes": -(10**400)}, {"clock_s": float("nan")})),
        ABOUT | {"interfaces": {"eth0": "x" * inventory.MOST_ABOUT_BYTES}},
    ],
    ids=["nothing", "more", "another type", "too late", "too little", "no number", "too much"],
)
def test_who_says_nonsense_of_itself_does_not_join(cluster, about):
    """It would go to the record, and to the process that keeps it."""
    first = cluster.aggregators["r1"]
    first._learn({"version": "v"}, [], 1)
    link = cluster.agent("a", first, incarnation=0, beats=False)
    cluster.until(lambda: link.tell({"type": "join", "life": "1", "version": "v", "about": about}))
    cluster.until(lambda: first.server.refused, 20)
    assert "about" in first.server.trouble and not first._joins.items


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "-x", "a b"])
def test_a_node_needs_a_name_that_can_be_a_folders(cluster, name):
    first, heard = cluster.aggregators["r1"], []
    first._learn({"version": "v"}, [], 1)
    link = Link(
        cluster.loop, SECRET, Identity("agent", name, 0), [first.server.address], WELCOME,
        lambda session, number, body: heard.append(body),
    )  # fmt: skip
    cluster.until(lambda: link.tell({"type": "join", "life": "1", "version": "v", "about": {}}))
    cluster.until(lambda: heard, 20)
    assert heard[0]["final"] and "--name" in heard[0]["reason"] and not first._joins.items
    link.close()


def test_it_runs_as_a_process(cluster, tmp_path):
    load_secret(tmp_path / "secret")
    (tmp_path / "secret").write_text(SECRET.key.hex())
    command = [sys.executable, "-m", "phalanx.cli.main", "aggregator", "--secret", tmp_path / "secret", "--name", "r9"]
    address = "{}:{}".format(*cluster.controller.address)
    process = subprocess.Popen([*command, "--controller", address], stdout=subprocess.PIPE)
    try:
        where = json.loads(process.stdout.readline())
        a = cluster.agent("a", *[type("At", (), {"server": type("Of", (), {"address": tuple(where)})})])
        a.post({"type": "event", "event": {"value": 4}})
        a.flush(60)
        assert cluster.roster.homes(["a"]) == {"r9": ["a"]} and 4 in cluster.of("a")
        assert SECRET.key.hex().encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert SECRET.key.hex().encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_failures_do_not_wait_for_a_fleet_that_starts(cluster):
    """Words of a start are gathered, and seconds of it would be added to every failure."""
    r1 = cluster.aggregate("r1")
    a, b = cluster.agent("a"), cluster.agent("b")
    cluster.until(lambda: {name for name, _ in cluster.news} == {"a", "b"})
    r1._coming = set(map(str, range(100_000)))  # it gathers for 40 s,
    r1._reports._rounds = Rounds()
    r1._reports._rounds.wait_s("c", 40.0, time.monotonic() - 30)  # since others have spoken for 30
    a.post({"type": "event", "event": {"kind": "WorkersUp", "value": 1}})
    cluster.run(0.2)
    assert ("a", 1) not in cluster.news, "an ordinary word waits for those of others"
    b.post({"type": "event", "event": {"kind": "WorkerDied", "value": 2}})
    cluster.until(lambda: ("b", 2) in cluster.news, timeout=10)
    assert cluster.news.index(("a", 1)) < cluster.news.index(("b", 2))
    a.post({"type": "event", "event": {"kind": "WorkersUp", "value": 3}})
    cluster.kill("b")
    cluster.until(lambda: ("b", "gone") in cluster.news, timeout=10)
