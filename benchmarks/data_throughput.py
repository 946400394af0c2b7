"""Our loader end to end, from local shards: chunks verified and range-checked, shuffled by the order, rows of 4096 + 1
packed tokens, as the ranks get them. It takes turns with mosaicml-streaming, Grain, torch's DataLoader over a memmap
and a bare copy out of a memmap, which check nothing. Every contender gets the same tokens, a fresh process on the same
two cores, a warm page cache and one pass through the data before the measured one. Document ends are found on the
ranks; a row of the table shows what it would cost to find them here.

Bar: >= 3x Mosaic and >= 0.8x the bare copy, by the median of the rounds' ratios. Peers are looked for in the
interpreter that PHALANX_PEERS_PYTHON names, else in this one; a missing one is named and not measured."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from data_throughput_cases import CASES, DTYPE, EOS, SEQ, VOCAB

from phalanx.core.manifest import MANIFEST, Extent, Field, Manifest, manifest_name, shard_file
from phalanx.core.store import Folder
from phalanx.data.shard_file import CHUNK_BYTES, SHARD_BYTES, ShardWriter, version_of

PEERS = os.environ.get("PHALANX_PEERS_PYTHON", sys.executable)
OURS, FLOOR = "phalanx", "bare memmap copy"
DOCUMENT = 1000  # average number of tokens
SAMPLES = (2 if SMOKE else 16) * 4096


def write_data(folder: Path) -> int:
    """Write the same tokens as shards and as one plain file; return their sum, without the last."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, SAMPLES * SEQ + 1).astype(DTYPE)
    tokens[rng.integers(0, len(tokens), len(tokens) // DOCUMENT)] = EOS
    tokens.tofile(folder / "tokens.bin")
    store, chunk_items, shard_chunks = Folder(folder / "phalanx"), CHUNK_BYTES // 2, SHARD_BYTES // CHUNK_BYTES
    (folder / "phalanx").mkdir()

    def keep(shard: int, path: Path) -> None:
        store.write(shard_file("synthetic", 0, shard, writer.roots[-1]), path)

    writer = ShardWriter(folder, DTYPE, 1, chunk_items, shard_chunks, keep)
    writer.add(tokens)
    fields, extents = (Field("tokens", DTYPE.str),), (Extent("synthetic", len(tokens)),)
    manifest = Manifest(fields, extents, writer.finish(), chunk_items, shard_chunks, vocab_size=VOCAB, eos=EOS)
    data = manifest.encode()
    for name in (manifest_name(version_of(data)), MANIFEST):
        store.write(name, data)
    return int(tokens[:-1].sum(dtype=np.uint64))


def run(name: str, folder: Path, cores: str) -> subprocess.CompletedProcess[str]:
    peer = "Mosaic" in name or name == "Grain"
    script = str(Path(__file__).with_name("data_throughput_cases.py"))
    command = [PEERS if peer else sys.executable, "-W", "ignore", script, name, str(folder), cores]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def why(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1 if SMOKE else 7)
    rounds = parser.parse_args().rounds
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    wall: dict[str, list[float]] = {name: [] for name in CASES}
    cpu: dict[str, list[float]] = {name: [] for name in CASES}
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        expected = write_data(folder)
        written = run("write Mosaic", folder, cores)
        if written.returncode:
            absent = {name: why(written) for name in CASES if "Mosaic" in name}
        for r in range(rounds):
            # Each round begins with a different one, so that none always follows the same.
            names = [*CASES][r % len(CASES) :] + [*CASES][: r % len(CASES)]
            for name in names:
                if name in absent:
                    continue
                done = run(name, folder, cores)
                if done.returncode:
                    if name in (OURS, FLOOR):
                        raise RuntimeError(done.stderr)
                    absent[name] = why(done)
                    continue
                figures = json.loads(done.stdout.splitlines()[-1])
                assert figures["rows"] == SAMPLES, (name, figures)
                assert figures["sum"] == expected, (name, "served something else")
                wall[name].append(figures["wall_s"])
                cpu[name].append(figures["cpu_s"])
    show(wall, cpu, absent, rounds)


def show(wall, cpu, absent, rounds) -> None:
    size = SAMPLES * (SEQ + 1) * 2
    print(machine())
    print(f"{SAMPLES} rows of {SEQ} + 1 uint16 ({size / 1e6:.0f} MB) per pass, batches of 64, {rounds} rounds\n")
    print(f"{'':30}{'GB/s':>8}{'Mtok/s':>9}{'CPU us/row':>12}{'phalanx is':>12}   95 % interval")
    figures: dict[str, float | None] = {}
    for name in CASES:
        if name in absent or len(wall[name]) < len(wall[OURS]):
            print(f"{name:30}{'not measured: ' + absent[name]}")
            figures[name] = None
            continue
        middle = float(np.median(wall[name]))
        ratio, low, high = bootstrap([other / ours for other, ours in zip(wall[name], wall[OURS], strict=True)])
        speed = f"{size / middle / 1e9:8.2f}{SAMPLES * SEQ / middle / 1e6:9.0f}"
        print(
            f"{name:30}{speed}{np.median(cpu[name]) / SAMPLES * 1e6:12.2f}{ratio:11.2f}x   {low:.2f} to {high:.2f}",
            flush=True,
        )
        figures[name] = round(ratio, 3)
    print("\nCPU: of the process, without workers'. 8 groups: windows of eight lanes at once, as a run of one node has")
    print("by default; what a block does not use of a chunk is kept for the next.")
    mosaic = min((f for name, f in figures.items() if "Mosaic" in name and f), default=None)
    floor = figures[FLOOR]
    ok = floor is not None and floor >= 0.8 and mosaic is not None and mosaic >= 3
    finish("data_throughput", ok, over_mosaic=mosaic, over_memmap=floor, ratios=figures)


if __name__ == "__main__":
    main()
