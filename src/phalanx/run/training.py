"""One run, from a resolved job to its record: prepare the data, start the processes, fold their reports. The listener
observes; it may add figures to a row, and ends the run if it raises."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import secrets
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from phalanx import __version__
from phalanx.checkpoint.catalog import Catalog
from phalanx.control.messages import Failure
from phalanx.control.verdict import remedy
from phalanx.core import document
from phalanx.core.checkpoint import BadCheckpoint, Facts
from phalanx.core.errors import RunFailed, TimeUp, UserError
from phalanx.core.job import Job
from phalanx.core.lease import Lease
from phalanx.core.limits import num_cores
from phalanx.core.shape import MFU_CONVENTION, MFU_EXPERTS
from phalanx.core.store import open_store
from phalanx.data import source
from phalanx.data.order import Order
from phalanx.data.selection import Position, RunData
from phalanx.data.validation import ValidationSet
from phalanx.observe import fold, traces
from phalanx.observe.goodput import Running
from phalanx.observe.provenance import provenance
from phalanx.observe.record import FULL, RunRecord
from phalanx.observe.steps import StepTable
from phalanx.run.follow import TOLD, Starter, write_head
from phalanx.run.host import refuse, refuse_hosts, warnings
from phalanx.run.planned import Forecast, rates
from phalanx.run.start import AUTO, FOLDER, NEW, Start, check_fits, check_room, find_start, next_generation, take_place
from phalanx.run.stop import Stop
from phalanx.run.validations import Validations, told
from phalanx.runtime.cluster import TROUBLED, WELL, Begin, Cluster, Entries, Shared, Superseded
from phalanx.runtime.joining import WAITING
from phalanx.runtime.journal import JournalError
from phalanx.runtime.launch import Adapter, Local

WORKER = "phalanx.train.worker:main"
KEEPER = "phalanx.checkpoint.keeper:main"
ENTRIES = Entries(
    worker=WORKER,
    store="phalanx.gate.meeting:serve",
    data="phalanx.data.service:main",
    preload=(WORKER.replace(":main", ":prepare"),),
)
MFU_CUSTOM = "6N FLOPs per token, N all parameters"
MFU = {"dense": MFU_CONVENTION, "moe": MFU_EXPERTS}  # by family, for families whose FLOPs are counted


class _Damaged(Exception):
    """The checkpoint to be loaded is damaged."""


SEE_EVENTS = "see events.jsonl of the run for what failed, and the logs of its nodes"


class Listener(Protocol):
    def starting(self, run_dir: Path) -> None: ...
    def status(self, text: str) -> None: ...  # what the run is waiting for
    def note(self, text: str) -> None: ...
    def facts(self, facts: dict[str, Any]) -> None: ...
    def measure(self, row: dict[str, Any]) -> Mapping[str, float] | None: ...  # returns figures to record with the row
    def step(self, row: dict[str, Any]) -> None: ...
    def checkpoint(self, event: dict[str, Any]) -> None: ...  # called when a checkpoint is committed
    def validation(self, event: dict[str, Any]) -> None: ...
    def finished(self, summary: dict[str, Any]) -> None: ...


def run_job(
    job: Job,
    origins: dict[str, str],
    listener: Listener,
    resume: str = "",
    forecast: Forecast | None = None,
    adapter: Adapter | None = None,
    listen: str = "",
    secret: Path | None = None,
    shared: Shared | None = None,
) -> dict[str, Any]:
    """Train to the end, from the checkpoint that `resume` names. Return the summary, which is also in the record and
    compares the forecast with the measurements. `adapter` starts the agents, which join at `listen`. Raise UserError,
    RunFailed or KeyboardInterrupt (TimeUp), each after everything has been cleaned up and recorded."""
    adapter = adapter or Local()
    if adapter.is_one_machine:
        refuse(job)
    else:
        refuse_hosts(job, adapter)
    with Stop(job.run.time_limit_s, adapter.time_left_s(job)) as stop:
        noticed: list[dict[str, Any]] = []
        continues = shared is not None and shared.kept is not None
        with stop.at_once():
            start = None if continues else find_start(resume, job, noticed.append, listener.note)
        if start and resume == AUTO and start.manifest.step == job.train.steps:
            listener.note(f"{start.place['url']}/{start.reader.name} is of the last step: nothing is left to do")
            return {"status": "done", "steps": 0}
        if start:
            check_fits(start, job)
        if not continues:
            check_room(start, job, resume, listener.note)
        record = _create_record(job, origins, forecast)
        write_head(record.path, adapter.reference())
        starter = Starter()
        starter.show(record.path)
        recorded = _Recorded(listener, record)
        run = _Run(job, record, recorded, stop, start, noticed, adapter, listen, starter, secret, shared)
        try:
            summary = run.go(resume)
            if forecast:
                summary["forecast"] = forecast.learn(summary)
            _finish(record, summary, listener)
        except BaseException as error:
            told = run.end(error)
            if told is error:
                raise
            raise told from error
        finally:
            run.close()
        listener.finished(summary)
    return summary


def _finish(record: RunRecord, summary: dict[str, Any], listener: Listener) -> None:
    """Write the summary. All steps are done, so a full disk does not make this a failed run."""
    try:
        record.finish(summary)
    except OSError as error:
        if error.errno not in FULL:
            raise
        listener.note(f"no summary could be written to {record.path}, so the run will look lost: {error.strerror}")


class _Recorded:
    """A listener whose notes also go to the record, for those who attach later."""

    def __init__(self, listener: Listener, record: RunRecord):
        self._record, self._note = record, listener.note
        self.starting, self.status, self.facts = listener.starting, listener.status, listener.facts
        self.step, self.finished = listener.step, listener.finished
        self.checkpoint, self.validation = listener.checkpoint, listener.validation
        self.measure = listener.measure

    def note(self, text: str) -> None:
        self._record.event({"type": TOLD, "text": text})
        self._note(text)


def _position(start: Start | None) -> Position | None:
    if not start:
        return None
    m = start.manifest
    return Position(m.step, m.cursor, m.order, m.data_version, m.seq_len)


def _create_record(job: Job, origins: dict[str, str], forecast: Forecast | None) -> RunRecord:
    meta = {
        "phalanx": __version__,
        **provenance(),
        "rates": rates(job),
        "forecast": forecast.expected() if forecast else None,
        "host": {"system": platform.platform(), "cores": num_cores()},
        "job_digest": job.digest(),
        "promise": job.promise,
        "mfu_convention": MFU.get(job.model.family, MFU_CUSTOM),
    }
    try:
        return RunRecord.create(Path(job.run.dir), job.name, meta, {"job": job.to_dict(), "origins": origins})
    except OSError as error:
        raise UserError(
            f"no run record can be made there: {error.strerror} ({error.filename or job.run.dir})",
            field="run.dir",
            value=job.run.dir,
            remedy="name a folder that you may write to, on a disk with space left",
        ) from error


def _median_phases(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase of a step, and of waiting for samples."""
    timed = [row["phases"] for row in rows if row["phases"]]
    phases = {name: median(phases[name] for phases in timed) for name in (timed[0] if timed else ())}
    return {"data": median(row["data_wait_s"] for row in rows), **phases}


class _Run:
    def __init__(
        self,
        job: Job,
        record: RunRecord,
        listener: Listener,
        stop: Stop,
        start: Start | None,
        noticed: Sequence[dict[str, Any]],
        adapter: Adapter,
        listen: str,
        starter: Starter,
        secret: Path | None,
        shared: Shared | None,
    ):
        self.secret, self.shared, self.kept = secret, shared, shared.kept if shared else None
        self.job, self.record, self.listener, self.stop, self.starter = job, record, listener, stop, starter
        self.adapter, self.listen, self.start, self.noticed = adapter, listen, start, noticed
        self.attempts = 0  # starts from a checkpoint so far
        self.durable: int | None = None  # last step with a checkpoint, once the controller has reported it
        self.place = job.checkpoint.dir or str(record.path / FOLDER)  # place of its checkpoints
        self.mark = secrets.token_hex(8)
        own = start is not None and start.manifest.job.get("name", job.name) == job.name
        self.lineage = (start.manifest.lineage if start and own else "") or secrets.token_hex(4)
        if self.kept:  # this is a run that another controller began
            args = self.kept.spec["worker"]["args"]
            self.mark, self.lineage, self.place = args["keeper"]["run"], args["facts"]["lineage"], args["checkpoints"]
        self.lease: Lease | None = None
        self.data: RunData | None = None
        self.launched = self.over = False
        self.running: set[int] = set()
        self.facts: fold.Fold = {}  # facts of all ranks that have reported
        self.form: dict[str, Any] = {"generation": 0, "replicas": range(job.layout.replica)}  # of the last generation
        self.memory = ""  # why recovery from snapshots in memory is off
        self.incidents = 0  # generations ended by a failure
        self.table = StepTable(job.layout.world_size, job.tokens_per_step)
        self.goodput = Running(time.time(), job.layout.world_size)
        self.num_steps, self.skips, self.first_loss = 0, 0, 0.0
        self.rows: deque[dict[str, Any]] = deque(maxlen=1000)  # the latest rows; the record has all
        self.entropy = 0.0
        self.validations: Validations | None = None

    def go(self, resume: str) -> dict[str, Any]:
        started = time.monotonic()
        self.listener.starting(self.record.path)
        for event in self.noticed:
            self._on_checkpoint_event(event)
        if resume == AUTO and not self.start and not self.kept:
            self.listener.note("no earlier checkpoint of this job was found: starting from the beginning")
        with self.stop.at_once():
            if self.kept:
                self.data = document.make(RunData, self.kept.spec["services"]["data"]["args"]["data"])
                self.data.write(self.record.path)
            else:
                self._build_source()
            if self.saves:
                store = open_store(self.place)
                self.lease = take_place(store, self.job, self.lineage, self.mark, self.listener.note)
            self._prepare_validation()
        self.launched = True
        self.starter.let_go(self.record.path)
        while True:
            try:
                ended = self._launch()
                break
            except _Damaged as damaged:
                with self.stop.at_once():
                    self._fall_back(str(damaged), resume)
        return {
            "status": "done",
            "durable": self._saved()[0],
            **self.figures(),
            **self._last_validation(),
            "wall_s": time.monotonic() - started,
            "start_s": ended["start_s"],
            "digests": [d["digest"] for d in ended["done"]],
            "peak_memory_bytes": max((d["memory_bytes"] for d in ended["done"]), default=0),
            "run_dir": str(self.record.path),
        }

    def _launch(self) -> dict[str, Any]:
        job, start = self.job, self.start
        if start:
            said = f"continuing from {start.place['url']}/{start.reader.name}, step {start.manifest.step:,}"
            if start.manifest.layout != job.layout:
                said += f", saved on {start.manifest.layout.describe()}"
            self.listener.note(said)
            self.record.event({"type": "resume", **start.place, "step": start.manifest.step})
        self.listener.status(f"starting {job.layout.world_size} ranks: loading torch")
        assert self.data
        begin = Begin()
        if start:
            generation = next_generation(open_store(self.place), start)
            begin = Begin(start.manifest.step, generation, start.manifest.ledger, start.place)
        data = self.data
        facts = Facts(self.lineage, data.version, data.order, data.first_step, data.first_place)
        cluster = Cluster(
            job,
            self.record.path,
            replace(ENTRIES, keeper=KEEPER if self.saves else ""),
            self._on_event,
            stop=lambda: self._is_stopped(cluster),
            gently=lambda: not self.stop.hurried,
            checkpoints=self.place,
            facts=dataclasses.asdict(facts),
            run=self.mark,
            data=dataclasses.asdict(data),
            validation=[each.to_dict() for each in self.validations.sets] if self.validations else (),
            adapter=self.adapter,
            listen=self.listen,
            secret=self.secret,
            shared=self.shared,
            hands_over=self._hands_over,
            unrecorded=lambda: self.table.unrecorded,
        )
        if self.attempts:
            cluster.folder = self.record.path / f"control-{self.attempts}"  # a new start has a new journal
        self.attempts += 1
        try:
            out = cluster.run(begin)
        except KeyboardInterrupt:
            self.over = True  # the user stopped the run, so no other controller continues it
            raise
        finally:
            cluster.close()
            if self.adapter.is_one_machine:  # all writers are gone, some of them killed while writing
                for left in self.record.path.rglob(".*.tmp"):
                    left.unlink(missing_ok=True)
            self.over |= bool(cluster.ended)
            self.durable = cluster.ended.get("durable")
            for row in self.table.finish():
                self._on_row(row)
        self._judge(out["ended"])
        return out

    def _is_stopped(self, cluster: Cluster) -> bool:
        """Return True if the run is to stop. Raise RunFailed if another run has taken over the place of the
        checkpoints."""
        if self.lease and self.lease.is_lost and not cluster.ended:
            owner = self.lease.owner
            if owner.get("run") != self.mark:  # otherwise it is another controller of this run, fenced elsewhere
                who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "a newer version"
                raise RunFailed(
                    f"{self.place} belongs to another run now ({who}): nothing can be saved there any more",
                    remedy="stop one of them; continue this one with --resume auto and another checkpoint.dir",
                )
        return self.stop.asked

    def _hands_over(self) -> bool:
        """Return True if this process was asked to leave and others continue the run."""
        return self.shared is not None and self.shared.standby and self.stop.number == signal.SIGTERM

    def _judge(self, ended: dict[str, Any]) -> None:
        """Raise the error that tells the user why the run was not done."""
        if ended["ok"]:
            return
        failure, reason, rank = Failure(**ended["failure"]), str(ended["reason"]), ended["rank"]
        if ended["cause"] == "start":
            raise _Damaged(reason)
        if failure.kind == "DataLost":
            remedy_ = "`phalanx data verify` lists what is damaged; restore it, or raise data.quarantine_limit"
            raise RunFailed(f"the data cannot be read any further: {failure.text}", remedy=remedy_)
        if failure.kind == UserError.__name__:  # found by a worker, but still the user's to fix
            raise UserError(failure.text)
        raise RunFailed(
            reason, rank=rank if rank >= 0 else None, log_tail=failure.tail, remedy=remedy(failure) or SEE_EVENTS
        )

    def _fall_back(self, reason: str, resume: str) -> None:
        """Fall back to the next older checkpoint, because the one to be loaded is damaged."""
        if self.start is None:  # another controller chose it, and this one does not know its next choice
            raise RunFailed(reason, remedy="begin again with --resume auto, from another checkpoint")
        self.start = self.start.next(reason, self._on_checkpoint_event)
        self.facts = {}
        self.table = StepTable(self.job.layout.world_size, self.job.tokens_per_step)
        self.running.clear()
        if self.start is None:
            start = self.job.checkpoint.start
            raise UserError(
                f"no good checkpoint is left; the last was refused: {reason}",
                field="checkpoint.start" if resume in ("", NEW) else "--resume",
                value=start if resume in ("", NEW) else resume,
                remedy="restore one from elsewhere, or begin anew with --resume new, which deletes none of them",
            )
        assert self.data
        self.data = RunData.plan(self.job, self.data.url, _position(self.start))
        self.data.write(self.record.path)

    def _saved(self) -> tuple[int | None, str]:
        """Return the step of the newest checkpoint of this run or of the run that it continues, and a description of
        it. The step is None if it cannot be known."""
        step, where = 0, ""
        if self.start:
            step, where = self.start.manifest.step, f"{self.start.place['url']}/{self.start.reader.name}"
        try:
            all_good = Catalog(open_store(self.place)).good() if self.launched else []
            own = next((f for f in all_good if f.lineage == self.lineage), None)
            if own and own.step >= step:
                step, where = own.step, f"{own.store.url}/{own.name}"
        except (BadCheckpoint, OSError, UserError) as error:
            if self.durable is None:
                return None, f"what is saved could not be read: {error}"
            if self.durable > step:
                step, where = self.durable, self.place
        return step, f"saved up to step {step}: {where}" if step else "nothing of it is saved"

    @property
    def saves(self) -> bool:
        return self.job.checkpoint.every_steps >= 0

    def close(self) -> None:
        if self.lease:
            self.lease.close()
        if self.shared:
            with contextlib.suppress(JournalError):  # then others notice the silence
                self.shared.journal.leave(done=self.over)

    def end(self, error: BaseException) -> BaseException:
        """Record how far the run came, and return the error for the caller. A run that was refused before its ranks
        started leaves nothing."""
        if isinstance(error, UserError) and not self.launched:
            self.record.close()
            shutil.rmtree(self.record.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.record.path.parent.rmdir()  # an empty parent was made for this run
            return error
        handed = isinstance(error, Superseded)
        stopped = isinstance(error, KeyboardInterrupt | BrokenPipeError) or self.stop.asked or handed
        saved, words = self._saved()
        if stopped and not handed and not isinstance(error, BrokenPipeError):
            begun = self.start.manifest.step if self.start else 0
            # A start that made no progress, or saved nothing, would do the same when repeated.
            further = self.num_steps and (saved is None or saved > begun)
            kind = TimeUp if self.stop.is_time_up and further else KeyboardInterrupt
            error = kind(f"{self.stop.why} after step {begun + self.num_steps} of {self.job.train.steps}; {words}")
        elif isinstance(error, RunFailed) and not handed:
            error = RunFailed(f"{error.reason}; {words}", rank=error.rank, log_tail=error.log_tail, remedy=error.remedy)
        elif isinstance(error, OSError) and not stopped:
            error = RunFailed(f"the record {self.record.path} cannot be written: {error.strerror}")
        with contextlib.suppress(OSError):
            status = "stopped" if stopped else "failed"
            about = {"status": status, "reason": str(error), "durable": saved}
            self.record.finish({**about, **self.figures()})
        return error

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run so far."""
        rows = list(self.rows)
        losses = [row["loss"] for row in rows[-10:] if "skipped" not in row] or [math.nan]
        out: dict[str, Any] = {"steps": self.num_steps, "unigram_entropy": self.entropy}
        if self.data and rows:
            out["epochs"] = Order.from_dict(self.data.order).epochs(self.data.cursor(rows[-1]["step"] + 1))
        if self.skips:
            out["skipped_steps"] = self.skips
        if rows and "expert_load" in rows[-1]:
            out["experts"] = {name: rows[-1][f"expert_{name}"] for name in ("load", "layer", "idle")}
        if self.memory:
            out["recovery_from_memory"] = self.memory
        if rows:
            middle = sorted(r["time_s"] for r in rows)[len(rows) // 2]
            out |= {
                "first_loss": self.first_loss,
                "last_loss": sum(losses) / len(losses),
                "median_step_s": middle,
                "phases": _median_phases(rows),
                "tokens_per_s": self.job.tokens_per_step / middle,
            }
            if self.table.peak_flops:
                out["mfu"] = out["tokens_per_s"] * self.table.flops_per_token / self.table.peak_flops
        return out

    def _build_source(self) -> None:
        def on_progress(size_bytes: int) -> None:
            self.listener.status(f"reading {self.job.data.source}: {size_bytes / 1e6:.1f} MB")

        built, self.entropy = source.prepare(self.job, self.record.path, on_progress, _position(self.start))
        self.data = RunData.read(self.record.path)
        self.listener.note(built)

    def _prepare_validation(self) -> None:
        if not self.job.validation.on:
            return
        assert self.data

        def on_progress(size_bytes: int) -> None:
            self.listener.status(f"reading what to validate on: {size_bytes / 1e6:.1f} MB")

        if self.kept:
            sets = [ValidationSet.from_dict(each) for each in self.kept.spec["worker"]["args"]["validation"]]
        else:
            sets = source.prepare_validation(self.job, self.record.path, on_progress, self.data)
        best = open_store(self.place) if self.saves and self.job.validation.keep_best else None
        self.validations = Validations(sets, self.job.validation.every_steps, self.lineage, best)
        for each in sets:
            self.listener.note(f"validation: {each.count:,} sequences of {each.name}")

    def _on_validation(self, said: fold.Fold) -> None:
        assert self.validations
        size = len(self.form["replicas"]) * self.job.layout.replica_size
        if not (event := self.validations.add(said, size)):
            return
        self.record.event(event)
        self.listener.note(told(event))
        self.listener.validation(event)
        if self.lease and self.lease.is_lost:  # it would replace another run's best
            return
        try:
            self.validations.remember()
        except OSError as error:
            self.listener.note(f"which checkpoint is the best could not be written to {self.place}: {error}")

    def _last_validation(self) -> dict[str, Any]:
        v = self.validations
        if v and (not v.last or v.last["step"] < self.job.train.steps):
            self.listener.note("the validation at the end is not complete: a replica was lost during it")
        return {"validation": v.last, "best_validation": v.best} if v and v.last else {}

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["type"].startswith(("checkpoint", "retention", "buddy")):
            event.pop("rank" if event["rank"] < 0 else "", None)
            self._on_checkpoint_event(event)
            return
        if event["type"] in ("form", "started", "note", "ended", "state") and "rank" not in event:
            self._on_decision(event)
            return
        if event["type"] == "facts":
            self._on_facts(event)
            return
        if event["type"] == "step":
            self._on_step(event)
            return
        if event["type"] == "validation":
            self._on_validation(event)
            return
        if event["type"] != "message":
            self.record.event(event)
            if event["type"] == "started" and event["rank"] >= 0:
                self.running.add(event["rank"])
                self._starting()
            elif event["type"] == "node" and event["what"] == "joined":
                for text in warnings(event):
                    self.listener.note(text)
            elif event["type"] == "node" and event["what"].startswith((TROUBLED, WELL)):
                self.listener.note(f"the controller {event['what']}")
            elif event["type"] == "node" and event["what"].startswith(WAITING):
                self.listener.note(f"node {event['node']} has {event['what']}")
            elif event["type"] == "listening" and not self.adapter.is_one_machine:
                self._tell_where(event)
            return
        body, rank = event["body"], event["rank"]
        kind = body.get("type")
        if kind in ("data_quarantine", "data_substitute"):
            self.record.event(body)
            if kind == "data_quarantine":
                self.listener.note(f"data: shard {body['shard']}, chunk {body['chunk']}: {body['reason']}; replaced")
        elif kind == "resumed":
            self.record.event({**body, "rank": rank})
        elif kind == "trace":
            try:
                traces.receive(self.record.path, rank, body)
            except (OSError, ValueError, KeyError, TypeError) as error:  # a full disk must not end the run
                self.listener.note(f"the trace of rank {rank} is lost: {error}")

    def _tell_where(self, event: dict[str, Any]) -> None:
        nodes, join, secret = event["nodes"], event["join"], self.record.path / "control" / "secret"
        self.listener.note(f"waiting for {nodes} nodes: phalanx agent --join {join} --secret {secret}")

    def _on_decision(self, said: dict[str, Any]) -> None:
        """Record a decision of the controller."""
        self.record.event({**said, "type": f"control {said['type']}"})
        if said["type"] == "form":
            self.form = said
        elif said["type"] == "note" and said.get("rung") == 6:
            self.listener.note(f"waiting: {said['text']}")
        elif said["type"] == "started":
            step, replicas = self.form["step"], len(self.form["replicas"])
            of = f"{replicas} of {self.job.layout.replica} replicas"
            if self.form["generation"] > 1:
                self.listener.note(f"continuing from step {step:,} with {of}: {self.form['reason']}")
            size = replicas * self.job.layout.replica_size
            for row in self.table.settle(self.form["generation"], step, size):
                self._on_row(row)
            self.incidents += self.form["rung"] >= 1
            if self.form["branch"]:
                self.num_steps -= self.form["last"] - step
            for row in self.table.complete():
                self._on_row(row)

    def _on_checkpoint_event(self, event: dict[str, Any]) -> None:
        self.record.event(event)
        kind = event["type"]
        if kind == "checkpoint_failed":
            tries = f", attempt {event['tries']}" if event.get("tries", 1) > 1 else ""
            self.listener.note(f"the checkpoint of step {event['step']:,} FAILED{tries}: {event['reason']}")
        elif kind in ("retention_refused", "checkpoint_not_removed"):
            self.listener.note(f"older checkpoints were kept: {event['checkpoint']}: {event['reason']}")
        elif kind == "checkpoint_memory":
            self.memory = f"off: the host's memory holds {event['slots']} of {event['wanted']} snapshots of each rank"
            self.listener.note(f"recovery from memory is {self.memory}")
        elif kind == "checkpoint_quarantined":
            self.listener.note(f"checkpoint {event['checkpoint']} is DAMAGED and was put aside: {event['reason']}")
        elif kind == "checkpoint_waits":
            self.listener.note(f"checkpoint {event['checkpoint']} is waited for: {event['reason']}")
        elif kind == "checkpoint_unreadable":
            self.listener.note(
                f"checkpoint {event['checkpoint']} CANNOT BE READ and is left as it is: {event['reason']}"
            )
        elif kind == "checkpoint":
            size, stall_ms = event["bytes"] / 1e6, event["stall_s"] * 1e3
            took = f"{size:,.1f} MB in {event['drain_s']:.2f} s, training waited {stall_ms:.1f} ms"
            self.listener.note(f"checkpoint of step {event['step']:,}: {took}")
            self.listener.checkpoint(event)

    def _starting(self) -> None:
        of = f"of {self.job.layout.world_size}"
        ready = fold.size(self.facts["ranks"]) if self.facts else 0
        self.listener.status(f"starting ranks: {len(self.running)} {of} running, {ready} {of} ready")

    def _on_step(self, said: fold.Fold) -> None:
        for row in self.table.add(fold.heard(said, time.time())):
            self._on_row(row)
        for noticed in self.table.events:
            self.record.event(noticed)
            self.listener.note(f"step {noticed['step']}: {noticed['type']} on ranks {noticed['ranks']}")
        self.table.events.clear()

    def _on_row(self, row: dict[str, Any]) -> None:
        assert self.data
        row["cursor"] = self.data.cursor(row["step"] + 1)
        present = len(self.form["replicas"]) * self.job.layout.replica_size
        at = row.get("time") or time.time()
        row["goodput"] = self.goodput.add(row["step"], row["time_s"], row["data_wait_s"], present, at)
        line, times = row.pop("record"), row.pop("rank_times")
        if self.validations and (loss := self.validations.take()) is not None:
            row["validation_loss"] = loss
        if line:
            self.record.ledger(line)
        else:  # missing steps are detected elsewhere; a gap must not end the run here
            self.record.event({"type": "ledger gap", "step": row["step"]})
            self.listener.note(f"step {row['step']}: no rank that knows its loss has reported it; the ledger has a gap")
        if skipped := row.get("skipped"):
            self._note_skip(row["step"], skipped)
        if own := self.listener.measure(row):
            row["own"] = dict(own)
        self.record.metric(row)
        if times:
            self.record.rank_times(row["step"], times, self.job.layout.world_size)
        self.first_loss = self.first_loss if self.num_steps else row["loss"]
        self.num_steps += 1
        self.rows.append(row)
        self.listener.step(row)
        if lost := self.record.take_dropped():
            self.record.event({"type": "record dropped", "step": row["step"], "reason": f"{lost:,} lines are lost"})
            self.listener.note(f"the disk of the record has room again; {lost:,} lines of the record are lost")

    def _note_skip(self, step: int, skipped: dict[str, Any]) -> None:
        self.skips += 1
        self.record.event({"type": "step skipped", "step": step, **skipped})
        places = ", ".join(f"{first} to {end - 1}" for first, end in skipped["places"])
        self.listener.note(
            f"step {step:,} was SKIPPED: {skipped['reason']}; suspected samples: places {places} "
            f"(`phalanx data where {self.record.path} --step {step}`)"
        )

    def _on_facts(self, said: fold.Fold) -> None:
        """Merge the facts of ranks. Ranks that replace others report again, and are ignored."""
        if self.facts and fold.overlap(self.facts["ranks"], said["ranks"]):
            return
        self.facts = fold.merged(self.facts, said) if self.facts else said
        self._starting()
        if fold.size(self.facts["ranks"]) == self.job.layout.world_size:
            self._all_facts(self.facts)

    def _all_facts(self, first: fold.Fold) -> None:
        """Take the facts of all ranks, which give the denominator of the MFU."""
        job = self.job
        counted = job.model.family in MFU
        flops = job.model.flops_per_token(job.train.seq_len) if counted else 6 * first["num_params"]
        peak = first["peak_flops"]
        self.table.flops_per_token, self.table.peak_flops = flops, peak
        facts = {
            "num_params": first["num_params"],
            "device": first["device"],
            "torch": first["torch"],
            "peak_flops": peak,
            "mfu": MFU.get(job.model.family, MFU_CUSTOM),
            "peak_source": f"{first['peak_source']}, sum over ranks",
        }
        self.record.event({"type": "facts", **facts})
        self.listener.facts(facts)
        self.listener.status("the first step")
