"""The requested objects match the schemas of the last three Kubernetes versions, a user's text is never interpreted as
anything else, and the client creates, watches and deletes a run."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import re
import threading

import pytest
import yaml
from kubernetes.client import ApiClient, Configuration
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.engines import kubernetes, kubernetes_api
from phalanx.engines.kubernetes_api import Cluster
from phalanx.engines.manifests import build, text_of
from phalanx.engines.table import Where
from phalanx.gate.proof import Secret
from phalanx.runtime.secret import load_keys, write_token
from tests.engines.kubernetes_stub import INDEX, VERSIONS, Stub, problems

IMAGE = "phalanx:test"
WIDE = {
    "resources": "cpu:16,memory:64Gi,rdma/hca:1",
    "env-from": "bucket",
    "pull-secret": "pull",
    "priority": "high",
    "claim": "disk",
    "select": "gpu.product:H200,zone:a",
    "tolerate": "nvidia.com/gpu,team",
    "journal": "postgresql://phalanx@db/journal",
}
ASKED = {
    "plain": {},
    "wide": WIDE,
    "kueue": {"queue": "team", "near": "topology.kubernetes.io/zone"},
    "volcano": {"queue": "team", "scheduler": "volcano", "together": "rack"},
}


@pytest.fixture
def job():
    plain = Job(name="big one", layout=Layout(replica=3, ranks_per_node=8, shard=8))
    recovery = dataclasses.replace(plain.recovery, spares=1)
    return dataclasses.replace(
        plain, recovery=recovery, checkpoint=dataclasses.replace(plain.checkpoint, dir="s3://b/four")
    )


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "big one"\n# "quoted": {}\n')
    return [
        "train",
        str(path),
        "--on",
        "kubernetes",
        "--set",
        "train.steps=7",
        "--engine",
        f"image={IMAGE}",
        "--dry-run",
    ]


def manifests(job, arguments, **options):
    named = {key.replace("_", "-"): value for key, value in options.items()}
    return kubernetes.submission(Where("kubernetes", "", {"image": IMAGE, **named}), job, arguments).manifests


@pytest.mark.parametrize("kind", ["jobs", "jobset"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_would_take_every_object(job, arguments, kind, asked, version):
    made = manifests(job, arguments, kind=kind, **ASKED[asked])
    assert [problems(each, version) for each in made] == [[]] * len(made)
    kinds = [each["kind"] for each in made]
    assert ("JobSet" in kinds) == (kind == "jobset") and ("PodGroup" in kinds) == (asked == "volcano")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_refuse_what_is_wrong(job, arguments, version):
    """Without this, the test above could not fail."""
    made = manifests(job, arguments)[-1]
    made["spec"]["paralelism"] = 3
    made["spec"]["template"]["spec"]["containers"][0]["image"] = 7
    del made["spec"]["template"]["spec"]["containers"][0]["name"]
    assert len(problems(made, version)) == 3


def pods_of(made):
    jobs = [part["template"] for each in made if each["kind"] == "JobSet" for part in each["spec"]["replicatedJobs"]]
    jobs += [each for each in made if each["kind"] == "Job"]
    return {job["metadata"]["labels"]["app.kubernetes.io/component"]: job["spec"]["template"] for job in jobs}


@pytest.mark.parametrize("kind", ["jobs", "jobset"])
def test_pods_run_without_root_and_without_the_api(job, arguments, kind):
    for template in pods_of(manifests(job, arguments, kind=kind)).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"] and spec["restartPolicy"] == "Never"
        for container in [*spec["initContainers"], *spec["containers"]]:
            limits = container["securityContext"]
            assert limits["capabilities"] == {"drop": ["ALL"]} and limits["readOnlyRootFilesystem"]
            assert limits["allowPrivilegeEscalation"] is False


def test_an_agent_sees_its_own_token_and_no_other(job, arguments, tmp_path):
    made = {(each["kind"], each["metadata"]["name"]): each for each in manifests(job, arguments, name="run")}
    tokens = made["Secret", "run-tokens"]["data"]
    assert sorted(tokens) == ["0", "1", "2", "3"], "three nodes and a spare"
    (pod,) = [template["spec"] for role, template in pods_of(made.values()).items() if role == "nodes"]
    mounts = [
        m for c in [*pod["initContainers"], *pod["containers"]] for m in c["volumeMounts"] if m["name"] == "tokens"
    ]
    assert [m["subPathExpr"] for m in mounts] == ["$(NODE_INDEX)"]
    assert "secret" not in {volume["name"] for volume in pod["volumes"]}, "the run's secret is the controller's"
    key = bytes.fromhex(base64.b64decode(made["Secret", "run-secret"]["data"]["secret"]).decode())
    path = tmp_path / "token"
    path.write_bytes(base64.b64decode(tokens["3"]))
    path.chmod(0o600)
    assert load_keys(path) == load_keys(write_token(tmp_path / "mine", Secret(path, key), "agent", "run-3"))
    command = pod["containers"][0]["command"]
    assert command[command.index("--name") + 1] == "run-$(NODE_INDEX)"


def test_an_agent_says_in_which_region_and_zone_it_is(job, arguments):
    (pod,) = [t["spec"] for role, t in pods_of(manifests(job, arguments)).items() if role == "nodes"]
    (agent,) = pod["containers"]
    labels = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in agent["env"] if "valueFrom" in each}
    place = agent["command"][agent["command"].index("--topology") + 1]
    assert re.sub(r"\$\((\w+)\)", lambda found: labels[found[1]], place) == (
        "metadata.labels['topology.kubernetes.io/region'].metadata.labels['topology.kubernetes.io/zone']"
    )


def test_devices_spares_and_grace(job, arguments):
    made = manifests(job, arguments, name="run")
    (nodes,) = [each["spec"] for each in made if each["metadata"]["name"] == "run-nodes"]
    assert nodes["completions"] == nodes["parallelism"] == 4
    assert nodes["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    (controller,) = [
        each["spec"] for each in made if each["kind"] == "Job" and each["metadata"]["name"] == "run-controller"
    ]
    assert controller["template"]["spec"]["terminationGracePeriodSeconds"] > job.recovery.grace_s
    assert controller["backoffLimit"] == 0, "agents of a lost controller would be taken into another run"
    command = controller["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--set", "train.steps=7"] and "--resume" in command
    (two,) = [
        m["spec"]
        for m in manifests(job, arguments, name="run", **WIDE)
        if m["metadata"]["name"] == "run-controller" and m["kind"] == "Job"
    ]
    assert (
        two["parallelism"] == 2
        and "completions" not in two
        and "--standby" in two["template"]["spec"]["containers"][0]["command"]
    )


@pytest.mark.parametrize("asked", ASKED)
def test_the_text_is_what_is_sent(job, arguments, asked):
    made = manifests(job, arguments, **ASKED[asked])
    assert list(yaml.safe_load_all(text_of(made))) == made


def test_hostile_job_files_stay_text(job, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("name = 'x'\n---\nkind: Secret\n\t\"$(POD_IP)\": `id` é\u2028: {{ }}\n")
    made = manifests(job, ["train", str(path)])
    (read,) = [each for each in yaml.safe_load_all(text_of(made)) if each["kind"] == "ConfigMap"]
    assert read["data"] == {"job.toml": path.read_text()}


@pytest.mark.parametrize(
    "name, found", [("Big_One!", "big-one"), ("9", "run"), ("..", "run"), ("é" * 80, "run"), ("x" * 99, "x" * 35)]
)
def test_any_job_name_gives_a_name_that_kubernetes_takes(job, arguments, name, found):
    made = manifests(dataclasses.replace(job, name=name), arguments)
    for each in made:
        assert kubernetes.LABEL.fullmatch(each["metadata"]["name"]) and len(each["metadata"]["name"]) < 63
    assert made[2]["metadata"]["name"].rpartition("-")[0].rpartition("-")[0] == found


@pytest.mark.parametrize(
    "option, value, remedy",
    [
        ("colour", "red", "one of image"),
        ("name", "Big", "lower-case letters"),
        ("name", "x" * 41, "at most 40 characters"),
        ("name", "a b", "lower-case letters"),
        ("namespace", "../kube-system", "lower-case letters"),
        ("image", "x y", "letters, digits"),
        ("kind", "pod", "jobs or jobset"),
        ("scheduler", "mine", "volcano"),
        ("resources", "cpu", "KEY:VALUE"),
        ("resources", "cpu:many", "a quantity"),
        ("select", "a b:c", "KEY:VALUE"),
        ("near", "a b", "a label"),
        ("queue", "Team!", "the name of an object"),
        ("env-from", "$(HOME)", "the name of an object"),
        ("journal", "sqlite:///x", "postgresql://"),
        ("journal", "postgresql://u:word@h/d", "PGPASSWORD"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(job, arguments, option, value, remedy):
    with pytest.raises(UserError) as error:
        manifests(job, arguments, **{option: value})
    assert remedy in str(error.value) and "u:word" not in str(error.value)


def test_what_is_missing_is_asked_for(job, arguments):
    for wrong, text in (
        (lambda: kubernetes.submission(Where("kubernetes"), job, arguments), "image="),
        (lambda: manifests(job, ["train", "--on", "kubernetes"]), "which job?"),
        (lambda: manifests(job, [*arguments, "--resume", "auto"]), "resumes by itself"),
        (lambda: manifests(job, arguments, near="a", together="b"), "exclude each other"),
    ):
        with pytest.raises(UserError, match=text):
            wrong()


# -- the client


@pytest.fixture(params=VERSIONS[-1:])
def stub(request, monkeypatch):
    monkeypatch.setattr(kubernetes_api, "PAUSE_S", 0.01)
    stub = Stub(request.param)
    yield stub
    stub.close()


def cluster_of(stub, namespace="default"):
    return Cluster(namespace, ApiClient(Configuration(host=stub.url)))


@pytest.mark.parametrize("kind", ["jobs", "jobset"])
def test_create_watch_lose_replace_and_delete(job, arguments, stub, kind):
    cluster, made = cluster_of(stub), manifests(job, arguments, name="run", kind=kind)
    stub.fail(503, times=2)  # like a server that restarts
    cluster.create(made)
    assert len(stub.pods()) == len(cluster.pods("run")) == 5
    watch = cluster.watch("run", lambda: False)
    there = list(itertools.islice(watch, 5))
    assert sorted(seen.index for seen in there) == ["", "0", "1", "2", "3"]
    lost = next(seen for seen in there if seen.index == "2")
    stub.lose_pod(lost.pod)
    failed, deleted, new = itertools.islice(watch, 3)
    assert (failed.what, failed.phase, failed.why) == ("MODIFIED", "Failed", "DeletionByTaintManager")
    assert (deleted.what, deleted.pod) == ("DELETED", lost.pod)
    assert (new.what, new.index) == ("ADDED", "2") and new.pod != lost.pod
    assert cluster.logs("run") == "step 1\n"
    (owner,) = [key for key in stub.objects if key in (("jobsets", "run"), ("jobs", "run-controller"))]
    cluster.delete(*(("jobset.x-k8s.io/v1alpha2", "JobSet") if kind == "jobset" else ("batch/v1", "Job")), owner[1])
    assert stub.objects == {}, "all of it belonged to the run"
    assert {seen.what for seen in itertools.islice(watch, 5)} == {"DELETED"}
    cluster.delete("batch/v1", "Job", "run-controller")  # a second time does nothing


def test_what_cannot_be_made_as_a_whole_leaves_nothing(job, arguments, stub):
    cluster, made = cluster_of(stub), manifests(job, arguments, name="run")
    made[1]["colour"] = "red"
    with pytest.raises(UserError, match=r"refused POST .*secrets: strict decoding error: .*colour"):
        cluster.create(made)
    assert stub.objects == {}
    del made[1]["colour"]
    cluster.create(made)
    with pytest.raises(UserError, match=r"already exists\n  remedy: there is a run of that name"):
        cluster.create(made)


def test_a_server_that_stays_away(job, arguments, stub):
    cluster = cluster_of(stub)
    stub.fail(503, times=50)
    with pytest.raises(UserError, match="the server is busy"):
        cluster.pods("run")
    assert len(stub.asked) == kubernetes_api.TRIES, "no more attempts than it says"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_run_is_followed_until_its_controller_has_ended(job, arguments, stub, monkeypatch, capsys, phase):
    monkeypatch.setattr(Cluster, "connect", lambda namespace: cluster_of(stub, namespace))
    where = Where("kubernetes", "", {"image": IMAGE, "name": "run"})
    made = kubernetes.submission(where, job, arguments)
    threading.Thread(target=stub.end_pod, args=["run-controller", phase], daemon=True).start()
    if phase == "Succeeded":
        assert made.send() == "default/run"
    else:
        with pytest.raises(RunFailed, match=r"(?s)controller's pod has failed.*step 1"):
            made.send()
    out = capsys.readouterr().out
    assert (
        "phalanx stop kubernetes:default/run" in out and f"modified {phase}" in out and out.count("added Running") == 5
    )
    assert kubernetes.submission(where, job, [*arguments, "--detach"]).detach


def command(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def submitted(job, arguments, stub, monkeypatch):
    monkeypatch.setattr(Cluster, "connect", lambda namespace: cluster_of(stub, namespace))
    monkeypatch.setattr(kubernetes, "LOOK_S", 0.01)

    def submit(**options):
        cluster_of(stub).create(manifests(job, arguments, name="run", **options))
        return next(pod for name, pod in stub.pods().items() if name.startswith("run-controller"))

    return submit


@pytest.mark.parametrize("kind", ["jobs", "jobset"])
def test_a_run_is_asked_about_and_ended_by_the_commands_of_any_run(submitted, stub, kind):
    submitted(kind=kind)
    assert kubernetes.state("default/run") == "controller Running; nodes: 4 Running"
    assert command("logs", "kubernetes:default/run").output == "step 1\n"
    assert command("logs", "kubernetes:default/run", "--grep", "loss").output == ""
    done = command("stop", "kubernetes:default/run")
    assert done.exit_code == 0 and "is asked to save and end" in done.output
    assert stub.objects == {} and kubernetes.state("default/run") == ""


@pytest.mark.parametrize(("phase", "code"), [("Succeeded", 0), ("Failed", 1)])
def test_attach_shows_what_the_controller_says_until_it_ends(submitted, stub, phase, code):
    pod = submitted()
    pod["status"]["phase"] = phase
    done = command("attach", "kubernetes:default/run")
    assert done.output == "step 1\n" and done.exit_code == code


def test_attach_goes_on_when_another_controller_takes_over(submitted, stub):
    """A standby controller is recreated when it fails, so the run is not over. No line is shown twice."""
    first = submitted(journal="postgresql://phalanx@db/journal")
    first["status"]["phase"] = "Failed"
    other = next(pod for pod in stub.pods().values() if pod is not first and cluster_of(stub).is_controller(pod))
    other["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    asked, looks = stub.answer, itertools.count()

    def answer(request, method):
        if "/log?" in request.path and next(looks) == 2:
            other["status"]["phase"] = first["status"]["phase"] = "Succeeded"
        return asked(request, method)

    stub.answer = answer
    done = command("attach", "kubernetes:default/run")
    assert done.exit_code == 0 and done.output.count("step 1") == 1, done.output
    assert next(looks) > 2 and "controller Running" in done.output
    assert {path for _, path in stub.asked if path.endswith("/log")} == {
        f"/api/v1/namespaces/default/pods/{other['metadata']['name']}/log"
    }, "of the one that acts"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["stop", "kubernetes:run"], "kubernetes:NAMESPACE/NAME"),
        (["stop", "kubernetes:default/run", "--now"], "--grace-period=0"),
        (["attach", "kubernetes:default/none"], "is it over, and deleted?"),
        (["attach", "slurm:7"], "name its folder"),
        (["logs", "ray:7"], "name its folder"),
        (["logs", "kubernetes:default/run", "--rank", "0"], "leave out --rank"),
    ],
)
def test_what_cannot_be_asked_of_a_run_elsewhere(submitted, arguments, remedy):
    done = command(*arguments)
    assert done.exit_code and remedy in str(done.exception)


def test_the_stub_plays_an_indexed_job(job, arguments, stub):
    cluster_of(stub).create(manifests(job, arguments, name="run"))
    assert sorted(pod["metadata"]["labels"].get(INDEX, "") for pod in stub.pods().values()) == ["", "0", "1", "2", "3"]
    assert build  # the same as for a submission
