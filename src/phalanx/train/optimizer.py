"""AdamW on a rank's local slices, so that it needs no communication. Weights in bf16 are updated with their remainders
by one kernel (kernels/adamw.py), others by torch's. Moments stay on the device, or (`optimizer.offload`, and with
torch's kernel `optimizer.state`) in parcels that are visited in turn. Their place changes no bit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from phalanx.core.job import Job, OptimizerConfig
from phalanx.kernels.adamw import Rates, rates_now, update_
from phalanx.parallel.device import Device
from phalanx.train.moments import File, Memory, Parcels, Store

PARCEL_NUMEL = 1 << 21  # 16 MiB of fp32 moments: long enough for a disk, short enough to have three of
# Parameters are cut at multiples of this. The fused CPU kernel works on whole vectors of up to 64 bytes and on
# a tail that it rounds differently, so a cut elsewhere would change bits.
ALIGN_NUMEL = 64
MOMENTS = ("exp_avg", "exp_avg_sq")

Grads = Mapping[nn.Parameter, Tensor]


class Optimizer(Protocol):
    def update(self, grads: Grads, lr: float, clip: Tensor | None, good: Tensor) -> None:
        """Apply gradients times `clip`, unless `good` is false. The gradients may be overwritten."""

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a parameter, not to be written to; none if it has no element, or no step yet."""

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        """Continue from these moments, after `updates` updates."""

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of moments by place: device, host, file."""


class Group(NamedTuple):
    params: list[nn.Parameter]
    weight_decay: float


def build_optimizer(
    job: Job, params: Mapping[str, nn.Parameter], remainders: Mapping[str, Tensor], device: Device
) -> Optimizer:
    """Build the job's optimizer. `remainders` are those of weights in bf16; without any, the weights are the masters.
    Vectors are not decayed."""
    c = job.optimizer
    held = [p for p in params.values() if p.numel()]
    groups = [
        Group([p for p in held if p.dim() > 1], c.weight_decay),
        Group([p for p in held if p.dim() <= 1], 0.0),
    ]
    rule: Rule
    if remainders:
        rule = Joined(c, {params[name]: remainder for name, remainder in remainders.items()})
    else:
        rule = Torch(c, job.train.reduction == "exact")
    kept = torch.bfloat16 if c.state == "bf16" else rule.moment_dtype(held)
    if c.offload == "none" and (remainders or c.state == "full"):
        return Resident(groups, rule, kept)
    return Streamed(job, groups, rule, kept, device)


class Part(NamedTuple):
    """A run of a parameter's elements, flat, with what is updated along with it."""

    param: nn.Parameter
    start: int
    stop: int
    grad: Tensor
    mean: Tensor
    square: Tensor


class Rule(Protocol):
    """The arithmetic of an update."""

    def moment_dtype(self, held: list[nn.Parameter]) -> torch.dtype: ...

    def begin(self, lr: float, clip: Tensor | None, good: Tensor, updates: int) -> bool:
        """Prepare update number `updates`, before its parts. False: there is nothing to do."""

    def apply(self, parts: list[Part], weight_decay: float) -> None: ...


class Joined:
    """Updates weight and remainder by one kernel, which also clips and checks the gate: the host waits for nothing."""

    def __init__(self, config: OptimizerConfig, remainders: Mapping[nn.Parameter, Tensor]):
        self._c, self._remainders = config, remainders

    def moment_dtype(self, held: list[nn.Parameter]) -> torch.dtype:
        return torch.float32

    def begin(self, lr: float, clip: Tensor | None, good: Tensor, updates: int) -> bool:
        clip = torch.ones((), device=good.device) if clip is None else clip
        self._now = rates_now(lr, self._c.beta1, self._c.beta2, updates, clip)
        self._gate = good.to(torch.int32)
        return True

    def apply(self, parts: list[Part], weight_decay: float) -> None:
        rates = Rates(self._c.beta1, self._c.beta2, self._c.eps, weight_decay, self._now)
        for p in parts:
            cut = slice(p.start, p.stop)
            weight, remainder = p.param.detach().view(-1)[cut], self._remainders[p.param].view(-1)[cut]
            update_(weight, remainder, p.grad, p.mean, p.square, rates, self._gate)


class Torch:
    """Updates by torch's kernels. The exact reduction needs foreach, because the fused kernel's result depends on where
    a tensor is cut. Foreach cannot check a gate on the device, so the host does."""

    def __init__(self, config: OptimizerConfig, exact: bool):
        self._c, self._exact = config, exact

    def moment_dtype(self, held: list[nn.Parameter]) -> torch.dtype:
        return held[0].dtype if held else torch.float32

    def begin(self, lr: float, clip: Tensor | None, good: Tensor, updates: int) -> bool:
        if self._exact and not bool(good):
            return False
        self._lr, self._clip, self._updates = lr, clip, updates
        self._bad = None if self._exact else (~good).float()  # torch's own flag for this, made for gradient scalers
        return True

    def apply(self, parts: list[Part], weight_decay: float) -> None:
        if not parts:
            return
        wide = parts[0].param.dtype
        grads = [p.grad for p in parts]
        if self._clip is not None:
            torch._foreach_mul_(grads, self._clip.to(wide))
        moments = [[m.to(wide) for m in (p.mean, p.square)] for p in parts]  # themselves, unless they are in bf16
        where = torch.device("cpu") if self._exact else grads[0].device  # torch needs the count there
        counts = torch.full((len(parts),), float(self._updates - 1), dtype=torch.float32, device=where)
        adamw(
            [p.param.detach().view(-1)[p.start : p.stop] for p in parts],
            grads,
            [mean for mean, _ in moments],
            [square for _, square in moments],
            [],
            list(counts.unbind()),
            amsgrad=False,
            beta1=self._c.beta1,
            beta2=self._c.beta2,
            lr=self._lr,
            weight_decay=weight_decay,
            eps=self._c.eps,
            maximize=False,
            foreach=self._exact,
            fused=not self._exact,
            found_inf=self._bad,
        )
        for p, (mean, square) in zip(parts, moments, strict=True):
            if mean is not p.mean:
                p.mean.copy_(mean)  # to nearest, ties to even
                p.square.copy_(square)


class Resident:
    """Moments as tensors of their own, on the device."""

    def __init__(self, groups: list[Group], rule: Rule, dtype: torch.dtype):
        self._groups, self._rule, self._dtype, self._updates = groups, rule, dtype, 0
        self._moments: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def update(self, grads: Grads, lr: float, clip: Tensor | None, good: Tensor) -> None:
        if not self._rule.begin(lr, clip, good, self._updates + 1):
            return
        for group in self._groups:
            self._rule.apply([self._part(param, grads[param]) for param in group.params], group.weight_decay)
        self._updates += 1

    def _part(self, param: nn.Parameter, grad: Tensor) -> Part:
        if param not in self._moments:
            self._moments[param] = {key: torch.zeros_like(param, dtype=self._dtype) for key in MOMENTS}
        mean, square = (self._moments[param][key].view(-1) for key in MOMENTS)
        return Part(param, 0, param.numel(), grad.reshape(-1), mean, square)

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        return self._moments.get(param, {})

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        self._updates = updates
        for param in (p for group in self._groups for p in group.params):
            self._moments[param] = {key: moments[param][key].to(param.device, self._dtype) for key in MOMENTS}

    def held_bytes(self) -> dict[str, int]:
        held = [m for each in self._moments.values() for m in each.values()]
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
    weight_decay: float

    @property
    def numel(self) -> int:
        last = self.pieces[-1]
        return -(-(last.place + last.stop - last.start) // 1024) * 1024  # whole pages, even in bf16

    def moments(self, stored_2N: Tensor, row: int) -> list[Tensor]:
        return [stored_2N[row, p.place : p.place + p.stop - p.start] for p in self.pieces]


def cut(params: list[nn.Parameter], room: int) -> list[list[Piece]]:
    """Cut the parameters into parcels of `room` elements; the last one may have fewer."""
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
    """Moments in parcels, which come to the device in turn."""

    def __init__(self, job: Job, groups: list[Group], rule: Rule, dtype: torch.dtype, device: Device):
        self._rule, self._dtype, self._updates = rule, dtype, 0
        self._parcels = [
            Parcel(pieces, group.weight_decay) for group in groups for pieces in cut(group.params, PARCEL_NUMEL)
        ]
        sizes = [2 * parcel.numel * dtype.itemsize for parcel in self._parcels]
        self.stream = Parcels(_store(job, sizes, device), sizes, device)

    @torch.no_grad()
    def update(self, grads: Grads, lr: float, clip: Tensor | None, good: Tensor) -> None:
        if not self._rule.begin(lr, clip, good, self._updates + 1):
            return
        for i, stored in self.stream.visit():
            parcel, stored_2N = self._parcels[i], self._as_moments(stored)
            rows = zip(parcel.pieces, parcel.moments(stored_2N, 0), parcel.moments(stored_2N, 1), strict=True)
            parts = [Part(p.param, p.start, p.stop, _flat(grads, p), mean, square) for p, mean, square in rows]
            self._rule.apply(parts, parcel.weight_decay)
        self._updates += 1

    def _as_moments(self, stored: Tensor) -> Tensor:
        return stored.view(self._dtype).view(2, -1)

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {key: [] for key in MOMENTS}
        for i, parcel in enumerate(self._parcels):
            mine = [n for n, piece in enumerate(parcel.pieces) if piece.param is param]
            if not mine:
                continue
            stored_2N = self._as_moments(self.stream.read(i))
            for row, key in enumerate(MOMENTS):
                found[key] += [parcel.moments(stored_2N, row)[n].clone() for n in mine]
        if not found[MOMENTS[0]]:
            return {}
        return {key: torch.cat(found[key]).view(param.shape) for key in MOMENTS}

    def restore(self, moments: dict[nn.Parameter, dict[str, Tensor]], updates: int) -> None:
        self._updates = updates
        for i, parcel in enumerate(self._parcels):
            stored_2N = self._as_moments(self.stream.read(i))
            for row, key in enumerate(MOMENTS):
                for piece, room in zip(parcel.pieces, parcel.moments(stored_2N, row), strict=True):
                    room.copy_(moments[piece.param][key].view(-1)[piece.start : piece.stop])
            self.stream.store.keep(i, None)

    def held_bytes(self) -> dict[str, int]:
        return self.stream.held_bytes()


def _flat(grads: Grads, piece: Piece) -> Tensor:
    return grads[piece.param].reshape(-1)[piece.start : piece.stop]


def _store(job: Job, sizes: list[int], device: Device) -> Store:
    c = job.optimizer
    if c.offload == "nvme":
        return File(sizes, device, c.offload_dir or tempfile.gettempdir())
    return Memory(sizes, device, "host" if c.offload == "cpu" or device.is_cpu else "device")
