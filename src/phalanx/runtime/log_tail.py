"""Logs of a node's processes, on their way to the run's record on another host: what was added to each file since the
last look, as items for the record. A log that grows without end is cut short, and the record says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.runtime.secret import NAME
from phalanx.runtime.wire import Message

PIECE_BYTES = 64 << 10  # of a file, in one look
MOST_BYTES = 16 << 20  # of a file, in all


class Logs:
    def __init__(self, folder: Path):
        self.folder = folder
        self._at: dict[str, int] = {}

    def look(self) -> Iterator[Message]:
        for path in sorted(self.folder.glob("*.log")):
            at = self._at.get(path.name, 0)
            if at >= MOST_BYTES or path.stat().st_size <= at:
                continue
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(PIECE_BYTES)
            self._at[path.name] = at + len(data)
            text = data.decode(errors="replace")
            if at + len(data) >= MOST_BYTES:
                text += f"\n[the rest is on the node, in {path}]\n"
            yield {"type": "log", "file": path.name, "text": text}

    def rest(self) -> Iterator[Message]:
        """Yield everything that was not yielded yet."""
        while items := list(self.look()):
            yield from items


def write(folder: Path, node: str, item: Message) -> None:
    """Append an item to the record's copy of a log. Names that could lead elsewhere are ignored."""
    name = str(item["file"])
    if NAME.fullmatch(node) and NAME.fullmatch(name):
        (folder / node).mkdir(parents=True, exist_ok=True)
        with (folder / node / name).open("a", encoding="utf-8", errors="replace") as file:
            file.write(str(item["text"]))
