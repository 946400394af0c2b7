"""Run on Kubernetes: `phalanx train JOB --on kubernetes --engine image=...` submits a run to a cluster as the objects
of `engines.manifests`. The controller runs in a pod of its own, so this process may end."""

from __future__ import annotations

import argparse
import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.engines.manifests import Manifest, Request, build, text_of
from phalanx.engines.table import Where
from phalanx.runtime.launch import Adapter

LOOK_S = 2.0  # polling interval of a run that is followed
TAIL_LINES = 20  # lines of the controller's log in an error
NAME_CHARS = 40  # limit for the name of a run: a pod name has at most 63, and the Job and the pod add 21
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")

#: The options of --engine, with their meaning.
OPTIONS = {
    "image": "the image that all pods run, built from the Containerfile",
    "name": "of the run's objects (default: from the job's name)",
    "namespace": "where they are made (default: default)",
    "kind": "jobs or jobset",
    "device": "the resource of a device plugin (default: nvidia.com/gpu unless run.device is cpu)",
    "resources": "others of an agent: cpu:16,memory:64Gi,rdma/hca:1",
    "queue": "a LocalQueue of Kueue, or a queue of Volcano",
    "scheduler": "volcano",
    "near": "the label of nodes whose value agents had better have in common",
    "together": "the label of nodes whose value agents must have in common",
    "journal": "postgresql://…: two controllers; one stands by",
    "claim": "a PersistentVolumeClaim that all pods share, at /shared",
    "env-from": "a Secret of variables: credentials of the bucket, PGPASSWORD",
    "pull-secret": "for the image",
    "priority": "a PriorityClass",
    "select": "labels of nodes: KEY:VALUE,…",
    "tolerate": "taints of nodes: KEY,…",
}


def adapter(where: Where, job: Job) -> Adapter:
    raise AssertionError("a run on Kubernetes is handed over as a whole")


def submission(where: Where, job: Job, arguments: Sequence[str]) -> Submission:
    request = request_of(where.options, job, arguments)
    return Submission(build(request, job), request, "--detach" in arguments)


@dataclass(frozen=True)
class Submission:
    manifests: list[Manifest]
    request: Request
    detach: bool = True
    is_array = True  # its record is in a pod, where this host cannot follow it

    def text(self) -> str:
        return text_of(self.manifests)

    def send(self) -> str:
        """Create the objects, and report on the pods until the run is over. Ctrl-C leaves the run alone."""
        from phalanx.engines.kubernetes_api import Cluster

        r, cluster = self.request, Cluster.connect(self.request.namespace)
        cluster.create(self.manifests)
        run = f"kubernetes:{r.namespace}/{r.name}"
        where = f"-n {r.namespace} -l app.kubernetes.io/instance={r.name}"
        print(
            f"{r.name} is on Kubernetes, in the namespace {r.namespace}\n"
            f"  its pods: kubectl get pods {where}\n"
            f"  see it:   phalanx attach {run}\n"
            f"  end it:   phalanx stop {run}",
            flush=True,
        )
        if not self.detach:
            try:
                self._follow(cluster)
            except KeyboardInterrupt:
                print("the run continues")
        return f"{r.namespace}/{r.name}"

    def _follow(self, cluster: Any) -> None:
        """Report on pods until the controller has ended for good."""
        r, is_final = self.request, not (self.request.is_set or self.request.journal)
        for seen in cluster.watch(r.name, lambda: False):
            print(f"{seen.pod}: {' '.join(filter(None, [seen.what.lower(), seen.phase, seen.why]))}", flush=True)
            if not seen.index and seen.phase == "Succeeded":
                break
            if not seen.index and seen.phase == "Failed" and is_final:
                tail = "\n".join(cluster.logs(r.name).splitlines()[-TAIL_LINES:])
                raise RunFailed("the controller's pod has failed", log_tail=tail, remedy="start it again: it resumes")


# -- a run that was handed over: NAMESPACE/NAME


def _run_of(reference: str) -> tuple[Any, str]:
    from phalanx.engines.kubernetes_api import Cluster

    namespace, sign, name = reference.partition("/")
    if not sign or not name:
        remedy = "write kubernetes:NAMESPACE/NAME, as `phalanx train` printed it"
        raise UserError("it names no run", field="RUN", value=f"kubernetes:{reference}", remedy=remedy)
    return Cluster.connect(namespace), name


def state(reference: str) -> str:
    """Return the state of its pods, in Kubernetes' words; "": it is over, or there is none."""
    cluster, name = _run_of(reference)
    pods = cluster.pods(name)
    controllers = [pod for pod in pods if cluster.is_controller(pod)]
    phases = [pod["status"].get("phase", "") for pod in controllers]
    if not controllers or "Succeeded" in phases or ({*phases} == {"Failed"} and _is_final(controllers[0])):
        return ""
    nodes = Counter(pod["status"].get("phase", "") for pod in pods if pod not in controllers)
    return f"controller {phases[-1]}; nodes: " + (", ".join(f"{n} {phase}" for phase, n in nodes.items()) or "none")


def stop(reference: str, now: bool) -> None:
    """Delete the owner of the run's objects. Its controller's pod then saves and ends within the grace period."""
    if now:
        remedy = "leave out --now; kubectl delete pod --grace-period=0 --force ends pods at once"
        raise UserError("Kubernetes gives pods their grace", field="--now", value=reference, remedy=remedy)
    cluster, name = _run_of(reference)
    for api, kind, owner in (("batch/v1", "Job", f"{name}-controller"), ("jobset.x-k8s.io/v1alpha2", "JobSet", name)):
        cluster.delete(api, kind, owner)


def logs(reference: str) -> str:
    cluster, name = _run_of(reference)
    return str(cluster.logs(name))


def follow(reference: str) -> int:
    """Show the controller's log until the run is over, even when another pod takes over."""
    cluster, name = _run_of(reference)
    shown, said = Counter[str](), ""
    while True:
        pod = cluster.controller(name)
        uid, phase = pod["metadata"]["uid"], pod["status"].get("phase", "")
        if phase != "Pending":
            for line in cluster.lines(pod, shown[uid]):
                print(line, flush=True)
                shown[uid] += 1
        if phase == "Succeeded":
            return 0
        if phase == "Failed" and _is_final(pod):
            return 1
        if (now := state(reference)) != said:
            print(now, flush=True)
            said = now
        time.sleep(LOOK_S)


def _is_final(controller: Manifest) -> bool:
    """Return True if nothing recreates this controller: it has no standby, and belongs to no JobSet."""
    command = controller["spec"]["containers"][0]["command"]
    return "--standby" not in command and "jobset.sigs.k8s.io/jobset-name" not in controller["metadata"]["labels"]


def request_of(options: dict[str, str], job: Job, arguments: Sequence[str]) -> Request:
    for key, value in options.items():
        if key not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise UserError(
                "there is no such option", field="--engine", value=f"{key}={value}", remedy=f"one of {known}"
            )
    get = options.get
    if not get("image"):
        remedy = "name it with --engine image=…: build it from the Containerfile, and push it where the nodes can pull"
        raise UserError("which image do the pods run?", field="--engine", value="image=", remedy=remedy)
    near, together = get("near", ""), get("together", "")
    if near and together:
        raise UserError(
            "near and together exclude each other", field="--engine", value=f"near={near}", remedy="keep one"
        )
    journal = get("journal", "")
    if journal and not journal.startswith(("postgresql://", "postgres://")):
        raise _wrong(
            "journal", journal, "write postgresql://USER@HOST/DATABASE, the password in the Secret of env-from"
        )
    if re.match(r"[a-z]+://[^/@]*:[^/@]*@", journal):
        raise _wrong("journal", "postgresql://…", "keep the password in the Secret that env-from names, as PGPASSWORD")
    job_file, rest = _job_file(arguments)
    return Request(
        name=_name(get("name", ""), job),
        image=_checked("image", get("image", ""), IMAGE, "letters, digits and ._/:@-"),
        job_file=job_file,
        arguments=rest,
        namespace=_checked("namespace", get("namespace", "default"), LABEL, "lower-case letters, digits and -"),
        is_set=_chosen("kind", get("kind", "jobs"), ("jobs", "jobset")) == "jobset",
        resources=_resources(get("device", ""), get("resources", ""), job),
        queue=_object("queue", get("queue", "")),
        volcano=bool(get("scheduler") and _chosen("scheduler", get("scheduler", ""), ("volcano",))),
        topology=_checked(
            "together" if together else "near", near or together, KEY, "a label, as topology.kubernetes.io/zone"
        )
        if near or together
        else "",
        must_be_near=bool(together),
        journal=journal,
        claim=_object("claim", get("claim", "")),
        env_from=_object("env-from", get("env-from", "")),
        pull_secret=_object("pull-secret", get("pull-secret", "")),
        priority=_object("priority", get("priority", "")),
        select=_pairs("select", get("select", ""), VALUE, "a label's value"),
        tolerate=tuple(
            _checked("tolerate", key, KEY, "a taint's key") for key in get("tolerate", "").split(",") if key
        ),
    )


def _wrong(option: str, value: str, remedy: str) -> UserError:
    return UserError("Kubernetes would refuse it", field=f"--engine {option}", value=value, remedy=remedy)


def _checked(option: str, value: str, pattern: re.Pattern[str], allowed: str) -> str:
    if not pattern.fullmatch(value) or (pattern is LABEL and len(value) > 63):
        raise _wrong(option, value, f"expected {allowed}")
    return value


def _object(option: str, value: str) -> str:
    return (
        _checked(option, value, OBJECT, "the name of an object: lower-case letters, digits, . and -") if value else ""
    )


def _chosen(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise _wrong(option, value, f"choose {' or '.join(known)}")
    return value


def _name(asked: str, job: Job) -> str:
    """Return the requested name, or else a unique one."""
    if asked:
        if len(asked) > NAME_CHARS:
            raise _wrong("name", asked, f"at most {NAME_CHARS} characters: names of pods are made of it")
        return _checked("name", asked, LABEL, "lower-case letters, digits and -, a letter first")
    plain = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[: NAME_CHARS - 5].strip("-")
    return f"{plain if plain[:1].isalpha() else 'run'}-{secrets.token_hex(2)}"


def _pairs(option: str, text: str, pattern: re.Pattern[str], allowed: str) -> dict[str, str]:
    found = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.rpartition(":")
        _checked(option, key, KEY, "KEY:VALUE,…")
        found[key] = _checked(option, value, pattern, allowed)
    return found


def _resources(device: str, text: str, job: Job) -> dict[str, str]:
    """Request a device per rank of a node, and the additional resources."""
    found = _pairs("resources", text, QUANTITY, "a quantity, as 16 or 64Gi")
    if device or job.run.device != "cpu":
        name = _checked("device", device or "nvidia.com/gpu", KEY, "a resource, as nvidia.com/gpu")
        found.setdefault(name, str(job.layout.ranks_per_node))
    return found


def _job_file(arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the text of the job file, and the part of the command line that the controller needs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("command")
    parser.add_argument("job", nargs="?", default="")
    parser.add_argument("--set", action="append", default=[])
    for name in ("--on", "--engine", "--hosts", "--listen", "--resume"):
        parser.add_argument(name, action="append", default=[])
    known, _ = parser.parse_known_args(list(arguments))
    if known.resume:
        remedy = "leave it out: the run continues the newest checkpoint in checkpoint.dir, if there is one"
        raise UserError(
            "a run on Kubernetes resumes by itself", field="--resume", value=known.resume[-1], remedy=remedy
        )
    if not known.job:
        remedy = "name one: its data and checkpoint.dir must be where all pods reach them, as s3://…"
        raise UserError("which job?", field="JOB", value="", remedy=remedy)
    return Path(known.job).read_text(), tuple(part for each in known.set for part in ("--set", each))
