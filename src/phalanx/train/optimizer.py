"""AdamW on a rank's local slices, so without communication. Its moments are torch's own tensors on the
device, or (`optimizer.offload`, `optimizer.state`) parcels that are visited in turn. The arithmetic is torch's
kernel on the device either way, so that only bf16 moments change a bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from phalanx.core.job import Job
from phalanx.parallel.device import Device
from phalanx.train.moments import File, Memory, Parcels, Store

PARCEL_NUMEL = 1 << 21  # 16 MiB of fp32 moments: long enough for a disk, short enough to have three of
# Parameters are cut at multiples of this. The fused CPU kernel works on whole vectors of up to 64 bytes and on
# a tail that it rounds differently, so a cut elsewhere would change bits.
ALIGN_NUMEL = 64
MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer(Protocol):
    param_groups: list[dict[str, Any]]
    found_inf: Tensor | None

    def step(self) -> None: ...

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Its step count and moments, not to be written to; none if it has no element, or no step yet."""

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        """Go on from these moments, after so many updates."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of moments by place: device, host, file."""


def build_optimizer(job: Job, params: Iterable[nn.Parameter], device: Device) -> Optimizer:
    """Vectors are not decayed. The exact reduction needs foreach: the fused kernel's result depends on where
    a tensor is cut."""
    c, exact = job.optimizer, job.train.reduction == "exact"
    held = [p for p in params if p.numel()]
    groups = [
        {"params": [p for p in held if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in held if p.dim() <= 1], "weight_decay": 0.0},
    ]
    options = {"lr": c.lr, "betas": (c.beta1, c.beta2), "eps": c.eps, "foreach": exact, "fused": not exact}
    if c.offload == "none" and c.state == "full":
        return Resident(groups, **options)
    return Streamed(job, groups, options, device)


class Resident(torch.optim.AdamW):
    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        return dict(self.state.get(param, {}))

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        for group in self.param_groups:
            for param in group["params"]:  # the count where torch wants it
                where = param.device if group["fused"] else torch.device("cpu")
                count = torch.tensor(float(updates), dtype=torch.float32, device=where)
                self.state[param] = {"step": count, **{key: moments[param][key].to(param.device) for key in MOMENTS}}

    def held_bytes(self) -> dict[str, int]:
        held = [state[key] for state in self.state.values() for key in MOMENTS]
        place = "host" if held and held[0].is_cpu else "device"
        return {"device": 0, "host": 0, "file": 0} | {place: sum(m.numel() * m.element_size() for m in held)}


class Piece(NamedTuple):
    param: nn.Parameter
    start: int  # in the flat parameter
    stop: int
    place: int  # in the flat parcel


@dataclass(slots=True)
class Parcel:
    pieces: list[Piece]
    group: dict[str, Any]
    steps: list[Tensor]

    @property
    def numel(self) -> int:
        last = self.pieces[-1]
        return -(-(last.place + last.stop - last.start) // 1024) * 1024  # whole pages, even in bf16

    def moments(self, stored_2N: Tensor, row: int) -> list[Tensor]:
        return [stored_2N[row, p.place : p.place + p.stop - p.start] for p in self.pieces]


def cut(params: list[nn.Parameter], room: int) -> list[list[Piece]]:
    """Into parcels of `room` elements, the last one of fewer."""
    parcels: list[list[Piece]] = []
    used = room
    for param in params:
        start = 0
        while start < param.numel():
            if used >= room:
                parcels.append([])
                used = 0
            stop = min(param.numel(), start + room - used)
            parcels[-1].append(Piece(param, start, stop, used))
            used += -(-(stop - start) // ALIGN_NUMEL) * ALIGN_NUMEL
            start = stop
    return parcels


class Streamed:
    def __init__(self, job: Job, groups: list[dict[str, Any]], options: dict[str, Any], device: Device):
        self.param_groups = [options | group for group in groups]
        self.found_inf: Tensor | None = None
        counter = torch.device("cpu") if options["foreach"] else device.torch  # where torch wants it
        self._parcels = [
            Parcel(pieces, group, [torch.zeros((), dtype=torch.float32, device=counter) for _ in pieces])
            for group in self.param_groups
            for pieces in cut(group["params"], PARCEL_NUMEL)
        ]
        self._params = [p for group in self.param_groups for p in group["params"]]
        self._master = self._params[0].dtype if self._params else torch.float32
        self._dtype = torch.bfloat16 if job.optimizer.state == "bf16" else self._master
        sizes = [2 * parcel.numel * self._dtype.itemsize for parcel in self._parcels]
        self.stream = Parcels(_store(job, sizes, device), sizes, device)

    @torch.no_grad()
    def step(self) -> None:
        if all(p.grad is None for p in self._params):
            return
        for i, stored in self.stream.visit():
            self._update(self._parcels[i], self._as_moments(stored))

    def _as_moments(self, stored: Tensor) -> Tensor:
        return stored.view(self._dtype).view(2, -1)

    def _update(self, parcel: Parcel, stored_2N: Tensor) -> None:
        moments_2N = stored_2N.to(self._master)  # itself, unless it is in bf16
        group = parcel.group
        adamw(
            [p.param.view(-1)[p.start : p.stop] for p in parcel.pieces],
            [_grad(p.param).view(-1)[p.start : p.stop] for p in parcel.pieces],
            parcel.moments(moments_2N, 0),
            parcel.moments(moments_2N, 1),
            [],
            parcel.steps,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            foreach=group["foreach"],
            fused=group["fused"],
            found_inf=self.found_inf,
        )
        if moments_2N is not stored_2N:
            stored_2N.copy_(moments_2N)  # to nearest, ties to even

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"step": [], **{key: [] for key in MOMENTS}}
        for i, parcel in enumerate(self._parcels):
            mine = [n for n, piece in enumerate(parcel.pieces) if piece.param is param]
            if not mine:
                continue
            stored_2N = self._as_moments(self.stream.read(i))
            for row, key in enumerate(MOMENTS):
                found[key] += [parcel.moments(stored_2N, row)[n].clone() for n in mine]
            found["step"] += [parcel.steps[n] for n in mine]
        if not found["step"]:
            return {}
        return {"step": found["step"][0]} | {key: torch.cat(found[key]).view(param.shape) for key in MOMENTS}

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        for i, parcel in enumerate(self._parcels):
            stored_2N = self._as_moments(self.stream.read(i))
            for row, key in enumerate(MOMENTS):
                for piece, room in zip(parcel.pieces, parcel.moments(stored_2N, row), strict=True):
                    room.copy_(moments[piece.param][key].view(-1)[piece.start : piece.stop])
            for steps in parcel.steps:
                steps.fill_(updates)
            self.stream.store.keep(i, None)

    def held_bytes(self) -> dict[str, int]:
        return self.stream.held_bytes()


def _grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def _store(job: Job, sizes: list[int], device: Device) -> Store:
    c = job.optimizer
    if c.offload == "nvme":
        return File(sizes, device, c.offload_dir or tempfile.gettempdir())
    return Memory(sizes, device, "host" if c.offload == "cpu" or device.is_cpu else "device")
