"""torch's store over the node's own rendezvous (`gate.meeting`), where the ranks of a group find each other. Each
thread has its own connection, so one that waits does not hold up the others."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.gate.meeting import framed

TIMEOUT = timedelta(seconds=600)
_LENGTH = struct.Struct(">I")
# Groups hold only the C++ half of a store and may call it as long as they live, which fails without the Python half. So
# stores are never freed; each takes a few hundred bytes, and there is one per generation.
_stores: list[MeetingStore] = []
_open: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()  # by descriptor


def is_waiting_on(fd: int) -> bool:
    """Return whether this descriptor is a store's connection, which may be shut down to end a wait."""
    return fd in _open


class MeetingStore(dist.Store):
    """The store of one meeting. `scope`: what meets, and the number of that meeting. C++ calls the methods by name."""

    def __init__(self, address: str, scope: tuple[str, int]):
        super().__init__()
        self._address, self._scope = address, scope
        self._local = threading.local()
        self._brought: dict[str, bytes] = {}  # received, but not yet asked for with `get`
        self.set_timeout(TIMEOUT)
        _stores.append(self)
        self._connection()  # fails now if there is no rendezvous

    def close(self) -> None:
        """Close this thread's connection; the next call would open another."""
        sock = getattr(self._local, "sock", None)
        if sock is not None:
            self._local.sock = None
            _open.pop(sock.fileno(), None)
            sock.close()

    # -- what torch calls

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._say({"op": "set", "key": key, "value": base64.b64encode(data).decode()})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._brought.pop(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if key not in self._brought:
                asked = {"op": "get", "key": key}
                answer = self._answer(asked, self.timeout if timeout is None else timeout, key)
                self._brought |= {name: base64.b64decode(value) for name, value in answer["values"].items()}

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", *keys))

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        both = [x.encode() if isinstance(x, str) else bytes(x) for x in (expected, wanted)]
        return base64.b64decode(self._call("compare_set", key, *(base64.b64encode(x).decode() for x in both)))

    def deleteKey(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def getNumKeys(self) -> int:
        return int(self._call("count"))

    def clone(self) -> MeetingStore:
        return MeetingStore(self._address, self._scope)

    delete_key, num_keys = deleteKey, getNumKeys

    # -- the connection

    def _connection(self) -> socket.socket:
        sock = getattr(self._local, "sock", None)
        if sock is None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect("\0" + self._address)
                sock.sendall(framed({"scope": self._scope}))
            except OSError as error:
                sock.close()
                raise dist.DistNetworkError(f"the rendezvous store cannot be reached: {error}") from None
            self._local.sock = _open[sock.fileno()] = sock
        return sock

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._connection().sendall(framed(message))
        except OSError as error:
            self.close()
            raise dist.DistNetworkError(f"the rendezvous store was lost: {error}") from None

    def _call(self, op: str, *args: Any) -> Any:
        return self._answer({"op": op, "args": args}, self.timeout, op)["result"]

    def _answer(self, message: dict[str, Any], timeout: timedelta, about: str) -> dict[str, Any]:
        self._say(message)
        sock = self._connection()
        sock.settimeout(timeout.total_seconds())
        try:
            answer = json.loads(self._read(sock, _LENGTH.unpack(self._read(sock, _LENGTH.size))[0]))
        except TimeoutError:
            self.close()  # a late answer could not be matched to its request
            raise dist.DistStoreError(f"timed out after {timeout.total_seconds():g} s, waiting for {about}") from None
        except OSError as error:
            self.close()
            raise dist.DistNetworkError(f"the rendezvous store was lost: {error}") from None
        with contextlib.suppress(OSError):
            sock.settimeout(None)
        if "error" in answer:
            raise dist.DistStoreError(answer["error"])
        return answer

    @staticmethod
    def _read(sock: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("connection closed")
            data += piece
        return data
