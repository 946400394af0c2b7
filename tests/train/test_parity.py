"""Every composition computes the gradients and weights of one process, and of plain PyTorch. When
this fails, a user's model trains on wrong gradients and the loss may not show it."""

import pytest

from tests.cases import CASES
from tests.parity import TOLERANCE, run_case


@pytest.mark.parametrize("name, layout, options", CASES, ids=[c[0] for c in CASES])
def test_fp64_matches_plain_pytorch_and_single_process(pool, references, name, layout, options):
    errors = run_case(pool, references, layout, options)["errors"]
    assert max(errors.values()) <= TOLERANCE["fp64"], errors


@pytest.mark.parametrize("layout", [(1, 2, 2), (2, 2, 2)], ids=str)
def test_fp32_matches_too(pool, references, layout):
    errors = run_case(pool, references, layout, dict(precision="fp32"))["errors"]
    assert max(errors.values()) <= TOLERANCE["fp32"], errors
