"""Every combination that is refused, with the reason and the remedy, as data: the job checker runs
these rules, the documentation prints them, the tests trip each one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.errors import UserError, together
from phalanx.core.image import SYNTHETIC_IMAGES, ImageShape
from phalanx.core.job import STDLIB, Job
from phalanx.core.rotary import rotated_width
from phalanx.core.shape import FAMILIES, ModelConfig

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
    composition: bool = False  # two features that do not go together at any size

    def sentence(self, job: Job) -> str:
        what = re.sub(r"\b[a-z]+\.\w+\b(?! =)", lambda match: f"{match[0]} ({_value(job, match[0])})", self.what)
        return f"{what}; {self.why}"


def _value(job: Job, field: str) -> object:
    section, name = field.split(".")
    return getattr(getattr(job, section), name)


def _decoder(broken: Predicate) -> Predicate:
    """Apply a rule to the built-in decoders only: a family of the user's own checks its sizes itself."""
    return lambda job: job.model.family in ("dense", "moe") and broken(job)


def _blocks(broken: Predicate) -> Predicate:
    """Apply a rule to all built-in families."""
    return lambda job: job.model.family in FAMILIES and broken(job)


def _moe(broken: Predicate) -> Predicate:
    return lambda job: job.model.family == "moe" and broken(job)


def _patches(job: Job) -> int:
    """Return the patches in an image; 0: model.options do not say."""
    shape = ImageShape.of(job.model.options)
    return shape.num_patches if shape else 0


def _text_features(c: ModelConfig) -> bool:
    return bool(c.window or c.embedding_scale != 1 or c.rope_scaling != "none" or c.rope_fraction != 1)


def _chunks_fit(job: Job) -> bool:
    chunks = job.layout.num_chunks
    return {"gpipe": chunks == 1, "1f1b": chunks == 1, "zbv": chunks == 2}.get(job.layout.schedule, chunks >= 2)


def _pieces(job: Job) -> int:
    """Return how many pieces a sequence has, if all ranks are to hold the same number of positions."""
    cp, tp = job.layout.cp, job.layout.tp
    return math.lcm(cp * tp, 2 * cp) if job.layout.cp_style == "ring" else cp * tp


# bf16 has 8 significant bits, so half of the last digit is up to 1/256 of a value. A moment decays by 1 - beta of
# itself per step; where that is less, it stays where it is.
BF16_MAX_BETA = 1 - 2**-8

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
        _blocks(lambda j: bool(j.model.num_kv_heads % j.layout.tp and j.layout.tp % j.model.num_kv_heads)),
        "neither is model.num_kv_heads a multiple of layout.tp nor layout.tp one of model.num_kv_heads",
        "a TP rank has whole key/value heads, or shares one of them with others",
        "choose layout.tp as a divisor or a multiple of model.num_kv_heads",
    ),
    Rule(
        "tp-head-parts",
        "layout.tp",
        _blocks(lambda j: j.model.num_kv_heads * j.model.head_dim % j.layout.tp != 0),
        "layout.tp does not divide model.num_kv_heads times the head dimension",
        "ranks that share a key/value head hold equal parts of its projection",
        "lower layout.tp",
    ),
    Rule(
        "rope-fraction",
        "model.rope_fraction",
        _decoder(lambda j: rotated_width(j.model) % 2 == 1 or rotated_width(j.model) == 0),
        "model.rope_fraction of a head is not an even number of features",
        "rotary position embedding rotates pairs",
        "choose model.rope_fraction so that it is even",
    ),
    Rule(
        "rope-original",
        "model.rope_original",
        _decoder(lambda j: j.model.rope_scaling in ("llama3", "yarn") and not j.model.rope_original),
        "model.rope_original is not given with model.rope_scaling",
        "how often a frequency turns in the original context decides whether it is stretched",
        "set model.rope_original to the context length that the model was trained with before it was extended",
    ),
    Rule(
        "rope-unscaled",
        "model.rope_factor",
        _decoder(lambda j: j.model.rope_scaling == "none" and j.model.rope_factor != 1),
        'model.rope_factor with model.rope_scaling = "none"',
        "it would have no effect",
        "set model.rope_scaling to linear, llama3 or yarn, or leave model.rope_factor out",
    ),
    Rule(
        "rope-bounds",
        "model.rope_high",
        _decoder(lambda j: j.model.rope_high <= j.model.rope_low or j.model.rope_fast <= j.model.rope_slow),
        "model.rope_high is not above model.rope_low, or model.rope_fast not above model.rope_slow",
        "between them frequencies are blended",
        "swap them",
    ),
    Rule(
        "context",
        "train.seq_len",
        _decoder(lambda j: 0 < j.model.context < j.train.seq_len),
        "train.seq_len is more than model.context",
        "the model has never seen positions beyond it",
        "lower train.seq_len; or raise model.context, and with it model.rope_theta or model.rope_factor",
    ),
    Rule(
        "window-layers",
        "model.window",
        _decoder(
            lambda j: (
                j.model.window == 0
                and (j.model.window_from > 0 or j.model.full_every > 0 or j.model.rope_local_theta > 0)
            )
        ),
        "model.window = 0 with model.window_from, model.full_every or model.rope_local_theta",
        "they say which layers have a window, and which positions those have",
        "set model.window, or leave them out",
    ),
    Rule(
        "image-features",
        "model.family",
        lambda j: j.model.family == "image" and _text_features(j.model),
        'model.family = "image" with model.window, model.embedding_scale, or scaled or partial rotary positions',
        "patches see each other in both directions, and have learned positions and no embedding",
        "leave them out",
    ),
    Rule(
        "moe-ffn",
        "model.family",
        _moe(lambda j: j.model.ffn_bias or j.model.activation != "silu"),
        'model.family = "moe" with model.ffn_bias or another model.activation than silu',
        "experts are SwiGLU without biases",
        "leave them out",
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
        lambda j: j.model.family == "image" and j.data.source == STDLIB,
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
        "image, patch and channels of model.options must be whole numbers, and patch must divide image",
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
        "pp-chunks",
        "layout.chunks",
        lambda j: j.layout.pp > 1 and not _chunks_fit(j),
        "layout.chunks does not suit layout.schedule",
        "gpipe and 1f1b have one chunk on a rank, zbv two, the interleaved schedules two or more",
        "set layout.chunks = 0 for the number that the schedule needs",
    ),
    Rule(
        "pp-layers",
        "layout.pp",
        _decoder(lambda j: j.model.num_layers < j.layout.num_stages),
        "model.num_layers is less than the number of stages, layout.pp times the chunks of layout.schedule",
        "every stage of the pipeline holds at least one layer",
        "lower layout.pp or layout.chunks, or raise model.num_layers",
    ),
    Rule(
        "pp-rounds",
        "train.global_batch",
        lambda j: not j.layout.in_one_pass(j.micro_per_rank),
        "the micro-batches of a rank, train.global_batch / (train.micro_batch x layout.replica x layout.shard), "
        "do not divide into rounds of about layout.pp, as layout.schedule needs",
        "an interleaved schedule takes as many micro-batches through one chunk before it turns to the next",
        "choose train.global_batch so that a rank has a multiple of layout.pp micro-batches, or no more than layout.pp",
    ),
    Rule(
        "cp-sequence",
        "layout.cp",
        lambda j: j.layout.cp > 1 and j.train.seq_len % _pieces(j) != 0,
        "train.seq_len does not divide into equal pieces for layout.cp ranks (two each in a ring), "
        "each cut again by layout.tp",
        "every rank holds as many positions as any other",
        "choose train.seq_len as a multiple of 2 x layout.cp x layout.tp (Ulysses: of layout.cp x layout.tp)",
    ),
    Rule(
        "ulysses-heads",
        "layout.cp",
        lambda j: (
            j.layout.cp > 1 and j.layout.cp_style == "ulysses" and j.model.num_heads // j.layout.tp % j.layout.cp != 0
        ),
        'layout.cp_style = "ulysses" where layout.cp does not divide model.num_heads / layout.tp',
        "each cp rank attends with some of the heads",
        'choose layout.cp as a divisor of model.num_heads / layout.tp, or set layout.cp_style = "ring"',
    ),
    Rule(
        "ep-experts",
        "layout.ep",
        lambda j: j.layout.ep > 1 and (j.model.family in ("dense", "image") or j.layout.ep > j.model.num_experts),
        "layout.ep is above 1 and model.family has no experts, or fewer than that (model.num_experts, if it is moe)",
        "every ep rank holds at least one expert",
        "lower layout.ep, or take the moe family with more experts",
    ),
    Rule(
        "ep-ranks",
        "layout.ep",
        lambda j: j.layout.stage_size % j.layout.ep != 0,
        "layout.ep does not divide layout.shard x layout.cp x layout.tp",
        "the ep ranks are taken from these: each of them holds some experts and its own tokens",
        "choose layout.ep as a divisor of layout.shard x layout.cp x layout.tp",
    ),
    Rule(
        "exact-ep",
        "train.reduction",
        lambda j: j.train.reduction == "exact" and j.layout.ep > 1,
        'train.reduction = "exact" with layout.ep above 1',
        "an expert's gradient is one matrix product over the tokens of all ep ranks, so the micro-batches are "
        "already mixed when the sum over them could be put in order (torch's grouped_mm has no order over rows)",
        'set layout.ep = 1, or train.reduction = "fast"',
        composition=True,
    ),
    Rule(
        "tied-pp",
        "model.tied",
        lambda j: j.model.tied and j.layout.pp > 1,
        "model.tied = true with layout.pp above 1",
        "the shared matrix would be in the first and the last stage, and torch pipelining and FSDP2 know no "
        "parameter that lives in two modules on different ranks",
        "set model.tied = false, or layout.pp = 1",
        composition=True,
    ),
    Rule(
        "compile-split",
        "train.compile",
        lambda j: j.train.compile not in ("auto", "none") and j.layout.splits_backward,
        "train.compile names a compiler with a layout.schedule that splits the backward (interleaved-zb, zbv)",
        "a compiled block has one backward graph that computes all gradients at once; torch refuses it for its "
        "own zero-bubble schedules too (_check_torch_compile_compatibility, pytorch issue 161904)",
        'leave out train.compile, or set layout.schedule = "interleaved"',
        composition=True,
    ),
    Rule(
        "fp8-split",
        "train.precision",
        lambda j: j.train.precision == "fp8" and j.layout.splits_backward,
        'train.precision = "fp8" with a layout.schedule that splits the backward (interleaved-zb, zbv)',
        "there weight gradients are put off layer by layer, and computed in bf16",
        'set train.precision = "bf16", or layout.schedule = "interleaved"',
        composition=True,
    ),
    Rule(
        "exact-compress",
        "train.compress",
        lambda j: j.train.reduction == "exact" and j.train.compress != "none",
        'train.reduction = "exact" with compressed cross-replica traffic',
        "compression rounds partial sums at a place that depends on the layout",
        'set train.compress = "none", or train.reduction = "fast"',
        composition=True,
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
        "layout.replica x layout.pp x layout.shard x layout.cp x layout.tp ranks do not fill whole nodes "
        "of layout.ranks_per_node",
        "a job takes whole nodes, so that every node has the same number of ranks",
        "choose layout.ranks_per_node as a divisor of the number of ranks, or 0 for one node",
    ),
    Rule(
        "bf16-state",
        "optimizer.state",
        lambda j: j.optimizer.state == "bf16" and max(j.optimizer.beta1, j.optimizer.beta2) > BF16_MAX_BETA,
        'optimizer.state = "bf16" with optimizer.beta1 or optimizer.beta2 above 0.996, which is 1 - 1/256',
        "a moment then moves by less than half of bf16's last digit, which rounding takes back: "
        "it would not decay when the gradient does",
        'lower the beta (0.95 is usual for optimizer.beta2), or set optimizer.state = "full"',
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
    """Raise every refusal that applies, as one."""
    wrong = [
        UserError(rule.sentence(job), field=rule.field, value=_value(job, rule.field), remedy=rule.remedy)
        for rule in RULES
        if rule.broken(job)
    ]
    if wrong:
        raise together(wrong)
