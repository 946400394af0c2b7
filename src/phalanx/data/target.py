"""A data set that is being written: a new one, or the next version of one that grows. Shards are written as they are
finished and the manifest last; nothing that a manifest names is ever changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import MANIFEST, Extent, Field, Manifest, check_source, manifest_name, shard_file
from phalanx.core.store import Changed, Store
from phalanx.data.address import open_set
from phalanx.data.fetch import read_manifest
from phalanx.data.shard_file import CHUNK_BYTES, SHARD_BYTES, version_of
from phalanx.data.tokenizer import TOKENIZER, Vocabulary

THREADS = 16
SPAN_BYTES = 8 << 20  # read at once
NO_ROOTS = np.empty((0, 32), np.uint8)


class Target:
    def __init__(
        self,
        out: Store | Path | str,
        fields: tuple[Field, ...],
        sources: Sequence[str],
        *,
        append: bool,
        vocabulary: Vocabulary | None = None,
        tokenizer_file: bytes = b"",
        chunk_items: int | None = None,
        shard_chunks: int | None = None,
    ):
        """Refuse at once what can be checked now. Without `append`, an existing data set may be built again, all of it
        or what one command has added: identical shards are written anew, anything else is refused."""
        self.store = open_set(str(out), "--out") if isinstance(out, str | Path) else out
        self.append, self.sources, self._file = append, sources, tokenizer_file
        for source in sources:
            try:
                check_source(source)
            except ValueError as error:
                raise UserError(str(error), field="--source", value=source, remedy="rename it") from None
        self.base, self.version = self._newest()
        if append and not self.base:
            read_manifest(self.store, field="--out")  # raises, as there is none
        self._put: list[str] = []  # shards of this build that no manifest names yet
        self._fits: list[int] = []  # extents of the base at which what is rebuilt may begin
        if self.base:
            chunk_items = chunk_items or self.base.chunk_items
            shard_chunks = shard_chunks or self.base.shard_chunks
        item_bytes = Manifest(fields, (), NO_ROOTS, 1, 1).dtype.itemsize
        chunk_items = chunk_items or max(1, CHUNK_BYTES // item_bytes)
        shard_chunks = shard_chunks or _power_of_two(SHARD_BYTES // (chunk_items * item_bytes))
        self.empty = Manifest(fields, (), NO_ROOTS, chunk_items, shard_chunks)
        if self.base:
            self.empty = replace(self.empty, format=self.base.format)
        if vocabulary:
            self.empty = replace(
                self.empty,
                tokenizer=vocabulary.name,
                tokenizer_hash=vocabulary.hash,
                vocab_size=vocabulary.size,
                eos=vocabulary.eos,
            )
        if self.base:
            self._compare(self.base)

    @property
    def first_extent(self) -> int:
        return len(self.base.extents) if self.base and self.append else 0

    def put(self, extent: int) -> Callable[[int, Path, bytes], None]:
        """Return a function that stores the finished shards of the n-th new extent."""
        source, number = self.sources[extent], self.first_extent + extent

        def put(shard: int, path: Path, root: bytes) -> None:
            name = shard_file(source, number, shard, root if self.empty.format > 1 else b"")
            with self._writing():
                if self.base and not self.append:
                    name, *copies = self._same(self.base, extent, shard, root)
                    for copy in copies:
                        self.store.write(copy, path.read_bytes())
                    self.store.write(name, path)
                else:
                    self._put_new(name, path)

        return put

    def _put_new(self, name: str, path: Path) -> None:
        """Store a shard unless it is there already. Other bytes under its name are damaged, or left from a failed
        build, and are replaced; if a manifest names them, the shard is refused instead."""
        if self._size(name) is None:
            self._put.append(name)
            try:
                return self.store.write(name, path, overwrite=False)
            except FileExistsError:  # another build was first
                self._put.remove(name)
        if self._is_same(name, path):
            path.unlink()
        elif name in self._named():
            raise self._changed()
        else:
            self.store.write(name, path)
        return None

    def _is_same(self, name: str, path: Path) -> bool:
        """Return whether the store has these bytes, and can read them."""
        size = path.stat().st_size
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return self.store.size(name) == size and all(
                bytes(self.store.read_range(name, at, min(at + SPAN_BYTES, size))) == file.read(SPAN_BYTES)
                for at in range(0, size, SPAN_BYTES)
            )
        return False

    def _named(self) -> set[str]:
        """Return the names of the newest version's shards."""
        newest = self._newest()[0]
        shards = [(e, s) for e in range(len(newest.extents)) for s in range(newest.num_shards(e))] if newest else []
        return {newest.shard_name(e, s) for e, s in shards} if newest else set()

    def _same(self, base: Manifest, extent: int, shard: int, root: bytes) -> list[str]:
        """Return the names of the base's shards that this one rebuilds."""
        fits = [k + extent for k in self._fits]
        same = [e for e in fits if shard < base.num_shards(e) and base.root(e, shard) == root]
        if not same:
            raise self._differs(base, f"its {base.shard_name(fits[0], min(shard, base.num_shards(fits[0]) - 1))}")
        self._fits = [e - extent for e in same]
        return [base.shard_name(e, shard) for e in same]

    def _size(self, name: str) -> int | None:
        """Return the size of a file; None: it is not there."""
        try:
            return self.store.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def undo(self, is_lost: bool) -> None:
        """Remove the shards of a failed build, except those that a manifest names now. `is_lost`: another build writes
        here now and may rely on the shards it has found, so nothing is removed."""
        if is_lost:
            return
        try:
            named = self._named()
        except UserError:
            return
        for name in self._put:
            if name not in named:
                with contextlib.suppress(OSError):
                    self.store.remove(name)

    def manifest(self, items: Sequence[int], roots: np.ndarray) -> Manifest:
        """Make the manifest, with this many items in each new extent."""
        extents = tuple(Extent(source, n) for source, n in zip(self.sources, items, strict=True))
        if self.base and self.append:
            roots = np.concatenate([self.base.roots, roots])
            return replace(self.empty, extents=self.base.extents + extents, roots=roots, parent=self.version)
        if self.base:
            for k in self._fits:
                first = self.base.first_root[k]
                if self.base.extents[k : k + len(extents)] == extents and np.array_equal(
                    self.base.roots[first : first + len(roots)], roots
                ):
                    return self.base
            raise self._differs(self.base, "its manifest")
        return replace(self.empty, extents=extents, roots=roots)

    def commit(self, manifest: Manifest) -> tuple[Manifest, str]:
        manifest.check()
        self._check_shards(manifest)
        data = manifest.encode()
        version = version_of(data)
        newest = self._newest()[1]
        with self._writing():
            try:
                tag = self.store.read_tagged(MANIFEST)[1] if newest else ""
                if newest not in (version, self.version):
                    raise Changed
                if self._file:
                    self.store.write(TOKENIZER, self._file)
                self.store.write(manifest_name(version), data)
                if newest != version:
                    self.store.replace(MANIFEST, data, tag)
            except Changed:
                raise self._changed() from None
        self._put = []
        return manifest, version

    def _check_shards(self, manifest: Manifest) -> None:
        """Check that all new shards are there: another build may have removed one that this one found and left
        alone."""
        if manifest is self.base:
            return
        new = [(e, s) for e in range(self.first_extent, len(manifest.extents)) for s in range(manifest.num_shards(e))]
        with self._writing(), ThreadPoolExecutor(THREADS, "phalanx-build") as pool:
            sizes = list(pool.map(lambda shard: self._size(manifest.shard_name(*shard)), new))
        wrong = [shard for shard, size in zip(new, sizes, strict=True) if size != manifest.shard_bytes(*shard)]
        if wrong:
            raise UserError(
                f"{len(wrong)} of its {len(new)} new shards are gone, the first is {manifest.shard_name(*wrong[0])}",
                field="--out",
                value=self.store.url,
                remedy="run it again",
            )

    def _newest(self) -> tuple[Manifest | None, str]:
        try:
            self.store.read(MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None, ""
        except OSError:
            pass  # read_manifest reports it better
        return read_manifest(self.store, field="--out")

    def _compare(self, base: Manifest) -> None:
        mine = self.empty
        told = {"fields": "fields", "chunk_items": "chunk_items", "shard_chunks": "shard_chunks (--shard-mb)"}
        told |= {"tokenizer_hash": "tokenizer", "vocab_size": "vocab_size", "eos": "end of a document"}
        for name, words in told.items():
            if getattr(mine, name) != getattr(base, name):
                old, new = (_plain(getattr(m, name)) for m in (base, mine))
                what = f"its {words} is {old}, and this would be {new}"
                if not self.append:
                    raise self._differs(base, what)
                remedy = "add with what it was built with, or name another --out"
                raise UserError(what, field="--out", value=self.store.url, remedy=remedy)
        labels, count = [e.source for e in base.extents], len(self.sources)
        self._fits = [k for k in range(len(labels)) if labels[k : k + count] == list(self.sources)]
        if not self.append and not self._fits:
            raise self._differs(base, f"its sources are {', '.join(labels)}")

    def _differs(self, base: Manifest, what: str) -> UserError:
        return UserError(
            f"there is a data set already, and this one would differ ({what})",
            field="--out",
            value=self.store.url,
            remedy="add to it with --append, or name another --out; nothing is ever overwritten",
        )

    def _changed(self) -> UserError:
        return UserError(
            "somebody else has written to it meanwhile",
            field="--out",
            value=self.store.url,
            remedy="run it again, with --append to add to what is there now",
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror or error}",
                field="--out",
                value=self.store.url,
                remedy="name a folder or bucket that you may write to, with space left",
            ) from error


def shard_chunks_of(size_bytes: float, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the most chunks that fit in a shard of this size, as a power of two: a sequence longer than a chunk then
    finds units that fit the shard."""
    return _power_of_two(int(size_bytes) // chunk_bytes)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n.bit_length() - 1)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return " + ".join(f"{f.name}:{f.dtype}{list(f.shape) or ''}" for f in value)
    return value[:16] if isinstance(value, str) and value else value or "none"
