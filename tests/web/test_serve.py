"""Serving: the printed address answers, a port that is taken is told with a remedy, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import UserError
from phalanx.web.serve import LESS_URGENT, _listen, beside


def children():
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_a_server_beside_a_run_ends_with_it(tmp_path):
    with beside(tmp_path) as address, urllib.request.urlopen(f"{address}api/runs", timeout=20) as answer:
        assert json.load(answer)["runs"] == []
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)


def test_a_server_beside_a_run_takes_what_the_ranks_leave(tmp_path):
    before = children()
    with beside(tmp_path) as address:
        assert address
        (server,) = children() - before
        assert os.getpriority(os.PRIO_PROCESS, server) == min(19, os.nice(0) + LESS_URGENT)
        assert os.getsid(server) == server, (
            "nice counts within a session only, where the kernel shares cores among them"
        )
        group = Path(f"/proc/{server}/autogroup")
        if group.exists() and group.read_text():
            assert group.read_text().endswith(f"nice {LESS_URGENT}\n")


@pytest.mark.parametrize("before", [b"", b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"], ids=["first", "second"])
def test_half_a_request_does_not_keep_others_out(tmp_path, before):
    """Connections that said nothing whole were kept for ever, and with 256 of them nobody else was answered."""
    with beside(tmp_path) as address:
        at = urllib.parse.urlsplit(address)
        with socket.create_connection((at.hostname, at.port), 60) as sock:
            sock.sendall(before)
            heard = sock.recv(1 << 16) if before else b""
            sock.sendall(b"GET / HT")
            while piece := sock.recv(1 << 16):
                heard += piece
        assert heard.startswith(b"HTTP/1.1 200" if before else b"")


def test_a_run_waits_for_no_server_that_hangs(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr("phalanx.web.serve.START_S", 0.2)
    monkeypatch.setattr("phalanx.web.serve.LEAVE_S", 0.2)
    monkeypatch.setattr(sys, "executable", str(hangs))
    began = time.monotonic()
    with beside(tmp_path) as address:
        assert address == ""
    assert time.monotonic() - began < 60


def test_a_run_ends_although_its_server_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.web.serve.LEAVE_S", 0.2)
    before = children()
    with beside(tmp_path) as address:
        assert address
        (server,) = children() - before
        os.kill(server, signal.SIGSTOP)
    assert not Path(f"/proc/{server}").exists()


def test_a_port_that_is_taken_is_told_and_the_usual_one_gives_way(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=r"--port = '127.0.0.1:\d+': no server can listen there.*\n.*remedy"):
            _listen("127.0.0.1", port)
        monkeypatch.setattr("phalanx.web.serve.PORT", port)
        with _listen("127.0.0.1", -1) as other:
            assert other.getsockname()[1] != port


def test_a_folder_that_is_not_there_is_told(tmp_path):
    out = CliRunner().invoke(app, ["dash", str(tmp_path / "no")])
    assert isinstance(out.exception, UserError) and "RUNS_DIR" in str(out.exception)


def test_grafana_json_is_printed():
    assert json.loads(CliRunner().invoke(app, ["dash", "--grafana"]).output)["panels"]
