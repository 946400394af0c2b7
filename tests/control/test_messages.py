"""What is said is what is heard; what is not a message is refused with the field and the value."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control import codec, fanout
from phalanx.control.gang import Gang
from phalanx.control.membership import Membership, Node, Worker
from phalanx.control.messages import KINDS, Command, Event, Failure, Form, ManyParked, ManyReady, Parked, Ready, Source
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
    if kind in (Source, Failure):
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
    return st.builds(kind, **{name: values(hint) for name, hint in codec.hints(kind).items()})


def parked():
    return messages(Ready).map(lambda r: Parked(r.node, r.incarnation, r.generation, (1,), r.step, r.step + 1, 0))


def alike(found):
    """The same, of some nodes."""
    first = found[0]
    if isinstance(first, Parked):
        return [replace(first, node=f"n{i}", workers=tuple(range(i))) for i in range(len(found))]
    return [replace(event, generation=first.generation, step=first.step) for event in found]


def some(kind):
    """Messages of a kind."""
    if kind is ManyParked:
        return st.lists(parked(), min_size=1, max_size=3).map(lambda found: ManyParked.of(alike(found)))
    if kind is ManyReady:
        return st.lists(messages(Ready), min_size=1, max_size=3).map(lambda found: ManyReady.of(alike(found)))
    return parked() if kind is Parked else messages(kind)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.__name__)
def test_a_message_survives_the_wire(kind):
    @given(some(kind))
    def check(message):
        base = Event if isinstance(message, Event) else Command
        assert base.from_dict(json.loads(json.dumps(message.to_dict()))) == message

    check()


PARKED = Parked("n0", 1, 2, (3,), 4, 5, 2).to_dict()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kind": "Rung"}, "expected a kind of Cost"),
        ({"kind": 3}, "expected a kind of"),
        ({"step": "4"}, "Parked.step = '4': expected int"),
        ({"step": True}, "Parked.step = 'True': expected int"),
        ({"generation": -1}, "Parked.generation = -1: expected no negative number"),
        ({"workers": 3}, "Parked.workers = '3': expected tuple"),
        ({"workers": ["a"]}, "Parked.workers = 'a': expected int"),
        ({"more": 1}, "expected the fields node, incarnation"),
        ({"prepared": 9}, "Parked.prepared = 9: expected step, 4, or the one after it"),
    ],
)
def test_what_is_no_message_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Event.from_dict({**PARKED, **change})


MANY = ManyReady.of([Ready("n0", 1, 2, 3, {4: "a", 5: "b"}), Ready("n1", 1, 2, 3, {6: "a"})]).to_dict()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"nodes": ["n0"]}, "ManyReady.incarnations: expected 1, one of each node"),
        ({"workers": [[4, 5]]}, "ManyReady.workers: expected 2"),
        ({"workers": [[4], [5, 6]]}, "ManyReady.digests: expected one of each worker"),
        ({"workers": [[4, 5], ["6"]]}, "ManyReady.workers = '6': expected int"),
        ({"digests": [["a", "b"], [1]]}, "ManyReady.digests = '1': expected str"),
        ({"kind": "Many"}, "expected a kind of"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Event.from_dict({**MANY, **change})


@pytest.mark.parametrize("kind", [ManyParked, ManyReady])
def test_of_many_each_is_there_again(kind):
    @given(st.lists(parked() if kind is ManyParked else messages(Ready), min_size=1, max_size=4).map(alike))
    def check(events):
        assert list(kind.of(events).parts()) == events

    check()


def test_a_command_is_no_event():
    with pytest.raises(ValueError, match="Event"):
        Event.from_dict(Form(1, 0, (0,), {0: 1}, {0: "n"}, 1, "", {}, {}, False, 0, -1, "", ("n",)).to_dict())


def test_each_node_gets_its_part_of_a_form():
    places, crew = {0: "a", 1: "b"}, {0: 1, 1: 2, 2: 3, 3: 4}
    sources = {2: Source("live", "a", 1), 3: Source("memory", "c", 3)}
    form = Form(5, 7, (0, 1), crew, places, 2, "", sources, {"b": "c:1"}, False, 7, 2, "", ("a", "b", "c"))
    parts = form.parts()
    assert {node: part.crew for node, part in parts.items()} == {"a": {0: 1, 1: 2}, "b": {2: 3, 3: 4}, "c": {}}
    assert {node: sorted(part.sources) for node, part in parts.items()} == {"a": [2], "b": [2, 3], "c": [3]}
    assert parts["b"].places == {1: "b"} and parts["b"].nodes == ("b",) and parts["b"].step == 7
    assert [part.buddies for part in parts.values()] == [{}, {"b": "c:1"}, {}]


def test_a_form_in_columns_is_the_same_for_each_node():
    """Also where a place has ranks of replicas that take no part, and for a node that is only a source."""
    places, crew = {0: "a", 1: "b", 3: "d"}, {0: 1, 1: 2, 2: 3, 7: 4}
    sources = {2: Source("live", "a", 1), 7: Source("memory", "c", 3), 1: Source("durable", made=2)}
    form = Form(5, 7, (0, 1), crew, places, 2, "s", sources, {"a": "d:2"}, True, 7, 2, "why", ("a", "b", "c", "d"))
    told = {}
    for share in fanout.shares(form, {"r1": ["a", "c"], "r2": ["d", "b"]}).values():
        told |= fanout.parts(json.loads(json.dumps(share)))
    told = {node: Command.from_dict(json.loads(json.dumps(body))) for node, body in told.items()}
    assert told == form.parts()


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
