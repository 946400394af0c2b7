"""The engine: one rank's wrapped model, reducer and groups around a borrowed state. It is disposable: after a pass that
broke inside its own replica it is closed, and another is built around the same state. When another replica is lost, the
pass ends as usual; `rejoin` gives the engine new cross-replica groups, and a further pass computes what is missing."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint.torch_state import rng_state
from phalanx.core.deal import Deal, deal
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.model.attention import Attend
from phalanx.model.family import BUILTIN, Batch, Family
from phalanx.model.moe import MoE, next_bias
from phalanx.observe.progress import Phase
from phalanx.parallel.collectives import all_gather
from phalanx.parallel.context import cut_batch
from phalanx.parallel.cross import Cross
from phalanx.parallel.deferred import Halves, WeightGradients, halves
from phalanx.parallel.device import Device, Moment
from phalanx.parallel.groups import Groups
from phalanx.parallel.loss import Loss, loss_of_logits
from phalanx.parallel.norm import exact_norm, fast_norm
from phalanx.parallel.parallelize import parallelize, refuse_draws
from phalanx.parallel.pipeline import Pipe, Stages
from phalanx.parallel.reduce import Reducer
from phalanx.parallel.schema import describe
from phalanx.parallel.shard import COMPUTE_DTYPE, MASTER_DTYPE, end_forward, set_half, set_micro_batch
from phalanx.parallel.stages import Absent, end_modules
from phalanx.train.schedule import learning_rate
from phalanx.train.skips import remembered
from phalanx.train.state import State

P = ParamSpec("P")
T = TypeVar("T")


def _no_mark(phase: Phase, *, step: int = 0, micro: int = 0) -> None: ...


class Pass(NamedTuple):
    """One forward or backward of a micro-batch through a stage of this rank."""

    phase: Phase
    begin: Moment
    end: Moment


@dataclass(slots=True)
class StepResult:
    """A step's result, in tensors, so that nothing here waits for the device."""

    indices: list[int]  # the micro-batches of this rank
    loss_sums: Tensor  # one for each of them, in the last stage of a pipeline
    local_tokens: int  # target tokens in them
    tokens: Tensor  # target tokens in the whole global batch
    grad_norm: Tensor
    lr: float
    passed: Moment  # forward and backward are done; what is not reduced yet was not hidden behind them
    passes: list[Pass] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    clip: Tensor | None = None  # factor by which the update multiplies them
    loads: dict[str, Tensor] = field(default_factory=dict)  # of the experts, by the name of their layer
    loss: float = math.nan  # per token of the whole batch, when it is known
    skip: str = ""  # why it must not be applied


class Engine:
    def __init__(
        self,
        job: Job,
        family: Family,
        coord: Coord,
        groups: Groups,
        state: State,
        device: Device,
        mark: Callable[..., None] = _no_mark,
    ):
        self.job, self.family, self.coord, self.groups = job, family, coord, groups
        self.state, self.device, self.mark = state, device, mark
        self.span: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()  # names work in a trace
        device.choose_kernels(job.deterministic)
        self._deferred = WeightGradients()
        self.stages = parallelize(job, family, coord, groups, self._deferred, device)
        self._halves: dict[int, Halves] = {}
        self._unknown: set[int] = (
            set() if job.model.family in BUILTIN else set(self.stages)
        )  # stages that may draw numbers
        self._bind()
        self.reducer = Reducer(job, coord, groups, device)
        for model in self.stages.values():
            inner = [*family.modules(model, family.units), *family.modules(model, family.experts)]
            there = (m for m in inner if not isinstance(m, Absent))
            self.reducer.attach([model, *end_modules(family, model), *there])
        whole = [i.name for i in state.infos if i.tp_dim is None and not i.experts] if job.layout.tp > 1 else []
        self._summed_over_tp = whole
        uncounted = set(whole) if coord.tp else set()
        self._counted = [i.name for i in state.infos if i.name not in uncounted]
        self.num_params = sum(i.numel for i in describe(family, job.model))
        self._even = torch.tensor(1.0 / job.tokens_per_step, dtype=torch.float64, device=device.torch)
        self._forget_step()

    def _bind(self) -> None:
        """Make the model's parameters the very tensors of the state: slices where FSDP2 gathers them, whole
        otherwise."""
        tied: dict[int, torch.nn.Parameter] = {}
        for model in self.stages.values():
            bound = {}
            for name, param in model.named_parameters(remove_duplicate=False):
                if id(param) not in tied:
                    local = self.state.params[name].detach()
                    if isinstance(param, DTensor):
                        mesh, shape, stride = param.device_mesh, param.shape, param.stride()
                        local = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
                    tied[id(param)] = torch.nn.Parameter(local)
                bound[name] = tied[id(param)]
            buffers = {name: self.state.buffers[name] for name, _ in model.named_buffers()}
            model.load_state_dict({**bound, **buffers}, assign=True)
        self._mixtures = {
            name: module
            for model in self.stages.values()
            for name, module in model.named_modules()
            if isinstance(module, MoE)
        }
        modules = [m for model in self.stages.values() for m in model.modules()]
        self._attends = {m.kind: m for m in modules if isinstance(m, Attend)}
        self._named = {name: p for model in self.stages.values() for name, p in model.named_parameters()}
        for name, param in self._named.items():
            if isinstance(param, DTensor):  # FSDP2 copies uneven slices into padded ones of its own
                self.state.params[name].data = param.to_local()

    @property
    def model(self) -> torch.nn.Module:
        """Return this rank's first stage: without a pipeline, the model."""
        return next(iter(self.stages.values()))

    # -- one step ---------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Run a step: forward, backward, reduce, clip, update."""
        result = self.gradients(batches)
        self.mark(Phase.optimizer)
        self.update(result)
        return result

    def gradients(self, batches: Sequence[Batch], dealt: Deal | None = None) -> StepResult:
        """Run a step up to the reduced gradients, in `result.grads`. Weights and optimizer are untouched until
        `update`, so a step that fails here never happened. `dealt`: None at full strength."""
        dealt = dealt or deal(self.job, range(self.job.layout.replica))
        if not dealt.redo:
            self.drop()
        known = all(dealt.held.values())  # nobody holds a part of a step without its count
        self.compute(batches, dealt, self._tokens if known else self.count(batches))
        return self.finish()

    def count(self, batches: Sequence[Batch]) -> Tensor:
        """Count the target tokens of the global batch. This rank's are in `batches`, and in what it holds of the
        step."""
        return self.reducer.sum_counts(self.device.put(torch.tensor([self._local_tokens + _tokens(batches)])))

    def compute(self, batches: Sequence[Batch], dealt: Deal, tokens: Tensor) -> None:
        """Run forward and backward over this rank's part of the deal: `batches[j]` is its j-th micro-batch
        (`Job.micro_indices`). Gradients are added to those that this replica holds of the step. Without a redo they are
        summed over the replicas meanwhile; if that fails, the pass still ends, and `finish` raises StepFailed."""
        if not dealt.redo:
            self._forget_step()
        self.reducer.start(dealt)
        indices = self.reducer.indices
        assert len(batches) == len(indices), (len(batches), indices)
        self._indices += indices
        self._local_tokens += _tokens(batches)
        self._tokens, scale = tokens, 1.0 / tokens.to(torch.float64)
        self._documents = [_several(batch.documents_BL) for batch in batches]
        self._batches = [
            self._prepare(batch, documents, scale) for batch, documents in zip(batches, self._documents, strict=True)
        ]
        self._first = 0
        for count in self.job.layout.passes(len(batches)):
            forward, backward = self._timed(Phase.forward, self._forward), self._timed(Phase.backward, self._backward)
            Stages(self.job.layout, self.coord.pp, self._pipe(), forward, backward).run(count)
            self._first += count
        self._batches.clear()
        self._passed = self.device.moment()
        if batches:
            self.reducer.end_pass()

    def finish(self) -> StepResult:
        """Sum over the replicas. If that fails, all ranks of the replica raise StepFailed, and what they have computed
        is intact: `rejoin`, and compute what is missing."""
        self.mark(Phase.reduce, step=self.state.step)
        with self.span("reduce"):
            self.reducer.finish()
            loads = self._sum_loads()
            self.reducer.agree()
        grads = self._take_gradients()
        norm, clip = self._norm(grads)
        lr = learning_rate(self.job.optimizer, self.state.step, self.job.train.steps)
        loss_sums = torch.stack(self._loss_sums) if self._loss_sums else torch.zeros(0)
        counts = (self._local_tokens, self._tokens)
        passed = (self._passed, self._passes)
        return StepResult(list(self._indices), loss_sums, *counts, norm, lr, *passed, grads, clip, loads)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return the summed loss of each micro-batch; only the last stage of a pipeline has any. Nothing that belongs
        to a step is touched. All ranks of the replica must pass the same number of batches."""
        one = torch.ones((), dtype=torch.float64, device=self.device.torch)
        documents = [_several(batch.documents_BL) for batch in batches]
        ready = [self._prepare(batch, several, one) for batch, several in zip(batches, documents, strict=True)]
        sums: list[Tensor] = []

        def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
            self.mark(Phase.forward, step=self.state.step, micro=micro)
            for attend in self._attends.values():
                attend.prepare(ready[micro], documents[micro], self.device.put)
            out = self.stages[stage](ready[micro]) if x is None else self.stages[stage](ready[micro], x)
            if stage < self.job.layout.num_stages - 1:
                return out
            _, total = self._loss(out, ready[micro])
            sums.append(total)
            return total

        for model in self.stages.values():
            model.eval()
        try:
            passes = Stages(self.job.layout, self.coord.pp, self._pipe(), forward, _no_backward)
            passes.run(len(batches), backward=False)
        finally:
            for model in self.stages.values():
                model.train()
                end_forward(model)
        return torch.stack(sums).to(torch.float64) if sums else torch.zeros(0, dtype=torch.float64)

    def rejoin(self, cross: Cross | None) -> None:
        """Continue with these replicas. What was computed of the step stays."""
        self.reducer.rejoin(cross)

    @property
    def held(self) -> tuple[int, ...]:
        """Return the micro-batches of this step that this replica need not compute again."""
        return self.reducer.held

    def drop(self) -> None:
        """Forget what was computed of the step."""
        self.reducer.drop()
        self._forget_step()

    def _forget_step(self) -> None:
        self._indices: list[int] = []
        self._loss_sums: list[Tensor] = []
        self._passes: list[Pass] = []
        self._local_tokens = 0
        for module in self._mixtures.values():
            module.load_E = None

    def _sum_loads(self) -> dict[str, Tensor]:
        """Sum over all ranks how many tokens every expert got in the step: integers, so the order of the sum does not
        matter. The layers keep their own until the step is over."""
        if not self._mixtures:
            return {}
        own = [module.load_E for module in self._mixtures.values()]
        none = torch.zeros(self.job.model.num_experts, dtype=torch.int64, device=self.device.torch)
        total = self.reducer.sum_loads(torch.stack([none if load is None else load for load in own]))
        return dict(zip(self._mixtures, total, strict=True))

    def _prepare(self, batch: Batch, documents_BL: Tensor | None, scale: Tensor) -> Batch:
        """Return the part of a batch that this rank's stages read, on the device."""
        batch = replace(batch, documents_BL=documents_BL)
        batch = cut_batch(batch, self.job.layout, self.job.train.seq_len, self.coord.cp)
        first, last = 0 in self.stages, self.job.layout.num_stages - 1 in self.stages
        if not (first and last):
            tokens, targets, weights = batch.tokens_BL, batch.targets_BL, batch.weights_BL
            targets, weights = (targets, weights) if last else (targets[:0], weights[:0])
            batch = Batch(tokens if first else tokens[:0], targets, weights, batch.documents_BL, batch.positions_L)
        batch = batch.map(self.device.put)
        batch.scale, batch.even = scale, self._even
        return batch

    def _pipe(self) -> Pipe:
        layout, train = self.job.layout, self.job.train
        shape = (train.micro_batch, train.seq_len // (layout.cp * layout.tp), self.family.width(self.job.model))
        return Pipe(layout, self.groups.axis("pp"), self.device, shape, COMPUTE_DTYPE[train.precision])

    def _timed(self, phase: Phase, run: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = self.device.moment()
            with self.span(phase.name):
                out = run(*args, **kwargs)
            self._passes.append(Pass(phase, begin, self.device.moment()))
            return out

        return timed

    def _forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        micro += self._first
        batch = self._batches[micro]
        self.device.seed(self._seed(stage, self.reducer.indices[micro]))
        self.mark(Phase.forward, step=self.state.step, micro=micro)
        for attend in self._attends.values():
            attend.prepare(batch, self._documents[micro], self.device.put)
        before = rng_state(self.device) if stage in self._unknown else b""
        out = self.stages[stage](batch) if x is None else self.stages[stage](batch, x)
        if stage in self._unknown:
            self._unknown.remove(stage)
            if rng_state(self.device) != before:
                refuse_draws("the model draws random numbers, as F.dropout does", self.job.layout)
        if stage < self.job.layout.num_stages - 1:
            return out
        scaled, total = self._loss(out, batch)
        self._loss_sums.append(total.detach())
        return scaled

    def _seed(self, stage: int, index: int) -> int:
        """Return the seed for a forward. It depends on the micro-batch and not on what this rank has computed before,
        so another replica can draw the same numbers again."""
        place = (self.job.seed, self.state.step, index, stage, self.coord.cp, self.coord.tp)
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest()) >> 1

    def _backward(self, stage: int, micro: int, run: Callable[[], None], half: str) -> None:
        zero, model = self.job.layout.zero, self.stages[stage]
        micro += self._first
        self.mark(Phase.backward, step=self.state.step, micro=micro)
        self.reducer.begin(micro)
        last = self.reducer.last
        if half == "both":
            set_micro_batch(model, zero, self.reducer.exact, last)
            run()
            self._forget(stage, micro)
        else:
            if stage not in self._halves:
                self._halves[stage] = halves(model, self._deferred, self.reducer)
            set_half(model, zero, half, last)
            if half == "inputs":
                self._halves[stage].inputs(micro, run)
                self._forget(stage, micro)
                return
            self._halves[stage].weights(micro, reduce=zero > 1 or self.reducer.exact or last)
        if not last:
            self.reducer.clear(model)

    def _forget(self, stage: int, micro: int) -> None:
        """Forget what layers share of a micro-batch after the last backward here, that of the rank's first stage."""
        if stage == min(self.stages):
            self._batches[micro].cache.clear()

    def update(self, result: StepResult) -> None:
        apply(self.job, self.state, result)
        if result.skip:
            self.reducer.skip()
        else:
            self.reducer.commit()
        self._forget_step()

    def _loss(self, output: Tensor | Loss, batch: Batch) -> Loss:
        """Return the loss of this micro-batch's target tokens: scaled for the step, and summed."""
        if not isinstance(output, Tensor):
            return output
        if self.family.loss is None:
            return loss_of_logits(output, batch, self.groups.tp, self.job.model)
        total = self.family.loss(output, batch, self.groups.tp)
        assert batch.scale is not None
        return total * batch.scale.to(total.dtype), total

    def _take_gradients(self) -> dict[str, Tensor]:
        taken, grads = self.reducer.take(), {}
        for name, param in self._named.items():
            if param not in taken:
                raise UserError(
                    f"parameter {name} got no gradient",
                    field="model.family",
                    value=self.job.model.family,
                    remedy="use every parameter in the loss, or leave it out of the model",
                )
            grads[name] = taken[param]
        if self._summed_over_tp:
            self._sum_over_tp(grads)
        return grads

    def _sum_over_tp(self, grads: dict[str, Tensor]) -> None:
        """Sum the gradients of parameters that every tp rank holds whole. They are small and rare, so they are gathered
        and added in rank order, which gives the same bits for any sharding."""
        mine = [grads[name] for name in self._summed_over_tp]
        flat = torch.cat([g.reshape(-1).to(MASTER_DTYPE[self.job.train.precision]) for g in mine])
        first, *others = all_gather(flat, 0, self.groups.tp).view(self.job.layout.tp, -1)
        total = first.clone()
        for row in others:
            total.add_(row)
        parts = total.split([g.numel() for g in mine])
        grads |= {name: part.view_as(g) for name, g, part in zip(self._summed_over_tp, mine, parts, strict=True)}

    def _norm(self, grads: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the norm of the gradients, and the factor that clips them."""
        counted = [grads[name] for name in self._counted]
        if self.reducer.exact:
            norm = exact_norm(counted, None, counted[0], self.num_params)
        else:
            norm = fast_norm(counted, None, counted[0])
        limit = self.job.optimizer.clip
        return norm, (limit / (norm + 1e-6)).clamp_max(1.0) if limit > 0 else None

    def close(self) -> None:
        """Release the model and every reference to a group."""
        self.reducer.close()
        del self.stages, self._named, self._halves, self.reducer, self.groups
        gc.collect()


def _no_backward(stage: int, micro: int, run: Callable[[], None], half: str) -> None: ...


def _tokens(batches: Sequence[Batch]) -> int:
    return sum(int(b.weights_BL.sum()) for b in batches)  # on the host, where they come from


def _several(documents_BL: Tensor | None) -> Tensor | None:
    """Return the documents if any row has more than one; otherwise there is nothing to keep apart."""
    if documents_BL is None or bool((documents_BL == documents_BL[:, :1]).all()):
        return None
    return documents_BL


def apply(job: Job, state: State, result: StepResult) -> None:
    """Update the state, for which no group is needed. A step that is to be skipped changes no weight and no moment, and
    is not counted as an update. Where the host has not looked, the device still applies no norm that is not finite."""
    state.recent = remembered(job.train, state.recent, result.loss, bool(result.skip))
    state.step += 1
    if result.skip:
        result.grads.clear()
        return
    good = torch.isfinite(result.grad_norm)
    grads = {state.params[name]: grad for name, grad in result.grads.items()}
    state.optimizer.update(grads, result.lr, result.clip, good)
    for name, load in result.loads.items():
        bias = state.buffers.get(f"{name}.bias")
        if bias is None:
            continue
        bias.copy_(torch.where(good, next_bias(bias, load, job.model.balance_bias), bias))
    result.grads.clear()  # the caller keeps the rest; this must not live that long
    state.updates += 1
