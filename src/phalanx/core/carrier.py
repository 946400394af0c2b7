"""Tell whether a network interface of this host is connected."""

from __future__ import annotations

from pathlib import Path

NET = Path("/sys/class/net")


def is_up(interface: str) -> bool:
    try:
        return (NET / interface / "carrier").read_text().strip() == "1"
    except OSError:  # it is switched off, or gone
        return False
