"""Every combination that is refused, with the reason and the remedy, as data: the job checker runs
these rules, the documentation prints them, the tests trip each one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.core.image import SYNTHETIC_IMAGES, ImageShape
from phalanx.core.job import Job
from phalanx.core.shape import FAMILIES

Predicate = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A refusal: `what` holds when `broken`. Fields are named in full, so that a message can put a job's values in."""

    name: str
    field: str
    broken: Predicate
    what: str
    why: str
    remedy: str

    def sentence(self, job: Job) -> str:
        what = re.sub(r"\b[a-z]+\.\w+\b(?! =)", lambda match: f"{match[0]} ({_value(job, match[0])})", self.what)
        return f"{what}; {self.why}"


def _value(job: Job, field: str) -> object:
    section, name = field.split(".")
    return getattr(getattr(job, section), name)


def _decoder(broken: Predicate) -> Predicate:
    """Rules about heads are the built-in decoders'; a family of the user's own checks its sizes itself."""
    return lambda job: job.model.family in ("dense", "moe") and broken(job)


def _blocks(broken: Predicate) -> Predicate:
    """The same for all built-in families."""
    return lambda job: job.model.family in FAMILIES and broken(job)


def _moe(broken: Predicate) -> Predicate:
    return lambda job: job.model.family == "moe" and broken(job)


def _patches(job: Job) -> int:
    """In an image; 0: model.options do not say."""
    shape = ImageShape.of(job.model.options)
    return shape.num_patches if shape else 0


RULES: tuple[Rule, ...] = (
    Rule(
        "options-decoder",
        "model.options",
        _decoder(lambda j: bool(j.model.options)),
        "model.options are given for the dense or the moe family",
        "they would have no effect: its sizes are fields of [model]",
        "set the fields of [model], or name a family of your own in model.family",
    ),
    Rule(
        "heads-dim",
        "model.num_heads",
        _blocks(lambda j: not j.model.head_width and j.model.dim % j.model.num_heads != 0),
        "model.dim is not a multiple of model.num_heads",
        "every head has the same width",
        "choose model.dim as a multiple of model.num_heads, or set model.head_width",
    ),
    Rule(
        "rope-even",
        "model.dim",
        _decoder(lambda j: j.model.head_dim % 2 == 1),
        "the head dimension, model.dim / model.num_heads or else model.head_width, is odd",
        "rotary position embedding rotates pairs",
        "choose model.dim / model.num_heads, or model.head_width, even",
    ),
    Rule(
        "gqa",
        "model.num_kv_heads",
        _blocks(lambda j: j.model.num_heads % j.model.num_kv_heads != 0),
        "model.num_heads is not a multiple of model.num_kv_heads",
        "each key/value head serves the same number of query heads",
        "choose model.num_kv_heads as a divisor of model.num_heads",
    ),
    Rule(
        "tp-heads",
        "layout.tp",
        _blocks(lambda j: j.model.num_heads % j.layout.tp != 0),
        "model.num_heads is not a multiple of layout.tp",
        "attention is split by whole heads",
        "choose layout.tp as a divisor of model.num_heads",
    ),
    Rule(
        "tp-kv-heads",
        "layout.tp",
        _blocks(lambda j: j.model.num_kv_heads % j.layout.tp != 0),
        "model.num_kv_heads is not a multiple of layout.tp",
        "key/value heads are split over the TP ranks, not replicated",
        "choose layout.tp as a divisor of model.num_kv_heads, or raise model.num_kv_heads",
    ),
    Rule(
        "top-k",
        "model.top_k",
        _moe(lambda j: j.model.top_k > j.model.num_experts),
        "model.top_k is more than model.num_experts",
        "a token goes to different experts",
        "choose model.top_k up to model.num_experts",
    ),
    Rule(
        "dense-layers",
        "model.dense_layers",
        _moe(lambda j: j.model.dense_layers >= j.model.num_layers),
        "model.dense_layers leaves no layer of model.num_layers to the experts",
        "the moe family without experts is the dense family",
        'choose model.dense_layers below model.num_layers, or model.family = "dense"',
    ),
    Rule(
        "images-text",
        "data.source",
        lambda j: j.model.family == "image" and j.data.source != SYNTHETIC_IMAGES,
        'model.family = "image" with a source of text',
        "it reads patches of images, not tokens",
        f'set data.source = "{SYNTHETIC_IMAGES}", or model.family = "dense"',
    ),
    Rule(
        "text-images",
        "data.source",
        _decoder(lambda j: j.data.source == SYNTHETIC_IMAGES),
        "a source of images with model.family",
        "it reads tokens, not patches of images",
        'set model.family = "image", or data.source to a text',
    ),
    Rule(
        "image-options",
        "model.options",
        lambda j: j.data.source == SYNTHETIC_IMAGES and not _patches(j),
        "image, patch and channels of model.options are not whole numbers of which patch divides image",
        "they are the size of an image and of the squares it is cut into",
        "give all three, such as image = 32, patch = 8, channels = 1",
    ),
    Rule(
        "image-patches",
        "train.seq_len",
        lambda j: j.data.source == SYNTHETIC_IMAGES and j.train.seq_len != _patches(j),
        "train.seq_len is not the number of patches, (image / patch) squared of model.options",
        "a sequence is the patches of one image",
        "set train.seq_len to (image / patch) squared, or change model.options",
    ),
    Rule(
        "tp-sequence",
        "layout.tp",
        lambda j: j.train.seq_len % j.layout.tp != 0,
        "train.seq_len is not a multiple of layout.tp",
        "between blocks each TP rank holds an equal slice of the sequence",
        "choose train.seq_len as a multiple of layout.tp",
    ),
    Rule(
        "micro-batch",
        "train.global_batch",
        lambda j: j.train.global_batch % j.train.micro_batch != 0,
        "train.global_batch is not a multiple of train.micro_batch",
        "a step is a whole number of micro-batches",
        "choose train.global_batch as a multiple of train.micro_batch",
    ),
    Rule(
        "batch-ranks",
        "train.global_batch",
        lambda j: j.num_micro % j.layout.data_ranks != 0,
        "the micro-batches of a step, train.global_batch / train.micro_batch, "
        "do not divide evenly over layout.replica x layout.shard ranks",
        "every rank runs the same number of micro-batches",
        "choose train.global_batch as a multiple of train.micro_batch x layout.replica x layout.shard",
    ),
    Rule(
        "exact-compress",
        "train.compress",
        lambda j: j.train.reduction == "exact" and j.train.compress != "none",
        'train.reduction = "exact" with compressed cross-replica traffic',
        "compression rounds partial sums at a place that depends on the layout",
        'set train.compress = "none", or train.reduction = "fast"',
    ),
    Rule(
        "compress-replica",
        "train.compress",
        lambda j: j.train.compress != "none" and j.layout.replica == 1,
        "layout.replica = 1 with compressed cross-replica traffic",
        "one replica has no cross-replica traffic",
        'set train.compress = "none", or layout.replica > 1',
    ),
    Rule(
        "compress-fp64",
        "train.compress",
        lambda j: j.train.compress != "none" and j.train.precision == "fp64",
        'train.precision = "fp64" with compressed cross-replica traffic',
        "gradients rounded to 8 or 16 bits defeat the purpose of fp64",
        'set train.compress = "none", or train.precision = "fp32"',
    ),
    Rule(
        "nodes-even",
        "layout.ranks_per_node",
        lambda j: j.layout.ranks_per_node > 0 and j.layout.world_size % j.layout.ranks_per_node != 0,
        "layout.replica x layout.shard x layout.tp ranks do not fill whole nodes of layout.ranks_per_node",
        "a job takes whole nodes, so that every node has the same number of ranks",
        "choose layout.ranks_per_node as a divisor of the number of ranks, or 0 for one node",
    ),
    Rule(
        "schedule-fits",
        "optimizer.warmup_steps",
        lambda j: j.optimizer.warmup(j.train.steps) + j.optimizer.decay_steps > j.train.steps,
        "optimizer.warmup_steps and optimizer.decay_steps together are more than train.steps",
        "warm-up and decay must both fit in the run",
        "lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps",
    ),
    Rule(
        "wsd-decay",
        "optimizer.decay_steps",
        lambda j: j.optimizer.schedule == "wsd" and j.optimizer.decay_steps == 0,
        'optimizer.schedule = "wsd" with optimizer.decay_steps = 0',
        "warmup-stable-decay needs a decay",
        "set optimizer.decay_steps (a tenth to a fifth of train.steps is usual)",
    ),
    Rule(
        "cosine-decay",
        "optimizer.decay_steps",
        lambda j: j.optimizer.schedule == "cosine" and j.optimizer.decay_steps != 0,
        'optimizer.schedule = "cosine" with optimizer.decay_steps set',
        "the cosine schedule decays over the whole run, so decay_steps would have no effect",
        'leave out optimizer.decay_steps, or set optimizer.schedule = "wsd"',
    ),
)


def check(job: Job) -> None:
    """Raise the first refusal that applies."""
    for rule in RULES:
        if rule.broken(job):
            raise UserError(rule.sentence(job), field=rule.field, value=_value(job, rule.field), remedy=rule.remedy)
