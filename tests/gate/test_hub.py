"""How groups find each other: what is set on one node is found on all others, whichever hub dies on the way, and a
meeting that is over disturbs no later one."""

from __future__ import annotations

import base64
import random

import pytest

from phalanx.core.errors import WireError
from phalanx.gate.hub import Hub

A, B = ("gang", 1), ("gang", 2)


def value(text):
    return base64.b64encode(text.encode()).decode()


class Tree:
    """Nodes below aggregators below a controller. Items wait in queues, and `run` delivers them in an order that dice
    choose; each pair of hubs keeps its own order, as a connection does."""

    def __init__(self, aggregators=2, nodes=2, seed=0):
        self.dice, self.queues, self.got = random.Random(seed), {}, []
        self.up = {}  # hub -> the next one
        self.hubs = {"top": Hub(lambda who, item: self.put("top", who, item))}
        for a in range(aggregators):
            self.add(f"a{a}", "top")
            for n in range(nodes):
                self.add(f"a{a}n{n}", f"a{a}")

    def add(self, name, above):
        self.up[name] = above
        self.hubs[name] = Hub(lambda who, item: self.put(name, who, item), lambda item: self.put(name, above, item))

    def put(self, source, sink, item):
        if isinstance(sink, tuple):  # a rank
            self.got.append((sink, item))
        else:
            self.queues.setdefault((source, sink), []).append(item)

    def say(self, rank, *item):
        self.hubs[rank[0]].take(rank, list(item))

    def run(self):
        while waiting := [pair for pair, queue in self.queues.items() if queue]:
            source, sink = self.dice.choice(waiting)
            item = self.queues[source, sink].pop(0)
            if self.up.get(source) == sink:
                self.hubs[sink].take(source, item)
            else:
                self.hubs[sink].hear(item)

    def restart(self, name):
        """Kill a hub with all that it knew and all that was on its way; the hubs below it come back."""
        for pair in list(self.queues):
            if name in pair:
                del self.queues[pair]
        if name == "top":
            self.hubs["top"] = Hub(lambda who, item: self.put("top", who, item))
        else:
            self.hubs[self.up[name]].lose(name)
            self.add(name, self.up[name])
        for below in [below for below, above in self.up.items() if above == name]:
            self.hubs[below].resync()

    @property
    def ranks(self):
        return [(name, i) for name in self.hubs if "n" in name for i in range(2)]


@pytest.mark.parametrize("seed", range(20))
def test_all_find_all_whatever_comes_first(seed):
    tree = Tree(seed=seed)
    todo = [(rank, "set", *A, str(rank), value(str(rank))) for rank in tree.ranks]
    todo += [(rank, "want", *A, str(other)) for rank in tree.ranks for other in tree.ranks]
    tree.dice.shuffle(todo)
    for rank, *item in todo:
        tree.say(rank, *item)
        if tree.dice.random() < 0.3:
            tree.run()
    tree.run()
    assert len(tree.got) == 64
    assert all(item == ["have", *A, item[3], value(item[3])] for _, item in tree.got)
    assert {(rank, item[3]) for rank, item in tree.got} == {(r, str(o)) for r in tree.ranks for o in tree.ranks}


@pytest.mark.parametrize("dies", ["top", "a0", "a1"])
@pytest.mark.parametrize("seed", range(5))
def test_a_hub_that_dies_costs_nobody_the_meeting(dies, seed):
    tree = Tree(seed=seed)
    first, last = tree.ranks[0], tree.ranks[-1]
    tree.say(first, "set", *A, "early", value("1"))
    tree.say(last, "want", *A, "late")
    if seed % 2:
        tree.run()
    tree.restart(dies)
    tree.say(last, "want", *A, "early")
    tree.say(first, "set", *A, "late", value("2"))
    tree.run()
    assert sorted(item[3:] for who, item in tree.got if who == last) == [["early", value("1")], ["late", value("2")]]


def test_a_room_is_joined_once_however_many_are_in_it():
    tree = Tree(aggregators=1, nodes=1)
    for i in range(50):
        tree.say(("a0n0", i), "want", *A, "group/7")
    assert tree.queues["a0n0", "a0"] == [["join", *A, "group"]]
    tree.hubs["a0n0"].hear(["have", *A, "group/7", value("v")])
    assert len(tree.got) == 50


def test_what_a_group_says_goes_to_its_own_nodes_alone():
    """Nothing that the group of one coordinate says reaches nodes outside it: the messages depend on groups, not on
    ranks."""
    tree = Tree(aggregators=3, nodes=4)
    here, there = ("a0n0", 0), ("a1n1", 0)
    for rank in (here, there):
        tree.say(rank, "set", *A, f"group/{rank}", value("v"))
        tree.say(rank, "want", *A, f"group/{here}")
    tree.run()
    assert not any(tree.hubs[name]._scopes for name in ("a2", "a0n1", "a1n0", "a2n3"))
    assert [who for who, _ in tree.got] == [here, there]


def test_a_later_meeting_ends_the_one_before_and_keeps_nothing_of_it():
    tree = Tree()
    old, new = tree.ranks[0], tree.ranks[-1]
    tree.say(old, "set", *A, "k", value("old"))
    tree.say(old, "want", *A, "never")
    tree.run()
    tree.say(new, "want", *B, "k")
    tree.run()
    assert tree.got == [(old, ["over", *A])], "and the old value is no answer"
    tree.say(old, "want", *A, "k")
    assert tree.got[1:] == [(old, ["over", *A])]
    tree.say(old, "set", *B, "k", value("new"))
    tree.run()
    assert tree.got[2:] == [(new, ["have", *B, "k", value("new")])]
    tree.say(new, "set", *A, "k", value("from the past"))
    tree.say(old, "want", *B, "k")
    tree.run()
    assert tree.got[-1] == (old, ["have", *B, "k", value("new")])


def test_a_key_that_is_set_has_that_value_for_all():
    """All see the same value, even if another node sets that key too."""
    tree = Tree()
    honest, other = tree.ranks[0], tree.ranks[-1]
    tree.say(honest, "set", *A, "k", value("1"))
    tree.run()
    tree.say(other, "set", *A, "k", value("2"))
    tree.run()
    tree.say(honest, "set", *A, "k", value("1"))  # again
    for rank in tree.ranks:
        tree.say(rank, "want", *A, "k")
    tree.run()
    assert {item[4] for _, item in tree.got} == {value("1")} and len(tree.got) == len(tree.ranks)
    tree.restart("a1")
    tree.say(other, "want", *A, "k")
    tree.run()
    assert tree.got[-1] == (other, ["have", *A, "k", value("1")])


def test_nobody_enters_a_meeting_that_nobody_was_sent_to():
    """Such a meeting would end that of all the others."""
    said = []
    hub = Hub(lambda who, item: said.append((who, item)), newest={"gang": 2}.get)
    hub.take("a", ["set", *B, "k", value("v")])
    hub.take("x", ["join", "gang", 3, "room"])
    hub.take("x", ["call", "gang", 10**9, 7, "count", []])
    assert said == [("x", ["over", "gang", 3]), ("x", ["result", "gang", 10**9, 7, None])]
    hub.take("a", ["want", *B, "k"])
    hub.take("a", ["join", "another", 9, "room"])
    assert said[2:] == [("a", ["have", *B, "k", value("v")])], "what is not known is not bounded"


def test_meetings_of_others_are_not_touched():
    tree = Tree()
    tree.say(tree.ranks[0], "set", "replica 0", 1, "k", value("0"))
    tree.say(tree.ranks[0], "set", "replica 1", 9, "k", value("1"))
    tree.say(tree.ranks[-1], "want", "replica 0", 1, "k")
    tree.run()
    assert tree.got == [(tree.ranks[-1], ["have", "replica 0", 1, "k", value("0")])]


def test_counters_are_the_topmost_hubs():
    tree, total = Tree(), 0
    for i, rank in enumerate(tree.ranks):
        tree.say(rank, "call", *A, 7, "add", ["n", i + 1])
        total += i + 1
    tree.run()
    results = [item[4] for _, item in tree.got]
    assert len(set(results)) == 8 and max(results) == total and all(item[3] == 7 for _, item in tree.got)
    tree.got.clear()
    tree.say(tree.ranks[3], "want", *A, "n")
    tree.say(tree.ranks[3], "call", *A, 1, "check", ["n", "m"])
    tree.say(tree.ranks[3], "call", *A, 2, "compare_set", ["m", "", value("x")])
    tree.say(tree.ranks[3], "call", *A, 3, "compare_set", ["m", value("y"), value("z")])
    tree.say(tree.ranks[3], "call", *A, 4, "count", [])
    tree.say(tree.ranks[3], "call", *A, 5, "delete", ["m"])
    tree.run()
    said = {item[3]: item[4] for _, item in tree.got if item[0] == "result"}
    assert said == {1: False, 2: value("x"), 3: value("x"), 4: 2, 5: True}
    assert ["have", *A, "n", value(str(total))] in [item for _, item in tree.got]


def test_a_call_on_its_way_through_a_hub_that_dies_is_told_so():
    tree = Tree()
    rank = tree.ranks[0]
    tree.say(rank, "call", *A, 7, "add", ["n", 1])
    tree.restart("a0")
    tree.run()
    assert tree.got == [(rank, ["result", "", 0, 7, None])]


def test_one_that_is_gone_is_told_nothing():
    tree = Tree()
    tree.say(tree.ranks[0], "want", *A, "k")
    tree.hubs["a0n0"].lose(tree.ranks[0])
    tree.say(tree.ranks[1], "set", *A, "k", value("v"))
    tree.run()
    assert tree.got == []


@pytest.mark.parametrize(
    "item",
    [None, [], ["set"], ["set", 1, 1, "k", "v"], ["want", "gang", "1", "k"], {}]
    + [["join", "gang", 1 << 63, "x"], ["join", "gang", -1, "x"], ["call", "gang", 1, 1, "add", ["k", 1 << 63]]]
    + [
        ["call", "gang", 1, 1, *call]
        for call in (
            ("eval", ["k"]), ("add", []), ("add", [1, 2]), ("add", ["k", "x"]), ("add", ["k"]), ("check", [1]),
            ("compare_set", ["k", "v"]), ("delete", [None]), ("count", ["k"]),
        )
    ],
)  # fmt: skip
def test_what_is_no_item_is_refused(item):
    """The first hub refuses it: a malformed item must not reach the controller, which all need."""
    passed = []
    for up in (None, passed.append):
        with pytest.raises(WireError):
            Hub(lambda who, item: None, up).take("x", item)
    assert passed == []


def test_what_is_no_number_cannot_be_added_to():
    said = []
    hub = Hub(lambda who, item: said.append(item))
    hub.take("x", ["set", "gang", 1, "k", "!!"])
    hub.take("x", ["call", "gang", 1, 7, "add", ["k", 1]])
    assert said == [["result", "gang", 1, 7, None]]


@pytest.mark.parametrize("there", ["9" * 4300, str((1 << 63) - 1)], ids=["4,300 digits", "63 bits"])
def test_a_sum_that_nobody_can_write_down_ends_nothing(there):
    """Python refuses to turn such integers into text, which used to end the topmost hub."""
    said = []
    hub = Hub(lambda who, item: said.append(item))
    hub.take("x", ["set", "gang", 1, "k", value(there)])
    hub.take("x", ["call", "gang", 1, 7, "add", ["k", (1 << 63) - 1]])
    assert said == [["result", "gang", 1, 7, None]]
