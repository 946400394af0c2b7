"""The second reader: a separate process that reads again what the first found damaged, from the disk itself and not
from the page cache. Only what both find damaged is condemned, because memory, a cable or a stale mount may deceive one
of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence

from phalanx.checkpoint.files import Fault, Reader
from phalanx.core.checkpoint import MANIFEST, BadCheckpoint, Unreadable, file_name
from phalanx.core.errors import UserError
from phalanx.core.store import Folder, Store, open_store

QUIET_S = 120.0  # without a byte read means that the disk hangs
RANK_FILE = re.compile(r"/rank-(\d{6,})\.bin")


def look(store: Store, name: str, reason: str = "") -> list[Fault]:
    """Return the faults that another process finds in the files that `reason` names, or in all if it names none."""
    ranks = sorted({int(rank) for rank in RANK_FILE.findall(reason)})
    if store.url.startswith("memory:"):  # no other process sees it
        return read_again(store, name, ranks)
    command = [sys.executable, "-P", "-m", "phalanx.checkpoint.second", store.url, name, *map(str, ranks)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    reader = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C must not count as a fault of the checkpoint
    )
    try:
        last = _last_line(reader)
        return [Fault(str(text), bool(damage)) for text, damage in json.loads(last)]
    except (TimeoutError, subprocess.TimeoutExpired):
        return [Fault(f"{name}: cannot be read: nothing was read for {QUIET_S:.0f} s", False)]
    except (ValueError, TypeError):
        return [Fault(f"{name}: the second reader failed with code {reader.poll()}: {last}", False)]
    finally:
        reader.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel
            reader.wait(1.0)


def _last_line(reader: subprocess.Popen[bytes]) -> str:
    """Return the reader's last line. Every line before is a sign of life; raises TimeoutError after QUIET_S without
    one."""
    assert reader.stdout
    said, there = b"", selectors.DefaultSelector()
    with there, reader.stdout as pipe:
        there.register(pipe, selectors.EVENT_READ)
        while there.select(QUIET_S):
            if not (data := os.read(pipe.fileno(), 1 << 16)):
                reader.wait(QUIET_S)
                return said.decode(errors="replace").strip().rpartition("\n")[2]
            said += data
    raise TimeoutError


def read_again(
    store: Store, name: str, ranks: Sequence[int] = (), on_bytes: Callable[[int], None] = lambda n: None
) -> list[Fault]:
    """Return the faults in these ranks' files, or in all files."""
    try:
        _forget(store, f"{name}/{MANIFEST}")
        reader = Reader(store, name)
        wanted = [rank for rank in ranks or range(len(reader.manifest.files)) if rank < len(reader.manifest.files)]
        for rank in wanted:
            _forget(store, f"{name}/{file_name(rank)}")
        return reader.verify(on_bytes, wanted)
    except FileNotFoundError:
        return [Fault(f"{name}: has been removed", False)]
    except BadCheckpoint as error:
        return [Fault(str(error), not isinstance(error, Unreadable))]
    except (OSError, UserError) as error:
        return [Fault(f"{name}: {error}", False)]


def _forget(store: Store, name: str) -> None:
    """Drop a file from the page cache."""
    if isinstance(store, Folder):
        with contextlib.suppress(OSError):
            fd = os.open(store.path / name, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


if __name__ == "__main__":
    url, checkpoint, *numbers = sys.argv[1:]
    faults = read_again(open_store(url), checkpoint, [int(n) for n in numbers], lambda size: print(size, flush=True))
    print(json.dumps(faults))
