"""A target such as `make test-slurm` that cannot run reports that, and fails."""

from __future__ import annotations

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.fixture
def server():
    pytest.skip("apt install postgresql")

@pytest.mark.slurm
@pytest.mark.skipif(True, reason="apt install slurm-wlm")
def test_one(): ...

@pytest.mark.postgres
def test_two(server): ...

@pytest.mark.skipif(True, reason="as any other test")
def test_three(): ...
"""


def test_what_is_asked_for_by_its_marker_and_cannot_run_fails_with_the_remedy(pytester):
    pytester.makeini("[pytest]\nmarkers =\n  slurm: \n  postgres: ")
    pytester.makeconftest("from tests.conftest import pytest_runtest_makereport")
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-rf")
    done.assert_outcomes(errors=2, skipped=1)
    done.stdout.fnmatch_lines(["*it cannot run here: *apt install slurm-wlm*", "*it cannot run here: *apt install p*"])
