"""Run torch's profiler over some steps of this rank when somebody asks for it. Otherwise it costs a comparison."""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

LONGEST_S = 300.0  # a trace that has not reached its last step by then ends
PART_BYTES = 192 * 1024  # size of a message
MOST_BYTES = 64 << 20  # size of one rank's trace, compressed
Asked = tuple[int, int, list[int]]  # steps from and until, ranks


class Tracer:
    """`send` takes the messages that carry the trace, from a thread of its own."""

    def __init__(self, rank: int, send: Callable[[dict[str, Any]], None]):
        self.rank, self._send = rank, send
        self._profiler: Any = None
        self._asked: Asked = (0, 0, [])
        self._until = 0.0
        self._done: Asked | None = None

    def begin(self, step: int, asked: Asked) -> None:
        """Start the profiler before `step`, if this rank was asked to trace it."""
        if self._profiler is None and asked[0] <= step < asked[1] and asked != self._done and self.rank in asked[2]:
            self._asked, self._done, self._until = asked, asked, time.monotonic() + LONGEST_S
            profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
            try:
                profiler.start()
            except RuntimeError as error:  # another profiler is running, or the driver refuses
                self._send({**self._about(asked), "error": str(error)[:300]})
            else:
                self._profiler = profiler

    def end(self, step: int) -> None:
        """End the trace after a step that counted, if it was the last one asked for or the time is up."""
        if self._profiler is not None and (step + 1 >= self._asked[1] or time.monotonic() > self._until):
            profiler, self._profiler = self._profiler, None
            try:
                profiler.stop()
            except RuntimeError as error:
                self._send({**self._about(self._asked), "error": str(error)[:300]})
                return
            tell = threading.Thread(target=self._tell, args=(profiler, self._asked), daemon=True, name="phalanx-trace")
            tell.start()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Name the enclosed work, if it is traced."""
        return torch.profiler.record_function(name) if self._profiler is not None else nullcontext()

    @staticmethod
    def _about(asked: Asked) -> dict[str, Any]:
        host = os.uname().nodename
        return {"type": "trace", "first": asked[0], "last": asked[1], "host": host, "part": 0, "of": 0, "data": ""}

    def _tell(self, profiler: Any, asked: Asked) -> None:
        about = self._about(asked)
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json.gz"
                profiler.export_chrome_trace(str(file))
                data = file.read_bytes()
            if len(data) > MOST_BYTES:
                raise OSError(f"it has {len(data) >> 20} MiB; trace fewer steps")
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                self._send({**about, "error": str(error)[:300]})
            return
        count = -(-len(data) // PART_BYTES)
        with contextlib.suppress(OSError):  # the node is gone
            for part in range(count):
                piece = base64.b64encode(data[part * PART_BYTES : (part + 1) * PART_BYTES]).decode()
                self._send({**about, "part": part, "of": count, "data": piece, "error": ""})
