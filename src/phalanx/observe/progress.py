"""Progress: a worker's position as one 64-byte record in shared memory. The worker writes it at every phase change, and
any process may read it without asking. After the worker's fields the node writes until when the worker may train."""

from __future__ import annotations

import struct
import time
from enum import IntEnum
from typing import Any, NamedTuple

RECORD_BYTES = 64
_RECORD = struct.Struct("=QQIIQ")  # counter, step, micro, phase, time_ns: the worker's
_LEASE = struct.Struct("=Q")  # until when it may train, by CLOCK_MONOTONIC; 0: no limit. The node writes it


class Phase(IntEnum):
    starting = 0
    loading = 1
    forward = 2
    backward = 3
    reduce = 4
    optimizer = 5
    idle = 6
    done = 7


#: Phases in which a lack of progress is no sign of trouble.
QUIET = frozenset({Phase.starting, Phase.idle, Phase.done})


class Reading(NamedTuple):
    counter: int  # grows by one at each mark
    step: int
    micro: int
    phase: Phase
    time_ns: int  # CLOCK_MONOTONIC, one clock for all processes of a host

    def to_dict(self) -> dict[str, Any]:
        return {"phase": self.phase.name, "step": self.step, "micro": self.micro, "counter": self.counter}


class Progress:
    """One record over 64 writable bytes. One writer; any number of readers."""

    __slots__ = ("_buffer", "_counter", "_micro", "_step")

    def __init__(self, buffer: memoryview | bytearray | None = None):
        self._buffer = memoryview(bytearray(RECORD_BYTES) if buffer is None else buffer)
        self._counter, self._step, self._micro, _, _ = _RECORD.unpack_from(self._buffer)

    def mark(self, phase: Phase, step: int | None = None, micro: int | None = None) -> None:
        """Record that a phase begins. A step or micro that is left out keeps its value."""
        if step is not None:
            self._step = step
        if micro is not None:
            self._micro = micro
        self._counter += 1
        _RECORD.pack_into(self._buffer, 0, self._counter, self._step, self._micro, phase, time.monotonic_ns())

    def lease(self, until_ns: int) -> None:
        """Set, as the node, until when the worker may vote."""
        _LEASE.pack_into(self._buffer, _RECORD.size, until_ns)

    @property
    def lease_ended(self) -> bool:
        until_ns = _LEASE.unpack_from(self._buffer, _RECORD.size)[0]
        return 0 < until_ns < time.monotonic_ns()

    def read(self) -> Reading:
        # The writer takes no lock, so a record may be half-written; two equal reads are a whole one. A writer that
        # changes it between every two reads is making progress, which is all that matters then.
        last = bytes(self._buffer[: _RECORD.size])
        for _ in range(8):
            look = bytes(self._buffer[: _RECORD.size])
            if look == last:
                break
            last = look
        counter, step, micro, phase, time_ns = _RECORD.unpack(last)
        return Reading(counter, step, micro, Phase(min(phase, Phase.done)), time_ns)
