"""The cost of observing a training step.

    calls      a worker's own calls for metrics (marks of phases, the report of a step, its way into the channel),
               thread CPU time, against the step
    on, off    the same steps with these calls and without, in turns, CPU time of the process
    browsers   a real run with ten clients of the dashboard, which follow it as the page does, in turns with none; the
               server is stopped (SIGSTOP) under them for two turns and killed in the end, and the run must not notice

Bars: calls < 0.5 % of the step; on / off: upper end of the 95 % interval <= 1.02; ten browsers against none: upper end
of the interval of the step time <= 1.05 (real browsers are on other machines: the clients here only take idle time of
the cores, as the server itself does); the run ends with status 0."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from phalanx.core.shape import ModelConfig
from phalanx.observe.tail import Tail
from tests.cases import make_job
from tests.pool import Pool

PAIRS, TURNS, TURN_S, STEPS = (4, 2, 1.0, 60) if SMOKE else (150, 30, 4.0, 100_000)
CLIENTS = 10
MODEL = ModelConfig(vocab_size=257, dim=128, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=344)
JOB = (
    "model.dim=64 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.ffn_dim=128 train.seq_len=128 "
    f"train.global_batch=4 train.micro_batch=2 data.max_mb=0.2 layout.replica=2 layout.tp=1 train.steps={STEPS} "
    "recovery.spares=0 checkpoint.every_steps=-1"
)


def main():
    parser = options(__doc__)
    parser.add_argument("--clients", nargs=2, metavar=("URL", "RUN"), help="only: follow a run, as told on stdin")
    args = parser.parse_args()
    if args.clients:
        follow_all(*args.clients)
    job = make_job((1, 1, 1), model=MODEL, precision="fp32", seq_len=256, global_batch=8, micro_batch=4, steps=1000)
    with Pool(1) as pool:
        (answer,) = pool.run("benchmarks.observe_overhead_cases:in_turns", job, pairs=PAIRS, timeout=1200)
    shares = [own / whole for own, whole in zip(answer["own"], answer["on"], strict=True)]
    share = statistics.median(shares)
    ratio, low, high = bootstrap([on / off for on, off in zip(answer["on"], answer["off"], strict=True)])
    print(f"on {machine()}; {PAIRS} pairs of steps of {1e3 * statistics.median(answer['off']):.0f} ms\n")
    own_us = 1e6 * statistics.median(answer["own"])
    print(
        f"own calls         {own_us:8.0f} us a step, {share:.3%} of it (bar 0.5 %); {answer['marks']} marks, one report"
    )
    print(f"on / off          {ratio:8.4f}, 95 % interval {low:.4f} to {high:.4f} (bar 1.02)")
    watched = browsers()
    print(f"ten browsers      {watched['ratio']:8.4f}, 95 % interval {watched['low']:.4f} to {watched['high']:.4f}")
    print(
        f"  steps           {watched['steps']:,} of {1e3 * watched['step_s']:.1f} ms; {watched['messages']:,} messages"
    )
    print(f"  the run ended with status {watched['code']}, its dashboard stopped and killed")
    ok = share < 0.005 and high <= 1.02 and watched["high"] <= 1.05 and watched["code"] == 0 and watched["messages"] > 0
    figures = {f"browsers_{name}": round(value, 5) for name, value in watched.items()}
    finish("observe_overhead", ok, own_share=round(share, 6), own_us=round(own_us, 1), ratio=round(ratio, 4),
           low=round(low, 4), high=round(high, 4), **figures)  # fmt: skip


def browsers() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="observe-overhead-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        phalanx = [sys.executable, "-m", "phalanx.cli.main"]
        sets = [word for field in JOB.split() for word in ("--set", field)]
        train = subprocess.Popen(
            [*phalanx, "train", *sets], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        dash = subprocess.Popen(
            [*phalanx, "dash", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True, start_new_session=True
        )  # as a service
        try:
            return _watched(runs, train, dash)
        finally:
            for process in (dash, train):
                if process.poll() is None:
                    process.kill()
                process.wait()


def _watched(runs: Path, train: subprocess.Popen, dash: subprocess.Popen) -> dict[str, float]:
    url = dash.stdout.readline().rpartition(": ")[2].strip()
    folder = None
    while folder is None or not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
        assert train.poll() is None, "the run did not start"
        folder = next((path for path in runs.iterdir() if (path / "meta.json").exists()), None)
        time.sleep(0.2)
    time.sleep(1.0 if SMOKE else 5.0)
    tail, ratios, medians, clients = Tail(folder / "metrics.jsonl"), [], [], Clients(url, folder.name)
    steps = 0
    for turn in range(TURNS):
        pair = {}
        for watched in (True, False) if turn % 2 else (False, True):
            clients.watch(watched)
            if turn == TURNS // 2:
                os.kill(dash.pid, signal.SIGSTOP)  # a dashboard that hangs, with ten clients on it
            tail.read()
            time.sleep(TURN_S)
            times = [row["time_s"] for row in tail.read()]
            os.kill(dash.pid, signal.SIGCONT)
            steps += len(times)
            if times:
                pair[watched] = statistics.median(times)
        if len(pair) == 2 and turn != TURNS // 2:
            ratios.append(pair[True] / pair[False])
            medians.append(pair[False])
    dash.kill()
    clients.close()
    if train.poll() is None:
        train.send_signal(signal.SIGTERM)
    code = train.wait(60)
    ratio, low, high = bootstrap(ratios or [1.0])
    stopped = 0 if code in (0, 130) else code  # 130: it was asked to stop
    return {"ratio": ratio, "low": low, "high": high, "steps": steps, "step_s": statistics.median(medians or [0.0]),
            "messages": clients.messages, "code": stopped}  # fmt: skip


class Clients:
    """Ten connections to the live stream of a run, from a process and session of their own. On each message they ask
    for the charts, as the page does."""

    def __init__(self, url: str, run: str):
        self.messages = 0
        command = [sys.executable, __file__, "--clients", f"{url}api/runs/{run}", run]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, start_new_session=True, **pipes)

    def watch(self, on: bool) -> None:
        self._process.stdin.write("on\n" if on else "off\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        said, _ = self._process.communicate(timeout=60)
        self.messages = int(said)


def follow_all(url: str, run: str) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # the scheduler shares the cores between sessions
        Path("/proc/self/autogroup").write_text("19")
    stop, heard, threads = threading.Event(), list[int](), list[threading.Thread]()
    for line in sys.stdin:
        stop.set()
        for thread in threads:
            thread.join(1.0)
        stop, threads = threading.Event(), []
        if line == "on\n":
            threads = [
                threading.Thread(target=follow, args=(url, run, stop, heard), daemon=True) for _ in range(CLIENTS)
            ]
        for thread in threads:
            thread.start()
        print("done", flush=True)
    print(len(heard), flush=True)
    os._exit(0)  # some threads may wait for a dashboard that is gone


def follow(url: str, run: str, stop: threading.Event, heard: list[int]) -> None:
    try:
        with urllib.request.urlopen(f"{url}/live", timeout=TURN_S + 2) as stream:
            for line in stream:
                if stop.is_set():
                    return
                if line.startswith(b"data: ") and json.loads(line[6:]).get("run") == run:
                    heard.append(1)
                    for path in ("", "/series?points=1280"):
                        asked = urllib.request.Request(url + path, headers={"Accept-Encoding": "gzip"})
                        urllib.request.urlopen(asked, timeout=TURN_S + 2).read()
                    if stop.wait(0.9):
                        return
    except OSError:
        return


if __name__ == "__main__":
    main()
