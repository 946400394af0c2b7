"""The door for models. A family is a factory for a plain module plus a short description of how
its layers split; our own families and a user's own come in the same way.

`Family.split` maps module-name patterns to one of seven styles. Between two blocks a tensor-parallel
rank holds a slice of the sequence; inside a block, after "gather", a slice of the features:

    "gather"  a module whose input is gathered along the sequence (an attention, an FFN)
    "column"  a Linear inside it whose output features are split
    "row"     the Linear that ends it: input features split, output summed and scattered over the sequence
    "vocab"   an Embedding split by rows, output summed and scattered over the sequence
    "input"   a Linear that reads raw features instead: they are split, the output as for "row"
    "head"    the Linear to the vocabulary: gather the sequence, split the output
    "norm"    a SplitNorm inside a gathered module: features split, squares summed over the ranks

Every parameter that no style splits is held whole by each tensor-parallel rank, and its gradient is
summed over them; so everything inside a gathered module must be split by features.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.shape import ModelConfig
from phalanx.core.weights import Weight
from phalanx.model.rms import SplitNorm

BUILTIN = {
    "dense": "phalanx.model.dense:DENSE",
    "moe": "phalanx.model.moe:MOE",
    "image": "phalanx.model.image:IMAGE",
}
STYLES = ("gather", "column", "row", "vocab", "input", "head", "norm")
MODULE_OF: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "vocab": nn.Embedding,
    "input": nn.Linear,
    "head": nn.Linear,
    "norm": SplitNorm,
}


@dataclass(slots=True)
class Batch:
    """One micro-batch. B sequences of length L; nothing here says that a token is text: a token may also be a vector
    (tokens_BL is then B x L x features). Under context parallelism a rank has its own positions of the sequence, but
    the whole of `documents_BL`."""

    tokens_BL: Tensor
    targets_BL: Tensor
    weights_BL: Tensor  # 1 where the target counts, 0 where it does not
    documents_BL: Tensor | None = None  # which document a position belongs to; None: no mask
    positions_L: Tensor | None = None  # where in the sequence; None: from 0 on
    scale: Tensor | None = None  # factor for losses summed over targets: 1 / their weights
    even: Tensor | None = None  # factor for sums over all positions, weighted or not: 1 / their number
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)  # for what layers share

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the same batch with every tensor passed through `function`."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "cache"]
        values = {name: getattr(self, name) for name in names}
        mapped: dict[str, Any] = {k: v if v is None else function(v) for k, v in values.items()}
        return Batch(**mapped)

    def positions(self) -> Tensor:
        if self.positions_L is not None:
            return self.positions_L
        return torch.arange(self.tokens_BL.shape[1], device=self.tokens_BL.device)

    def document_positions(self) -> Tensor:
        """Return positions that begin anew with each document, B x L (or 1 x L), for families to which a token's place
        in its document matters. With rotary embeddings it does not: those only know distances."""
        if self.documents_BL is None:
            return self.positions()[None]
        at = torch.arange(self.documents_BL.shape[1], device=self.documents_BL.device)
        opens = torch.ones_like(self.documents_BL, dtype=torch.bool)
        opens[:, 1:] = self.documents_BL[:, 1:] != self.documents_BL[:, :-1]
        starts = torch.where(opens, at, 0).cummax(dim=1).values
        return (at - starts)[:, self.positions()]


@dataclass(frozen=True, slots=True)
class Init:
    """A parameter's first values: normal with this deviation around this mean."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    build: Callable[[ModelConfig], nn.Module]
    init: Callable[[str, ModelConfig], Init]
    split: Mapping[str, str]
    units: Sequence[str] = ("layers.*",)  # gathered, recomputed and compiled one by one, in this order
    # For pipelines: modules that only the first or only the last stage has. Elsewhere they pass their input on. Stages
    # pass each other what units do, (B, L, width), as the x of `forward(batch, x)`.
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    width: Callable[[ModelConfig], int] = lambda config: config.dim
    optional: Sequence[str] = ()  # modules of `split` that not every size of the model has, with all beneath them
    buffers: Mapping[str, float] = dataclasses.field(default_factory=dict)  # those that it may have -> first value
    experts: Sequence[str] = ()  # modules whose parameters hold the rows of one expert after the other
    loss: Callable[[Tensor, Batch, object], Tensor] | None = None  # default: cross-entropy, summed
    weights: Sequence[Weight] = ()  # the names that its tensors have elsewhere
    ends_in_head: bool = False  # whether the model returns what its phalanx.Head does: the loss may take its place

    def style_of(self, module_name: str) -> str | None:
        for pattern, style in self.split.items():
            if _matches(module_name, pattern):
                return style
        return None

    def names(self, model: nn.Module, patterns: Sequence[str]) -> list[str]:
        """Return the names of the modules that match, in the order of the patterns."""
        names = [name for name, _ in model.named_modules()]
        return [name for pattern in patterns for name in names if _matches(name, pattern)]

    def modules(self, model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.names(model, patterns)]

    def buffer_start(self, name: str) -> float:
        """Return the first value of a buffer; KeyError if the family does not declare it."""
        return next(value for pattern, value in self.buffers.items() if _matches(name, pattern))

    def is_expert(self, module_name: str) -> bool:
        return any(_matches(module_name, pattern) for pattern in self.experts)


def _matches(name: str, pattern: str) -> bool:
    """Match shell-style, part by part: `layers.*` is `layers.0` but not `layers.0.ffn`."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def load_family(reference: str) -> Family:
    """Load a family by a built-in name, `module:NAME`, or `path/to/file.py:NAME`."""
    target = BUILTIN.get(reference, reference)
    where, _, name = target.rpartition(":")
    remedy = f"use one of {sorted(BUILTIN)}, or path/to/file.py:NAME where NAME is a phalanx.Family"
    if not where:
        raise _refusal(reference, "unknown model family", remedy)
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        raise _refusal(reference, f"it cannot be imported: {_told(error, where)}", "correct the file") from error
    family = getattr(module, name, None)
    if not isinstance(family, Family):
        what = "is not a phalanx.Family" if hasattr(module, name) else "is not there"
        known = [key for key, value in vars(module).items() if isinstance(value, Family)]
        raise _refusal(reference, f"{name} {what}", f"{where} has {', '.join(known)}" if known else remedy)
    for pattern, style in family.split.items():
        if style not in STYLES:
            raise _refusal(
                reference, f"layer {pattern!r} has the unknown split style {style!r}", f"use one of {', '.join(STYLES)}"
            )
    return family


being_imported: list[str] = []  # files of families; one that starts a training would never end


def _import_file(path: Path) -> ModuleType:
    name = f"phalanx_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for modules beside it; last, so that it shadows nothing
    being_imported.append(str(path))
    try:
        spec.loader.exec_module(module)
    finally:
        being_imported.pop()
    return module


_built: list[tuple[Family, ModelConfig, nn.Module]] = []


def skeleton(family: Family, config: ModelConfig) -> nn.Module:
    """Return the model without values, to be looked at only. The last one is kept."""
    if not (_built and _built[0][0] is family and _built[0][1] == config):
        with torch.device("meta"):
            _built[:] = [(family, config, family.build(config))]
    return _built[0][2]


def check_family(family: Family, config: ModelConfig) -> None:
    """Refuse a description that does not fit its model and would fail deep inside a step, or train something else."""

    def refuse(message: str, remedy: str) -> NoReturn:
        raise _refusal(config.family, message, remedy)

    try:
        model = skeleton(family, config)
    except UserError:
        raise
    except Exception as error:
        where = config.family.rpartition(":")[0]
        refuse(f"building the model failed: {_told(error, where)}", "correct it, or its sizes under [model]")
    modules = dict(model.named_modules())
    may_lack = tuple(f"{pattern}." for pattern in family.optional)
    for kind, patterns in (("split", family.split), ("units", family.units), ("experts", family.experts)):
        for pattern in patterns:
            if kind == "split" and family.split[pattern] == "norm":
                continue  # which not every size of a model has; one that it does not match is found below
            if not any(_matches(name, pattern) for name in modules) and not f"{pattern}.".startswith(may_lack):
                names = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in modules if name)
                refuse(f"{kind} pattern {pattern!r} matches no module", f"the modules are {', '.join(names)}")
    gathered = tuple(f"{name}." for name in modules if family.style_of(name) == "gather")
    for name, module in modules.items():
        style = family.style_of(name) or ""
        wanted = MODULE_OF.get(style)
        if wanted and not isinstance(module, wanted):
            what = f"layer {name!r} has the split style {style!r} but is a {type(module).__name__}"
            refuse(what, f"give that style to a {wanted.__name__}")
        if isinstance(module, nn.Embedding) and not style and not name.startswith(gathered):
            what = f"embedding {name!r} is not split, so it would not know which slice of the sequence a rank holds"
            refuse(what, f"add {name!r}: 'vocab' to split, and look up all positions; each rank gets its own")
        if isinstance(module, SplitNorm) and style != "norm":
            what = f"norm {name!r} is not split, so it would not count the features of other ranks"
            refuse(what, f"add {name!r}: 'norm' to split")
        if style == "vocab" and (module.padding_idx is not None or module.max_norm):
            refuse(f"embedding {name!r} has padding_idx or max_norm", "leave them out: a split embedding has neither")
        if style == "head" and family.loss is None and module.out_features != config.vocab_size:
            what = f"layer {name!r} has {module.out_features} outputs, but model.vocab_size is {config.vocab_size}"
            refuse(what, "make them agree: the loss counts columns from model.vocab_size")
    for name, _ in model.named_buffers():
        if any(_matches(name, pattern) for pattern in family.buffers):
            continue
        refuse(f"{name!r} is a buffer, and would have no values", "compute it in forward, or make it a parameter")
    for name, param in model.named_parameters():
        if param.dim() == 0:
            refuse(f"parameter {name!r} is a scalar, which has no rows to shard", "give it the shape (1,)")
        if not isinstance(family.init(name, config), Init):
            refuse(f"init gives {family.init(name, config)!r} for {name!r}", "return a phalanx.Init for each parameter")


def _refusal(reference: str, message: str, remedy: str) -> UserError:
    return UserError(message, field="model.family", value=reference, remedy=remedy)


def _told(error: Exception, file: str) -> str:
    """Describe the error in one line, with the last line of the user's own file that led to it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")
