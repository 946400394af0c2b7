"""The secret of a cluster, and connections whose two ends prove to each other that they know it.

The secret is 32 random bytes in a file that only its owner can read. It is made on first use, handed on by the path of
its file, and is in no log, argument or environment.

Whoever cannot prove it is sent nothing at all, not even a refusal. After the proofs every frame carries a MAC over its
number, under a key of this connection and direction: a frame that was changed, replayed, moved or left out ends the
connection. Contents can still be read on the way; against that there is TLS, by option.

    client -> server   hello      a nonce, who it is, and a MAC over them: strangers end here
    server -> client   challenge  a nonce, who it is, and its proof over both nonces and both identities
    client -> server   answer     its own proof over the same
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.store import sync_folder
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check, encode

KEY_BYTES = 32
HELLO_BYTES = 512  # a frame of somebody who has proven nothing
FRAME_BYTES = 8 << 20
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

_LENGTH, _NUMBER, _TAG_BYTES = struct.Struct(">I"), struct.Struct(">Q"), 16
_WHO: dict[str, type | tuple[type, ...]] = {"role": str, "name": str, "incarnation": int}
_GREETINGS: Schemas = {
    "hello": {"nonce": str, **_WHO, "proof": str},
    "challenge": {"nonce": str, **_WHO, "proof": str},
    "answer": {"proof": str},
}


@dataclass(frozen=True, slots=True)
class Secret:
    path: Path
    key: bytes = field(repr=False)


def load_secret(path: Path, create: bool = True) -> Secret:
    """Read the secret, or make it. If several processes come first, one makes it and all get the same."""
    path = Path(path)
    if create and not path.exists():
        _create(path)
    return Secret(path, _read(path))


def read_secret(fd: int) -> Secret:
    """From a line that somebody who knows it writes, and no file of this host keeps."""
    text = b""
    while (byte := os.read(fd, 1)) not in (b"", b"\n") and len(text) < 1024:
        text += byte
    return Secret(Path("-"), _parse(text, "that was given"))


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    near = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(near, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # somebody was faster: theirs counts
            os.link(near, path)
    finally:
        os.unlink(near)
    sync_folder(path.parent)


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        remedy = "copy it from the machine where the cluster was made, with mode 600"
        raise UserError(f"the cluster's secret cannot be read: {error}", remedy=remedy) from None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise UserError(f"the cluster's secret {path} is not a file", remedy="name a file, or none: it is made")
        if about.st_uid != os.geteuid():
            raise UserError(
                f"the cluster's secret {path} belongs to user {about.st_uid}, and this is user {os.geteuid()}",
                remedy=f"chown {os.geteuid()} {path}, or name a file of your own",
            )
        if mode & 0o077:
            raise UserError(
                f"the cluster's secret {path} has mode {mode:o}: others can read or change it",
                remedy=f"chmod 600 {path}; if others were on this machine, delete it on all nodes and start again",
            )
        text = file.read(1024)
    return _parse(text, str(path))


def _parse(text: bytes, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(
            f"the cluster's secret {where} is damaged: it does not hold {KEY_BYTES} bytes in hex",
            remedy="copy it again, or delete it on all nodes: it is made anew",
        )
    return key


# -- connections


class Refused(WireError):
    """The other end has not proven what it must, or sent what nobody who has would send."""


@dataclass(frozen=True, slots=True)
class Identity:
    role: str
    name: str
    incarnation: int  # a later process of that name has a greater one


class Secure(Conn):
    """A Conn between two ends that know the secret, kept registered by `watch(self, mask, callback)`: the callback
    calls `on_event(self, mask)`. `peer` is None until the other end has proven itself; only then may anything be
    pushed."""

    def __init__(
        self,
        watch: Callable[..., object],
        sock: Any,
        secret: Secret,
        me: Identity,
        server: bool,
        on_event: Callable[[Secure, int], object],
    ):
        super().__init__(sock)
        self.me = me
        self.peer: Identity | None = None
        self._watch, self._secret, self._server = watch, secret, server
        self._nonces = {server: secrets.token_bytes(16)}  # by: is it the server's
        self._who = {server: me}
        self._keys: dict[bool, bytes] = {}
        self._numbers = [0, 0]  # of the next frame: to be read, to be written
        self._callback, self._writing = partial(on_event, self), False
        watch(self, READ, self._callback)
        if not server:
            proof = self._mac("hello", self._nonces[False], _identity_bytes(me))
            self._greet("hello", nonce=self._nonces[False].hex(), **asdict(me), proof=proof)

    def push(self, message: Message) -> None:
        self.push_body(body_of(message))

    def push_body(self, body: bytes) -> None:
        assert self.peer, "nothing may be said before the proofs"
        self._out += _LENGTH.pack(_TAG_BYTES + len(body)) + self._tag(self._server, 1, body) + body
        self.flush()

    def flush(self) -> None:
        super().flush()
        writing = bool(self._out) and not getattr(self.sock, "must_read_first", False)
        if self._writing != writing:
            self._writing = writing
            self._watch(self, READ | (WRITE if self._writing else 0), self._callback)

    def close(self) -> None:
        self._watch(self, 0)
        super().close()

    def pull(self, drain: bool = False) -> list[Message]:
        try:
            return super().pull(drain)
        except OSError:  # the other host is gone
            self.eof = True
            return []

    def _frames(self) -> Iterator[Message]:
        while len(self._in) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._in)[0]
            if size > (_TAG_BYTES + FRAME_BYTES if self.peer else HELLO_BYTES):
                raise Refused(f"a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self._in) < end:
                return
            frame = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            if self.peer:
                yield self._opened(frame)
            else:
                self._greeted(_parsed(frame))

    def _opened(self, frame: bytes) -> Message:
        tag, body = frame[:_TAG_BYTES], frame[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(not self._server, 0, body)):
            raise Refused("a frame was changed, repeated, moved or left out on its way")
        return _parsed(body)

    def _tag(self, by_server: bool, way: int, body: bytes) -> bytes:
        number = self._numbers[way]
        self._numbers[way] += 1
        return hmac.digest(self._keys[by_server], _NUMBER.pack(number) + body, "sha256")[:_TAG_BYTES]

    # -- the proofs

    def _greet(self, kind: str, **fields: Any) -> None:
        self._out += encode({"type": kind, **fields})
        self.flush()

    def _greeted(self, message: object) -> None:
        said = check(message, _GREETINGS)
        expected = "challenge" if not self._server else "answer" if self._keys else "hello"
        if said["type"] != expected:
            raise Refused(f"it sent a {said['type']} instead of a {expected}")
        if expected == "answer":
            self._require(said, self._mac("client", *self._transcript()))
            self.peer = self._who[False]
            return
        theirs = not self._server
        self._nonces[theirs] = _unhex(said["nonce"])
        self._who[theirs] = Identity(said["role"], said["name"], said["incarnation"])
        if self._server:
            self._require(said, self._mac("hello", self._nonces[False], _identity_bytes(self._who[False])))
            self._derive()
            proof = self._mac("server", *self._transcript())
            self._greet("challenge", nonce=self._nonces[True].hex(), **asdict(self.me), proof=proof)
        else:
            self._require(said, self._mac("server", *self._transcript()))
            self._derive()
            self._greet("answer", proof=self._mac("client", *self._transcript()))
            self.peer = self._who[True]

    def _derive(self) -> None:
        for by_server in (False, True):
            label = "key of the server" if by_server else "key of the client"
            self._keys[by_server] = bytes.fromhex(self._mac(label, *self._transcript()))

    def _transcript(self) -> list[bytes]:
        return [*(self._nonces[s] for s in (False, True)), *(_identity_bytes(self._who[s]) for s in (False, True))]

    def _require(self, said: Message, proof: str) -> None:
        if not hmac.compare_digest(_unhex(said["proof"]), bytes.fromhex(proof)):
            raise Refused("it does not know the cluster's secret")

    def _mac(self, label: str, *parts: bytes) -> str:
        """The parts' lengths are in it: no two lists of parts look alike."""
        data = b"".join(_LENGTH.pack(len(part)) + part for part in (b"phalanx 1", label.encode(), *parts))
        return hmac.digest(self._secret.key, data, "sha256").hex()


def body_of(message: Message) -> bytes:
    body = encode(message)[_LENGTH.size :]
    if len(body) > FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {FRAME_BYTES}")
    return body


def _identity_bytes(who: Identity) -> bytes:
    return json.dumps(asdict(who), sort_keys=True).encode()


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Refused("what it sent is not hex") from None


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refused("a frame is not JSON") from None
