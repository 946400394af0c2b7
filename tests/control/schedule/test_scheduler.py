"""The gang scheduler in small worlds with faults: invariants are checked after every event, every job ends, and
replaying the journal gives the same decisions."""

import pytest

from tests.control.schedule.world import World


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_worlds_with_faults(first):
    for seed in range(first, first + 20):
        World(seed).run()


def test_the_worlds_are_not_empty():
    """The worlds exercise stops, shrinks, replacements and claims."""
    seen: dict[str, int] = {}
    for seed in range(30):
        world = World(seed)
        world.run()
        for _, _, commands in world.journal:
            for command in commands:
                name = type(command).__name__
                seen[name] = seen.get(name, 0) + 1
    assert {"Start", "Stop", "Shrink", "Grow", "Replace", "SetTimer"} <= seen.keys()
