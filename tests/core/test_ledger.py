"""The ledger: any change of a committed step is found, and a branch is not a change."""

import dataclasses
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.core.ledger import GENESIS, Record, bits, from_bits, verify

LAYOUT = dataclasses.asdict(Layout(2, 2, 1))


def chain(count, previous=GENESIS, first=0, loss=1.0):
    out = []
    for step in range(first, first + count):
        samples = (step * 8, step * 8 + 8)
        record = Record(step, previous, samples, "v1", bits(loss / (step + 1)), bits(0.5), LAYOUT, 0, "r", f"d{step}")
        out.append(record)
        previous = record.hash()
    return out


def test_a_chain_holds():
    records = chain(20)
    assert verify(records) is None and verify(records, records[-1].hash()) is None and verify([]) is None
    assert records[0].previous == GENESIS and len({r.hash() for r in records}) == 20


CHANGES = {
    "step": 3,
    "previous": "f" * 64,
    "samples": (0, 9),
    "data_version": "v2",
    "loss_bits": bits(math.nextafter(1.0, 2.0)),
    "norm_bits": bits(-0.0),
    "layout": {**LAYOUT, "tp": 2},
    "generation": 1,
    "rng": "s",
    "digest": "",
    "skipped": "the loss is nan",
}


def test_every_field_is_in_the_hash():
    assert set(CHANGES) == {f.name for f in dataclasses.fields(Record)}
    record = chain(1)[0]
    assert len({record.hash(), *(dataclasses.replace(record, **{k: v}).hash() for k, v in CHANGES.items())}) == 12


@given(st.integers(2, 12), st.data())
def test_a_change_is_found_where_the_chain_breaks(count, data):
    records = chain(count)
    head, at = records[-1].hash(), data.draw(st.integers(0, count - 1))
    name = data.draw(st.sampled_from(sorted(set(CHANGES) - {"step", "previous"})))
    records[at] = dataclasses.replace(records[at], **{name: CHANGES[name]})
    if records[at] == chain(count)[at]:
        return
    assert verify(records, head) == min(at + 1, count - 1)


@given(st.integers(3, 12), st.data())
def test_a_missing_or_swapped_record_is_found(count, data):
    records = chain(count)
    at = data.draw(st.integers(0, count - 2))
    assert verify(records[:at] + records[at + 1 :]) == at
    swapped = [*records[:at], records[at + 1], records[at], *records[at + 2 :]]
    assert verify(swapped) == at
    assert verify(records[:-1], records[-1].hash()) == count - 2


def test_abandoned_steps_stay_as_a_branch():
    records = chain(10)
    branch = chain(5, records[5].hash(), 6, loss=2.0)
    assert verify(records + branch, branch[-1].hash()) is None
    from_nowhere = chain(5, "a" * 64, 6)
    assert verify(records + from_nowhere) == 10
    wrong_step = chain(5, records[5].hash(), 7)
    assert verify(records + wrong_step) == 10


def test_a_resumed_run_goes_on_from_its_checkpoint():
    records = chain(10)
    rest, root = records[6:], records[5].hash()
    assert verify(rest) == 0 and verify(rest, records[-1].hash(), root, 6) is None
    assert verify(rest, root=root, step=7) == 0 and verify(rest, root=records[4].hash(), step=6) == 0


@given(st.floats(allow_nan=False))
def test_a_number_keeps_its_bits(value):
    assert struct.pack("d", from_bits(bits(value))) == struct.pack("d", value)
    assert math.isnan(from_bits(bits(math.nan)))


def test_lines():
    for record in chain(3):
        line = record.to_line()
        assert "\n" not in line and Record.from_line(line) == record
        for changed in (line.replace("v1", "v2"), line[:-1], "[]", "{}", json.dumps({**json.loads(line), "more": 1})):
            with pytest.raises(ValueError):
                Record.from_line(changed)


def test_the_hash_is_fixed():
    """Of what other programs, and ledgers of years ago, agree on."""
    record = Record(0, GENESIS, (0, 8), "v1", bits(1.0), bits(0.5), {"tp": 1}, 0, "r")
    text = (
        '{"data_version":"v1","digest":"","generation":0,"layout":{"tp":1},"loss_bits":"3ff0000000000000",'
        f'"norm_bits":"3fe0000000000000","previous":"{GENESIS}","rng":"r","samples":[0,8],"step":0}}'
    )
    import hashlib

    assert record.hash() == hashlib.sha256(text.encode()).hexdigest()
