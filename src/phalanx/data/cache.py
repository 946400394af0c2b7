"""Chunks of remote data sets on a local disk, keyed by hash so that runs share them. The cache guarantees nothing about
its bytes; the reader verifies them. It stays under its limit by dropping the least recently used chunks. A chunk that
is dropped while it is being read is still read to its end."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

FULL, KEPT = 0.9, 0.8  # fractions of the limit: where dropping begins, and where it ends
LOOKS = 32  # a process rescans the folder, which others fill too, after putting 1/LOOKS of the limit


class Cache:
    def __init__(self, folder: Path, limit_bytes: int):
        self.folder, self.limit_bytes = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock, self._evicting = threading.Lock(), threading.Lock()
        self._bytes = 0
        self._unseen = limit_bytes  # put since the last scan; starts full, so that the first put scans

    def get(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None  # missing or unreadable: the store has it
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def put(self, key: bytes, data: bytes | memoryview) -> None:
        """Store a chunk if possible: a full or broken disk costs speed, not the run."""
        size = len(data)
        if size > (1 - FULL) * self.limit_bytes:
            return
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        with self._lock:
            self._bytes += size
            self._unseen += size
            look = self._bytes > FULL * self.limit_bytes or self._unseen > self.limit_bytes / LOOKS
        if look and self._evicting.acquire(blocking=False):  # one thread is enough; the others have chunks to fetch
            try:
                self._evict()
            finally:
                self._evicting.release()

    def drop(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name[2:]

    def _entries(self) -> list[tuple[float, int, str]]:
        """List the last use, the size and the path of every file, including half-written ones of others."""
        found = []
        with contextlib.suppress(OSError):
            for folder in [f.path for f in os.scandir(self.folder) if len(f.name) == 2]:
                with contextlib.suppress(OSError), os.scandir(folder) as files:
                    for file in files:
                        with contextlib.suppress(OSError):
                            stat = file.stat()
                            found.append((stat.st_mtime, stat.st_size, file.path))
        return found

    def _evict(self) -> None:
        """Drop entries by what is really on disk, because other processes put and drop too."""
        with self._lock:
            self._bytes = self._unseen = 0
        entries = self._entries()
        total = sum(size for _, size, _ in entries)
        if total > FULL * self.limit_bytes:
            for _, size, path in sorted(entries):
                if total <= KEPT * self.limit_bytes:
                    break
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass  # another process was faster
                except OSError:
                    continue
                total -= size
        with self._lock:
            self._bytes += total
