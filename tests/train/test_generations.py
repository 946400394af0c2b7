"""Workers that continue when others die compute the same bits as if nobody had."""

import dataclasses
import functools
import os
import signal
import time

import pytest

from phalanx.core.job import DataConfig, Job, OptimizerConfig, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.runtime.bare import BareClient
from tests.cases import EVEN
from tests.train.conductor import ENV, Conductor

MODEL = dataclasses.replace(EVEN, vocab_size=257, num_layers=4)
STEPS = 10


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} little words of text, {i * i}.\n" for i in range(20_000)))
    return path


def a_job(text, steps=STEPS, global_batch=8, **layout):
    return Job(
        model=MODEL,
        layout=Layout(**layout),
        train=TrainConfig(
            steps=steps, seq_len=64, global_batch=global_batch, micro_batch=1, precision="fp32", reduction="exact"
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(source=str(text)),
        run=RunConfig(dir=str(text.parent / "runs")),
    )


@functools.cache
def node():
    """Import torch once for all runs. The node ends with this process."""
    return BareClient(["phalanx.train.worker", "phalanx.model.dense", "tests.train.generation_cases"], env=ENV)


def lead(job, folder, **kw):
    folder.mkdir(exist_ok=True)
    return Conductor(job, folder, entry="tests.train.generation_cases:main", client=node(), **kw)


def undisturbed(job, folder):
    with lead(job, folder) as c:
        digests = c.finish()
        assert [f.generation for f in c.forms] == [1] and c.died == []
        return digests


@pytest.fixture(scope="module")
def clean(text, tmp_path_factory):
    return undisturbed(a_job(text, replica=2, shard=2, ranks_per_node=2), tmp_path_factory.mktemp("clean"))


SLOW = [pytest.param(at, marks=pytest.mark.slow) for at in ("gradients", "voting", "update")]


@pytest.mark.parametrize("at", ["forward", "voted", *SLOW])
@pytest.mark.parametrize("wait_s", [0, pytest.param(60, marks=pytest.mark.slow)], ids=["at once", "at full strength"])
def test_a_worker_dies_in_a_step_and_is_replaced(at, wait_s, text, tmp_path, clean):
    """Before the vote, between vote and update, during the update: the step is redone or counts, never torn. The other
    replica keeps its world."""
    job, die = a_job(text, replica=2, shard=2, ranks_per_node=2), {3: {"step": 4, "at": at}}
    for attempt in range(2):
        with lead(job, tmp_path / str(attempt), wait_ns=wait_s * 10**9, die=die) as c:
            assert c.finish() == {rank: clean[rank] for rank in c.crew}
        if c.died == [3]:  # sometimes its peer does not leave a Gloo wait in time and is killed, but not twice
            break
    else:
        raise AssertionError(f"others were killed: {c.died}")
    assert [replica for replica, _ in c.builds].count(0) == 1, "its world stands"
    assert (c.crew[0], c.crew[1]) == (1, 2), "its processes too"
    assert c.forms[1].replicas == ((0, 1) if wait_s else (0,)) and not c.forms[1].branch
    # Once all that are left have voted, the step counts: one that is gone may have seen it committed.
    assert c.forms[1].step in {"forward": (4,), "gradients": (4, 5), "voting": (4, 5)}.get(at, (5,))
    if len(c.crew) == 4:
        back = next(form for form in c.forms[1:] if 1 in form.replicas)
        assert back.source_of(2).kind == "live" and c.builds.count((1, back.worlds[1])) == 1


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(replica=2, tp=2, ranks_per_node=2), marks=pytest.mark.slow),
        pytest.param(dict(replica=2, pp=2, ranks_per_node=2, schedule="zbv"), marks=pytest.mark.slow),
        pytest.param(dict(replica=2, shard=2, zero=1, ranks_per_node=1), marks=pytest.mark.slow),
    ],
    ids=["tp", "pipeline", "zero 1, a node per rank"],
)
def test_any_layout_goes_on(layout, text, tmp_path):
    want = undisturbed(a_job(text, **layout), tmp_path / "clean")
    die = {1: {"step": 3, "at": "gradients"}, 2: {"step": 6, "at": "voting"}}
    with lead(a_job(text, **layout), tmp_path / "run", wait_ns=60 * 10**9, die=die) as c:
        assert c.finish() == want
        assert c.died[0] == 1 and 2 in c.died


def test_without_a_replacement_the_others_do_its_part_and_take_it_back(text, tmp_path):
    """The same batch is divided among those that are left: the same bits, degraded steps included."""
    job = a_job(text, replica=2, shard=2, ranks_per_node=2, steps=14)
    want = undisturbed(job, tmp_path / "clean")
    with lead(job, tmp_path / "run", deaths=1) as c:
        c.until(lambda: len(c.committed) >= 6)
        c.burn("n1")
        c.until(lambda: len(c.forms) == 2)
        assert c.forms[1].replicas == (0,) and c.crew == {0: 1, 1: 2}
        pids = {w: c.pids[w] for w in (1, 2)}
        c.until(lambda: any(generation == c.forms[1].generation for generation, _, _ in c.committed))
        c.join("n1", incarnation=2)  # after repair
        c.until(lambda: len(c.forms) == 3)
        assert c.forms[2].replicas == (0, 1) and c.forms[2].rung == -1
        assert {s.kind for s in c.forms[2].by_rank().values()} == {"live"}
        assert c.finish() == want
        assert {w: c.pids[w] for w in (1, 2)} == pids and {1, 2} <= set(c.crew.values())


def test_the_others_do_its_part_also_when_it_does_not_divide(text, tmp_path):
    job = a_job(text, replica=3, ranks_per_node=1, steps=10, global_batch=9)
    want = undisturbed(job, tmp_path / "clean")
    with lead(job, tmp_path / "run", deaths=1) as c:
        c.until(lambda: len(c.committed) >= 9)
        c.burn("n1")
        digests = c.finish()
        assert c.forms[-1].replicas == (0, 2)
        assert digests == {rank: want[rank] for rank in (0, 2)}


def test_another_replica_dies_while_the_step_is_redone(text, tmp_path):
    """It has not computed what was dealt to it then: only what a replica really holds counts."""
    job = a_job(text, replica=4, ranks_per_node=1)
    want = undisturbed(job, tmp_path / "clean")
    die = {4: {"step": 4, "at": "gradients"}, 3: {"step": 4, "at": "again"}}
    with lead(job, tmp_path / "run", die=die) as c:
        digests = c.finish()
        assert digests == {rank: want[rank] for rank in digests}
        assert c.died == [4, 3] and [replica for replica, _ in c.builds if replica < 2] in ([0, 1], [1, 0])


def test_a_donor_that_refuses_connections_is_asked_once(text, tmp_path):
    """It used to be asked in every generation, until the run gave up."""
    job = a_job(text, replica=3, ranks_per_node=1, global_batch=9)
    die = {2: {"step": 4, "at": "forward"}, 3: "refuse"}
    with lead(job, tmp_path, wait_ns=60 * 10**9, die=die) as c:
        c.finish()
        asked = [source.number for form in c.forms if (source := form.source_of(1)) and source.kind == "live"]
        assert asked == [3, 1], "the next of its coordinate refuses; the other one gives"
        assert any("refused" in form.reason for form in c.forms)


def test_a_stopped_worker_is_killed_and_replaced(text, tmp_path, clean):
    with lead(a_job(text, replica=2, shard=2, ranks_per_node=2), tmp_path, wait_ns=60 * 10**9) as c:
        c.until(lambda: len(c.committed) >= 4)
        os.kill(c.pids[2], signal.SIGSTOP)
        c.homes[2].hung(time.monotonic_ns(), [2], "is stopped")
        assert c.finish() == clean
        assert c.died[0] == 2


def test_everybody_dies_and_the_run_begins_again(text, tmp_path, clean):
    """Neither a live copy nor a snapshot is left, so the run goes back to where it began, as a branch."""
    with lead(a_job(text, replica=2, shard=2, ranks_per_node=2), tmp_path, ask_ns=10**8) as c:
        c.until(lambda: c.gang.committed >= 2)
        known = c.gang.committed
        for worker in (1, 2, 3, 4):
            os.kill(c.pids[worker], signal.SIGKILL)
        assert c.finish() == clean
        assert any(form.branch and form.step == 0 and form.last >= known for form in c.forms[1:]), c.forms
