"""Tail: read the lines appended to a JSON-lines file since the last read. A reader of a live run must not fail, so a
damaged line is counted and skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # read at once


class Tail:
    def __init__(self, path: Path):
        self.path, self.at, self.damaged = path, 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new whole lines. A line that is still being written waits for its end."""
        rows: list[dict[str, Any]] = []
        while True:
            try:
                with open(self.path, "rb") as f:
                    f.seek(self.at)
                    block = f.read(MOST_BYTES)
            except OSError:
                return rows
            end = block.rfind(b"\n") + 1
            if not end:
                return rows
            self.at += end
            for line in block[:end].split(b"\n")[:-1]:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    rows.append(row)
                else:
                    self.damaged += 1
