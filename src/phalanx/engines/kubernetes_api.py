"""Calls to the Kubernetes API: create the objects of a run, watch its pods, read the controller's log, and delete the
run. Needs the `kubernetes` client (`pip install 'phalanx[kubernetes]'`).

The objects belong to the run's controller Job, or to its JobSet: deleting that deletes them all."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from phalanx.core.errors import RunFailed, UserError
from phalanx.engines.manifests import CONTROLLER, INDEX, ROLE_LABEL, RUN_LABEL, Manifest

STRICT = "Strict"  # the server refuses unknown fields
WATCH_S = 60  # length of one watch
TRIES, PAUSE_S = 5, 0.5  # per request; the pause doubles
BUSY, GONE = (429, 500, 502, 503, 504), 410
PLURALS = {
    "Secret": "secrets",
    "ConfigMap": "configmaps",
    "Service": "services",
    "NetworkPolicy": "networkpolicies",
    "Job": "jobs",
    "JobSet": "jobsets",
    "PodGroup": "podgroups",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A change of a pod, as a watch reports it. `index`: the node's; "": the pod is a controller."""

    what: str  # ADDED, MODIFIED, DELETED
    pod: str
    index: str
    phase: str
    why: str


def _path(api: str, namespace: str, kind: str, name: str = "") -> str:
    root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
    return f"{root}/namespaces/{namespace}/{PLURALS[kind]}" + (f"/{name}" if name else "")


class Cluster:
    """One namespace of a cluster. `api`: an ApiClient of `kubernetes`."""

    def __init__(self, namespace: str, api: Any):
        self.namespace, self._api = namespace, api

    @staticmethod
    def connect(namespace: str) -> Cluster:
        """Connect with this user's kubeconfig, or as a pod."""
        try:
            from kubernetes import client, config
        except ImportError:
            remedy = "pip install 'phalanx[kubernetes]', or --dry-run and kubectl apply -f -"
            raise UserError(
                "the kubernetes client is not installed", field="--on", value="kubernetes", remedy=remedy
            ) from None
        try:
            config.load_config()
        except config.ConfigException as error:
            remedy = "name it in KUBECONFIG; `kubectl cluster-info` uses the same"
            raise UserError(
                f"no cluster is configured: {error}", field="--on", value="kubernetes", remedy=remedy
            ) from None
        return Cluster(namespace, client.ApiClient())

    def create(self, manifests: list[Manifest]) -> None:
        """Create all objects or none. The owner comes first, so that deleting it removes the others if one of them
        fails."""
        owner = next(m for m in manifests if m["kind"] in ("Job", "JobSet"))  # the controller's is the first Job
        made = self._make(owner)
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": made["metadata"]["uid"],
        }
        try:
            for manifest in manifests:
                if manifest is not owner:
                    self._make({**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}})
        except BaseException:
            self.delete(owner["apiVersion"], owner["kind"], owner["metadata"]["name"])
            raise

    def _make(self, manifest: Manifest) -> Manifest:
        path = _path(manifest["apiVersion"], manifest["metadata"]["namespace"], manifest["kind"])
        return self._call("POST", path, [("fieldValidation", STRICT)], manifest)

    def delete(self, api: str, kind: str, name: str) -> None:
        """Delete an object with all that belongs to it; do nothing if it does not exist."""
        body = {"propagationPolicy": "Foreground"}
        self._call("DELETE", _path(api, self.namespace, kind, name), [], body)

    def pods(self, run: str) -> list[Manifest]:
        found: list[Manifest] = self._call("GET", self._pods, [("labelSelector", f"{RUN_LABEL}={run}")])["items"]
        return found

    @staticmethod
    def is_controller(pod: Manifest) -> bool:
        return bool(pod["metadata"]["labels"].get(ROLE_LABEL) == CONTROLLER)

    def controller(self, run: str) -> Manifest:
        """Return the acting controller's pod, which alone is ready, or else the newest one."""
        mine = [pod for pod in self.pods(run) if self.is_controller(pod)]
        if not mine:
            raise UserError("it has no controller", field="RUN", value=run, remedy="is it over, and deleted?")
        return max(mine, key=lambda pod: (_is_ready(pod), str(pod["metadata"].get("creationTimestamp", ""))))

    def logs(self, run: str) -> str:
        """Return the controller's log."""
        return str(self._call("GET", self._log(self.controller(run)), [("container", CONTROLLER)], text=True))

    def lines(self, pod: Manifest, skip: int) -> Iterator[str]:
        """Yield the controller's log after the first `skip` lines, until it ends or the connection does."""
        about = [("container", CONTROLLER), ("follow", "true")]
        with contextlib.suppress(ConnectionError):
            for line in itertools.islice(self._stream(self._log(pod), about), skip, None):
                yield line.decode(errors="replace")

    def _log(self, pod: Manifest) -> str:
        return f"{self._pods}/{pod['metadata']['name']}/log"

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def watch(self, run: str, stop: Callable[[], bool]) -> Iterator[Seen]:
        """Yield the changes to the pods of a run from now on. A watch that ends is resumed where it was. If the server
        has forgotten that position, it begins again with the existing pods."""
        version, select = "", ("labelSelector", f"{RUN_LABEL}={run}")
        while not stop():
            if not version:
                found = self._call("GET", self._pods, [select])
                version = found["metadata"].get("resourceVersion", "")
                yield from (_seen("ADDED", pod) for pod in found["items"])
            about = [("watch", "true"), ("resourceVersion", version), ("allowWatchBookmarks", "true")]
            for event in self._events([select, *about, ("timeoutSeconds", str(WATCH_S))]):
                if event["type"] == "ERROR":  # usually the requested version is too old
                    version = ""
                    break
                version = event["object"]["metadata"].get("resourceVersion", version)
                if event["type"] != "BOOKMARK":
                    yield _seen(event["type"], event["object"])
                if stop():
                    return

    def _events(self, query: list[tuple[str, str]]) -> Iterator[Manifest]:
        try:
            yield from (json.loads(line) for line in self._stream(self._pods, query) if line.strip())
        except ConnectionError:
            time.sleep(PAUSE_S)
            yield {"type": "ERROR"}

    # -- requests

    def _stream(self, path: str, query: list[tuple[str, str]]) -> Iterator[bytes]:
        """Yield the lines of a streaming answer until it ends. A broken connection raises ConnectionError; the next
        request shows whether the server is reachable."""
        from urllib3.exceptions import HTTPError

        try:
            answer, rest = self._request("GET", path, query, stream=True), b""
            try:
                if answer.status >= 400 and answer.status not in (*BUSY, GONE):
                    raise _refused(answer.status, answer.read(), "GET", path)
                if answer.status >= 400:
                    raise ConnectionError(answer.status)
                for part in answer.stream(4096):
                    *lines, rest = (rest + part).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
            finally:
                answer.close()
        except HTTPError as error:
            raise ConnectionError(str(error)) from None

    def _call(self, method: str, path: str, query: list[tuple[str, str]], body: Any = None, text: bool = False) -> Any:
        """Return the answer. Retry a few times when the failure is not the request's own fault."""
        from urllib3.exceptions import HTTPError

        for attempt in range(TRIES):
            is_last = attempt + 1 == TRIES
            try:
                answer = self._request(method, path, query, body)
            except HTTPError as error:
                if is_last or method == "POST":  # the server may have received it
                    raise RunFailed(
                        f"the API server cannot be reached: {error}", remedy="kubectl cluster-info"
                    ) from None
            else:
                if answer.status == 404 and method == "DELETE":
                    return {}
                if answer.status < 400:
                    return answer.data.decode(errors="replace") if text else json.loads(answer.data)
                may_be_made = method == "POST" and answer.status not in (429, 503)
                if is_last or may_be_made or answer.status not in BUSY:
                    raise _refused(answer.status, answer.data, method, path)
            time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError

    def _request(
        self, method: str, path: str, query: list[tuple[str, str]], body: Any = None, stream: bool = False
    ) -> Any:
        """Send a request with the client's configuration: its host, certificates, proxy and token."""
        from urllib3 import Timeout

        known = self._api.configuration
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        headers |= {each["key"]: each["value"] for each in known.auth_settings().values() if each["in"] == "header"}
        return self._api.rest_client.pool_manager.request(
            method,
            f"{known.host}{path}?{urlencode(query)}",
            body=None if body is None else json.dumps(body).encode(),
            headers=headers,
            preload_content=not stream,
            timeout=Timeout(connect=10.0, read=2.0 * WATCH_S if stream else 30.0),
            retries=False,
        )


def _is_ready(pod: Manifest) -> bool:
    said = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in said)


def _seen(what: str, pod: Manifest) -> Seen:
    status, about = pod.get("status", {}), pod["metadata"]
    why = status.get("reason") or next(
        (c.get("reason", "") for c in status.get("conditions", ()) if c["type"] == "DisruptionTarget"), ""
    )
    return Seen(what, about["name"], about.get("labels", {}).get(INDEX, ""), status.get("phase", ""), why)


def _refused(status: int, body: bytes, method: str, path: str) -> UserError:
    """Build the error, with the server's own message."""
    try:
        said = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        said = f"status {status}"
    remedies = {
        401: "log in again: kubectl cluster-info",
        403: "docs/kubernetes.md lists the rights that are needed",
        404: "is the namespace there, and is the CRD installed (JobSet, Volcano)?",
        409: "there is a run of that name: choose another with --engine name=…",
    }
    return UserError(f"Kubernetes refused {method} {path}: {said}", remedy=remedies.get(status, "see the message"))
