"""Small data sets, written without `phalanx data build`, and stores that misbehave."""

import tempfile
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from phalanx.core.manifest import MANIFEST, Extent, Field, Manifest, manifest_name, shard_file
from phalanx.core.store import Folder
from phalanx.data.fetch import Fetcher
from phalanx.data.loader import Loader, make_order
from phalanx.data.shard_file import ShardWriter, version_of

TOKENS = (Field("tokens", "<u2"),)


def write_set(store, extents, chunk_items=16, shard_chunks=4, fields=TOKENS, pieces=(), **more):
    """Write [(source, items)...], and return the manifest and its version."""
    roots, known = [], [Extent(source, len(items)) for source, items in extents]
    names = Manifest(fields, tuple(known), np.empty((0, 32), np.uint8), chunk_items, shard_chunks)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as staging:
        for e, (_, items) in enumerate(extents):
            writer = ShardWriter(
                Path(staging),
                names.dtype,
                names.overlap,
                chunk_items,
                shard_chunks,
                lambda shard, path, e=e: store.write(shard_file(known[e].source, e, shard, writer.roots[-1]), path),  # noqa: B023
            )
            cuts = [0, *sorted(c % (len(items) + 1) for c in pieces), len(items)]
            for first, end in pairwise(cuts):
                writer.add(items[first:end])
            roots.append(writer.finish())
    manifest = Manifest(fields, tuple(known), np.concatenate(roots), chunk_items, shard_chunks, **more)
    version = version_of(manifest.encode())
    for name in (manifest_name(version), MANIFEST):
        store.write(name, manifest.encode())
    return manifest, version


def ramp(n, first=0):
    return (np.arange(first, first + n) % 65536).astype("<u2")


def make_loader(store, manifest, seq_len=8, seed=1, groups=2, quarantine_limit=8, fetcher=None, **more):
    """Return a loader, and the list of events that it reports."""
    events = []
    fetcher = fetcher or Fetcher(store, manifest, start_jitter_s=0.0, **more)
    order = make_order(manifest, seq_len, seed, groups)
    return Loader(manifest, order, seq_len, fetcher, quarantine_limit, events.append), events


class Memory:
    """A local store without files, for many small sets."""

    url, is_local = "memory", True

    def __init__(self):
        self.files = {}

    def read(self, name):
        return self.files[name]

    def read_range(self, name, start, end):
        return self.files[name][start:end]

    def write(self, name, data, overwrite=True):
        self.files[name] = data.read_bytes() if isinstance(data, Path) else data
        if isinstance(data, Path):
            data.unlink()

    def size(self, name):
        return len(self.files[name])

    def refresh(self, name):
        pass


class Remote:
    """A folder that passes for a remote store; `on_read` may wait, raise, or change what is read."""

    is_local = False

    def __init__(self, folder, on_read=None):
        self.folder = folder if isinstance(folder, Folder) else Folder(folder)
        self.url, self.on_read = "s3://stub", on_read
        self.calls, self.busy, self.most_busy, self._lock = Counter(), 0, 0, threading.Lock()

    def read(self, name):
        return self.folder.read(name)

    def read_range(self, name, start, end):
        with self._lock:
            self.calls[name, start] += 1
            count = self.calls[name, start]
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
        try:
            data = self.folder.read_range(name, start, end)
            return self.on_read(name, start, count, data) if self.on_read else data
        finally:
            with self._lock:
                self.busy -= 1

    def refresh(self, name):
        self.folder.refresh(name)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)  # in place: readers that hold it open see it


def threads_named(prefix):
    return [t.name for t in threading.enumerate() if t.name.startswith(prefix)]
