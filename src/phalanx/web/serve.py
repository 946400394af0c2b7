"""Serve the dashboard: pick a port, print the address, answer until the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.web.shelf import Shelf

PORT = 7474
LESS_URGENT = 10
MOST_OPEN = 256  # connections at once; others are asked to try again
PATIENCE_S = 5  # for a request, or the next one
START_S, LEAVE_S = 20.0, 5.0  # how long a run waits for its dashboard
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(root: Path, host: str, port: int, price: float | None, say: Callable[[str], None]) -> None:
    """Serve until the process ends. `port` 0: any free port; below 0: PORT, or any free one if that is taken."""
    try:
        import uvicorn

        from phalanx.web.app import create_app
    except ImportError as error:
        remedy = "pip install 'phalanx[web]'"
        raise UserError(f"the dashboard needs {error.name}, which is not installed", remedy=remedy) from None
    token = "" if host in LOOPBACK else secrets.token_urlsafe(24)
    _give_way()
    with _listen(host, port) as listening:
        address = f"http://{_named(host)}:{listening.getsockname()[1]}/"
        say(f"dashboard of {root}: {address}" + (f"?token={token}" if token else ""))
        config = uvicorn.Config(
            create_app(Shelf(root, price), token),
            http=_hasty(),
            log_level="warning",
            access_log=False,
            limit_concurrency=MOST_OPEN,
            timeout_keep_alive=PATIENCE_S,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _hasty() -> type[asyncio.Protocol]:
    """Return a protocol that ends connections without a whole request, because a few silent ones would keep all others
    out."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Hasty(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.loop.call_later(PATIENCE_S, self._look, None)

        def _look(self, before: object) -> None:
            """`before`: the request that was answered last when it looked the last time."""
            if self.transport.is_closing():
                return
            if self.cycle is before and (before is None or before.response_complete):
                self.transport.close()
            else:
                self.loop.call_later(PATIENCE_S, self._look, self.cycle)

    return Hasty


def _give_way() -> None:
    """Let ranks on this machine go first. The kernel may divide cores among sessions, and `nice` works within one."""
    os.nice(LESS_URGENT)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(LESS_URGENT))


@contextlib.contextmanager
def beside(root: Path) -> Iterator[str]:
    """Serve from a separate process that ends with this one, and yield the address; "": it did not start in time. A run
    never waits longer than START_S and LEAVE_S for it."""
    command = [sys.executable, "-P", "-m", "phalanx.cli.main", "dash", str(root), "--port", str(-1), "--until-closed"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin and process.stdout
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(START_S)
        line = process.stdout.readline() if ready else ""
        yield line.rpartition(": ")[2].strip()
    finally:
        process.stdin.close()
        process.terminate()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [PORT, 0] if port < 0 else [port]
    error: OSError | None = None
    for number in wanted:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(128)
            return listening
        except OSError as failed:
            listening.close()
            error = failed
    remedy = "name another one with --port, or 0 for any free one"
    raise UserError(f"no server can listen there: {error}", field="--port", value=f"{host}:{port}", remedy=remedy)


def _named(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
