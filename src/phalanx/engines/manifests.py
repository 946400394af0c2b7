"""Build the Kubernetes objects of a run: a Job for the controller, an indexed Job of agents including the spares, and
what they need. Pods never call the API, run without root, and hold only their own token of the run's secret.

The Job replaces a lost pod under the same index. The new pod joins under the same name, as a later incarnation; by then
a spare has taken its place. Only the controller's Job decides whether the run succeeded.
"""

from __future__ import annotations

import base64
import json
import math
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.gate.proof import KEY_BYTES, Secret
from phalanx.runtime.launch import REFUSED
from phalanx.runtime.secret import token_text

PORT = 7700
USER = 10001  # the image's user
SECRET_BYTES = 1 << 20  # limit of the API for all values of one Secret
LOST_S = 60  # a pod is given up after this time on an unreachable node
KEEP_S = 86_400  # how long the objects of a finished run are kept
RETRIES = 1000  # per node of the run; lost and evicted pods do not count
LEAVE_S = 30
ALONE_S = 1800  # how long an agent waits for a controller, which may itself wait for its node and its image
PULSE, PULSE_S = "/run/phalanx/pulse", 180
RUN_LABEL, ROLE_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"
INDEX = "batch.kubernetes.io/job-completion-index"
#: The location of the node. Since 1.35 Kubernetes copies these two labels from the node to its pods.
PLACE = {"NODE_REGION": "topology.kubernetes.io/region", "NODE_ZONE": "topology.kubernetes.io/zone"}
CONTROLLER, NODES = "controller", "nodes"
#: Exits with 1 if the file is older than PULSE_S seconds.
STALE = f"import os,sys,time;sys.exit(time.time()-os.stat('{PULSE}').st_mtime>{PULSE_S})"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """The parameters of a run on Kubernetes."""

    name: str
    image: str
    job_file: str  # text of the job file
    arguments: tuple[str, ...] = ()  # arguments of the controller, after the job file
    namespace: str = "default"
    is_set: bool = False  # one JobSet instead of two Jobs
    resources: dict[str, str] = field(default_factory=dict)  # limits of an agent
    queue: str = ""
    volcano: bool = False
    topology: str = ""  # a node label; agents should be placed where its value is the same
    must_be_near: bool = False
    journal: str = ""  # a PostgreSQL server; with it, one controller acts and one stands by
    claim: str = ""  # a PersistentVolumeClaim that all pods share, at /shared
    env_from: str = ""  # a Secret with environment variables: credentials of the bucket and of the server
    pull_secret: str = ""
    priority: str = ""
    select: dict[str, str] = field(default_factory=dict)  # labels of nodes
    tolerate: tuple[str, ...] = ()  # taints of nodes


def build(request: Request, job: Job, key: bytes | None = None) -> list[Manifest]:
    """Build all objects, dependencies first. `key`: the run's secret; None: generate one."""
    r, count = request, num_nodes(job.layout) + job.recovery.spares
    secret = Secret(Path(), key or secrets.token_bytes(KEY_BYTES))
    tokens = {str(i): token_text(secret, "agent", node_name(r, i)) + "\n" for i in range(count)}
    if sum(map(len, tokens.values())) > SECRET_BYTES:
        raise UserError(
            f"the tokens of {count} nodes are more than a Secret holds ({SECRET_BYTES} bytes)",
            field="layout",
            value=job.layout.describe(),
            remedy="raise layout.ranks_per_node, so that there are fewer nodes",
        )
    made = [
        _object(
            r, "v1", "Secret", f"{r.name}-secret", type="Opaque", data=_base64({"secret": secret.key.hex() + "\n"})
        ),
        _object(r, "v1", "Secret", f"{r.name}-tokens", type="Opaque", data=_base64(tokens)),
        _object(r, "v1", "ConfigMap", f"{r.name}-job", data={"job.toml": r.job_file}),
        *([] if r.is_set else [_service(r)]),  # a JobSet makes its own
        _door(r),
        _policy(r),
    ]
    if r.volcano:
        made.append(_pod_group(r, job))
    controller, nodes = _controller(r, job), _nodes(r, job, count)
    if r.is_set:
        return [*made, _job_set(r, controller, nodes)]
    return [*made, _as_job(r, CONTROLLER, controller), _as_job(r, NODES, nodes)]


def node_name(request: Request, index: int) -> str:
    """Return the name of a node in the run."""
    return f"{request.name}-{index}"


def address(request: Request) -> str:
    """Return the address that agents join, independent of the controller's pod."""
    return f"{request.name}-{CONTROLLER}:{PORT}"


# -- what all share


def _base64(values: dict[str, str]) -> dict[str, str]:
    return {name: base64.b64encode(text.encode()).decode() for name, text in values.items()}


def _labels(r: Request, role: str = "") -> dict[str, str]:
    about = {"app.kubernetes.io/name": "phalanx", RUN_LABEL: r.name}
    return about | ({ROLE_LABEL: role} if role else {})


def _object(r: Request, api: str, kind: str, name: str, **more: Any) -> Manifest:
    about = {"name": name, "namespace": r.namespace, "labels": _labels(r)}
    return {"apiVersion": api, "kind": kind, "metadata": about, **more}


def _service(r: Request) -> Manifest:
    """Give pods their names: NAME-nodes-3.NAME."""
    ports = [{"name": "join", "port": PORT, "protocol": "TCP"}]
    selector = {RUN_LABEL: r.name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    return _object(r, "v1", "Service", r.name, spec=spec)


def _door(r: Request) -> Manifest:
    """Give the acting controller one address; a controller that stands by is never ready."""
    selector = {RUN_LABEL: r.name, ROLE_LABEL: CONTROLLER}
    ports = [{"name": "join", "port": PORT, "targetPort": "join", "protocol": "TCP"}]
    return _object(r, "v1", "Service", f"{r.name}-{CONTROLLER}", spec={"selector": selector, "ports": ports})


def _policy(r: Request) -> Manifest:
    """Let only pods of the run reach its pods: traffic between ranks is not authenticated."""
    mine = {"matchLabels": {RUN_LABEL: r.name}}
    spec = {"podSelector": mine, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": mine}]}]}
    return _object(r, "networking.k8s.io/v1", "NetworkPolicy", r.name, spec=spec)


def _pod_group(r: Request, job: Job) -> Manifest:
    """Build the Volcano gang, which gets all the nodes that the layout needs, or none."""
    spec = {"minMember": num_nodes(job.layout), **({"queue": r.queue} if r.queue else {})}
    return _object(r, "scheduling.volcano.sh/v1beta1", "PodGroup", r.name, spec=spec)


def _pod(r: Request, role: str, container: Manifest, source: Manifest, mounted: Manifest, **more: Any) -> Manifest:
    """Build a pod without root. `source` is a Secret; `mounted` selects the part that an init container may read. It
    copies that part to memory, as a file that only this user can read."""
    environment = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "HOME", "value": "/work"},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": "/tmp/torchinductor"},  # noqa: S108
    ]
    if role == NODES:
        for name, label in (("NODE_INDEX", INDEX), *PLACE.items()):
            source_of = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}  # empty if the pod has no such label
            environment.append({"name": name, "valueFrom": source_of})
    limits = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    own = {"name": "own", "mountPath": "/run/phalanx"}
    copy = {
        "name": "copy-secret",
        "image": r.image,
        "command": ["install", "-m", "600", "/etc/phalanx/key", f"/run/phalanx/{source['name']}"],
        "env": environment,
        "securityContext": limits,
        "resources": {kind: {"cpu": "100m", "memory": "128Mi"} for kind in ("requests", "limits")},
        "volumeMounts": [own, {"name": source["name"], "mountPath": "/etc/phalanx/key", "readOnly": True, **mounted}],
    }
    mounts = [
        own,
        {"name": "work", "mountPath": "/work"},
        {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        *([{"name": "shared", "mountPath": "/shared"}] if r.claim else []),
        *container.pop("volumeMounts", []),
    ]
    main = {
        "name": role,
        "image": r.image,
        "workingDir": "/work",
        "env": environment,
        **({"envFrom": [{"secretRef": {"name": r.env_from}}]} if r.env_from else {}),
        "securityContext": limits,
        "volumeMounts": mounts,
        **container,
    }
    volumes = [
        {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "work", "emptyDir": {}},
        {"name": "temporary", "emptyDir": {}},
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory"},
        },  # ranks hand tensors to each other, and keepers hold snapshots
        source,
        *([{"name": "shared", "persistentVolumeClaim": {"claimName": r.claim}}] if r.claim else []),
        *more.pop("volumes", []),
    ]
    lost = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_S}
        for why in ("not-ready", "unreachable")
    ]
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "subdomain": r.name,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [copy],
        "containers": [main],
        "volumes": volumes,
        "tolerations": [*lost, *({"key": key, "operator": "Exists"} for key in r.tolerate)],
        **({"nodeSelector": r.select} if r.select and role == NODES else {}),
        **({"imagePullSecrets": [{"name": r.pull_secret}]} if r.pull_secret else {}),
        **({"priorityClassName": r.priority} if r.priority else {}),
        **more,
    }
    return {"metadata": {"labels": _labels(r, role)}, "spec": spec}


# -- the two Jobs


def _controller(r: Request, job: Job) -> Manifest:
    """Build the controller. With a journal on a server there are two, one standing by, and each is recreated when it is
    lost. Without one the run is lost with its controller: nothing may continue it with agents that are still alive, so
    its Job fails. A JobSet then restarts everything from the last checkpoint."""
    command = ["phalanx", "controller", "/etc/phalanx/job/job.toml", "--listen", f"$(POD_IP):{PORT}", "--foreground"]
    command += ["--secret", "/run/phalanx/secret", "--resume", "auto", *r.arguments]
    if r.journal:
        command += ["--journal", r.journal, "--standby"]
    if r.claim:
        command += ["--set", "run.dir=/shared/runs"]
    grace_s = math.ceil(min(job.recovery.grace_s, 86_400.0)) + LEAVE_S
    probe = {"tcpSocket": {"port": "join"}, "periodSeconds": 2, "failureThreshold": 2}
    container = {
        "command": command,
        "ports": [{"name": "join", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": probe,
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
        "volumeMounts": [{"name": "job", "mountPath": "/etc/phalanx/job", "readOnly": True}],
    }
    source = {"name": "secret", "secret": {"secretName": f"{r.name}-secret", "defaultMode": 0o440}}
    files = [{"name": "job", "configMap": {"name": f"{r.name}-job"}}]
    more: dict[str, Any] = {"volumes": files, "terminationGracePeriodSeconds": grace_s}
    if r.journal:
        apart = {"labelSelector": {"matchLabels": _labels(r, CONTROLLER)}, "topologyKey": "kubernetes.io/hostname"}
        more["affinity"] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_weight(apart)]}}
    pod = _pod(r, CONTROLLER, container, source, {"subPath": "secret"}, **more)
    # Without `completions` the Job is done when one of its pods is. The mode is explicit because a JobSet would default
    # to Indexed.
    count = {"parallelism": 2} if r.journal else {"parallelism": 1, "completions": 1}
    limit = RETRIES if r.journal else 0
    return {**count, "completionMode": "NonIndexed", "backoffLimit": limit, "template": pod}


def _nodes(r: Request, job: Job, count: int) -> Manifest:
    command = ["phalanx", "agent", "--join", address(r), "--secret", "/run/phalanx/tokens"]
    command += ["--topology", ".".join(f"$({name})" for name in PLACE)]
    command += ["--name", f"{r.name}-$(NODE_INDEX)", "--pulse", PULSE, "--give-up-s", str(ALONE_S)]
    container = {
        "command": command,
        "resources": {"limits": r.resources, "requests": r.resources} if r.resources else {},
        "startupProbe": {
            "exec": {"command": ["test", "-e", PULSE]},
            "periodSeconds": 5,
            "failureThreshold": ALONE_S // 5 + 60,
        },
        "livenessProbe": {
            "exec": {"command": ["python", "-ISc", STALE]},
            "periodSeconds": 60,
            "timeoutSeconds": 20,
            "failureThreshold": 3,
        },
    }
    source = {"name": "tokens", "secret": {"secretName": f"{r.name}-tokens", "defaultMode": 0o440}}
    template = _pod(
        r,
        NODES,
        container,
        source,
        {"subPathExpr": "$(NODE_INDEX)"},
        affinity=_affinity(r),
        terminationGracePeriodSeconds=LEAVE_S,
        **({"schedulerName": "volcano"} if r.volcano else {}),
    )
    notes = {}
    if r.volcano:
        notes["scheduling.k8s.io/group-name"] = r.name
    elif r.queue and r.topology:
        notes[f"kueue.x-k8s.io/podset-{'required' if r.must_be_near else 'preferred'}-topology"] = r.topology
    if notes:
        template["metadata"]["annotations"] = notes
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailIndex", "onExitCodes": {"containerName": NODES, "operator": "In", "values": [REFUSED]}},
    ]
    return {
        "completionMode": "Indexed",
        "parallelism": count,
        "completions": count,
        "backoffLimitPerIndex": RETRIES,
        "podFailurePolicy": {"rules": rules},
        "podReplacementPolicy": "Failed",  # two pods with one name would contend for it
        "template": template,
    }


def _weight(term: Manifest) -> Manifest:
    return {"weight": 100, "podAffinityTerm": term}


def _affinity(r: Request) -> Manifest:
    """Place one agent per host, and all agents near each other."""
    mine = {"labelSelector": {"matchLabels": _labels(r, NODES)}}
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [{**mine, "topologyKey": "kubernetes.io/hostname"}]}
    affinity: Manifest = {"podAntiAffinity": apart}
    if r.topology:
        near = {**mine, "topologyKey": r.topology}
        must, may = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
        affinity["podAffinity"] = {must: [near]} if r.must_be_near else {may: [_weight(near)]}
    return affinity


def _queue(r: Request) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": r.queue} if r.queue and not r.volcano else {}


def _as_job(r: Request, role: str, spec: Manifest) -> Manifest:
    made = _object(r, "batch/v1", "Job", f"{r.name}-{role}", spec={**spec, "ttlSecondsAfterFinished": KEEP_S})
    made["metadata"]["labels"] |= {ROLE_LABEL: role} | (_queue(r) if role == NODES else {})
    return made


def _job_set(r: Request, controller: Manifest, nodes: Manifest) -> Manifest:
    parts = [
        {"name": role, "replicas": 1, "template": {"metadata": {"labels": _labels(r, role)}, "spec": spec}}
        for role, spec in ((CONTROLLER, controller), (NODES, nodes))
    ]
    spec = {
        "replicatedJobs": parts,
        "network": {"enableDNSHostnames": True, "subdomain": r.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
        "failurePolicy": {"maxRestarts": 3, "restartStrategy": "BlockingRecreate"},
        "ttlSecondsAfterFinished": KEEP_S,
    }
    made = _object(r, "jobset.x-k8s.io/v1alpha2", "JobSet", r.name, spec=spec)
    made["metadata"]["labels"] |= _queue(r)
    return made


# -- for people and kubectl


def text_of(manifests: list[Manifest]) -> str:
    """Render YAML, one document per object. Strings are quoted, so that none is taken for another type."""
    return "\n---\n".join("\n".join(_lines(manifest)) for manifest in manifests)


def _lines(value: Any, indent: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        out = []
        for key, item in value.items():
            name = key if key.replace("-", "").isalnum() and not key[0].isdigit() else json.dumps(key)
            nested = isinstance(item, dict | list) and item
            out += [f"{indent}{name}:", *_lines(item, f"{indent}  ")] if nested else [f"{indent}{name}: {_plain(item)}"]
        return out
    if isinstance(value, list) and value:
        out = []
        for item in value:
            first, *rest = _lines(item, f"{indent}  ")
            out += [f"{indent}- {first.lstrip()}", *rest]
        return out
    return [f"{indent}{_plain(value)}"]


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
