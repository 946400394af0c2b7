"""Text on this machine as byte tokens: 0-255 are bytes, 256 ends a document. Built once into a flat
file of 16-bit ids that every rank maps; a sample is a window of it, packed across documents."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.data.order import key_of, permute

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
STDLIB = "python-stdlib"
_DTYPE = np.dtype("<u2")


def documents(source: str, left_out: Iterable[Path] = ()) -> Iterator[Path]:
    """The files of a source, in an order that does not depend on the file system. `left_out`: folders
    inside it that are not part of it (the records of runs may lie there)."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        others = {"site-packages", "test"}
        yield from sorted(p for p in root.rglob("*.py") if others.isdisjoint(p.relative_to(root).parts))
    elif Path(source).is_dir():
        root = Path(source).resolve()
        skip = {folder.resolve() for folder in left_out if root in folder.resolve().parents}
        yield from sorted(p for p in root.rglob("*") if skip.isdisjoint(p.parents) and p.is_file())
    else:
        yield Path(source)


def build(
    source: str,
    out: Path,
    max_bytes: int,
    on_progress: Callable[[int], None] | None = None,
    left_out: Iterable[Path] = (),
) -> int:
    """Write the token file; returns the number of tokens. The file appears whole or not at all.
    `on_progress` hears after every document how many bytes were taken, and may raise to stop."""
    partial = out.with_suffix(".partial")
    taken = 0
    try:
        with open(partial, "wb") as f:
            for path in documents(source, left_out):
                text = _read(source, path, max_bytes - taken)
                if text:
                    ids = np.append(np.frombuffer(text, np.uint8).astype(_DTYPE), _DTYPE.type(END_OF_DOCUMENT))
                    f.write(ids.tobytes())
                taken += len(text)
                if on_progress:
                    on_progress(taken)
                if taken >= max_bytes:
                    break
        if taken == 0:
            raise _refusal(source, f"there is no text in its first {max_bytes:,} bytes (data.max_mb)")
        os.replace(partial, out)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename and Path(error.filename) not in (partial, out):
            raise _refusal(source, f"cannot read {error.filename}: {error.strerror}") from error
        raise
    return out.stat().st_size // _DTYPE.itemsize


def _read(source: str, path: Path, max_bytes: int) -> bytes:
    if path.exists() and not path.is_file():
        raise _refusal(source, f"{path} is neither a file nor a folder")  # reading a pipe may never end
    try:
        with open(path, "rb") as f:
            return f.read(max_bytes)
    except OSError as error:
        raise _refusal(source, f"cannot read {path}: {error.strerror}") from error


def _refusal(source: str, message: str) -> UserError:
    return UserError(
        message, field="data.source", value=source, remedy="name a readable text file, or a folder of them"
    )


@dataclass(slots=True)
class Samples:
    """B sequences of L tokens, as numpy arrays of int64; a token may also be a vector of float32."""

    tokens_BL: np.ndarray
    targets_BL: np.ndarray
    weights_BL: np.ndarray  # 0 where the target opens the next document
    documents_BL: np.ndarray | None  # None: every sequence is one


class Corpus:
    def __init__(self, path: Path, seq_len: int, seed: int):
        self.tokens = np.memmap(path, dtype=_DTYPE, mode="r")
        self.seq_len, self.seed = seq_len, seed
        self.num_samples = (len(self.tokens) - 1) // seq_len
        if self.num_samples < 1:
            raise UserError(
                f"the corpus has {len(self.tokens)} tokens; one sample takes {seq_len + 1}",
                field="train.seq_len",
                value=seq_len,
                remedy="name more text in data.source, or lower train.seq_len",
            )

    def samples(self, positions: Iterable[int]) -> Samples:
        rows = []
        for position in positions:
            epoch, index = divmod(position, self.num_samples)
            start = int(permute(index, self.num_samples, key_of(self.seed, epoch))) * self.seq_len
            rows.append(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        window = np.stack(rows)
        tokens = window[:, :-1]
        ends = tokens == END_OF_DOCUMENT
        return Samples(tokens, window[:, 1:], (~ends).astype(np.int64), np.cumsum(ends, axis=1) - ends)

    def unigram_entropy(self) -> float:
        """In nats: the loss of a model that knows only how frequent each token is."""
        counts = np.bincount(self.tokens, minlength=VOCAB_SIZE)
        return -math.fsum(p * math.log(p) for p in counts[counts > 0] / len(self.tokens))
