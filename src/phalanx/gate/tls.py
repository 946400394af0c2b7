"""TLS 1.3 for all that leaves the machine. Certificates are made for one run and are not signed: an end is trusted
because of its `proof`, which covers the hash of the certificate.

The server's address, which both ends know, alone decides whether a connection is encrypted: on loopback it is not,
elsewhere it is. Nothing is negotiated, so encryption cannot be downgraded.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from phalanx.core.errors import UserError


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its private key, as PEM."""

    pem: str = field(repr=False)

    @staticmethod
    def make() -> Certificate:
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise UserError(
                f"to listen beyond loopback a certificate is made, and that needs `cryptography`: {error}",
                remedy="pip install cryptography, or listen on 127.0.0.1",
            ) from None
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "phalanx")])
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - day).not_valid_after(now + 3650 * day)
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        public = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return Certificate((private + public).decode())

    @property
    def fingerprint(self) -> bytes:
        public = self.pem[self.pem.index("-----BEGIN CERTIFICATE-----") :]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(public)).digest()

    def context(self) -> ssl.SSLContext:
        """Make the TLS context of a server."""
        found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        found.num_tickets = 0  # sessions are not resumed: each connection is proven anew
        fd = os.memfd_create("phalanx-certificate")  # Python wants a path, and the key must not reach a disk
        try:
            os.write(fd, self.pem.encode())
            found.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return found


@cache
def client_context() -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname = False
    found.verify_mode = ssl.CERT_NONE  # the proof identifies the other end
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    return found


class Tls:
    """A socket under TLS that raises BlockingIOError and ConnectionResetError as a plain one does. `certificate`: the
    hash of the server's own; None: this end is the client."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, certificate: bytes | None):
        server = certificate is not None
        self.sock = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
        self.must_read_first = server  # sending has to wait for the other end
        self._certificate, self._shaken = certificate, False
        self.setblocking, self.fileno = self.sock.setblocking, self.sock.fileno
        self.shutdown, self.close = self.sock.shutdown, self.sock.close

    def binding(self) -> bytes | None:
        """Continue the handshake. Return the hash of the server's certificate, or None until the handshake is done."""
        if not self._shaken:
            try:
                self._translated(self.sock.do_handshake)
            except BlockingIOError:
                return None
            self._shaken = True
            if self._certificate is None:
                self._certificate = hashlib.sha256(self.sock.getpeercert(True) or b"").digest()
        return self._certificate

    def recv(self, size: int) -> bytes:
        """Receive all that has arrived: a selector does not report data that is already decrypted."""
        data = self._translated(lambda: self.sock.recv(size))
        while data and (len(data) < size or self.sock.pending()):
            try:
                more = self.sock.recv(size)
            except (ssl.SSLError, OSError):  # nothing more now, or never: the next call says which
                break
            if not more:
                break
            data += more
        return data

    def send(self, data: memoryview) -> int:
        self.must_read_first = False
        return self._translated(lambda: self.sock.send(data))

    def _translated(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            self.must_read_first = isinstance(error, ssl.SSLWantReadError)
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise ConnectionResetError(str(error)) from None


def binding_of(sock: Any) -> bytes | None:
    """Return what a proof on this connection is bound to; None: it is not known yet."""
    return sock.binding() if isinstance(sock, Tls) else b""
