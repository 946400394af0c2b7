"""The exchange of proofs, without a connection: a captured token opens one name, and a recording opens nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from phalanx.gate.proof import Identity, Proof, Refused, Secret, Token, parsed

SECRET = Secret(Path(), bytes(range(32)))
NODE, CONTROLLER = Identity("agent", "node-1", 3), Identity("controller", "controller", 5)
TOKEN = SECRET.token_of("agent", "node-1")


def client(keys=SECRET, who=NODE, **options):
    return Proof(keys, who, False, **options)


def server(**options):
    return Proof(SECRET, CONTROLLER, True, **options)


def exchange(one, other):
    """Run the exchange, and return its messages: hello, challenge, answer."""
    hello = one.begin()
    challenge = other.receive(hello)
    answer = one.receive(challenge)
    assert other.receive(answer) == b""
    return hello, challenge, answer


def framed(body):
    return struct.pack(">I", len(body)) + body


def changed(frame, **fields):
    return framed(json.dumps({**json.loads(frame[4:]), **fields}).encode())


def test_both_ends_know_each_other_and_have_keys_that_no_other_connection_has():
    pairs = [(client(), server()) for _ in range(2)]
    for one, other in pairs:
        exchange(one, other)
        assert (one.peer, other.peer) == (CONTROLLER, NODE) and one.keys == other.keys
    assert len({key for one, _ in pairs for key in one.keys.values()}) == 4


def test_what_a_client_said_once_opens_nothing():
    hello, _, answer = exchange(client(), server())
    again = server()
    assert again.receive(hello)
    with pytest.raises(Refused, match="does not know"):
        again.receive(answer)
    assert again.peer is None


def test_what_a_server_said_once_is_not_believed():
    _, challenge, _ = exchange(client(), server())
    again = client()
    again.begin()
    with pytest.raises(Refused, match="does not know"):
        again.receive(challenge)
    assert again.peer is None and not again.keys


def test_the_proof_of_one_end_is_none_of_the_other():
    """A client with a recorded hello gets a challenge, whose proof it could try to send back."""
    hello, _, answer = exchange(client(), server())
    again = server()
    proof = json.loads(again.receive(hello)[4:])["proof"]
    with pytest.raises(Refused, match="does not know"):
        again.receive(changed(answer, proof=proof))
    assert again.peer is None


@pytest.mark.parametrize("role, name", [("agent", "node-2"), ("user", "node-1"), ("aggregator", "local")])
def test_a_captured_token_opens_one_name(role, name):
    exchange(client(Token("agent", "node-1", TOKEN)), server())  # its own
    forged, door = client(Token(role, name, TOKEN), Identity(role, name, 1 << 40)), server()
    with pytest.raises(Refused, match="does not know"):
        door.receive(forged.begin())
    assert door.peer is None


def test_a_captured_token_is_no_secret():
    """It yields no other member's token, so its owner cannot pass for the controller."""
    with pytest.raises(Refused, match="token of the agent 'node-1'"):
        Token("agent", "node-1", TOKEN).token_of("agent", "node-2")
    false = Proof(Token("agent", "node-1", TOKEN), CONTROLLER, True)
    with pytest.raises(Refused, match="token of the agent 'node-1'"):
        false.receive(client(who=Identity("agent", "node-2", 1)).begin())


def test_names_that_read_alike_when_joined_have_tokens_of_their_own():
    assert SECRET.token_of("agent", "x") != SECRET.token_of("agen", "tx")


@pytest.mark.parametrize("fields", [{"incarnation": 9}, {"name": "node-2"}, {"role": "user"}, {"nonce": "00" * 16}])
def test_a_hello_that_was_changed_on_its_way_is_refused_at_once(fields):
    with pytest.raises(Refused, match="does not know"):
        server().receive(changed(client().begin(), **fields))


@pytest.mark.parametrize("fields", [{"incarnation": 9}, {"name": "other"}, {"role": "user"}, {"nonce": "00" * 16}])
def test_a_challenge_that_was_changed_on_its_way_is_not_believed(fields):
    one = client()
    challenge = server().receive(one.begin())
    with pytest.raises(Refused, match="does not know"):
        one.receive(changed(challenge, **fields))
    assert one.peer is None


def test_ends_that_see_different_certificates_refuse_each_other():
    one = client(binding=b"a")
    with pytest.raises(Refused, match="does not know"):
        server(binding=b"b").receive(one.begin())
    believed = server(binding=b"b")
    with pytest.raises(Refused, match="does not know"):
        one.receive(believed.receive(client(binding=b"b").begin()))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "challenge"}, {"type": "answer"}, {"type": None}, {"nonce": 7}, {"nonce": "zz"}, {"role": ["agent"]},
        {"name": None}, {"name": "\ud800"}, {"role": "\udc00"}, {"name": "é"}, {"incarnation": "3"},
        {"incarnation": True}, {"incarnation": -1}, {"proof": ""}, {"proof": 0}, {"proof": "zz"},
    ],
)  # fmt: skip
def test_a_malformed_hello_is_refused(fields):
    door = server()
    with pytest.raises(Refused):
        door.receive(changed(client().begin(), **fields))
    assert door.peer is None


def test_no_member_has_an_incarnation_that_nobody_follows():
    """The next process of that name could not have a greater one."""
    with pytest.raises(Refused, match="incarnation"):
        server().receive(client(who=Identity("agent", "node-1", 10**200)).begin())


@pytest.mark.parametrize("body", [b"", b"[1]", b"7", b"\xff", b"[" * 500, b"{" * 500, b'{"a":' * 100])
def test_what_is_no_hello_is_refused(body):
    with pytest.raises(Refused):
        server().receive(framed(body))


def test_a_long_frame_is_refused_before_it_has_come():
    for door in (server(), client()):
        with pytest.raises(Refused, match="a frame of 513 bytes"):
            door.receive(struct.pack(">I", 513))


@pytest.mark.parametrize("text", ["\ud800", "\udc00", "\ud800\ud800", "a\udcffb", "\udc00\ud800", "\ud800x"])
def test_half_a_surrogate_pair_does_not_come_in(text):
    """The record, a log, a terminal or a snapshot of the state could not be written with one in it."""
    said = parsed(json.dumps({"text": text, text: 1}).encode())
    assert set(said["text"]) <= {"\ufffd", "a", "b", "x"} and len(said["text"]) == len(text)
    assert said.keys() == {"text", said["text"]}


@pytest.mark.parametrize("text", ["😀", "\\ud800", "\\😀\\\\udc00", 'é\n"\t', "\\u"])
def test_other_text_comes_in_as_it_is(text):
    assert parsed(json.dumps({"text": text}).encode()) == {"text": text}


def test_keys_are_not_shown():
    assert TOKEN.hex() not in repr(Token("agent", "node-1", TOKEN)) and repr(TOKEN) not in str(Token("a", "b", TOKEN))
    assert repr(SECRET.key) not in repr(SECRET)
