"""The queue's books, without its processes: what users ask is journaled, a killed queue continues, and what a job is
told follows from the scheduler."""

import json
import os
import signal
import time

import pytest

from phalanx.control import codec
from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask
from phalanx.control.schedule.gangs import ENDED, RUNNING, WAITING, Gang
from phalanx.core.errors import RunFailed
from phalanx.run import queued
from phalanx.run.queue_nodes import Agent, write_whole
from phalanx.run.queued import INBOX, STATE, Queue
from phalanx.runtime.cluster import LOST_NODES, Cluster
from phalanx.runtime.launch import StartedAgent


class Quiet(Queue):
    """Its jobs are numbers instead of processes."""

    live: dict[str, int]
    said = ""  # how the newest run of a job says it ended

    def _alive(self, job):
        return self.live.get(job, 0)

    def _start(self, job):
        self.live[job] = 1 << 30

    def _stop(self, job, grace_ns):
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
    made[-1].close()


def turn_until(queue, happened):
    """Nothing is judged by the clock: the machine may be busy."""
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline, [*queue.agents.agents.items()]
        queue.turn()
        time.sleep(0.01)


def up(queue):
    """Turn until every node has an agent that beats."""
    turn_until(queue, lambda: all(map(queue.agents.is_up, queue.scheduler.names)))


def said_of(queue, node):
    return json.loads((queue.folder / STATE).read_text())["nodes"][node]


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


def test_a_node_that_dies_is_noticed_and_used_again_after_it_was_watched(quiet):
    queue = quiet()
    queue.agents.return_s = 0.0
    request(queue, "1", asks.Submit(Ask("a")))
    up(queue)
    (node,) = (queue.scheduler.names[n] for n, _ in queue.scheduler.gangs["a"].spots())
    os.kill(queue.agents.agents[node].pid, signal.SIGKILL)
    turn_until(queue, lambda: said_of(queue, node) != "up")
    assert said_of(queue, node) == "down: its agent was killed by SIGKILL"
    gang = queue.scheduler.gangs["a"]
    assert gang.state == RUNNING and [queue.scheduler.names[n] for n, _ in gang.spots()] != [node]
    assert f"node {node} is down (its agent was killed by SIGKILL)" in gang.notes[-1][1]
    queue.rules.burn_ns = asks.S
    turn_until(queue, lambda: said_of(queue, node).startswith("watched after a failure"))
    turn_until(queue, lambda: said_of(queue, node) == "up")


def test_a_node_that_is_silent_is_dead(quiet):
    queue = quiet()
    queue.agents.beat_s = 0.1
    queue.agents.liveness.beat_ns = 10**8
    up(queue)
    agent = queue.agents.agents["n1"]
    os.kill(agent.pid, signal.SIGSTOP)
    turn_until(queue, lambda: "no heartbeat" in said_of(queue, "n1"))
    assert agent.process.wait(60) == -signal.SIGKILL, "it may go on"


def test_a_node_that_died_while_no_queue_looked_is_down(quiet):
    queue = quiet()
    up(queue)
    os.kill(queue.agents.agents["n0"].pid, signal.SIGKILL)
    queue.agents.agents["n0"].process.wait()
    again = quiet()
    again.turn()
    assert said_of(again, "n0") == "down: its agent has ended" and said_of(again, "n1") == "up"
    assert again.agents.agents["n1"].pid == queue.agents.agents["n1"].pid, "a second agent was started"


def test_an_agent_that_was_started_just_before_the_queue_was_killed_is_found(quiet):
    queue = quiet()
    up(queue)
    again = quiet()
    again.agents.agents["n0"] = Agent()  # its record was not there yet
    up(again)
    turn_until(again, lambda: again.agents.agents["n0"].process is None)
    assert again.agents.agents["n0"].pid == queue.agents.agents["n0"].pid
    assert said_of(again, "n0") == "up"


def test_a_queue_that_left_in_order_leaves_no_dead_nodes(quiet):
    queue = quiet()
    up(queue)
    pids = [agent.pid for agent in queue.agents.agents.values()]
    queue.agents.close()
    assert all(agent.process.returncode == 0 for agent in queue.agents.agents.values())
    again = quiet()
    up(again)
    assert said_of(again, "n0") == said_of(again, "n1") == "up"
    assert not {agent.pid for agent in again.agents.agents.values()} & {*pids}


def test_what_an_operator_declares_down_stays_down(quiet):
    queue = quiet()
    request(queue, "1", asks.NodeDown("n0", asks.BY_HAND))
    up(queue)
    queue.turn()
    assert said_of(queue, "n0") == "down: said by hand"
    request(queue, "2", asks.NodeUp("n0"))
    queue.turn()
    assert said_of(queue, "n0").startswith("watched")


def test_a_death_that_a_killed_queue_has_seen_and_not_told_is_told_by_the_next(quiet):
    queue = quiet()
    up(queue)
    os.kill(queue.agents.agents["n0"].pid, signal.SIGKILL)
    queue.agents.agents["n0"].process.wait()
    queue.agents.look()
    assert queue.agents.why_down("n0")
    again = quiet()
    again.turn()
    assert said_of(again, "n0") == "down: its agent has ended"


def test_the_ranks_of_a_node_follow_from_the_books():
    gang = Gang(Ask("x", replicas=3, nodes=1, gpus=2, rest=1), 0, 0)
    gang.replicas = {0: [(0, 2), (1, 1)], 2: [(3, 2), (1, 1)]}
    assert queued.ranks_on(gang, 1, [0, 1]) == [2, 5], "the run has numbered its replicas otherwise"
    assert queued.ranks_on(gang, 3, []) == [6, 7], "nothing is known of the run"


def test_a_run_ends_what_it_has_on_a_lost_node_and_each_loss_counts_once(tmp_path):
    agents = {name: StartedAgent(["cat"], "", tmp_path / name, {**os.environ}, True) for name in ("a", "b")}
    run = Cluster.__new__(Cluster)
    run.folder, run.nodes_up, run._lost, run.on_event = tmp_path, dict(agents), {}, lambda event: None
    try:
        run._end_lost()  # nobody has said anything
        write_whole(tmp_path / LOST_NODES, {"a": 1})
        run._end_lost()
        assert agents["a"].how_it_ended() == "was killed by SIGKILL" and agents["b"].process.poll() is None
        run.nodes_up["a"] = agents["b"]  # started again
        run._end_lost()
        assert agents["b"].process.poll() is None
    finally:
        for agent in agents.values():
            agent.close()


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
