"""The progress record: other processes read what the worker marks, at a negligible cost per step."""

from __future__ import annotations

import mmap
import os
import time
import timeit

from phalanx.observe.progress import RECORD_BYTES, Phase, Progress


def test_marks_are_read_through_shared_memory_by_another_process():
    shared = memoryview(mmap.mmap(-1, 2 * RECORD_BYTES))
    pid = os.fork()
    if pid == 0:
        writer = Progress(shared[RECORD_BYTES:])
        writer.mark(Phase.loading, step=2**40, micro=7)
        writer.mark(Phase.reduce)
        os._exit(0)
    os.waitpid(pid, 0)
    seen = Progress(shared[RECORD_BYTES:]).read()
    assert (seen.counter, seen.step, seen.micro, seen.phase) == (2, 2**40, 7, Phase.reduce)
    assert 0 <= time.monotonic_ns() - seen.time_ns < 10e9
    assert seen.to_dict() == {"phase": "reduce", "step": 2**40, "micro": 7, "counter": 2}
    assert bytes(shared[:RECORD_BYTES]) == bytes(RECORD_BYTES), "the neighbour's record was touched"


def test_a_new_writer_goes_on_counting_and_a_scribbled_record_is_still_read():
    buffer = bytearray(RECORD_BYTES)
    Progress(buffer).mark(Phase.idle, step=4)
    Progress(buffer).mark(Phase.forward)
    assert Progress(buffer).read()[:2] == (2, 4)
    buffer[:] = b"\xff" * RECORD_BYTES
    assert Progress(buffer).read().phase in Phase


def test_a_mark_costs_about_a_microsecond():
    progress = Progress()
    spent = timeit.repeat(
        lambda: progress.mark(Phase.forward, step=1, micro=2), timer=time.thread_time, number=10_000, repeat=5
    )
    assert min(spent) / 10_000 < 6e-6, "CPU time, and twice as much where others keep the caches busy"
