"""The cost of operational faults: each fault of the list is injected into real checkpoints, data sets and runs, in a
folder and behind an S3 API (Ceph's gateway if it is installed, else moto behind a proxy that honours If-Match), and the
losses are counted. Then come random histories of two savers, a retention, a resume and a reader in one place, with
requests that fail before or after they took effect and actors that die.

"Before" is what a review of the version of 2026-11-15 lost to the same fault.

Bar: nothing is lost, in no row; 1,000 histories in a folder and 1,000 in a bucket lose no committed checkpoint and load
none of another run, and no older one than was there all the time; with `--resume auto` broken on purpose they do."""

from common import finish, machine  # isort: skip

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from durability_cases import interleave

from phalanx.checkpoint import second
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.index import CATALOG
from phalanx.core import lease
from phalanx.core.checkpoint import file_name
from phalanx.core.errors import UserError
from phalanx.core.held import travels_whole
from phalanx.core.job import CheckpointConfig, DataConfig, Job, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.store import Folder, open_store
from phalanx.data.build import build
from phalanx.data.fetch import read_manifest
from phalanx.data.selection import Position, RunData
from phalanx.data.tokenizer import Bytes
from phalanx.data.verify import verify
from phalanx.run import start as start_of
from phalanx.run.start import AUTO, find_start, take_place
from tests.cases import MOE, make_job
from tests.checkpoint.faults import committed
from tests.checkpoint.test_catalog import make
from tests.data import s3
from tests.pool import Pool
from tests.system.command import TINY, Command, sets

SMALL = {"chunk_items": 256, "shard_chunks": 8}


def job_at(store, root: Path) -> Job:
    run = RunConfig(dir=str(root / "runs"))
    return Job("bench", train=TrainConfig(steps=1000), run=run, checkpoint=CheckpointConfig(dir=store.url))


def saved(store, steps, lineage="aaaaaaaa", name="bench"):
    return [make(store, step, lineage=lineage, generation=1, job={"name": name}) for step in steps]


# -- the rows: each returns how much is lost, and of how much


def files_away(store, root: Path) -> tuple[int, int]:
    """Take rank files away while a run tries to resume, then put them back; count the checkpoints that no longer
    load."""
    names, kept = saved(store, (10, 20, 30)), {}
    for name in names:
        kept[name] = store.read(f"{name}/{file_name(0)}")
        store.remove(f"{name}/{file_name(0)}")
    start = find_start(AUTO, job_at(store, root), lambda event: None)
    while start:
        start = start.next(f"{start.reader.name}/{file_name(0)}: is missing", lambda event: None)
    Catalog(store).retain(1, lineage="aaaaaaaa")
    for name, data in kept.items():
        store.write(f"{name}/{file_name(0)}", data)
    start = find_start(AUTO, job_at(store, root), lambda event: None)
    good = [name for name in names if not second.read_again(store, name)]
    assert start and start.reader.name == names[-1]
    return len(names) - len(good), len(names)


def two_builds(store, root: Path) -> tuple[int, int]:
    """Let a build that was believed dead fail after another has committed; count the shards lost by the latter."""
    for name, seed in (("a", 1), ("b", 2)):
        (root / name).write_bytes(bytes(np.random.default_rng(seed).integers(97, 123, 40_000, np.uint8)))
    built = []

    def meanwhile(progress) -> None:
        if progress.done_bytes == progress.total_bytes and not built:
            held, lease._is_held = lease._is_held, lambda body: False
            try:
                built.append(build([("x", str(root / "a"))], store, Bytes(), workers=1, staging=root / "s1", **SMALL))
            finally:
                lease._is_held = held

    with contextlib.suppress(UserError):
        inputs = [("x", str(root / "b"))]
        build(inputs, store, Bytes(), workers=1, staging=root / "s2", on_progress=meanwhile, **SMALL)
    ((manifest, version),) = built
    assert read_manifest(store)[1] == version
    return len(verify(store, manifest, version)), manifest.num_shards(0)


def data_position(store, root: Path) -> tuple[int, int]:
    """Change the batch 8 -> 16, the nodes 8 -> 16 and the weights at step 30; count the places of the next 10 steps
    served twice or never."""
    for name in ("a", "b"):
        (root / name).write_bytes(name.encode() * 40_000)
    build([("x", str(root / "a")), ("y", str(root / "b"))], store, Bytes(), workers=1, staging=root / "s", **SMALL)
    wide = {"layout": Layout(replica=8, ranks_per_node=1)}

    def plan(batch: int, layout: Layout, weights: dict, position=None) -> RunData:
        train = TrainConfig(seq_len=16, global_batch=batch, micro_batch=1)
        stages = [{"at": 0, "weights": weights}]
        return RunData.plan(Job(train=train, layout=layout, data=DataConfig(stages=stages)), store.url, position)

    first = plan(8, wide["layout"], {"x": 1.0, "y": 1.0})
    at = Position(30, first.cursor(30), first.order, first.version, first.seq_len)
    second_run = plan(16, Layout(replica=16, ranks_per_node=1), {"x": 3.0, "y": 1.0}, at)
    places = [p for step in range(30) for p in first.places(step)]
    places += [p for step in range(30, 40) for p in second_run.places(step)]
    loader, again = first.open(), second_run.open()
    moved = int((loader.rows(range(240)) != again.rows(range(240))).any(1).sum())
    loader.close()
    again.close()
    return moved + len(set(range(400)) ^ set(places)) + len(places) - len(set(places)), 400


def two_runs(store, root: Path) -> tuple[int, int]:
    """Start another run in the same place, with its own retention; count the first run's checkpoints that are gone."""
    job = job_at(store, root)
    names, first = saved(store, (10, 20, 30)), take_place(store, job, "aaaaaaaa", "one", print)
    refused = 0
    try:
        take_place(store, job, "bbbbbbbb", "two", print)
    except UserError:
        refused = 1
    first.close()
    saved(store, (5, 15, 25, 35), "bbbbbbbb", "other")
    Catalog(store).retain(1, lineage="bbbbbbbb")
    start = find_start(AUTO, job, print)
    assert refused and start and start.manifest.lineage == "aaaaaaaa"
    return sum(bool(second.read_again(store, name)) for name in names), len(names)


def no_catalog(store, root: Path) -> tuple[int, int] | None:
    """Remove catalog.json, then tear it; count the checkpoints that are not found. None: a folder has no such file."""
    if isinstance(store, Folder):
        return None
    names = saved(store, (10, 20, 30))
    store.remove(CATALOG)
    missing = len(names) - len(Catalog(store).good())
    store.write(CATALOG, b'{"checkpoints": {"step')
    try:
        find_start(AUTO, job_at(store, root), print)
        missing += 3
    except UserError as error:
        missing += 3 * ("reindex" not in str(error))
    Catalog(store).index.rebuild()
    return missing + len(names) - len(Catalog(store).good()), 3


def late_writer(store, root: Path) -> tuple[int, int]:
    """Let a fenced writer add a checkpoint of a higher step; return 1 if that undoes steps of the run that
    continued."""
    for step, generation in ((40, 2), (50, 3), (60, 2)):
        make(store, step, f"g{generation}", generation=generation, lineage="aaaaaaaa", job={"name": "bench"})
    start = find_start(AUTO, job_at(store, root), print)
    return int(start is None or start.manifest.step != 50), 1


ROWS = {
    "rank files away during --resume auto": (files_away, "3 of 3 checkpoints"),
    "two builds into one address": (two_builds, "22 of 22 shards"),
    "another batch, node count, weights": (data_position, "240 places skipped"),
    "two runs in one checkpoint.dir": (two_runs, "all checkpoints of one"),
    "catalog.json gone or torn": (no_catalog, "all, in silence"),
    "a fenced-off writer's late checkpoint": (late_writer, "the newer generation"),
}


def stopped(number: int, root: Path, where: dict) -> tuple[int, int]:
    """Send a signal to a real run of two ranks without recovery; count the steps that it trained and did not save."""
    command = Command(root, *sets(TINY | {"checkpoint.every_steps": 100_000} | where))
    command.wait_until(lambda: len(command.rows()) > 20, 300)
    command.signal(number)
    ended = command.end(120)
    assert ended.code == 130 and "--resume auto" in ended.err, ended.err
    return len(ended.rows) - ended.summary["durable"], len(ended.rows)


FULL_DISK = """
import errno, os
def full(fd, data, *args, real=os.pwrite):
    if len(data) >= 64 and os.path.exists(os.environ["FULL_DISK"]):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(fd, data, *args)
os.pwrite = full
"""


def last_fails(root: Path) -> tuple[int, int]:
    """Fill the disk from the first checkpoint to the end; count the steps that are neither durable nor reported
    lost."""
    root.mkdir()
    (root / "sitecustomize.py").write_text(FULL_DISK)
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "FULL_DISK": str(root / "full")}
    command = Command(root, *sets(TINY | {"checkpoint.every_steps": 20, "train.steps": 400}), env=env)
    command.wait_until(lambda: committed(root), 300)
    (root / "full").touch()
    ended = command.end(300)
    durable = committed(root)[-1]
    assert durable < 400, "the run was done before the disk was full"
    print(f"  exit status {ended.code}: {ended.err.splitlines()[0]}")
    said = ended.code == 1 and str(durable) in ended.err and ended.summary["durable"] == durable
    return 0 if said else 400 - durable, 400 - durable


def imported(pool: Pool, root: Path) -> tuple[int, int]:
    """Import weights at step 1000; count the updates that a checkpoint three steps later claims but that were not
    made."""
    got = pool.run("tests.train.resume_cases:case_import", make_job((1, 2, 1), precision="fp32"), dir=str(root))[0]
    return got["about"]["updates"] - 3 + (got["again"] != got["straight"]), 3


def compressed(pool: Pool, root: Path) -> tuple[int, int]:
    """Send gradients as int8; count the parameters whose own error is above 5 %, or that were rounded but must not
    be."""
    answers = {}
    for codec in ("none", "int8"):
        job = make_job((2, 2, 1), model=MOE, precision="fp32", clip=0.0, compress=codec)
        pool.run("tests.train.engine_cases:first_gradients", job, stem=str(root / codec))
        answers[codec] = np.load(root / f"{codec}-0.npz")
    want, got = answers.values()
    errors = {name: np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name]) for name in want.files}
    bars = {name: 1e-5 if travels_whole(name, want[name].shape) else 5e-2 for name in errors}
    print(f"  largest error of a parameter: {max(errors.values()):.2%}")
    return sum(not errors[name] <= bars[name] for name in errors), len(errors)


def in_runs(root: Path, url: str) -> Iterator[tuple[str, str, list[tuple[int, int] | None]]]:
    """Yield the rows of real runs: the fault, the loss before, and the losses in a folder and in the bucket."""
    places = {"folder": {}, "bucket": {"checkpoint.dir": f"{url}/runs"}}
    for number, fault, before in (
        (signal.SIGINT, "Ctrl-C", "117 of 216 kept"),
        (signal.SIGTERM, "SIGTERM without recovery", "30 of 282 kept"),
    ):
        yield (
            fault,
            before,
            [
                stopped(number, root / f"{number}-{place}", {key: f"{value}/{number}" for key, value in where.items()})
                for place, where in places.items()
            ],
        )
    yield "the last checkpoint fails", "all since, exit status 0", [last_fails(root / "full"), None]
    with Pool(4) as pool:
        yield "weights imported at step 1000", "1,000 updates too many", [imported(pool, root), None]
        yield "int8 gradients, by parameter", "errors up to 135 %", [compressed(pool, root), None]


@contextlib.contextmanager
def bucket():
    """Yield the URL of a bucket, and the name of its server."""
    real = bool(shutil.which("radosgw"))
    with s3.radosgw() if real else s3.moto() as endpoint:
        s3.make_bucket(endpoint, "durability")
        proxy = None if real else s3.Proxy(endpoint)
        os.environ |= {"AWS_ACCESS_KEY_ID": s3.KEY, "AWS_SECRET_ACCESS_KEY": s3.SECRET, "AWS_REGION": "us-east-1"}
        os.environ["AWS_ENDPOINT_URL"] = proxy.url if proxy else endpoint
        try:
            yield "s3://durability", "radosgw" if real else "moto"
        finally:
            if proxy:
                proxy.close()


def histories(make_store, runs: int) -> dict[str, object]:
    began, wrong = time.perf_counter(), []
    totals = dict.fromkeys(("requests", "failures", "deaths", "loads", "committed"), 0)
    for seed in range(runs):
        with make_store(seed) as store:
            world, turns = interleave(store, seed)
        wrong += [f"seed {seed}: {each}" for each in world.wrong]
        counted = (turns.requests, turns.failures, turns.deaths, world.loaded, len(world.committed))
        totals = {key: totals[key] + value for key, value in zip(totals, counted, strict=True)}
    return {
        "runs": runs,
        "violations": len(wrong),
        **totals,
        "s": round(time.perf_counter() - began),
        "first": wrong[:3],
    }


def planted(runs: int) -> dict[str, int]:
    """Count the violations when `--resume auto` is broken on purpose; none would mean that the histories detect
    nothing."""
    first, candidates = start_of._first, start_of._candidates
    bugs = {
        "the job's name is ignored": ("_first", lambda found, job, on_event: first(found, "", on_event)),
        "the oldest comes first": ("_candidates", lambda catalogs: candidates(catalogs)[::-1]),
    }
    seen = {}
    for bug, (name, broken) in bugs.items():
        with mock.patch.object(start_of, name, broken):
            seen[bug] = histories(shm, runs)["violations"]
    return seen


@contextlib.contextmanager
def shm(seed: int):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Folder(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="20 histories each, no runs")
    parser.add_argument("--histories", type=int, default=1000)
    args = parser.parse_args()
    runs = 20 if args.smoke else args.histories
    print(f"{machine()}\n")
    ok, lost = not args.smoke and runs >= 1000, {}

    def show(fault: str, before: str, cells: list[tuple[int, int] | None]) -> None:
        lost[fault] = [cell and cell[0] for cell in cells]
        told = [f"{cell[0]} of {cell[1]}" if cell else "-" for cell in cells]
        print(f"{fault:<42}{before:<26}" + "".join(f"{each:>12}" for each in told), flush=True)

    with bucket() as (url, server), tempfile.TemporaryDirectory() as temporary:
        print(f"{'fault':<42}{'lost before':<26}{'folder':>12}{server:>12}")
        for number, (fault, (row, before)) in enumerate(ROWS.items()):
            cells = []
            for place in ("folder", "bucket"):
                root = Path(temporary) / f"{number}-{place}"
                root.mkdir()
                store = open_store(f"{url}/{number}" if place == "bucket" else str(root / "store"))
                cells.append(row(store, root))
            show(fault, before, cells)
        for fault, before, cells in () if args.smoke else in_runs(Path(temporary), url):
            show(fault, before, cells)

        @contextlib.contextmanager
        def remote(seed: int):
            yield open_store(f"{url}/history-{seed}")

        second.look = lambda store, name, reason="": second.read_again(store, name)  # a process each would be too slow
        figures = {"folder": histories(shm, runs), server: histories(remote, runs)}
        caught = planted(20)
    for place, told in figures.items():
        print(f"\n{place}: {json.dumps(told)}")
        ok &= told["violations"] == 0
    print(f"\nviolations with a bug planted: {json.dumps(caught)}")
    ok &= all(caught.values())
    ok &= not any(gone for cells in lost.values() for gone in cells)
    finish("durability", ok, lost=lost, histories=figures, planted=caught)


if __name__ == "__main__":
    main()
