"""What is said for the record comes there once, whatever happens on the way, and in few messages."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from phalanx.core.job import Job
from phalanx.gate.proof import Token, parsed
from phalanx.observe import fold
from phalanx.observe.fold import fold_of
from phalanx.observe.steps import StepTable
from phalanx.runtime import reports
from phalanx.runtime.cluster import TROUBLED, WELL, Cluster, Entries
from phalanx.runtime.log_tail import write
from phalanx.runtime.reports import Folder, Recorder, Relay, Reporter
from phalanx.runtime.secret import FRAME_BYTES, Identity, body_of, load_secret
from phalanx.runtime.transport import Link, Loop
from tests.runtime.cluster import wait_for

STEP = {"type": "step", "generation": 1, "lr": 0.1, "time_s": 1.0, "grad_norm": 1.0, "whole": None}


class Way:
    """From agents by one aggregator (or `relays` before it) to the record, over real connections."""

    def __init__(self, folder, relayed=False):
        self.loop, self.items, self.secret = Loop(), [], load_secret(folder / "secret")
        self.recorder = Recorder(self.loop, self.secret, "127.0.0.1", 0, self.items.append)
        self.at = self.recorder.server.address
        if relayed:
            me = Identity("aggregator", "relay", 1)
            self.relay = Relay(self.loop, self.secret, me, self.at, "127.0.0.1")
            self.at = self.relay.server.address
        self.lives = 0
        self.folder = self.aggregate()

    def aggregate(self) -> Folder:
        self.lives += 1
        made, me = Folder(self.loop), Identity("aggregator", "g", self.lives)
        made.upstream = Link(self.loop, self.secret, me, [self.at], {}, lambda *_: None, on_ack=made.acked)
        return made

    def agent(self, name: str) -> Reporter:
        def tell(body):
            if self.folder is None:
                return False
            self.folder.take(name, body["items"], lambda: said.recorded(body["upto"]))
            return True

        said = Reporter(self.loop, f"life of {name}", tell, lambda: None)
        return said

    def until(self, what):
        deadline = time.monotonic() + 20
        while not what():
            assert time.monotonic() < deadline, self.items
            self.loop.turn(0.01)


@pytest.mark.parametrize("relayed", [False, True], ids=["straight", "by a relay"])
def test_steps_of_many_ranks_come_as_one_message_and_events_each(tmp_path, relayed):
    way = Way(tmp_path, relayed)
    agents = [way.agent(f"n{i}") for i in range(20)]
    for step in range(3):
        before = way.recorder.messages
        for i, each in enumerate(agents):
            for rank in (2 * i, 2 * i + 1):
                each.say(fold_of(rank, {**STEP, "step": step}))
        way.until(lambda step=step: any(i["step"] == step and i["ranks"] == [[0, 40]] for i in way.items))
        assert way.recorder.messages - before == 1
    agents[0].say({"type": "exit", "worker": 7})
    agents[1].say({"type": "exit", "worker": 8})
    way.until(lambda: len(way.items) == 5)
    assert way.items[3:] == [{"type": "exit", "worker": 7}, {"type": "exit", "worker": 8}]
    way.until(lambda: all(each.is_empty for each in agents))


def test_a_relay_passes_on_at_once_what_all_its_aggregators_have_said(tmp_path, monkeypatch):
    """Else the top hears a step several times when the aggregators of a large fleet do not speak at the same moment."""
    monkeypatch.setattr(reports, "RELAY_S", 30.0)
    way = Way(tmp_path, relayed=True)
    others = []
    for i in (1, 2):
        me = Identity("aggregator", f"g{i}", 1)
        others.append(Link(way.loop, way.secret, me, [way.at], {}, lambda *_: None))
    way.until(lambda: len(way.relay.server.sessions) == 3)
    agent = way.agent("n0")
    for step in range(2):
        agent.say(fold_of(0, {**STEP, "step": step}))
        others[0].post({"type": "said", "items": [fold_of(1, {**STEP, "step": step})]})
        way.until(lambda: len(way.relay.folder.waiting) == 2)
        assert way.recorder.messages == step, "one has not spoken yet"
        others[1].post({"type": "said", "items": [fold_of(2, {**STEP, "step": step})]})
        way.until(lambda step=step: way.recorder.messages == step + 1)
        assert way.items[-1]["ranks"] == [[0, 3]]
    others[1].close()  # and one that is gone is not waited for
    way.until(lambda: not way.relay.server.sessions["g2"].conn)
    others[0].post({"type": "said", "items": [fold_of(1, {**STEP, "step": 2})]})
    agent.say(fold_of(0, {**STEP, "step": 2}))
    way.until(lambda: way.recorder.messages == 3)


def test_steps_come_in_their_order_also_when_a_node_is_late(tmp_path):
    """A step that is complete before an older one would make the record drop what is known of that."""
    way = Way(tmp_path)
    early, late = way.agent("n0"), way.agent("n1")
    table, rows = StepTable(2, 1), []
    table.settle(1, 0, 2)
    way.recorder._on_item = lambda item: rows.extend(table.add(item))
    early.say(fold_of(0, {**STEP, "step": 0}))
    early._flush()
    way.until(lambda: way.recorder.messages == 1)  # and then both say more in one round of the aggregator
    early.say(fold_of(0, {**STEP, "step": 1}))
    early._flush()
    for step in (0, 1):
        late.say(fold_of(1, {**STEP, "step": step}))
    way.until(lambda: len(rows) == 2)
    assert [row["step"] for row in rows] == [0, 1]


def test_what_an_aggregator_took_with_it_is_said_again_and_recorded_once(tmp_path):
    way = Way(tmp_path)
    agent = way.agent("a")
    agent.say({"type": "exit", "worker": 1})
    way.until(lambda: agent.is_empty)
    agent.say({"type": "exit", "worker": 2})
    agent._flush()
    way.folder._send = lambda: None  # it has heard it, and dies
    agent.say({"type": "exit", "worker": 3})
    way.folder = way.aggregate()
    agent.opened()
    way.until(lambda: agent.is_empty)
    # Of one that was recorded the word that it was may be lost: it comes again, and is not taken twice.
    agent._kept.append((2, {"type": "exit", "worker": 2, "n": 2, "life": "life of a"}, 1, time.monotonic()))
    agent.opened()
    way.until(lambda: agent.is_empty)
    assert [item["worker"] for item in way.items] == [1, 2, 3]


def test_what_is_said_while_nobody_listens_waits(tmp_path):
    way = Way(tmp_path)
    way.folder, kept = None, way.folder
    agent = way.agent("a")
    for number in range(5):
        agent.say({"type": "exit", "worker": number})
    for _ in range(20):
        way.loop.turn(0.01)
    assert way.items == [] and not agent.is_empty and agent.size_bytes > 0
    way.folder = kept
    way.until(lambda: agent.is_empty)
    assert [item["worker"] for item in way.items] == [0, 1, 2, 3, 4] and agent.size_bytes == 0


@pytest.mark.parametrize("relayed", [False, True], ids=["straight", "by a relay"])
def test_a_node_cannot_write_the_record_itself(tmp_path, relayed):
    """It would speak for all others: only aggregators are heard, who check whose words they pass on."""
    way = Way(tmp_path, relayed)
    server = way.relay.server if relayed else way.recorder.server
    token = Token("agent", "a", way.secret.token_of("agent", "a"))
    link = Link(way.loop, token, Identity("agent", "a", 1), [way.at], {}, lambda *_: None)
    link.post({"type": "said", "items": [{"type": "log", "node": "b", "file": "x.log", "text": "!"}]})
    way.until(lambda: server.refused)
    assert "expected aggregator" in server.trouble and way.items == []
    link.close()


@pytest.mark.parametrize("node, file", [("..", "events.jsonl"), ("a", ".."), ("a", "../x.log"), ("", "x.log")])
def test_logs_of_a_node_stay_in_its_folder(tmp_path, node, file):
    logs = tmp_path / "run" / "logs"
    write(logs, node, {"file": file, "text": "!"})
    assert not list(tmp_path.rglob("*"))
    write(logs, "a", {"file": "rank-00000.log", "text": "!"})
    assert (logs / "a" / "rank-00000.log").read_text() == "!"


def test_what_no_frame_holds_is_said_in_several(capsys):
    """A rank that logs much, on a host that does not keep the record: the agent ended by it, and so did its ranks."""
    loop, heard = Loop(), []

    def tell(body):
        heard.append(parsed(body_of(body)))
        agent.recorded(body["upto"])
        return True

    agent = Reporter(loop, "life", tell, lambda: None)
    for i in range(40):
        agent.say({"type": "log", "text": "x" * (300 << 10)})
        if i == 20:
            agent.say({"type": "log", "text": "y" * FRAME_BYTES})
    wait_for(lambda: loop.turn(0.01) or agent.is_empty)
    assert [item["n"] for body in heard for item in body["items"]] == list(range(1, 41)) and len(heard) > 1
    assert "not recorded, because it has" in capsys.readouterr().err


def test_steps_are_kept_by_those_who_said_them_until_all_of_them_are_recorded(tmp_path):
    """Else a controller that takes over would hear them of nobody."""
    way, missing = Way(tmp_path), {(1, 0)}
    way.recorder._unrecorded = lambda: missing
    a = way.agent("a")
    a.say(fold_of(0, {**STEP, "step": 0}))
    way.until(lambda: way.items)
    a.say({"type": "event"})
    way.until(lambda: len(way.items) == 2)
    [way.loop.turn(0.01) for _ in range(20)]
    assert not a.is_empty
    missing.clear()
    a.say({"type": "event"})
    way.until(lambda: a.is_empty)


def test_a_message_that_is_not_understood_is_told_and_ends_nothing(tmp_path):
    """One member must not end the process that keeps the record, and so the run."""
    told = []
    cluster = Cluster(Job(), tmp_path, Entries("x:y", "x:y"), lambda event: told.append(event["type"]), lambda: False)
    about = {"type": "message", "node": "a", "rank": -1, "worker": -3, "service": "keeper"}
    cluster._heard({**about, "body": {}})
    cluster._heard({**about, "body": {"type": "checkpoints_removed"}})
    assert told == ["node", "checkpoints_removed"]


def test_a_stop_saves_what_was_trained_before_the_start_was_heard_of(tmp_path):
    asked = []
    cluster = Cluster(Job(), tmp_path, Entries("x:y", "x:y"), lambda event: None, lambda: True, gently=lambda: True)
    cluster._link = SimpleNamespace(post=asked.append)
    with pytest.raises(KeyboardInterrupt):
        cluster._stop(0.0)
    cluster._hear({"type": "step", "generation": 1, "step": 9})
    cluster._stop(0.0)
    assert [item["type"] for item in asked] == ["ask"]


def test_a_controller_that_waits_for_its_disk_is_told_once(tmp_path):
    told = []
    cluster = Cluster(Job(), tmp_path, Entries("x:y", "x:y"), told.append, lambda: False)
    for text in ("full; 3 entries wait", "full; 9 entries wait", "", ""):
        cluster._decided({"type": "trouble", "text": text})
    assert [event["what"] for event in told] == [f"{TROUBLED}full; 3 entries wait", WELL]


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    told = []
    cluster = Cluster(Job(), tmp_path, Entries("x:y", "x:y"), told.append, lambda: False)
    log = {"type": "log", "node": "a", "file": "x.log", "text": "one \ud800 two"}
    cluster._heard(log)
    assert (tmp_path / "logs" / "a" / "x.log").read_text() == "one ? two" and not told
    (tmp_path / "logs" / "b").write_text("where its folder would be")  # as a disk that takes nothing
    cluster._heard(log | {"node": "b"})
    cluster._heard({"type": "exit", "node": "a", "worker": 10**400})
    cluster._heard({"type": "step"})
    assert [(event["type"], event.get("node")) for event in told] == [("node", "b"), ("exit", "a"), ("node", "")]


def test_why_a_node_has_not_joined_is_told_once(tmp_path):
    """A firewall before the head: without it the user sees nothing until the nodes give up."""
    told, log = [], tmp_path / "a.log"
    cluster = Cluster(Job(), tmp_path, Entries("x:y", "x:y"), told.append, lambda: False)
    cluster.nodes_up["a"] = SimpleNamespace(log=log)
    log.write_text("Warning: added to the known hosts\nnot joined yet: nobody\nnot joined yet: a fire")
    cluster._tell_waiting()
    with log.open("a") as file:
        file.write("wall\nnot joined yet: nobody\n")
    cluster._tell_waiting()
    cluster._tell_waiting()
    assert [event["what"] for event in told] == ["not joined yet: nobody", "not joined yet: a firewall"]
    cluster.incarnations["a"] = 1
    with log.open("a") as file:
        file.write("not joined yet: something else\n")
    cluster._tell_waiting()
    assert len(told) == 2, "it has joined"


def test_a_step_that_is_heard_late_is_recorded_at_the_time_when_it_was_over(tmp_path):
    """Else a run that trained on while its controller was away looks as if it had stood still, and short steps, which
    are gathered on their way, as if there was nothing between two messages."""
    way = Way(tmp_path)
    way.folder, kept = None, way.folder
    agents = way.agent("a"), way.agent("b")
    table, rows = StepTable(2, 1), []
    table.settle(1, 0, 2)
    way.recorder._on_item = lambda item: rows.extend(table.add(fold.heard(item, time.time())))
    over = []
    for step in range(3):
        for rank, agent in enumerate(agents):
            agent.say(fold_of(rank, {**STEP, "step": step}))
        over.append(time.time())
        time.sleep(0.3)
    way.folder = kept
    way.until(lambda: len(rows) == 3)
    assert [row["time"] for row in rows] == pytest.approx(over, abs=0.2)
