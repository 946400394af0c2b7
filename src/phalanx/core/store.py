"""The places of data sets and checkpoints: a folder, or a bucket behind obstore (S3, GCS, Azure, HTTP, memory). A store
reads ranges, writes whole objects atomically, and replaces an object only if nobody else has changed it. It lists names
only to repair. Errors are OSErrors: FileNotFoundError when there is no such object, PermissionError when asking again
would not help, Changed when somebody else was first, any other when asking again might help."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from phalanx.core.errors import UserError
from phalanx.core.job import SCHEMES

REMEDY = f"name a folder, or a URL that begins with one of {', '.join(s + '://' for s in SCHEMES)}"
READ_S = 20  # one read of a range; an abandoned one holds its thread and its connection no longer than this
LOCK_S = 60.0  # until a folder is free: its holder writes one small file
ONE_REQUEST_BYTES = 64 << 20  # a larger file goes in parts
WHOLE_S = 120  # one request for a whole object, or for a part of one that is written

T = TypeVar("T")


class Changed(OSError):
    """Somebody else has written the object meanwhile."""


class Busy(OSError):
    """A bucket answers that it cannot do it now (429, 5xx)."""


class Store(Protocol):
    url: str
    is_local: bool

    def read(self, name: str) -> bytes: ...
    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """Return the content and a tag that changes with it, for `replace`."""

    def replace(self, name: str, data: bytes, tag: str) -> str:
        """Write if the content is still that of `tag` ("": if there is none), and return the new tag. Changed: it is
        not. Of several writers with the same tag, one succeeds."""

    def folders(self) -> list[str]:
        """List the names of all folders in it. This is slow, and not for the steady state."""

    def read_range(self, name: str, start: int, end: int) -> Any:
        """Return a bytes-like object, shorter than asked where the object ends before."""

    def write(self, name: str, data: bytes | Path, overwrite: bool = True) -> None:
        """Write all of it or nothing. A file that is given is moved away from its place. FileExistsError if something
        is there that must not be overwritten; of several writers that may not overwrite, one succeeds. A file that a
        bucket takes in parts is the exception: the store only looks before it sends the file whether something is
        there."""

    def remove(self, name: str) -> None: ...
    def size(self, name: str) -> int: ...
    def refresh(self, name: str) -> None:
        """Forget what is kept of it, so that the next read sees what is there now."""


PAUSES_S = (2.0, 4.0, 8.0, 16.0, 32.0)


def patiently(call: Callable[[], T], on_wait: Callable[[str], None], pauses_s: Sequence[float] = PAUSES_S) -> T:
    """Call again, for a minute, while a bucket is busy. `on_wait` hears of every pause, and may raise."""
    for pause_s in pauses_s:
        try:
            return call()
        except Busy as error:
            on_wait(f"{error}: trying again in {pause_s:g} s")
            time.sleep(pause_s)
    return call()


def is_remote(url: str) -> bool:
    return urlsplit(url).scheme in SCHEMES


def open_store(url: str) -> Store:
    scheme = urlsplit(url).scheme
    if scheme in SCHEMES:
        return ObjectStore(url)
    if scheme not in ("", "file"):
        raise UserError(f"there is no store {scheme!r}", field="data", value=url, remedy=REMEDY)
    return Folder(Path(unquote(urlsplit(url).path) if scheme else url))


class File:
    """A descriptor that is closed when the last reader lets go of it."""

    def __init__(self, path: Path):
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Folder:
    is_local = True

    def __init__(self, path: Path, open_files: int = 64):
        self.path, self.url = path.absolute(), str(path.absolute())
        self._files: OrderedDict[str, File] = OrderedDict()
        self._lock, self._open_files = threading.Lock(), open_files

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        file = self.open(name)  # held, or it might be closed before it is read
        return os.pread(file.fd, end - start, start)

    def read_into(self, name: str, start: int, room: memoryview) -> int:
        """Read into `room`, and return how many bytes were there."""
        file = self.open(name)
        return os.preadv(file.fd, [room], start)

    def open(self, name: str) -> File:
        with self._lock:
            file = self._files.pop(name, None)
            if file is None or not os.fstat(file.fd).st_nlink:  # deleted, or replaced by another
                file = File(self.path / name)
            self._files[name] = file
            while len(self._files) > self._open_files:
                self._files.popitem(last=False)
        return file

    def write(self, name: str, data: bytes | Path, overwrite: bool = True) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        near = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            if isinstance(data, Path):
                _move(data, near)
            else:
                _write(near, data)
            sync_folder(near)
            if overwrite:
                os.replace(near, target)
            else:
                os.link(near, target)
        except FileExistsError:
            if isinstance(data, Path):
                _move(near, data)
            raise
        finally:
            near.unlink(missing_ok=True)
        sync_folder(target.parent)

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        data = self.read(name)
        return data, _tag_of(data)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        with self._locked(name):
            try:
                now = _tag_of(self.read(name))
            except FileNotFoundError:
                now = ""
            if now != tag:
                raise Changed(f"{name}: somebody else has written it")
            self.write(name, data)
        return _tag_of(data)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Lock the folder, or a file where folders cannot be locked (NFS). TimeoutError: it is not free."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path, os.O_RDONLY)
        try:
            try:
                _lock(lock, self.path)
            except TimeoutError:
                raise
            except OSError:
                os.close(lock)
                path = self.path / f".{name}.lock"
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                _lock(lock, path)
            yield
        finally:
            os.close(lock)

    def folders(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def refresh(self, name: str) -> None:
        with self._lock:
            self._files.pop(name, None)


def _lock(fd: int, path: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{path}: another process has held its lock for {LOCK_S:.0f} s; find it with `lsof {path}`, "
                    "end it if it hangs, and try again"
                ) from None
            time.sleep(0.02)


def _tag_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, memoryview(data)[done:])
    finally:
        os.close(fd)


def _move(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # another disk
            raise
        shutil.copyfile(source, target)
        source.unlink()


def sync_folder(path: Path) -> None:
    """Put what a file holds, or the names in a folder, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ObjectStore:
    is_local = False

    def __init__(self, url: str):
        from obstore.exceptions import BaseError

        self.url = url.rstrip("/")
        try:
            # The fetcher retries ranges itself, so that its retries share one deadline.
            self._once, self._patient = _client(self.url, 0, READ_S), _client(self.url, 6, WHOLE_S)
        except (BaseError, ValueError) as error:
            raise UserError(_text(error), field="data", value=url, remedy=REMEDY) from None

    def read(self, name: str) -> bytes:
        import obstore

        return _translated(name, lambda: bytes(obstore.get(self._patient, name).bytes()))

    def read_range(self, name: str, start: int, end: int) -> Any:
        import obstore

        try:
            return _translated(name, lambda: obstore.get_range(self._once, name, start=start, end=end))
        except _BeyondEnd:
            return b""

    def write(self, name: str, data: bytes | Path, overwrite: bool = True) -> None:
        import obstore

        # A conditional write is one request: not every store has conditions for multipart uploads.
        options: dict[str, Any] = {} if overwrite else {"mode": "create", "use_multipart": False}
        if options and isinstance(data, Path) and data.stat().st_size > ONE_REQUEST_BYTES:
            with contextlib.suppress(FileNotFoundError):
                self.size(name)
                raise FileExistsError(f"{name}: is there already")
            options = {}
        _translated(name, lambda: obstore.put(self._patient, name, data, **options))
        if isinstance(data, Path):
            data.unlink()

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        import obstore

        def get() -> tuple[bytes, str]:
            answer = obstore.get(self._patient, name)
            return bytes(answer.bytes()), str(answer.meta["e_tag"])

        return _translated(name, get)

    def replace(self, name: str, data: bytes, tag: str) -> str:
        try:
            return self._replace(name, data, tag)
        except (Changed, FileExistsError) as error:
            with contextlib.suppress(FileNotFoundError):
                there, now = self.read_tagged(name)
                if there == data:  # it was this very request, whose first answer was lost
                    return now
                if now == tag and '"' in tag:  # Ceph 16 and 17 compare the tag without its quotes
                    return self._replace(name, data, tag.strip('"'))
            raise Changed(str(error)) from None

    def _replace(self, name: str, data: bytes, tag: str) -> str:
        import obstore

        mode: Any = {"e_tag": tag} if tag else "create"
        put = partial(obstore.put, self._patient, name, data, mode=mode, use_multipart=False)
        return str(_translated(name, put)["e_tag"])

    def folders(self) -> list[str]:
        import obstore

        found = _translated("", lambda: obstore.list_with_delimiter(self._patient))
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    def write_pieces(self, name: str, pieces: list[Any]) -> None:
        """Write one object from several buffers, which are sent while others are still on their way."""
        import obstore

        _translated(name, lambda: obstore.put(self._patient, name, iter(pieces)))

    def remove(self, name: str) -> None:
        import obstore

        _translated(name, lambda: obstore.delete(self._patient, name))

    def size(self, name: str) -> int:
        import obstore

        return _translated(name, lambda: obstore.head(self._patient, name)["size"])

    def refresh(self, name: str) -> None:
        pass


def _client(url: str, retries: int, timeout_s: int) -> Any:
    from obstore.store import from_url

    if urlsplit(url).scheme == "memory":
        return _memory(url)
    # Plain http is for endpoints that are named so (on loopback, or inside a cluster).
    options: Any = {"allow_http": True, "connect_timeout": "5s", "timeout": f"{timeout_s}s"}
    retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=2 * timeout_s)}
    return from_url(url, client_options=options, retry_config=retry)


@cache
def _memory(url: str) -> Any:
    """Return one store per address and process, or what was written would be gone when the address is opened again."""
    from obstore.store import MemoryStore

    return MemoryStore()


class _BeyondEnd(OSError):
    pass


_MAYBE_LATER = {408, 409, 425, 429}  # of the 4xx


def _translated(name: str, call: Callable[[], T]) -> T:
    from obstore import exceptions

    try:
        return call()
    except FileNotFoundError as error:
        text = _text(error)
        if "NoSuchBucket" in text:
            raise PermissionError(f"there is no such bucket ({text})") from None
        raise FileNotFoundError(f"{name}: {text}") from None
    except exceptions.AlreadyExistsError as error:
        raise FileExistsError(f"{name}: {_text(error)}") from None
    except exceptions.PreconditionError as error:
        raise Changed(f"{name}: {_text(error)}") from None
    except exceptions.BaseError as error:
        text = _text(error)
        found = re.search(r"status code: (\d{3})", text)
        status = int(found[1]) if found else 0
        if "169.254.169.254" in text:
            raise PermissionError(f"no credentials were found (AWS_ACCESS_KEY_ID and others): {text}") from None
        if status == 416:
            raise _BeyondEnd from None
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        senseless = isinstance(error, exceptions.NotSupportedError | exceptions.InvalidPathError)
        if denied or senseless or (400 <= status < 500 and status not in _MAYBE_LATER) or "redirect" in text:
            raise PermissionError(f"{name}: {text}") from None
        raise (Busy if status == 429 or status >= 500 else OSError)(f"{name}: {text}") from None


def _text(error: Exception) -> str:
    """Return the part that a person can read: the rest repeats it as a data structure."""
    text = " ".join(str(error).split("Debug source")[0].split())
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{text.split('<')[0].strip()} {code[1]}" if code else text[:300]
