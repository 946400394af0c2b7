"""A lease is kept through what a store does on a bad day, and only its holder touches it."""

import threading

import pytest

from phalanx.core.lease import Lease, read
from phalanx.core.store import Folder

NAME = "owner.json"


class Deaf(Folder):
    """Does what it is asked, and its answers are lost while `deaf` is set."""

    def __init__(self, path):
        super().__init__(path)
        self.deaf, self.asked = threading.Event(), threading.Semaphore(0)

    def replace(self, name, data, tag):
        try:
            tag = super().replace(name, data, tag)
        finally:
            self.asked.release()
        if self.deaf.is_set():
            raise OSError("no answer")
        return tag


@pytest.fixture
def store(tmp_path):
    return Deaf(tmp_path)


def turns(store, count):
    for _ in range(count):
        assert store.asked.acquire(timeout=60)


def test_an_answer_that_is_lost_does_not_lose_the_lease(store):
    """The next renewal finds the file changed, and by nobody else."""
    mine = Lease(store, NAME, {}, term_s=0.04)
    mine.take()
    turns(store, 1)
    store.deaf.set()
    turns(store, 2)
    store.deaf.clear()
    before = read(store, NAME)["count"]
    turns(store, 4)
    assert read(store, NAME)["count"] > before and not mine.is_lost
    mine.close()
    assert not read(store, NAME)["held"]


def test_one_who_has_lost_it_knows_and_leaves_it_alone(store):
    mine, other = Lease(store, NAME, {"run": "a"}, term_s=0.04), Lease(store, NAME, {"run": "a"}, term_s=60.0)
    mine.take()
    other.take()  # for the same run: at once
    mine._thread.join(60)
    assert mine.is_lost and not other.is_lost
    mine.close(remove=True)
    assert read(store, NAME)["token"] == other.token and read(store, NAME)["held"]
    other.close(remove=True)
    assert read(store, NAME) == {}
