"""Which checkpoints a folder or a bucket has: the newest that may be loaded, those that must not be, those that may
go. A folder is looked at; a bucket is never listed, so `catalog.json` has the names there. It may name what does not
exist: a checkpoint exists when its manifest does.

    catalog.json                          of a bucket: name -> how many files, and since when
    step-000000042-<mark>/manifest.json
                          rank-000000.bin …
                          quarantined.json      why it must not be loaded
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.checkpoint.files import Reader, read_manifest
from phalanx.core.checkpoint import MANIFEST, BadCheckpoint, Manifest, file_name
from phalanx.core.store import Folder, Store, sync_folder

CATALOG = "catalog.json"
QUARANTINED = "quarantined.json"
NAME = re.compile(r"step-(\d{9,})-[A-Za-z0-9._-]+")
UNDER_WAY_S = 3600  # what was touched less long ago may be
THREADS = 16

OnEvent = Callable[[dict[str, Any]], None]
OnProgress = Callable[[int, int], None]  # bytes: done, of how many


def ignore(*_: Any) -> None: ...


@dataclass
class Found:
    store: Store
    name: str
    status: str  # good | quarantined | incomplete
    since: float  # seconds since 1970
    quarantine: dict[str, Any]  # why and since when; empty: it is not
    num_files: int = 0  # in a bucket

    @property
    def step(self) -> int:
        return step_of(self.name)

    @cached_property
    def manifest(self) -> Manifest:
        """FileNotFoundError: it has been removed since. BadCheckpoint: it is damaged."""
        return read_manifest(self.store, self.name)


def step_of(name: str) -> int:
    found = NAME.fullmatch(name)
    assert found, name
    return int(found[1])


class Catalog:
    def __init__(self, store: Store):
        self.store = store
        self._bad: dict[str, str] = {}  # quarantined here, for when that could not be written
        self._lock = threading.Lock()

    # -- what there is

    def all(self) -> list[Found]:
        """Also what was never committed, the newest first: by its step, then by its time."""
        found = [self._look(name, known) for name, known in self._names().items()]
        return sorted((f for f in found if f), key=lambda f: (f.step, f.since), reverse=True)

    def newest_first(self) -> list[Found]:
        """The committed ones."""
        return [found for found in self.all() if found.status != "incomplete"]

    def good(self) -> list[Found]:
        """Those that may be loaded, the newest first."""
        return [found for found in self.all() if found.status == "good"]

    def _names(self) -> dict[str, dict[str, Any]]:
        if not isinstance(self.store, Folder):
            return self._read()
        try:
            return {path.name: {} for path in self.store.path.iterdir() if NAME.fullmatch(path.name) and path.is_dir()}
        except FileNotFoundError:
            return {}

    def _look(self, name: str, known: dict[str, Any]) -> Found | None:
        """None: it has been removed since."""
        why = self._quarantine_of(name)
        is_there = self._has(name)
        status = "incomplete" if not is_there else "quarantined" if why else "good"
        if isinstance(self.store, Folder):
            try:
                since = (self.store.path / name / (MANIFEST if is_there else "")).stat().st_mtime
            except FileNotFoundError:
                return None
            return Found(self.store, name, status, since, why)
        return Found(self.store, name, status, known["since"], why, known["files"])

    def _has(self, name: str) -> bool:
        try:
            self.store.size(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def _quarantine_of(self, name: str) -> dict[str, Any]:
        try:
            return {"reason": "?", **json.loads(self.store.read(f"{name}/{QUARANTINED}"))}
        except FileNotFoundError:
            return {"reason": self._bad[name]} if name in self._bad else {}
        except ValueError:
            return {"reason": f"{QUARANTINED} is damaged"}

    # -- what comes

    def begun(self, name: str, num_files: int) -> None:
        """Before the first of its files is written to a bucket: then they can be found, whatever happens. One writer
        at a time."""
        if not isinstance(self.store, Folder):
            with self._lock:
                names = self._read()
                if name not in names:
                    self._write({**names, name: {"files": num_files, "since": time.time()}})

    def added(self, manifest: Manifest) -> None:
        """After it was committed."""
        self.begun(manifest.name, len(manifest.files))

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            names = json.loads(self.store.read(CATALOG))["checkpoints"]
            return {name: {"files": int(of["files"]), "since": float(of["since"])} for name, of in names.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadCheckpoint(f"{self.store.url}/{CATALOG}: is damaged; what it named cannot be found") from None

    def _write(self, names: dict[str, dict[str, Any]]) -> None:
        self.store.write(CATALOG, json.dumps({"checkpoints": names}).encode())

    # -- what is damaged

    def quarantine(self, name: str, reason: str) -> bool:
        """It is never loaded again, and nothing is deleted. False: it was removed before."""
        self._bad[name] = reason
        if not self._has(name):
            return False
        why = json.dumps({"reason": reason, "time": time.time()}).encode()
        with contextlib.suppress(FileExistsError):  # the first reason stays
            self.store.write(f"{name}/{QUARANTINED}", why, overwrite=False)
        return True

    def _condemn(self, name: str, reason: str, on_event: OnEvent) -> None:
        try:
            if not self.quarantine(name, reason):
                return
        except OSError as error:
            reason += f" (and this could not be written down: {error})"
        on_event({"type": "checkpoint_quarantined", "checkpoint": name, "reason": reason})

    def open(self, name: str) -> Reader:
        """FileNotFoundError: it is not there. BadCheckpoint: it must not be loaded."""
        why = self._quarantine_of(name)
        if why and self._has(name):
            raise BadCheckpoint(f"{name}: is quarantined: {why['reason']}")
        return Reader(self.store, name)

    def newest_good(self, on_event: OnEvent = ignore) -> Reader | None:
        """The newest whose manifest verifies. One that does not is quarantined."""
        for found in self.good():
            try:
                return Reader(self.store, found.name)
            except BadCheckpoint as error:
                self._condemn(found.name, str(error), on_event)
            except FileNotFoundError:
                continue  # removed since
        return None

    def fall_back(self, name: str, reason: str, on_event: OnEvent = ignore) -> Reader | None:
        """For whoever found damage in it while loading: quarantine it, and take the next."""
        self._condemn(name, reason, on_event)
        return self.newest_good(on_event)

    def verify(self, found: Iterable[Found], on_progress: OnProgress = ignore) -> Iterator[tuple[str, list[str]]]:
        """Read every byte of them; for each its name and all that is wrong with it. One that is removed meanwhile
        is left out."""
        readers: list[tuple[str, Reader | BadCheckpoint]] = []
        for each in found:
            try:
                readers.append((each.name, Reader(self.store, each.name)))
            except BadCheckpoint as error:
                readers.append((each.name, error))
            except FileNotFoundError:
                continue
        done, total = 0, sum(r.manifest.size_bytes for _, r in readers if isinstance(r, Reader))

        def told(size: int) -> None:
            nonlocal done
            done += size
            on_progress(done, total)

        on_progress(0, total)
        for name, reader in readers:
            wrong = reader.verify(told) if isinstance(reader, Reader) else [str(reader)]
            if not wrong or self._has(name):
                yield name, wrong

    def scrub(self, on_progress: OnProgress = ignore, on_event: OnEvent = ignore) -> dict[str, list[str]]:
        """Read every byte of the good ones and quarantine what is damaged; what is wrong with each, by name."""
        report = {}
        for name, wrong in self.verify(self.good(), on_progress):
            report[name] = wrong
            if wrong:
                self._condemn(name, "; ".join(wrong[:3]) + (" …" if len(wrong) > 3 else ""), on_event)
        return report

    # -- what may go

    def retain(self, keep_last: int, keep_every: int = 0, on_event: OnEvent = ignore) -> list[str]:
        """Remove all but the newest `keep_last` good ones and those whose step is a multiple of `keep_every` (0:
        none); returns the names. A quarantined one goes with the second retention that meets it. What was never
        committed goes when its step is below the newest good one's and nothing of it was touched for an hour.
        Nothing goes before the newest `keep_last` are seen to have right manifests and files of the right sizes."""
        assert keep_last > 0 and keep_every >= 0, (keep_last, keep_every)
        everything = self.all()
        good = [found for found in everything if found.status == "good"]
        if not good:
            return []
        kept = {f.name for i, f in enumerate(good) if i < keep_last or (keep_every and f.step % keep_every == 0)}
        quarantined = [found for found in everything if found.status == "quarantined"]
        doomed = [found for found in good if found.name not in kept]
        doomed += [found for found in quarantined if found.quarantine.get("met")]
        doomed += [f for f in everything if f.status == "incomplete" and f.step < good[0].step and self._is_old(f)]
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
        for found in quarantined:
            if not found.quarantine.get("met"):
                self.store.write(f"{found.name}/{QUARANTINED}", json.dumps({**found.quarantine, "met": True}).encode())
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
        """First the manifest: what is left without it is no checkpoint, and goes another time."""
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
        with self._lock:
            self._write({known: of for known, of in self._read().items() if known != name})

    def _remove_object(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.remove(name)


def _with_files(folder: Path) -> list[Path]:
    return [folder, *folder.iterdir()]
