"""The transport: what is posted is not lost, and a server hears it once, however often connections break; peers that do
not know the secret get nothing and harm nothing."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.gate import porch
from phalanx.gate.porch import dialled
from phalanx.gate.proof import Token
from phalanx.gate.tls import Certificate, Tls
from phalanx.runtime import transport
from phalanx.runtime.secret import READ, WRITE, Identity, Secret
from phalanx.runtime.transport import Link, Loop, Server, Session
from phalanx.runtime.wire import WireError

SECRET, OTHER = (Secret(Path("secret"), bytes([i]) * 32) for i in (7, 8))
SCHEMAS = {"n": {"value": int}, "big": {"text": str}}


class Net:
    """A server and its links in one loop. `heard` and `said` record what was delivered at either end."""

    def __init__(self):
        self.loop, self.heard, self.said = Loop(), [], []
        self.server: Server | None = None
        self.ack = True

    def serve(self, incarnation=1, name="controller", secret=SECRET, on_message=None, **options):
        def hear(session, number, body):
            self.heard.append((session.peer.name, number, body["value"] if body["type"] == "n" else len(body["text"])))
            if number and self.ack:
                session.ack(number)

        me = Identity("controller", name, incarnation)
        self.server = Server(self.loop, secret, me, SCHEMAS, on_message or hear, **options)
        return self.server

    def link(self, name="a", incarnation=1, secret=SECRET, addresses=None, **options):
        def hear(session, number, body):
            self.said.append((name, number, body["value"] if body["type"] == "n" else len(body["text"])))

        addresses = addresses or [self.server.address]
        return Link(self.loop, secret, Identity("agent", name, incarnation), addresses, SCHEMAS, hear, **options)

    def until(self, happened, timeout=60.0):
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, "it did not happen"
            self.loop.turn(0.02)

    def values(self, name="a"):
        return [value for who, _, value in self.heard if who == name]

    def told(self):
        """Return what was delivered to links, without repeats after a lost connection."""
        return list({number: value for _, number, value in self.said}.values())


@pytest.fixture
def net():
    return Net()


def n(value):
    return {"type": "n", "value": value}


def all_acked(link):
    return lambda: link.outbox.acked == link.outbox.last


# -- delivery


def test_a_source_that_was_ended_in_the_same_round_is_not_called():
    """A node that starts anew closes its link while a connection of that link is ready."""
    loop, called = Loop(), []
    ends = [end for _ in range(2) for end in socket.socketpair()]

    def end_others(me, mask):
        called.append(me)
        for other in ends:
            if other is not me:
                loop.watch(other, 0)
                other.close()

    for end in ends:  # all can be written to
        loop.watch(end, WRITE, partial(end_others, end))
    loop.turn(0)
    assert len(called) == 1
    called[0].close()


def test_what_is_posted_arrives_once_and_in_order_in_both_directions(net):
    net.serve()
    link = net.link()
    for i in range(100):
        link.post(n(i))
    link.flush(60)
    assert net.heard == [("a", i + 1, i) for i in range(100)]
    session = net.server.sessions["a"]
    for i in range(100):
        session.post(n(i))
    net.until(lambda: session.outbox.acked == 100)
    assert net.said == [("a", i + 1, i) for i in range(100)]


def test_what_is_told_is_heard_or_lost(net):
    net.serve()
    link = net.link()
    link.tell(n(1))  # there is no connection yet
    net.until(lambda: link.session)
    link.tell(n(2))
    net.until(lambda: net.heard)
    assert net.heard == [("a", 0, 2)] and link.outbox.last == 0


def test_nothing_is_acknowledged_before_the_server_says_so(net):
    net.serve()
    net.ack, link = False, net.link()
    link.post(n(5))
    net.until(lambda: net.heard)
    with pytest.raises(TimeoutError, match=r"1 messages were not acknowledged in 0.05 s"):
        link.flush(0.05)
    net.server.sessions["a"].ack(1)
    link.flush(60)


def test_an_acknowledgement_does_not_overtake_what_was_posted_before_it():
    """Over a full connection, a node that was given up hears of that before anything that relies on it."""
    pushed: list[str] = []
    conn = SimpleNamespace(
        pending_bytes=0, push=lambda m: pushed.append(m["type"]), push_body=lambda b: pushed.append("post")
    )
    session = Session(Identity("aggregator", "x", 1))
    session.attach(conn)
    conn.pending_bytes = transport.WINDOW_BYTES
    session.post({"type": "fence"})
    session.ack(3)
    conn.pending_bytes = 0
    assert not session.tell({"type": "lease"}), "what was posted waits"
    session.pump()
    assert pushed == ["resume", "post", "ack"] and session.tell({"type": "lease"})
    session.attach(conn)
    assert pushed[4:] == ["resume", "post", "ack"]


@pytest.mark.parametrize("seed", range(8))
def test_a_server_that_is_killed_again_and_again_misses_nothing(net, seed):
    """What it has heard but not journaled dies with it; the next server knows what it has journaled, even if that was
    not acknowledged yet."""
    dice, journal = random.Random(seed), []
    waiting: list = []
    server = net.serve(on_message=lambda s, number, body: waiting.append((s, number, body["value"])))
    port, posted = server.address[1], dict.fromkeys("abc", 0)
    links = {name: net.link(name, seed=i) for i, name in enumerate(posted)}
    for incarnation in range(2, 10):
        for _ in range(dice.randrange(60)):
            name = dice.choice("abc")
            links[name].post(n(posted[name]))
            posted[name] += 1
            for _ in range(dice.randrange(3)):
                net.loop.turn(0.001)
            while waiting and dice.random() < 0.5:
                session, number, value = waiting.pop(0)
                journal.append((session.peer.name, session.peer.incarnation, number, value))
                if dice.random() < 0.7:
                    session.ack(number)
        positions = {name: (life, number) for name, life, number, _ in journal}
        net.server.close()
        waiting.clear()
        net.serve(
            incarnation, port=port, positions=positions, on_message=lambda s, k, b: waiting.append((s, k, b["value"]))
        )
    deadline = time.monotonic() + 10
    while any(not all_acked(link)() for link in links.values()) and time.monotonic() < deadline:
        net.loop.turn(0.01)
        for session, number, value in waiting:
            journal.append((session.peer.name, session.peer.incarnation, number, value))
            session.ack(number)
        waiting.clear()
    assert {name: [v for who, _, _, v in journal if who == name] for name in posted} == {
        name: list(range(count)) for name, count in posted.items()
    }


def test_cut_connections_lose_nothing_in_either_direction(net):
    net.serve()
    link, dice = net.link(), random.Random(3)
    net.until(lambda: link.session)
    session = net.server.sessions["a"]
    for i in range(300):
        link.post(n(i))
        session.post(n(i))
        if dice.random() < 0.3:
            net.loop.turn(0.001)
        if dice.random() < 0.1:
            with contextlib.suppress(AttributeError, OSError):  # it is cut already
                dice.choice([link.session, session]).conn.sock.shutdown(socket.SHUT_RDWR)
    link.flush(60)
    net.until(lambda: session.outbox.acked == 300)
    assert net.values() == net.told() == list(range(300))


def test_another_server_takes_over_where_the_first_one_was(net):
    first = net.serve(name="rack-1")
    second = net.serve(name="rack-2")
    link = net.link(addresses=[first.address, second.address])
    link.post(n(1))
    link.flush(60)
    first.close()
    link.post(n(2))
    link.flush(60)
    second.close()
    net.serve(2, name="rack-1", port=first.address[1], positions=first.positions())
    link.post(n(3))
    link.flush(60)
    assert net.values() == [1, 2, 3]


def test_a_process_that_was_replaced_is_not_heard(net):
    net.serve()
    new, old = net.link(incarnation=2), None
    new.post(n(2))
    new.flush(60)
    old = net.link(incarnation=1)
    old.post(n(1))
    with pytest.raises(TimeoutError, match="is there a later incarnation of this end"):
        old.flush(0.5)
    assert net.values() == [2] and "later incarnation than 1" in net.server.trouble


def test_a_server_that_was_replaced_is_not_listened_to(net):
    link = net.link(addresses=[net.serve(5).address])
    net.until(lambda: link.session)
    net.server.close()
    net.serve(4, port=net.server.address[1])
    link.post(n(1))
    with pytest.raises(TimeoutError, match="controller was replaced: this one has incarnation 4"):
        link.flush(0.5)
    assert net.heard == []


def test_what_one_link_has_learned_of_servers_others_of_its_process_know(net):
    """A node that joins anew must not fall to a controller that was replaced."""
    known = {}
    first = net.link(addresses=[net.serve(5).address], known=known)
    net.until(lambda: first.session)
    first.close()
    net.server.close()
    net.serve(4, port=net.server.address[1])
    second = net.link(known=known)
    second.post(n(1))
    with pytest.raises(TimeoutError, match="controller was replaced: this one has incarnation 4"):
        second.flush(0.5)
    assert net.heard == []


def test_a_later_incarnation_begins_anew(net):
    net.serve()
    for incarnation in (1, 2):
        link = net.link(incarnation=incarnation)
        link.post(n(incarnation))
        link.flush(60)
        link.close()
    assert net.heard == [("a", 1, 1), ("a", 1, 2)] and net.server.positions() == {"a": (2, 1)}


def test_who_connects_twice_is_one(net):
    net.serve()
    first = net.link()
    net.until(lambda: first.session)
    opened, closed = [], []
    net.server._on_open, net.server._on_close = opened.append, closed.append
    first.close = lambda: None  # as if its host had vanished
    second = net.link()
    second.post(n(1))
    second.flush(60)
    assert len(net.server.sessions) == 1 and closed[0] is opened[0]


def test_a_peer_that_is_forgotten_is_gone(net):
    net.serve()
    link = net.link()
    net.until(lambda: link.session)
    net.server.forget("a")
    net.until(lambda: not link.session)
    assert net.server.sessions == {} or net.server.sessions["a"].received == 0


def test_hundreds_at_once(net, monkeypatch):
    monkeypatch.setattr(porch, "MOMENT_S", 20)  # a peer that is slow because this machine stands still is no stranger
    net.serve()
    links = [net.link(f"node-{i}", seed=i) for i in range(300)]
    for i, link in enumerate(links):
        link.post(n(i))
    net.until(lambda: len(net.heard) == 300, 20)
    assert sorted(v for _, _, v in net.heard) == list(range(300)) and net.server.refused == 0


def test_a_peer_that_does_not_read_holds_nobody_up(net):
    """What it does not read waits, and it gets all of that later."""
    net.serve()
    slow, quick = net.link("slow"), net.link("quick")
    net.until(lambda: slow.session and quick.session)
    net.loop.watch(slow.session.conn, 0)
    session = net.server.sessions["slow"]
    for _ in range(7):
        session.post({"type": "big", "text": "x" * (2 << 20)})
    quick.post(n(1))
    quick.flush(60)
    assert session.conn.pending_bytes > 0
    net.loop.watch(slow.session.conn, READ, slow.session.conn._callback)
    net.until(lambda: session.outbox.acked == 7)
    assert [size for who, _, size in net.said if who == "slow"] == [2 << 20] * 7


def test_a_message_that_is_too_long_is_refused_at_its_sender(net):
    net.serve()
    with pytest.raises(WireError, match="over the limit"):
        net.link().post({"type": "big", "text": "x" * (9 << 20)})


@pytest.mark.parametrize("body", [{"type": "n", "value": "1"}, {"type": "m"}, {"value": 3}])
def test_a_body_of_the_wrong_form_ends_its_connection_alone(net, body):
    net.serve()
    bad, good = net.link("bad"), net.link("good")
    bad.post(body)
    good.post(n(1))
    good.flush(60)
    net.until(lambda: net.server.refused, 20)
    assert net.values("bad") == [] and net.values("good") == [1]


def test_pauses_grow_and_are_spread_by_the_seed():
    def pauses(seed, **options):
        class Recording(Loop):
            after = staticmethod(lambda seconds, callback: found.append((seconds, callback)))

        with socket.create_server(("127.0.0.1", 0)) as taken:
            closed = taken.getsockname()
        found: list = []
        link = Link(Recording(), SECRET, Identity("agent", "a", 1), [closed], SCHEMAS, print, seed=seed, **options)
        out = []
        for _ in range(12):
            while link._sock:
                link._loop.turn(0.1)
            out.append(found[-1][0])
            found[-1][1]()
        return out

    one = pauses(1)
    assert one == pauses(1) != pauses(2)
    assert 0.02 < one[0] <= 0.05 and 2.5 <= one[-1] <= 5.0 and 0.2 <= max(pauses(1, retry_s=0.4)) <= 0.4
    assert all(0.025 * 2**i <= pause <= 0.05 * 2**i for i, pause in enumerate(one[:7]))


# -- strangers


def hello(secret=SECRET, **changes) -> bytes:
    """Return a hello as a client would send it."""
    ours, theirs = socket.socketpair()
    transport.Secure(lambda *_: None, ours, secret, Identity("agent", "eve", 1), False, lambda *_: None)
    frame = theirs.recv(4096)
    ours.close(), theirs.close()
    return framed(json.dumps({**json.loads(frame[4:]), **changes}).encode())


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


SILENT = {
    "says nothing": [],
    "sends a byte now and then": [bytes([b]) for b in hello()[:40]],
    "sends half a hello": [hello()[:100]],
}
STRANGERS = {
    "speaks HTTP": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "speaks TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)],
    "sends noise": [random.Random(0).randbytes(5000)],
    "announces 4 GiB": [b"\xff\xff\xff\xff"],
    "announces more than a hello": [struct.pack(">I", 513)],
    "sends a pickle": [framed(pickle.dumps(print))],
    "sends a list": [framed(b"[1]")],
    "sends deep JSON": [framed(b"[" * 500)],
    "sends no text": [framed(b"\xff" * 100)],
    "has another secret": [hello(OTHER)],
    "has no proof": [hello(proof="")],
    "has a proof that is no hex": [hello(proof="zz")],
    "has the proof of somebody else": [hello(name="mallory")],
    "has a name that cannot be encoded": [hello(name="\ud800")],
    "has a role that cannot be encoded": [hello(role="\udc00")],
    "comes with an answer": [framed(b'{"type":"answer","proof":"00"}')],
    "comes with a message": [framed(b'{"type":"post","seq":1,"body":{"type":"n","value":1}}')],
}


@pytest.mark.parametrize(
    "pieces, handshake_s",
    [(pieces, 0.3) for pieces in SILENT.values()] + [(pieces, 60.0) for pieces in STRANGERS.values()],
    ids=[*SILENT, *STRANGERS],
)
def test_a_stranger_gets_nothing_and_harms_nothing(net, pieces, handshake_s):
    """A stranger that sends nothing wrong is given some time, others none."""
    server = net.serve(handshake_s=handshake_s)
    good = net.link()
    net.until(lambda: good.session)
    with socket.create_connection(server.address) as stranger:
        stranger.setblocking(False)
        began, got, count = time.monotonic(), None, 0
        waiting = list(pieces)
        while got is None and time.monotonic() < began + 30:
            if waiting:
                with contextlib.suppress(OSError):
                    stranger.send(waiting.pop(0))
            good.post(n(count))
            count += 1
            net.loop.turn(0.01)
            try:
                got = stranger.recv(100)
            except BlockingIOError:
                pass
            except ConnectionError:
                got = b""
        assert got == b"", "it was sent something, or was kept"
    good.flush(60)
    assert net.values() == list(range(count)) and server.refused == 1 and not server._porch.strangers
    assert "eve" not in server.sessions


def test_a_hello_on_which_the_proof_itself_raises_is_refused(net, monkeypatch):
    """A stranger may send something that nobody has thought of."""

    def token_of(self, role, name):
        raise ValueError("something that nobody thought of")

    server = net.serve()
    monkeypatch.setattr(Secret, "token_of", token_of)
    with socket.create_connection(server.address) as stranger:
        stranger.sendall(hello(Token("agent", "eve", bytes(32))))
        net.until(lambda: server.refused, 10)
        assert stranger.recv(100) == b""
    monkeypatch.undo()
    good = net.link()
    good.post(n(1))
    good.flush(60)


@pytest.mark.parametrize("error", [KeyError, TypeError, OverflowError, UnicodeError, AttributeError])
def test_a_handler_that_raises_on_what_a_member_sent_ends_that_connection_alone(net, capsys, error):
    def hear(session, number, body):
        if session.peer.name == "bad":
            raise error("nobody thought of it")
        heard.append(body["value"])

    heard, server = [], net.serve(on_message=hear)
    bad, good = net.link("bad"), net.link("good")
    bad.post(n(1))
    net.until(lambda: server.refused, 10)
    good.post(n(2))
    net.until(lambda: heard == [2], 10)
    said = capsys.readouterr().err
    assert "what bad sent was not understood" in said and "Traceback" in said


def test_a_server_with_a_state_to_keep_is_not_left_with_half_of_it(net):
    def hear(session, number, body):
        raise KeyError("a bug")

    net.serve(on_message=hear, exact=True)
    link = net.link()
    link.post(n(1))
    with pytest.raises(KeyError, match="a bug"):
        net.until(lambda: False, 10)


def test_a_hello_that_was_recorded_is_no_proof(net):
    server = net.serve(handshake_s=0.3)
    with socket.create_connection(server.address) as stranger:
        stranger.setblocking(False)
        stranger.send(hello() + framed(b'{"type":"answer","proof":"%s"}' % (b"00" * 32)))
        net.until(lambda: server.refused)
    assert server.trouble == "it does not know the cluster's secret" and not server.sessions


def test_a_whole_connection_that_was_recorded_is_no_proof(net):
    server = net.serve()
    proxy = Proxy(net.loop, server.address)
    link = net.link("eve", addresses=[proxy.address])
    link.post(n(1))
    link.flush(60)
    link.close()
    with socket.create_connection(server.address) as stranger:
        stranger.setblocking(False)
        stranger.send(b"".join(proxy.seen[True]))
        net.until(lambda: server.refused, 20)
    assert net.values("eve") == [1]


def test_a_false_server_learns_nothing_and_is_not_believed(net):
    false = net.serve(secret=OTHER)
    link = net.link()
    link.post(n(1))
    with pytest.raises(TimeoutError, match="is the cluster's secret the same there"):
        link.flush(0.3)
    assert net.heard == [] and not false.sessions


def test_a_server_that_says_nothing_is_left_for_the_next(net):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = net.link(addresses=[mute.getsockname(), net.serve().address], handshake_s=0.3)
        link.post(n(1))
        link.flush(20)
    assert net.values() == [1]


def test_an_address_that_is_cut_off_is_soon_left_for_the_next(net):
    """Long before the time of a handshake is over: a node that has lost a network is taken for dead in a few beats."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(3)]  # more than it keeps: what comes now is dropped
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        link = net.link(addresses=[full.getsockname(), net.serve().address], handshake_s=1000.0)
        net.until(lambda: link.session)
        link.close()
        for sock in waiting:
            sock.close()


def test_a_server_that_answers_without_the_secret_is_not_believed(net):
    ours, theirs = socket.socketpair()
    client = transport.Secure(net.loop.watch, ours, SECRET, Identity("agent", "a", 1), False, lambda *_: None)
    theirs.send(framed(json.dumps({**json.loads(hello(OTHER)[4:]), "type": "challenge"}).encode()))
    with pytest.raises(WireError, match="does not know the cluster's secret"):
        client.pull()
    with pytest.raises(AssertionError, match="before the proofs"):
        client.push(n(1))
    client.close(), theirs.close()


def test_a_crowd_of_strangers_does_not_keep_a_peer_out(net):
    server = net.serve()
    crowd = []
    for _ in range(300):
        crowd.append(socket.socket())
        crowd[-1].setblocking(False)
        crowd[-1].connect_ex(server.address)
    net.loop.turn(0.01)
    link = net.link()
    link.post(n(1))
    link.flush(60)
    assert len(server._porch.strangers) <= porch.MAX_STRANGERS
    [s.close() for s in crowd]


def test_it_is_on_loopback_unless_asked_otherwise(net):
    assert net.serve().address[0] == "127.0.0.1"
    assert net.serve(host="0.0.0.0").address[0] == "0.0.0.0"


# -- on the way


class Proxy:
    """A proxy between a link and its server. `mangle(frames)` gets the frames of each direction after the proofs, and
    returns those to pass on; `seen` has the frames by direction (True: to the server)."""

    PROOFS = {True: 2, False: 1}  # frames

    def __init__(self, loop, target, mangle=None, to_server=True):
        self.loop, self.target, self.mangle, self.to_server = loop, target, mangle, to_server
        self.seen: dict[bool, list[bytes]] = {True: [], False: []}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        loop.watch(self._listener, READ, self._accept)

    def _accept(self, mask):
        ends = (self._listener.accept()[0], socket.create_connection(self.target))
        for to_server in (True, False):
            source, sink = ends if to_server else ends[::-1]
            state = {"data": b"", "count": 0}
            self.loop.watch(source, READ, lambda _, a=source, b=sink, w=to_server, s=state: self._pass(a, b, w, s))

    def _pass(self, source, sink, to_server, state):
        try:
            data = source.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.seen[to_server].append(data)
        if not data:
            self.loop.watch(source, 0)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            return
        state["data"] += data
        frames = []
        while len(state["data"]) >= 4 and len(state["data"]) >= 4 + struct.unpack(">I", state["data"][:4])[0]:
            end = 4 + struct.unpack(">I", state["data"][:4])[0]
            frames.append(state["data"][:end])
            state["data"] = state["data"][end:]
        free = max(0, self.PROOFS[to_server] - state["count"])
        state["count"] += len(frames)
        if self.mangle and to_server == self.to_server and len(frames) > free:
            frames, self.mangle = frames[:free] + self.mangle(frames[free:]), None
        with contextlib.suppress(OSError):
            sink.sendall(b"".join(frames))


def flipped(frames):
    return [frames[0][:-2] + bytes([frames[0][-2] ^ 1]) + frames[0][-1:], *frames[1:]]


MANGLES = {
    "changed": flipped,
    "changed in its tag": lambda f: [f[0][:4] + bytes([f[0][4] ^ 1]) + f[0][5:], *f[1:]],
    "repeated": lambda f: [f[0], f[0], *f[1:]],
    "left out": lambda f: f[1:],
    "moved": lambda f: f[::-1],
    "cut short": lambda f: [struct.pack(">I", 3) + f[0][4:7]],
    "made up": lambda f: [framed(bytes(16) + b'{"type":"post","seq":1,"body":{"type":"n","value":666}}'), *f],
}


@pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "to the client"])
@pytest.mark.parametrize("mangle", MANGLES.values(), ids=MANGLES)
def test_a_frame_that_was_tampered_with_ends_the_connection_and_nothing_is_lost(net, mangle, to_server):
    server = net.serve()
    proxy = Proxy(net.loop, server.address, mangle, to_server)
    link, ended = net.link(addresses=[proxy.address]), []
    end = link._end
    link._end = lambda reason: end(reason) or ended.append(reason)
    for i in range(20):
        link.post(n(i))
    net.until(lambda: "a" in server.sessions)
    for i in range(20):
        server.sessions["a"].post(n(i))
    link.flush(60)
    net.until(lambda: server.sessions["a"].outbox.acked == 20)
    assert net.values() == net.told() == list(range(20))
    assert "on its way" in (server.trouble if to_server else ended[0])


def test_a_member_that_announces_too_much_is_ended_before_it_has_come(net):
    """Otherwise a captured token could fill the memory of a server."""
    server, good = net.serve(), net.link("good")
    bad = net.link("bad")
    net.until(lambda: bad.session and good.session)
    bad.session.conn.sock.send(struct.pack(">I", (8 << 20) + 17))
    net.until(lambda: server.refused, 10)
    assert server.trouble == f"a frame of {(8 << 20) + 17} bytes"
    good.post(n(1))
    good.flush(60)
    assert net.values("good") == [1]


def test_what_an_end_said_cannot_be_said_to_it(net):
    """Each direction has a key of its own."""
    pairs = [socket.socketpair() for _ in range(2)]
    ours, theirs = Identity("agent", "a", 1), Identity("controller", "c", 1)
    client = transport.Secure(net.loop.watch, pairs[0][0], SECRET, ours, False, lambda *_: None)
    server = transport.Secure(net.loop.watch, pairs[1][0], SECRET, theirs, True, lambda *_: None)
    (to_client, to_server) = (pair[1] for pair in pairs)
    to_server.send(to_client.recv(4096))
    server.pull()
    to_client.send(to_server.recv(4096))
    client.pull()
    to_server.send(to_client.recv(4096))
    server.pull()
    assert client.peer == theirs and server.peer == ours
    client.push(n(1))
    to_client.send(to_client.recv(4096))
    with pytest.raises(WireError, match="on its way"):
        client.pull()
    for end in (client, server, to_client, to_server):
        end.close()


def test_the_secret_is_not_on_the_wire(net):
    server = net.serve()
    proxy = Proxy(net.loop, server.address)
    link = net.link(addresses=[proxy.address])
    link.post(n(1))
    link.flush(60)
    wire = b"".join(b"".join(part) for part in proxy.seen.values())
    assert len(wire) > 500 and SECRET.key not in wire and SECRET.key.hex().encode() not in wire


# -- TLS


def test_tls_carries_the_same_and_hides_it(net):
    server = net.serve(encrypt=True)
    proxy = Proxy(net.loop, server.address)
    proxy.PROOFS, proxy._pass = {}, lambda a, b, w, s: _relay(net.loop, proxy, a, b, w)
    link = net.link(addresses=[proxy.address], encrypt=True)
    for i in range(50):
        link.post(n(i))
    link.post({"type": "big", "text": "find me " * (300 << 10)})
    link.flush(60)
    session = net.server.sessions["a"]
    session.post({"type": "big", "text": "x" * (3 << 20)})
    net.until(lambda: session.outbox.acked == 1)
    assert net.values() == [*range(50), 8 * (300 << 10)] and net.said == [("a", 1, 3 << 20)]
    assert b"find me" not in b"".join(proxy.seen[True]) and sum(map(len, proxy.seen[True])) > 2 << 20


def _relay(loop, proxy, source, sink, to_server):
    data = source.recv(1 << 16)
    proxy.seen[to_server].append(data)
    if data:
        sink.setblocking(True)
        sink.sendall(data)
    else:
        loop.watch(source, 0)


class Between:
    """A stranger on the way: it terminates TLS on both sides, with a certificate of its own, and reads what passes."""

    def __init__(self, address):
        self.target, self.seen = address, b""
        self.certificate = Certificate.make()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                ours = self.certificate.context().wrap_socket(self.listener.accept()[0], server_side=True)
                theirs = dialled(socket.create_connection(self.target), encrypt=True).sock
                theirs.do_handshake()
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)


def test_who_stands_between_with_another_certificate_reads_nothing(net):
    """The certificate's hash is in the proofs. Without it this relay could read and change everything."""
    server = net.serve(encrypt=True)
    between = Between(server.address)
    link = net.link(addresses=[between.address], encrypt=True)
    link.post({"type": "big", "text": "find me"})
    with pytest.raises(TimeoutError):
        link.flush(0.5)
    assert net.heard == [] and not server.sessions and b"find me" not in between.seen
    assert b"hello" in between.seen, "it did not even try"
    between.listener.close()


def test_who_speaks_no_tls_gets_nothing_where_it_is_asked_for(net):
    server = net.serve(encrypt=True, handshake_s=0.3)
    good = net.link("good", encrypt=True)
    plain = net.link("plain", handshake_s=0.3)
    good.post(n(1))
    plain.post(n(2))
    good.flush(60)
    with pytest.raises(TimeoutError):
        plain.flush(0.5)
    assert net.heard == [("good", 1, 1)] and "plain" not in server.sessions


def test_the_secret_is_asked_for_within_tls_too(net):
    net.serve(encrypt=True)
    link = net.link(encrypt=True, secret=OTHER)
    link.post(n(1))
    with pytest.raises(TimeoutError, match="is the cluster's secret the same there"):
        link.flush(0.5)
    assert net.heard == []


def own_address():
    """Return an address of this machine other than loopback; None: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
        return None if host.startswith("127.") else host
    return None


def test_beyond_loopback_all_is_encrypted_without_being_asked_for(net):
    host = own_address()
    if host is None:
        pytest.skip("this machine has no address but loopback")
    server = net.serve(host=host, handshake_s=0.5)
    link = net.link()
    link.post(n(1))
    link.flush(60)
    assert isinstance(server.sessions["a"].conn.sock, Tls) and isinstance(link._conn.sock, Tls)
    plain = net.link("plain", encrypt=False, handshake_s=0.5)
    plain.post(n(2))
    with pytest.raises(TimeoutError):
        plain.flush(1.0)
    assert net.heard == [("a", 1, 1)]


def test_a_server_of_all_interfaces_encrypts_what_comes_from_outside_only(net):
    server = net.serve(host="0.0.0.0")
    near = net.link("near", addresses=[("127.0.0.1", server.address[1])])
    near.post(n(1))
    near.flush(60)
    assert isinstance(server.sessions["near"].conn.sock, socket.socket)
    if host := own_address():
        far = net.link("far", addresses=[(host, server.address[1])])
        far.post(n(2))
        far.flush(60)
        assert isinstance(server.sessions["far"].conn.sock, Tls)


# -- names


def test_a_node_proves_its_own_name_and_no_other(net):
    server = net.serve(roles=("agent",))
    token = Token("agent", "node-1", SECRET.token_of("agent", "node-1"))
    own = net.link("node-1", secret=token)
    own.post(n(1))
    own.flush(60)
    forged = Token("agent", "node-2", token.key)  # its own key, under another's name
    other = net.link("node-2", secret=forged, handshake_s=0.5)
    other.post(n(2))
    with pytest.raises(TimeoutError):
        other.flush(0.6)
    assert net.heard == [("node-1", 1, 1)] and "node-2" not in server.sessions
    with pytest.raises(WireError, match="token of the agent 'node-1'"):
        token.token_of("agent", "node-2")


def test_a_node_cannot_be_the_server_of_others(net):
    """All it has is its token, so it can prove to nobody else that it is the controller."""
    net.serve(secret=Token("agent", "node-1", SECRET.token_of("agent", "node-1")))
    link = net.link("node-2")
    link.post(n(1))
    with pytest.raises(TimeoutError):
        link.flush(0.5)
    assert net.heard == []


def test_a_role_that_does_not_belong_there_takes_nobodys_session(net):
    """A node has the name of an aggregator."""
    server = net.serve(roles=("aggregator",))
    near = Link(net.loop, SECRET, Identity("aggregator", "local", 5), [server.address], SCHEMAS, lambda *_: None)
    net.until(lambda: near.session)
    intruder = net.link("local", incarnation=9)
    with pytest.raises(TimeoutError):
        intruder.post(n(1))
        intruder.flush(0.5)
    assert server.sessions["local"].peer.incarnation == 5 and net.heard == []
    assert "expected aggregator" in server.trouble
