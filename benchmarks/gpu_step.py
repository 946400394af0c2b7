"""One training step on one accelerator: our engine against torchtitan 0.2.2, with the same weights and batches, in
turns in the same run, so that the card is equally warm for both.

Bars, ours / torchtitan's bf16 without documents, lower end of the 95 % interval: see BARS. Needs an accelerator, and
torchtitan's wheel unpacked (`pip download --no-deps torchtitan==0.2.2`): --titan FOLDER, or PHALANX_TITAN.

    benchmarks/gpu_step.py [--shapes 1.5b,2.8b,8b] [--rounds 3] [--steps 10] [--only REGEX] [--profile] [--smoke]"""

from common import finish, machine  # isort: skip  (first: it makes tests/ importable)

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LEAN, FP8 = {"moments": "bf16"}, {"moments": "bf16", "precision": "fp8"}
# shape -> variant -> (our options, documents per row, least ratio, most of torchtitan's memory)
BARS = {
    "smoke": {"bf16": (LEAN, 0, 0.0, 9.9), "bf16, documents": (LEAN, 8, 0.0, 9.9), "fp8": (FP8, 0, 0.0, 9.9)},
    "1.5b": {
        "bf16": (LEAN, 0, 1.05, 0.75),
        "bf16, documents": (LEAN, 8, 1.12, 0.75),
        "fp8": (FP8, 0, 1.35, 0.75),
        "fp8, documents": (FP8, 8, 1.42, 0.75),
        "default job": ({}, 8, 0.0, 9.9),
    },
    "2.8b": {
        "bf16": (LEAN, 0, 1.03, 0.75),
        "bf16, documents": (LEAN, 8, 1.10, 0.75),
        "fp8": (FP8, 0, 1.35, 0.75),
        "fp8, documents": (FP8, 8, 1.45, 0.75),
        "default job": ({}, 8, 0.0, 9.9),
    },
    "8b": {"bf16": (LEAN, 0, 1.25, 0.83), "fp8": (FP8, 0, 1.70, 0.83)},  # 100 GiB of 120
}
DEFAULT = 0.97  # least share of our best in its precision that the default job must reach
TOGETHER = {"smoke", "1.5b", "2.8b"}  # two engines of such a shape fit on the card
# Tolerance of first losses, unless ours has documents and the peer has not, and of bf16's losses after FIRST steps (the
# mean of LATE of them); fp8's first losses get 5 times that.
LOSS = 1e-2
WARM_UP, FIRST, LATE = 2, 50, 5


class Contender:
    def __init__(self, shape: str, **options):
        command = [sys.executable, "-m", "benchmarks.gpu_step_cases", json.dumps({"shape": shape, **options})]
        root = Path(__file__).parent.parent
        env = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=env
        )
        self.losses: list[float] = []

    def build(self) -> None:
        """Start using the device. Before this, the contender only imports, in parallel with the others."""
        self.built_s = self._ask(do="build")["built_s"]

    def steps(self, number: int, documents: int = 0) -> list[float]:
        said = self._ask(do="steps", steps=number, documents=documents)
        if not self.losses:
            self.first_s, self.first_documents = said["times"][0], documents
        self.losses += said["losses"]
        self.peak_gib, self.launch_s = said["peak_gib"], statistics.median(said["launches"])
        return said["times"]

    def profile(self, documents: int = 0) -> dict:
        return self._ask(do="profile", documents=documents)["profile"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def _ask(self, **what) -> dict:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args[-1]} ended with {self.process.wait()}")
        return json.loads(line)


def ratio(ours: list[list[float]], peers: list[list[float]], rounds: int = 4000) -> tuple[float, float, float]:
    """Return peers' median time over ours, with its 95 % interval: rounds are drawn, and steps within them."""
    rng = random.Random(0)

    def middle(times: list[list[float]], draw: bool) -> float:
        picked = rng.choices(times, k=len(times)) if draw else times
        return statistics.median(t for some in picked for t in (rng.choices(some, k=len(some)) if draw else some))

    drawn = sorted(middle(peers, True) / middle(ours, True) for _ in range(rounds))
    return middle(peers, False) / middle(ours, False), drawn[int(0.025 * rounds)], drawn[int(0.975 * rounds)]


def measure(shape: str, args: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for each run, ours and the peer's in turns. Both stay on the card."""
    variants: dict[str, list[str]] = {}  # by the options of ours: one process serves them
    for name, (options, *_) in BARS[shape].items():
        variants.setdefault(json.dumps(options), []).append(name)
    peer = Contender(shape, titan=args.titan)
    contenders = {key: Contender(shape, **{"precision": "bf16", **json.loads(key)}) for key in variants}
    peer.build()
    peer.steps(WARM_UP)
    for key, names in variants.items():
        ours = contenders[key]
        ours.build()
        for name in names:
            documents, times, peers = BARS[shape][name][1], [], []
            enough = -(-(FIRST - WARM_UP) // args.rounds) if name == "bf16" and not args.smoke else 0
            steps = max(args.steps, enough)
            ours.steps(WARM_UP, documents)
            for _ in range(args.rounds):
                peers.append(peer.steps(steps))
                times.append(ours.steps(steps, documents))
            if args.profile:
                show_profile(f"{shape} {name}", ours.profile(documents))
            yield row(shape, name, times, peers, ours, peer)
        ours.close()
    if args.profile:
        show_profile(f"{shape} torchtitan", peer.profile())
    peer.close()


def measure_apart(shape: str, args: argparse.Namespace) -> Iterator[dict]:
    """Like `measure`, when only one fits on the card: each starts a new process in each round."""
    times: dict[str, list] = {name: [] for name in BARS[shape]}
    peers, ended = [], {}
    for number in range(args.rounds):
        drawn = {"drawn": number == args.rounds - 1}  # losses are compared in the last round
        peer = Contender(shape, titan=args.titan, **drawn)
        all_ours = {name: Contender(shape, **{"precision": "bf16", **bar[0]}, **drawn)
                    for name, bar in BARS[shape].items()}  # fmt: skip
        peer.build()
        peer.steps(WARM_UP)
        peers.append(peer.steps(args.steps))
        peer.close()
        for name, (_, documents, *_) in BARS[shape].items():
            ours = ended[name] = all_ours[name]
            ours.build()
            ours.steps(WARM_UP, documents)
            times[name].append(ours.steps(args.steps, documents))
            ours.close()
    for name, some in times.items():
        yield row(shape, name, some, peers, ended[name], peer)


def row(shape: str, name: str, times: list, peers: list, ours: Contender, peer: Contender) -> dict:
    _, documents, least, most = BARS[shape][name]
    middle, low, high = ratio(times, peers)
    memory, apart = ours.peak_gib / peer.peak_gib, abs(ours.losses[0] - peer.losses[0])
    last = len(ours.losses)  # both had the same first weights and the same batches
    apart_last = None
    if len(peer.losses) >= last and not documents:
        mine, theirs = (statistics.fmean(side[last - LATE : last]) for side in (ours.losses, peer.losses))
        apart_last = abs(mine - theirs)
    same = ours.first_documents > 0 or apart <= LOSS * (5 if "fp8" in name else 1)
    if name == "bf16" and shape in TOGETHER - {"smoke"}:
        same = same and last >= FIRST and apart_last is not None and apart_last <= LOSS
    return {
        "shape": shape, "run": name, "ok": low >= least and memory <= most and same,
        "step_ms": round(1e3 * statistics.median(t for some in times for t in some), 1),
        "peer_ms": round(1e3 * statistics.median(t for some in peers for t in some), 1),
        "ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3), "bar": least,
        "gib": round(ours.peak_gib, 1), "peer_gib": round(peer.peak_gib, 1), "memory": round(memory, 3),
        "memory_bar": most, "first_losses_apart": round(apart, 5), "steps": last,
        "last_losses_apart": apart_last and round(apart_last, 5), "launch_ms": round(1e3 * ours.launch_s, 1),
        "built_s": round(ours.built_s, 1), "first_step_s": round(ours.first_s, 1),
    }  # fmt: skip


def show_profile(title: str, profile: dict) -> None:
    longest, gaps = profile.pop("longest"), profile.pop("widest gaps")
    print(f"profile of {title}, ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in profile.items() if ms >= 0.05))
    for name, ms in longest.items():
        print(f"    {ms:8.2f}  {name}")
    for ms, before, after in gaps:
        print(f"    {ms:8.2f}  between {before} and {after}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="1.5b,2.8b,8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--titan", default=os.environ.get("PHALANX_TITAN", ""))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="a regular expression for the names of the runs")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, one round: does it run?")
    args = parser.parse_args()
    if args.smoke:
        args.shapes, args.rounds, args.steps = "smoke", 1, 3
    for shape, runs in BARS.items():
        BARS[shape] = {name: bar for name, bar in runs.items() if re.search(args.only, name)}
    import torch

    if not torch.accelerator.is_available() or not (Path(args.titan) / "torchtitan").is_dir():
        print("needs an accelerator and torchtitan (--titan FOLDER)")
        finish("gpu_step", False, reason="no accelerator, or torchtitan is not there")
    print(f"our engine beside torchtitan 0.2.2 on {torch.cuda.get_device_name()}; {machine()}\n", flush=True)
    rows, began = [], time.perf_counter()
    head = f"{'shape':7}{'run':18}{'ms':>8}{'peer':>8}{'ratio':>7}{'95 % interval':>16}{'bar':>6}"
    head += f"{'GiB':>7}{'peer':>7}{'loss':>8}  verdict"
    print(head + "\n" + "-" * len(head), flush=True)
    for shape in args.shapes.split(","):
        for r in (measure if shape in TOGETHER else measure_apart)(shape, args):
            rows.append(r)
            print(
                f"{r['shape']:7}{r['run']:18}{r['step_ms']:8.1f}{r['peer_ms']:8.1f}{r['ratio']:7.3f}"
                f"{r['low']:9.3f}-{r['high']:.3f}{r['bar']:7.2f}{r['gib']:7.1f}{r['peer_gib']:7.1f}"
                f"{r['first_losses_apart']:8.4f}"
                f"  {'ok' if r['ok'] else 'below the bar'}",
                flush=True,
            )
    for shape in {r["shape"] for r in rows if r["run"] == "default job"}:
        own = {r["run"]: r for r in rows if r["shape"] == shape}
        reached = own["bf16, documents"]["step_ms"] / own["default job"]["step_ms"]
        own["default job"] |= {"of_our_best": round(reached, 3), "ok": own["default job"]["ok"] and reached >= DEFAULT}
        print(f"{shape}: the default job (fp32 moments, 8 documents) reaches {reached:.3f} of our best, bar {DEFAULT}")
    print(f"\n{time.perf_counter() - began:.0f} s")
    finish("gpu_step", all(r["ok"] for r in rows), rows=rows)


if __name__ == "__main__":
    main()
