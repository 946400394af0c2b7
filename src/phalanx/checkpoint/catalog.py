"""The checkpoints in a folder or a bucket: finds the newest one to load, quarantines damaged ones and removes old ones.
A folder is listed; a bucket has an index (`checkpoint.index`). A checkpoint exists once its manifest does.

    owner.json                            the run that writes here (`core.lease`)
    step-000000042-g0003-<lineage>-<mark>/manifest.json
                                          rank-000000.bin …
                                          quarantined.json      why it must not be loaded

A checkpoint is quarantined only if a second reader confirms the damage. One that cannot be read now is left alone.
Quarantined checkpoints are never deleted; `release` takes one out again once all its bytes are right.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.checkpoint import second
from phalanx.checkpoint.files import Fault, Reader, read_manifest
from phalanx.checkpoint.index import Index
from phalanx.core.checkpoint import (
    MANIFEST,
    NAME,
    BadCheckpoint,
    Manifest,
    Place,
    Unreadable,
    file_name,
    lineage_of,
    place_of,
)
from phalanx.core.store import PAUSES_S, Folder, Store, sync_folder

QUARANTINED = "quarantined.json"
OWNER = "owner.json"  # a lease: the run that writes there
UNDER_WAY_S = 3600  # anything touched more recently may still be in progress
THREADS = 16

OnEvent = Callable[[dict[str, Any]], None]
OnProgress = Callable[[int, int], None]  # bytes done, bytes in total


def ignore(*_: Any) -> None: ...


@dataclass
class Found:
    store: Store
    name: str
    status: str  # good | quarantined | incomplete | unreadable
    since: float  # seconds since 1970
    quarantine: dict[str, Any]  # reason and time; empty if it is not quarantined
    num_files: int = 0  # in a bucket
    why: str = ""  # the reason if it is unreadable

    @property
    def place(self) -> Place:
        return place_of(self.name)

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def lineage(self) -> str:
        return lineage_of(self.name)

    @cached_property
    def manifest(self) -> Manifest:
        """Raise FileNotFoundError if it has since been removed, BadCheckpoint if it is damaged or cannot be read."""
        return read_manifest(self.store, self.name)


class Catalog:
    def __init__(self, store: Store):
        self.store = store
        self.index = None if isinstance(store, Folder) else Index(store)
        self._bad: dict[str, str] = {}  # reasons for quarantine, in case they could not be written
        self._aside: dict[str, str] = {}  # why this process must not try it again
        self._doubted: set[str] = set()  # refused once, but a second reader found them good
        self._pauses = [] if self.store.is_local else [*PAUSES_S]  # shared by all waits for a silent bucket

    # -- listing

    def all(self) -> list[Found]:
        """Return all, even uncommitted ones, newest first: by generation, then by step, then by time."""
        found = [self._look(name, *known) for name, known in self._names().items()]
        return sorted((f for f in found if f), key=lambda f: (f.place, f.since), reverse=True)

    def newest_first(self) -> list[Found]:
        """Return the committed ones."""
        return [found for found in self.all() if found.status != "incomplete"]

    def good(self) -> list[Found]:
        """Return those that may be loaded, newest first."""
        return [found for found in self.all() if found.status == "good"]

    def find(self, place: Place, lineage: str) -> list[Found]:
        """Return the good ones of a step and generation. Read no others: every rank of a gang may ask at once."""
        names = [(name, known) for name, known in self._names().items() if place_of(name) == place]
        found = [self._look(name, *known) for name, known in names if lineage_of(name) == lineage]
        return [each for each in found if each and each.status == "good"]

    def to_try(self) -> list[Found]:
        """Return the good ones and those whose status cannot be read now, newest first."""
        return [found for found in self.all() if found.status in ("good", "unreadable")]

    def _names(self) -> dict[str, tuple[float, int]]:
        """Map each name to its time and number of files. Both are 0 in a folder: `_look` reads the time there."""
        if self.index:
            return {name: (known.since, known.files) for name, known in self.index.names().items()}
        return {name: (0.0, 0) for name in self.store.folders() if NAME.fullmatch(name)}

    def _look(self, name: str, since: float, num_files: int) -> Found | None:
        """Return None if it has since been removed."""
        try:
            why = self._quarantine_of(name)
            is_there = self._has(name)
            if isinstance(self.store, Folder):
                since = (self.store.path / name / (MANIFEST if is_there else "")).stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self.store.is_local:  # the bucket itself does not answer
                raise
            return Found(self.store, name, "unreadable", since, {}, num_files, f"cannot be read: {error.strerror}")
        status = "incomplete" if not is_there else "quarantined" if why else "good"
        return Found(self.store, name, status, since, why, num_files)

    def _has(self, name: str) -> bool:
        try:
            self.store.size(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def _is_gone(self, name: str) -> bool:
        try:
            return not self._has(name)
        except OSError:
            return False

    def _quarantine_of(self, name: str) -> dict[str, Any]:
        try:
            return {"reason": "?", **json.loads(self.store.read(f"{name}/{QUARANTINED}"))}
        except FileNotFoundError:
            return {"reason": self._bad[name]} if name in self._bad else {}
        except ValueError:
            return {"reason": f"{QUARANTINED} is damaged"}

    # -- adding

    def begun(self, name: str, num_files: int) -> None:
        """Index a checkpoint. Call this before its first file is written to a bucket."""
        if self.index:
            self.index.add(name, num_files)

    def added(self, manifest: Manifest) -> None:
        """Index a checkpoint that has been committed."""
        self.begun(manifest.name, len(manifest.files))

    # -- damage

    def quarantine(self, name: str, reason: str) -> bool:
        """Prevent it from being loaded, without deleting anything. Return False if it has already been removed."""
        self._bad[name] = reason
        if not self._has(name):
            return False
        why = json.dumps({"reason": reason, "time": time.time()}).encode()
        with contextlib.suppress(FileExistsError):  # the first reason stays
            self.store.write(f"{name}/{QUARANTINED}", why, overwrite=False)
        return True

    def release(self, name: str) -> list[Fault]:
        """Take it out of quarantine if a second reader finds every byte right; otherwise return the faults."""
        faults = second.look(self.store, name)
        if not faults:
            self._bad.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                self.store.remove(f"{name}/{QUARANTINED}")
        return faults

    def judge(self, name: str, reason: str, on_event: OnEvent = ignore) -> bool:
        """Decide whether to retry a checkpoint that a reader refused. If a second reader confirms the damage,
        quarantine it; if it finds it good, retry once; if it cannot read it, leave it as it is."""
        faults = second.look(self.store, name, reason)
        while faults and all(fault.no_answer for fault in faults) and self._pauses:
            on_event({"type": "checkpoint_waits", "checkpoint": name, "reason": faults[0].text})
            time.sleep(self._pauses.pop(0))
            faults = second.look(self.store, name, reason)
        damage = [fault.text for fault in faults if fault.damage]
        if damage:
            self._condemn(name, told(damage), on_event)
            return False
        if not faults and name not in self._doubted:
            self._doubted.add(name)
            return True
        if faults and self._is_gone(name):
            return False  # removed in the meantime
        self._aside[name] = faults[0].text if faults else f"{reason} (a second reader found it good)"
        on_event({"type": "checkpoint_unreadable", "checkpoint": name, "reason": self._aside[name]})
        return False

    def _condemn(self, name: str, reason: str, on_event: OnEvent) -> None:
        try:
            if not self.quarantine(name, reason):
                return
        except OSError as error:
            reason += f" (and this could not be written down: {error})"
        on_event({"type": "checkpoint_quarantined", "checkpoint": name, "reason": reason})

    def open(self, name: str) -> Reader:
        """Raise FileNotFoundError if it does not exist, BadCheckpoint if it must not be loaded."""
        why = self._quarantine_of(name)
        if why and self._has(name):
            raise BadCheckpoint(f"{name}: is quarantined: {why['reason']}")
        return Reader(self.store, name)

    def try_open(self, name: str, on_event: OnEvent = ignore) -> Reader | None:
        """Return None if its manifest does not verify, it has been removed, or it failed in this process before."""
        while name not in self._aside and name not in self._bad:
            try:
                return Reader(self.store, name)
            except BadCheckpoint as error:
                if not self.judge(name, str(error), on_event):
                    return None
            except FileNotFoundError:
                return None
        return None

    def newest_good(self, on_event: OnEvent = ignore) -> Reader | None:
        """Return the newest one whose manifest verifies."""
        return next(filter(None, (self.try_open(found.name, on_event) for found in self.good())), None)

    def verify(self, found: Iterable[Found], on_progress: OnProgress = ignore) -> Iterator[tuple[str, list[Fault]]]:
        """Read every byte of each and yield its name and all its faults. Skip those that are removed in the
        meantime."""
        readers: list[tuple[str, Reader | Fault]] = []
        for each in found:
            try:
                readers.append((each.name, Reader(self.store, each.name)))
            except BadCheckpoint as error:
                readers.append((each.name, Fault(str(error), not isinstance(error, Unreadable))))
            except FileNotFoundError:
                continue
        done, total = 0, sum(r.manifest.size_bytes for _, r in readers if isinstance(r, Reader))
        lock = threading.Lock()

        def add(size: int) -> None:
            nonlocal done
            with lock:
                done += size
                on_progress(done, total)

        on_progress(0, total)
        for name, reader in readers:
            wrong = reader.verify(add) if isinstance(reader, Reader) else [reader]
            if not wrong or not self._is_gone(name):
                yield name, wrong

    def scrub(self, on_progress: OnProgress = ignore, on_event: OnEvent = ignore) -> dict[str, list[Fault]]:
        """Read every byte of those in `to_try`, quarantine the damaged ones and return the faults by name."""
        report = {}
        for name, wrong in self.verify(self.to_try(), on_progress):
            report[name] = wrong
            if wrong:
                self.judge(name, "; ".join(fault.text for fault in wrong), on_event)
        return report

    # -- removing

    def retain(
        self,
        keep_last: int,
        keep_every: int = 0,
        on_event: OnEvent = ignore,
        lineage: str | None = None,
        spares: Callable[[int], bool] = lambda step: False,
    ) -> list[str]:
        """Remove old checkpoints and return their names. Keep the newest `keep_last` good ones, those whose step is a
        multiple of `keep_every` (0: none) and those whose step `spares` accepts. Keep other lineages (None: there is
        only one) and quarantined checkpoints. Remove an uncommitted one if it precedes the newest good one and has not
        been touched for an hour. Remove nothing unless the newest `keep_last` have valid manifests and files of the
        right sizes."""
        assert keep_last > 0 and keep_every >= 0, (keep_last, keep_every)
        everything = [found for found in self.all() if lineage is None or found.lineage == lineage]
        good = [found for found in everything if found.status == "good"]
        if not good:
            return []
        every = [f.name for f in good if (keep_every and f.step % keep_every == 0) or spares(f.step)]
        kept = {*every, *(f.name for f in good[:keep_last])}
        doomed = [found for found in good if found.name not in kept]
        left = [f for f in everything if f.status == "incomplete" and not f.quarantine]
        doomed += [f for f in left if f.place < good[0].place and self._is_old(f)]
        for found in good[:keep_last] if doomed else []:
            if wrong := self._wrong_at_a_glance(found):
                on_event({"type": "retention_refused", "checkpoint": found.name, "reason": wrong})
                return []
        removed = []
        for found in doomed:
            try:
                self._remove(found)
                removed.append(found.name)
            except OSError as error:
                on_event({"type": "checkpoint_not_removed", "checkpoint": found.name, "reason": str(error)})
        return removed

    def _is_old(self, found: Found) -> bool:
        touched = found.since
        if isinstance(self.store, Folder):
            with contextlib.suppress(FileNotFoundError):
                touched = max(path.stat().st_mtime for path in _with_files(self.store.path / found.name))
        return time.time() - touched > UNDER_WAY_S

    def _wrong_at_a_glance(self, found: Found) -> str:
        try:
            files = found.manifest.files
            names = [f"{found.name}/{file_name(rank)}" for rank in range(len(files))]
            with ThreadPoolExecutor(THREADS, "phalanx-retain") as pool:
                sizes = list(pool.map(self.store.size, names))
        except (BadCheckpoint, FileNotFoundError) as error:
            return str(error)
        wrong = (
            f"{n}: has {a} bytes instead of {b}" for n, a, (b, _) in zip(names, sizes, files, strict=True) if a != b
        )
        return next(wrong, "")

    def _remove(self, found: Found) -> None:
        """Remove the manifest first: without it the rest is no checkpoint, and a later call removes it."""
        name = found.name
        if isinstance(self.store, Folder):
            folder = self.store.path / name
            if folder.is_symlink():
                raise OSError(f"{folder} is a link to a checkpoint elsewhere")
            (folder / MANIFEST).unlink(missing_ok=True)
            sync_folder(folder)
            shutil.rmtree(folder)
            return
        self._remove_object(f"{name}/{MANIFEST}")
        names = [f"{name}/{file_name(rank)}" for rank in range(found.num_files)]
        with ThreadPoolExecutor(THREADS, "phalanx-retain") as pool:
            list(pool.map(self._remove_object, [*names, f"{name}/{QUARANTINED}"]))
        assert self.index
        self.index.remove(name)

    def _remove_object(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.remove(name)


def told(faults: list[str]) -> str:
    return "; ".join(faults[:3]) + (" …" if len(faults) > 3 else "")


def _with_files(folder: Path) -> list[Path]:
    return [folder, *folder.iterdir()]
