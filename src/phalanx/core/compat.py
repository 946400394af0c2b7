"""Every combination that is refused, with the reason and the remedy, as data: the job checker runs
these rules, the documentation prints them, the tests trip each one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.core.job import Job


@dataclass(frozen=True, slots=True)
class Rule:
    """A refusal. `broken` returns the sentence to print, or None when the job is fine."""

    name: str
    field: str
    broken: Callable[[Job], str | None]
    remedy: str

    def value(self, job: Job) -> object:
        node: object = job
        for part in self.field.split("."):
            node = getattr(node, part)
        return node


def _divides(what: str, size: Callable[[Job], int], by: str, parts: Callable[[Job], int]):
    def broken(job: Job) -> str | None:
        if size(job) % parts(job) == 0:
            return None
        return f"{what} ({size(job)}) is not divisible by {by} ({parts(job)})"

    return broken


def _is_dense(job: Job) -> bool:
    return job.model.family == "dense"


def _when(condition: Callable[[Job], bool], sentence: str):
    return lambda job: sentence if condition(job) else None


RULES: tuple[Rule, ...] = (
    Rule(
        "heads-dim",
        "model.num_heads",
        _divides("model.dim", lambda j: j.model.dim, "model.num_heads", lambda j: j.model.num_heads),
        "choose model.dim as a multiple of model.num_heads",
    ),
    Rule(
        "rope-even",
        "model.dim",
        _when(lambda j: _is_dense(j) and j.model.head_dim % 2 == 1, "the head dimension is odd; RoPE rotates pairs"),
        "choose model.dim / model.num_heads even",
    ),
    Rule(
        "gqa",
        "model.num_kv_heads",
        _divides("model.num_heads", lambda j: j.model.num_heads, "model.num_kv_heads", lambda j: j.model.num_kv_heads),
        "choose model.num_kv_heads as a divisor of model.num_heads",
    ),
    Rule(
        "tp-heads",
        "layout.tp",
        _divides("model.num_heads", lambda j: j.model.num_heads, "layout.tp", lambda j: j.layout.tp),
        "choose layout.tp as a divisor of model.num_heads: attention is split by whole heads",
    ),
    Rule(
        "tp-kv-heads",
        "layout.tp",
        _divides("model.num_kv_heads", lambda j: j.model.num_kv_heads, "layout.tp", lambda j: j.layout.tp),
        "choose layout.tp as a divisor of model.num_kv_heads, or raise model.num_kv_heads: key/value heads are not replicated",
    ),
    Rule(
        "tp-sequence",
        "layout.tp",
        _divides("train.seq_len", lambda j: j.train.seq_len, "layout.tp", lambda j: j.layout.tp),
        "choose train.seq_len as a multiple of layout.tp: between blocks each TP rank holds a slice of the sequence",
    ),
    Rule(
        "micro-batch",
        "train.global_batch",
        _divides(
            "train.global_batch", lambda j: j.train.global_batch, "train.micro_batch", lambda j: j.train.micro_batch
        ),
        "choose train.global_batch as a multiple of train.micro_batch",
    ),
    Rule(
        "batch-ranks",
        "train.global_batch",
        _divides(
            "the number of micro-batches per step, train.global_batch / train.micro_batch",
            lambda j: j.num_micro,
            "layout.replica x layout.shard",
            lambda j: j.layout.data_ranks,
        ),
        "choose train.global_batch as a multiple of train.micro_batch x layout.replica x layout.shard",
    ),
    Rule(
        "exact-compress",
        "train.compress",
        _when(
            lambda j: j.train.reduction == "exact" and j.train.compress != "none",
            "compressed traffic rounds partial sums at a place that depends on the layout, so it cannot be exact",
        ),
        'set train.compress = "none", or train.reduction = "fast"',
    ),
    Rule(
        "compress-replica",
        "train.compress",
        _when(
            lambda j: j.train.compress != "none" and j.layout.replica == 1,
            "there is one replica, so no cross-replica traffic to compress",
        ),
        'set train.compress = "none", or layout.replica > 1',
    ),
    Rule(
        "compress-fp64",
        "train.compress",
        _when(
            lambda j: j.train.compress != "none" and j.train.precision == "fp64",
            "fp64 gradients compressed to 8 or 16 bits defeat the purpose of fp64",
        ),
        'set train.compress = "none", or train.precision = "fp32"',
    ),
    Rule(
        "nodes-even",
        "layout.ranks_per_node",
        _when(
            lambda j: j.layout.ranks_per_node > 0 and j.layout.world_size % j.layout.ranks_per_node != 0,
            "the ranks do not fill whole nodes",
        ),
        "choose layout.ranks_per_node as a divisor of the number of ranks, or 0 for one node",
    ),
    Rule(
        "schedule-fits",
        "optimizer.warmup_steps",
        _when(
            lambda j: j.optimizer.warmup_steps + j.optimizer.decay_steps > j.train.steps,
            "warm-up and decay together are longer than the run",
        ),
        "lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps",
    ),
    Rule(
        "wsd-decay",
        "optimizer.decay_steps",
        _when(
            lambda j: j.optimizer.schedule == "wsd" and j.optimizer.decay_steps == 0,
            "warmup-stable-decay needs a decay",
        ),
        "set optimizer.decay_steps (a tenth to a fifth of train.steps is usual)",
    ),
    Rule(
        "cosine-decay",
        "optimizer.decay_steps",
        _when(
            lambda j: j.optimizer.schedule == "cosine" and j.optimizer.decay_steps != 0,
            "the cosine schedule decays over the whole run; decay_steps would have no effect",
        ),
        'leave out optimizer.decay_steps, or set optimizer.schedule = "wsd"',
    ),
)


def check(job: Job) -> None:
    """Raise the first refusal that applies."""
    for rule in RULES:
        sentence = rule.broken(job)
        if sentence:
            raise UserError(sentence, field=rule.field, value=rule.value(job), remedy=rule.remedy)
