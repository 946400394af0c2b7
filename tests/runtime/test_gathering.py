"""An aggregator that gathers too briefly floods the controller while a fleet starts; one that gathers too long delays
small clusters, chains of questions, and the news of a failure."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.gate.loop import Loop
from phalanx.runtime import gathering
from phalanx.runtime.gathering import FIRST_S, Gatherer, Rounds, limit_s


def messages_of(words, nodes):
    """Return in how many messages these words, (time, node), are passed on, and the longest wait of one."""
    rounds, due, first, count, longest = Rounds(), None, 0.0, 0, 0.0
    for at, node in sorted(words):
        if due is not None and due <= at:
            count, longest, due = count + 1, max(longest, due - first), None
        wait = at + rounds.wait_s(node, limit_s(nodes), at)
        first, due = (at, wait) if due is None else (first, min(due, wait))
    return count + 1, max(longest, due - first)


@pytest.mark.parametrize("rounds", [1, 3])
def test_ten_times_the_nodes_cost_at_most_three_times_the_messages(rounds):
    """One process starts the nodes one after the other, 2 ms each. They report several times, 5 s apart."""
    counts = {}
    for nodes in (100, 1000):
        dice = random.Random(nodes)
        said = [(5 * r + dice.random() * 0.002 * nodes, n) for r in range(rounds) for n in range(nodes)]
        counts[nodes], longest = messages_of(said, nodes)
        assert longest <= limit_s(nodes) + 1e-9
    assert counts[1000] <= 3 * counts[100] and counts[1000] <= 20 * rounds


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=1), st.integers(1, 1000))
def test_gathering_at_most_doubles_what_all_say(words, nodes):
    began, ended = min(words)[0], max(words)[0]
    _, longest = messages_of(words, nodes)
    assert longest <= max(FIRST_S, min(limit_s(nodes), ended - began)) + 1e-9


def test_a_small_cluster_waits_no_longer_than_before():
    assert limit_s(4) == FIRST_S and limit_s(500) == pytest.approx(0.2)


def test_a_chain_of_answers_is_not_slowed_down():
    """Ranks that form one group after the other report again as soon as they are answered."""
    rounds, now = Rounds(), 0.0
    for _ in range(50):
        waits = [rounds.wait_s(node, limit_s(1000), now + 0.0001 * node) for node in range(10)]
        assert max(waits) == FIRST_S
        now += 0.005


def test_a_run_that_is_never_silent_is_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(gathering, "ROUNDS", 10)
    rounds = Rounds()
    for step in range(100):
        assert rounds.wait_s("a", 0.4, 0.1 * step) == FIRST_S
    assert len(rounds._began) <= 11


def test_nodes_that_come_one_after_the_other_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(gathering, "NODES", 10)
    rounds = Rounds()
    for number in range(100):
        rounds.wait_s(number, 1.0, number * 0.9)
    assert len(rounds._words) <= 11


def test_what_is_urgent_takes_along_what_waits():
    loop, sent = Loop(), []
    made = Gatherer(loop, lambda: 10.0, lambda items: sent.append((time.monotonic(), items)))
    made._rounds.wait_s("a", 10.0, time.monotonic() - 5)  # a round has lasted for long
    made.add("b", 1)
    loop.turn(0.02)
    assert not sent, "others are waited for"
    began = time.monotonic()
    made.add("c", 2, urgent=True)
    while not sent:
        loop.turn(0.05)
    assert sent[0][1] == [1, 2] and sent[0][0] - began < 0.5
    made.add("d", 3)
    loop.turn(0.02)
    assert len(sent) == 1, "the old timer does not send what came since"


def test_what_could_not_be_sent_comes_first():
    sent = []
    made = Gatherer(Loop(), lambda: 1.0, sent.append)
    made.add("a", 2)
    made.put_back([1], 1.0)
    made.flush()
    made.flush()
    assert sent == [[1, 2]]
