"""The index of the checkpoints in a bucket, `catalog.json`, which saves listing the bucket. A writer replaces it only
if no other has changed it, so no name is lost. It may name checkpoints that do not exist. If it is missing or empty,
the bucket is listed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.checkpoint.files import read_manifest
from phalanx.core import document
from phalanx.core.checkpoint import NAME, BadCheckpoint
from phalanx.core.errors import UserError
from phalanx.core.store import Changed, Store

CATALOG = "catalog.json"
FORMAT = 1
TRIES = 30  # when other writers are faster


@dataclass(frozen=True, slots=True)
class Known:
    files: int
    since: float  # seconds since 1970

    @staticmethod
    def of(body: Any) -> Known:
        return Known(int(body["files"]), float(body["since"]))


class Index:
    def __init__(self, store: Store):
        self.store = store

    def names(self) -> dict[str, Known]:
        return self._read()[0] or self._listed()

    def add(self, name: str, num_files: int) -> None:
        """Add a checkpoint before its first file is written, so that its files can be found after a crash."""
        self._update(lambda known: known if name in known else {**known, name: Known(num_files, time.time())})

    def remove(self, name: str) -> None:
        self._update(lambda known: {other: of for other, of in known.items() if other != name})

    def rebuild(self) -> dict[str, Known]:
        """Rewrite the index from a listing and its valid names; return its new entries."""
        found: dict[str, Known] = {}

        def listed(known: dict[str, Known]) -> dict[str, Known]:
            found.clear()
            found.update({**self._listed(), **{name: of for name, of in known.items() if NAME.fullmatch(name)}})
            return dict(found)

        self._update(listed, mend=True)
        return found

    def _listed(self) -> dict[str, Known]:
        """List the checkpoints that have a manifest."""
        found = {}
        for name in filter(NAME.fullmatch, self.store.folders()):
            try:
                manifest = read_manifest(self.store, name)
                found[name] = Known(len(manifest.files), manifest.made)
            except FileNotFoundError:
                continue  # its writer adds it when it commits
            except (BadCheckpoint, UserError):
                found[name] = Known(0, 0.0)
        return found

    def _read(self, mend: bool = False) -> tuple[dict[str, Known] | None, str]:
        """Return the entries (None if there is no index) and the tag. With `mend`, treat a damaged index as empty."""
        try:
            data, tag = self.store.read_tagged(CATALOG)
        except FileNotFoundError:
            return None, ""
        try:
            body = json.loads(data)
            document.check_version({"format": FORMAT, **body}, FORMAT, f"{self.store.url}/{CATALOG}")
            return {name: Known.of(of) for name, of in body["checkpoints"].items()}, tag
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            if mend:
                return {}, tag
            url = self.store.url
            remedy = f"`phalanx checkpoint reindex {url}` makes it anew; nothing else is damaged by it"
            raise UserError(f"{url}/{CATALOG} is damaged", remedy=remedy) from None

    def _update(self, change: Callable[[dict[str, Known]], dict[str, Known]], mend: bool = False) -> None:
        for attempt in range(TRIES):
            known, tag = self._read(mend)
            wanted = change(known or self._listed())
            if wanted == known:
                return
            checkpoints = {name: {"files": of.files, "since": of.since} for name, of in wanted.items()}
            try:
                self.store.replace(CATALOG, json.dumps({"format": FORMAT, "checkpoints": checkpoints}).encode(), tag)
                return
            except Changed:
                time.sleep(random.uniform(0, min(1.0, 0.01 * 2**attempt)))  # noqa: S311
        raise OSError(f"{self.store.url}/{CATALOG}: others have changed it {TRIES} times in a row")
