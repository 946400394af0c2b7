"""The planner against this engine on this machine: calibrate, then train every case and compare the predicted step and
memory with the measured ones. Nothing is learned from one case to the next.

Bar, one accelerator: at least 20 shapes; step median <= 5 % and p95 <= 12 %; memory median <= 3 %, and no case that was
called fitting runs out of memory. Rows are one document each: what packed documents save is not predicted. While a case
trains, the next one imports. Bar, `--device cpu`: eight ranks on 16 cores or more, every axis, median <= 10 %.
`--smoke`: two cases on two ranks of the CPU. `--part 0:9`: some of the cases, which is never ok. `--calibration FILE`:
as `phalanx calibrate` wrote it, in place of a new one."""

from common import finish, machine, options  # isort: skip

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHALANX = [sys.executable, "-m", "phalanx.cli.main"]
STEPS, FEW_STEPS = 20, 5  # the second number where a step takes seconds
LONG = 32_768  # tokens of a sample
IMPORTS_S = 5.0  # shortest time from a command to its first use of an accelerator
BARS = {"accelerator": (20, 0.05, 0.12), "cpu": (8, 0.10, 1.0)}  # cases, median, p95
MEMORY_BAR, CORES = 0.03, 16
MODELS = {
    "0.2b": "dim=1024 num_layers=8 num_heads=16 num_kv_heads=16 ffn_dim=2816 vocab_size=32768",
    "0.4b": "dim=1024 num_layers=24 num_heads=16 num_kv_heads=16 ffn_dim=2816 vocab_size=32768",
    "1b": "preset=llama3-1b",
    "3b": "dim=3072 num_layers=28 num_heads=24 num_kv_heads=8 ffn_dim=8192 vocab_size=128256",
    "moe-16": "family=moe dim=1024 num_layers=16 num_heads=16 num_kv_heads=16 ffn_dim=2816 vocab_size=32768 "
    "num_experts=16 top_k=2 expert_dim=1408",
    "moe-64": "family=moe dim=1024 num_layers=12 num_heads=16 num_kv_heads=16 ffn_dim=2816 vocab_size=32768 "
    "num_experts=64 top_k=6 expert_dim=512",
    "tiny": "preset=tiny",
    "small": "dim=256 num_layers=8 num_heads=8 num_kv_heads=8 ffn_dim=704 vocab_size=512",
    "small-moe": "family=moe dim=256 num_layers=8 num_heads=8 num_kv_heads=8 ffn_dim=704 vocab_size=512 "
    "num_experts=8 top_k=2 expert_dim=256",
}
# Model, tokens of a sample, micro-batch, recomputation, compiler.
DEVICE_CASES = [
    ("0.4b", 1024, 16, "none", "inductor"), ("0.4b", 1024, 16, "none", "none"), ("1b", 1024, 8, "none", "inductor"),
    ("0.4b", 2048, 8, "selective", "inductor"), ("1b", 4096, 2, "none", "inductor"), ("1b", 4096, 2, "none", "none"),
    ("1b", 4096, 4, "selective", "inductor"), ("1b", 4096, 4, "full", "inductor"),
    ("3b", 4096, 1, "none", "inductor"), ("3b", 4096, 2, "selective", "inductor"),
    ("3b", 4096, 4, "full", "inductor"), ("0.4b", 8192, 4, "none", "inductor"), ("1b", 8192, 1, "none", "inductor"),
    ("1b", 16384, 1, "selective", "inductor"), ("1b", 32768, 1, "selective", "inductor"),
    ("1b", 65536, 1, "full", "inductor"), ("0.2b", 131072, 1, "full", "inductor"),
    ("moe-16", 2048, 8, "none", "inductor"), ("moe-16", 4096, 4, "none", "none"),
    ("moe-16", 4096, 8, "full", "inductor"), ("moe-64", 4096, 2, "none", "inductor"),
    ("moe-64", 8192, 2, "full", "inductor"),
]  # fmt: skip
# Model and layout of eight ranks; two in the smoke run.
CPU_CASES = [
    ("small", "replica=8"), ("small", "shard=8 zero=1"), ("small", "shard=8 zero=3"), ("small", "tp=8"),
    ("small", "cp=8"), ("small", "pp=8"), ("small", "pp=4 schedule=interleaved chunks=2 shard=2"),
    ("small", "tp=2 pp=2 shard=2"), ("small-moe", "shard=8 ep=8"), ("small-moe", "shard=4 ep=4 tp=2"),
]  # fmt: skip
SMOKE_CASES = [("tiny", "shard=2 zero=3"), ("tiny", "tp=2")]


def settings(section, text):
    return [f"{section}.{pair}" for pair in text.split()]


def device_jobs():
    for model, seq, micro, recompute, compiler in DEVICE_CASES:
        name = f"{model}, {seq // 1024}k x {micro}, {recompute}, {'compiled' if compiler != 'none' else 'eager'}"
        batch, steps = (micro, FEW_STEPS) if seq >= LONG else (2 * micro, STEPS)
        train = f"seq_len={seq} micro_batch={micro} global_batch={batch} recompute={recompute} compile={compiler}"
        train += f" steps={steps} precision=bf16 document_mask=false"
        yield name, [*settings("model", MODELS[model]), *settings("train", train), "layout.shard=1"]


def cpu_jobs(cases):
    for model, layout in cases:
        train = f"seq_len={64 if model == 'tiny' else 256} micro_batch=1 global_batch={4 if model == 'tiny' else 16}"
        train += f" steps={5 if model == 'tiny' else STEPS}"
        sets = [*settings("model", MODELS[model]), *settings("train", train), *settings("layout", layout)]
        yield f"{model}, {layout}", [*sets, "run.device=cpu", "run.threads=1"]


def start(home, *words):
    """Start `phalanx ...` in its own home folder."""
    log = (home / "log").open("w")
    return subprocess.Popen([*PHALANX, *words], cwd=home, env=os.environ | {"HOME": str(home)}, stdout=log, stderr=log)


class Case:
    """A job that has been started in its own folder."""

    def __init__(self, folder, number, sets, calibration):
        self.home = folder / str(number)
        (self.home / ".config/phalanx").mkdir(parents=True)
        (self.home / ".config/phalanx/calibration.json").write_bytes(calibration)
        (self.home / "job.toml").write_text('name = "truth"\n')
        common = ["recovery.spares=0", "checkpoint.every_steps=-1"]
        self.process = start(self.home, "train", "job.toml", *(w for s in [*sets, *common] for w in ("--set", s)))

    def trains_for(self, seconds):
        """Wait until it has done two steps and will finish within `seconds`, or has ended."""
        while self.process.poll() is None:
            rows = [line for file in self.home.glob("runs/*/metrics.jsonl") for line in file.read_text().splitlines()]
            if len(rows) > 1:
                job = json.loads(next(self.home.glob("runs/*/job.json")).read_text())
                left = job["job"]["train"]["steps"] - len(rows)
                if left * json.loads(rows[-1])["time_s"] < seconds:
                    return
            time.sleep(0.2)

    def result(self, limit_s=900):
        """Return predictions and measurements; `failed`: why there are none."""
        self.process.wait(limit_s)
        told = (self.home / "log").read_text()
        summaries = [json.loads(file.read_text()) for file in self.home.glob("runs/*/summary.json")]
        if self.process.returncode or not summaries or "forecast" not in summaries[0]:
            lost = "out of memory" in told.lower()
            why = "out of memory" if lost else told.strip()[-300:] or "no forecast"
            return {"failed": why, "broken_promise": lost and "may not fit" not in told}
        return summaries[0]["forecast"] | {"failed": ""}


def row(name, got):
    if got["failed"]:
        return f"{name:44}{got['failed'].splitlines()[-1][:70]}"
    step, memory = got["measured_s"] / got["predicted_s"] - 1, ""
    if got["measured_bytes"]:
        share = got["measured_bytes"] / got["predicted_bytes"] - 1
        memory = f"{got['predicted_bytes'] / 1e9:10.2f}{got['measured_bytes'] / 1e9:10.2f}{share:+9.1%}"
    return f"{name:44}{got['predicted_s'] * 1e3:10.1f}{got['measured_s'] * 1e3:10.1f}{step:+9.1%}{memory}"


def main():
    parser = options(__doc__)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu"])
    parser.add_argument("--part", default=":")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--keep", type=Path, help="where a copy of the calibration goes")
    parser.add_argument("--minutes", type=float, default=2.0, help="of calibration")
    args = parser.parse_args()
    import torch

    on_cpu = args.smoke or args.device == "cpu" or not torch.accelerator.is_available()
    jobs = list(cpu_jobs(SMOKE_CASES if args.smoke else CPU_CASES) if on_cpu else device_jobs())
    first, _, last = args.part.partition(":")
    jobs = jobs[int(first or 0) : int(last or len(jobs))]
    ranks, minutes = (2, 0.1) if args.smoke else (8 if on_cpu else 1, args.minutes)
    print(f"{machine()}\n")
    print(f"{'case':44}{'plan, ms':>10}{'run, ms':>10}{'error':>9}{'plan, GB':>10}{'run, GB':>10}{'error':>9}")
    with tempfile.TemporaryDirectory() as folder:
        home, found = Path(folder), {}
        file = args.calibration or home / "calibration.json"
        if not args.calibration:
            words = ["--minutes", str(minutes), "--ranks", str(ranks), *(["--device", "cpu"] if on_cpu else [])]
            calibrated = start(home, "calibrate", "--out", str(file), *words).wait(1800)
            assert calibrated == 0, (home / "log").read_text()
        calibration, running = file.read_bytes(), None
        if args.keep:
            args.keep.write_bytes(calibration)
        for number, (name, sets) in enumerate(jobs):
            if running:
                running[1].trains_for(0.0 if on_cpu else IMPORTS_S)
            before, running = running, (name, Case(home, number, sets, calibration))
            if before:
                report(*before, found)
        report(*running, found)
    judge(found, on_cpu, whole=not args.smoke and args.part == ":")


def report(name, case, found):
    found[name] = case.result()
    print(row(name, found[name]), flush=True)


def judge(found, on_cpu, whole):
    timed = [got for got in found.values() if not got["failed"]]
    if not timed:
        finish("plan_truth", False, cases=0, failed=len(found))
    step = sorted(abs(got["predicted_s"] / got["measured_s"] - 1) for got in timed)
    held = [abs(g["predicted_bytes"] / g["measured_bytes"] - 1) for g in timed if g["measured_bytes"]]
    median, p95 = statistics.median(step), step[min(len(step) - 1, int(0.95 * len(step)))]
    broken = sum(got.get("broken_promise", False) for got in found.values())
    cases, median_bar, p95_bar = BARS["cpu" if on_cpu else "accelerator"]
    cores = len(os.sched_getaffinity(0))
    ok = whole and len(timed) >= cases and median <= median_bar and p95 <= p95_bar and not broken
    ok = ok and (cores >= CORES if on_cpu else bool(held) and statistics.median(held) <= MEMORY_BAR)
    memory = {"memory_median": round(statistics.median(held), 4)} if held else {}
    finish(
        "plan_truth", ok, cases=len(timed), failed=len(found) - len(timed), step_median=round(median, 4),
        step_p95=round(p95, 4), **memory, fitting_but_lost=broken, cores=cores, on_cpu=on_cpu,
    )  # fmt: skip


if __name__ == "__main__":
    main()
