"""The cost of writing and viewing the records of a run of 1,000,000 ranks over 10,000 steps. The times are synthetic
(log-normal, 2 %, with one rank that is three times as slow in one step); everything else is the real thing: the writer
that runs use, the server behind `phalanx dash`, and Chromium.

    ingest     values a second through the writer of rank x step tiles, CPU time of one core
    pictures   512 x 1,024 cells of any part, at every zoom, through the HTTP server, the decoding aside
    maxima     the one slow rank is in each picture that holds it
    page       first paint of the ranks' page in a fresh browser; memory of the server
    history    a chart of 1,000 points from a million steps: from the columns that the server keeps, and by SQL from
               the Parquet file that `phalanx runs query` reads

Bars: >= 1,000,000 values/s; every picture < 100 ms; the slow rank in all of them; first paint < 1 s; server < 1 GB;
history < 100 ms. The full size writes 18 GB, which are removed."""

from common import SMOKE, finish, machine, options  # isort: skip

import base64
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from phalanx.observe import fold
from phalanx.observe.record import RunRecord
from phalanx.observe.steps import StepTable
from phalanx.observe.tiles import FOLDER, TileWriter, decode
from phalanx.web.series import Columns

RANKS, STEPS, PICTURES, ROWS = (20_000, 300, 20, 20_000) if SMOKE else (1_000_000, 10_000, 200, 1_000_000)
REPEATS = 3
SLOW_RANK, SLOW_STEP, SLOWER = RANKS * 77 // 100 + 3, STEPS * 42 // 100 + 1, 3.0
BARS = {"values_per_s": 1e6, "picture_ms": 100.0, "paint_ms": 1000.0, "server_mb": 1000.0, "history_ms": 100.0}


def main():
    parser = options(__doc__)
    parser.add_argument("--folder", default=None, help="where the record is written; a temporary one by default")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="observe-scale-", dir=given.folder))
    try:
        measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder):
    job = {"name": "million", "train": {"steps": STEPS}, "layout": {"replica": RANKS}}
    record = RunRecord.create(folder, "million", {"started": 1.8e9}, {"job": job, "origins": {}})
    rate = ingest(record)
    reports = fold_reports()
    values = long_history()
    history, history_cpu = history_ms(values)
    asked = sql_ms(folder, values)
    print(f"{RANKS:,} ranks x {STEPS:,} steps on {machine()}\n")
    print(f"ingest of tiles                {rate / 1e6:8.1f} million values/s of one core")
    print(f"  folding single reports       {reports / 1e6:8.3f} million reports/s (each has nine values)")
    print(f"history, {ROWS:,} steps     {history:8.1f} ms for 1,000 points of seven series")
    print(f"  CPU time of that             {history_cpu:8.1f} ms")
    print(f"  by SQL from Parquet          {asked[0]:8.1f} ms, {asked[1]:.1f} ms of CPU time on all cores")
    server = subprocess.Popen(
        [sys.executable, "-m", "phalanx.cli.main", "dash", str(folder), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = server.stdout.readline().rpartition(": ")[2].strip().rstrip("/")
        name = record.path.name
        worst, median, cpu, seen, held = pictures(url, name, server.pid)
        paint = first_paint(url, name)
        memory = peak_mb(server.pid)
    finally:
        server.terminate()
        server.wait()
    print(f"pictures, {PICTURES} at all zooms     {worst[0]:8.1f} ms the slowest, {median:.1f} ms the median")
    print(f"  the slowest: {worst[1]:.1f} ms on a core, {worst[2]:.1f} ms in a queue for one, the rest for the disk")
    print(f"  on a core                    {cpu:8.1f} ms at most")
    print(f"the slow rank is in            {seen:8} of {held} pictures that hold it")
    print(f"first paint of its page        {paint if paint is not None else float('nan'):8.0f} ms")
    print(f"memory of the server           {memory:8.0f} MB, pages of files aside")
    ok = rate >= BARS["values_per_s"] and worst[0] < BARS["picture_ms"] and seen == held > 0
    ok = ok and paint is not None and paint < BARS["paint_ms"] and memory < BARS["server_mb"]
    finish(
        "observe_scale",
        ok and max(history, asked[0]) < BARS["history_ms"],
        ranks=RANKS,
        steps=STEPS,
        values_per_s=round(rate),
        reports_per_s=round(reports),
        picture_ms=round(worst[0], 2),
        picture_slowest_core_ms=round(worst[1], 2),
        picture_slowest_queue_ms=round(worst[2], 2),
        picture_median_ms=round(median, 2),
        picture_cpu_ms=round(cpu, 2),
        slow_rank_seen=[seen, held],
        paint_ms=paint,
        server_mb=round(memory),
        history_ms=round(history, 2),
        history_cpu_ms=round(history_cpu, 2),
        sql_ms=round(asked[0], 2),
        sql_cpu_ms=round(asked[1], 2),
    )


def ingest(record) -> float:
    """Write the whole table, and a metrics row for each step; return the tile writer's values per CPU-second."""
    rng = np.random.default_rng(0)
    tables = [(0.1 * rng.lognormal(0, 0.02, RANKS)).astype(np.float32) for _ in range(4)]
    writer, spent = TileWriter(record.path / FOLDER, RANKS), 0.0
    for step in range(STEPS):
        times = tables[step % len(tables)]
        if step == SLOW_STEP:
            times = times.copy()
            times[SLOW_RANK] = SLOWER * 0.1
        began = time.thread_time()
        writer.add(step, times)
        spent += time.thread_time() - began
        record.metric({"time": 1.8e9 + 0.2 * step, "step": step, "loss": 2.0, "time_s": 0.2, "generation": 1})
    assert writer.dropped == 0
    writer.close()
    record.finish({"status": "done"})
    return RANKS * STEPS / spent


def fold_reports() -> float:
    """Fold reports of single ranks, by nodes of eight, into one row of the table; return ranks per CPU-second."""
    ranks = min(RANKS, 20_000)
    whole = {"loss_sums": [1.0], "tokens": 1, "data_digest": "0"}
    report = {"grad_norm": 1.0, "lr": 1e-3, "time_s": 0.1, "whole": whole, "data_wait_s": 0.0, "data_ready": 4}
    report["phases"] = {"forward": 0.02, "backward": 0.03, "reduce": 0.04, "optimizer": 0.01}
    best = 0.0
    for _ in range(3):
        table, began = StepTable(ranks, 1), time.thread_time()
        rows = []
        for first in range(0, ranks, 8):
            said = [fold.fold_of(rank, {**report, "type": "step", "step": 0}) for rank in range(first, first + 8)]
            for one in fold.folded(said):
                rows += table.add(one)
        assert [row["loss"] for row in rows] == [1.0]
        best = max(best, ranks / (time.thread_time() - began))
    return best


def long_history() -> dict[str, np.ndarray]:
    rng, names = np.random.default_rng(1), ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "time_s", "data_wait_s")
    return {"time": np.arange(ROWS) * 0.5, "step": np.arange(ROWS), **{name: rng.random(ROWS) for name in names}}


def sql_ms(folder, values) -> tuple[float, float]:
    """Query the whole history and parts of it, grouped by DuckDB; return the slowest, each at its best of a few."""
    import duckdb
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(values), folder / "steps.parquet")
    database = duckdb.connect()
    database.execute("CREATE TABLE steps AS SELECT * FROM read_parquet(?)", [str(folder / "steps.parquet")])
    drawn = ", ".join(f"min({name}), max({name}), avg({name})" for name in values if name not in ("time", "step"))
    sql = f"SELECT max(time), max(step), {drawn} FROM steps WHERE time BETWEEN ? AND ? GROUP BY floor((time - ?) / ?)"
    worst, cpu = 0.0, 0.0
    for a, b in ((0.0, 1.0), (0.0, 0.5), (0.25, 0.75), (0.9, 1.0)):
        begin, end, tries = a * ROWS * 0.5, b * ROWS * 0.5, []
        for _ in range(REPEATS):
            began, spent = time.perf_counter(), time.process_time()
            found = database.execute(sql, [begin, end, begin, (end - begin) / 1000]).fetchall()
            tries.append((time.perf_counter() - began, time.process_time() - spent))
        assert 1000 <= len(found) <= 1001
        worst, cpu = max(worst, min(tries)[0]), max(cpu, min(t[1] for t in tries))
    return 1e3 * worst, 1e3 * cpu


def history_ms(values) -> tuple[float, float]:
    """Return the slowest of fifty charts over random parts of a long history, in wall and CPU time; each at its best of
    a few, so that other load on the machine does not count."""
    rng, columns = np.random.default_rng(1), Columns()
    columns.load(values)
    worst, cpu = 0.0, 0.0
    for number in range(50):
        a, b = sorted(rng.random(2) * ROWS * 0.5) if number else (0.0, ROWS * 0.5)
        tries = []
        for _ in range(REPEATS):
            began, spent = time.perf_counter(), time.thread_time()
            found = columns.query(a, b, 1000)
            tries.append((time.perf_counter() - began, time.thread_time() - spent))
        assert found["rows"]
        worst, cpu = max(worst, min(tries)[0]), max(cpu, min(t[1] for t in tries))
    return 1e3 * worst, 1e3 * cpu


def pictures(url, name, pid):
    """Ask for parts at all zooms, half of them around the slow rank. Each is requested a few times: the best wall time
    excludes other load on the machine, and the first CPU time of the server shows the cost of a cold request. Return
    the slowest (milliseconds of wall time, on a core, and in a run queue), the median, and the longest time on a
    core."""
    rng, times, first, seen, held = random.Random(2), [], [], 0, 0
    ask(url, name, 0, 1, 0, 1)  # opens the record
    for number in range(PICTURES):
        ranks, steps = int(RANKS ** rng.random()), int(STEPS ** rng.random())
        if number == 0:
            ranks, steps = RANKS, STEPS
        r0, s0 = rng.randrange(RANKS - ranks + 1), rng.randrange(STEPS - steps + 1)
        if number % 2:
            r0 = max(0, min(RANKS - ranks, SLOW_RANK - rng.randrange(ranks)))
            s0 = max(0, min(STEPS - steps, SLOW_STEP - rng.randrange(steps)))
        tries = []
        for _ in range(REPEATS):
            before = scheduled_ms(pid)
            took, found = ask(url, name, r0, r0 + ranks, s0, s0 + steps)
            tries.append((took, *(after - b for after, b in zip(scheduled_ms(pid), before, strict=True))))
        times.append(min(tries))
        first.append(tries[0][1])  # the tables may have to be read from disk
        (ra, rb), (sa, sb) = found["ranks"], found["steps"]
        if ra <= SLOW_RANK < rb and sa <= SLOW_STEP < sb:
            codes = np.frombuffer(base64.b64decode(found["codes"]), np.uint8)
            held, seen = held + 1, seen + bool(float(decode(codes.max())) > 0.95 * SLOWER)
    return max(times), sorted(times)[len(times) // 2][0], max(first), seen, held


def scheduled_ms(pid) -> tuple[float, float]:
    """Return how long the threads of a process and this thread have run on a core, and have waited in a queue for
    one."""
    tasks = [*Path(f"/proc/{pid}/task").iterdir(), Path("/proc/thread-self")]
    known = [(task / "schedstat").read_text().split() for task in tasks]
    return sum(int(ran) for ran, *_ in known) / 1e6, sum(int(waited) for _, waited, *_ in known) / 1e6


def ask(url, name, r0, r1, s0, s1):
    query = f"{url}/api/runs/{name}/heat?r0={r0}&r1={r1}&s0={s0}&s1={s1}&h=512&w=1024"
    began = time.perf_counter()
    with urllib.request.urlopen(query) as answer:
        body = answer.read()
    return 1e3 * (time.perf_counter() - began), json.loads(body)


def first_paint(url, name):
    """Return the milliseconds to the first contentful paint of the ranks' page; None: there is no browser."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if not program:
        print("without a browser: pip install playwright, apt install chromium")
        return None
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/runs/{name}/ranks")
        page.wait_for_selector("canvas[data-worst]", timeout=60_000)
        script = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        paint, worst = page.evaluate(script), float(page.locator("canvas[data-worst]").get_attribute("data-worst"))
        browser.close()
    assert worst > 0.95 * SLOWER, "the page does not show the slow rank"
    return round(paint)


def peak_mb(pid) -> float:
    """Return the anonymous memory of the process: pages of the tiles belong to the page cache."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
