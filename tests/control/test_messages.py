"""A message is decoded as it was encoded; anything else is refused with the field and the value."""

from __future__ import annotations

import json
from dataclasses import dataclass, make_dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control import codec, journaled
from phalanx.control.gang import Gang
from phalanx.control.membership import Membership, Node, Worker
from phalanx.control.messages import (
    KINDS,
    Built,
    Command,
    Event,
    Failure,
    Form,
    Formed,
    Gift,
    Halt,
    Parked,
    Parted,
    Source,
    WorkersUp,
)
from phalanx.control.policy import Policy
from phalanx.control.sources import Copy
from phalanx.core.layout import Layout


@dataclass
class Counts:
    by: dict[str, int]


SIMPLE = {int: st.integers(0, 99), str: st.text(max_size=5), bool: st.booleans()}


def values(kind):
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind in (Source, Gift, Failure):
        return st.builds(kind, *(values(k) for k in codec.hints(kind).values()))
    if type(None) in get_args(kind):
        return st.none() | values(get_args(kind)[0])
    origin, args = kind.__origin__, kind.__args__
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    return st.tuples(*(values(arg) for arg in args))


def messages(kind):
    fields = {name: values(hint) for name, hint in codec.hints(kind).items()}
    made = {}
    if kind in (Parked, Parted):  # what is prepared follows from the step
        made["prepared"] = lambda rest: rest["step"] + rest["step"] % 2
    if kind in (Formed, Parted):  # each replica has a world
        made["worlds"] = lambda rest: tuple(replica + 1 for replica in rest["replicas"])
    if kind in (Built, Parked):  # each node has an incarnation, and workers
        made["incarnations"] = lambda rest: (1,) * len(rest["nodes"])
        made["workers"] = lambda rest: ((1, 2),) * len(rest["nodes"])
    if kind is WorkersUp:  # each worker has a port
        made["ports"] = lambda rest: tuple(worker + 1 for worker in rest["workers"])
    fields = {name: values for name, values in fields.items() if name not in made}
    return st.builds(lambda **rest: kind(**rest, **{name: of(rest) for name, of in made.items()}), **fields)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.__name__)
def test_a_message_survives_the_wire(kind):
    @given(messages(kind))
    def check(message):
        base = Event if isinstance(message, Event) else Command
        assert base.from_dict(json.loads(json.dumps(message.to_dict()))) == message

    check()


PARKED = Parked(("n0",), (1,), ((3,),), 2, 4, 5, 2).to_dict()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kind": "Rung"}, "expected a kind of Built"),
        ({"kind": 3}, "expected a kind of"),
        ({"step": "4"}, "Parked.step = '4': expected int"),
        ({"step": True}, "Parked.step = 'True': expected int"),
        ({"world": -1}, "Parked.world = -1: expected no negative number"),
        ({"world": 1 << 63}, f"Parked.world = {1 << 63}: expected less than"),
        ({"workers": 3}, "Parked.workers = '3': expected tuple"),
        ({"workers": [["a"]]}, "Parked.workers = 'a': expected int"),
        ({"workers": []}, "expected one for each of"),
        ({"more": 1}, "expected the fields nodes, incarnations"),
        ({"prepared": 9}, "Parked.prepared = 9: expected step, 4, or the one after it"),
    ],
)
def test_what_is_no_message_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Event.from_dict({**PARKED, **change})


@pytest.mark.parametrize(
    "said", [Formed((1, 2), (3, 4), 5), Parted((1, 2), (3, 4), 5, 6, 6, 5)], ids=["Formed", "Parted"]
)
def test_each_replica_has_a_world(said):
    assert Event.from_dict(said.to_dict()) == said
    with pytest.raises(ValueError, match=r"worlds = \(3,\): expected one for each of \(1, 2\)"):
        Event.from_dict({**said.to_dict(), "worlds": [3]})


def test_a_command_is_no_event():
    with pytest.raises(ValueError, match="Event"):
        Event.from_dict(Halt("n", 1, (2,)).to_dict())


def test_each_node_is_told_its_own_part_of_a_form():
    """That is the sources of its ranks, the sources that it provides, and its buddy."""
    sources = {2: Source("live", "a", 1), 3: Source("memory", "c", 3), 5: Source("durable", made=2)}
    named = dict(generation=5, step=7, replicas=(0, 1), worlds=(1, 4), every=None, kept=(), branch=False)
    more = dict(takers={2: "b", 3: "b", 5: "d"}, buddies={"b": "c:1"}, last=7, rung=2, reason="", nodes=("*",))
    own = Form(**named, **more, sources=sources).own()
    assert {node: sorted(part.get("sources", ())) for node, part in own.items()} == {
        "a": ["2"], "b": ["2", "3"], "c": ["3"], "d": ["5"],
    }  # fmt: skip
    assert {node: part["buddies"] for node, part in own.items() if "buddies" in part} == {"b": {"b": "c:1"}}
    gift = Gift(("a", "c"), (1, 2), (10, 20), {"a": "h1", "c": "h2"}, ("b", "d"))
    given = Form(**named, **more, sources={}, gifts={2: gift})
    assert given.source_of(5) == Source("live", "c", 2, 0, "h2:20") and given.source_of(3) is None
    parts = {node: sorted(part.get("sources", ())) for node, part in given.own().items()}
    assert parts == {"a": ["4"], "b": ["4"], "c": ["5"], "d": ["5"]}, "replica 2 has ranks 4 and 5"


def test_workers_that_are_alike_are_there_once_and_lists_are_not_shared():
    members = Membership(4, 2, [0], {f"n{i}": Node(1, "rack") for i in range(9)})
    members.workers = {i: Worker(i, "n0", True, 3, Copy(4, 5, 3) if i % 50 else None) for i in range(1, 1001)}
    data = codec.to_bytes(members)
    assert len(data) < 10_000
    again = codec.from_bytes(Membership, data)
    assert again.workers == members.workers and again.nodes == members.nodes
    again.nodes["n0"].deaths.append(1)
    assert again.nodes["n1"].deaths == []


@pytest.mark.parametrize(
    "table",
    [
        *({}, "a", [], [["a"]], [[1], [[1]]], [["a"], 1], [["a"], [["1"]]], [["a"], [[1]], [[2]]]),
        *([["a", "b"], [[1]]], [["a"], [[1], ["2"]]], [["a"], [[1], [2]]]),
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ValueError, match=r"Counts\.by"):
        codec.from_bytes(Counts, json.dumps({"by": table}).encode())


def test_a_state_survives_its_bytes():
    gang = Gang.of(Layout(replica=2, shard=2, ranks_per_node=2), 10, Policy())
    assert Gang.from_bytes(gang.to_bytes()) == gang
    assert Gang.from_bytes(gang.to_bytes()).to_bytes() == gang.to_bytes()


def test_a_state_with_text_that_no_encoding_takes_survives_its_bytes():
    """Otherwise the next snapshot would end the controller, and so would each one after it."""
    members = Membership(4, 2, [0], {"n0": Node(1, "rack \ud800")})
    assert codec.from_bytes(Membership, codec.to_bytes(members)).nodes == members.nodes


def test_another_form_of_an_event_or_of_the_state_is_told_apart(monkeypatch):
    """A journal of another release is refused before it is read wrongly."""
    before = journaled.form()
    monkeypatch.setitem(KINDS, "Late", make_dataclass("Late", [("node", str)], bases=(Event,), frozen=True))
    assert journaled.form() != before
    assert "Desk(phase: str," in before and "Mate(" not in before, "what the gang is made of, and nothing else"
