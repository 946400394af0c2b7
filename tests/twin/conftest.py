import pytest

from phalanx.control.worlds import Worlds


@pytest.fixture
def planted_bug(monkeypatch):
    """The world of a replica that is gone still counts as built: the invariants must see it."""
    honest = Worlds.halt

    def forgets(self, number):
        out = honest(self, number)
        self.built.add(number)
        return out

    monkeypatch.setattr(Worlds, "halt", forgets)
