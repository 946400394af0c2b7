"""Restore 1.1 GB of fp32 weights and moments that 4 ranks (shard 4) saved: into the same layout, into shard 2 x tp 2,
and into 2 ranks. Ours (every byte hashed before it is used) runs against torch's dcp.load into DTensors with the same
slices, in turns, in the same processes. A time is from a barrier until the slowest rank has its state, including
planning and the reading of manifests and metadata.

Warm: the files are in the page cache, for both. Cold: posix_fadvise dropped them from it before each load, as far as
the kernel complies; the remaining share is printed.

Bar: ours <= DCP's time in every row, the values right to the bit (checked in the warm-up of every row)."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import shutil
import statistics
import tempfile
from pathlib import Path

from checkpoint_cases import Ranks, cached_share, drop_cache, entries_of

from phalanx.checkpoint.files import commit
from phalanx.core.checkpoint import Manifest
from phalanx.core.layout import Layout
from phalanx.core.store import Folder

SHAPE = (8, 5632, 2048)  # tensors, rows, columns: of weights, and of each moment
SAVED = dict(shard=4)
INTO = {"the same layout": dict(shard=4), "shard 2 x tp 2": dict(shard=2, tp=2), "2 ranks": dict(shard=2)}
NAME, STEP, ROUNDS = "step-000000001-aabbccdd", 1, 7
if SMOKE:
    SHAPE, SAVED, INTO, ROUNDS = (2, 512, 128), dict(shard=2), {"1 rank": {}}, 1


def save(folder: Path) -> int:
    """Save both checkpoints, and return the bytes of ours."""
    layout = Layout(**SAVED)
    with Ranks("restore", layout.world_size, shape=SHAPE) as ranks:
        order = dict(do="save", layout=SAVED, name=NAME, step=STEP)
        ranks.ask(**order, how="dcp", path=str(folder / "dcp"))
        files = [(a["size"], a["root"]) for a in ranks.ask(**order, how="ours", path=str(folder / "ours"))]
    manifest = Manifest(NAME, STEP, layout, entries_of(*SHAPE), files, STEP)
    commit(Folder(folder / "ours"), manifest)
    return manifest.size_bytes


def warm_up(folder: Path) -> None:
    """Read our files once, because they were written past the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(8 << 20):
                    pass


def load(ranks: Ranks, folder: Path, how: str, layout: dict, cold: bool, check: bool) -> dict:
    order = dict(do="load", how=how, layout=layout, name=NAME, path=str(folder / how))
    answers = ranks.ask(**order, cold=cold, check=check)
    took = max(a["ended"] for a in answers) - min(a["began"] for a in answers)
    return {"seconds": took, "cpu": sum(a["cpu"] for a in answers), "wrong": sum(a["wrong"] for a in answers)}


def main():
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dir", help="where checkpoints are written (a temporary folder)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="phalanx-restore-", dir=args.dir))
    ok, figures = True, {}
    try:
        size = save(folder)
        warm_up(folder)
        print(
            f"{machine()}\n{size / 1e9:.2f} GB saved by {Layout(**SAVED).describe()}; {args.rounds} rounds in turns\n"
        )
        print(f"{'':24}{'cache':>7}{'ours s':>9}{'DCP s':>9}{'ratio (95 %)':>22}{'CPU-s ours':>12}{'DCP':>7}  values")
        for name, layout in INTO.items():
            with Ranks("restore", Layout(**layout).world_size, shape=SHAPE) as ranks:
                for cache in ("warm", "cold"):
                    row = rounds_of(ranks, folder, layout, cache == "cold", args)
                    middle, low, high = bootstrap(row["ratios"])
                    good = middle <= 1 and not row["wrong"]
                    ok &= good
                    print(
                        f"{name:24}{cache:>7}{row['ours']:9.2f}{row['dcp']:9.2f}"
                        f"{f'{middle:.2f} ({low:.2f} to {high:.2f})':>22}"
                        f"{row['cpu']['ours']:12.2f}{row['cpu']['dcp']:7.2f}"
                        f"  {'right' if not row['wrong'] else 'WRONG'}{'' if good else '  ABOVE THE BAR'}",
                        flush=True,
                    )
                    figures[f"{name}, {cache}"] = {
                        "ours_s": round(row["ours"], 2),
                        "dcp_s": round(row["dcp"], 2),
                        "ratio": round(middle, 2),
                    }
        drop_cache(folder)
        left = cached_share(folder)
        told = "not known" if left < 0 else f"{left:.0%}"
        print(f"\ncold: after dropping, {told} of the files was left in the page cache")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish("checkpoint_restore", ok, gigabytes=round(size / 1e9, 2), rows=figures, cached_when_cold=round(left, 3))


def rounds_of(ranks: Ranks, folder: Path, layout: dict, cold: bool, args) -> dict:
    rows: dict[str, list[dict]] = {"ours": [], "dcp": []}
    wrong = 0
    for round_ in range(args.rounds + 1):
        for how in ("ours", "dcp") if round_ % 2 else ("dcp", "ours"):
            row = load(ranks, folder, how, layout, cold, round_ == 0)
            wrong += row["wrong"]
            if round_:
                rows[how].append(row)
    out = {how: statistics.median(row["seconds"] for row in found) for how, found in rows.items()}
    pairs = zip(rows["ours"], rows["dcp"], strict=True)
    return out | {
        "ratios": [a["seconds"] / b["seconds"] for a, b in pairs],
        "cpu": {how: statistics.median(row["cpu"] for row in found) for how, found in rows.items()},
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
