"""fp8 against bf16: the same job twice through `phalanx train`, 1,000 steps on the sources of Python's own library.

Bar: the last loss (mean of 50 steps) of fp8 is within 1 % of bf16's, in the mean over the seeds. One pair says little:
runs that differ only in rounding end up to 1.4 % apart. `--svg FILE` draws both curves of the first seed."""

from common import finish, machine  # isort: skip  (first: it makes tests/ importable)

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BAR, LAST = 0.01, 50
JOB = """
name = "{precision}"
seed = {seed}
[model]
dim = 1024
num_layers = 6
num_heads = 16
num_kv_heads = 4
ffn_dim = 2816
[layout]
shard = 1
[train]
steps = {steps}
seq_len = {seq_len}
global_batch = 16
micro_batch = 16
precision = "{precision}"
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = -1
[run]
dir = "{folder}"
[data]
max_mb = {max_mb}
"""


def curve(precision: str, folder: Path, **sizes) -> list[float]:
    """Return the loss of every step."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{precision}.toml"
    file.write_text(JOB.format(precision=precision, folder=folder / "runs", **sizes))
    command = [sys.executable, "-c", "from phalanx.cli.main import run; run()", "train", str(file)]
    root = Path(__file__).parent.parent
    subprocess.run(
        command, check=True, env=os.environ | {"PYTHONPATH": f"{root / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    )
    (metrics,) = (folder / "runs").glob(f"{precision}-*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def smoothed(losses: list[float], window: int = 10) -> list[float]:
    return [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def draw(curves: dict[str, list[float]]) -> str:
    """Draw both curves, and their difference enlarged below."""
    width, height, colours = 720, 360, {"bf16": "#1f5fbf", "fp8": "#d2691e"}
    lines = {name: smoothed(losses) for name, losses in curves.items()}
    top, low = max(max(c) for c in lines.values()), min(min(c) for c in lines.values())
    steps = len(next(iter(lines.values())))

    def points(values: list[float]) -> str:
        return " ".join(
            f"{50 + i * (width - 70) / (steps - 1):.1f},{20 + (top - v) / (top - low) * (height - 60):.1f}"
            for i, v in enumerate(values)
        )

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12">']
    out.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for i in range(5):
        value = top - i * (top - low) / 4
        y = 20 + i * (height - 60) / 4
        out.append(f'<line x1="50" x2="{width - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        out.append(f'<text x="44" y="{y + 4:.0f}" text-anchor="end">{value:.2f}</text>')
    for name, values in lines.items():
        out.append(f'<polyline points="{points(values)}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
    for i, name in enumerate(lines):
        out.append(f'<text x="{width - 120}" y="{50 + 18 * i}" fill="{colours[name]}">{name}</text>')
    out.append(
        f'<text x="{width / 2:.0f}" y="{height - 10}" text-anchor="middle">step, of {steps:,}; loss in nats per token'
    )
    return "\n".join([*out[:-1], out[-1] + "</text>", "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[5], help="a pair of runs for each, all side by side")
    parser.add_argument("--svg", default="")
    parser.add_argument("--curves", default="", help="where to leave the losses as JSON")
    parser.add_argument("--smoke", action="store_true", help="a few steps of it: does it run?")
    args = parser.parse_args()
    sizes = dict(steps=args.steps, seq_len=1024, max_mb=17)
    if args.smoke:
        sizes = dict(steps=4, seq_len=64, max_mb=1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 * len(args.seeds)) as pool:  # nothing is timed
        runs = [
            {name: pool.submit(curve, name, Path(folder) / str(seed), seed=seed, **sizes) for name in ("bf16", "fp8")}
            for seed in args.seeds
        ]
        pairs = [{name: run.result() for name, run in pair.items()} for pair in runs]
    curves = pairs[0]
    print(f"fp8 beside bf16 on {machine()}\n\n{'step':>8}{'bf16':>10}{'fp8':>10}{'apart':>9}")
    steps = len(curves["bf16"])
    for step in sorted({0, *range(max(1, steps // 10) - 1, steps, max(1, steps // 10))}):
        plain, low = (smoothed(curves[name])[step] for name in ("bf16", "fp8"))
        print(f"{step + 1:8}{plain:10.4f}{low:10.4f}{low / plain - 1:9.2%}")
    ends = [{name: statistics.fmean(losses[-LAST:]) for name, losses in pair.items()} for pair in pairs]
    gaps = [end["fp8"] / end["bf16"] - 1 for end in ends]
    print(f"\nmean of the last {LAST}:")
    for seed, end, gap in zip(args.seeds, ends, gaps, strict=True):
        print(f"seed {seed}: bf16 {end['bf16']:.4f}, fp8 {end['fp8']:.4f}, {gap:+.2%}")
    apart = statistics.fmean(gaps)
    print(f"in the mean {apart:+.2%}; bar {BAR:.0%}")
    if args.svg:
        Path(args.svg).write_text(draw(curves))
    if args.curves:
        Path(args.curves).write_text(json.dumps(dict(zip(args.seeds, pairs, strict=True))))
    finish("gpu_fp8", abs(apart) <= BAR and steps >= 1000, steps=steps, apart=round(apart, 5), ends=ends)


if __name__ == "__main__":
    main()
