"""Requests to Ray, tested without Ray."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phalanx.core.errors import UserError
from phalanx.engines.table import Where, adapter_of, options_of, submission_of
from tests.cases import make_job


def a_job(**layout):
    job = make_job()
    layout = {"replica": 3, "ranks_per_node": 1} | layout
    return replace(job, layout=replace(job.layout, **layout), recovery=replace(job.recovery, spares=2))


def described(*options: str, job=None) -> list[str]:
    where = Where("ray", options=options_of(options))
    assert submission_of(where, job or a_job(), []) is None
    return adapter_of(where, job or a_job()).describe().splitlines()


def test_the_gang_is_spread_and_the_spares_are_not_waited_for_with_it():
    _, gang, spares, agent = described("cpus=8")
    assert json.loads(gang.partition(": ")[2]) == {"strategy": "STRICT_SPREAD", "bundles": 3, "each": {"CPU": 8.0}}
    assert json.loads(spares.partition(": ")[2]) == {"groups": 2, "each": [{"CPU": 8.0}]}
    assert "phalanx agent --join" in agent


def test_gpus_are_asked_for_as_a_node_has_ranks():
    job = a_job(tp=8, ranks_per_node=8)
    job = replace(job, run=replace(job.run, device="cuda"))
    assert '"GPU": 8.0' in described(job=job)[1] and '"GPU": 4.0' in described("gpus=4", job=job)[1]


@pytest.mark.parametrize("option", ["cpu=1", "cpus=many", "gpus=-1", "working-dir=x"])
def test_unknown_options_are_refused(option):
    with pytest.raises(UserError, match="--engine"):
        described(option)


def test_hosts_are_for_ssh():
    with pytest.raises(UserError, match="--hosts"):
        submission_of(Where("ray", "a,b"), a_job(), [])
