"""A worker's state: its local slices of the weights and of the optimizer, and the step. It lives
outside the engine, which is thrown away after a failure; engines borrow these tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.model.family import Family
from phalanx.model.init import draw
from phalanx.parallel.device import Device
from phalanx.parallel.schema import ParamInfo, describe, describe_buffers
from phalanx.parallel.shard import MASTER_DTYPE
from phalanx.train.optimizer import Optimizer, build_optimizer

DIGEST_LIMIT_BYTES = 1 << 28


@dataclass
class State:
    infos: list[ParamInfo]
    params: dict[str, nn.Parameter]  # local slices, in the master precision
    optimizer: Optimizer
    buffers: dict[str, torch.Tensor]  # whole on every rank of the stage
    step: int = 0

    @staticmethod
    def create(job: Job, family: Family, coord: Coord, device: Device) -> State:
        """First values: the same whole weights on any layout."""
        infos = [i for i in describe(family, job.model, job.layout) if i.held_by(job.layout, coord)]
        params = {}
        for info in infos:
            shape = info.local_shape(job.layout, coord)
            local = torch.empty(shape, dtype=MASTER_DTYPE[job.train.precision])
            rows, cols = info.local_slice(job.layout, coord)
            draw(job.seed, info.name, info.shape, family.init(info.name, job.model), rows, cols, local)
            params[info.name] = nn.Parameter(local.to(device.torch))
        dtype = MASTER_DTYPE[job.train.precision]
        buffers = {
            name: torch.full(shape, value, dtype=dtype, device=device.torch)
            for name, shape, value in describe_buffers(family, job.model, job.layout, coord)
        }
        return State(infos, params, build_optimizer(job, params.values(), device), buffers)

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's step count and moments of one parameter, wherever they are kept."""
        return self.optimizer.moments(self.params[name])

    def digest(self) -> dict[str, str] | None:
        """SHA-256 of the bytes of the local weights, and of the optimizer's moments. None for more
        than DIGEST_LIMIT_BYTES: hashing on the host would hold up a large run's end."""
        if sum(p.numel() * p.element_size() for p in self.params.values()) > DIGEST_LIMIT_BYTES:
            return None
        weights, moments = hashlib.sha256(), hashlib.sha256()
        for name, param in self.params.items():
            weights.update(_bytes(name, param))
            for key, value in sorted(self.moments(name).items()):
                moments.update(_bytes(key, value))
        for name, buffer in self.buffers.items():
            weights.update(_bytes(name, buffer))
        return {"weights": weights.hexdigest(), "optimizer": moments.hexdigest()}


def _bytes(name: str, tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return name.encode() + flat.cpu().numpy().tobytes()
