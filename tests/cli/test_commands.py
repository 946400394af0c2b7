"""The command itself, in real processes: it is quick and quiet, and prints no colours outside a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

PHALANX = Path(sys.executable).with_name("phalanx")


def phalanx(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PHALANX, *args], capture_output=True, text=True, timeout=30, env={**os.environ, **env})


@pytest.mark.parametrize(
    "args, unwanted",
    [
        (["--help"], {"torch", "numpy", "rich", "pydantic"}),
        (["--version"], {"torch", "numpy", "rich"}),  # typer parses options with pydantic
        (["train", "--help"], {"torch", "numpy", "rich"}),
        (["spec", "schema"], {"torch", "numpy", "rich"}),
        (["train", "--explain"], {"torch", "numpy"}),
    ],
)
def test_a_command_imports_only_what_it_needs(args, unwanted):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "phalanx", *args], capture_output=True, text=True)
    imported = {line.split("|")[-1].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not imported & unwanted


@pytest.mark.parametrize("args, said", [(["trian"], "No such command 'trian'"), (["train", "--bogus"], "--bogus")])
def test_a_wrong_command_line_is_the_users_mistake(args, said):
    done = phalanx(*args)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_explain_says_where_each_value_comes_from():
    done = phalanx("train", "--explain", "--set", "train.steps=7", "--set", "optimizer.warmup_steps=2")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert re.match(r"train.steps +7 +--set +Number of optimizer updates", lines["train.steps"])
    assert re.match(r"model.dim +128 +preset tiny ", lines["model.dim"])
    assert re.match(r"layout.tp +2 +packaged quickstart.toml:\d+ ", lines["layout.tp"])
    assert re.match(r'train.recompute +"none" +default ', lines["train.recompute"])
    assert "replica 2 x shard 1 x tp 2 = 4 ranks" in done.stdout and "791,936 parameters" in done.stdout
    assert "\x1b" not in done.stdout and not re.search(r" $", done.stdout, re.MULTILINE)


def test_the_schema_is_json_that_describes_the_job_file():
    schema = json.loads(phalanx("spec", "schema").stdout)
    assert set(schema["properties"]) >= {"model", "layout", "train", "optimizer", "data", "run"}


@pytest.mark.parametrize("args", ["--help", "--version", "train --explain", "spec schema"])
def test_a_reader_that_has_gone_away_is_no_error(args):
    """`| head` leaves a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that the lost output shows only at the end
    done = subprocess.run([PHALANX, *args.split()], stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert done.stderr == ""


def in_terminal(args: list[str], columns: int, **env: str) -> str:
    """Return what the command writes to a terminal of that many columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **env}
    process = subprocess.Popen([PHALANX, *args], stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    written = b""
    try:
        while chunk := os.read(parent, 65536):
            written += chunk
    except OSError:  # the other end is closed, which ends a terminal
        pass
    os.close(parent)
    process.wait(30)
    return written.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_explain_fits_the_terminal(columns):
    text = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal(["train", "--explain"], columns))
    lines = text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    assert ("meaning" in lines[0]) == (columns == 120)
    assert any(line.startswith("optimizer.weight_decay ") for line in lines), "no field is broken in two"


def test_the_token_of_a_new_host_proves_its_name_and_no_other(tmp_path, monkeypatch, capsys):
    from phalanx.cli.nodes import nodes_token
    from phalanx.core.errors import UserError
    from phalanx.runtime.secret import Token, load_keys, load_secret

    secret, out = load_secret(tmp_path / "run" / "control" / "secret"), tmp_path / "token"
    nodes_token(tmp_path / "run", "c5", out)
    made = load_keys(out)
    assert isinstance(made, Token) and (made.role, made.name) == ("agent", "c5")
    assert made.token_of("agent", "c5") == secret.token_of("agent", "c5") and out.stat().st_mode & 0o777 == 0o600
    assert "--name c5" in capsys.readouterr().out and secret.path.read_text().strip() not in out.read_text()
    with pytest.raises(UserError, match="it has no secret"):
        nodes_token(tmp_path, "c5", out)
    with pytest.raises(UserError, match="no name of a node"):
        nodes_token(tmp_path / "run", "c5\nagent", out)


def test_a_run_whose_starter_is_gone_is_not_held_up_by_what_it_prints(tmp_path):
    """Its standard error is a pipe whose reader is gone."""
    (tmp_path / "logs").mkdir()
    body = "import sys; from pathlib import Path; from phalanx.run.follow import Starter; s = Starter();"
    body += "s.show(Path(sys.argv[1])); s.let_go(Path(sys.argv[1]));"
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", f"{body} sys.stderr.write('x' * 1_000_000)", tmp_path],
        env={**os.environ, "PHALANX_STARTER": str(writer)}, stderr=subprocess.PIPE, pass_fds=[writer],
    )  # fmt: skip
    os.close(writer)
    with open(reader) as said:
        assert said.read().split() == [str(tmp_path), "launched"]
    assert child.wait(60) == 0 and child.stderr.read() == b""
    assert (tmp_path / "logs" / "head.log").stat().st_size == 1_000_000
