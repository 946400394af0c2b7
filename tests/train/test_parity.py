"""Every composition computes the gradients and weights of one process, and of plain PyTorch. When
this fails, a user's model trains on wrong gradients and the loss may not show it."""

import pytest

from tests.cases import CASES, make_job
from tests.feature_cases import FEATURE_CASES
from tests.parity import TOLERANCE, run_case

# Of the compositions on more than 2 ranks and the compiled ones these run by default, the others with `make test-slow`
# and in benchmarks/parity.py.
DEFAULT = {
    "shard 3, uneven rows",
    "tp 4, 9 FFN features",
    "replica 4, two nodes",
    "shard 4, two nodes, hierarchical",
    "shard 2 x tp 2, tied",
    "exact: shard 3, 6 leaves",
    "pp 4, ZB-V",
    "cp 3, Ulysses, 2 key/value heads",
    "pp 2 x cp 2, ZB-V, Ulysses",
    "moe: shard 4, ep 4, 6 experts",
    "image: shard 2 x tp 2",
    "replica 2 x shard 2 x tp 2",
    "moe: tp 2 x pp 2 x cp 2, ep 4, ZeRO-3, ZB-V (5 axes)",
    "qk-norm of all: tp 2",
    "like Gemma 2: cp 2, Ulysses",
    "like Gemma 3: pp 2, ZB-V",
    "shared keys: tp 4",
}
FEATURED = {name for name, *_ in FEATURE_CASES}


def _param(name, layout, options):
    ranks = make_job(layout, **options).layout.world_size
    slow = name not in DEFAULT and (ranks > 2 or name.startswith("compile") or name in FEATURED)
    return pytest.param(name, layout, options, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name, layout, options", [_param(*case) for case in CASES])
def test_fp64_matches_plain_pytorch_and_single_process(pool, references, name, layout, options):
    errors = run_case(pool, references, layout, options)["errors"]
    assert max(errors.values()) <= TOLERANCE["fp64"], errors


@pytest.mark.parametrize("layout", [(1, 2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_fp32_matches_too(pool, references, layout):
    errors = run_case(pool, references, layout, dict(precision="fp32"))["errors"]
    assert max(errors.values()) <= TOLERANCE["fp32"], errors
