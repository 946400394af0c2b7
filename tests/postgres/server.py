"""Debian's PostgreSQL on loopback, in a folder of the test, and a connection to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

USER = "phalanx"
PASSWORD = "not-a-secret-of-anybody"


def programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Postgres:
    """A PostgreSQL server. It refuses to run as root: then it runs as the user that Debian's package creates."""

    def __init__(self) -> None:
        self.folder = folder = Path(tempfile.mkdtemp(prefix="phalanx-postgres-", dir="/dev/shm"))  # not a test of disks
        self.port, self.data, self._bin = free_port(), folder / "data", programs()
        (folder / "password").write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres")
        self._run(
            "initdb", "--no-sync", "-D", self.data, "-U", USER, "-A", "scram-sha-256", f"--pwfile={folder / 'password'}"
        )
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        self._run("pg_ctl", "-D", self.data, "-w", "-o", options, "-l", folder / "log", "start")

    def _run(self, program: str, *arguments: object) -> None:
        prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        command = [*prefix, str(self._bin / program), *map(str, arguments)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=120)

    def create(self, name: str) -> None:
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name}")

    def url(self, name: str, port: int = 0) -> str:
        return f"postgresql://{USER}@127.0.0.1:{port or self.port}/{name}"

    def close(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "stop")
        shutil.rmtree(self.folder)


class Line:
    """A TCP proxy. While it is cut it accepts everything and passes nothing on, so that nobody learns of the cut."""

    def __init__(self, port: int):
        self._to, self._cut, self._closed = port, threading.Event(), False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        """Mend the line. Earlier connections stay lost."""
        for sock in [*self._pairs]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._cut.clear()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for sock in [self._server, *self._pairs]:
            sock.close()

    def _serve(self) -> None:
        while not self._closed:
            if self._cut.is_set():
                time.sleep(0.05)
                continue
            ready = select.select([self._server, *self._pairs], [], [], 0.05)[0]
            for sock in ready:
                if self._cut.is_set():
                    break
                if sock is self._server:
                    self._accept()
                elif sock in self._pairs:
                    self._pass(sock)

    def _accept(self) -> None:
        near = self._server.accept()[0]
        try:
            far = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:
            near.close()
            return
        self._pairs[near], self._pairs[far] = far, near

    def _pass(self, sock: socket.socket) -> None:
        other = self._pairs[sock]
        try:
            data = sock.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for end in (sock, other):
            self._pairs.pop(end, None)
            end.close()
