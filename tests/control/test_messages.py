"""What is said is what is heard; what is not a message is refused with the field and the value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control import codec
from phalanx.control.gang import Gang
from phalanx.control.messages import KINDS, Command, Event, Form, Parked, Ready, Source
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

SIMPLE = {int: st.integers(0, 99), str: st.text(max_size=5), bool: st.booleans()}


def values(kind):
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind is Source:
        return st.builds(Source, *(values(k) for k in codec.hints(Source).values()))
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


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda k: k.__name__)
def test_a_message_survives_the_wire(kind):
    @given(parked() if kind is Parked else messages(kind))
    def check(message):
        base = Event if isinstance(message, Event) else Command
        assert base.from_dict(json.loads(json.dumps(message.to_dict()))) == message

    check()


PARKED = Parked("n0", 1, 2, (3,), 4, 5, 2).to_dict()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"kind": "Rung"}, "expected a kind of DeviceWarning"),
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


def test_a_command_is_no_event():
    with pytest.raises(ValueError, match="Event"):
        Event.from_dict(Form(1, 0, (0,), {0: 1}, {0: "n"}, 1, "", {}, False, 0, (), -1, "", ("n",)).to_dict())


def test_each_node_gets_its_part_of_a_form():
    places, crew = {0: "a", 1: "b"}, {0: 1, 1: 2, 2: 3, 3: 4}
    sources = {2: Source("live", "a", 1), 3: Source("memory", "c", 3)}
    form = Form(5, 7, (0, 1), crew, places, 2, "", sources, False, 7, (), 2, "", ("a", "b", "c"))
    parts = form.parts()
    assert {node: part.crew for node, part in parts.items()} == {"a": {0: 1, 1: 2}, "b": {2: 3, 3: 4}, "c": {}}
    assert {node: sorted(part.sources) for node, part in parts.items()} == {"a": [2], "b": [2, 3], "c": [3]}
    assert parts["b"].places == {1: "b"} and parts["b"].nodes == ("b",) and parts["b"].step == 7


def test_a_state_survives_its_bytes():
    gang = Gang.of(Layout(replica=2, shard=2, ranks_per_node=2), 10, Policy())
    assert Gang.from_bytes(gang.to_bytes()) == gang
    assert Gang.from_bytes(gang.to_bytes()).to_bytes() == gang.to_bytes()
