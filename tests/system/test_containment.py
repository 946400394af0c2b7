"""A failure stops its replica and nobody else, with the real command and real kills: the other ranks keep their
processes and their worlds, the broken replica joins again, and the bits are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal

import pytest

from phalanx.observe.fold import members
from tests.system.command import TINY, Command, sets
from tests.system.test_failures import FAULTY

REPLICAS = 4
JOB = TINY | {
    "layout.replica": REPLICAS,
    "layout.tp": 1,
    "recovery.on": "true",
    "recovery.deaths_per_node": 100,
    "train.reduction": "exact",
    "train.global_batch": 8,
    "checkpoint.every_steps": 90_000,
}
CASES = {
    "two at once": [2, 3],
    "one dies while another joins": [3],
    "the joining one dies": [1],
    "all but one": [1, 2, 3],
}


class Run(Command):
    """A run whose ranks can be killed."""

    def pid(self, rank):
        return [e["pid"] for e in self.events("started") if e["rank"] == rank][-1]

    def kill(self, *ranks):
        for rank in ranks:
            os.kill(self.pid(rank), signal.SIGKILL)

    def wait_reborn(self, rank, before):
        self.wait_until(lambda: self.pid(rank) != before)

    def wait_whole(self, after):
        """Wait until a later generation has all replicas, and has committed steps."""

        def whole():
            forms = [e for e in self.events("control form") if e["generation"] > after]
            full = [e["generation"] for e in forms if len(e["replicas"]) == REPLICAS]
            return full and any(row["generation"] >= full[0] for row in self.rows())

        self.wait_until(whole)
        assert whole(), "it did not come back to full strength"

    @property
    def generation(self):
        return max(e["generation"] for e in self.events("control form"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run all cases, one after the other in one run. Return the events of each, the ledger, and that of an undisturbed
    run."""
    folder, told = tmp_path_factory.mktemp("contained"), {}
    run = Run(folder / "disturbed", *sets(JOB))
    run.wait_until(lambda: len(run.rows()) > 5)
    for case, ranks in CASES.items():
        heard, generation, pids = len(run.events()), run.generation, {r: run.pid(r) for r in range(REPLICAS)}
        run.kill(*ranks)
        if case == "one dies while another joins":
            run.wait_reborn(3, pids[3])
            run.kill(2)
        elif case == "the joining one dies":
            run.wait_reborn(1, pids[1])
            run.kill(1)
        run.wait_whole(generation)
        told[case] = (run.events()[heard:], generation)
    run.signal(signal.SIGTERM)
    disturbed = run.end()
    disturbed.check_clean()
    assert disturbed.code == 130, disturbed.err
    alone = Run(folder / "alone", *sets(JOB))
    alone.wait_until(lambda: len(alone.rows()) >= len(run.rows()))
    alone.signal(signal.SIGTERM)
    return told, ledger(disturbed), ledger(alone.end())


def ledger(ended):
    rows = [json.loads(line) for line in (ended.runs[0] / "ledger.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss_bits"], row["norm_bits"], row["samples"]) for row in rows}


@pytest.mark.parametrize("case", CASES)
def test_the_others_go_on_and_it_joins_again(runs, case):
    events, before = runs[0][case]
    killed = {*CASES[case], *([2] if case == "one dies while another joins" else [])}
    started = {e["rank"] for e in events if e["type"] == "started" and e["rank"] >= 0}
    why = [e for e in events if e["type"] in ("control form", "failed", "lost") or "reason" in e]
    assert started == killed, f"the others keep their processes: {why}"
    forms = [e for e in events if e["type"] == "control form" and e["generation"] > before]
    assert len(forms[0]["replicas"]) < REPLICAS and set(range(REPLICAS)) - killed <= set(forms[0]["replicas"])
    assert not any(form["branch"] for form in forms), "no step was lost"
    entered = [(e["source"], rank) for e in events if e["type"] == "entered" for rank in members(e["ranks"])]
    assert {source for source, rank in entered if rank not in killed} == {"kept"}
    assert {source for source, rank in entered if rank in killed and source != "kept"} == {"live"}


def test_the_bits_are_those_of_a_run_left_alone(runs):
    _, disturbed, alone = runs
    steps = range(min(len(disturbed), len(alone)))
    assert len(steps) > 10 and [disturbed[s] for s in steps] == [alone[s] for s in steps]


def test_a_rank_that_dies_in_the_first_step_joins_again(tmp_path):
    """There are only first values to compare, and no optimizer has moments yet."""
    fault = {"what": "kill", "rank": 0, "step": 0, "once": str(tmp_path / "killed")}
    options = {f"model.options.{name}": value for name, value in fault.items()}
    two = {"layout.replica": 2, "recovery.wait_s": 60, "train.global_batch": 4, "train.steps": 5}
    run = Run(tmp_path / "run", *sets(JOB | two | {"model.family": f"{FAULTY}:FAULTY"} | options))
    ended = run.end()
    assert ended.code == 0 and len(ended.rows) == 5, ended.err
    assert [len(e["replicas"]) for e in run.events("control form")] == [2, 2]
    assert "live" in {e["source"] for e in run.events("entered")}
