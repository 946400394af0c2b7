"""The exchange in which two processes prove to each other that they belong to a run: bytes in, bytes out, no I/O.

    client -> server   hello      a nonce, who it is, and a MAC over them: strangers fail here
    server -> client   challenge  a nonce, who it is, and its proof over both nonces and both identities
    client -> server   answer     its own proof over the same

These MACs are keyed with the client's token, which is derived from the run's secret and the role and name of its owner.
An end with only a token can speak only in its own name; an end with the secret can compute every token. Neither crosses
the wire. Each exchange has new nonces, so that a recording of an old one is useless.

Under TLS both ends include the hash of the server's certificate in every MAC. A man in the middle has to present
another certificate, so its proofs fail. The certificate therefore need not be known beforehand, nor signed by anyone.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import MOST_INT, WireError

KEY_BYTES = 32
HELLO_BYTES = 512  # the largest frame before anything is proven
_LENGTH = struct.Struct(">I")
_PAIR, _LONE = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}", rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(_PAIR + rb"|(" + _LONE + rb")|\\.")


class Refused(WireError):
    """The other end failed to prove its identity, or sent what no proven member would send."""


@dataclass(frozen=True, slots=True)
class Identity:
    role: str
    name: str
    incarnation: int  # greater in each later process of that name

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


class Keys(Protocol):
    def token_of(self, role: str, name: str) -> bytes:
        """Return the token of a member. Raises Refused if this end does not know it."""
        ...


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret of a run, or of all who share something in it. Its owner can compute every token."""

    path: Path  # the file that stores it; Path(): none
    key: bytes = field(repr=False)

    def token_of(self, role: str, name: str) -> bytes:
        return mac(self.key, "token", role.encode(), name.encode())


@dataclass(frozen=True, slots=True)
class Token:
    """The token of one member. It proves this name, and no other."""

    role: str
    name: str
    key: bytes = field(repr=False)

    def token_of(self, role: str, name: str) -> bytes:
        if (role, name) != (self.role, self.name):
            raise Refused(f"this is the token of the {self.role} {self.name!r}, not of the {role} {name!r}")
        return self.key


class Proof:
    """One end of the exchange. `binding`: what both ends know of the connection and a man in the middle cannot
    reproduce."""

    def __init__(self, keys: Keys, me: Identity, server: bool, binding: bytes = b""):
        self.peer: Identity | None = None  # set when it has proven itself
        self.keys: dict[bool, bytes] = {}  # for later messages, by: the server sends them
        self.rest = bytearray()  # bytes that arrived after the exchange
        self._secret, self._server, self._binding = keys, server, binding
        self._nonces = {server: secrets.token_bytes(16)}  # by: it is the server's
        self._who = {server: me}
        self._token = b"" if server else keys.token_of(me.role, me.name)

    def begin(self) -> bytes:
        """Return the first bytes to send."""
        return b"" if self._server else self._framed("hello", self._introduction("hello"))

    def receive(self, data: bytes) -> bytes:
        """Process received bytes, and return the bytes to send. Raises Refused."""
        self.rest += data
        out = b""
        while self.peer is None and len(self.rest) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self.rest)[0]
            if size > HELLO_BYTES:
                raise Refused(f"a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self.rest) < end:
                break
            frame = bytes(self.rest[_LENGTH.size : end])
            del self.rest[:end]
            out += self._take(parsed(frame))
        return out

    def _take(self, said: Any) -> bytes:
        kind = said.get("type") if isinstance(said, dict) else None
        expected = "challenge" if not self._server else "answer" if self._token else "hello"
        if kind != expected:
            raise Refused(f"it sent a {str(kind)[:40]} instead of a {expected}")
        theirs = not self._server
        if expected == "answer":
            self._require(said, self._mac("client", *self._transcript()))
            self.peer = self._who[theirs]
            return b""
        self._nonces[theirs] = _unhex(_field(said, "nonce", str))
        who = Identity(_field(said, "role", str), _field(said, "name", str), _field(said, "incarnation", int))
        if not 0 <= who.incarnation < MOST_INT:
            raise Refused(f"{kind}.incarnation = {who.incarnation}: expected 0 to {MOST_INT}")
        self._who[theirs] = who
        if self._server:
            token = self._secret.token_of(who.role, who.name)
            self._require(said, self._mac("hello", self._nonces[False], who.to_bytes(), key=token))
            self._token = token
            self._derive()
            return self._framed("challenge", self._introduction("server", *self._transcript()))
        self._require(said, self._mac("server", *self._transcript()))
        self._derive()
        self.peer = who
        return self._framed("answer", {"proof": self._mac("client", *self._transcript()).hex()})

    def _introduction(self, label: str, *parts: bytes) -> dict[str, Any]:
        nonce, me = self._nonces[self._server], self._who[self._server]
        proof = self._mac(label, *(parts or (nonce, me.to_bytes())))
        return {"nonce": nonce.hex(), **asdict(me), "proof": proof.hex()}

    def _framed(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
        if len(body) > HELLO_BYTES:
            raise Refused(f"the name of this end is too long: its {kind} has {len(body)} bytes, over {HELLO_BYTES}")
        return _LENGTH.pack(len(body)) + body

    def _derive(self) -> None:
        for by_server in (False, True):
            label = "key of the server" if by_server else "key of the client"
            self.keys[by_server] = self._mac(label, *self._transcript())

    def _transcript(self) -> list[bytes]:
        return [*(self._nonces[s] for s in (False, True)), *(self._who[s].to_bytes() for s in (False, True))]

    def _require(self, said: dict[str, Any], proof: bytes) -> None:
        if not hmac.compare_digest(_unhex(_field(said, "proof", str)), proof):
            raise Refused("it does not know the cluster's secret")

    def _mac(self, label: str, *parts: bytes, key: bytes = b"") -> bytes:
        return mac(key or self._token, label, self._binding, *parts)


def mac(key: bytes, label: str, *parts: bytes) -> bytes:
    """Return the MAC of some parts. It covers their lengths, so that no two lists of parts look alike."""
    data = b"".join(_LENGTH.pack(len(part)) + part for part in (b"phalanx 2", label.encode(), *parts))
    return hmac.digest(key, data, "sha256")


def parsed(body: bytes) -> Any:
    """Parse JSON in ASCII, or raise Refused. A lone surrogate, which JSON can express and no encoding accepts, becomes
    U+FFFD: an error message may contain one, and writing that down must not fail."""
    try:
        if b"\\ud" in body or b"\\uD" in body:
            body = _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)
        return json.loads(body.decode("ascii"))
    except (ValueError, RecursionError):
        raise Refused("a frame is not JSON") from None


def _field(said: dict[str, Any], name: str, kind: type) -> Any:
    value: Any = said.get(name)
    if type(value) is not kind or (isinstance(value, str) and not value.isascii()):
        raise Refused(f"{said['type']}.{name} = {str(value)[:80]!a}: expected {kind.__name__} (ASCII)")
    return value


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Refused("what it sent is not hex") from None
