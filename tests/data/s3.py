"""An S3 server on loopback, and a proxy in front of it that misbehaves on request.

`PHALANX_TEST_S3=radosgw` takes Ceph's gateway instead of moto (`make test-s3`).
"""

import contextlib
import http.client
import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from pathlib import Path

KEY, SECRET = "phalanx-test-key", "phalanx-test-secret"
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"
FAILED = b"<?xml version='1.0'?><Error><Code>PreconditionFailed</Code><Message>changed</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=1)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def wait_for(what, ready, processes, seconds=60):
    until = time.monotonic() + seconds
    while not ready():
        ended = [p.args[0] for p in processes if p.poll() is not None]
        if ended or time.monotonic() > until:
            raise RuntimeError(f"{what} did not start" + (f": {ended[0]} has ended" if ended else ""))
        time.sleep(0.1)


@contextlib.contextmanager
def daemons():
    """Yield a list of processes to add to, and end them, the last first."""
    processes = []
    try:
        yield processes
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def moto():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with daemons() as processes:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for("moto", lambda: answers(url + "/moto-api/"), processes)
        yield url


CEPH_CONF = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
mon initial members = a
keyring = {dir}/keyring
run dir = {dir}
admin socket = {dir}/$name.asok
log file = {dir}/$name.log
crash dir = {dir}
public addr = 127.0.0.1
ms bind ipv4 = true
ms bind msgr1 = false
mon data = {dir}/mon
mon allow pool size one = true
mon max pg per osd = 2000
osd data = {dir}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd crush chooseleaf type = 0
"""


@contextlib.contextmanager
def radosgw():
    """Start one monitor, one storage daemon that keeps objects in memory, and the gateway; leave nothing behind."""
    missing = [name for name in ("ceph-mon", "ceph-osd", "radosgw", "ceph") if not shutil.which(name)]
    if missing:
        raise RuntimeError(f"{missing[0]} is not installed: apt install radosgw ceph-mon ceph-osd ceph-common")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="radosgw-") as folder, daemons() as processes:
        home, fsid = Path(folder), str(uuid.uuid4())
        conf = home / "ceph.conf"
        conf.write_text(CEPH_CONF.format(dir=home, fsid=fsid, mon_port=free_port()))
        (home / "mon").mkdir()
        (home / "osd").mkdir()

        def call(*command):
            subprocess.run(
                [*command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, cwd=home
            )

        def start(*command):
            with open(home / f"{command[0]}.out", "wb") as out:
                processes.append(subprocess.Popen([*command, "-c", str(conf)], stdout=out, stderr=out, cwd=home))

        keys = [("mon.", {"mon": "allow *"}), ("client.admin", {"mon": "allow *", "osd": "allow *", "mgr": "allow *"})]
        keys += [("osd.0", {"mon": "allow profile osd", "osd": "allow *"})]
        keys += [("client.rgw", {"mon": "allow rw", "osd": "allow rwx"})]
        for n, (name, caps) in enumerate(keys):
            flags = [x for kind, cap in caps.items() for x in ("--cap", kind, cap)]
            create = [] if n else ["--create-keyring"]
            call("ceph-authtool", "keyring", *create, "--gen-key", "-n", name, *flags)
        mon = next(line for line in conf.read_text().splitlines() if line.startswith("mon host")).split(" = ")[1]
        call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", mon, "monmap")
        call("ceph-mon", "--mkfs", "-i", "a", "-c", str(conf), "--monmap", "monmap", "--keyring", "keyring")
        start("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        call("ceph", "-c", str(conf), "osd", "new", osd, "0")
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "-c", str(conf))
        start("ceph-osd", "-f", "-i", "0")
        # tcp_nodelay: without it small reads take 40 ms each.
        start("radosgw", "-f", "-n", "client.rgw", f"--rgw-frontends=beast endpoint=127.0.0.1:{port} tcp_nodelay=1")
        url = f"http://127.0.0.1:{port}"
        wait_for("radosgw", lambda: answers(url), processes, 120)
        user = ["user", "create", "--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret={SECRET}"]
        call("radosgw-admin", "-c", str(conf), *user)
        yield url


def server():
    return radosgw() if os.environ.get("PHALANX_TEST_S3") == "radosgw" else moto()


def make_bucket(url, name):
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
    )
    client.create_bucket(Bucket=name)


class Proxy:
    """Forwards requests. `fault(method, path, nth)` says what goes wrong with the nth request of this kind: None, a
    number of seconds to wait, or one of "503", "403", "drop", "truncate", "short", "flip"."""

    def __init__(self, target):
        self.target, self.fault = target.removeprefix("http://"), lambda method, path, nth: None
        self.requests, self._lock, self._closed = Counter(), threading.Lock(), threading.Event()
        self._writing = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def handle_any(self):
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that went away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self):
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def handle(self, request):
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        asked = request.command, request.path, request.headers.get("range", "")
        with self._lock:
            self.requests[asked] += 1
            fault = self.fault(request.command, request.path, self.requests[asked])
        if isinstance(fault, float):
            self._closed.wait(fault)
        if fault == "drop":
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault in ("503", "403"):
            self._answer(request, int(fault), {}, SLOW_DOWN if fault == "503" else DENIED)
            return
        if request.command == "PUT" and "if-match" in request.headers:
            with self._writing:  # moto ignores it
                self._hand_on(request, body, fault)
            return
        self._hand_on(request, body, fault)

    def _hand_on(self, request, body, fault):
        wanted = request.headers.get("if-match")
        if wanted and self._tag(request) != wanted:
            self._answer(request, 412, {}, FAILED)
            return
        backend = http.client.HTTPConnection(self.target, timeout=30)
        try:
            # With its Host header, which is part of what was signed.
            backend.request(request.command, request.path, body, dict(request.headers))
            response = backend.getresponse()
            status, headers, data = response.status, dict(response.getheaders()), response.read()
        finally:
            backend.close()
        if request.command == "HEAD" or not data:
            self._answer(request, status, headers, data)
        elif fault == "truncate":
            self._answer(request, status, headers, data[: len(data) // 2], len(data))
        elif fault == "short":
            self._answer(request, status, headers, data[: len(data) // 2])
        elif fault == "flip":
            self._answer(request, status, headers, data[:-1] + bytes([data[-1] ^ 0x10]))
        else:
            self._answer(request, status, headers, data)

    def _tag(self, request):
        backend = http.client.HTTPConnection(self.target, timeout=30)
        try:
            backend.request("HEAD", request.path, headers={"Authorization": request.headers["authorization"]})
            return {name.lower(): value for name, value in backend.getresponse().getheaders()}.get("etag")
        finally:
            backend.close()

    def _answer(self, request, status, headers, data, said=None):
        request.send_response(status)
        left_out = {"transfer-encoding", "connection", "server", "date", "keep-alive"}
        if request.command != "HEAD":
            left_out.add("content-length")
        for name, value in headers.items():
            if name.lower() not in left_out:
                request.send_header(name, value)
        if request.command != "HEAD" and status != 204:
            request.send_header("Content-Length", str(len(data) if said is None else said))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)
        if said is not None:
            request.close_connection = True
