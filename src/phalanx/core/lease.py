"""A lease on a folder or bucket: one file that says who writes there, and is replaced only if nobody else has changed
it. The holder renews it. A process that finds it unchanged for its whole term, by its own clock, may take it over. A
holder on this machine whose process is gone has lost it at once. The file stays when the holder leaves, and says what
was written there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core import document
from phalanx.core.errors import UserError
from phalanx.core.store import Changed, Store

TERM_S = 60.0
POLL_S = 0.5
FORMAT = 1

Body = dict[str, Any]


class Held(Exception):
    """Somebody else holds the lease; `body` says who."""

    def __init__(self, body: Body):
        super().__init__(f"process {body.get('pid')} on {body.get('host')} holds it")
        self.body = body


def read(store: Store, name: str) -> Body:
    """Return what the file says; empty if it is missing or damaged. UserError: a newer version has written it."""
    return _read(store, name)[0]


def _read(store: Store, name: str) -> tuple[Body, str]:
    try:
        data, tag = store.read_tagged(name)
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    try:
        body = json.loads(data)
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    document.check_version({"format": FORMAT, **body}, FORMAT, f"{store.url}/{name}")
    return body, tag


class Lease:
    """The lease as its holder sees it. `about` is what the file says besides the holder."""

    def __init__(self, store: Store, name: str, about: Body, term_s: float = TERM_S):
        self.store, self.name, self.term_s = store, name, term_s
        self.token = secrets.token_hex(8)
        self._body: Body = {**about, "format": FORMAT, "token": self.token, "term_s": term_s, "held": True, **_me()}
        self.is_lost = False  # somebody else has taken it
        self.owner: Body = {}  # what the file says of them
        self._tag = ""
        self._count = 0
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="phalanx-lease")

    def take(self, patient: bool = False, on_wait: Callable[[Body], None] = lambda body: None) -> Body:
        """Take the lease, and return what the file said before. A holder for the same run is replaced at once, because
        it is decided elsewhere that there is only one of them. A holder on another machine is given one term to show
        that it lives. If it does, raise Held, or wait until it has left if `patient`. `on_wait` is called once with the
        holder that is waited for, and may raise."""
        seen: Body = {}
        since, told = 0.0, False
        while True:
            body, tag = _read(self.store, self.name)
            if body != seen:
                alive_again = bool(seen) and body.get("token") == seen.get("token")
                if alive_again and not patient and _is_held(body):
                    raise Held(body)
                seen, since = body, time.monotonic()
            expired = time.monotonic() - since > float(body.get("term_s", TERM_S))
            if not _is_held(body) or expired or (self._body.get("run") and body.get("run") == self._body["run"]):
                with contextlib.suppress(Changed):
                    self._write(tag)
                    self._thread.start()
                    return body
                continue
            if _is_here(body) and (not patient or body.get("pid") == os.getpid()):
                raise Held(body)
            if not told:
                told = True
                on_wait(body)
            time.sleep(POLL_S)

    def _write(self, tag: str) -> None:
        self._count += 1
        self._body["count"] = self._count
        self._tag = self.store.replace(self.name, json.dumps(self._body).encode(), tag)

    def _keep(self) -> None:
        while not self.is_lost and not self._done.wait(self.term_s / 4):
            with self._lock, contextlib.suppress(OSError):  # the next turn tries again
                self._renew()

    def _renew(self) -> None:
        try:
            self._write(self._tag)
        except Changed:  # perhaps by the write before, whose answer was lost
            try:
                body, tag = _read(self.store, self.name)
            except UserError:  # a newer version has taken it
                self.is_lost = True
                return
            if body and body.get("token") != self.token:
                self.owner, self.is_lost = body, True
            else:
                self._write(tag)

    def holds(self) -> bool:
        """Renew it now, and return whether nobody else has taken it."""
        with self._lock, contextlib.suppress(OSError):
            self._renew()
        return not self.is_lost

    def close(self, remove: bool = False) -> None:
        """Leave; with `remove`, delete the file too."""
        self._done.set()
        if not self._tag:
            return
        with self._lock, contextlib.suppress(OSError):
            self._body["held"] = False
            self._renew()
            if remove and not self.is_lost:
                self.store.remove(self.name)
        self._tag = ""


def _me() -> Body:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "born": _born(pid)}


def _machine() -> str:
    """Identify this boot of this machine, and the process ids that are seen from here."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


def _born(pid: int) -> int:
    """Return when the process was started, in ticks since the boot; 0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _is_here(body: Body) -> bool:
    return bool(body.get("machine")) and body["machine"] == _machine()


def _is_held(body: Body) -> bool:
    if not body.get("held"):
        return False
    return not _is_here(body) or _born(int(body.get("pid", 0))) == body.get("born")
