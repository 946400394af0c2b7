"""The queue's books, without its processes: what users ask is journaled, a killed queue continues, and what a job is
told follows from the scheduler."""

import json

import pytest

from phalanx.control import codec
from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask
from phalanx.control.schedule.gangs import ENDED, RUNNING, WAITING
from phalanx.core.errors import RunFailed
from phalanx.run import queued
from phalanx.run.queued import INBOX, STATE, Queue, write_whole


class Quiet(Queue):
    """Its jobs are numbers instead of processes."""

    live: dict[str, int]
    said = ""  # how the newest run of a job says it ended

    def _alive(self, job):
        return self.live.get(job, 0)

    def _start(self, job):
        self.live[job] = 1 << 30

    def _stop(self, job):
        self.live.pop(job, None)

    def _status(self, job):
        return self.said


@pytest.fixture
def quiet(tmp_path):
    Quiet.live = {}
    made = []

    def make():
        if made:
            made[-1].journal.close()
        made.append(Quiet(tmp_path, 2, 1))
        return made[-1]

    yield make
    made[-1].journal.close()


def request(queue, name, event):
    body = {"kind": type(event).__name__, "event": codec.encode(event)}
    write_whole(queue.folder / INBOX / f"{name}.json", body)


def test_requests_are_carried_out_in_order_and_shown(quiet):
    queue = quiet()
    request(queue, "1", asks.Submit(Ask("low", nodes=2)))
    request(queue, "2", asks.Submit(Ask("high", priority=1)))
    queue.turn()
    low = queue.scheduler.gangs["low"]
    assert low.state == WAITING and low.stops == 1, "it was not told to save"
    said = json.loads((queue.folder / STATE).read_text())
    assert said["jobs"]["high"]["state"] == RUNNING and said["jobs"]["high"]["nodes"]
    assert not list((queue.folder / INBOX).iterdir())


def test_a_killed_queue_continues(quiet):
    queue = quiet()
    request(queue, "1", asks.Submit(Ask("a", nodes=2)))
    request(queue, "2", asks.Submit(Ask("b")))
    queue.turn()
    again = quiet()
    states = {job: gang.state for job, gang in again.scheduler.gangs.items()}
    assert states == {"a": RUNNING, "b": WAITING}
    del Quiet.live["a"]  # it ended while nobody looked
    again.said = "done"
    again.turn()
    assert again.scheduler.gangs["a"].state == ENDED and again.scheduler.gangs["b"].state == RUNNING


def test_a_file_that_is_no_request_is_put_aside(quiet, capsys):
    queue = quiet()
    for number, text in enumerate(("{", '{"kind": "Rules", "event": {}}', '{"kind": "Cancel", "event": {"jib": 1}}')):
        (queue.folder / INBOX / f"{number}.json").write_text(text)
    request(queue, "9", asks.Drain("n7"))
    queue.turn()
    assert len(list((queue.folder / INBOX).glob("*.refused"))) == 4
    assert "no request" in capsys.readouterr().err


def test_two_queues_in_one_folder_are_refused(quiet, tmp_path):
    quiet()
    with pytest.raises(RunFailed):
        Queue(tmp_path, 2, 1)


def test_what_a_job_asks_follows_from_its_layout():
    from phalanx.run.planned import resolve

    resolved, _ = resolve(
        None,
        [
            "layout.replica=4",
            "layout.tp=2",
            "recovery.min_replicas=2",
            "layout.shard=1",
            "train.global_batch=16",
            "train.micro_batch=2",
        ],
    )
    ask = queued.ask_of("x", resolved.job, 1, "t", 3)
    assert (ask.replicas, ask.fewest, ask.nodes, ask.gpus, ask.priority) == (4, 2, 2, 1, 3)
    assert queued.ask_of("x", resolved.job, 4, "", 0).gpus == 2
