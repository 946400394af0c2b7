"""Two controllers and the nodes of a run: the first controller is killed, stopped, or cut off from the server or from
the nodes. The run continues under the second; no step is lost, and the two never both act."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid

import pytest

from phalanx.core.ledger import GENESIS, Record
from phalanx.runtime.journal import read
from phalanx.runtime.journal_server import JournalServer
from phalanx.runtime.secret import load_secret
from tests.postgres.server import PASSWORD, Line, free_port
from tests.runtime.conftest import alive_with, wait_gone
from tests.system.command import PHALANX, TINY, Command, sets

STEPS = 600
LONG_S = 900.0
JOB = TINY | {
    "layout.replica": 2,
    "layout.tp": 1,
    "layout.ranks_per_node": 1,
    "recovery.on": "true",
    "recovery.beat_s": 1.0,
    "train.reduction": "exact",
    "train.global_batch": 4,
    "train.steps": STEPS,
    "checkpoint.every_steps": 100,
    "run.hang_timeout_s": 60,
}


class Side:
    """One controller, with files of its own, as on a host of its own."""

    def __init__(self, stage, name, *more, url):
        self.folder, self.port = stage.folder / name, free_port()
        self.folder.mkdir()
        load_secret(stage.secret)
        secret = self.folder / "secret"
        secret.write_bytes(stage.secret.read_bytes())
        secret.chmod(0o600)
        command = [PHALANX, "controller", *more, "--listen", f"127.0.0.1:{self.port}", "--journal", url]
        self.out = (self.folder / "out").open("w+")
        self.process = subprocess.Popen(
            [*command, "--secret", secret], cwd=self.folder, env=stage.env, stdout=self.out, stderr=self.out
        )

    def records(self):
        return sorted((self.folder / "runs").glob("[!.]*"))

    def rows(self) -> int:
        files = [run / "metrics.jsonl" for run in self.records()]
        return sum(len(file.read_text().splitlines()) for file in files if file.exists())

    def pids(self) -> list[int]:
        """Return the process that keeps the record, and the controller's."""
        found = [json.loads((run / "control" / "controller.json").read_text())["pid"] for run in self.records()]
        return [self.process.pid, *found[-1:]]

    def signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)

    def acts(self) -> bool:
        return "continuing the run" in self.said()

    def said(self) -> str:
        return (self.folder / "out").read_text()


class Stage:
    def __init__(self, folder, server, database):
        self.folder, self.secret = folder, folder / "secret"
        self.url = server.url(database)
        self.server, self.database = server, database
        self.token = uuid.uuid4().hex
        self.env = {**os.environ, "PGPASSWORD": PASSWORD, "PHALANX_TOKEN": self.token}
        self.agents = []

    def begin(self, url: str = "", steps: int = STEPS) -> tuple[Side, Side]:
        values = JOB | {"checkpoint.dir": self.folder / "saved", "train.steps": steps}
        a = Side(self, "a", *sets(values), "--standby", url=url or self.url)
        self.until(lambda: a.rows() or a.process.poll() is not None or "waiting for" in a.said())
        return a, Side(self, "b", "--standby", url=self.url)

    def join(self, *addresses: int) -> None:
        for name in ("x", "y"):
            at = ",".join(f"127.0.0.1:{port}" for port in addresses)
            command = [PHALANX, "agent", "--join", at, "--secret", self.secret, "--name", name, "--shared"]
            log = (self.folder / f"{name}.log").open("w")
            self.agents.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.folder))

    def until(self, happened, limit_s: float = LONG_S) -> None:
        deadline = time.monotonic() + limit_s
        while not happened():
            told = "".join(f"\n--- {file}:\n{file.read_text()[-1500:]}" for file in self.folder.glob("*/out"))
            assert time.monotonic() < deadline, told + "".join(f.read_text()[-800:] for f in self.folder.glob("*.log"))
            time.sleep(0.1)

    def close(self) -> None:
        for pid in alive_with(self.token):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
        wait_gone(self.token, 30.0)

    def check(self, sides: list[Side], clean) -> None:
        """Check that no step is lost, that no two controllers acted, and that the weights are those of an undisturbed
        run."""
        lines = [line for s in sides for run in s.records() for line in (run / "ledger.jsonl").read_text().splitlines()]
        ledger = {record.step: record for record in map(Record.from_line, lines)}
        assert sorted(ledger) == list(range(STEPS)), "the records lack steps"
        before = GENESIS
        for step in range(STEPS):
            assert ledger[step].previous == before, f"step {step} is not on the chain"
            before = ledger[step].hash()
        assert [ledger[step].loss_bits for step in range(STEPS)] == clean["loss_bits"]
        files = [run / "summary.json" for side in sides for run in side.records()]
        summaries = [json.loads(file.read_text()) for file in files if file.exists()]
        done = [summary for summary in summaries if summary["status"] == "done"]
        assert [summary["digests"] for summary in done] == [clean["digests"]]
        entries = list(read(JournalServer(self.url, "test")))  # each is verified
        terms = [entry.term for entry in entries]
        assert terms == sorted(terms) and len(set(terms)) > 1, "two controllers wrote in turns"
        forms = [d["generation"] for e in entries for d in e.body.get("decisions", ()) if d["kind"] == "Form"]
        assert set(forms) == {1}, "nobody had to form again"
        logs = "".join(p.read_text(errors="replace") for p in self.folder.rglob("*.log"))
        assert PASSWORD not in logs + "".join(side.said() for side in sides)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Run the same job undisturbed."""
    folder = tmp_path_factory.mktemp("clean")
    ended = Command(folder / "run", *sets(JOB | {"checkpoint.dir": folder / "saved"})).end(LONG_S)
    assert ended.code == 0, ended.err
    lines = (ended.runs[0] / "ledger.jsonl").read_text().splitlines()
    return {"digests": ended.summary["digests"], "loss_bits": [Record.from_line(line).loss_bits for line in lines]}


@pytest.fixture
def stage(tmp_path, server, database):
    stage = Stage(tmp_path, server, database)
    yield stage
    stage.close()


def finish(stage, *sides) -> None:
    stage.until(lambda: any(side.process.poll() == 0 for side in sides))
    stage.until(lambda: all(agent.poll() is not None for agent in stage.agents))


def test_the_first_is_killed(stage, clean):
    a, b = stage.begin()
    stage.join(a.port, b.port)
    stage.until(lambda: a.rows() > 10)
    a.signal(signal.SIGKILL)
    finish(stage, b)
    assert b.acts()
    stage.check([a, b], clean)


def test_the_first_stands_still_and_comes_back(stage, clean):
    a, b = stage.begin()
    stage.join(a.port, b.port)
    stage.until(lambda: a.rows() > 10)
    a.signal(signal.SIGSTOP)
    stage.until(lambda: b.acts())
    a.signal(signal.SIGCONT)
    stage.until(lambda: "standing by again" in a.said())
    finish(stage, b)
    stage.check([a, b], clean)


def test_the_first_is_cut_off_from_the_server(stage, clean):
    line = Line(stage.server.port)
    a, b = stage.begin(stage.server.url(stage.database, line.port))
    stage.join(a.port, b.port)
    stage.until(lambda: a.rows() > 10)
    line.cut()
    stage.until(lambda: b.acts() and "standing by again" in a.said())
    line.mend()
    finish(stage, b)
    line.close()
    stage.check([a, b], clean)


def test_the_first_is_cut_off_from_the_nodes(stage, clean):
    a, b = stage.begin()
    line = Line(a.port)
    stage.join(line.port, b.port)
    stage.until(lambda: a.rows() > 10)
    line.cut()
    stage.until(lambda: b.acts())
    finish(stage, b)
    line.close()
    stage.check([a, b], clean)


def test_the_first_is_asked_to_leave_and_the_second_to_stop(stage):
    a, b = stage.begin(steps=100_000)  # enough that it does not end by itself
    stage.join(a.port, b.port)
    stage.until(lambda: a.rows() > 5)
    a.process.terminate()
    assert a.process.wait(LONG_S) == 0 and "handed over" in a.said()
    stage.until(lambda: b.rows() > 5)
    command = [PHALANX, "stop", b.records()[-1]]
    subprocess.run(command, check=True, cwd=stage.folder, timeout=LONG_S)
    assert b.process.wait(LONG_S) == 130 and "saved up to step" in b.said()
    finish_agents = lambda: all(agent.poll() is not None for agent in stage.agents)  # noqa: E731
    stage.until(finish_agents)
