"""Run one step of one rank's real program on tensors without values and process groups without peers, at the full size
of the world. Every collective is recorded and compared with what the planner expects of this engine
(`plan.cost.traffic`), and so are the bytes of the state. A difference is an error of the planner."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.core.compat import check
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.model.family import Batch, Init, load_family
from phalanx.model.moe import MoE
from phalanx.parallel.device import Device
from phalanx.parallel.expert import Exchange
from phalanx.parallel.groups import Groups, form_cross
from phalanx.plan.cost.traffic import Footprint, Key, Volume, expect
from phalanx.plan.cost.units import names
from phalanx.train.engine import Engine
from phalanx.train.state import State

_aten, _c10d, _functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
# The collective that is called, and which arguments are the group and the buffer whose bytes count.
CALLS: dict[Any, tuple[str, int, int]] = {
    _c10d.allreduce_.default: ("all-reduce", 1, 0),
    _c10d._allgather_base_.default: ("all-gather", 2, 0),
    _c10d._reduce_scatter_base_.default: ("reduce-scatter", 2, 1),
    _c10d.alltoall_base_.default: ("all-to-all", 2, 1),
    _c10d.send.default: ("send", 1, 0),
    _c10d.recv_.default: ("receive", 1, 0),
    _functional.all_reduce.default: ("all-reduce", 2, 0),
    _functional.all_gather_into_tensor.default: ("all-gather", 2, 0),
    _functional.reduce_scatter_tensor.default: ("reduce-scatter", 3, 0),
}
STATE = {
    "weights": "weight_bytes",
    "gradients": "gradient_bytes",
    "gradients kept": "kept_bytes",
    "moments": "moment_bytes",
}


@dataclass(frozen=True, slots=True)
class Report:
    job: Job  # as it ran: perhaps with fewer micro-batches
    rank: int
    seen: Footprint
    expected: Footprint
    seconds: float

    @property
    def differences(self) -> list[str]:
        """List where plan and program differ."""
        out = []
        for key in sorted(self.seen.traffic.keys() | self.expected.traffic.keys()):
            program, plan = (side.traffic.get(key, Volume()) for side in (self.seen, self.expected))
            if program != plan:
                out.append(
                    f"{key.kind} over {key.axis} ({key.ranks:,} ranks): the program makes {program.count:,} calls of "
                    f"{program.size_bytes:,} bytes in all, the plan has {plan.count:,} of {plan.size_bytes:,}"
                )
        for name, attribute in STATE.items():
            program_bytes, plan_bytes = getattr(self.seen, attribute), getattr(self.expected, attribute)
            if program_bytes != plan_bytes:
                out.append(f"{name}: the program holds {program_bytes:,} bytes, the plan has {plan_bytes:,}")
        return out

    def text(self) -> str:
        coord, layout = self.job.layout.coord(self.rank), self.job.layout
        at = ", ".join(f"{axis} {getattr(coord, axis)}" for axis in layout.AXES if getattr(layout, axis) > 1)
        lines = [
            f"dry run of rank {self.rank:,} of {layout.world_size:,}" + (f" ({at})" if at else ""),
            f"one step, micro-batches: {self.job.micro_per_rank}, in {self.seconds:.1f} s; even routing, "
            "an accelerator's collectives",
            "",
            f"  {'collective':<15}{'over':<14}{'ranks':>9}{'calls':>9}{'bytes':>12}",
        ]
        for key, volume in sorted(self.seen.traffic.items(), key=lambda item: -item[1].size_bytes):
            size = _readable(volume.size_bytes)
            lines.append(f"  {key.kind:<15}{key.axis:<14}{key.ranks:>9,}{volume.count:>9,}{size:>12}")
        held = ", ".join(f"{name} {_readable(getattr(self.seen, at))}" for name, at in STATE.items())
        lines += ["", f"  held: {held}", ""]
        if found := self.differences:
            return "\n".join([*lines, f"the plan differs in {len(found)}:", *(f"  {d}" for d in found)])
        return "\n".join([*lines, "the plan expects the same, call by call and byte by byte"])


def _readable(size_bytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes} B"


def dry_run(job: Job, rank: int = 0, most_micro: int = 0) -> Report:
    """Run `rank` dry. `most_micro` limits the micro-batches (0: all of them): every one is like the next, and takes
    seconds. The process must have no process group."""
    if not 0 <= rank < job.layout.world_size:
        raise UserError(
            f"the layout has ranks 0 to {job.layout.world_size - 1}",
            field="rank",
            value=rank,
            remedy="name one of them",
        )
    check(job)
    job = _runnable(job, most_micro)
    coord = job.layout.coord(rank)
    expected = expect(job, coord)
    assert not dist.is_initialized(), "a dry run needs torch.distributed for itself"
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about itself
        try:
            seen = _run(job, coord)
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(f"the program of rank {rank} fails with {type(error).__name__}: {error}") from error
    return Report(job, rank, seen, expected, time.perf_counter() - start)


def _runnable(job: Job, most_micro: int) -> Job:
    """Leave out what changes no collective and no byte of the state, but compiles, copies or writes files."""
    micro = job.micro_per_rank
    if 0 < most_micro < micro:
        whole_rounds = most_micro // job.layout.pp * job.layout.pp  # interleaved schedules need them
        micro = whole_rounds or most_micro
    batch = micro * job.train.micro_batch * job.layout.data_ranks
    train = replace(job.train, compile="none", offload_activations=False, global_batch=batch)
    offload = "cpu" if job.optimizer.offload == "nvme" else job.optimizer.offload
    return replace(job, train=train, optimizer=replace(job.optimizer, offload=offload))


def _run(job: Job, coord: Coord) -> Footprint:
    seen, values = Footprint(), _Values(job)
    family = replace(load_family(job.model.family), init=_no_init)
    device = _Nowhere(torch.device("cpu"), "fake", seen=seen)
    groups = Groups.form(FakeStore(), 0, job.layout, coord, device, bool(family.experts), job.collectives)
    called = {tuple(ranks): name for ranks, name in names(job.layout, coord, bool(family.experts)).items()}
    engine = None
    try:
        recorder = _Recorder(seen, called, values)
        for group_name, peers in groups.tiers.items():
            for way in peers._ways.values():
                for group in way._groups:
                    group.axis = recorder.name_of(dist.distributed_c10d._resolve_process_group(group_name))
        fake = FakeTensorMode()  # not while meshes are cut, which reads values of tensors
        with fake:
            state = State.create(job, family, coord, device)
        engine = Engine(job, family, coord, groups, state, device)
        engine.rejoin(form_cross(FakeStore(), 0, job.layout, coord, device, job.collectives))
        if engine.reducer.link:
            engine.reducer.link._thread = _AtOnce()
        for moe in [m for model in engine.stages.values() for m in model.modules() if isinstance(m, MoE)]:
            if isinstance(moe.exchange, Exchange):
                moe.exchange = values.answering(moe.exchange)
        with fake, recorder:
            result = engine.gradients([_batch(job) for _ in job.micro_indices(coord)])
            seen.gradient_bytes = _size_bytes(list(result.grads.values()))
            seen.kept_bytes = engine.reducer.kept_bytes
            engine.update(result)
        seen.weight_bytes = _size_bytes([*state.params.values(), *state.remainders.values()])
        seen.moment_bytes = sum(state.optimizer.held_bytes().values())
    finally:
        if engine is not None:
            engine.close()
        groups.close()
    return seen


def _no_init(name: str, config: Any) -> Init:
    return Init(std=0.0)  # nothing is drawn then


def _batch(job: Job) -> Batch:
    shape = (job.train.micro_batch, job.train.seq_len)
    ids = torch.zeros(shape, dtype=torch.int64)
    return Batch(ids, ids, torch.ones(shape))  # documents change no collective


def _size_bytes(what: Tensor | list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in ([what] if isinstance(what, Tensor) else what))


class _Values:
    """Values for tensors that have none: no norm is infinite, and tokens are routed evenly."""

    def __init__(self, job: Job):
        train, layout = job.train, job.layout
        self._routed = train.micro_batch * train.seq_len // (layout.cp * layout.tp) * job.model.top_k
        self.rows = self._routed  # at the experts here
        self._next: list[int] = []

    def answering(self, exchange: Exchange) -> Callable[..., Any]:
        """Wrap the exchange, which asks first how many rows go to each rank, then how many come from each."""
        ends = [self._routed * end // sum(exchange.sizes) for end in accumulate(exchange.sizes)]
        out = [end - start for start, end in pairwise([0, *ends])]
        into = [out[exchange.group.rank()]] * len(out)
        self.rows = sum(into)

        def run(rows_ND: Tensor, counts_E: Tensor) -> Any:
            self._next = [*out, *into]
            return exchange(rows_ND, counts_E)

        return run

    def of(self, asked: Tensor) -> int | float | bool:
        if asked.dtype == torch.bool:
            return False
        if asked.is_floating_point():
            return 1.0
        if self._next:
            return self._next.pop(0)
        return self.rows if asked.storage_offset() == 0 else 0  # one of the experts' counts: all rows to the first


class _Recorder(TorchDispatchMode):
    def __init__(self, seen: Footprint, names: dict[tuple[int, ...], str], values: _Values):
        super().__init__()
        self.seen, self.names, self.values = seen, names, values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            return self.values.of(args[0])
        if func is _aten.repeat_interleave.Tensor:
            return args[0].new_empty(self.values.rows)
        if func.namespace in ("c10d", "_c10d_functional") and func is not _functional.wait_tensor.default:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any) -> None:
        """Record a call. One that is not in CALLS goes under its own name, which the plan cannot have."""
        kind, group_at, buffer_at = CALLS.get(func, (str(func), -1, 0))
        group = args[group_at]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        elif group_at >= 0:
            group = dist.ProcessGroup.unbox(group)
        else:
            group = dist.group.WORLD
        size = _size_bytes(args[buffer_at])
        if func is _functional.all_gather_into_tensor.default:  # its argument is the part
            size *= group.size()
        self.seen.add(Key(kind, self.name_of(group), group.size()), 1, size)

    def name_of(self, group: Any) -> str:
        ranks = tuple(dist.get_process_group_ranks(group))
        return self.names.get(ranks, f"ranks {ranks[0]} to {ranks[-1]}")


class _Standalone:
    """A group that torch's registry does not know. It is also its own work, since there is nobody to wait for."""

    def __init__(self, seen: Footprint, rank: int, size: int):
        self._seen, self._rank, self._size, self.axis = seen, rank, size, "replica"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def wait(self) -> None: ...

    def allreduce(self, tensors: list[Tensor]) -> _Standalone:
        return self._note("all-reduce", tensors)

    def _allgather_base(self, whole: Tensor, part: Tensor) -> _Standalone:
        return self._note("all-gather", whole)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, options: Any) -> _Standalone:
        return self._note("reduce-scatter", whole)

    def alltoall_base(self, got: Tensor, given: Tensor, into: list[int], out: list[int]) -> _Standalone:
        return self._note("all-to-all", given)

    def _note(self, kind: str, buffer: Tensor | list[Tensor]) -> _Standalone:
        self._seen.add(Key(kind, self.axis, self._size), 1, _size_bytes(buffer))
        return self


@dataclass(frozen=True)
class _Nowhere(Device):
    """A device with a CPU's tensors, since there may be no accelerator, and an accelerator's collectives."""

    seen: Footprint = field(default_factory=Footprint)

    def host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @property
    def of_groups(self) -> None:
        """None, because nothing is connected."""

    def standalone_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return _Standalone(self.seen, rank, size)


class _AtOnce(ThreadPoolExecutor):
    """Replaces the thread that sends buckets: tensors without values share a mode, which threads must not."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done
