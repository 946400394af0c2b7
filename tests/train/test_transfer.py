"""A state goes from one rank to another whole, or not at all."""

from dataclasses import replace

import pytest
import torch

from phalanx.core.checkpoint import BadCheckpoint
from phalanx.core.layout import Coord
from phalanx.gate.peers import Peers, Stream
from phalanx.model import load_family
from phalanx.train.state import State
from phalanx.train.transfer import Giver, digest_of, take
from tests.cases import CPU, make_job

PEERS = Peers("5e" * 32)


def state_of(seed):
    return State.create(replace(make_job(), seed=seed), load_family("dense"), Coord(0, 0, 0), CPU)


@pytest.fixture
def giver():
    giver = Giver(PEERS, CPU)
    giver.offer(3, 0, state_of(1))
    return giver


def test_what_comes_is_what_was_there(giver):
    taker, there = state_of(2), state_of(1)
    assert not all(torch.equal(taker.get(name), there.get(name)) for name in there.names())
    assert take(PEERS, ("127.0.0.1", giver.port), 3, 0, taker, CPU) > 0
    assert all(torch.equal(taker.get(name), there.get(name)) for name in there.names())


def test_who_took_a_state_before_the_first_update_has_the_givers_digest(giver):
    """Its moments are zeros, and the giver has none yet. A rank that joined at step 0 was called wrong for it, again
    and again, until the run gave up."""
    taker = state_of(2)
    take(PEERS, ("127.0.0.1", giver.port), 3, 0, taker, CPU)
    assert digest_of(taker) == digest_of(state_of(1))


def test_a_bit_that_changes_on_its_way_is_found(giver, monkeypatch):
    """On loopback nothing else would: there it is not encrypted."""
    sendall, spoiled = Stream.sendall, []

    def spoil(stream, data):
        data = bytearray(data)
        if not spoiled:
            spoiled.append(True)
            data[len(data) // 2] ^= 1
        sendall(stream, data)

    monkeypatch.setattr(Stream, "sendall", spoil)
    with pytest.raises(BadCheckpoint, match="was damaged on its way"):
        take(PEERS, ("127.0.0.1", giver.port), 3, 0, state_of(2), CPU)
    assert spoiled


def test_a_step_that_is_not_there_is_said(giver, monkeypatch):
    monkeypatch.setattr("phalanx.train.transfer.PATIENCE_S", 0.01)
    with pytest.raises(BadCheckpoint, match="does not have step 4 in generation 3"):
        take(PEERS, ("127.0.0.1", giver.port), 3, 4, state_of(2), CPU)
