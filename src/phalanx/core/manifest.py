"""The manifest of a data set, and where in its shards a sample lies. It has sizes and hashes but no index: a sample is
found by division.

A data set is a list of *extents*, each a stream of fixed-width items under a source's name. To append is to add
extents; existing ones do not change. An extent is cut into shards of `shard_chunks` chunks of `chunk_items` items; only
its last shard may be shorter. A token stream's chunk is hashed together with the one item that follows it (the last
target of its last sample), so that one range of bytes, verified as it arrives, serves all samples that begin in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.core import document

FORMAT = 2  # 1: the names of shards do not carry their roots
HASH_BYTES = 32  # of a shard's root, in the manifest; and of a chunk's two hashes, in the shard's footer
MANIFEST = "manifest.jsonl"  # the newest version of a data set


def manifest_name(version: str) -> str:
    """Name the file that holds this version, and never another."""
    return f"manifest-{version[:16]}.jsonl"


def shard_file(source: str, extent: int, shard: int, root: bytes = b"") -> str:
    """Name a shard's file. The name carries the root, so that two builds never write different bytes under one name."""
    return f"shards/{source}-{extent:03d}-{shard:06d}{'-' * bool(root)}{root[:6].hex()}.shard"


@dataclass(frozen=True, slots=True)
class Field:
    """One part of an item, as numpy names its type; little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    source: str
    items: int


@dataclass(frozen=True)
class Manifest:
    fields: tuple[Field, ...]
    extents: tuple[Extent, ...]
    roots: np.ndarray  # (shards of all extents, 32) uint8: blake3 of each shard's footer
    chunk_items: int
    shard_chunks: int
    tokenizer: str = ""  # its name
    tokenizer_hash: str = ""
    vocab_size: int = 0  # of tokens; every id is below it
    eos: int = -1  # the id that ends a document
    parent: str = ""  # the version that this one extends
    format: int = FORMAT

    @cached_property
    def is_tokens(self) -> bool:
        """Return whether items are a stream of ids that the reader cuts into sequences; otherwise each is a whole
        record."""
        return _is_tokens(self.fields)

    @cached_property
    def overlap(self) -> int:
        return int(self.is_tokens)

    @cached_property
    def dtype(self) -> np.dtype:
        """Return the dtype of one item."""
        return dtype_of(self.fields)

    @property
    def shard_items(self) -> int:
        return self.chunk_items * self.shard_chunks

    def num_shards(self, extent: int) -> int:
        return -(-self.extents[extent].items // self.shard_items)

    @cached_property
    def first_root(self) -> list[int]:
        """Return the row of `roots` where each extent begins."""
        counts = [self.num_shards(e) for e in range(len(self.extents))]
        return [sum(counts[:e]) for e in range(len(counts))]

    def root(self, extent: int, shard: int) -> bytes:
        return self.roots[self.first_root[extent] + shard].tobytes()

    def shard_name(self, extent: int, shard: int) -> str:
        root = self.root(extent, shard) if self.format > 1 else b""
        return shard_file(self.extents[extent].source, extent, shard, root)

    def items_in(self, extent: int, shard: int) -> int:
        """Count the items whose place is this shard; its file may hold one more, for the last target."""
        return min(self.shard_items, self.extents[extent].items - shard * self.shard_items)

    def items_stored(self, extent: int, shard: int) -> int:
        return min(self.shard_items + self.overlap, self.extents[extent].items - shard * self.shard_items)

    def num_chunks(self, extent: int, shard: int) -> int:
        return -(-self.items_in(extent, shard) // self.chunk_items)

    def chunk_range(self, extent: int, shard: int, chunk: int) -> tuple[int, int]:
        """Return the bytes [start, end) of the shard's file that the chunk's hash covers."""
        first = chunk * self.chunk_items
        last = min(first + self.chunk_items + self.overlap, self.items_stored(extent, shard))
        return first * self.dtype.itemsize, last * self.dtype.itemsize

    def shard_bytes(self, extent: int, shard: int) -> int:
        """Return the size of the whole file."""
        return self.items_stored(extent, shard) * self.dtype.itemsize + self.footer_bytes(extent, shard)

    def footer_bytes(self, extent: int, shard: int) -> int:
        return HASH_BYTES * self.num_chunks(extent, shard)

    @property
    def total_items(self) -> int:
        return sum(e.items for e in self.extents)

    @cached_property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(e.source for e in self.extents))

    def extends(self, other: Manifest) -> bool:
        """Return whether all of `other` is here, at the same place."""
        n = len(other.extents)
        same = all(getattr(self, k) == getattr(other, k) for k in ("fields", "chunk_items", "shard_chunks", "eos"))
        return (
            same and self.extents[:n] == other.extents and np.array_equal(self.roots[: len(other.roots)], other.roots)
        )

    def encode(self) -> bytes:
        """Encode it as a line of JSON, then the root of every shard in hexadecimal, a line each."""
        head: dict[str, Any] = {"phalanx_manifest": self.format}
        head |= {k: v for k, v in asdict(self).items() if k not in ("roots", "format")}
        lines = [json.dumps(head, sort_keys=True), *(root.tobytes().hex() for root in self.roots)]
        return ("\n".join(lines) + "\n").encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Decode and check a manifest. ValueError says what is wrong with it."""
        line, _, rest = data.partition(b"\n")
        head = json.loads(line)
        if not isinstance(head, dict) or "phalanx_manifest" not in head:
            raise ValueError("it is not a manifest")
        version = document.check_version(head, FORMAT, "the manifest of the data set", "phalanx_manifest")
        try:
            fields = tuple(Field(f["name"], f["dtype"], tuple(f["shape"])) for f in head["fields"])
            extents = tuple(Extent(e["source"], e["items"]) for e in head["extents"])
            roots = np.frombuffer(bytes.fromhex(rest.decode("ascii")), np.uint8).reshape(-1, HASH_BYTES)
            made = {**head, "fields": fields, "extents": extents, "roots": roots, "format": version}
            manifest = document.make(Manifest, made)
            manifest.check()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is damaged: {error}") from None
        return manifest

    def check(self) -> None:
        for name in ("chunk_items", "shard_chunks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, not a positive number")
        for extent in self.extents:
            if type(extent.items) is not int or extent.items < 1:
                raise ValueError(f"source {extent.source!r} has {extent.items!r} items")
            check_source(extent.source)
        shards = sum(self.num_shards(e) for e in range(len(self.extents)))
        if len(self.roots) != shards:
            raise ValueError(f"it names {len(self.roots)} shards, but its extents make {shards}")
        if self.dtype.hasobject:
            raise ValueError("a field holds Python objects")


def _is_tokens(fields: Sequence[Field]) -> bool:
    return [(f.name, f.shape) for f in fields] == [("tokens", ())]


def dtype_of(fields: Iterable[Field]) -> np.dtype:
    """Return the dtype of an item with these fields; plain where it is a token."""
    fields = tuple(fields)
    return np.dtype(fields[0].dtype if _is_tokens(fields) else [(f.name, f.dtype, f.shape) for f in fields])


def check_source(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(f"source {name!r} is not a name of letters, digits, '.', '_' and '-'")


@dataclass(frozen=True, slots=True)
class Cut:
    """How one extent falls into samples: a *unit* of `unit_chunks` chunks gives `per_unit` samples of `span`
    items; what is left at a unit's end is not served."""

    span: int
    unit_chunks: int
    per_unit: int
    num_samples: int

    @staticmethod
    def of(manifest: Manifest, extent: int, seq_len: int) -> Cut:
        """Cut one extent of a manifest. ValueError: a sequence is longer than a shard."""
        span = seq_len if manifest.is_tokens else 1
        most = manifest.shard_chunks
        # A sequence that does not divide a chunk wastes some of it; larger units waste less.
        divisors = (d for d in range(1, most + 1) if most % d == 0)
        unit = next((d for d in divisors if _waste(d * manifest.chunk_items, span) <= 1 / 16), most)
        items = unit * manifest.chunk_items
        if span > items:
            raise ValueError(f"a sequence of {span} items is longer than a shard of {manifest.shard_items}")
        full, rest = divmod(manifest.extents[extent].items - manifest.overlap, items)
        return Cut(span, unit, items // span, full * (items // span) + rest // span)

    def place(self, manifest: Manifest, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the shard, the chunk in the shard, and the item in the chunk at which each sample begins."""
        unit = sample // self.per_unit  # np.divmod is much slower than this
        item = unit * (self.unit_chunks * manifest.chunk_items) + (sample - unit * self.per_unit) * self.span
        chunk = item // manifest.chunk_items
        shard = chunk // manifest.shard_chunks
        return shard, chunk - shard * manifest.shard_chunks, item - chunk * manifest.chunk_items


def _waste(items: int, span: int) -> float:
    return math.inf if span > items else items % span / items
