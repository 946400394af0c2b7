"""`phalanx data where`, `mix` and `bench`: what a run was served, from its record."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phalanx.cli.runs import find_folder
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.limits import limit_bytes
from phalanx.data.address import open_set
from phalanx.data.fetch import Corrupt, Fetcher, read_manifest
from phalanx.data.loader import DataLost, Loader, make_order
from phalanx.data.order import Order
from phalanx.data.samples import digest as digest_of
from phalanx.data.samples import places_of
from phalanx.data.selection import FILE, RunData
from phalanx.data.tokenizer import tokenizer_of
from phalanx.data.where import Found, where
from phalanx.observe.record import RunRecord
from phalanx.observe.story import Story
from phalanx.run.console import PlainConsole

PLACE_BYTES = 200  # working memory for each row that is located

T = TypeVar("T")


def find_run(path: Path | None) -> RunRecord:
    """Find the record at `path`, or the run of that name in ./runs; without a path, the newest there."""
    if path is None:
        runs = [file.parent for file in Path("runs").glob("*/meta.json")]
        if not runs:
            remedy = "name the record of a run, as `phalanx train` prints it"
            raise UserError("there is no run in it", field="RUN", value="runs", remedy=remedy)
        path = max(runs, key=lambda run: (run / "meta.json").stat().st_mtime_ns)
    elif not path.is_dir():
        path = find_folder(str(path), Path("runs"))
    for name in (FILE, "meta.json"):
        if not (path / name).is_file():
            remedy = "name the folder that `phalanx train` printed as the record"
            message = f"it is not the record of a run: it has no {name}"
            raise UserError(message, field="RUN", value=str(path), remedy=remedy)
    return RunRecord.open(path)


def _read(record: RunRecord, name: str, read: Callable[[], T]) -> T:
    """Read a file of the record; raise UserError if it is damaged."""
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "restore the file from a copy of the record"
        message = f"its {name} is damaged: {type(error).__name__}: {error}"
        raise UserError(message, field="RUN", value=str(record.path), remedy=remedy) from None


def _served(record: RunRecord) -> list[tuple[range, str, dict[str, int]]]:
    """List the steps that count, including those of the runs that this one continues: the places of each step, the
    digest of its bytes, and how much came from each source."""

    def read() -> list[tuple[range, str, dict[str, int]]]:
        for row in record.metrics():  # a damaged line is an error here, not one step less
            int(row["step"])
        story = Story(record.path)
        parts = [RunData.read(part.path) for part in story.parts]
        owners = (parts[bisect_right(parts, row["step"], key=lambda part: part.first_step) - 1] for row in story.rows)
        return [
            (data.places(row["step"]), str(row["data_digest"]), dict(row["served"]))
            for data, row in zip(owners, story.rows, strict=True)
        ]

    return _read(record, "metrics.jsonl", read)


def print_where(run: Path | None, step: int, rank: int | None, url: str | None, as_json: bool) -> None:
    """`url`: where the data set is now, if it was moved."""
    record = find_run(run)
    data = _read(record, FILE, lambda: RunData.read(record.path))
    job = _read(record, "job.json", lambda: Job.from_dict(record.job["job"]))
    _read(record, FILE, lambda: Order.from_dict(data.order))
    _check_step(data, job, step)
    places = list(data.places(step))
    if rank is not None:
        if not 0 <= rank < job.layout.world_size:
            remedy = f"name a rank from 0 to {job.layout.world_size - 1}"
            raise UserError(f"the run had {job.layout.describe()}", field="--rank", value=rank, remedy=remedy)
        mine = places_of(job.micro_indices(job.layout.coord(rank)), job.train.micro_batch)
        places = (mine + data.cursor(step)).tolist()
    if url is not None:
        data = replace(data, url=open_set(url, "--data").url)
    events = _read(record, "events.jsonl", lambda: [e for e in record.events() if e.get("type") == "data_substitute"])
    try:
        loader, out = data.open(), PlainConsole()
    except UserError as error:
        remedy = f"{error.remedy}; if it was moved, say where to: --data URL"
        field = "the data of the run" if url is None else "--data"
        raise UserError(error.message, field=field, value=data.url, remedy=remedy) from None
    try:
        found = list(where(loader, places, events))
    except (Corrupt, OSError) as error:
        remedy = "`phalanx data verify` lists what is damaged, and how to mend it"
        raise UserError(str(error), field="the data of the run", value=data.url, remedy=remedy) from None
    finally:
        loader.close()
    is_tokens = loader.manifest.is_tokens
    tokenizer = tokenizer_of(loader.fetcher.store, loader.manifest) if is_tokens else None
    for f in found:
        told = " ".join(map(str, f.row[:-1].tolist())) if is_tokens else _shapes(f.row)
        text: str | None = tokenizer.decode(f.row[:-1]) if tokenizer else told
        if as_json:
            row = {k: getattr(f, k) for k in ("place", "position", "source", "shard", "chunk", "offset", "replaces")}
            tokens = f.row.tolist() if is_tokens else None
            text = None if is_tokens and not tokenizer else text
            print(json.dumps({**row, "step": step, "text": text, "tokens": tokens}))
        else:
            instead = f", in place of sample {f.replaces}, whose chunk was corrupt" if f.replaces is not None else ""
            head = f"place {f.place}: {f.source}, {f.shard}, chunk {f.chunk}, item {f.offset}{instead}"
            out.print(head, style="bold", soft_wrap=True, markup=False)
            out.print(f"{text}\n", soft_wrap=True, markup=False, highlight=False)
    if not as_json and rank is None:
        out.print(_compared(record, data.places(step), step, found), soft_wrap=True)


def _check_step(data: RunData, job: Job, step: int) -> None:
    if not data.first_step <= step < job.train.steps:
        remedy = f"name a step from {data.first_step} to {job.train.steps - 1}"
        remedy += ", or the record of the run that this one continued" * bool(data.first_step)
        message = f"the run has {job.train.steps} steps" + f", and began at {data.first_step}" * bool(data.first_step)
        raise UserError(message, field="--step", value=step, remedy=remedy)


def _shapes(row: np.ndarray) -> str:
    return ", ".join(f"{name} {row[name][0].dtype}{list(row[name][0].shape)}" for name in row.dtype.names or ())


def _compared(record: RunRecord, places: range, step: int, found: list[Found]) -> str:
    """Compare the rows with the digest that the ranks reported for what they trained on."""
    trained = next((digest for those, digest, _ in _served(record) if those == places), None)
    if trained is None:
        return f"step {step} was not reached: this is what it would have been"
    same = int(trained, 16) == digest_of([f.row for f in found], [f.place for f in found])
    return "these are the bytes that the ranks trained on" if same else "NOT the bytes that the ranks trained on"


def print_mix(run: Path | None, as_json: bool) -> None:
    """Print what was planned and what was served, by source and stage."""
    record = find_run(run)
    data = _read(record, FILE, lambda: RunData.read(record.path))
    order = _read(record, FILE, lambda: Order.from_dict(data.order))
    sources = list(dict.fromkeys(s.source for s in order.streams))
    served: dict[int, Counter[str]] = {stage: Counter() for stage in range(len(order.stages))}
    for those, _, counts in _served(record):
        places = np.array(those)
        stages = order.stage(order.position(places))
        if stages[0] == stages[-1] and sum(counts.values()) == len(places):
            served[int(stages[0])].update(counts)
        else:  # the order knows the stage of each sample, and what a rank had that died before reporting
            for stage, stream in zip(stages.tolist(), order.locate(places)[0].tolist(), strict=True):
                served[stage][order.streams[stream].source] += 1
    rows: list[dict[str, Any]] = []
    for at, stage_ in enumerate(order.stages):
        total = served[at].total()
        for source in sources:
            quota = sum(q for q, s in zip(stage_.quotas, order.streams, strict=True) if s.source == source)
            count = served[at][source]
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
    """Measure how fast this machine reads a data set: verified, in the run's order, in one process."""
    store = open_set(url, "URL")
    manifest, _ = read_manifest(store, field="URL")
    try:
        order = make_order(manifest, seq_len, 0, 8)
    except UserError as error:
        raise UserError(error.message, field="--seq-len", value=seq_len, remedy=error.remedy) from None
    shards = [(e, s) for e in range(len(manifest.extents)) for s in range(manifest.num_shards(e))]
    set_bytes, memory = sum(manifest.shard_bytes(*shard) for shard in shards), limit_bytes()
    width = (seq_len if manifest.is_tokens else 1) + manifest.overlap
    most = memory // 4 // (width * manifest.dtype.itemsize + PLACE_BYTES)
    if batch > most:
        message = f"rows of {width * manifest.dtype.itemsize:,} bytes would fill this machine's memory"
        raise UserError(message, field="--batch", value=batch, remedy=f"give {max(1, most)} at most")
    loader = Loader(manifest, order, seq_len, Fetcher(store, manifest))
    began, times, rows = time.perf_counter(), [], 0
    with contextlib.closing(loader):
        try:
            while time.perf_counter() - began < seconds:
                start = time.perf_counter()
                loader.rows(range(rows, rows + batch))
                times.append(time.perf_counter() - start)
                rows += batch
        except DataLost as lost:
            raise UserError(str(lost), field="URL", value=url, remedy="see `phalanx data verify`") from None
    wall = time.perf_counter() - began
    size = rows * loader.width * manifest.dtype.itemsize
    figures: dict[str, Any] = {
        "rows_per_s": rows / wall,
        "items_per_s": rows * loader.width / wall,
        "mb_per_s": size / wall / 1e6,
        "first_batch_ms": times[0] * 1e3,
        "median_batch_ms": statistics.median(times) * 1e3,
        "read_mb": loader.fetcher.counters.bytes_read / 1e6,
        "set_mb": set_bytes / 1e6,
    }
    if as_json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<16} {value:,.1f}")
        if set_bytes < memory:
            print("the data set fits into this machine's memory: once read, it does not come from the store again")
