"""A data set of 15 trillion tokens: the memory of the index, and the time from the manifest's bytes on disk to the
first batch in memory, at step 0 and at step 1,000,000; each in a fresh process.

The data set is simulated: a whole manifest (4-byte tokens, chunks and shards of the usual sizes, seven sources), and
only those few shards that the two batches touch, as sparse files with the touched chunks and a footer whose other
hashes are made up. So all code is the real one and every byte read is verified; a remote store is not simulated.

Bar: index < 10 MB (traced, and growth of the resident set), < 1 s, both the same at the two steps within noise."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from phalanx.core.manifest import HASH_BYTES, MANIFEST, Extent, Field, Manifest, manifest_name, shard_file
from phalanx.core.store import open_store
from phalanx.data.fetch import Fetcher, read_manifest
from phalanx.data.loader import Loader, make_order
from phalanx.data.shard_file import CHUNK_BYTES, SHARD_BYTES, fast_hash, root_of, strong_hash, version_of

TOKENS, SEQ, GLOBAL_BATCH, ROWS, GROUPS = 15 * 10**12, 4096, 2048, 64, 1024
VOCAB = 128_256
SHARES = {"web": 60, "code": 15, "books": 8, "papers": 7, "math": 5, "wiki": 3, "forums": 2}  # of all tokens, in %
STEPS = (0, 1_000_000)
DOCUMENT = 1000  # average number of tokens, for the peers' document indices
PERMUTED = 200_000 if SMOKE else 20_000_000  # samples that the peers shuffle; the rest is extrapolated


def skeleton() -> Manifest:
    """Build the manifest, with made-up roots."""
    extents = tuple(Extent(name, TOKENS * share // 100) for name, share in SHARES.items())
    chunk_items, shard_chunks = CHUNK_BYTES // 4, SHARD_BYTES // CHUNK_BYTES
    shards = sum(-(-e.items // (chunk_items * shard_chunks)) for e in extents)
    roots = np.random.default_rng(0).integers(0, 256, (shards, HASH_BYTES), np.uint8)
    return Manifest((Field("tokens", "<u4"),), extents, roots, chunk_items, shard_chunks, vocab_size=VOCAB, eos=0)


def places_of(step: int) -> np.ndarray:
    """Return the places of one node's part of a step."""
    return step * GLOBAL_BATCH + np.arange(ROWS)


def write_data(folder: Path) -> None:
    m = skeleton()
    order, rng = make_order(m, SEQ, 1, GROUPS), np.random.default_rng(1)
    loader = Loader(m, order, SEQ, Fetcher(open_store(str(folder)), m))
    touched: dict[tuple[int, int], set[int]] = {}
    for step in STEPS:
        located = loader.locate(places_of(step))
        for e, s in zip(located.extents.tolist(), located.samples.tolist(), strict=True):
            for extent, shard, chunk in loader._chunks(e, s):
                touched.setdefault((extent, shard), set()).add(chunk)
    (folder / "shards").mkdir()
    roots = m.roots.copy()
    for (extent, shard), chunks in touched.items():
        footer = np.frombuffer(rng.bytes(m.footer_bytes(extent, shard)), np.uint8).reshape(-1, HASH_BYTES).copy()
        with open(folder / "shards" / "part", "wb") as f:
            for chunk in chunks:
                start, end = m.chunk_range(extent, shard, chunk)
                data = rng.integers(0, VOCAB, (end - start) // 4).astype("<u4").tobytes()
                f.seek(start)
                f.write(data)
                footer[chunk] = np.frombuffer(fast_hash(data) + strong_hash(data), np.uint8)
            f.seek(m.shard_bytes(extent, shard) - footer.size)
            f.write(footer.tobytes())
        root = root_of(footer.tobytes())
        roots[m.first_root[extent] + shard] = np.frombuffer(root, np.uint8)
        (folder / "shards" / "part").rename(folder / shard_file(m.extents[extent].source, extent, shard, root))
    whole = Manifest(m.fields, m.extents, roots, m.chunk_items, m.shard_chunks, vocab_size=VOCAB, eos=0)
    data = whole.encode()
    for name in (manifest_name(version_of(data)), MANIFEST):
        (folder / name).write_bytes(data)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def case(folder: str, step: int, trace: bool) -> None:
    """Measure in a fresh process. Memory is taken once the manifest, the order and the loader exist and the first
    places are located, so that it is the index; the batch and its chunks come after."""
    make_order(skeleton_of_one(), SEQ, 1, 1).locate(np.arange(8))  # numpy's own memory is not the index's
    before = resident_bytes()
    if trace:
        tracemalloc.start()
    began = time.perf_counter()
    store = open_store(folder)
    manifest, _ = read_manifest(store)
    fetcher = Fetcher(store, manifest, max_id=VOCAB)
    loader = Loader(manifest, make_order(manifest, SEQ, 1, GROUPS), SEQ, fetcher)
    located = loader.locate(places_of(step))
    located_s = time.perf_counter() - began
    figures = {"rss": resident_bytes() - before, "held": 0, "full": 0, "peak": 0}
    if trace:
        figures["held"], figures["peak"] = tracemalloc.get_traced_memory()
        loader.locate(step * GLOBAL_BATCH + np.arange(GLOBAL_BATCH))  # all groups, so that its cache is at its limit
        gc.collect()
        figures["full"] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    began = time.perf_counter()
    rows = np.empty((ROWS, loader.width), manifest.dtype)
    loader.fill(located, rows)
    assert rows.max() < VOCAB
    figures |= {"located_s": located_s, "first_s": located_s + time.perf_counter() - began}
    print(json.dumps(figures), flush=True)
    os._exit(0)


def skeleton_of_one() -> Manifest:
    items = CHUNK_BYTES // 4
    return Manifest((Field("tokens", "<u4"),), (Extent("a", items),), np.zeros((1, 32), np.uint8), items, 1, eos=0)


def run(folder: Path, step: int, trace: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--case", str(folder), str(step), str(int(trace))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def peers() -> None:
    samples, documents = TOKENS // SEQ, TOKENS // DOCUMENT
    began = time.perf_counter()
    np.random.default_rng(0).permutation(PERMUTED)
    permuted_s = (time.perf_counter() - began) * samples / PERMUTED
    print(f"\nthe same tokens elsewhere, computed (sequence {SEQ}, {DOCUMENT} tokens per document, one epoch)")
    figures = [
        ("Megatron-core: .idx of documents", 20 * documents, "4 B length, 8 B pointer, 8 B document; mapped"),
        ("  document index", 4 * documents, "int32, 2.1e9 per data set at most; gpt_dataset.py"),
        ("  sample index", 16 * samples, "2 x int64 beyond int32; gpt_dataset.py, helpers.cpp"),
        ("  shuffle index", 4 * samples, "uint32; gpt_dataset.py"),
        ("  blend index", 10 * samples, "int16 + int64; blended_dataset.py"),
        ("Mosaic streaming: epoch of sample ids", 8 * samples, "int64 in /dev/shm per node; dataset.py, _share_work"),
        ("OLMo-core: global indices file", 4 * samples, "uint32, N < 2**32; data_loader.py"),
    ]
    for name, size, source in figures:
        print(f"  {name:42}{size / 1e9:8.1f} GB   {source}")
    measured = f"extrapolated from {PERMUTED / 1e6:g}e6 measured"
    print(f"  numpy permutation of {samples / 1e9:.2f}e9: {permuted_s:.0f} s, {measured}")
    mosaic = os.environ.get("PHALANX_PEERS_PYTHON", sys.executable)
    code = (
        "import time; from streaming.base.shuffle import get_shuffle; import numpy as np;"
        f"n = {PERMUTED};"
        "t = time.time(); get_shuffle('py1e', np.full(n // 8192 + 1, 8192), 64, 1, 0, 1 << 18); print(time.time() - t)"
    )
    done = subprocess.run([mosaic, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"  Mosaic's own shuffle (py1e): not measured: {done.stderr.strip().splitlines()[-1]}")
    else:
        epoch_s = float(done.stdout.split()[-1]) * samples / PERMUTED
        print(f"  Mosaic's own shuffle (py1e) of all: {epoch_s:.0f} s, {measured}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1 if SMOKE else 16)
    parser.add_argument("--case", nargs=3)
    args = parser.parse_args()
    if args.case:
        case(args.case[0], int(args.case[1]), args.case[2] == "1")
    print(machine())
    seen: dict[int, list[dict[str, float]]] = {step: [] for step in STEPS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        size = (folder / MANIFEST).stat().st_size
        traced = {step: run(folder, step, True) for step in STEPS}
        for r in range(args.rounds):
            for step in STEPS[:: -1 if r % 2 else 1]:
                seen[step].append(run(folder, step, False))
    m = skeleton()
    print(f"{TOKENS / 1e12:.0f}e12 tokens, {len(m.roots)} shards, manifest of {size / 1e6:.2f} MB, {GROUPS} groups")
    print(f"first batch: {ROWS} rows of {SEQ} + 1; median of {args.rounds} processes (least to most)\n")
    print(f"{'step':>9}{'held':>9}{'at most':>9}{'peak':>9}{'resident':>22}{'located after':>24}{'batch after':>26}")
    columns = (("rss", 1e6, "MB", 22), ("located_s", 1e-3, "ms", 24), ("first_s", 1e-3, "ms", 26))
    medians: dict[str, list[float]] = {}
    for step in STEPS:
        cells = "".join(f"{f'{traced[step][key] / 1e6:.1f} MB':>9}" for key in ("held", "full", "peak"))
        for key, scale, unit, width in columns:
            values = sorted(f[key] / scale for f in seen[step])
            medians.setdefault(key, []).append(statistics.median(values))
            cells += f"{f'{medians[key][-1]:.1f} {unit} ({values[0]:.1f} to {values[-1]:.1f})':>{width}}"
        print(f"{step:9}{cells}")
    print(
        "\nheld: by tracemalloc, when the batch is located; at most: when all groups' were; peak: while the manifest is"
    )
    print("decoded. resident: growth of the process. Hashes of chunks in use are kept besides, 4 MiB at most.")
    peers()
    ratio, low, high = bootstrap([b["first_s"] / a["first_s"] for a, b in zip(*seen.values(), strict=True)])
    print(f"\ntime at step {STEPS[1]} over step 0: {ratio:.2f} ({low:.2f} to {high:.2f})")
    # Walking to a step would cost a multiple; other load on the machine costs a fifth. It is luck whether malloc
    # returns the memory of decoding the manifest (2 MB), so the minimum stands for a step.
    least = [min(f["rss"] for f in seen[step]) / 1e6 for step in STEPS]
    held = [traced[step]["full"] / 1e6 for step in STEPS]
    equal = low <= 1.25 and high >= 0.8 and all(abs(a - b) < 1 for a, b in (least, held))
    full_mb, rss_mb, first_ms = max(t["full"] for t in traced.values()) / 1e6, max(medians["rss"]), medians["first_s"]
    ok = full_mb < 10 and rss_mb < 10 and max(first_ms) < 1000 and equal
    finish(
        "data_scale",
        ok,
        index_mb=round(full_mb, 2),
        resident_mb=round(rss_mb, 2),
        first_batch_ms=[round(v, 1) for v in first_ms],
        step_ratio=round(ratio, 3),
        same_at_both_steps=equal,
    )


if __name__ == "__main__":
    main()
