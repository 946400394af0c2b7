"""A node's malformed report is refused, and any report that passes can be merged and recorded. Otherwise one node would
end the process that serves hundreds."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe import fold_form
from phalanx.observe.fold import aged, fold_of, folded, heard
from phalanx.observe.steps import StepTable

SLOTS = 256
WHOLE = {"loss_sums": [2.0, 3.0], "tokens": 64, "data_digest": "e", "record": "{}"}
SKIPPED = {**WHOLE, "skipped": {"reason": "the loss is nan", "places": [[0, 2]]}}
SAID = {
    "step": {
        "step": 3, "generation": 1, "time_s": 0.5, "grad_norm": 1.5, "lr": 1e-3, "whole": SKIPPED,
        "data_wait_s": 0.1, "data_ready": 2, "served": {"a": 4}, "held": {"memory": 2},
        "phases": {"forward": 0.2, "reduce": 0.1}, "experts": {"load": 1.5, "layer": "l0", "idle": 0},
    },
    "facts": {
        "device": "cpu", "backend": "gloo", "peak_flops": 1e9, "peak_source": "measured", "num_params": 5,
        "torch": "2.13",
    },
    "entered": {"generation": 1, "source": "live", "restore_s": 0.1, "form_s": 0.2},
    "done": {"step": 9, "memory_bytes": 1 << 30, "digest": {"weights": "ab", "optimizer": "cd"}},
    "validation": {
        "step": 3, "generation": 1, "sums": {"held-out": 123, "other": None}, "tokens": {"held-out": 5, "other": 5},
        "time_s": 0.1,
    },
}  # fmt: skip
READ = {"host_cpu": 0.5, "device_busy": 0.25}


def good(kind: str, *ranks: int) -> dict:
    folds = [fold_of(rank, {"type": kind, **copy.deepcopy(SAID[kind])}, READ) for rank in ranks]
    (whole,) = folded(aged(each, 1.5) for each in folds)
    return json.loads(json.dumps(whole))


def places(value, path=()):
    """Yield everything inside it, with the keys that lead there."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    out = copy.copy(value)
    out[path[0]] = changed(value[path[0]], path[1:], new)
    return out


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.sampled_from([10**400, -(10**30), 2**63, 1 << 25])
    | st.floats() | st.sampled_from(["", "x", "0x1p3", "9" * 25, "-1", "a\nb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "5", "a"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.parametrize("kind", [*SAID])
def test_what_ranks_say_has_the_form(kind):
    for ranks in ((5,), (4, 5, 7), range(SLOTS)):
        fold_form.check(good(kind, *ranks), SLOTS)


PLACES = [(kind, path) for kind in SAID for path in places(good(kind, 4, 5)) if path]


@given(st.sampled_from(PLACES), NONSENSE)
def test_what_is_not_refused_can_be_merged_and_recorded(place, new):
    kind, path = place
    fold = changed(good(kind, 4, 5), path, new)
    try:
        fold_form.check(fold, SLOTS)
    except ValueError:
        return
    others = [good(kind, rank) for rank in (0, 1, 2, 3, 6, 7)]
    merged = folded([*others[:3], fold, *others[3:]])
    json.dumps(merged)
    table = StepTable(8, 100)
    for each in merged:
        if each["type"] == "step":
            table.settle(1, 0, 8)
            table.add(heard(each, 1e9))


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("step", ("step",), "3", "step.step = '3'"),
        ("step", ("norms",), {"one": [[4, 6]]}, "step.norms"),
        ("step", ("norms",), {"0x1p0": [[4, 7]]}, "not of this fold"),
        ("step", ("times",), [1, {"9": 1.0}], "not of this fold"),
        ("step", ("times",), [4, {"1": 1.0}], "step.times"),
        ("step", ("slowest",), [[1.0, 3]], "not of this fold"),
        ("step", ("bins",), {"80000": 1}, "step.bins"),
        ("step", ("readings", "host_cpu"), [0, 1.0, 1.0, 4, 1.0, 4], "step.readings"),
        ("step", ("whole", "record"), "{}\n{}", "step.whole"),
        ("step", ("ranks",), [[0, 1 << 23]], "at most 256"),
        ("step", ("ranks",), [], "step.ranks"),
        ("step", ("ranks",), [[5, 4]], "step.ranks"),
        ("done", ("digests",), [[{"weights": "ab"}, [[0, 1 << 20]]]], "not of this fold"),
        ("validation", ("sums",), {"a": 1.5}, "validation.sums"),
        ("facts", ("peak_flops",), 10**400, "facts.peak_flops"),
        ("entered", ("type",), ["entered"], "type = "),
    ],
)
def test_nonsense_is_refused_with_the_field(kind, path, value, words):
    with pytest.raises(ValueError, match=words):
        fold_form.check(changed(good(kind, 4, 5), path, value), SLOTS)


def test_a_field_that_lacks_is_named():
    fold = good("step", 4)
    del fold["time_s"]
    with pytest.raises(ValueError, match=r"step\.time_s = 'None'"):
        fold_form.check(fold, SLOTS)


def test_a_set_that_one_node_alone_validates_is_lost_and_the_others_are_not():
    a, b = good("validation", 0), good("validation", 1)
    b["sums"], b["tokens"] = {"held-out": 7, "mine": 1}, {"held-out": 5, "mine": 1}
    (both,) = folded([a, b])
    assert both["sums"] == {"held-out": 130, "other": None, "mine": None} and both["tokens"]["held-out"] == 10
