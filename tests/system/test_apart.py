"""A run whose process is not the command that was typed. The command may return or die, the run can be watched and
ended from elsewhere, and a refusal of it still appears where it was typed."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.runtime.conftest import alive_with
from tests.system.command import PHALANX, TINY, Command, phalanx, sets


def test_a_detached_run_is_attached_and_stopped(tmp_path):
    command = Command(tmp_path, "--detach", *sets(TINY))
    try:
        assert command.process.wait(120) == 0 and alive_with(command.token)
        command.process.poll = lambda: None  # the run does not need it
        command.wait_until(lambda: len(command.rows()) > 3)
        assert "is asked to save and end" in phalanx(tmp_path, "stop").stdout
        attached = phalanx(tmp_path, "attach", "last")
        assert (
            attached.returncode == 130 and "stopped after step" in attached.stderr and "saved up to" in attached.stderr
        )
        piped = subprocess.run(
            ["bash", "-c", f"{PHALANX} attach | head -1"], cwd=tmp_path, capture_output=True, text=True
        )
        assert piped.stdout.startswith("quickstart on") and "Error" not in piped.stderr and piped.returncode == 0
        assert "no process of this machine keeps its record" in phalanx(tmp_path, "stop").stderr
    finally:
        command.process.__dict__.pop("poll", None)
        ended = command.end()
    ended.check_clean()
    assert "phalanx attach" in ended.out and ended.summary["status"] == "stopped"


def test_what_refuses_a_detached_run_is_said_where_it_was_typed(tmp_path):
    ended = Command(tmp_path, "--detach", *sets(TINY | {"data.source": "no/such/folder"})).end()
    assert ended.code == 2 and "data.source" in ended.err and ended.runs == []
    ended.check_clean()


def test_a_run_whose_process_dies_is_told_as_failed(tmp_path):
    command = Command(tmp_path, "--detach", *sets(TINY))
    assert command.process.wait(120) == 0
    (head,) = [pid for pid in alive_with(command.token) if "phalanx.cli.main" in alive_with(command.token)[pid]]
    os.kill(head, signal.SIGKILL)
    attached = phalanx(tmp_path, "attach")
    assert attached.returncode == 1 and "error: the process that kept its record died" in attached.stderr
    command.end().check_clean()
