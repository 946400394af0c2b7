"""The node's half of the protocol by itself: what it does with commands, and what it refuses to pass on."""

from __future__ import annotations

from phalanx.control.agent import Agent, Alarm, End, Post, Send, Service, Spawn, Tell
from phalanx.control.commits import Commits
from phalanx.control.desk import Desk
from phalanx.control.messages import Build, Failure, Fence, Halt, Launch, Leave, Parked, Profile, Written
from phalanx.control.policy import Policy
from phalanx.control.sources import Lineage
from phalanx.runtime.controller import body_of
from phalanx.runtime.secret import body_of as frame_of

S = 10**9
SERVICES = {"store": {"address": "meeting"}}


def an_agent(workers=2):
    """Return an agent with one replica of this many ranks, in world 1."""
    agent = Agent("n", "", {name: Service() for name in SERVICES}, halt_ns=8 * S)
    agent.begin(0)
    for name, said in SERVICES.items():
        agent.service_said(0, name, {"type": name, **said})
    agent.booted(0, 1)
    crew = {rank: rank + 1 for rank in range(workers)}
    agent.obey(0, Launch("n", 1, crew))
    agent.obey(0, Build("n", 0, 1, crew))
    for number in crew.values():
        agent.worker_said(0, number, {"type": "built", "world": 1})
    agent.fire(S, "gather")
    agent.take()
    return agent


def parked(world):
    return {"type": "parked", "world": world, "step": 3, "prepared": 3, "made": 1, "why": None}


def test_a_worker_that_does_not_leave_is_ended_also_when_it_is_told_again_and_again():
    agent, alarm = an_agent(), None
    for second in range(1, 9):
        agent.obey(second * S, Halt("n", 1, (1, 2)))
        said = agent.take()
        assert Send(2, {"type": "halt", "world": 1}) in said
        alarm = next((action for action in said if isinstance(action, Alarm) and "parked" in action.name), alarm)
        if second == 1:
            agent.worker_said(S, 1, parked(1))
    assert alarm == Alarm("parked 1", 9 * S)
    agent.fire(9 * S, alarm.name)
    assert [action for action in agent.take() if isinstance(action, End)] == [End(2)]
    assert "did not leave its groups in 8 s" in agent.mates[2].why


def test_ranks_are_told_which_steps_to_trace():
    agent = an_agent()
    agent.obey(S, Profile(5, 8, (1,), ("n",)))
    told = {"type": "profile", "first": 5, "last": 8, "ranks": [1]}
    assert [action for action in agent.take() if isinstance(action, Send)] == [Send(1, told), Send(2, told)]


def test_who_has_left_says_so_again_and_is_not_told_again():
    agent = an_agent(workers=1)
    agent.obey(S, Halt("n", 1, (1,)))
    agent.take()
    agent.worker_said(S, 1, parked(1))
    for second in (2, 3):
        agent.fire(second * S, "gather")
        said = agent.take()
        assert [action.event for action in said if isinstance(action, Post)] == [
            Parked(("n",), (1,), ((1,),), 1, 3, 3, 1)
        ]
        assert not [action for action in said if isinstance(action, Send)]
        agent.obey(S, Halt("n", 1, (1,)))


def test_a_checkpoint_of_very_many_ranks_is_committed_in_pieces_that_fit_a_frame():
    ranks, desk, commits = 110_000, Desk(), Commits(durable=[(0, 0)])
    commits.bind(desk, Policy())
    files = {rank: (160_000_000 + rank, f"{rank:064x}") for rank in range(ranks)}
    commits.written(Written("n", 1, "step-9", 9, 1, ranks, files, "seal", 0), Lineage())
    assert len(desk.out) > 1 and commits.outstanding() == desk.out
    assert max(len(frame_of({"type": "command", "command": body_of(command)})) for command in desk.out) < 4 << 20
    agent = Agent("n", "", {"keeper": Service({"port": 1})})
    agent.booted(0, 1)
    agent.take()
    for command in [desk.out[-1], *desk.out]:  # in any order, and twice
        agent.obey(S, command)
    (order,) = [action.body for action in agent.take() if isinstance(action, Send)]
    assert order["files"] == [[*files[rank]] for rank in range(ranks)] and order["type"] == "commit"


def test_a_process_that_outlives_sigkill_is_reported_and_its_rank_waits_until_it_is_gone():
    agent = an_agent()
    agent.hung(S, [2], "stands still")
    ends, alarm = agent.take()
    assert ends == End(2) and alarm == Alarm("ended 2", 11 * S)
    agent.fire(11 * S, alarm.name)
    (told,) = agent.take()
    assert told.event.worker == 2 and told.event.failure.hang == "stands still"
    assert "did not end in 10 s after SIGKILL" in told.event.failure.text
    agent.obey(12 * S, Launch("n", 1, {1: 3}))
    assert not [action for action in agent.take() if isinstance(action, Spawn)]
    agent.ended(13 * S, 2, Failure(signal="SIGKILL"))
    assert [action.number for action in agent.take() if isinstance(action, Spawn)] == [3]


def test_a_process_that_outlives_sigkill_does_not_keep_its_node_from_leaving():
    agent = an_agent()
    agent.obey(S, Leave("done", ("n",)))
    agent.ended(2 * S, 1, Failure(code=0))
    agent.fire(21 * S, "leave")
    agent.fire(31 * S, "ended 2")
    assert Tell({"type": "left", "reason": "done"}) in agent.take()


def test_a_fence_that_was_meant_for_an_earlier_incarnation_ends_nothing():
    agent = an_agent()
    agent.obey(S, Fence("n", 0))
    assert not agent.take() and not agent.fenced
    agent.obey(S, Fence("n", 1))
    assert [action.number for action in agent.take() if isinstance(action, End)] == [1, 2] and agent.fenced


def test_a_worker_that_has_ended_is_not_started_again_because_its_launch_is_repeated():
    agent = an_agent()
    agent.ended(S, 2, Failure(signal="SIGKILL"))
    assert [post.event.worker for post in agent.take() if isinstance(post, Post)] == [2]
    agent.obey(2 * S, Launch("n", 1, {1: 2}))
    said = agent.take()
    assert [post.event.worker for post in said if isinstance(post, Post)] == [2], "the word of it may be lost"
    assert not [action for action in said if isinstance(action, Spawn)]


def test_a_node_that_cannot_end_its_workers_is_silent_and_may_leave():
    agent = an_agent()
    assert agent.beat(S) is not None
    agent.obey(2 * S, Fence("n", 1))
    assert agent.beat(3 * S) is None, "the controller would believe that an incarnation that is over lives"
    for number in (1, 2):
        agent.fire(20 * S, f"ended {number}")
    agent.obey(21 * S, Leave("over", ("n",)))
    agent.take()
    agent.fire(21 * S + agent.leave_ns, "leave")
    assert [action.body["type"] for action in agent.take() if isinstance(action, Tell)] == ["left"]


def test_a_node_whose_workers_end_after_a_fence_beats_again():
    agent = an_agent()
    agent.obey(2 * S, Fence("n", 1))
    for number in (1, 2):
        agent.ended(3 * S, number, Failure(signal="SIGKILL"))
    agent.booted(4 * S, 2)
    assert agent.beat(5 * S) is not None
