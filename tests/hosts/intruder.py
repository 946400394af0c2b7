"""The actions of a stranger on the same network, as a process of its own: `python -m tests.hosts.intruder WHAT HOST
ARGS`. It prints what it found, as JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import socket
import ssl
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.gate.loop import Loop
from phalanx.gate.peers import MEMBER
from phalanx.gate.proof import Identity, Proof, Secret, Token
from phalanx.gate.tls import client_context
from phalanx.runtime.transport import Link

BATCH = 2000
PATIENCE_S = 1.0


def hello(**fields):
    """Return a hello without a proof."""
    said = {"type": "hello", "nonce": "00", "role": "agent", "name": "node-0", "incarnation": 9, "proof": ""}
    body = json.dumps(said | fields).encode()
    return struct.pack(">I", len(body)) + body


SAID = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 8,
    "4 GiB": b"\xff\xff\xff\xff",
    "a hello without a proof": hello(),
    "a name that cannot be encoded": hello(name="\ud800"),
    "a role that cannot be encoded": hello(role="\udc00"),
}


def scan(host, first="1", last="65535"):
    """Return the ports that accept a connection."""
    ports, found = list(range(int(first), int(last) + 1)), []
    for at in range(0, len(ports), BATCH):
        waiting, poll = {}, select.poll()
        for port in ports[at : at + BATCH]:
            sock = socket.socket()
            sock.setblocking(False)
            code = sock.connect_ex((host, port))
            if code == 0:
                found.append(port)
            if code == errno.EINPROGRESS:
                waiting[sock.fileno()] = (sock, port)
                poll.register(sock, select.POLLOUT)
            else:
                sock.close()
        deadline = time.monotonic() + PATIENCE_S
        while waiting and time.monotonic() < deadline:
            for fd, _ in poll.poll(50):
                sock, port = waiting.pop(fd)
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.append(port)
                poll.unregister(fd)
                sock.close()
        for sock, _ in waiting.values():
            sock.close()
    return sorted(found)


def knock(host, *ports):
    """Return, by port, the answer to each thing sent, in clear and under TLS."""
    secret = Secret(Path(), os.urandom(32))
    people = (Identity("agent", "node-0", 9), Identity("user", "user-1", 1), MEMBER)
    hellos = {f"a {who.role} with another secret": Proof(secret, who, False).begin() for who in people}
    todo = [(port, f"{name}, in clear", data, False) for port in ports for name, data in SAID.items()]
    todo += [(port, f"{name}, under TLS", data, True) for port in ports for name, data in (SAID | hellos).items()]
    found = {port: {} for port in ports}
    with ThreadPoolExecutor(64) as pool:
        heard = pool.map(lambda one: said(host, int(one[0]), *one[2:]), todo)
        for (port, name, *_), answer in zip(todo, heard, strict=True):
            found[port][name] = answer
    return found


def speaks_tls(host, *ports):
    with ThreadPoolExecutor(64) as pool:
        heard = pool.map(lambda port: said(host, int(port), b"", tls=True), ports)
        return [int(port) for port, answer in zip(ports, heard, strict=True) if answer != "no TLS"]


def said(host, port, data, tls):
    """Send data, and return what comes back, without the alerts of TLS; "no TLS": the port does not speak it."""
    with socket.create_connection((host, port), 5) as sock:
        sock.settimeout(PATIENCE_S)
        if tls:
            try:
                sock = client_context().wrap_socket(sock)
            except (ssl.SSLError, OSError):
                return "no TLS"
        got = b""
        with contextlib.suppress(OSError):
            sock.sendall(data)
            while piece := sock.recv(1000):
                got += piece
        with contextlib.suppress(OSError):
            sock.close()
        return "" if not tls and got[:1] == b"\x15" else got.hex()


def crowd(host, count, *ports):
    """Keep this many half-open connections to each port, and reopen those that are ended, until standard input ends."""
    socks, opened = {}, 0
    poll = select.poll()
    while not select.select([sys.stdin], [], [], 0)[0]:
        for port in map(int, ports):
            here = sum(1 for _, p in socks.values() if p == port)
            for _ in range(min(200, int(count) - here)):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex((host, port))
                socks[sock.fileno()] = (sock, port)
                poll.register(sock, select.POLLHUP | select.POLLIN)
                opened += 1
        for fd, _ in poll.poll(20):
            poll.unregister(fd)
            socks.pop(fd)[0].close()
    return opened


def claim(host, port, key, kind, *names):
    """Return, by name, whether an agent of that name is let in with a key, which is a `token` or the `secret`."""
    found = {}
    for name in names:
        loop, me, known = Loop(), Identity("agent", name, 1 << 40), bytes.fromhex(key)
        keys = Secret(Path(), known) if kind == "secret" else Token("agent", name, known)
        link = Link(loop, keys, me, [(host, int(port))], {}, lambda *_: None)
        over = time.monotonic() + 2
        while time.monotonic() < over and not link.session:
            loop.turn(0.1)
        found[name] = bool(link.session)
        link.close()
    return found


def replay(host, port, key, name):
    """Count the frames that a member gets when it proves itself, and those that a copy of the same bytes gets. The copy
    is of what was sent inside TLS, which is more than a stranger sees."""
    sock = client_context().wrap_socket(socket.create_connection((host, int(port)), 5))
    seen = hashlib.sha256(sock.getpeercert(True)).digest()
    proof = Proof(Secret(Path(), bytes.fromhex(key)), Identity("agent", name, 1 << 40), False, seen)
    told, heard = proof.begin(), b""
    sock.sendall(told)
    while not proof.peer and (data := sock.recv(1000)):
        answer = proof.receive(data)
        sock.sendall(answer)
        told, heard = told + answer, heard + data
    heard += sock.recv(1000)  # what only members are sent
    sock.close()
    return [frames(heard), frames(bytes.fromhex(said(host, int(port), told, tls=True)))]


def frames(data):
    count = 0
    while data:
        count, data = count + 1, data[4 + struct.unpack_from(">I", data)[0] :]
    return count


if __name__ == "__main__":
    what = {"scan": scan, "speaks_tls": speaks_tls, "knock": knock, "crowd": crowd, "claim": claim, "replay": replay}
    print(json.dumps(what[sys.argv[1]](*sys.argv[2:])))
