"""Where a data set lies: a folder, or a bucket behind obstore (S3, GCS, Azure, HTTP, memory). Reads ranges,
writes whole objects atomically, never lists. Errors are OSErrors; FileNotFoundError when there is no such object."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from phalanx.core.errors import UserError

SCHEMES = ("s3", "gs", "az", "http", "https", "memory")
REMEDY = f"name a folder, or a URL that begins with one of {', '.join(s + '://' for s in SCHEMES)}"


class Store(Protocol):
    url: str
    is_local: bool

    def read(self, name: str) -> bytes: ...
    def read_range(self, name: str, start: int, end: int) -> Any:
        """A bytes-like object; shorter than asked where the object ends before."""

    def write(self, name: str, data: bytes | Path) -> None:
        """All of it or nothing. A file is moved away from where it was."""

    def size(self, name: str) -> int: ...


def is_remote(url: str) -> bool:
    return urlsplit(url).scheme in SCHEMES


def open_store(url: str) -> Store:
    scheme = urlsplit(url).scheme
    if scheme in SCHEMES:
        return ObjectStore(url)
    if scheme not in ("", "file"):
        raise UserError(f"there is no store {scheme!r}", field="data", value=url, remedy=REMEDY)
    return Folder(Path(urlsplit(url).path if scheme else url))


class Folder:
    is_local = True

    def __init__(self, path: Path, open_files: int = 64):
        self.path, self.url = path.absolute(), str(path.absolute())
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._lock, self._open_files = threading.Lock(), open_files

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        # By descriptors kept open: a shard that is replaced (renamed over) while it is read stays the old one.
        with self._lock:
            fd = self._fds.pop(name, None)
            if fd is None:
                fd = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            self._fds[name] = fd
            mine = os.dup(fd)  # another thread may close the one that is kept
            while len(self._fds) > self._open_files:
                os.close(self._fds.popitem(last=False)[1])
        try:
            return os.pread(mine, end - start, start)
        finally:
            os.close(mine)

    def write(self, name: str, data: bytes | Path) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = data
        if not isinstance(source, Path):
            source = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            with open(source, "wb") as f:
                f.write(data)  # type: ignore[arg-type]
                f.flush()
                os.fsync(f.fileno())
        os.replace(source, target)
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size


class ObjectStore:
    is_local = False

    def __init__(self, url: str):
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self.url = url.rstrip("/")
        # Retries are ours (fetch.py), so that they share one deadline; http only where the endpoint says so.
        options: dict[str, Any] = {"allow_http": True, "connect_timeout": "5s", "timeout": "60s"}
        try:
            self._store = from_url(self.url, client_options=options, retry_config={"max_retries": 0})  # type: ignore
        except (BaseError, ValueError) as error:
            raise UserError(str(error), field="data", value=url, remedy=REMEDY) from None

    def read(self, name: str) -> bytes:
        import obstore

        return _translated(name, lambda: bytes(obstore.get(self._store, name).bytes()))

    def read_range(self, name: str, start: int, end: int) -> Any:
        import obstore

        return _translated(name, lambda: obstore.get_range(self._store, name, start=start, end=end))

    def write(self, name: str, data: bytes | Path) -> None:
        import obstore

        _translated(name, lambda: obstore.put(self._store, name, data))
        if isinstance(data, Path):
            data.unlink()

    def size(self, name: str) -> int:
        import obstore

        return _translated(name, lambda: obstore.head(self._store, name)["size"])


def _translated(name: str, call: Any) -> Any:
    from obstore.exceptions import BaseError

    try:
        return call()
    except FileNotFoundError:
        raise
    except BaseError as error:
        text = " ".join(str(error).split())[:300]
        if "404" in text or "NoSuchKey" in text:
            raise FileNotFoundError(f"{name}: {text}") from None
        raise OSError(f"{name}: {text}") from None
