"""If one of these tests fails, users cannot see on the same failures why another design would cost more."""

import dataclasses

import pytest

from phalanx.twin.agenda import S
from phalanx.twin.alternatives import Beside, around_best_interval, policies, ways, young_s
from phalanx.twin.fleet import Fault
from phalanx.twin.gang_job import Job
from phalanx.twin.report import page
from phalanx.twin.scenario import Scenario
from phalanx.twin.seeds import Result, many, one

SMALL = Scenario("small", gpus=64, hardware="h100", step_s=5.0, replica_gpus=16, days=1.0, params=1e9, quality=300.0)


def by_name(case):
    return {way.name: way for way in ways(case, many(case, 1))}


def test_every_other_policy_has_the_same_failures():
    found = policies(SMALL, 1)
    assert {r.scenario.policy for r in found} == {"restart", "hot", "shrink"}
    whole = dataclasses.replace(SMALL, replica_gpus=64, policy="hot").checked()
    assert {r.scenario.policy for r in policies(whole, 1)} == {"restart"}


def test_light_and_bytes_between_sites_slow_what_waits_for_them():
    near = by_name(SMALL)
    assert all(way.exchange_s == 0 for way in near.values())
    case = dataclasses.replace(SMALL, sites=2, distance_km=1000.0, params=1e12)
    far = by_name(case)
    # A round trip of 10 ms, and 2 TB over 400 GB/s.
    assert far["synchronous"].exchange_s == pytest.approx(0.01 + 5.0)
    assert far["semi-synchronous"].exchange_s == pytest.approx(5.01 / 100)
    # Two of four replicas request 4 TB each in a step of 5 s.
    assert far["parameter server"].exchange_s == pytest.approx(0.01 + 20.0 - 5.0)
    assert far["synchronous"].useful < near["synchronous"].useful
    assert far["semi-synchronous"].useful > far["synchronous"].useful


@pytest.mark.parametrize("policy", ["restart", "contained"])
def test_every_step_of_two_sites_waits_for_the_other(policy):
    """A round trip takes 10 ms, and 2 TB over 400 GB/s take 5 s: steps of 5 s take 10.01 s."""
    near = dataclasses.replace(SMALL, params=1e12, policy=policy, quality=1e-6)
    far = dataclasses.replace(near, sites=2, distance_km=1000.0)
    steps = [many(case, 1).outcomes[0].steps for case in (near, far)]
    assert steps[0] / steps[1] == pytest.approx(10.01 / 5, rel=0.01)
    assert many(far, 1).days_for(1000)["mean"] == pytest.approx(2 * many(near, 1).days_for(1000)["mean"], rel=0.01)
    found = by_name(dataclasses.replace(far, policy="contained"))["synchronous"]
    assert found.useful == pytest.approx(found.effective * 5 / 10.01)  # the wait counts only once


def test_replicas_that_wait_for_nobody_lose_their_own_time_alone():
    found = by_name(SMALL)
    assert found["synchronous"].effective < found["parameter server"].effective < 1
    assert found["parameter server"].updates_old == 3


def test_the_best_interval_is_near_that_of_young_and_daly():
    case = dataclasses.replace(SMALL, policy="restart", stop_s=60.0, stall_s=10.0, quality=2000.0, days=2.0, spares=1.0,
                               assume={"checkpoint.storage_gb_per_s": 1e9})  # fmt: skip
    found = around_best_interval(case, 2)
    best = max(found, key=lambda row: row[1])[0]
    assert 0.3 <= best / young_s(case) <= 3
    beside = Beside(case, ways(case, many(case, 1)), found)
    assert {"ways", "young_daly_s", "intervals"} == beside.to_json().keys()
    text = page([many(case, 1)], beside.tables())
    assert "Young and Daly" in text and "parameter server" in text


def test_spares_that_were_used_are_counted():
    found = many(dataclasses.replace(SMALL, spares=1.0, quality=2000.0), 2).spares()
    assert found["nodes"] == 8 and 0 < found["used"] <= found["used_p95"] <= 8


@pytest.mark.parametrize("policy", ["restart", "hot", "contained"])
def test_the_spare_that_a_failure_takes_is_counted(policy):
    """The failure takes the only spare, so the answer must say that the pool was used up."""
    fault = Fault("host", "node", (0,), True, 10**15)
    case = dataclasses.replace(SMALL, policy=policy, spares=0.125, quality=1e-6).checked()
    job = Job(case, script=[(100 * S, fault)])
    job.run(3600 * S)
    assert job.fleet.nodes == 9 and job.fewest_spares == 0
    found = Result(case, [dataclasses.replace(one(case, 0), fewest_spares=left) for left in (0, 1)])
    assert found.spares_used == ">= 1" and found.spares()["all_used"]
    assert dataclasses.replace(found, outcomes=found.outcomes[1:]).spares_used == "0"
