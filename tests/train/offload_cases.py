"""Cases of the offload tests, run inside pool workers."""

import hashlib
from contextlib import contextmanager

import torch

from phalanx.parallel import offload
from phalanx.train import optimizer
from tests.cases import case_train, connect
from tests.train import engine_cases


@contextmanager
def small(module, name, value):
    """The cases' models are smaller than one parcel, and than what is worth a copy."""
    before = getattr(module, name)
    setattr(module, name, value)
    yield
    setattr(module, name, before)


def train(args):
    with small(optimizer, "PARCEL_NUMEL", 2048):
        return case_train(args)


def not_finite(args):
    with small(optimizer, "PARCEL_NUMEL", 2048):
        return engine_cases.not_finite(args)


def kept(args):
    """Return where the moments are after two steps, and their type."""
    with small(optimizer, "PARCEL_NUMEL", 2048):
        rank = connect(args)
        for step in range(2):
            rank.engine.step(rank.batches(step))
        moments = [rank.state.moments(name) for name, p in rank.state.params.items() if p.numel()]
        rank.close()
    return {
        "dtypes": sorted({str(m[key].dtype) for m in moments for key in ("exp_avg", "exp_avg_sq")}),
        "steps": rank.state.updates,
        "held": rank.state.optimizer.held_bytes(),
        "numel": sum(p.numel() for p in rank.state.params.values()),
    }


def _digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def gradients(args):
    """Return the bits of the gradients of two steps, and what the hooks were given and packed."""
    seen = {"saved": 0, "packed": 0, "copies": 0, "parameters": 0}
    pack, host_bytes = offload._Pass.pack, offload.Device.host_bytes

    def counted(this, tensor):
        out = pack(this, tensor)
        packed = isinstance(out, offload._View)
        seen["saved"] += 1
        seen["packed"] += packed
        seen["parameters"] += packed and tensor.untyped_storage().data_ptr() in weights
        return out

    def copied(device, size):
        seen["copies"] += 1
        return host_bytes(device, size)

    with (
        small(offload, "THRESHOLD_BYTES", 64),
        small(offload._Pass, "pack", counted),
        small(offload.Device, "host_bytes", copied),
    ):
        rank = connect(args)
        weights = set()

        def note(module, _):
            weights.update(p.untyped_storage().data_ptr() for p in module.parameters())

        for unit in rank.engine.model.layers.values():
            unit.register_forward_pre_hook(lambda *_: weights.clear())  # freed, and their memory used again
            for module in unit.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_pre_hook(note)
        bits = []
        for step in range(2):
            grads = rank.engine.gradients(rank.batches(step)).grads
            bits.append({name: _digest(grad) for name, grad in grads.items()})
        rank.close()
    return {"bits": bits, **seen}
