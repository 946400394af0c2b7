"""Collectives against measured ones, and against the arithmetic of section A of the requirements."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.hardware import load
from phalanx.plan.cost.links import Group, hide
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import default_profile

GIB = 2**30


PROFILE = default_profile(load().chip("h100"))


def group(hardware: str, gpus: int, ranks: int, stride: int = 1, fabric: str | None = None) -> Group:
    machine = Machine.of(load().cluster(hardware, gpus, fabric=fabric))
    return Group.of(machine, np.array([float(ranks)]), np.array([float(stride)]), PROFILE)


def test_all_reduce_inside_a_node():
    """nccl-tests on 8 H100 with NVLS: bus bandwidth 480 GB/s at 8 GB, 237 at 16 MB; bus = 2 (n-1)/n S / t."""
    node = group("h100", 8, 8)
    alone = replace(node, profile=replace(PROFILE, call_s=25e-6))  # no ranks that arrive late, as in training
    bus = [2 * 7 / 8 * size / alone.reduce_s(size)[0] / 1e9 for size in (8e9, 16.8e6)]
    assert bus[0] == pytest.approx(480, rel=0.25)
    assert bus[1] == pytest.approx(237, rel=0.4)
    assert node.reduce_s(16.8e6)[0] > alone.reduce_s(16.8e6)[0]


def test_all_reduce_across_nodes():
    """4 nodes of 8 B200, 4 GiB: 22.05 ms."""
    assert group("b200", 32, 32).reduce_s(4 * GIB)[0] == pytest.approx(22.05e-3, rel=0.35)


def test_a_ring_sends_what_the_requirements_say():
    """Each rank sends 2(N-1)/N of the data; without latency, over the slower of link and cards."""
    one = group("a100-80", 8, 8)
    assert one.gather_s(8e12)[0] == pytest.approx(7 / 8 * 8e12 / (300e9 * PROFILE.up), rel=1e-3)
    many = group("h100", 64, 8, stride=8)  # one rank in each of 8 nodes: one card each
    assert many.gather_s(8e12)[0] == pytest.approx(7 / 8 * 8e12 / (50e9 * PROFILE.nic), rel=1e-3)


def test_latency_grows_with_the_log_where_trees_are():
    """With a tree between nodes, a million ranks pay for few more hops than a thousand."""
    small = [group("h100", gpus, gpus).reduce_s(1.0)[0] for gpus in (1024, 1_048_576)]
    assert small[1] < 4 * small[0] < 4e-3


def test_oversubscription_slows_what_crosses_it():
    flat = group("h100", 16384, 2048, stride=8, fabric="campus-ndr").gather_s(1e9)
    wide = group("h100", 16384, 2048, stride=8, fabric="meta-llama3").gather_s(1e9)
    near = group("h100", 16384, 8, stride=8, fabric="meta-llama3").gather_s(1e9)
    assert wide > 1.5 * flat and near < wide


def test_alone_there_is_nothing_to_say():
    alone = group("h100", 8, 1)
    for seconds in (alone.gather_s(1e9), alone.reduce_s(1e9), alone.exchange_s(1e9, 8), alone.send_s(1e9)):
        assert seconds[0] == 0


def test_hiding_never_gains_and_never_costs_more_than_waiting():
    said, window = np.array([1.0, 1.0, 2.0]), np.array([0.0, 2.0, 1.0])
    cost, lost = hide(said, window, PROFILE), PROFILE.interference
    assert cost[0] == 1 and cost[1] == pytest.approx(lost) and cost[2] == pytest.approx(1 + lost)
