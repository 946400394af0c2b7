import pytest

from phalanx.control.worlds import Worlds


@pytest.fixture
def planted_bug(monkeypatch):
    """Plant a bug that the invariants must detect: the world of a lost replica still counts as built."""
    honest = Worlds.halt

    def forgets(self, number):
        out = honest(self, number)
        self.built.add(number)
        return out

    monkeypatch.setattr(Worlds, "halt", forgets)
