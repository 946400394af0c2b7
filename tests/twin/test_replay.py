"""Replay of traces: every policy does what its name says on traces that can be followed by hand, and bad traces are
refused with the line and the column."""

import json
import random

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import UserError
from phalanx.twin.replay import driver, machines
from phalanx.twin.replay.trace import S, parse

HEADER = "job_id,submit_s,gpus,duration_s\n"


def jobs_of(text: str):
    return parse((HEADER + text).splitlines(), "t.csv").jobs


def times(text: str, gpus: int, policy: str, **more) -> dict[str, tuple[float, float]]:
    """Return each job's first start and end, in seconds."""
    parts = driver.replay(machines.of_gpus(gpus), jobs_of(text), policy, **more)
    return {x.job.name: (x.first_ns / S, x.end_ns / S) for part in parts for x in part.lives}


# b needs all 16 and waits for a; c ends before a does; d does not.
QUEUE = "a,0,8,100\nb,1,16,100\nc,2,1,50\nd,3,1,200\n"


def test_fifo_lets_nobody_overtake():
    assert times(QUEUE, 16, "fifo") == {"a": (0, 100), "b": (100, 200), "c": (200, 250), "d": (200, 400)}


def test_easy_fills_gaps_without_delaying_the_first():
    assert times(QUEUE, 16, "easy") == {"a": (0, 100), "b": (100, 200), "c": (2, 52), "d": (200, 400)}


def test_easy_lets_a_long_job_run_beside_the_place_of_the_first():
    """b gets a's node when a ends; the free half of the other node is reserved for no job."""
    text = "a,0,8,100\ne,0,4,1000\nb,1,8,10\nd,2,1,500\n"
    assert times(text, 16, "easy") == {"a": (0, 100), "e": (0, 1000), "b": (100, 110), "d": (2, 502)}


def test_a_large_job_gets_whole_nodes_and_others_what_it_leaves():
    """b needs 12 GPUs: it waits for a second free node although four GPUs are free, and d fits next to it
    afterwards."""
    text = "a,0,4,100\nb,1,12,100\nd,2,4,10\n"
    assert times(text, 16, "fifo") == {"a": (0, 100), "b": (100, 200), "d": (100, 110)}


def by_the_book(jobs, nodes: int) -> dict[str, tuple[int, int]]:
    """Simulate textbook EASY without any shortcut; return starts and ends by job."""
    free, running, queue, done, coming = [8] * nodes, [], [], {}, list(jobs)

    def find(where, gpus):
        if gpus <= 8:
            able = [n for n in range(nodes) if where[n] >= gpus]
            return [(min(able, key=lambda n: where[n]), gpus)] if able else None
        whole = [n for n in range(nodes) if where[n] == 8][: -(-gpus // 8)]
        cut = [8] * (gpus // 8) + [gpus % 8] * (gpus % 8 > 0)
        return list(zip(whole, cut, strict=True)) if len(whole) == len(cut) else None

    def change(where, taken, sign):
        for node, gpus in taken:
            where[node] += sign * gpus

    def start(now, job, taken):
        change(free, taken, -1)
        running.append((now + job.duration_ns, job.number, taken))
        running.sort()
        queue.remove(job)
        done[job.name] = (now / S, (now + job.duration_ns) / S)

    while coming or queue:
        now = min([at for at, _, _ in running[:1]] + [job.submit_ns for job in coming[:1]])
        while running and running[0][0] <= now:
            change(free, running.pop(0)[2], 1)
        while coming and coming[0].submit_ns <= now:
            queue.append(coming.pop(0))
        while queue and (taken := find(free, queue[0].gpus)):
            start(now, queue[0], taken)
        if not queue:
            continue
        later = free.copy()
        for begin, _, taken in running:  # noqa: B007
            change(later, taken, 1)
            if reserved := find(later, queue[0].gpus):
                break
        change(later, reserved, -1)
        for job in queue[1:]:
            taken, short = find(free, job.gpus), now + job.duration_ns <= begin
            if taken and (short or all(later[node] >= gpus for node, gpus in taken)):
                if not short:
                    change(later, taken, -1)
                start(now, job, taken)
    return done


def test_easy_is_the_one_that_is_described():
    for seed in range(6):
        text = mix(seed, 120)
        assert times(text, 64, "easy") == by_the_book(jobs_of(text), 8), seed


def test_conservative_delays_nobody_who_came_before():
    """f would fit next to a and b, but would delay c, which comes before it and waits for both."""
    text = "a,0,8,100\nb,0,4,200\nc,1,16,10\ng,2,8,10\nf,3,4,500\n"
    got = times(text, 16, "conservative")
    assert got["c"] == (200, 210) and got["g"] == (100, 110) and got["f"][0] >= 210


def test_sjf_takes_the_shortest_first():
    assert times("a,0,8,100\nb,1,8,50\nc,2,8,10\n", 8, "sjf") == {"a": (0, 100), "c": (100, 110), "b": (110, 160)}


def test_srtf_stops_a_longer_job():
    assert times("a,0,8,100\nb,10,8,20\n", 8, "srtf", stop_s=5) == {"a": (0, 125), "b": (10, 30)}


def test_tiresias_stops_a_job_that_had_its_hour():
    assert times("a,0,8,1000\nb,600,8,20\n", 8, "tiresias", stop_s=0) == {"a": (0, 1020), "b": (600, 620)}
    assert times("a,0,8,1000\nb,100,8,20\n", 8, "tiresias", stop_s=0)["b"] == (450.000000001, 470.000000001)


def test_phalanx_is_told_no_durations_and_lets_newcomers_through():
    """a has had its share of GPU-time when b comes, and is stopped for it at the next scheduling pass."""
    got = times("a,0,8,90000\nb,40000,8,20\n", 8, "phalanx", stop_s=60)
    assert got["b"] == (40000, 40020) and got["a"] == (0, 90000 + 20 + 60)


def mix(seed: int, count: int = 150) -> str:
    draw = random.Random(seed)
    sizes = [1] * 12 + [2, 4, 8, 8, 12, 16, 32, 64]
    rows = [(draw.randrange(200_000), draw.choice(sizes), int(draw.lognormvariate(8, 1.8))) for _ in range(count)]
    return "".join(f"j{i},{at},{gpus},{took}\n" for i, (at, gpus, took) in enumerate(rows))


@pytest.mark.parametrize("policy", driver.NAMES)
def test_no_policy_overcommits_or_loses_a_job(policy):
    """GPUs in use, counted from the ends that the replay reports, never exceed the cluster."""
    for seed in range(2):
        (part,) = driver.replay(machines.of_gpus(64), jobs_of(mix(seed)), policy)
        assert all(x.end_ns - x.job.submit_ns >= x.job.duration_ns for x in part.lives)
        work = sum(x.job.gpus * x.job.duration_ns for x in part.lives)
        assert work <= part.busy <= part.gpus * (part.last_ns - part.first_ns)
        if not any(x.stops for x in part.lives):
            edges = sorted(
                [(x.first_ns, 1, x.job.gpus) for x in part.lives] + [(x.end_ns, 0, -x.job.gpus) for x in part.lives]
            )
            used = 0
            for _, _, change in edges:
                used += change
                assert 0 <= used <= 64


def test_phalanx_is_better_than_easy_which_knows_the_durations():
    def mean(policy):
        (part,) = driver.replay(machines.of_gpus(64), jobs_of(mix(7, 300)), policy)
        return sum(x.end_ns - x.job.submit_ns for x in part.lives) / len(part.lives)

    assert mean("phalanx") < mean("easy") < mean("fifo")


def test_phalanx_starves_nobody():
    """A gang of the whole cluster competes with an endless stream of small jobs. FIFO order among overdue gangs bounds
    its wait, whatever comes behind it. Least attained service alone would never let it start again."""
    stream = "".join(f"s{i},{i * 50},8,3000\n" for i in range(1200))
    rules = driver.Rules()
    got = times("big,100,64,7200\n" + stream, 64, "phalanx")
    first, end = got["big"]
    bound_s = (rules.patience_ns + rules.turn_ns + rules.grace_ns + rules.look_ns) / S
    assert first - 100 <= bound_s
    turns = 1 + 7200 * S // rules.turn_ns
    assert end - 100 <= turns * (bound_s + rules.turn_ns / S)


def test_virtual_clusters_are_queues_or_quotas():
    """Classical policies keep to the nodes of a virtual cluster; ours lends idle ones, and takes them back."""
    text = "job_id,submit_s,gpus,duration_s,vc\na,0,8,100,x\nb,0,8,100,x\nc,50,8,100,y\n"
    jobs = parse(text.splitlines(), "t.csv").jobs
    where = machines.regular(2, 8)
    where.vcs.update(x=8, y=8)
    ends = {x.job.name: x.end_ns / S for part in driver.replay(where, jobs, "fifo") for x in part.lives}
    assert ends == {"a": 100, "b": 200, "c": 150}
    (part,) = driver.replay(where, jobs, "phalanx", stop_s=10)
    ends = {x.job.name: x.end_ns / S for x in part.lives}
    assert ends["c"] == 150, "y did not get its own GPUs back"
    assert min(ends["a"], ends["b"]) == 100 and max(ends["a"], ends["b"]) <= 170


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("job_id,submit_s,gpus\na,0,1\n", 1, "duration_s"),
        ("", 1, "job_id"),
        (HEADER + "a,0,1,5\nb,zero,1,5\n", 3, "submit_s"),
        (HEADER + "a,0,1.5,5\n", 2, "gpus"),
        (HEADER + "a,0,-1,5\n", 2, "gpus"),
        (HEADER + "\na,0,1,nan\n", 3, "duration_s"),
        (HEADER + "a,0,1,-5\n", 2, "duration_s"),
        (HEADER + "a,0,1\n", 2, "duration_s"),
        (HEADER + f"a,{'9' * 30},1,1\n", 2, "submit_s"),
        (HEADER + "a,0,1,1e400\n", 2, "duration_s"),
    ],
)
def test_a_bad_trace_names_line_and_column(text, line, column):
    with pytest.raises(UserError) as refused:
        parse(text.splitlines(), "t.csv")
    assert f"line {line}" in str(refused.value) and refused.value.field == f"column {column}"


def test_what_traces_look_like_is_read():
    """Traces may have other columns, another order, blanks, decimals, a byte-order mark, rows without GPUs, rows out of
    order."""
    text = "GPUs , vc,user,duration_s,submit_s,job_id\n2.0,a,u,1.5,10,x\n\n0,a,u,1,1,cpu\n1,b,u,1e3,-5,y\n"
    trace = parse(text.splitlines(), "t.csv")
    assert trace.skipped == 1
    assert [(j.name, j.gpus, j.submit_ns, j.duration_ns, j.vc) for j in trace.jobs] == [
        ("y", 1, -5 * S, 1000 * S, "b"),
        ("x", 2, 10 * S, 1_500_000_000, "a"),
    ]


def run(*arguments):
    return CliRunner().invoke(app, ["schedule", "replay", *map(str, arguments)])


def test_the_command(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(HEADER + QUEUE)
    said = json.loads(run(path, "--gpus", 16, "--policy", "easy", "--json").stdout)
    assert said["completion_s"]["mean"] == pytest.approx((100 + 199 + 50 + 397) / 4)
    assert said["queueing_s"]["max"] == 197 and said["preemptions"] == 0
    assert 0 < said["utilisation"] < 1 and said["decisions"] == 4
    text = run(path, "--gpus", 16, "--policy", "easy", "--from", 1).stdout
    assert "3 jobs on 16 GPUs" in text and "cross-leaf" in text
    for wrong in (
        ("--gpus", 16, "--policy", "lifo"),
        ("--policy", "easy"),
        ("--gpus", 15),
        ("--gpus", 8),
        ("--gpus", 16, "--from", 1000),
        ("--cluster", tmp_path / "no.toml"),
    ):
        assert isinstance(run(path, *wrong).exception, UserError), wrong


def test_a_cluster_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("nodes = 4\nnode_gpus = 4\nleaf_nodes = 2\n[vc.x]\ngpus = 8\n")
    found = machines.read(file)
    assert found.gpus == 16 and found.vcs == {"x": 8} and found.paths[2][0] == "leaf-1"
    table = tmp_path / "c.csv"
    table.write_text("host,pod,leaf\nh0,p0,l0\nh1,p0,l1\n")
    assert machines.read(table).paths == [("l0", "p0"), ("l1", "p0")]
    for bad in ("nodes = 0\n", "nodes = 2\nleafs = 3\n", "nodes", "nodes = 1\n[vc.x]\ngpus = 16\n", "nodes=4\nvc=3\n"):
        file.write_text(bad)
        with pytest.raises(UserError):
            machines.read(file)
