"""Every pair of features that the compatibility page calls possible, against the references: `make test-pairs`.
Not part of `make test`, which has the pairs of axes already."""

import dataclasses
import itertools

import pytest

from phalanx.spec.docs import FEATURES, is_pair, refused_pairs
from tests.cases import DEEP, EVEN, MOE_DEEP
from tests.parity import TOLERANCE, run_case

PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if is_pair(*pair) and pair not in refused_pairs()]


def options(pair):
    """Return the layout and the keyword arguments of make_job for two features at once."""
    layout, axes, rest, model = {"replica": 1, "shard": 1, "tp": 1}, {}, {}, DEEP
    for section, values in itertools.chain(*(FEATURES[name].items() for name in pair)):
        for key, value in values.items():
            if section == "layout":
                (layout if key in layout else axes)[key] = value
            elif section == "train":
                rest[key] = "aot_eager" if key == "compile" else value
            elif section == "optimizer":
                rest.setdefault("optimizer", {})[key] = value
    if "ep" in pair:
        model = MOE_DEEP
        if layout["shard"] * layout["tp"] * axes.get("cp", 1) == 1:
            layout["shard"] = 2
    if axes.get("cp_style") == "ulysses" and layout["tp"] > 1 and "ep" not in pair:
        model = dataclasses.replace(EVEN, num_layers=5)
    if "tied" in pair:
        model = dataclasses.replace(model, tied=True)
    if "compress" in pair:
        layout["replica"] = 2
    if {"activation offload", "bf16 moments", "optimizer offload"} & set(pair):
        rest["seq_len"] = 32
    return tuple(layout.values()), dict(model=model, axes=axes, **rest)


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_the_pair_computes_the_same(pool, references, pair):
    layout, rest = options(pair)
    errors = run_case(pool, references, layout, rest)["errors"]
    weights = {kind: errors.pop(kind) for kind in list(errors) if kind.endswith("weights")}
    assert max(errors.values()) <= (0.05 if "compress" in pair else TOLERANCE["fp64"]), errors
    if not {"compress", "bf16 moments"} & set(pair):  # these round on purpose
        assert max(weights.values()) <= TOLERANCE["fp64"], weights
