"""Chunks of remote data sets on a local disk, by their hash, so that runs share them. Whoever reads verifies: the
cache promises nothing about its bytes. It stays under its limit by dropping what was used longest ago; a chunk that
is being read while it is dropped is read to its end."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class Cache:
    def __init__(self, folder: Path, limit_bytes: int):
        self.folder, self.limit_bytes = folder, limit_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._bytes = sum(size for _, size, _ in self._entries())

    def get(self, key: bytes) -> bytes | None:
        path = self._path(key)
        try:
            with open(path, "rb") as f:
                data = f.read()
            os.utime(path)
            return data
        except OSError:
            return None  # not there, or not readable any more: the store has it

    def put(self, key: bytes, data: object) -> None:
        """Best effort: a full or broken disk costs speed, not the run."""
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)  # type: ignore[arg-type]
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        with self._lock:
            self._bytes += path.stat().st_size if path.exists() else 0
            if self._bytes > self.limit_bytes:
                self._evict()

    def drop(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name[2:]

    def _entries(self) -> list[tuple[float, int, Path]]:
        """When each was used last, its size, its file."""
        found = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found

    def _evict(self) -> None:
        """Down to nine tenths, by what is really there: other processes put and drop too."""
        entries = sorted(self._entries())
        self._bytes = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if self._bytes <= 0.9 * self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            self._bytes -= size
