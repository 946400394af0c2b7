"""`phalanx data where`, `mix` and `bench`: what a run was served, from its record."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cli.console import PlainConsole
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.store import open_store
from phalanx.data.fetch import Corrupt, Fetcher, read_manifest
from phalanx.data.loader import DataLost, Loader, make_order
from phalanx.data.order import Order
from phalanx.data.run import FILE, RunData
from phalanx.data.samples import digest, places_of
from phalanx.data.tokenizer import tokenizer_of
from phalanx.data.where import Found, where
from phalanx.observe.record import RunRecord


def find_run(path: Path | None) -> RunRecord:
    """The record at `path`; without one, the newest in ./runs."""
    if path is None:
        runs = [file.parent for file in Path("runs").glob("*/meta.json")]
        if not runs:
            remedy = "name the record of a run, as `phalanx train` prints it"
            raise UserError("there is no run in it", field="RUN", value="runs", remedy=remedy)
        path = max(runs, key=lambda run: (run / "meta.json").stat().st_mtime_ns)
    if not (path / FILE).is_file():
        remedy = "name the folder that `phalanx train` printed as the record"
        raise UserError(f"it is not the record of a run: it has no {FILE}", field="RUN", value=str(path), remedy=remedy)
    return RunRecord.open(path)


def print_where(run: Path | None, step: int, rank: int | None, as_json: bool) -> None:
    record = find_run(run)
    data, job = RunData.read(record.path), Job.from_dict(record.job["job"])
    _check_step(record, job, step)
    places = list(data.places(step))
    if rank is not None:
        if not 0 <= rank < job.layout.world_size:
            remedy = f"name a rank from 0 to {job.layout.world_size - 1}"
            raise UserError(f"the run had {job.layout.describe()}", field="--rank", value=rank, remedy=remedy)
        mine = places_of(job.micro_indices(job.layout.coord(rank)), job.train.micro_batch)
        places = (mine + step * data.global_batch).tolist()
    loader, out = data.open(), PlainConsole()
    events = [e for e in record.events() if e.get("type") == "data_substitute"]
    try:
        found = list(where(loader, places, events))
    except Corrupt as corrupt:
        raise UserError(str(corrupt), field="data", value=data.url, remedy="restore this shard") from None
    finally:
        loader.close()
    tokenizer = tokenizer_of(loader.fetcher.store, loader.manifest) if loader.manifest.is_tokens else None
    for f in found:
        text = tokenizer.decode(f.row[:-1]) if tokenizer else _shapes(f.row)
        if as_json:
            row = {k: getattr(f, k) for k in ("place", "position", "source", "shard", "chunk", "offset", "replaces")}
            tokens = f.row.tolist() if tokenizer else None
            print(json.dumps({**row, "step": step, "text": text, "tokens": tokens}))
        else:
            instead = f", in place of sample {f.replaces}, whose chunk was corrupt" if f.replaces is not None else ""
            head = f"place {f.place}: {f.source}, {f.shard}, chunk {f.chunk}, item {f.offset}{instead}"
            out.print(head, style="bold", soft_wrap=True, markup=False)
            out.print(text + "\n", soft_wrap=True, markup=False, highlight=False)
    if not as_json and rank is None:
        out.print(_compared(record, step, found), soft_wrap=True)


def _check_step(record: RunRecord, job: Job, step: int) -> None:
    if not 0 <= step < job.train.steps:
        remedy = f"name a step from 0 to {job.train.steps - 1}"
        raise UserError(f"the run has {job.train.steps} steps", field="--step", value=step, remedy=remedy)


def _shapes(row: np.ndarray) -> str:
    return ", ".join(f"{name} {row[name][0].dtype}{list(row[name][0].shape)}" for name in row.dtype.names or ())


def _compared(record: RunRecord, step: int, found: list[Found]) -> str:
    """With the digest that the ranks reported of what they trained on."""
    trained = next((row["data_digest"] for row in record.metrics() if row["step"] == step), None)
    if trained is None:
        return f"step {step} was not reached: this is what it would have been"
    same = int(trained, 16) == digest([f.row for f in found], [f.place for f in found])
    return "these are the bytes that the ranks trained on" if same else "NOT the bytes that the ranks trained on"


def print_mix(run: Path | None, as_json: bool) -> None:
    """Planned and served, source by source, stage by stage."""
    record = find_run(run)
    data = RunData.read(record.path)
    order = Order.from_dict(data.order)
    starts = [stage.start for stage in order.stages]
    sources = list(dict.fromkeys(s.source for s in order.streams))
    served: dict[int, dict[str, int]] = {}
    for row in record.metrics():
        first = row["step"] * data.global_batch
        stage = int(np.searchsorted(starts, order.position(first), side="right")) - 1
        for source, count in row["served"].items():
            counts = served.setdefault(stage, {})
            counts[source] = counts.get(source, 0) + count
    rows: list[dict[str, Any]] = []
    for at, stage_ in enumerate(order.stages):
        total = sum(served.get(at, {}).values())
        for source in sources:
            quota = sum(q for q, s in zip(stage_.quotas, order.streams, strict=True) if s.source == source)
            count = served.get(at, {}).get(source, 0)
            share = count / total if total else None
            rows.append({"stage": at, "from": stage_.start, "source": source, "planned": quota / stage_.block})
            rows[-1] |= {"served": share, "sequences": count}
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'stage':>5} {'from':>12} {'source':<24} {'planned':>8} {'served':>8} {'sequences':>12}")
    for r in rows:
        got = "-" if r["served"] is None else f"{r['served']:.2%}"
        start = f"{r['stage']:>5} {r['from']:>12,} {r['source']:<24}"
        print(f"{start} {r['planned']:8.2%} {got:>8} {r['sequences']:>12,}")


def print_bench(url: str, seq_len: int, batch: int, seconds: float, as_json: bool) -> None:
    """How fast this machine reads a data set: verified, in the run's order, in one process."""
    store = open_store(url)
    manifest, _ = read_manifest(store)
    loader = Loader(manifest, make_order(manifest, seq_len, 0, 8), seq_len, Fetcher(store, manifest))
    began, times, rows = time.perf_counter(), [], 0
    with contextlib.closing(loader):
        try:
            while time.perf_counter() - began < seconds:
                start = time.perf_counter()
                loader.rows(range(rows, rows + batch))
                times.append(time.perf_counter() - start)
                rows += batch
        except DataLost as lost:
            raise UserError(str(lost), field="data", value=url, remedy="see `phalanx data verify`") from None
    wall = time.perf_counter() - began
    size = rows * loader.width * manifest.dtype.itemsize
    figures: dict[str, Any] = {
        "rows_per_s": rows / wall,
        "items_per_s": rows * loader.width / wall,
        "mb_per_s": size / wall / 1e6,
        "first_batch_ms": times[0] * 1e3,
        "median_batch_ms": statistics.median(times) * 1e3,
        "read_mb": loader.fetcher.counters.bytes_read / 1e6,
    }
    if as_json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<16} {value:,.1f}")
