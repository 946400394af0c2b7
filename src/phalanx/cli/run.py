"""One run on this machine, from a resolved job to its record: checks that it fits, builds the corpus,
launches the ranks, folds their reports. The console only listens."""

from __future__ import annotations

import os
import platform
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from phalanx import __version__
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.shape import MFU_CONVENTION
from phalanx.data import corpus
from phalanx.observe.record import RunRecord
from phalanx.observe.steps import StepTable
from phalanx.runtime.launch import launch

WORKER = "phalanx.train.worker:main"
STORE = "phalanx.parallel.groups:serve_store"
GIB = 2**30


class Listener(Protocol):
    def starting(self, run_dir: Path) -> None: ...
    def facts(self, facts: dict[str, Any]) -> None: ...
    def step(self, row: dict[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, summary: dict[str, Any]) -> None: ...


def run_job(job: Job, origins: dict[str, str], listener: Listener) -> dict[str, Any]:
    """Train to the end; the summary that is also in the record. Raises UserError, RunFailed or
    KeyboardInterrupt, each after everything has been cleaned up and recorded."""
    check_memory(job)
    meta = {
        "phalanx": __version__,
        "python": platform.python_version(),
        "host": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
        "job_digest": job.digest(),
        "promise": job.promise,
        "mfu_convention": MFU_CONVENTION,
    }
    record = RunRecord.create(Path(job.run.dir), job.name, meta, {"job": job.to_dict(), "origins": origins})
    listener.starting(record.path)
    run = _Run(job, record, listener)
    try:
        with _Signals() as signals:
            summary = run.go(signals)
    except BaseException as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        record.finish({"status": status, "reason": str(error), **run.figures()})
        record.close()
        raise
    record.finish(summary)
    record.close()
    listener.finished(summary)
    return summary


class _Run:
    def __init__(self, job: Job, record: RunRecord, listener: Listener):
        self.job, self.record, self.listener = job, record, listener
        self.facts: dict[int, dict[str, Any]] = {}
        self.table: StepTable | None = None
        self.rows: list[dict[str, Any]] = []
        self.entropy = 0.0

    def go(self, signals: _Signals) -> dict[str, Any]:
        started = time.monotonic()
        self._prepare_corpus()
        ended = launch(
            self.job,
            worker_entry=WORKER,
            store_entry=STORE,
            preload=[WORKER.partition(":")[0]],
            run_dir=self.record.path,
            on_event=self._on_event,
            stop=lambda: signals.stop,
        )
        return {
            "status": "done",
            **self.figures(),
            "wall_s": time.monotonic() - started,
            "start_s": ended["start_s"],
            "digests": [d["digest"] for d in ended["done"]],
            "run_dir": str(self.record.path),
        }

    def figures(self) -> dict[str, Any]:
        """What is known of the run so far."""
        rows = self.rows
        out: dict[str, Any] = {"steps": len(rows), "unigram_entropy": self.entropy}
        if rows:
            middle = sorted(r["time_s"] for r in rows)[len(rows) // 2]
            out |= {
                "first_loss": rows[0]["loss"],
                "last_loss": sum(r["loss"] for r in rows[-10:]) / len(rows[-10:]),
                "median_step_s": middle,
                "tokens_per_s": self.job.tokens_per_step / middle,
            }
            if self.table and self.table.peak_flops:
                out["mfu"] = out["tokens_per_s"] * self.table.flops_per_token / self.table.peak_flops
        return out

    def _prepare_corpus(self) -> None:
        path = self.record.path / "corpus.bin"
        tokens = corpus.build(self.job.data.source, path, int(self.job.data.max_mb * 1e6))
        if self.job.model.vocab_size < corpus.VOCAB_SIZE:
            raise UserError(
                f"byte tokens need a vocabulary of {corpus.VOCAB_SIZE}",
                field="model.vocab_size",
                value=self.job.model.vocab_size,
                remedy=f"set model.vocab_size to at least {corpus.VOCAB_SIZE}",
            )
        text = corpus.Corpus(path, self.job.train.seq_len, self.job.seed)
        self.entropy = text.unigram_entropy()
        self.listener.note(f"corpus: {tokens:,} byte tokens from {self.job.data.source}")

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind != "message":
            self.record.event(event)
            return
        body, rank = event["body"], event["rank"]
        if body.get("type") == "facts":
            self.facts[rank] = body
            if len(self.facts) == self.job.layout.world_size:
                self._all_facts()
        elif body.get("type") == "step" and self.table:
            row = self.table.add(rank, body)
            if row:
                self.rows.append(row)
                self.record.metric(row)
                self.listener.step(row)
            for noticed in self.table.events:
                self.record.event(noticed)
                self.listener.note(f"step {noticed['step']}: {noticed['type']} on ranks {noticed['ranks']}")
            self.table.events.clear()

    def _all_facts(self) -> None:
        """Every rank has said what it runs on: the MFU's denominator is known."""
        first, job = self.facts[0], self.job
        dense = job.model.family == "dense"
        flops = job.model.flops_per_token(job.train.seq_len) if dense else 6 * first["num_params"]
        peak = sum(f["peak_flops"] for f in self.facts.values())
        self.table = StepTable(job.layout.world_size, job.tokens_per_step, flops, peak)
        facts = {
            "num_params": first["num_params"],
            "device": first["device"],
            "torch": first["torch"],
            "peak_flops": peak,
            "mfu": (MFU_CONVENTION if dense else "6N FLOPs per token") + f"; peak: {first['peak_source']}, sum over ranks",
        }
        self.record.event({"type": "facts", **facts})
        self.listener.facts(facts)


def check_memory(job: Job) -> None:
    """Refuse what cannot fit this host, with the figures, before anything starts: weights, gradients
    and two moments in the master precision per parameter, once per replica."""
    if job.model.family != "dense" or job.run.device not in ("cpu", "auto") or Path("/dev/nvidiactl").exists():
        return
    per_param = 32 if job.train.precision == "fp64" else 16
    need = job.model.num_params * per_param * job.layout.replica
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > total:
        raise UserError(
            f"weights, gradients and optimizer state of {job.model.num_params / 1e9:.1f}e9 parameters x "
            f"{job.layout.replica} replica(s) need {need / GIB:.1f} GiB; this host has {total / GIB:.1f} GiB "
            f"({free / GIB:.1f} GiB free)",
            field="model",
            value=f"{job.model.num_layers} layers of {job.model.dim}",
            remedy="choose a smaller model.preset, or run on accelerators",
        )


class _Signals:
    """Ctrl-C and SIGTERM ask for an orderly stop; a second one gets the default treatment."""

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: the caller handles signals
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.stop = True
        signal.signal(number, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


__all__ = ["RunFailed", "run_job"]
