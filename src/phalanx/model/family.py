"""The door for models. A family is a factory for a plain module plus a short description of how
its layers split; our own families and a user's own come in the same way.

`Family.split` maps module-name patterns to one of five styles. Between two blocks a tensor-parallel
rank holds a slice of the sequence; inside a block, after "gather", a slice of the features:

    "gather"  a module whose input is gathered along the sequence (an attention, an FFN)
    "column"  a Linear inside it whose output features are split
    "row"     the Linear that ends it: input features split, output summed and scattered over the sequence
    "vocab"   an Embedding split by rows, output summed and scattered over the sequence
    "head"    the Linear to the vocabulary: gather the sequence, split the output

Every parameter that no style splits is held whole by each tensor-parallel rank, and its gradient is
summed over them; so everything inside a gathered module must be split by features.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.shape import ModelConfig

BUILTIN = {"dense": "phalanx.model.dense:DENSE"}
STYLES = ("gather", "column", "row", "vocab", "head")


@dataclass(slots=True)
class Batch:
    """One micro-batch. B sequences of length L; nothing here says that a token is text."""

    tokens_BL: Tensor
    targets_BL: Tensor
    weights_BL: Tensor  # 1 where the target counts, 0 where it does not
    documents_BL: Tensor | None = None  # which document a position belongs to; None: no mask

    def to(self, device: torch.device) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Batch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in moved.items()})


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts: normal with this deviation around this mean."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    build: Callable[[ModelConfig], nn.Module]
    init: Callable[[str, ModelConfig], Init]
    split: Mapping[str, str]
    units: Sequence[str] = ("layers.*",)  # gathered, recomputed and compiled one by one, in this order
    loss: Callable[[Tensor, Batch, object], Tensor] | None = None  # default: cross-entropy, summed

    def style_of(self, module_name: str) -> str | None:
        for pattern, style in self.split.items():
            if _matches(module_name, pattern):
                return style
        return None

    def unit_modules(self, model: nn.Module) -> list[nn.Module]:
        modules = dict(model.named_modules())
        return [m for pattern in self.units for name, m in modules.items() if _matches(name, pattern)]


def _matches(name: str, pattern: str) -> bool:
    """Shell-style, part by part: `layers.*` is `layers.0` but not `layers.0.ffn`."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def load_family(reference: str) -> Family:
    """A built-in name, `module:NAME`, or `path/to/file.py:NAME`."""
    target = BUILTIN.get(reference, reference)
    where, _, name = target.rpartition(":")
    remedy = f"use one of {sorted(BUILTIN)}, or path/to/file.py:NAME where NAME is a phalanx.Family"
    if not where:
        raise UserError("unknown model family", field="model.family", value=reference, remedy=remedy)
    module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    family = getattr(module, name, None)
    if not isinstance(family, Family):
        raise UserError(
            f"{where} has no phalanx.Family called {name}", field="model.family", value=reference, remedy=remedy
        )
    for pattern, style in family.split.items():
        if style not in STYLES:
            raise UserError(
                f"layer {pattern!r} has the unknown split style {style!r}",
                field="model.family",
                value=reference,
                remedy=f"use one of {', '.join(STYLES)}",
            )
    return family


def _import_file(path: Path) -> ModuleType:
    name = f"phalanx_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise UserError("no such file", field="model.family", value=str(path), remedy="check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
