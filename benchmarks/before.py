"""Run benchmarks of this tree and of an older tree in turns, to see whether existing features became slower.

The older tree is checked out of git into a temporary folder, and runs its own benchmark files. Each turn runs a
benchmark once in each tree; this tree goes first in every second turn. A figure's ratio is taken within a turn.

Bar: this tree over the older one, for every figure (the less the better): upper end of the 95 % interval <= 1.10."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 1.10
REF = "HEAD" if SMOKE else "2f06321"  # before the issues on one protocol, containment and durability
TURNS = 2 if SMOKE else 10
HERE = Path(__file__).resolve().parent.parent

# Options of one run in a turn, and where its figures are in its last line: `*` takes every key.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "checkpoint_restore": (["--rounds", "2"], ["rows.*.ours_s"]),
    "checkpoint_stall": (["--rounds", "2"], ["medians.ours.extra", "medians.ours.blocked", "medians.ours.seconds"]),
    "checkpoint_planning": ([], ["ours.*.ms"]),
    "data_scale": (["--rounds", "8"], ["first_batch_ms.*"]),
    "recovery_nodes": ([], ["node_loss_s"]),
    "engine_overhead": ([], ["ratio"]),
}


def figures(line: object, path: str) -> dict[str, float]:
    """Return the numbers below `path` of a benchmark's last line, keyed by their own paths."""
    found: dict[str, object] = {"": line}
    for part in path.split("."):
        deeper: dict[str, object] = {}
        for at, value in found.items():
            items = value if isinstance(value, dict) else {str(i): v for i, v in enumerate(value)}  # type: ignore[arg-type]
            for key in items if part == "*" else [part]:
                deeper[f"{at}.{key}" if at else str(key)] = items[key]
        found = deeper
    return {at: float(value) for at, value in found.items()}  # type: ignore[arg-type]


def run(tree: Path, name: str, arguments: list[str]) -> dict[str, object]:
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    command = [sys.executable, str(tree / "benchmarks" / f"{name}.py"), *arguments, *(["--smoke"] if SMOKE else [])]
    done = subprocess.run(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):  # `ok: false` only means that its own bar was missed
        raise SystemExit(f"{name} of {tree} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--ref", default=REF, help="the older tree")
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    names = args.names or (["checkpoint_planning"] if SMOKE else list(CASES))
    if unknown := set(names) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(CASES)}")
    print(f"{machine()}\nthis tree over {args.ref}, {args.turns} turns\n")
    print(f"{'benchmark':22}{'figure':36}{'before':>10}{'now':>10}{'ratio (95 %)':>24}")
    rows, ok = {}, True
    with tempfile.TemporaryDirectory(prefix="phalanx-before-") as folder:
        old = Path(folder) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), args.ref], check=True)
        try:
            for name in names:
                arguments, paths = CASES[name]
                seen: dict[str, list[tuple[float, float]]] = {}
                for turn in range(args.turns):
                    lines = {}
                    for tree in (HERE, old) if turn % 2 else (old, HERE):
                        lines[tree] = run(tree, name, arguments)
                    for path in paths:
                        before, now = (figures(lines[tree], path) for tree in (old, HERE))
                        for key in now:
                            seen.setdefault(key, []).append((before[key], now[key]))
                for key, pairs in seen.items():
                    middle, low, high = bootstrap([now / before for before, now in pairs])
                    was, is_ = (bootstrap(values)[0] for values in zip(*pairs, strict=True))
                    ok &= high <= BAR
                    rows[f"{name} {key}"] = {"ratio": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
                    told = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                    flag = "" if high <= BAR else "  ABOVE THE BAR"
                    print(f"{name:22}{key:36}{was:10.3f}{is_:10.3f}{told:>24}{flag}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    finish("before", ok, ref=args.ref, turns=args.turns, bar=BAR, rows=rows)


if __name__ == "__main__":
    main()
