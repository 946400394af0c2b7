"""How two processes prove to each other that they belong to a run, without a connection: bytes in, bytes out.

    client -> server   hello      a nonce, who it is, and a MAC over them: strangers end here
    server -> client   challenge  a nonce, who it is, and its proof over both nonces and both identities
    client -> server   answer     its own proof over the same

The key of these MACs is the client's token. A token follows from the run's secret and the role and name of its owner:
an end that has only a token can speak in its own name alone, and an end that has the secret knows all tokens. Neither
crosses the wire. The nonces are new in each exchange: an old one opens nothing.

Under TLS both ends put the hash of the server's certificate into every MAC. Who stands between them must show another
certificate, so its proofs fail: nothing has to be known of the certificate beforehand, and nobody has to sign it.
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
HELLO_BYTES = 512  # a frame of somebody who has proven nothing
_LENGTH = struct.Struct(">I")
_PAIR, _LONE = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}", rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(_PAIR + rb"|(" + _LONE + rb")|\\.")


class Refused(WireError):
    """The other end has not proven what it must, or sent what nobody who has would send."""


@dataclass(frozen=True, slots=True)
class Identity:
    role: str
    name: str
    incarnation: int  # a later process of that name has a greater one

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


class Keys(Protocol):
    def token_of(self, role: str, name: str) -> bytes:
        """Refused: this end does not know it."""
        ...


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret of a run, or of all who share something in it. Its owner can compute everybody's token."""

    path: Path  # the file that keeps it; Path(): none does
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
    """One end of the exchange. `binding`: what both ends see of the connection, and nobody between them can show."""

    def __init__(self, keys: Keys, me: Identity, server: bool, binding: bytes = b""):
        self.peer: Identity | None = None  # once it has proven itself
        self.keys: dict[bool, bytes] = {}  # of what is said from now on; by: does the server say it
        self.rest = bytearray()  # what came after the exchange
        self._secret, self._server, self._binding = keys, server, binding
        self._nonces = {server: secrets.token_bytes(16)}  # by: is it the server's
        self._who = {server: me}
        self._token = b"" if server else keys.token_of(me.role, me.name)

    def begin(self) -> bytes:
        """What is sent first."""
        return b"" if self._server else self._framed("hello", self._introduction("hello"))

    def receive(self, data: bytes) -> bytes:
        """Take in what came, and return what is to be sent. Refused."""
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
    """The parts' lengths are in it: no two lists of parts look alike."""
    data = b"".join(_LENGTH.pack(len(part)) + part for part in (b"phalanx 2", label.encode(), *parts))
    return hmac.digest(key, data, "sha256")


def parsed(body: bytes) -> Any:
    """Half a surrogate pair, which JSON can name and no encoding takes, becomes U+FFFD: an error message may have one,
    and it must end nobody who writes it down. Refused: it is no JSON in ASCII."""
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
