"""Turns rows of items, as the loader returns them, into what a model reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(slots=True)
class Samples:
    """B sequences of L tokens, as numpy arrays of int64; a token may also be a vector of float32."""

    tokens_BL: np.ndarray
    targets_BL: np.ndarray
    weights_BL: np.ndarray  # 0 where the target opens the next document
    documents_BL: np.ndarray | None  # None: every sequence is one document


def unpack(rows: np.ndarray, eos: int) -> Samples:
    """Unpack rows of L + 1 ids, in which `eos` ends a document; or rows of one record, whose `targets` hold for all
    its tokens if there is only one of them."""
    if rows.dtype.names:
        tokens, targets = rows["tokens"][:, 0], rows["targets"][:, 0].astype(np.int64)
        if targets.ndim == 1:
            targets = np.repeat(targets[:, None], tokens.shape[1], axis=1)
        return Samples(tokens.copy(), targets, np.ones_like(targets), None)
    tokens = rows[:, :-1].astype(np.int64)
    ends = tokens == eos
    return Samples(tokens, rows[:, 1:].astype(np.int64), (~ends).astype(np.int64), np.cumsum(ends, axis=1) - ends)


def places_of(indices: list[int], micro_batch: int) -> np.ndarray:
    """Return the places of these micro-batches in their step."""
    return (np.array(indices)[:, None] * micro_batch + np.arange(micro_batch)).ravel()


def digest(rows: Iterable[np.ndarray], places: Iterable[int]) -> int:
    """Digest these rows at these places of the run: a sum, so that it does not matter which rank had which."""
    hashes = (xxhash.xxh3_64_intdigest(row.data, seed=place) for row, place in zip(rows, places, strict=True))
    return sum(hashes) % (1 << 64)
