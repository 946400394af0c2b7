"""Converts text to ids and back, by bytes or with any `tokenizer.json`. The file itself goes into the data set, so that
its ids can be read as text with the data set alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from phalanx.core.errors import UserError
from phalanx.core.manifest import Manifest
from phalanx.core.store import Store

TOKENIZER = "tokenizer.json"  # beside the manifest
BYTE = "byte"
END_OF_DOCUMENT = 256
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]", "<end_of_text>")
INSTALL = "pip install 'phalanx[build]'"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a manifest records about its ids."""

    name: str
    hash: str
    size: int  # every id is below it
    eos: int  # ends a document; -1: nothing does

    @property
    def dtype(self) -> str:
        return "<u2" if self.size <= 1 << 16 else "<u4"


class Tokenizer(Protocol):
    vocabulary: Vocabulary
    file: bytes  # what the data set keeps; empty for bytes
    raw: bool  # takes any bytes, cut anywhere; otherwise only whole UTF-8 texts

    def encode(self, texts: Sequence[bytes], ends: Sequence[bool]) -> np.ndarray:
        """Return the ids of all texts in one array, with the end-of-document id after each text that ends its
        document."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text without the ids that end a document. What is not text becomes U+FFFD."""


class Bytes:
    file, raw = b"", True
    vocabulary = Vocabulary(BYTE, blake3(b"phalanx byte tokenizer 1").hexdigest(), 257, END_OF_DOCUMENT)

    def encode(self, texts: Sequence[bytes], ends: Sequence[bool]) -> np.ndarray:
        ids = np.frombuffer(b"".join(texts), np.uint8).astype("<u2")
        after = np.cumsum([len(text) for text in texts], dtype=np.int64)[np.asarray(ends, bool)]
        return np.insert(ids, after, END_OF_DOCUMENT)

    def decode(self, ids: np.ndarray) -> str:
        return ids[ids < END_OF_DOCUMENT].astype(np.uint8).tobytes().decode("utf-8", "replace")


class FromFile:
    raw = False

    def __init__(self, file: bytes, told: str, eos: str = "", eos_id: int | None = None):
        """Load a tokenizer.json; `told` names it in errors. A document ends with the token `eos`, or with `eos_id` if
        the id is already known."""
        self.file, self._tok = file, _load(file, told)
        self._tok.no_truncation()
        self._tok.no_padding()
        self._tok.encode_special_tokens = True  # "<|endoftext|>" inside a text is text, and ends nothing
        vocab = self._tok.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1  # ids may have gaps
        end = _end(vocab, eos, told) if eos_id is None else eos_id
        kind = type(self._tok.model).__name__.lower()
        self.vocabulary = Vocabulary(f"{kind}-{size}", blake3(file).hexdigest(), size, end)

    def encode(self, texts: Sequence[bytes], ends: Sequence[bool]) -> np.ndarray:
        batch = self._tok.encode_batch_fast([t.decode() for t in texts], add_special_tokens=False)
        pieces = [[*e.ids, self.vocabulary.eos] if end else e.ids for e, end in zip(batch, ends, strict=True)]
        return np.fromiter((i for ids in pieces for i in ids), self.vocabulary.dtype)

    def decode(self, ids: np.ndarray) -> str:
        return self._tok.decode(ids[ids != self.vocabulary.eos].tolist(), skip_special_tokens=False)


def make_tokenizer(name: str, eos: str = "") -> Tokenizer:
    """Make a tokenizer of `byte`, the path of a tokenizer.json, or a folder with one, whose tokenizer_config.json names
    the token that ends a text."""
    if name == BYTE:
        if eos:
            remedy = "leave --eos out: with bytes, id 256 ends a document"
            raise UserError("bytes have no such token", field="--eos", value=eos, remedy=remedy)
        return Bytes()
    if Path(name).is_dir():
        eos = eos or _told_end(Path(name))
        name = str(Path(name) / TOKENIZER)
    try:
        file = Path(name).read_bytes()
    except OSError as error:
        remedy = f"name a tokenizer.json, or {BYTE!r}"
        raise UserError(f"cannot be read: {error.strerror}", field="--tokenizer", value=name, remedy=remedy) from None
    return FromFile(file, name, eos)


def _told_end(folder: Path) -> str:
    """Return the token that ends a text, as transformers stores it; empty if the folder does not name one."""
    try:
        told = json.loads((folder / "tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    told = told.get("content") if isinstance(told, dict) else told
    return told if isinstance(told, str) else ""


def tokenizer_of(store: Store, manifest: Manifest) -> Tokenizer | None:
    """Load the tokenizer that a data set was built with from the set itself; None if it came without one."""
    if manifest.tokenizer_hash == Bytes.vocabulary.hash:
        return Bytes()
    if not manifest.tokenizer_hash:
        return None
    remedy = f"restore {TOKENIZER} from where the data set was built"
    try:
        file = store.read(TOKENIZER)
    except OSError as error:
        message = f"{TOKENIZER} cannot be read: {error}"
        raise UserError(message, field="data.source", value=store.url, remedy=remedy) from None
    if (got := blake3(file).hexdigest()) != manifest.tokenizer_hash:
        message = f"{TOKENIZER} is not the one it was built with: blake3 {got}, not {manifest.tokenizer_hash}"
        raise UserError(message, field="data.source", value=store.url, remedy=remedy)
    return FromFile(file, TOKENIZER, eos_id=manifest.eos)


def _load(file: bytes, told: str) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        message = "the package tokenizers is not installed"
        raise UserError(message, field="--tokenizer", value=told, remedy=INSTALL) from None
    try:
        return Library.from_str(file.decode())
    except Exception as error:  # the library raises nothing narrower
        message = f"is not a tokenizer.json: {' '.join(str(error).split())[:200]}"
        remedy = f"name the file that the package tokenizers saves, or {BYTE!r}"
        raise UserError(message, field="--tokenizer", value=told, remedy=remedy) from None


def _end(vocab: dict[str, int], eos: str, told: str) -> int:
    if eos:
        if eos not in vocab:
            remedy = f"name a token that is in {told}"
            raise UserError("there is no such token", field="--eos", value=eos, remedy=remedy)
        return vocab[eos]
    for token in USUAL_ENDS:
        if token in vocab:
            return vocab[token]
    message = f"it has none of the usual tokens that end a document ({' '.join(USUAL_ENDS)})"
    raise UserError(message, field="--tokenizer", value=told, remedy="name the one it has: --eos TOKEN")
