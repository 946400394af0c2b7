"""A failing case must not fail the cases after it: each would wait two minutes for a dead worker."""

import os
import signal

import pytest

from tests.cases import make_job
from tests.pool import CaseFailed, Pool


def pid(args):
    return os.getpid()


def die(args):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_case_after_a_failed_one_gets_new_workers():
    with Pool(1) as pool:
        before = pool.run("tests.test_pool:pid", make_job((1, 1, 1)))
        with pytest.raises(CaseFailed):
            pool.run("tests.test_pool:die", make_job((1, 1, 1)))
        assert pool.run("tests.test_pool:pid", make_job((1, 1, 1))) != before
