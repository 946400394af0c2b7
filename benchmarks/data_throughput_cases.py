"""One contender of data_throughput.py, in a process of its own: `NAME FOLDER CORES`. It goes through the data once
unmeasured (which opens, maps and faults in what it needs, and sums the tokens served), then once measured, and prints
one JSON line. It imports the package only for our own loader, so that the peers may have another interpreter."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

SEQ, BATCH, VOCAB, EOS = 4096, 64, 50257, 0
DTYPE = np.dtype("<u2")


def rows_of(folder: Path) -> np.ndarray:
    """Return all samples as overlapping views of the mapped file. Slices of np.memmap are slower."""
    tokens = np.asarray(np.memmap(folder / "tokens.bin", DTYPE, "r"))
    shape = (len(tokens) - 1) // SEQ, SEQ + 1
    return np.lib.stride_tricks.as_strided(tokens, shape, (SEQ * 2, 2), writeable=False)


def memmap(folder):
    rows, out, rng = rows_of(folder), np.empty((BATCH, SEQ + 1), DTYPE), np.random.default_rng(0)

    def epoch():
        order = rng.permutation(len(rows)).tolist()
        for first in range(0, len(rows), BATCH):
            for r, sample in enumerate(order[first : first + BATCH]):
                out[r] = rows[sample]
            yield out

    return epoch


def phalanx(folder, groups=1, documents=False):
    from phalanx.core.store import open_store
    from phalanx.data.fetch import Fetcher, read_manifest
    from phalanx.data.loader import AT_ONCE, Loader, make_order

    store = open_store(str(folder / "phalanx"))
    manifest, _ = read_manifest(store)
    samples = (manifest.extents[0].items - 1) // SEQ
    fetcher = Fetcher(store, manifest, max_id=VOCAB)
    loader = Loader(manifest, make_order(manifest, SEQ, seed=1, groups=groups), SEQ, fetcher)
    if groups > 1:  # sized as in a run
        fetcher.pool_bytes = int(1.25 * groups * loader.order.streams[0].window * manifest.chunk_items * 2)
    out, served = np.empty((AT_ONCE, SEQ + 1), DTYPE), 0

    def epoch():
        nonlocal served
        read = fetcher.counters.bytes_read
        for first in range(served, served + samples, AT_ONCE):
            loader.fill(loader.locate(first + np.arange(AT_ONCE)), out)
            for at in range(0, AT_ONCE, BATCH):
                batch = out[at : at + BATCH]
                if documents:
                    np.flatnonzero(batch == EOS)  # find document ends
                yield batch
        served += samples
        if groups == 1:
            assert fetcher.counters.bytes_read - read >= samples * SEQ * 2  # nothing came from our cache

    return epoch


def torch_loader(folder, workers):
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        rows = rows_of(folder)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return self.rows[i]

    def collate(rows):
        return torch.from_numpy(np.stack(rows))

    kept = {"persistent_workers": True} if workers else {}
    loader = DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, collate_fn=collate, **kept)
    return lambda: (batch.numpy() for batch in loader)


def grain(folder):
    import grain as gr

    class Rows:
        rows = rows_of(folder)

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return self.rows[i]

    data = gr.MapDataset.source(Rows()).shuffle(seed=1).batch(BATCH)
    return lambda: iter(data.to_iter_dataset())


def mosaic(folder, workers):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    data = StreamingDataset(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH)

    def collate(samples):
        return np.stack([s["tokens"] for s in samples])

    kept = {"persistent_workers": True} if workers else {}
    loader = DataLoader(data, BATCH, num_workers=workers, collate_fn=collate, **kept)
    return lambda: iter(loader)


def write_mosaic(folder):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaic"), columns={"tokens": f"ndarray:uint16:{SEQ + 1}"}) as writer:
        for row in rows_of(folder):
            writer.write({"tokens": np.ascontiguousarray(row)})


CASES = {
    "phalanx": phalanx,
    "phalanx, documents sought": lambda folder: phalanx(folder, documents=True),
    "phalanx, 8 groups": lambda folder: phalanx(folder, groups=8),
    "bare memmap copy": memmap,
    "torch DataLoader, 0 workers": lambda folder: torch_loader(folder, 0),
    "torch DataLoader, 2 workers": lambda folder: torch_loader(folder, 2),
    "Grain": grain,
    "Mosaic, 0 workers": lambda folder: mosaic(folder, 0),
    "Mosaic, 2 workers": lambda folder: mosaic(folder, 2),
}


def main(name: str, folder: Path, cores: str) -> None:
    os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    if name == "write Mosaic":
        write_mosaic(folder)
        return
    epoch = CASES[name](folder)
    total = sum(int(batch[:, :-1].sum(dtype=np.uint64)) for batch in epoch())
    cpu, began, rows = time.process_time(), time.perf_counter(), 0
    for batch in epoch():
        rows += len(batch)
    figures = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "rows": rows, "sum": total}
    print(json.dumps(figures), flush=True)
    os._exit(0)  # some peers' threads never end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
