"""The cost of a checkpoint to concurrent training: 4 CPU ranks, 1.1 GB of fp32 weights and moments. A step is matmuls,
a small all-reduce that keeps the ranks in step, and torch's fused AdamW on the rank's 277 MB.

Ours (a snapshot in a keeper's memory during the next forward and backward pass, drained to disk by the keeper, every
byte hashed) runs against torch's DCP async_save in its process mode with cached plans and shared, reused staging
memory. DCP runs once with staging before it returns and once with staging during the next step; the better of the two
at each figure is the peer. --explore shows more of its options. All take turns in the same processes, on the same
tensors. Each save has a folder of its own, on one file system; all are durable only after fsync.

    extra       sum over the steps from the request until the checkpoint is durable of what each took longer than the
                median of the undisturbed steps before it
    blocked     time that the training thread spends in the request and in waiting before the next update, of the rank
                where it is longest
    durable     bytes over the time from the request until it is durable
    drain       of ours: bytes over the time from the snapshot in memory until it is durable: hashed, written, fsynced,
                committed
    raw         the same bytes by 4 more processes, from their memory to files (O_DIRECT where it works, and fsync),
                beside the same training; "raw alone" while the training stands still

Bar: extra <= 1/2 and blocked <= 1/5 of DCP's; durable >= DCP's; drain >= 0.8 of raw beside the same training."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import itertools
import secrets
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from checkpoint_cases import DCP_OPTIONS, Ranks

from phalanx.checkpoint.files import Reader
from phalanx.core.store import Folder
from phalanx.gate.proof import KEY_BYTES
from phalanx.runtime.bare import BareClient

WORLD, SHAPE = 4, (8, 5632, 2048)  # tensors, rows, columns: of weights, and of each moment
MATMUL = (1024, 8)  # size, how many a step
BEFORE, WARM_UP, ROUNDS, PAUSE_S = 8, 2, 7, 0.5
if SMOKE:
    WORLD, SHAPE, MATMUL = 1, (2, 512, 128), (64, 2)
    BEFORE, WARM_UP, ROUNDS, PAUSE_S = 3, 1, 1, 0.0
KEEPER = 0
DCP = ("dcp", "dcp async staging")


class Keeper:
    """The keeper's process, and a thread that commits like a coordinator, once all ranks' files are there."""

    def __init__(self, folder: Path):
        self._node = BareClient(["phalanx.checkpoint.keeper"], log=folder / "node.log")
        args = {"url": str(folder / "ours"), "ranks": WORLD, "keep_last": 2, "keep_every": 0}
        args |= {"peers": {"key": secrets.token_hex(KEY_BYTES)}, "host": "127.0.0.1", "has_buddy": False}
        self._log = folder / "keeper.log"
        self._node.spawn(KEEPER, "phalanx.checkpoint.keeper:main", args, self._log)
        self.address, self.on_committed = "", lambda said: None
        self.drains: list[float] = []  # drain times of the ranks' files, verified and written
        while not self.address:
            said = self._next()
            if said["type"] == "keeper":
                self.address = said["address"]
        threading.Thread(target=self._coordinate, daemon=True).start()

    def _next(self) -> dict:
        while (event := self._node.events())["type"] != "message":
            if event["type"] != "started":
                sys.exit(f"the keeper: {event} {self._log.read_text()[-2000:]}")
        return event["body"]

    def _coordinate(self) -> None:
        files: dict[str, dict[int, tuple[int, str]]] = {}
        while True:
            try:
                said = self._next()
            except OSError:  # closed
                return
            if said["type"] == "shard":
                self.drains.append(said["drain_s"])
                there = files.setdefault(said["checkpoint"], {})
                there[said["rank"]] = (said["size"], said["root"])
                if len(there) == WORLD:
                    about = {key: said[key] for key in ("checkpoint", "step", "generation", "seal")}
                    written = [there[rank] for rank in range(WORLD)]
                    self._node.send(KEEPER, {"type": "commit", **about, "files": written})
            elif said["type"] == "committed":
                self.on_committed(said)
            elif said["type"] == "checkpoint_failed":
                print(said, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._node.close()


def measure(ranks: Ranks, keeper: Keeper, method: str, step: int, size: int) -> dict:
    """Measure one save."""
    commits = []

    def committed(said: dict) -> None:
        ranks.tell(0, durable=time.monotonic())
        commits.append(said["drain_s"] - max(keeper.drains))  # the commit includes the drain

    keeper.on_committed = committed
    keeper.drains.clear()
    answers = ranks.ask(method=method, step=step, before=BEFORE)
    began, durable = min(a["began"] for a in answers), max(a["durable"] for a in answers)
    out = {"drain": size / (durable - began), "seconds": durable - began}
    if "starts" not in answers[0]:
        return out
    starts = answers[0]["starts"]
    took = [b - a for a, b in itertools.pairwise(starts)]
    median = statistics.median(took[1:BEFORE])
    during = [t for at, t in zip(starts[BEFORE:], took[BEFORE:], strict=False) if at < durable]
    out |= {"extra": sum(t - median for t in during), "steps": len(during), "median": median}
    out |= {
        "blocked": max(a["blocked"] for a in answers),
        "request": max(a["request"] for a in answers),
        "matmuls": answers[0]["matmuls"],
    }
    if method == "ours":
        out |= {"copy": max(a["copy"] for a in answers), "file": max(keeper.drains), "commit": commits[0]}
    return out


def main():
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--explore", action="store_true", help="more of DCP's options")
    parser.add_argument("--dir", help="where checkpoints are written (a temporary folder)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="phalanx-stall-", dir=args.dir))
    peers = list(DCP_OPTIONS) if args.explore else list(DCP)
    methods = ["ours", *peers, "raw"]
    rows: dict[str, list[dict]] = {name: [] for name in [*methods, "raw alone"]}
    keeper = ranks = None
    try:
        keeper = Keeper(folder)
        given = dict(shape=SHAPE, matmul=MATMUL, methods=methods, folder=str(folder), run=secrets.token_hex(4))
        ranks = Ranks("stall", WORLD, keeper=keeper.address, **given)
        ready = ranks.answers()
        size, step = sum(a["size"] for a in ready), 0
        for round_ in range(WARM_UP + args.rounds):
            names = list(rows)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                step += 1
                row = measure(ranks, keeper, name, step, size)
                if round_ >= WARM_UP:
                    rows[name].append(row)
                elif name == "ours":
                    (made,) = (folder / "ours").glob("step-*")
                    assert not (wrong := Reader(Folder(folder / "ours"), made.name).verify()), wrong
                for old in [*folder.glob("dcp-*"), *folder.glob("raw-*"), *(folder / "ours").glob("step-*")]:
                    shutil.rmtree(old, ignore_errors=True)
                time.sleep(PAUSE_S)
    finally:
        if ranks:
            ranks.close()
        if keeper:
            keeper.close()
        shutil.rmtree(folder, ignore_errors=True)
    report(rows, peers, size, all(a["direct"] for a in ready), args.rounds)


def report(rows: dict[str, list[dict]], peers: list[str], size: int, direct: bool, rounds: int) -> None:
    def median(name: str, key: str) -> float:
        return statistics.median(row[key] for row in rows[name])

    def ratio(name: str, other: str, key: str) -> tuple[float, float, float]:
        return bootstrap([a[key] / b[key] for a, b in zip(rows[name], rows[other], strict=True)])

    step_ms = 1e3 * statistics.median(row["median"] for row in rows["ours"])
    matmuls = 1e3 * statistics.median(row["matmuls"] for row in rows["ours"])
    print(f"{machine()}\n{size / 1e9:.2f} GB, {WORLD} ranks, {rounds} rounds in turns; ", end="")
    print(f"undisturbed step {step_ms:.0f} ms, of which matmuls {matmuls:.0f} ms")
    print(f"raw: {'O_DIRECT' if direct else 'through the page cache'} and fsync; medians, [lowest, highest]\n")
    print(f"{'':32}{'extra s':>22}{'blocked s':>24}{'durable after s':>24}{'GB/s':>7}")
    for name, found in rows.items():

        def cell(key: str, found=found) -> str:
            if key not in found[0]:
                return ""
            values = [row[key] for row in found]
            return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"

        drain = statistics.median(row["drain"] for row in found) / 1e9
        print(f"{name:32}{cell('extra'):>22}{cell('blocked'):>24}{cell('seconds'):>24}{drain:7.2f}")
    best = {key: min(peers, key=lambda name: median(name, key)) for key in ("extra", "blocked", "seconds")}
    extra = median("ours", "extra") / median(best["extra"], "extra")
    blocked = median("ours", "blocked") / median(best["blocked"], "blocked")
    drain = median("ours", "drain") / median(best["seconds"], "drain")
    since = statistics.median((row["file"] + row["commit"]) / row["seconds"] for row in rows["ours"])
    beside, alone = (median("ours", "drain") / since / median(name, "drain") for name in ("raw", "raw alone"))
    print("\nours over DCP's best: ", end="")
    print(f"extra {extra:.2f} (bar 0.5), blocked {blocked:.2f} (bar 0.2), drain {drain:.2f} (bar 1)")
    print(f"drain over raw: {beside:.2f} beside the training (bar 0.8), {alone:.2f} over raw alone; ", end="")
    print(f"from the request on {beside * since:.2f}")
    sync = median("ours", "blocked") / median("dcp", "blocked")
    print(f"blocked over that of DCP when it stages before it returns: {sync:.2f}")
    parts = ", ".join(f"{key} {median('ours', key):.3f}" for key in ("request", "copy", "file", "commit"))
    print(f"ours, in s: {parts} (request: of blocked; copy: beside the step; file: verify, write, fsync)")
    for key, name in best.items():
        middle, low, high = ratio("ours", name, key)
        print(f"    {key}: by round {middle:.2f} (95 % {low:.2f} to {high:.2f}), against {name}")
    finish(
        "checkpoint_stall",
        extra <= 0.5 and blocked <= 0.2 and drain >= 1 and beside >= 0.8,
        gigabytes=round(size / 1e9, 2),
        extra_ratio=round(extra, 3),
        blocked_ratio=round(blocked, 3),
        blocked_ratio_sync_staging=round(sync, 3),
        drain_over_dcp=round(drain, 2),
        drain_over_raw=round(beside, 2),
        drain_over_raw_alone=round(alone, 2),
        durable_over_raw=round(beside * since, 2),
        medians={
            name: {key: round(statistics.median(row[key] for row in found), 3) for key in found[0] if key != "drain"}
            for name, found in rows.items()
        },
    )


if __name__ == "__main__":
    main()
