"""Compare a family under each axis with itself on one rank. In fp64 the gradients of every parameter agree to the last
digits, or the family does something that the axis cannot split. Two processes, forked from this one, run each axis."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.control.verdict import is_echo
from phalanx.core.compat import check
from phalanx.core.errors import UserError
from phalanx.core.image import ImageShape
from phalanx.core.job import Job, OptimizerConfig, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.model.family import Batch, Family, Init, check_family, skeleton
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups, form_cross
from phalanx.train.engine import Engine
from phalanx.train.state import State

BAR = 1e-10
SMALLEST = 1e-6  # of the whole gradient: the least that the error of a parameter is compared with
MICRO, SEQ = 4, 32
STD = 0.02  # the least of first values: zeros would hide what comes after them
MOST_PARAMS = 20_000_000
LIMIT_S, GRACE_S = 120.0, 5.0  # for one axis; for the other rank after the first has failed
_FORKED = multiprocessing.get_context("fork")

_BATCH = "each rank sees other samples: nothing but the loss may depend on which are in a micro-batch"
_TP = (
    "between blocks a rank holds a slice of the sequence, so lengths and positions come from the batch and not from x; "
    "inside a gathered module all parameters are split by features"
)
_PP = "forward(batch, x) does its work in the modules of `units`, `first` and `last`; each parameter is in one of them"
_CP = "positions come from batch.positions(), and the attention goes through phalanx.Attend"
_EP = "the experts are a phalanx.model.moe.MoE that `experts` names"
Axes = Sequence[tuple[str, dict[str, Any], str]]  # a name, the degrees, and what the axis asks of a family
AXES: Axes = (
    ("replica 2", {"replica": 2}, _BATCH),
    ("shard 2", {"shard": 2}, _BATCH),
    ("shard 2, ZeRO-1", {"shard": 2, "zero": 1}, _BATCH),
    ("tp 2", {"tp": 2}, _TP),
    ("pp 2", {"pp": 2}, _PP),
    ("cp 2, ring", {"cp": 2}, _CP),
    ("cp 2, Ulysses", {"cp": 2, "cp_style": "ulysses"}, _CP),
    ("shard 2, ep 2", {"shard": 2, "ep": 2}, _EP),
)


@dataclass(frozen=True, slots=True)
class Finding:
    axis: str
    verdict: str  # right | refused | wrong | broken
    why: str = ""
    error: float = math.nan  # the largest error of a parameter, relative to its gradient


def parity(job: Job, family: Family, axes: Axes = AXES) -> Iterator[Finding]:
    """Try one axis after the other. UserError: the family does not run on one rank, or is too large to try."""
    check_family(family, job.model)
    size = sum(p.numel() for p in skeleton(family, job.model).parameters())
    if size > MOST_PARAMS:
        remedy = "lower its sizes: --set model.dim=64 --set model.num_layers=4, or model.options of your own"
        what = f"{size:,} parameters are too many to try in fp64; {MOST_PARAMS:,} at most"
        raise UserError(what, field="model", value=job.model.family, remedy=remedy)
    job, family = _small(job, family), replace(family, init=_Noisy(family))
    alone = _try(job, family, Layout(), "")
    if alone.verdict != "right":
        what = f"it does not run on one rank: {alone.why}"
        raise UserError(what, field="model.family", value=job.model.family, remedy="correct it")
    for name, degrees, hint in axes:
        if "ep" not in degrees or family.experts:
            yield replace(_try(job, family, Layout(**degrees), hint), axis=name)


@dataclass(frozen=True, slots=True)
class _Noisy:
    """First values of a family, with noise in every parameter."""

    family: Family

    def __call__(self, name: str, config: ModelConfig) -> Init:
        init = self.family.init(name, config)
        return Init(max(init.std, STD), init.mean)


def _small(job: Job, family: Family) -> Job:
    """Return a job of one step of a few short sequences, with nothing beside the model."""
    image = ImageShape.of(job.model.options) if job.model.family == "image" else None
    train = TrainConfig(
        steps=1,
        seq_len=image.num_patches if image else min(job.train.seq_len, SEQ),
        global_batch=MICRO,
        micro_batch=1,
        precision="fp64",
        compile="none",
        document_mask=job.train.document_mask and image is None,
        recompute=job.train.recompute,
    )
    return Job(
        name="parity",
        seed=job.seed,
        model=job.model,
        layout=Layout(),
        train=train,
        optimizer=OptimizerConfig(clip=0.0),
        run=RunConfig(device="cpu"),
    )


def _try(job: Job, family: Family, layout: Layout, hint: str) -> Finding:
    try:
        check(replace(job, layout=layout))
    except UserError as error:
        return Finding("", "refused", str(error))
    with tempfile.TemporaryDirectory(prefix="phalanx-parity-") as folder:
        said = _run(replace(job, layout=layout), family, Path(folder))
    failed = [each for each in said if "error" in each]
    if failed:
        cause = min(failed, key=lambda each: is_echo(each["kind"], each["error"]))
        if cause["kind"] == "UserError":
            return Finding("", "refused", cause["error"])
        return Finding("", "broken", f"{cause['kind']}: {cause['error']}. {hint}".rstrip(". ") + ".")
    squares: dict[str, list[float]] = {}
    for each in said:
        for name, (off, norm) in each["squares"].items():
            total = squares.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + off, total[1] + norm
    least = SMALLEST * math.sqrt(sum(norm for _, norm in squares.values()))
    errors = {name: math.sqrt(off) / max(math.sqrt(norm), least, 1e-300) for name, (off, norm) in squares.items()}
    bad = [name for name, error in errors.items() if not error <= BAR]
    worst = max(errors.values(), default=math.nan) if not bad else max(errors[name] for name in bad)
    if not bad:
        return Finding("", "right", error=worst)
    first = f"the gradient of {bad[0]} is off by {errors[bad[0]]:.1e}"
    return Finding("", "wrong", f"{first}, and {len(bad)} of {len(errors)} parameters are. {hint}.", worst)


# -- the two ranks


def _run(job: Job, family: Family, folder: Path) -> list[dict[str, Any]]:
    """Run all ranks and return what each reports. A rank that reports nothing in time hangs."""
    ranks: list[tuple[BaseProcess, Connection]] = []
    for rank in range(job.layout.world_size):
        ours, theirs = _FORKED.Pipe(duplex=False)
        process = _FORKED.Process(target=_main, args=(job, family, rank, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    said: dict[int, dict[str, Any]] = {}
    try:
        deadline = time.monotonic() + LIMIT_S
        while len(said) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            for ready in wait([pipe for _, pipe in ranks if id(pipe) not in said], left):
                assert isinstance(ready, Connection)
                said[id(ready)] = _heard(ready)
                if "error" in said[id(ready)]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    finally:
        for running, _ in ranks:
            running.kill()
            running.join()
    late = {"kind": "TimeoutError", "error": f"it was not done in {LIMIT_S:.0f} s"}
    return [said.get(id(pipe), late) for _, pipe in ranks]


def _heard(pipe: Connection) -> dict[str, Any]:
    try:
        return dict(json.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        return {"kind": "RuntimeError", "error": "the process ended without a word"}


def _main(job: Job, family: Family, rank: int, folder: Path, pipe: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # torch's messages about peers that are gone
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        said: dict[str, Any] = {"squares": _squares(job, family, rank, folder)}
    except Exception as error:
        said = {"kind": type(error).__name__, "error": str(error)[:500]}
    pipe.send_bytes(json.dumps(said).encode())


def _squares(job: Job, family: Family, rank: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return two squared norms by parameter, on this rank's slice: of the error, and of one rank's own gradient."""
    want, _ = _gradients(replace(job, layout=Layout()), family, 0, folder / f"alone-{rank}")
    got, state = _gradients(job, family, rank, folder / "together")
    out = {}
    for info in state.infos:
        rows, cols = info.local_slice(job.layout, job.layout.coord(rank))
        whole = want[info.name]
        part = whole[rows, cols] if whole.dim() > 1 else whole[rows]
        off = got[info.name].reshape(part.shape) - part
        out[info.name] = (float((off**2).sum()), float((part**2).sum()))
    return out


def _gradients(job: Job, family: Family, rank: int, meeting: Path) -> tuple[dict[str, Tensor], State]:
    device, coord = Device(torch.device("cpu"), "gloo"), job.layout.coord(rank)
    store = dist.FileStore(str(meeting), job.layout.world_size)
    state = State.create(job, family, coord, device)
    groups = Groups.form(store, 1, job.layout, coord, device, bool(family.experts), job.collectives)
    engine = Engine(job, family, coord, groups, state, device)
    engine.rejoin(form_cross(store, 1, job.layout, coord, device, job.collectives))
    result = engine.gradients([_batch(job, family, index) for index in job.micro_indices(coord)])
    gradients = {name: grad.detach().double().clone() for name, grad in result.grads.items()}
    engine.close()
    groups.close()
    return gradients, state


def _batch(job: Job, family: Family, index: int) -> Batch:
    """Make a micro-batch, the same in every layout: random tokens in random documents, or random features."""
    random = torch.Generator().manual_seed(job.seed * 1000 + index)
    shape, vocab = (job.train.micro_batch, job.train.seq_len), job.model.vocab_size
    tokens = torch.randint(vocab, (shape[0], shape[1] + 1), generator=random)
    inputs = family.names(skeleton(family, job.model), [p for p, style in family.split.items() if style == "input"])
    if inputs:
        features = skeleton(family, job.model).get_submodule(inputs[0]).in_features
        x = torch.randn(*shape, int(features), generator=random)
        return Batch(x, tokens[:, 1:].clone(), torch.ones(shape, dtype=torch.int64))
    ends = torch.rand(shape, generator=random) < 0.15
    documents = torch.cumsum(ends, 1) - ends.long()
    return Batch(
        tokens[:, :-1].clone(), tokens[:, 1:].clone(), (~ends).long(), documents if job.train.document_mask else None
    )
