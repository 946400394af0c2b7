"""Requests to Slurm and its answers, tested without Slurm: options, quoting, times, topology."""

from __future__ import annotations

import math
import shlex
import subprocess
from dataclasses import replace

import pytest

from phalanx.core.errors import UserError
from phalanx.engines import slurm
from phalanx.engines.hostlist import expand, paths
from phalanx.engines.table import Where, options_of, submission_of
from phalanx.runtime.launch import Call, Seat
from tests.cases import make_job

HOSTILE = "a'; touch owned; $(touch owned) `touch owned` \"\n#SBATCH --array=0-99\n"


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def a_job(**changes):
    job = make_job()
    layout = replace(job.layout, replica=15, ranks_per_node=1)
    return replace(job, layout=layout, recovery=replace(job.recovery, spares=1, grace_s=20.0), **changes)


def submitted(*options: str, job=None, arguments=("train", "job.toml", "--on", "slurm")) -> slurm.Submission:
    found = submission_of(Where("slurm", options=options_of(options)), job or a_job(), arguments)
    assert isinstance(found, slurm.Submission)
    return found


def test_one_allocation_holds_the_gang_and_its_spares_and_outlives_a_node():
    said = submitted("partition=gpu", "exclude=n[3-4]").options
    assert {"--nodes=16", "--ntasks-per-node=1", "--no-kill", "--requeue"} <= set(said)
    assert {"--partition=gpu", "--exclude=n[3-4]", "--exclusive", "--mem=0"} <= set(said)


def test_who_asks_for_less_than_whole_nodes_gets_less():
    said = submitted("cpus-per-task=8", "mem=64G").options
    assert "--exclusive" not in said and "--mem=0" not in said and "--mem=64G" in said


def test_gpus_are_asked_for_as_the_layout_has_ranks_unless_the_user_does():
    job = a_job()
    job = replace(job, run=replace(job.run, device="cuda"), layout=replace(job.layout, tp=8, ranks_per_node=8))
    assert "--gpus-per-node=8" in submitted(job=job).options
    assert not any("gpus-per-node" in each for each in submitted("gres=gpu:h100:8", job=job).options)


def test_what_a_name_holds_is_never_run(tmp_path):
    """Run the script with a stand-in for the interpreter that prints its arguments."""
    arguments = ["train", HOSTILE, "--set", f"name={HOSTILE}", "--detach"]
    found = submitted(f"comment={HOSTILE}", job=a_job(name=HOSTILE), arguments=arguments)
    assert f"--job-name={HOSTILE}" in found.options and f"--comment={HOSTILE}" in found.options
    first, rest = found.script.split("exec ", 1)
    assert "#SBATCH" not in first, "sbatch reads its directives before the first command only"
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nfor each; do printf '%s\\0' \"$each\"; done\n")
    stand_in.chmod(0o755)
    python, *_ = shlex.split(rest)
    script = found.script.replace(shlex.quote(python), str(stand_in), 1)
    said = subprocess.run(["bash"], input=script, capture_output=True, text=True, cwd=tmp_path).stdout
    assert said.split("\0")[:-1] == ["-P", "-m", "phalanx.cli.main", *arguments[:-1]]
    assert [path.name for path in tmp_path.iterdir()] == ["python"]
    shown = shlex.split(found.text().split(" <<'PHALANX'", 1)[0])
    assert shown == ["sbatch", *found.options], "what --dry-run prints can be pasted into a shell"


def test_a_percent_sign_in_the_path_is_not_a_pattern_of_slurm(tmp_path):
    job = a_job()
    said = submitted(job=replace(job, run=replace(job.run, dir=str(tmp_path / "100%j")))).options
    assert f"--output={tmp_path}/100%%j/slurm-%j.out" in said


@pytest.mark.parametrize(
    "option", ["nodes=3", "signal=INT", "no-kill=", "wrap=ls", "-p=x", "par tition=x", "Partition=x", "head.nodes=2"]
)
def test_options_that_are_ours_or_nobodys_are_refused(option):
    with pytest.raises(UserError, match="--engine"):
        submitted(option)


@pytest.mark.parametrize("text", ["partition", "=x", "", "a=1 a=2"])
def test_options_are_keys_with_values(text):
    with pytest.raises(UserError, match="--engine"):
        options_of(text.split() if " " in text else [text])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:03", 93780), ("1-02:03:04", 93784)],
)
def test_times_as_slurm_writes_them(text, wanted):
    assert slurm.seconds(text) == wanted


def test_a_time_without_end_and_one_that_is_none():
    assert slurm.seconds("UNLIMITED") == math.inf
    for text in ("", "soon", "1:2:3:4", "-5", "1-"):
        with pytest.raises(UserError, match="it is not a time"):
            slurm.seconds(text)


def test_the_warning_comes_early_enough_to_save_and_a_limit_without_room_is_refused():
    """20 s to save, 30 s to leave, a warning up to a minute early, and a minute to train: 170 s."""
    assert "--signal=B:USR1@50" in submitted("time=3").options
    assert "--signal=B:USR1@50" in submitted("time=2:50").options
    with pytest.raises(UserError, match="ask for 3 minutes at least"):
        submitted("time=2:49")


def test_a_heterogeneous_job_has_its_controller_on_the_first_component():
    said = submitted("head.partition=cpu", "partition=gpu", "time=1:00:00").options
    at = said.index(":")
    assert {"--partition=cpu", "--nodes=1", "--time=1:00:00"} <= set(said[:at])
    assert {"--partition=gpu", "--nodes=16", "--no-kill"} <= set(said[at:])


def test_the_tasks_of_an_array_are_different_runs(monkeypatch):
    where = Where("slurm", options={"array": "0-3"})
    good = ["name=sweep-%a", "checkpoint.dir=/shared/%a", "train.seed=%a"]
    for lacking in range(2):
        with pytest.raises(UserError, match=r"%a is the task's number"):
            slurm.sets(where, [each for i, each in enumerate(good) if i != lacking])
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.sets(where, good) == ["name=sweep-3", "checkpoint.dir=/shared/3", "train.seed=3"]
    assert slurm.sets(Where("slurm"), good)[2] == "train.seed=3"


def test_without_slurm_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch was not found"):
        submitted().send()


def test_what_slurm_refuses_is_told_in_its_words(monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1\n"
    )
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match="invalid partition specified: nowhere"):
        submitted("partition=nowhere").send()


def test_lists_of_nodes():
    assert expand("n[1-3,07-08],login,x[1-2]-[a,b]") == [
        *("n1", "n2", "n3", "n07", "n08", "login", "x1-a", "x1-b", "x2-a", "x2-b")
    ]
    assert expand("") == []


def test_a_tree_and_blocks_are_paths_from_the_top():
    tree = """SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=leaf[1-2]"""
    assert paths(tree, ["n1", "n4", "elsewhere"]) == {"n1": "spine.leaf1", "n4": "spine.leaf2", "elsewhere": ""}
    blocks = """BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-4] BlockSize=4"""
    assert paths(blocks, ["n3"]) == {"n3": "b[1-2].b2"}


def inside(monkeypatch, **env):
    for key, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", **env}.items():
        monkeypatch.setenv(key, value)
    tree = "SwitchName=b Nodes=n[1,3]\nSwitchName=a Nodes=n[2,4]\n"
    monkeypatch.setattr(slurm, "ask", lambda *command: tree)
    return slurm.adapter(Where("slurm"), a_job())


def test_inside_an_allocation_nothing_is_submitted_and_neighbours_stay_neighbours(monkeypatch):
    adapter = inside(monkeypatch)
    assert submission_of(Where("slurm"), a_job(), []) is None
    assert [seat.name for seat in adapter.seats(4)] == ["n2", "n4", "n1", "n3"]
    assert adapter.seats(4)[0].topology == "a" and not adapter.restarted
    assert inside(monkeypatch, SLURM_RESTART_COUNT="1").restarted


def test_a_task_of_an_array_never_speaks_for_the_array(monkeypatch):
    """Slurm gives the last task the number of the array: a requeue by that number would restart all of them."""
    adapter = inside(monkeypatch, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert adapter.reference() == {"on": "slurm", "id": "7_3"}


def test_agents_of_a_heterogeneous_job_are_on_the_components_after_the_first(monkeypatch):
    adapter = inside(
        monkeypatch,
        SLURM_HET_SIZE="2",
        SLURM_JOB_NODELIST_HET_GROUP_0="n1",
        SLURM_JOB_NODELIST_HET_GROUP_1="n[2-3]",
    )
    assert adapter.groups == {"n2": "1", "n3": "1"}


def test_agents_of_a_lost_controller_are_ended_before_others_are_started(monkeypatch):
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    adapter, said = inside(monkeypatch, SLURM_RESTART_COUNT="1", SLURM_JOB_ID_HET_GROUP_1="8", **het), []
    steps = "8.0 agent-n2\n8.1 agent-n3\n8.2 mine\n8.batch batch"
    answer = {"squeue": steps, "scontrol": "SwitchName=a Nodes=n[1-3]"}
    monkeypatch.setattr(slurm, "ask", lambda *command: said.append(command) or answer.get(command[0], ""))
    assert [seat.name for seat in adapter.seats(2)] == ["n2", "n3"]
    assert ("scancel", "--signal=KILL", "8.0", "8.1") in said and "--jobs=8" in said[0]


def test_a_run_leaves_before_its_allocation_ends_and_does_not_begin_in_one_that_ends_at_once(monkeypatch):
    """20 s to save and 30 s to leave; a heterogeneous job reports the time of each component."""
    adapter = inside(monkeypatch)
    for said, left_s in (("10:00\n9:00", 540 - 50), ("UNLIMITED", math.inf), ("NOT_SET", math.inf), ("1:50", 60)):
        monkeypatch.setattr(slurm, "ask", lambda *command, said=said: said)
        assert adapter.time_left_s(a_job()) == left_s
    monkeypatch.setattr(slurm, "ask", lambda *command: "1:49")
    with pytest.raises(UserError, match="the allocation ends in 109 s"):
        adapter.time_left_s(a_job())


RUNS = "JobId=7 JobName=a JobState=RUNNING Requeue=1 BatchFlag=1 NodeList=n[2-4] BatchHost={head} NumNodes=3"


@pytest.mark.parametrize(
    ("about", "is_queued"),
    [
        (RUNS.format(head="n1"), True),
        (RUNS.format(head="n2"), False),
        (RUNS.format(head="n1").replace("RUNNING", "COMPLETING"), False),
        (RUNS.format(head="n1").replace("Requeue=1", "Requeue=0"), False),
        (RUNS.format(head="n1").replace("BatchFlag=1", "BatchFlag=0"), False),
        (RUNS.format(head="n9").replace("BatchFlag=1", "BatchFlag=0") + "\n" + RUNS.format(head="n2"), False),
    ],
    ids=["lost", "there", "over", "not wanted", "no script", "of another component"],
)
def test_a_job_is_queued_again_only_if_the_node_of_its_script_is_lost(monkeypatch, about, is_queued):
    said = []
    monkeypatch.setattr(slurm, "ask", lambda *command: said.append(command) or about)
    assert slurm.queue_again_if_headless("7") == is_queued
    assert (("scontrol", "requeue", "7") in said) == is_queued


def test_agents_outlast_the_time_in_which_slurm_finds_out_and_may_not_requeue_what_must_not_be(monkeypatch):
    adapter = inside(monkeypatch)
    monkeypatch.setattr(slurm, "ask", lambda *command: "SlurmdUser = root(0)\nSlurmdTimeout           = 900 sec")
    options = dict(zip(adapter._when_alone[::2], adapter._when_alone[1::2], strict=True))
    assert float(options["--give-up-s"]) > 900
    assert shlex.split(options["--when-alone"])[1:] == ["-P", "-m", "phalanx.engines.slurm", "7"]
    assert slurm.Slurm(requeues=False)._when_alone == []


def test_the_token_of_an_agent_is_on_no_command_line(monkeypatch, tmp_path):
    from phalanx.runtime.secret import load_secret

    adapter, started = inside(monkeypatch), []
    monkeypatch.setattr(slurm, "StartedAgent", lambda command, token, *rest, **more: started.append((command, token)))
    secret = load_secret(tmp_path / "secret")
    adapter.start(Call(Seat("n2", "a"), [("10.0.0.1", 7700)], secret, tmp_path, {}))
    ((command, token),) = started
    key = token.split("\n")[2]
    assert command[0] == "srun" and "--nodelist=n2" in command and command[command.index("--topology") + 1] == "a"
    assert not any(key in each for each in command) and command[command.index("--secret") + 1] == "-"
