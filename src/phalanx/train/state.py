"""A worker's state: its local slices of the weights and of the optimizer, the step, and the head of the ledger. It
lives outside the engine, which is discarded after a failure; engines borrow these tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.core.checkpoint import Entry
from phalanx.core.held import Held
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.core.ledger import GENESIS
from phalanx.kernels.adamw import join, split
from phalanx.model.family import Family
from phalanx.model.init import Slice, draw_all
from phalanx.parallel.device import Device
from phalanx.parallel.recompute import compiler, importing
from phalanx.parallel.schema import describe, describe_buffers
from phalanx.parallel.shard import COMPUTE_DTYPE, MASTER_DTYPE
from phalanx.train.optimizer import MOMENTS, Optimizer, build_optimizer
from phalanx.train.skips import Recent

DIGEST_LIMIT_BYTES = 1 << 28


@dataclass
class State:
    infos: list[Held]
    params: dict[str, nn.Parameter]  # local slices, as the model computes with them
    remainders: dict[str, Tensor]  # the rest of the masters of weights in bf16 (kernels/adamw.py)
    optimizer: Optimizer
    buffers: dict[str, Tensor]  # whole on every rank of the stage
    entries: list[Entry]  # of a checkpoint: what all ranks together hold
    step: int = 0
    updates: int = 0  # of the optimizer
    ledger: str = GENESIS  # the hash of the last committed step
    recent: Recent = field(default_factory=list)  # what the next step is judged by

    @staticmethod
    def create(
        job: Job, family: Family, coord: Coord, device: Device, progress: Callable[[], object] = lambda: None
    ) -> State:
        """Draw first values, the same whole weights on any layout. `progress` is called now and then."""
        everywhere = describe(family, job.model, job.layout)
        infos = [i for i in everywhere if i.held_by(job.layout, coord)]
        dtype = MASTER_DTYPE[job.train.precision]
        slices = []
        for info in infos:
            local = torch.empty(info.local_shape(job.layout, coord), dtype=dtype, device=device.torch)
            init = family.init(info.name, job.model)
            slices.append(Slice(info.name, info.shape, init, *info.local_slice(job.layout, coord), local))
        with importing(compiler(job, device)):
            draw_all(job.seed, slices, device.use, progress)
        params, remainders = dict[str, nn.Parameter](), dict[str, Tensor]()
        slices.reverse()
        while slices:  # one by one, so that memory never holds all of them twice
            name, _, _, _, _, local = slices.pop()
            if COMPUTE_DTYPE[job.train.precision] == torch.bfloat16:
                local, remainders[name] = split(local)
            params[name] = nn.Parameter(local)
        described = describe_buffers(family, job.model, job.layout)
        buffers = {
            held.name: torch.full(held.shape, value, dtype=dtype, device=device.torch)
            for held, value in described
            if held.held_by(job.layout, coord)
        }
        entries = _entries(everywhere, [held for held, _ in described], job)
        optimizer = build_optimizer(job, params, remainders, device)
        return State(infos, params, remainders, optimizer, buffers, entries)

    def master(self, name: str) -> Tensor:
        """Return a parameter in the precision in which it is updated. Do not write to it."""
        param = self.params[name].detach()
        return join(param, self.remainders[name]) if name in self.remainders else param

    def moments(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's moments of one parameter, from where they are kept."""
        return self.optimizer.moments(self.params[name])

    # -- what checkpoints save and load

    def get(self, name: str) -> Tensor:
        """Return this rank's slice of one of the `entries`."""
        kind, _, what = name.partition("/")
        if kind == "weights":
            return self.master(what)
        return self.buffers[what] if kind == "buffers" else self.moments(what)[kind]

    def names(self) -> list[str]:
        """Name the `entries` that this rank has elements of; before the first update there are no moments."""
        out = []
        for entry in self.entries:
            kind, _, what = entry.held.name.partition("/")
            if kind == "buffers":
                there = what in self.buffers
            else:
                param = self.params.get(what)
                there = param is not None and param.numel() > 0
                if kind != "weights":  # a state that was restored before its first update holds zeros
                    there = there and self.updates > 0 and kind in self.moments(what)
            if there:
                out.append(entry.held.name)
        return out

    def restore(self, fill: Callable[[Callable[[str], Tensor]], object], step: int, updates: int) -> None:
        """Continue from a checkpoint of `step`, after `updates` updates of the optimizer. `fill` gets a function that
        returns this rank's slices by name, and writes to them. Without updates the checkpoint has no moments, and the
        optimizer starts anew."""
        moments: dict[nn.Parameter, dict[str, Tensor]] = {}
        masters = {name: torch.empty(self.params[name].shape) for name in self.remainders}  # on the host
        dtypes = {e.held.name: getattr(torch, e.dtype) for e in self.entries}
        for name, param in self.params.items():
            moments[param] = {key: torch.empty_like(param, dtype=dtypes[f"{key}/{name}"]) for key in MOMENTS}

        def room(name: str) -> Tensor:
            kind, _, what = name.partition("/")
            if kind in MOMENTS:
                return moments[self.params[what]][kind].detach()
            return masters[what] if kind == "weights" and masters else self.get(name)

        fill(room)
        for name, master in masters.items():
            weight, remainder = split(master.to(self.params[name].device))
            self.params[name].detach().copy_(weight)
            self.remainders[name].copy_(remainder)
        if not updates:  # the checkpoint has none, and those of a state that was here before do not count
            for held in moments.values():
                for moment in held.values():
                    moment.zero_()
        self.optimizer.restore(moments, updates)
        self.step, self.updates = step, updates

    def digest(self) -> dict[str, str] | None:
        """Return the SHA-256 of the local weights, and of the optimizer's moments. None for more than
        DIGEST_LIMIT_BYTES: hashing on the host would hold up a large run's end."""
        if sum(p.numel() * p.element_size() for p in self.params.values()) > DIGEST_LIMIT_BYTES:
            return None
        weights, moments = hashlib.sha256(), hashlib.sha256()
        for name in self.params:
            weights.update(_bytes(name, self.master(name)))
            for key, value in sorted(self.moments(name).items()):
                moments.update(_bytes(key, value))
        for name, buffer in self.buffers.items():
            weights.update(_bytes(name, buffer))
        return {"weights": weights.hexdigest(), "optimizer": moments.hexdigest()}


def _entries(params: list[Held], buffers: list[Held], job: Job) -> list[Entry]:
    master = MASTER_DTYPE[job.train.precision]
    kept = torch.bfloat16 if job.optimizer.state == "bf16" else master
    dtypes = {"weights": _name(master), **dict.fromkeys(MOMENTS, _name(kept))}
    out = [Entry(_named(kind, held), dtype) for held in params for kind, dtype in dtypes.items()]
    return out + [Entry(_named("buffers", held), _name(master)) for held in buffers]


def _named(kind: str, held: Held) -> Held:
    return Held(f"{kind}/{held.name}", held.shape, held.tp_dim, held.stage, held.experts, held.whole)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(name: str, tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return name.encode() + flat.cpu().numpy().tobytes()
