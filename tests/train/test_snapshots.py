"""When snapshots are taken, step by step, without the copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.core.job import CheckpointConfig, Job
from phalanx.train.snapshots import FIRST_STEP, Saver


class Noted(Saver):
    def __init__(self, config: CheckpointConfig, heard: tuple[int, int, int] = (0, 0, 0)):
        self.durable, self.in_memory = [], []
        self.job = SimpleNamespace(checkpoint=config, train=SimpleNamespace(steps=10**9), validation=Job().validation)
        self.state, self.heard = SimpleNamespace(step=0), SimpleNamespace(interval=heard)
        self.channel = SimpleNamespace(progress=SimpleNamespace(mark=lambda phase: None))
        self.snapshots = SimpleNamespace(generation=0, begin=self._note, wait=lambda: None)

    def _note(self, step, durable, norm=None, about=None):
        (self.durable if durable else self.in_memory).append(step)

    def _about(self):
        return {}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state.step += 1
            self.after_update(None, known=True)


@pytest.mark.parametrize("length", [7, 30, 99])
def test_generations_shorter_than_the_interval_are_saved_all_the_same(length):
    """A run that fails every minute and saves every hour would have nothing to come back to."""
    saver = Noted(CheckpointConfig(every_steps=100, memory_every_steps=50))
    for generation in range(1, 1000 // length + 2):
        saver.begin(generation)
        saver.train(length)
    assert saver.durable[:10] == [100 * n for n in range(1, 11)]
    assert saver.in_memory[:10] == [100 * n - 50 for n in range(1, 11)]


def test_memory_has_a_snapshot_long_before_a_long_interval_ends():
    saver = Noted(CheckpointConfig(every_steps=90_000))
    saver.begin(1)
    saver.train(1000)
    assert saver.durable == [] and saver.in_memory == [FIRST_STEP * 2**n for n in range(7)]


def test_a_stop_saves_a_step_whose_snapshot_is_only_in_memory():
    """Such a snapshot was once taken for one on its way to the disk, and the run waited in vain."""
    saver = Noted(CheckpointConfig(every_steps=90_000))
    saver.begin(1)
    saver.train(FIRST_STEP)
    assert (saver.durable, saver.in_memory) == ([], [FIRST_STEP])
    saver.save(FIRST_STEP)
    saver.save(FIRST_STEP)
    assert saver.durable == [FIRST_STEP], "once"
    saver.begin(2)
    saver.save(FIRST_STEP)
    assert saver.durable == [FIRST_STEP] * 2, "nobody knows what became of that of another generation"


def test_the_interval_that_was_announced_holds_from_the_next_checkpoint_on():
    saver = Noted(CheckpointConfig(), heard=(1, 100, 20))
    saver.begin(1)
    saver.train(210)
    assert saver.durable == [FIRST_STEP, 100, 200]
    assert saver.in_memory == [20, 40, 60, 80, 120, 140, 160, 180]
