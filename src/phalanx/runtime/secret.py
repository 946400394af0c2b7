"""The secret of a cluster, the tokens of its nodes, and connections whose two ends have proven them (`gate.proof`).

The secret is 32 random bytes in a file that only its owner can read. It is made on first use, handed on by the path of
its file, and is in no log, argument or environment. A node needs only its token, in a file of the same kind.

An end that cannot prove itself is sent nothing at all, not even a refusal. After the proofs every frame carries a MAC
over its number, under a key of this connection and direction: a frame that was changed, replayed, moved or left out
ends the connection. Beyond loopback all of it runs under TLS.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.store import sync_folder
from phalanx.gate.loop import READ, WRITE
from phalanx.gate.proof import KEY_BYTES, Identity, Keys, Proof, Refused, Secret, Token, parsed
from phalanx.gate.tls import binding_of
from phalanx.runtime.wire import Conn, Message, WireError, encode

FRAME_BYTES = 8 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # of a node, or of a file of its logs
_LENGTH, _NUMBER, _TAG_BYTES = struct.Struct(">I"), struct.Struct(">Q"), 16


def load_secret(path: Path, create: bool = True) -> Secret:
    """Read the secret, or create it. If several processes do so at once, one creates it and all get the same."""
    path = Path(path)
    if create and not path.exists():
        _create(path, secrets.token_hex(KEY_BYTES))
    return Secret(path, _key_of(path, _read(path)))


def copy_secret(source: Path, path: Path) -> Secret:
    """Copy a secret that several controllers share; create `source` if it does not exist."""
    _create(path, load_secret(source).key.hex(), replace=True)
    return load_secret(path, create=False)


def load_keys(path: Path) -> Secret | Token:
    """Read the secret, or the token of one member."""
    lines = _read(path).split("\n")
    if len(lines) != 3:
        return load_secret(path, create=False)
    return Token(lines[0], lines[1], _key_of(path, lines[2]))


def read_token(fd: int) -> Token:
    """Read a token from a descriptor, so that no file of this host keeps it."""
    text = b""
    while text.count(b"\n") < 3 and len(text) < 1024 and (byte := os.read(fd, 1)):
        text += byte
    lines = text.decode("ascii", "replace").split("\n")
    if len(lines) != 4:
        raise UserError("no token came on standard input", remedy="write role, name and token, each on a line")
    return Token(lines[0], lines[1], _key_of(Path("-"), lines[2]))


def token_text(secret: Secret, role: str, name: str) -> str:
    """Return a token as text for load_keys and read_token: role, name and token, each on a line."""
    return f"{role}\n{name}\n{secret.token_of(role, name).hex()}"


def write_token(path: Path, secret: Secret, role: str, name: str) -> Path:
    _create(Path(path), token_text(secret, role, name), replace=True)
    return Path(path)


def _create(path: Path, text: str, replace: bool = False) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    near = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(near, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(near, path)
        else:
            with contextlib.suppress(FileExistsError):  # somebody was faster: theirs counts
                os.link(near, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(near)
    sync_folder(path.parent)


def _read(path: Path) -> str:
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
        return file.read(1024).decode("ascii", "replace").strip()


def _key_of(path: Path, text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UserError(
            f"the cluster's secret {path} is damaged: it does not hold {KEY_BYTES} bytes in hex",
            remedy="copy it again, or delete it on all nodes: it is made anew",
        )
    return key


# -- connections


class Secure(Conn):
    """A Conn between two ends that know the secret, kept registered by `watch(self, mask, callback)`: the callback
    calls `on_event(self, mask)`. `peer` is None until the other end has proven itself; only then may anything be
    pushed."""

    def __init__(
        self,
        watch: Callable[..., object],
        sock: Any,
        keys: Keys,
        me: Identity,
        server: bool,
        on_event: Callable[[Secure, int], object],
    ):
        super().__init__(sock)
        self.me = me
        self._watch, self._secret, self._server = watch, keys, server
        self._proof: Proof | None = None  # None: TLS comes first
        self._numbers = [0, 0]  # of the next frame: to be read, to be written
        self._callback, self._writing = partial(on_event, self), False
        watch(self, READ, self._callback)
        try:
            self.flush()
        except WireError:
            watch(self, 0)
            raise

    @property
    def peer(self) -> Identity | None:
        return self._proof.peer if self._proof else None

    def push(self, message: Message) -> None:
        self.push_body(body_of(message))

    def push_body(self, body: bytes) -> None:
        assert self.peer, "nothing may be said before the proofs"
        self._out += _LENGTH.pack(_TAG_BYTES + len(body)) + self._tag(self._server, 1, body) + body
        self.flush()

    def flush(self) -> None:
        if self._is_bound():
            super().flush()
        unsaid = bool(self._out) or self._proof is None
        writing = unsaid and not self.eof and not getattr(self.sock, "must_read_first", False)
        if self._writing != writing:
            self._writing = writing
            self._watch(self, READ | (WRITE if self._writing else 0), self._callback)

    def close(self) -> None:
        self._watch(self, 0)
        super().close()

    def pull(self, drain: bool = False) -> list[Message]:
        try:
            return super().pull(drain) if self._is_bound() else []
        except OSError:  # the other host is gone
            self.eof = True
            return []

    def _is_bound(self) -> bool:
        """Return whether TLS, if there is any, is established. The proofs begin then, and are bound to it."""
        if self._proof is None and not self.eof:
            try:
                binding = binding_of(self.sock)
            except OSError:
                self.eof = True
                return False
            if binding is not None:
                self._proof = Proof(self._secret, self.me, self._server, binding)
                self._out += self._proof.begin()
        return self._proof is not None

    def _frames(self) -> Iterator[Message]:
        assert self._proof
        if not self._proof.peer:
            self._out += self._proof.receive(bytes(self._in))
            self._in.clear()
            self.flush()
            if not self._proof.peer:
                return
            self._in += self._proof.rest
        while len(self._in) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._in)[0]
            if size > _TAG_BYTES + FRAME_BYTES:
                raise Refused(f"a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self._in) < end:
                return
            frame = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            yield self._opened(frame)

    def _opened(self, frame: bytes) -> Message:
        tag, body = frame[:_TAG_BYTES], frame[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(not self._server, 0, body)):
            raise Refused("a frame was changed, repeated, moved or left out on its way")
        return parsed(body)

    def _tag(self, by_server: bool, way: int, body: bytes) -> bytes:
        assert self._proof
        number = self._numbers[way]
        self._numbers[way] += 1
        return hmac.digest(self._proof.keys[by_server], _NUMBER.pack(number) + body, "sha256")[:_TAG_BYTES]


def body_of(message: Message) -> bytes:
    body = encode(message)[_LENGTH.size :]
    if len(body) > FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {FRAME_BYTES}")
    return body
