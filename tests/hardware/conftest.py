from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware import Catalogue
from phalanx.hardware.catalogue import load_packaged


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return load_packaged()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with no entries of its own: the tests do not depend on who runs them."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"
