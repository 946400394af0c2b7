"""Which failure is blamed, what people are told of it, and when it ends a run."""

from __future__ import annotations

import pytest

from phalanx.control.messages import Failure
from phalanx.control.policy import Policy
from phalanx.control.verdict import MEMORY_REMEDY, MOST_SIGNATURES, Evidence, Verdict, remedy

KILLED = Failure(signal="SIGKILL", phase="forward", step=2)
OWN = Failure(kind="ValueError", text="the true cause", phase="forward", step=2)
INTERFACE = Failure(kind="RuntimeError", text="[gloo/x.cc:1] Unable to find interface for: [eth9]")
MEMORY = Failure(kind="RuntimeError", text="DefaultCPUAllocator: can't allocate memory: you tried")
ECHOES = [
    Failure(kind="RuntimeError", text="[gloo/x.cc:1] Connection closed by peer [1.2.3.4]:5"),
    Failure(kind="ConnectionResetError", text="[Errno 104] Connection reset by peer"),
    Failure(kind="BrokenPipeError", text="[Errno 32] Broken pipe"),
    Failure(kind="RuntimeError", text="Timed out waiting 1800000ms for recv operation to complete"),
    Failure(kind="DistBackendError", text="NCCL error in x.cpp:1, remote process exited or there was a network error"),
    Failure(signal="SIGABRT"),
]


def severity(failure, died=True):
    return Evidence(0, "rank 0", failure, died).severity


@pytest.mark.parametrize("echo", ECHOES)
def test_the_first_cause_is_blamed_and_not_its_echo(echo):
    for cause in (KILLED, OWN, MEMORY, INTERFACE, Failure(code=3), Failure(hang="stands still")):
        verdict = Verdict()
        verdict.hear(0, 0, "rank 0", echo)
        verdict.hear(0, 1, "rank 1", cause)
        verdict.hear(0, 2, "rank 2", echo)
        assert verdict.cause().rank == 1
    assert severity(KILLED) < severity(OWN) == severity(Failure(code=3)) < severity(OWN, died=False) < severity(echo)


@pytest.mark.parametrize(
    "failure, said",
    [
        (KILLED, "rank 0 was killed by SIGKILL in forward of step 2; if nobody did that, the kernel's out-of-memory"),
        (Failure(signal="SIGSEGV", phase="starting"), "rank 0 was killed by SIGSEGV while starting"),
        (OWN, "rank 0 failed in forward of step 2 with ValueError: the true cause"),
        (Failure(text="its disk is full"), "rank 0 failed: its disk is full"),
        (Failure(hang="is stopped", phase="reduce", step=7), "rank 0 hangs in reduce of step 7: it is stopped"),
        (Failure(phase="forward", step=2), "rank 0 ended in forward of step 2 before it was done"),
        (Failure(code=3), "rank 0 exited with code 3"),
    ],
)
def test_what_people_are_told(failure, said):
    assert Evidence(0, "rank 0", failure, True).sentence().startswith(said)


def test_a_remedy_is_told_where_there_is_one():
    for failure in (MEMORY, Failure(kind="OutOfMemoryError", text="CUDA out of memory"), Failure(kind="MemoryError")):
        assert remedy(failure) == MEMORY_REMEDY
    assert remedy(KILLED).startswith("if memory ran out") and MEMORY_REMEDY in remedy(KILLED)
    lost = "NCCL error in: ProcessGroupNCCL.cpp:77, internal error, NCCL version 2.28.9"
    assert "NCCL_SOCKET_IFNAME" in remedy(Failure(kind="DistBackendError", text=lost))
    assert "SIGCONT" in remedy(Failure(hang="is stopped, by SIGSTOP or by a debugger"))
    assert "run.hang_timeout_s" in remedy(Failure(hang="stands still in f"))
    assert remedy(OWN) == remedy(Failure(code=3)) == ""


def times_until_the_end(*failures, died=True, progress_after=()):
    verdict = Verdict()
    for count, failure in enumerate(failures, 1):
        verdict.hear(0, 0, "rank 0", failure, died)
        found = verdict.close(Policy(errors=3, strikes=5))
        if found:
            return count, found[1]
        if count in progress_after:
            verdict.progress()
    return None


def test_the_same_failure_without_a_step_in_between_ends_the_run():
    def at(address, count=1):
        return Failure(kind="ValueError", text=f"tensor {count} of 0x{address:x} is wrong")

    assert times_until_the_end(*[at(i, i) for i in range(9)]) == (3, 3), "numbers and addresses are left out"
    assert times_until_the_end(*[OWN] * 9, died=False) == (5, 5), "it lives, and may do better elsewhere"
    assert times_until_the_end(*[KILLED] * 9) == (5, 5)
    assert times_until_the_end(*[OWN, MEMORY] * 9) == (5, 3)
    assert times_until_the_end(*[OWN] * 9, progress_after=(2, 4)) == (7, 3)
    others = [Failure(kind=f"E{'x' * i}") for i in range(MOST_SIGNATURES)]
    assert times_until_the_end(OWN, OWN, *others, OWN) is None, "only the latest are remembered"
    assert Verdict().close(Policy()) is None


@pytest.mark.parametrize("kind", ["UserError", "FloatingPointError", "DataLost"])
def test_what_no_attempt_can_mend_ends_the_run_at_once(kind):
    verdict = Verdict()
    verdict.hear(0, 0, "rank 0", KILLED)
    assert verdict.fatal() is None
    verdict.hear(0, 1, "rank 1", Failure(kind=kind))
    assert verdict.fatal().rank == 1


def test_what_is_long_over_is_no_evidence():
    verdict = Verdict()
    verdict.hear(0, -1, "the store of n0", KILLED)
    verdict.hear(60 * 10**9, 1, "rank 1", Failure(kind="ValueError", text="it does not fit"))
    assert verdict.cause().rank == 1
