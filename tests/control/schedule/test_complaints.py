"""Complaints of users of other schedulers, as tests: none of these may happen here. Each names the report."""

import pytest

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Rules, S, Tenant
from phalanx.control.schedule.cells import Cells
from phalanx.control.schedule.gangs import ENDED, RUNNING, WAITING
from phalanx.control.schedule.promises import check
from phalanx.control.schedule.scheduler import Scheduler


class Bench:
    """A scheduler whose gangs obey at once."""

    def __init__(self, nodes=8, size=8, leaf=4, tenants=(), paths=None, levels=("leaf", "pod"), **rules):
        paths = paths or [(f"leaf-{n // leaf}", f"pod-{n // leaf // 2}") for n in range(nodes)]
        self.now_ns = 0
        names = [f"n{n}" for n in range(len(paths))]
        self.scheduler = Scheduler(Cells(size, levels, paths), names, Rules(**rules), tenants)
        self.said: list[asks.Command] = []

    def tell(self, event, after_s=0):
        self.now_ns += after_s * S
        todo = [event]
        while todo:
            for command in self.scheduler.apply(self.now_ns, todo.pop(0)):
                self.said.append(command)
                if isinstance(command, asks.Stop):
                    todo.append(asks.Stopped(command.job))
                elif isinstance(command, asks.Shrink):
                    todo.append(asks.Shrunk(command.job))
            check(self.scheduler)

    def submit(self, job, after_s=0, **ask):
        self.tell(asks.Submit(Ask(job, **ask)), after_s)

    def wait(self, seconds):
        """Let time pass, with the ticks that the scheduler asked for."""
        until = self.now_ns + seconds * S
        while 0 < self.scheduler.timer_ns <= until:
            self.now_ns = max(self.now_ns, self.scheduler.timer_ns)
            self.tell(asks.Tick())
        self.now_ns = until

    def state(self, job):
        return self.scheduler.gangs[job].state

    def nodes(self, job):
        return {node for node, _ in self.scheduler.gangs[job].spots()}

    def leaves(self, job):
        return {self.scheduler.cells.domain[0][node] for node in self.nodes(job)}

    def count(self, kind):
        return sum(isinstance(command, kind) for command in self.said)


def test_01_two_queues_are_not_given_one_node_kueue_14570():
    bench = Bench(nodes=2, tenants=(Tenant("a", quota=8), Tenant("b", quota=8)))
    bench.submit("x", tenant="a", gpus=8)
    bench.submit("y", tenant="b", gpus=8)
    assert bench.state("x") == bench.state("y") == RUNNING and not bench.nodes("x") & bench.nodes("y")


def test_02_nominations_do_not_collide_kueue_12419():
    """Many gangs of many tenants become possible at the same instant: each start takes the previous ones into
    account."""
    bench = Bench(nodes=4, tenants=[Tenant(t) for t in "abcdef"])
    bench.submit("all", nodes=4, gpus=8, preemptible=False)
    for tenant in "abcdef":
        bench.submit(tenant, tenant=tenant, gpus=8)
    bench.tell(asks.Ended("all"), 1)
    assert sum(bench.state(t) == RUNNING for t in "abcdef") == 4


def test_03_preemption_frees_gpus_where_they_are_needed_kueue_5243():
    """Eight GPUs freed on eight nodes do not help a gang that needs one node."""
    bench = Bench(nodes=8)
    for n in range(8):
        for half in "ab":
            bench.submit(f"s{n}{half}", gpus=4)
    bench.submit("vip", priority=1, gpus=8)
    assert bench.state("vip") == RUNNING and len(bench.nodes("vip")) == 1
    assert bench.count(asks.Stop) == 2, "more were stopped than one node has"


def test_04_quota_is_not_a_sum_kueue_4329():
    """2 x 4 free GPUs on two nodes do not admit a gang of 1 x 8."""
    bench = Bench(nodes=2)
    bench.submit("a", gpus=4, preemptible=False)
    bench.submit("b", gpus=8, preemptible=False)
    bench.submit("c", gpus=8)
    assert bench.state("c") == WAITING
    bench.tell(asks.Ended("b"), 1)
    assert bench.state("c") == RUNNING


def test_05_sixteen_pods_land_in_four_super_nodes_kueue_3887():
    bench = Bench(nodes=32, size=1, leaf=4)
    bench.submit("g", replicas=4, nodes=4, gpus=1)
    assert len(bench.leaves("g")) == 4


def test_06_small_jobs_leave_racks_whole_kueue_10406():
    """Single GPUs fill one rack before they touch another."""
    bench = Bench(nodes=33 * 2, size=8, leaf=2)
    for n in range(16):
        bench.submit(f"s{n}", gpus=1)
    used = {leaf for n in range(16) for leaf in bench.leaves(f"s{n}")}
    assert len(used) == 1
    bench.submit("big", replicas=32, nodes=2, gpus=8, level="leaf")
    assert bench.state("big") == RUNNING


def test_07_ties_are_broken_the_same_way_kueue_11910():
    def once():
        bench = Bench(nodes=16)
        for n in range(12):
            bench.submit(f"g{n}", nodes=1 + n % 3, gpus=4)
        return [c for c in bench.said if isinstance(c, asks.Start)]

    assert once() == once()


def test_08_a_short_silence_does_not_rewrite_the_ledger_kueue_12735():
    """A node goes down and up again: its gang was moved, and the books agree (`check` after every event)."""
    bench = Bench(nodes=4)
    bench.submit("g", nodes=2, gpus=8)
    node = min(bench.nodes("g"))
    bench.tell(asks.NodeDown(f"n{node}"), 30)
    bench.tell(asks.NodeUp(f"n{node}"), 30)
    assert node not in bench.nodes("g") and bench.state("g") == RUNNING
    assert bench.count(asks.Stop) == 0 and bench.count(asks.Replace) == 1


def test_09_a_bad_node_during_preemption_books_nothing_twice_kueue_15337():
    bench = Bench(nodes=2)
    bench.submit("low", nodes=2, gpus=8)
    stop = []
    bench.now_ns += S
    for command in bench.scheduler.apply(bench.now_ns, asks.Submit(Ask("high", priority=1, nodes=2, gpus=8))):
        stop.append(command)
    check(bench.scheduler)
    bench.tell(asks.NodeDown("n0"))
    bench.tell(asks.Stopped("low"))
    assert bench.state("high") == bench.state("low") == WAITING, "half of it cannot have started"
    bench.tell(asks.NodeUp("n0"), 1)
    bench.wait(1000)
    assert bench.state("high") == RUNNING


def test_10_a_second_failure_does_not_evict_the_gang_kueue_14244():
    """The gang is also not put back on the node that failed (kueue 15369)."""
    bench = Bench(nodes=16)
    bench.submit("hero", nodes=10, gpus=8, spares=1)
    for _ in range(3):
        node = min(bench.nodes("hero") - set(bench.scheduler.gangs["hero"].spares))
        bench.tell(asks.NodeDown(f"n{node}"), 60)
        bench.tell(asks.NodeUp(f"n{node}"), 1)
        assert bench.state("hero") == RUNNING and node not in bench.nodes("hero")
    assert bench.count(asks.Stop) == 0 and bench.count(asks.Start) == 1


def test_11_fair_sharing_does_not_preempt_in_circles_kueue_3779():
    """Two tenants borrow from each other: each gets its quota, and then neither moves."""
    bench = Bench(nodes=4, tenants=(Tenant("a", quota=16), Tenant("b", quota=16)))
    for n in range(4):
        bench.submit(f"a{n}", tenant="a", gpus=8, after_s=1)
        bench.submit(f"b{n}", tenant="b", gpus=8, after_s=1)
    bench.wait(1200)
    for _ in range(20):
        bench.wait(3600)
        assert {t: bench.scheduler.accounts[t].used for t in "ab"} == {"a": 16, "b": 16}
    # Gangs of a tenant take turns once per level of service, and no more often.
    assert all(gang.stops <= 1 + gang.level for gang in bench.scheduler.gangs.values())
    assert bench.count(asks.Stop) <= 20


def test_12_gangs_are_preempted_whole_and_recover_volcano_4607():
    """No task of a gang is taken alone; a gang that lost its nodes restarts (volcano 5805)."""
    bench = Bench(nodes=4)
    bench.submit("g", nodes=4, gpus=8)
    bench.submit("high", priority=1, gpus=8, after_s=1)
    assert bench.state("g") == WAITING and not bench.nodes("g")
    bench.tell(asks.Ended("high"), 100)
    assert bench.state("g") == RUNNING and len(bench.nodes("g")) == 4


def test_12b_a_preemption_that_cannot_help_does_not_happen_volcano_5520():
    bench = Bench(nodes=2)
    bench.submit("fixed", gpus=8, priority=5)
    bench.submit("low", gpus=8)
    bench.submit("mid", priority=1, nodes=2, gpus=8)
    assert bench.count(asks.Stop) == 0 and bench.state("low") == RUNNING


def test_13_soft_topology_does_not_straddle_volcano_4343():
    """A gang that fits in one leaf is not spread greedily, even if the emptiest nodes are elsewhere."""
    bench = Bench(nodes=8, leaf=4)
    bench.submit("a", gpus=8)  # on one leaf, which has three nodes left
    bench.submit("b", nodes=3, gpus=8)
    assert len(bench.leaves("b")) == 1 and bench.leaves("b") == bench.leaves("a")


def test_14_a_required_domain_that_is_full_can_be_preempted_kai_1591():
    bench = Bench(nodes=8, leaf=4)
    for n in range(8):
        bench.submit(f"s{n}", gpus=8)
    bench.submit("vip", priority=1, replicas=1, nodes=4, gpus=8, level="leaf")
    assert bench.state("vip") == RUNNING and len(bench.leaves("vip")) == 1
    assert bench.count(asks.Stop) == 4


def test_14b_every_replica_keeps_its_constraint_grove_648():
    bench = Bench(nodes=12, leaf=4)
    bench.submit("g", replicas=3, nodes=3, gpus=8, level="leaf")
    for spots in bench.scheduler.gangs["g"].replicas.values():
        assert len({bench.scheduler.cells.domain[0][node] for node, _ in spots}) == 1


def test_15_segments_keep_their_size_slurm_225():
    """36 nodes in segments of 12 are 12 + 12 + 12, even after a node was drained and returned."""
    paths = [(f"block-{n // 18}",) for n in range(54)]
    bench = Bench(paths=paths, levels=("block",))
    bench.tell(asks.Drain("n0"))
    bench.tell(asks.Drain("n0", off=True))
    bench.submit("g", replicas=3, nodes=12, gpus=8, level="block")
    for spots in bench.scheduler.gangs["g"].replicas.values():
        assert len({bench.scheduler.cells.domain[0][node] for node, _ in spots}) == 1


def test_16_fabrics_without_a_link_are_not_joined_soperator_2585():
    """A gang that must be inside one fabric waits for it, rather than take half of each."""
    paths = [(f"leaf-{n // 2}", "fabric-a" if n < 4 else "fabric-b") for n in range(8)]
    bench = Bench(paths=paths, levels=("leaf", "fabric"))
    bench.submit("one", gpus=8, preemptible=False)
    bench.submit("two", nodes=4, gpus=8, level="fabric", preemptible=False)
    fabrics = {bench.scheduler.cells.domain[1][node] for node in bench.nodes("two")}
    assert len(fabrics) == 1
    bench.submit("three", nodes=4, gpus=8, level="fabric")
    assert bench.state("three") == WAITING


def test_17_expert_groups_are_not_split_over_uneven_domains_automodel_3914():
    """EP 32 needs 4 nodes; domains have 4, 3 and 5 usable nodes: only whole groups are placed."""
    sizes = {"d0": 4, "d1": 3, "d2": 5}
    paths = [(name,) for name, count in sizes.items() for _ in range(count)]
    bench = Bench(paths=paths, levels=("domain",))
    bench.submit("g", replicas=2, nodes=4, gpus=8, level="domain")
    domains = [
        {bench.scheduler.cells.domain[0][node] for node, _ in spots}
        for spots in bench.scheduler.gangs["g"].replicas.values()
    ]
    assert [len(each) for each in domains] == [1, 1] and {1} not in domains


def test_18_a_domain_of_many_nodes_can_be_asked_for_ray_61442():
    bench = Bench(paths=[(f"nvl-{n // 18}",) for n in range(36)], levels=("nvl",), size=4)
    bench.submit("small", gpus=4, preemptible=False)
    bench.submit("g", nodes=18, gpus=4, level="nvl")
    assert bench.state("g") == RUNNING and len(bench.leaves("g")) == 1


def test_19_exclusive_placement_does_not_cost_more_jobset_174():
    """The work of a decision does not grow with the number of waiting gangs."""
    bench = Bench(nodes=64, size=1)
    bench.submit("all", nodes=64, gpus=1, preemptible=False)
    counted = []
    place = bench.scheduler.cells.place
    bench.scheduler.cells.place = lambda *a: counted.append(1) or place(*a)
    for n in range(300):
        bench.submit(f"g{n}", nodes=2, gpus=1, level="leaf")
    assert len(counted) <= 3, "each submission looks at all that wait"


@pytest.mark.parametrize("preemptible", [True, False])
def test_20_a_large_gang_is_not_starved_by_small_ones_spur_732(preemptible):
    """Full nodes count for its reservation, although it is unknown when they become free."""
    bench = Bench(nodes=4, patience_ns=3600 * S)
    began = {}
    for n in range(8):
        bench.submit(f"s{n}", gpus=4, after_s=60, preemptible=preemptible)
        began[f"s{n}"] = bench.now_ns
    bench.submit("big", nodes=4, gpus=8)
    number = 8
    for _ in range(200):
        bench.wait(100)
        for job, at in list(began.items()):
            if bench.state(job) == RUNNING and bench.now_ns - at > 1000 * S:
                bench.tell(asks.Ended(job))
                del began[job]
        while len(began) < 12:
            bench.submit(f"s{number}", gpus=4, preemptible=preemptible)
            began[f"s{number}"] = bench.now_ns
            number += 1
        if bench.state("big") == RUNNING:
            break
    assert bench.state("big") == RUNNING
    limit = 3600 + bench.scheduler.rules.turn_ns // S + 1200
    assert bench.scheduler.gangs["big"].began_ns - bench.scheduler.gangs["big"].submitted_ns <= limit * S


def test_a_higher_priority_shrinks_before_it_stops():
    """The lower-priority gang gives up replicas first, and gets them back without a restart."""
    bench = Bench(nodes=8)
    bench.submit("elastic", replicas=8, least=4, nodes=1, gpus=8)
    bench.submit("high", priority=1, nodes=4, gpus=8)
    assert bench.count(asks.Stop) == 0 and bench.count(asks.Shrink) == 1
    assert len(bench.scheduler.gangs["elastic"].replicas) == 4 and bench.state("high") == RUNNING
    bench.tell(asks.Ended("high"), 100)
    assert len(bench.scheduler.gangs["elastic"].replicas) == 8 and bench.count(asks.Grow) == 1


def test_power_caps_hold_and_starts_are_throttled():
    bench = Bench(nodes=4, watts_per_gpu=100, rack_level="leaf", rack_watts=1600, leaf=2, ramp_watts=1600)
    bench.tell(asks.Cap(2400))
    for n in range(4):
        bench.submit(f"g{n}", gpus=8)
    assert sum(bench.state(f"g{n}") == RUNNING for n in range(4)) == 2, "1,600 W may be switched on at once"
    bench.wait(400)
    assert sum(bench.state(f"g{n}") == RUNNING for n in range(4)) == 3 and bench.scheduler.watts == 2400
    bench.tell(asks.Cap(800))
    assert bench.scheduler.watts == 800


def test_maintenance_finds_its_nodes_empty():
    bench = Bench(nodes=4)
    bench.submit("g", nodes=4, gpus=8)
    bench.tell(asks.Maintain(("n0",), bench.now_ns + 3600 * S, bench.now_ns + 7200 * S))
    bench.wait(3700)
    assert 0 not in bench.nodes("g") and bench.state("g") == WAITING
    bench.wait(3800)
    assert bench.state("g") == RUNNING


def test_cancelled_gangs_leave_nothing():
    bench = Bench(nodes=2)
    bench.submit("a", nodes=2, gpus=8)
    bench.submit("b", gpus=8)
    bench.tell(asks.Cancel("b"))
    bench.tell(asks.Cancel("a"))
    assert bench.state("a") == bench.state("b") == ENDED and bench.scheduler.cells.free_gpus == 16
