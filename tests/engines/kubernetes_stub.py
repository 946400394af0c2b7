"""An API server built from the OpenAPI schemas of one Kubernetes version. It accepts objects of the kinds that Phalanx
writes, refuses fields that the schema does not have, and plays the Job controller: it creates pods by index, and
recreates lost ones. docs/kubernetes.md lists what it does not do."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jsonschema import Draft202012Validator

VERSIONS = ("1.35", "1.36", "1.37")
INDEX = "batch.kubernetes.io/job-completion-index"
KINDS = {
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
    ("v1", "ConfigMap"): "io.k8s.api.core.v1.ConfigMap",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("v1", "Pod"): "io.k8s.api.core.v1.Pod",
    ("batch/v1", "Job"): "io.k8s.api.batch.v1.Job",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobSet",
    ("scheduling.volcano.sh/v1beta1", "PodGroup"): "PodGroup",
}
_META = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}


def _strict(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _custom(spec: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string"}
    return _strict(("metadata", "spec"), apiVersion=text, kind=text, metadata=_META, spec=spec)


_NAMES = {"type": "array", "items": {"type": "string"}}
_PART = _strict(
    ("name", "template"),
    name={"type": "string"},
    groupName={"type": "string"},
    replicas={"type": "integer"},
    template={"$ref": "#/$defs/io.k8s.api.batch.v1.JobTemplateSpec"},
    dependsOn={"type": "array"},
)
#: Kinds of other projects; the fields are those of jobset_types.go of JobSet (v1alpha2) and of Volcano's PodGroup.
CUSTOM = {
    "JobSet": _custom(
        _strict(
            replicatedJobs={"type": "array", "items": _PART},
            network=_strict(
                enableDNSHostnames={"type": "boolean"},
                subdomain={"type": "string"},
                publishNotReadyAddresses={"type": "boolean"},
            ),
            successPolicy=_strict(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_NAMES),
            failurePolicy=_strict(
                maxRestarts={"type": "integer"},
                restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
                rules={"type": "array"},
            ),
            startupPolicy={"type": "object"},
            suspend={"type": "boolean"},
            coordinator={"type": "object"},
            managedBy={"type": "string"},
            ttlSecondsAfterFinished={"type": "integer", "minimum": 0},
        )
    ),
    "PodGroup": _custom(
        _strict(
            minMember={"type": "integer"},
            queue={"type": "string"},
            priorityClassName={"type": "string"},
            minResources={"type": "object"},
        )
    ),
}


@cache
def _definitions(version: str) -> dict[str, Any]:
    said = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text())
    return {**said["common"], **said["versions"][version], **CUSTOM}


@cache
def _validator(version: str, kind: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": _definitions(version)})


def problems(manifest: dict[str, Any], version: str) -> list[str]:
    """List what a server of this version would refuse."""
    kind = KINDS.get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if kind is None:
        return [f"no kind {manifest.get('kind')} in {manifest.get('apiVersion')}"]
    found = _validator(version, kind).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in found]


class Stub:
    """A server on loopback. `fail(status, times)` sets the answer to the next requests."""

    def __init__(self, version: str):
        self.version = version
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # plural and name
        self.events: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self._failing: list[int] = []
        self.watched = threading.Event()  # set once a client watches
        self._numbers, self._news, self._closed = itertools.count(1), threading.Condition(), False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def __getattr__(self, name: str) -> Any:
                if name in ("do_GET", "do_POST", "do_DELETE"):
                    return lambda: stub.answer(self, name.removeprefix("do_"))
                raise AttributeError(name)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with self._news:
            self._news.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def fail(self, status: int, times: int = 1) -> None:
        self._failing += [status] * times

    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: body for (plural, name), body in self.objects.items() if plural == "pods"}

    def end_pod(self, beginning: str, phase: str) -> None:
        """End a pod, once a client watches."""
        self.watched.wait(60)
        pod = next(pod for name, pod in self.pods().items() if name.startswith(beginning))
        pod["status"] = {"phase": phase}
        self._tell("MODIFIED", pod)

    def lose_pod(self, name: str) -> None:
        """Lose a pod with its node, and recreate it as the Job controller does."""
        pod = self.objects["pods", name]
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        pod["status"] = {"phase": "Failed", "conditions": [disrupted]}
        self._tell("MODIFIED", pod)
        del self.objects["pods", name]
        self._tell("DELETED", pod)
        job = next(o for (p, _), o in self.objects.items() if p == "jobs" and name.startswith(o["metadata"]["name"]))
        self._pod(job, int(pod["metadata"]["labels"][INDEX]))

    # -- what it is asked

    def answer(self, request: Any, method: str) -> None:
        at = urlsplit(request.path)
        query = {key: values[-1] for key, values in parse_qs(at.query).items()}
        size = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(size)) if size else None
        self.asked.append((method, at.path))
        if self._failing:
            return _say(request, self._failing.pop(0), {"message": "the server is busy"})
        *_, plural, name = ["", *at.path.split("/namespaces/")[1].split("/")[1:], ""][:3]
        if at.path.endswith("/log"):
            return _say(request, 200, "step 1\n")
        if method == "POST":
            return self._create(request, plural, body, query)
        if method == "DELETE":
            return self._delete(request, plural, name)
        run = dict(part.split("=") for part in query["labelSelector"].split(","))
        if query.get("watch"):
            return self._watch(request, run, int(query["resourceVersion"]))
        items = [o for o in self.pods().values() if run.items() <= o["metadata"]["labels"].items()]
        return _say(request, 200, {"items": items, "metadata": {"resourceVersion": str(len(self.events))}})

    def _create(self, request: Any, plural: str, body: dict[str, Any], query: dict[str, str]) -> None:
        wrong = problems(body, self.version) if query.get("fieldValidation") == "Strict" else []
        key = (plural, body["metadata"]["name"])
        if wrong:
            return _say(request, 400, {"message": f"strict decoding error: {wrong[0]}"})
        if key in self.objects:
            return _say(request, 409, {"message": f"{plural} {key[1]!r} already exists"})
        made = self._store(plural, body)
        jobs = [made] if plural == "jobs" else []
        for part in body["spec"]["replicatedJobs"] if plural == "jobsets" else ():
            about = {"name": f"{key[1]}-{part['name']}-0", "ownerReferences": [_owner(made)]}
            jobs.append(
                self._store("jobs", {"metadata": about, **part["template"], "kind": "Job"} | {"metadata": about})
            )
        for job in jobs:
            for index in range(job["spec"]["parallelism"]):
                self._pod(job, index)
        return _say(request, 201, made)

    def _store(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": str(time.time())}
        self.objects[plural, made["metadata"]["name"]] = made
        return made

    def _pod(self, job: dict[str, Any], index: int) -> None:
        template, name = (
            copy.deepcopy(job["spec"]["template"]),
            f"{job['metadata']['name']}-{index}-{next(self._numbers):05d}",
        )
        labels = template["metadata"]["labels"]
        if job["spec"].get("completionMode") == "Indexed":
            labels[INDEX] = str(index)
        about = {**template["metadata"], "labels": labels, "name": name, "ownerReferences": [_owner(job)]}
        pod = self._store("pods", {**template, "kind": "Pod", "metadata": about, "status": {"phase": "Running"}})
        self._tell("ADDED", pod)

    def _delete(self, request: Any, plural: str, name: str) -> None:
        found = self.objects.pop((plural, name), None)
        if found is None:
            return _say(request, 404, {"message": "not found"})
        gone = {found["metadata"]["uid"]}
        while gone:  # delete its dependents
            mine = [
                key
                for key, o in self.objects.items()
                if gone & {each["uid"] for each in o["metadata"].get("ownerReferences", ())}
            ]
            dead = [self.objects.pop(key) for key in mine]
            [self._tell("DELETED", o) for o in dead if o.get("kind") == "Pod"]
            gone = {o["metadata"]["uid"] for o in dead}
        return _say(request, 200, {"status": "Success"})

    def _tell(self, what: str, pod: dict[str, Any]) -> None:
        with self._news:
            pod["metadata"]["resourceVersion"] = str(len(self.events) + 1)
            self.events.append({"type": what, "object": copy.deepcopy(pod)})
            self._news.notify_all()

    def _watch(self, request: Any, run: dict[str, str], since: int) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        self.watched.set()
        request.close_connection = True
        while not self._closed:
            with self._news:
                self._news.wait_for(lambda known=since: self._closed or len(self.events) > known, 1.0)
                news, since = self.events[since:], len(self.events)
            for event in news:
                if run.items() <= event["object"]["metadata"]["labels"].items():
                    try:
                        line = json.dumps(event).encode() + b"\n"
                        request.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                        request.wfile.flush()
                    except OSError:
                        return


def _owner(made: dict[str, Any]) -> dict[str, str]:
    return {"kind": "x", "name": made["metadata"]["name"], "uid": made["metadata"]["uid"]}


def _say(request: Any, status: int, body: Any) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)
