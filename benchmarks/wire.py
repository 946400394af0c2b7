"""The cost of a trusted wire against an untrusted one, in turns, on this machine's loopback.

    form      a Gloo group of 8 ranks over the rendezvous of the nodes and their agents' encrypted links, against
              torch's TCPStore (an open port): real nodes and a real controller, at an address of this machine that is
              not loopback; all ranks on one node, and on two. Time of the slowest rank
    state     a snapshot to another process: TLS 1.3 against plain. Rate, and CPU-seconds per GiB of both ends
    message   a control message, posted and acknowledged, one after the other; and many at once
    greeting  a connection, from nothing to its first answer

Bar: forming a group of 8 costs at most 1.3x of TCPStore, on one node and on two (median of the ratios of neighbours).
The others are reported: encryption has the price that it has."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.gate.loop import Loop
from phalanx.gate.peers import Peers
from phalanx.gate.proof import Identity, Secret
from phalanx.gate.tls import Certificate, is_loopback
from phalanx.runtime.transport import Link, Server
from tests.runtime import cluster as real

BAR, RANKS, WAIT_S = 1.3, 8, 60
GROUPS = 3 if SMOKE else 40
STATE_BYTES = 16 << 20 if SMOKE else 1 << 30
RUNS = 1 if SMOKE else 5
MESSAGES, BURST, GREETINGS = (50, 100, 5) if SMOKE else (2000, 20_000, 200)
KEY = "5e" * 32
HERE = str(Path(__file__).parent.parent)


# -- groups


class Cluster(real.Cluster):
    """A cluster whose controller listens beyond loopback, so the agents' links are encrypted."""

    def start_controller(self) -> None:
        with self.log.open("ab") as log:
            host, port = self.recorder.server.address
            more = ("--aggregate", "--host", HOST, "--recorder", f"{host}:{port}")
            self.controllers.append(real.Controller(self.control, self.secret.path, *more, log=log))
        self.controller.wait_up(self.control)


def own_address() -> str:
    """Return an address of this machine, loopback if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def form(nodes: int) -> dict[str, float]:
    """Return the median time of both stores, and the median ratio of neighbouring rounds."""
    with tempfile.TemporaryDirectory(prefix="phalanx-wire-") as folder:
        layout = Layout(shard=RANKS, ranks_per_node=RANKS // nodes)
        real.TOYS = "benchmarks.wire_cases"
        patient = Policy(**{**real.QUICK, "form_ns": 10**12, "gather_ns": 10**12, "launch_ns": 10**12})
        cluster = Cluster(Path(folder), layout, patient, options={"entry": "member"}, groups=GROUPS, ranks=RANKS)
        try:
            for i in range(nodes):
                cluster.start_node(f"n{i}")
            kind = "formed groups"
            said = cluster.until(lambda: len(found := cluster.bodies(kind)) == RANKS and found, WAIT_S)
        finally:
            cluster.close()
    slowest = {kind: [max(times) for times in zip(*(b[kind] for b in said), strict=True)] for kind in ("ours", "tcp")}
    ratios = [ours / tcp for ours, tcp in zip(slowest["ours"], slowest["tcp"], strict=True)]
    middle, low, high = bootstrap(ratios)
    found = {kind: statistics.median(times) * 1e3 for kind, times in slowest.items()}
    return {"ours_ms": found["ours"], "tcp_ms": found["tcp"], "ratio": middle, "low": low, "high": high}


# -- state


GIVER = """
import sys, time, resource
from phalanx.gate.peers import Peers
data = memoryview(bytearray(int(sys.argv[2])))
def serve(stream):
    stream.receive()
    before = time.thread_time()
    stream.sendall(data)
    stream.send({"cpu_s": time.thread_time() - before})
gate = Peers(sys.argv[1], encrypt=sys.argv[3] == "tls").listen(serve)
print(gate.port, flush=True)
sys.stdin.read()
"""


def state(kind: str) -> dict[str, float]:
    with subprocess.Popen(
        [sys.executable, "-c", GIVER, KEY, str(STATE_BYTES), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as giver:
        port, room = int(giver.stdout.readline()), bytearray(STATE_BYTES)
        with Peers(KEY, encrypt=kind == "tls").dial(("127.0.0.1", port)) as stream:
            began, used = time.perf_counter(), time.thread_time()
            stream.send({})
            stream.fill(memoryview(room))
            took, used = time.perf_counter() - began, time.thread_time() - used
            used += stream.receive()["cpu_s"]
        giver.stdin.close()
    return {"mb_s": STATE_BYTES / 1e6 / took, "cpu_s_per_gib": used * (1 << 30) / STATE_BYTES}


# -- messages


def message(kind: str) -> dict[str, float]:
    """Time messages with both ends in one loop, so that only the work counts."""
    loop, secret = Loop(), Secret(Path(), bytes.fromhex(KEY))
    schemas = {"n": {"value": int}}

    def ack(session, number, body):
        session.ack(number)

    encrypt = kind == "tls"
    server = Server(loop, secret, Identity("controller", "c", 1), schemas, ack, encrypt=encrypt)
    link = Link(loop, secret, Identity("agent", "a", 1), [server.address], schemas, lambda *_: None, encrypt=encrypt)
    link.post({"type": "n", "value": 0})
    link.flush(60)
    times = []
    for i in range(MESSAGES):
        began = time.perf_counter()
        link.post({"type": "n", "value": i})
        link.flush(60)
        times.append(time.perf_counter() - began)
    began = time.process_time()
    for i in range(BURST):
        link.post({"type": "n", "value": i})
    link.flush(60)
    burst = time.process_time() - began
    link.close()
    server.close()
    return {"message_us": statistics.median(times) * 1e6, "burst_us": burst / BURST * 1e6}


def greeting(kind: str) -> float:
    peers = Peers(KEY, certificate=Certificate.make().pem, encrypt=kind == "tls")
    gate, times = peers.listen(lambda stream: stream.send({})), []
    for _ in range(GREETINGS):
        began = time.perf_counter()
        with peers.dial(("127.0.0.1", gate.port)) as stream:
            stream.receive()
        times.append(time.perf_counter() - began)
    gate.close()
    return statistics.median(times) * 1e3


def in_turns(measure) -> dict[str, dict[str, float]]:
    found = {"plain": [], "tls": []}
    for i in range(RUNS):
        for kind in ("plain", "tls") if i % 2 else ("tls", "plain"):
            found[kind].append(measure(kind))
    return {k: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for k, runs in found.items()}


HOST = own_address()


def main() -> None:
    options(__doc__).parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    print(machine())
    formed = {nodes: form(nodes) for nodes in (1, 2)}
    for nodes, f in formed.items():
        print(
            f"form a group of {RANKS} on {nodes} node(s): {f['ours_ms']:.1f} ms, TCPStore {f['tcp_ms']:.1f} ms, "
            f"ratio {f['ratio']:.2f} [{f['low']:.2f}, {f['high']:.2f}], bar {BAR}"
        )
    moved, said = in_turns(state), in_turns(message)
    greeted = in_turns(lambda kind: {"greeting_ms": greeting(kind)})
    print(f"{'':28}{'plain':>10}{'TLS 1.3':>10}{'ratio':>8}")
    rows = [("state, MB/s", moved, "mb_s"), ("state, CPU-s per GiB", moved, "cpu_s_per_gib")]
    rows += [("message and answer, us", said, "message_us"), ("message of many, CPU-us", said, "burst_us")]
    rows += [("connection, ms", greeted, "greeting_ms")]
    figures = {}
    for name, found, key in rows:
        plain, tls = found["plain"][key], found["tls"][key]
        print(f"{name:28}{plain:10.2f}{tls:10.2f}{tls / plain:8.2f}")
        figures[key] = {"plain": plain, "tls": tls, "ratio": tls / plain}
    encrypted = not is_loopback(HOST)
    if not encrypted:
        print("This machine has no address but loopback: the agents' links were not encrypted.")
    ok = encrypted and all(f["ratio"] <= BAR for f in formed.values())
    finish("wire", ok, bar=BAR, encrypted=encrypted, form=formed, **figures)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
