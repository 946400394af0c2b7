"""Who asks a run to stop, and whether the engine may start it again."""

from __future__ import annotations

import math
import os
import signal

from phalanx.run.stop import Stop


def test_the_warning_of_an_engine_is_no_wish_of_the_user():
    with Stop() as stop:
        assert not stop.asked and not stop.is_time_up
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked and stop.is_time_up and not stop.hurried
        assert stop.why == "stopped before the engine's time limit"
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked and not stop.is_time_up, "who stops it does not want it to be started again"


def test_a_limit_of_the_job_is_final_and_one_of_the_engine_is_not():
    with Stop(1e-9) as stop:
        assert stop.asked and not stop.is_time_up and stop.why == "stopped by run.time_limit_s"
    with Stop(0.0, -1.0) as stop:
        assert stop.asked and stop.is_time_up
    with Stop(0.0, math.inf) as stop:
        assert not stop.asked


def test_a_warning_that_was_ignored_until_now_is_heard():
    """The batch script ignores it until the run listens."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.asked
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
