"""Activation offload, unit by unit. Tensors that autograd saves in a unit's forward are copied to host memory while the
next unit runs, and come back in backward while the unit after it runs. So at most two units' activations are on the
device. With `train.recompute = "full"` a unit saves only its input, which is copied.

    forward    unit 0 | unit 1 | unit 2 | ... | unit 2 | unit 1 | unit 0    backward
    to host           |   0    |   1    |     |        |        |
    from host                                 |   1    |   0    |

Copies run on two side streams. On a CPU they are plain copies, which save nothing but give the same values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from phalanx.model.family import Batch
from phalanx.parallel.device import Device

THRESHOLD_BYTES = 1 << 18  # below this, a copy takes more time than its memory is worth


def apply_offload(units: list[nn.Module], device: Device) -> None:
    offload = Offload(device)
    for index, unit in enumerate(units):
        unit.forward = partial(offload.run, index, unit, unit.forward)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Copy:
    """The copy of one storage. The autograd graph alone owns it, so it goes with the last operation that saved it."""

    host: Tensor
    here: Tensor | None = None  # on the device again


@dataclass(slots=True)
class _View:
    copy: _Copy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    def __init__(self, device: Device):
        self.device = device
        self.to_host, self.from_host = device.new_stream(), device.new_stream()
        self._latest: _Pass | None = None

    def run(self, index: int, unit: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._latest
        this = _Pass(self, index, before if before and before.index == index - 1 else None)
        this.leave = _addresses(_held_by_others(args, kwargs))
        this.weights = lambda: _addresses(unit.parameters()) | _addresses(unit.buffers())
        with saved_tensors_hooks(this.pack, this.unpack):
            out = forward(*args, **kwargs)
        this.end_forward()
        if before is not None:
            before.let_go()
        self._latest = this
        return out


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if not isinstance(t, DTensor)}


def _held_by_others(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield inputs that need no gradient, such as position tables and masks: every unit saves the same ones."""
    caches = [leaf.cache for leaf in args if isinstance(leaf, Batch)]
    for leaf in tree_leaves((args, kwargs, caches)):
        if isinstance(leaf, Tensor) and not leaf.requires_grad:
            yield leaf


class _Pass:
    """One forward of one unit, and its backward."""

    def __init__(self, offload: Offload, index: int, previous: _Pass | None):
        self.index, self.leave = index, set[int]()
        self.weights: Callable[[], set[int]] = set
        self._offload, self._device, self._previous = offload, offload.device, previous
        self._copies: dict[tuple[int, int], weakref.ref[_Copy]] = {}  # by storage and version
        self._sources: dict[tuple[int, int], Tensor] = {}  # until they are copied and this unit is no longer the latest
        self._at_host: torch.Event | None = None
        self._coming: torch.Event | None = None
        self._fetched = self._begun = False

    # -- forward ----------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Tensor | _View:
        device = self._device
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type != device.torch.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < THRESHOLD_BYTES or storage.data_ptr() in self.leave:
            return tensor
        key = (storage.data_ptr(), tensor._version)
        known = self._copies.get(key)
        copy = known() if known else None
        if copy is None and storage.data_ptr() in self.weights():
            # FSDP2 frees and gathers these itself. Checked now, because experts are gathered within the unit.
            return tensor
        if copy is None:  # whole storages, once: a saved view would keep all of one alive
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = _Copy(device.host_bytes(storage.nbytes()))
            device.wait(self._offload.to_host, device.mark())
            with device.on(self._offload.to_host):
                copy.host.copy_(source, non_blocking=True)
            self._copies[key], self._sources[key] = weakref.ref(copy), source
        return _View(copy, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def end_forward(self) -> None:
        with self._device.on(self._offload.to_host):
            self._at_host = self._device.mark()
        self.leave, self.weights = set(), set

    def let_go(self) -> None:
        """Free the tensors on the device; work launched from now on may reuse their memory."""
        self._device.wait(None, self._at_host)
        self._sources.clear()

    # -- backward ---------------------------------------------------------------------------------

    def unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if not self._begun:
            self._begin_backward()
        assert saved.copy.here is not None
        empty = torch.empty(0, dtype=saved.dtype, device=saved.copy.here.device)
        return empty.set_(saved.copy.here.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def _begin_backward(self) -> None:
        self._begun = True
        self._fetch()
        self._device.wait(None, self._coming)
        if self._previous is not None:
            self._previous._fetch()
            self._previous = None

    def _fetch(self) -> None:
        """Start copying this unit's tensors back to the device. Their memory belongs to the side stream, so that it can
        be freed at any time. That stream first waits until the current one is done with memory that is reused here."""
        if self._fetched:
            return
        self._fetched = True
        alive = [(key, copy) for key, ref in self._copies.items() if (copy := ref()) is not None]
        if self._sources:  # the latest unit's are still here
            for key, copy in alive:
                copy.here = self._sources[key]
            self.let_go()
            return
        stream = self._offload.from_host
        self._device.wait(stream, self._at_host)
        self._device.wait(stream, self._device.mark())
        with self._device.on(stream):
            for _, copy in alive:
                copy.here = copy.host.to(self._device.torch, non_blocking=True)
            self._coming = self._device.mark()
