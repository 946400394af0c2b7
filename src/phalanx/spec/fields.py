"""The fields of the job file: type, range and one sentence of help for each. Defaults are those of the core
dataclasses, so that a job made in code and a job read from a file start from the same values."""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationInfo
from pydantic_core import PydanticCustomError

from phalanx.core.image import SYNTHETIC_IMAGES
from phalanx.core.job import (
    SCHEMES,
    CheckpointConfig,
    CollectivesConfig,
    DataConfig,
    Job,
    OptimizerConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)
from phalanx.core.layout import Layout
from phalanx.core.shape import FAMILIES, ModelConfig
from phalanx.spec.presets import PRESETS

JOB, MODEL, LAYOUT, TRAIN = Job(), ModelConfig(), Layout(), TrainConfig()
COLLECTIVES, CHECKPOINT, VALIDATION = CollectivesConfig(), CheckpointConfig(), ValidationConfig()
OPTIMIZER, DATA, RUN, RECOVERY = OptimizerConfig(), DataConfig(), RunConfig(), RecoveryConfig()


def did_you_mean(word: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=2)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _refuse(message: str, remedy: str) -> PydanticCustomError:
    # The message is context, not the template: pydantic would read braces in a user's path as placeholders.
    return PydanticCustomError("refused", "{message}", {"message": message, "remedy": remedy})


def _preset(name: str | None) -> str | None:
    if name is not None and name not in PRESETS:
        raise _refuse("there is no such preset", f"{did_you_mean(name, PRESETS)}The presets are {', '.join(PRESETS)}")
    return name


def _check_networks(networks: list[str]) -> list[str]:
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            near = "10.1.0.0/16"
            with contextlib.suppress(ValueError):
                near = str(ipaddress.ip_network(network, strict=False))  # it may be an address with host bits
            raise _refuse(f"{network!r} is no network: {error}", f'write it as "{near}"') from None
    return networks


def _absolute(path: str, info: ValidationInfo) -> str:
    """Make a path absolute. The loader's context gives, per field, the folder that a relative path starts from."""
    folder = (info.context or {}).get(info.field_name, Path())
    return os.path.abspath(folder / os.path.expanduser(path))


def _family(reference: str, info: ValidationInfo) -> str:
    if reference in FAMILIES:
        return reference
    usage = f'write one of {", ".join(FAMILIES)}, or "path/to/file.py:NAME" for a family of your own'
    file, _, name = reference.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        what = "the reference names no NAME in the file" if ".py" in reference else "there is no such family"
        raise _refuse(what, did_you_mean(reference, FAMILIES) + usage)
    path = _absolute(file, info)
    if not os.path.isfile(path):
        raise _refuse(f"there is no file {path}", f"correct the path, or {usage}")
    return f"{path}:{name}"


def _source(source: str, info: ValidationInfo) -> str:
    known = (DATA.source, SYNTHETIC_IMAGES)
    if source in known or urlsplit(source).scheme in SCHEMES:
        return source
    usage = f'write "{DATA.source}", "{SYNTHETIC_IMAGES}", the path of text, or the folder or URL of a data set'
    if not source:
        raise _refuse("it is empty", usage)
    path = _absolute(source, info)
    if not os.path.exists(path):
        raise _refuse(f"there is no file or folder {path}", did_you_mean(source, known) + usage)
    return path


def _sources(sources: list[str], info: ValidationInfo) -> list[str]:
    return [_source(source, info) for source in sources]


def _device(device: str) -> str:
    if not (device.isascii() and device.isalpha() and device.islower()):
        kind = device.partition(":")[0].lower()
        raise _refuse(
            "it is a kind of device, without a number: each rank takes one of its own",
            f'write "{kind if kind.isalpha() else "cuda"}", "cpu" or "auto"; to use some of them only, set '
            "CUDA_VISIBLE_DEVICES",
        )
    return device


def _place(place: str, info: ValidationInfo) -> str:
    return place if urlsplit(place).scheme in SCHEMES else _folder(place, info)


def _folder(path: str, info: ValidationInfo) -> str:
    return path and _absolute(path, info)


def option(default: object, text: str, **bounds: Any) -> Any:
    return Field(default, description=text, **bounds)


class Section(BaseModel):
    # Strict: "8" is not 8 and true is not 1. A typo in a job for a thousand GPUs must not be guessed at.
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ModelSection(Section):
    """Which model: a preset shape, sizes of your own, or a family of your own."""

    preset: Annotated[str | None, AfterValidator(_preset)] = option(
        None,
        "Start from a named shape; fields given beside it override it.",
        json_schema_extra={"enum": list(PRESETS)},
    )
    family: Annotated[str, AfterValidator(_family)] = option(
        MODEL.family, "A built-in one: dense, moe or image; or `path/to/file.py:NAME` for a family of your own."
    )
    vocab_size: int = option(
        MODEL.vocab_size, "Number of token ids; 257 is every byte and an end-of-document mark.", ge=2
    )
    dim: int = option(MODEL.dim, "Width of the residual stream.", ge=1)
    num_layers: int = option(MODEL.num_layers, "Number of transformer blocks.", ge=1)
    num_heads: int = option(MODEL.num_heads, "Query heads per block; each is dim / num_heads wide.", ge=1)
    num_kv_heads: int = option(
        MODEL.num_kv_heads, "Key/value heads per block; fewer than num_heads is grouped-query attention.", ge=1
    )
    ffn_dim: int = option(MODEL.ffn_dim, "Inner width of the gated feed-forward; 8/3 dim is usual.", ge=1)
    head_width: int = option(MODEL.head_width, "Width of one head; 0 means dim / num_heads.", ge=0)
    tied: bool = option(MODEL.tied, "Whether the output projection shares the embedding's weights.")
    rope_theta: float = option(MODEL.rope_theta, "Base of the rotary position embedding.", gt=0)
    norm_eps: float = option(MODEL.norm_eps, "Epsilon of the RMS norms.", gt=0)
    context: int = option(
        MODEL.context, "Tokens of the longest sequence that the model is made for; 0 means it is not known.", ge=0
    )
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = option(
        MODEL.rope_scaling, "How rotary positions are stretched for a context longer than the original one."
    )
    rope_factor: float = option(MODEL.rope_factor, "By how much they are stretched.", ge=1)
    rope_original: int = option(MODEL.rope_original, "Tokens of the original context (llama3, yarn).", ge=0)
    rope_low: float = option(
        MODEL.rope_low,
        "llama3: frequencies that turn less often than this in that context are stretched.",
        gt=0,
    )
    rope_high: float = option(MODEL.rope_high, "llama3: those that turn more often than this stay.", gt=0)
    rope_slow: float = option(MODEL.rope_slow, "yarn: as rope_low.", gt=0)
    rope_fast: float = option(MODEL.rope_fast, "yarn: as rope_high.", gt=0)
    rope_gain: float = option(
        MODEL.rope_gain, "yarn: factor on queries and keys; 0 means 0.1 ln(rope_factor) + 1.", ge=0
    )
    rope_fraction: float = option(MODEL.rope_fraction, "Part of a head that is rotated.", gt=0, le=1)
    rope_local_theta: float = option(
        MODEL.rope_local_theta,
        "Base of the rotary positions in layers with a window, which are not scaled then; 0 means as in the others.",
        ge=0,
    )
    qk_norm: Literal["none", "head", "all"] = option(
        MODEL.qk_norm, "RMS norm of queries and keys: of each head by itself (Qwen 3), or of all together (OLMo 2)."
    )
    attention_bias: Literal["none", "qkv", "all"] = option(
        MODEL.attention_bias, "Biases in attention: on queries, keys and values (Qwen 2), or on the output too."
    )
    attention_scale: float = option(
        MODEL.attention_scale, "Factor on the scores; 0 means 1 / sqrt of the head's width.", ge=0
    )
    attention_softcap: float = option(MODEL.attention_softcap, "Scores s become c tanh(s / c); 0 leaves them.", ge=0)
    window: int = option(
        MODEL.window, "Keys that a query sees, its own the last (sliding window); 0 means all before it.", ge=0
    )
    window_from: int = option(MODEL.window_from, "The first layer with a window, counted from 0.", ge=0)
    full_every: int = option(
        MODEL.full_every, "Every n-th layer has no window: 2 alternates (Gemma 2); 0 gives all layers one.", ge=0
    )
    norm_place: Literal["pre", "post", "both"] = option(
        MODEL.norm_place, "Norm of what goes into attention and FFN, of what comes out (OLMo 2), or both (Gemma 2)."
    )
    norm_centered: bool = option(MODEL.norm_centered, "Whether norms multiply by 1 + weight (Gemma).")
    activation: Literal["silu", "gelu"] = option(MODEL.activation, "Of the FFN's gate; gelu is its tanh form.")
    ffn_bias: bool = option(MODEL.ffn_bias, "Whether the feed-forward layers have biases.")
    embedding_scale: float = option(MODEL.embedding_scale, "Factor on embeddings; Gemma's is sqrt(dim).", gt=0)
    logit_softcap: float = option(MODEL.logit_softcap, "Logits x become c tanh(x / c); 0 leaves them.", ge=0)
    z_loss: float = option(
        MODEL.z_loss, "Weight of logsumexp(logits)^2 beside the loss of a token; 0 leaves it out.", ge=0
    )
    num_experts: int = option(MODEL.num_experts, "Experts in a mixture-of-experts layer (moe family).", ge=2)
    top_k: int = option(MODEL.top_k, "Experts that each token goes to.", ge=1)
    expert_dim: int = option(MODEL.expert_dim, "Inner width of one expert; 0 means ffn_dim.", ge=0)
    shared_experts: int = option(MODEL.shared_experts, "Experts that every token goes to, besides top_k.", ge=0)
    dense_layers: int = option(MODEL.dense_layers, "Leading layers with a plain FFN instead of experts.", ge=0)
    scoring: Literal["softmax", "sigmoid"] = option(MODEL.scoring, "How the router's logits become scores.")
    route_scale: float = option(MODEL.route_scale, "Factor on the weights of the chosen experts.", gt=0)
    balance_loss: float = option(MODEL.balance_loss, "Weight of the load-balance loss; 0 leaves it out.", ge=0)
    balance_bias: float = option(
        MODEL.balance_bias, "Step by which an expert's selection bias follows its load; 0 leaves it out.", ge=0
    )
    options: dict[str, JsonValue] = option(
        MODEL.options, "A free table for a family of your own; for images their sizes."
    )


class LayoutSection(Section):
    """How the ranks are arranged: replica x pp x shard x cp x tp of them. Without any degree, or with layout = "auto",
    the planner chooses."""

    ranks: int | None = option(None, "The expected number of ranks; checked against the product of the degrees.", ge=1)
    replica: int = option(LAYOUT.replica, "Whole copies of the model; they exchange gradients only.", ge=1)
    shard: int = option(LAYOUT.shard, "Ranks that split one copy's state between them and see different samples.", ge=1)
    tp: int = option(LAYOUT.tp, "Ranks that split every layer's matrices (tensor parallelism).", ge=1)
    zero: int = option(
        LAYOUT.zero,
        "What the shard ranks split: 1 the optimizer state, 2 gradients too, 3 parameters too.",
        ge=1,
        le=3,
    )
    ranks_per_node: int = option(
        LAYOUT.ranks_per_node, "Ranks on one host, for [collectives]; 0 means all on one.", ge=0
    )
    pp: int = option(LAYOUT.pp, "Pipeline ranks: each holds a run of layers (pipeline parallelism).", ge=1)
    schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv"] = option(
        LAYOUT.schedule, "Order of the micro-batches in the pipeline; the last two have (nearly) no bubble."
    )
    chunks: int = option(
        LAYOUT.chunks, "Pieces of the model on one pipeline rank; 0 takes what the schedule needs.", ge=0
    )
    cp: int = option(LAYOUT.cp, "Ranks that split every sequence between them (context parallelism).", ge=1)
    cp_style: Literal["ring", "ulysses"] = option(
        LAYOUT.cp_style, "How cp ranks attend: keys and values go round a ring, or heads are exchanged for positions."
    )
    ep: int = option(LAYOUT.ep, "Ranks that split the experts between them; they are taken from shard x cp x tp.", ge=1)


class TrainSection(Section):
    """The step: how many, how large, in which arithmetic."""

    steps: int = option(TRAIN.steps, "Number of optimizer updates.", ge=1)
    seq_len: int = option(TRAIN.seq_len, "Tokens per sequence.", ge=1)
    global_batch: int = option(TRAIN.global_batch, "Sequences per optimizer update, over all ranks.", ge=1)
    micro_batch: int = option(TRAIN.micro_batch, "Sequences per forward and backward pass of one rank.", ge=1)
    precision: Literal["fp8", "bf16", "fp32", "fp64"] = option(
        TRAIN.precision,
        "Arithmetic of the forward and backward pass; bf16 keeps fp32 master weights, fp8 is bf16 with the products of "
        "the blocks in 8 bits. A job that does not give it is in bf16 where this host has accelerators.",
    )
    reduction: Literal["fast", "exact"] = option(
        TRAIN.reduction,
        "How gradients are summed: exact gives the same bits for any replica x shard x pp split, fast for this layout.",
    )
    deterministic: bool = option(
        TRAIN.deterministic,
        "Whether an accelerator uses only kernels that give the same bits twice; always so with the exact reduction.",
    )
    recompute: Literal["none", "selective", "full"] = option(
        TRAIN.recompute, "Activations thrown away in the forward pass and computed again in the backward pass."
    )
    offload_activations: bool = option(
        TRAIN.offload_activations, "Whether what the backward pass needs waits for it in host memory."
    )
    prefetch: int = option(TRAIN.prefetch, "Layers whose parameters are gathered ahead of their use.", ge=0)
    bucket_mb: float = option(TRAIN.bucket_mb, "Megabytes in one gradient bucket of the cross-replica reduction.", gt=0)
    compress: Literal["none", "bf16", "int8"] = option(
        TRAIN.compress, "Format in which gradients cross between replicas; none sends them as they are."
    )
    document_mask: bool = option(TRAIN.document_mask, "Whether attention stops at document boundaries.")
    max_skips: int = option(
        TRAIN.max_skips,
        "Steps in a row that may be left out because their loss or gradient is not finite, or a spike; one more ends "
        "the run.",
        ge=0,
    )
    spike: float = option(
        TRAIN.spike,
        "A step is left out if its loss is so many standard deviations above the mean of the last 64; 6 is usual, 0 "
        "leaves none out.",
        ge=0,
    )
    compile: Literal["auto", "none", "inductor", "aot_eager"] = option(
        TRAIN.compile,
        "Compiler for each block: auto takes inductor on accelerators and none on CPUs; aot_eager only traces, to see "
        "whether a model can be compiled.",
    )


class OptimizerSection(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = option(OPTIMIZER.lr, "Peak learning rate.", gt=0)
    beta1: float = option(OPTIMIZER.beta1, "Decay of the first moment.", ge=0, lt=1)
    beta2: float = option(OPTIMIZER.beta2, "Decay of the second moment.", ge=0, lt=1)
    eps: float = option(OPTIMIZER.eps, "Added to the root of the second moment.", gt=0)
    weight_decay: float = option(OPTIMIZER.weight_decay, "Decoupled weight decay.", ge=0)
    clip: float = option(OPTIMIZER.clip, "Largest global gradient norm; 0 does not clip.", ge=0)
    schedule: Literal["cosine", "wsd"] = option(
        OPTIMIZER.schedule, "Shape after the warm-up: a cosine to the end, or stable and then a decay (wsd)."
    )
    warmup_steps: int = option(
        OPTIMIZER.warmup_steps, "Updates over which the rate rises to its peak; -1: a tenth of the run.", ge=-1
    )
    decay_steps: int = option(OPTIMIZER.decay_steps, "Length of the final decay; wsd only.", ge=0)
    min_lr_ratio: float = option(OPTIMIZER.min_lr_ratio, "Final learning rate as a share of the peak.", ge=0, le=1)
    state: Literal["full", "bf16"] = option(
        OPTIMIZER.state, "Format of the two moments between updates; full is that of the master weights."
    )
    offload: Literal["none", "cpu", "nvme"] = option(
        OPTIMIZER.offload, "Where the moments live: on the device (none), in host memory (cpu), in a file (nvme)."
    )
    offload_dir: Annotated[str, AfterValidator(_folder)] = option(
        OPTIMIZER.offload_dir,
        "Folder for that file, on a local disk; it has no name there. Empty: the folder for temporary files.",
    )


class CollectivesSection(Section):
    """How messages travel along an axis that spans several nodes (layout.ranks_per_node). How far parameters
    are gathered ahead is train.prefetch, and the size of a gradient bucket train.bucket_mb."""

    replica: Literal["auto", "flat", "hierarchical"] = option(
        COLLECTIVES.replica, "Sums across replicas: over all at once, or inside each node first; auto goes by size."
    )
    shard: Literal["auto", "flat", "hierarchical"] = option(
        COLLECTIVES.shard, "The same for gathering parameters and scattering gradients over the shard ranks."
    )
    crossover_kb: int = option(
        COLLECTIVES.crossover_kb,
        "Kilobytes from which auto goes inside each node first; -1 takes what was measured for the library.",
        ge=-1,
    )


def _stages(stages: list[StageSection]) -> list[StageSection]:
    starts = [stage.at for stage in stages]
    if starts and (starts[0] != 0 or starts != sorted(set(starts))):
        raise _refuse("stages begin at 0 and one after the other", "set `at` of the first to 0, and order the others")
    return stages


def _skips(skips: list[list[int]]) -> list[list[int]]:
    flat = [place for skip in skips for place in skip]
    if any(len(skip) != 2 for skip in skips) or flat != sorted(set(flat)) or flat[:1] < [0] * len(flat[:1]):
        raise _refuse("skips are ranges [from, to) of places, ascending and apart", "write them as [[1000, 2000]]")
    return skips


class StageSection(Section):
    """From which place of the run on the sources have which weights."""

    at: int = option(0, "The place in the order, in sequences, from which on it holds.", ge=0)
    weights: dict[str, Annotated[float, Field(ge=0)]] = option(
        {}, "How much of what is served is of each source; without them, by their sizes."
    )
    version: str = option("", "The version of the data set that the stage sees, where it has been appended to since.")


class DataSection(Section):
    """What the model reads."""

    source: Annotated[str, AfterValidator(_source)] = option(
        DATA.source,
        'The folder or URL of a data set; or text to make one of: "python-stdlib", a file, a folder of files; '
        'or "synthetic-images".',
    )
    version: str = option(DATA.version, "The version of the data set; empty means the newest.", pattern="^[0-9a-f]*$")
    max_mb: float = option(DATA.max_mb, "Megabytes of text that a data set is made of at most.", gt=0, le=1e6)
    stages: Annotated[list[StageSection], AfterValidator(_stages)] = option(
        [], "Weights of the sources, and from where on they hold: `[[data.stages]]`."
    )
    skips: Annotated[list[list[int]], AfterValidator(_skips)] = option(
        [], "Ranges [from, to) of places in the order that are left out."
    )
    groups: int = option(
        DATA.groups,
        "Parts of the order that are read apart; 0 means 8, for any number of nodes. It stays for the whole run.",
        ge=0,
        le=65536,
    )
    buffer_steps: int = option(
        DATA.buffer_steps, "Steps whose samples are ready before they are needed.", ge=2, le=1024
    )
    cache_dir: Annotated[str, AfterValidator(_folder)] = option(
        DATA.cache_dir, "Folder for chunks of remote data; empty means the user's cache folder."
    )
    cache_gb: float = option(DATA.cache_gb, "Gigabytes that it may hold; 0 means no cache.", ge=0)
    quarantine_limit: int = option(
        DATA.quarantine_limit, "Chunks that may turn out to be corrupt, and are replaced, before the run stops.", ge=0
    )


class ValidationSection(Section):
    """Loss on data that is not trained on, for the whole gang; it changes nothing that is trained. Without sources and
    without a held-out share there is none."""

    sources: Annotated[list[str], AfterValidator(_sources)] = option(
        VALIDATION.sources, "Data sets that are validated on, each named as data.source is."
    )
    held_out: float = option(
        VALIDATION.held_out,
        "Share of the training data, at the end of each source, that is validated on and not trained on. It stays for "
        "the whole run.",
        ge=0,
        lt=1,
    )
    every_steps: int = option(VALIDATION.every_steps, "Steps between validations; 0: at the end alone.", ge=0)
    sequences: int = option(
        VALIDATION.sequences, "Sequences of each set that are read, evenly spread over it; 0: all.", ge=0
    )
    keep_best: bool = option(
        VALIDATION.keep_best, "Whether each step that is validated is saved as well, and the best of them is kept."
    )


class CheckpointSection(Section):
    """How often the state is saved, and where. What is not given follows from what a checkpoint costs here."""

    dir: Annotated[str, AfterValidator(_place)] = option(
        CHECKPOINT.dir, "Folder or URL of a bucket that checkpoints go to; empty means `checkpoints` in the run record."
    )
    start: Annotated[str, AfterValidator(_place)] = option(
        CHECKPOINT.start,
        "Checkpoint, or folder or URL of them, that a run begins with if it continues nothing; empty: first weights.",
    )
    every_steps: int = option(
        CHECKPOINT.every_steps,
        "Steps between checkpoints; 0 derives them from cost and failure rate, -1 makes none. One follows the last "
        "step.",
        ge=-1,
    )
    memory_every_steps: int = option(
        CHECKPOINT.memory_every_steps, "Steps between snapshots that stay in the hosts' memory; 0 derives them.", ge=0
    )
    keep_last: int = option(CHECKPOINT.keep_last, "Newest checkpoints that are kept.", ge=1)
    keep_every: int = option(
        CHECKPOINT.keep_every, "Checkpoints at multiples of so many steps are kept as well; 0 keeps none.", ge=0
    )
    failures: float = option(
        CHECKPOINT.failures, "Failures per 1000 node-days that are expected before the run has seen any.", gt=0
    )


class RecoverySection(Section):
    """What happens when a worker or a node dies."""

    on: bool = option(
        RECOVERY.on, "Whether the run survives a loss. If not, the first one ends it, and `--resume auto` continues."
    )
    spares: int = option(RECOVERY.spares, "Nodes that stand by to take the place of one that fails.", ge=0, le=10_000)
    min_replicas: int = option(
        RECOVERY.min_replicas, "The fewest replicas that the run continues with; with fewer it waits.", ge=1
    )
    wait_s: float = option(
        RECOVERY.wait_s, "Seconds to wait for full strength before the run continues with fewer replicas.", ge=0
    )
    hold_s: float = option(
        RECOVERY.hold_s, "Seconds that a run which cannot continue waits for nodes before it ends.", ge=0, le=1e9
    )
    beat_s: float = option(
        RECOVERY.beat_s,
        "Seconds between heartbeats; a node is dead after three of them. 0 derives them from the number of nodes.",
        ge=0,
    )
    restart_s: float = option(
        RECOVERY.restart_s, "Seconds after which a node process of this machine that died is started again.", ge=0
    )
    grace_s: float = option(RECOVERY.grace_s, "Seconds after SIGTERM in which the state is saved and all leave.", ge=0)
    deaths_per_node: int = option(
        RECOVERY.deaths_per_node, "Deaths of workers within ten minutes until their node is given up.", ge=1
    )


class RunSection(Section):
    """Where and on what the job runs."""

    dir: Annotated[str, AfterValidator(os.path.expanduser)] = option(
        RUN.dir, "Folder that holds the records of runs; a relative one starts from the current folder.", min_length=1
    )
    device: Annotated[str, AfterValidator(_device)] = option(
        RUN.device,
        'A torch device type such as "cpu"; "auto" takes the accelerator if there is one.',
    )
    threads: int = option(
        RUN.threads,
        "CPU threads per rank; 0 divides the cores among the ranks, or is 1 with the exact reduction.",
        ge=0,
        le=1024,
    )
    hang_timeout_s: float = option(
        RUN.hang_timeout_s, "Seconds without a step until a run counts as hung; 0 derives it from the step time.", ge=0
    )
    time_limit_s: float = option(
        RUN.time_limit_s,
        "Seconds after which a run saves and stops, within recovery.grace_s, as after Ctrl-C; 0: it has no limit.",
        ge=0,
    )
    share_devices: bool = option(
        RUN.share_devices, "Whether ranks may share an accelerator where there are more of them: slow, over Gloo."
    )
    networks: Annotated[list[str], AfterValidator(_check_networks)] = option(
        RUN.networks,
        'Networks that ranks use among themselves, as ["10.1.0.0/16"], the preferred first: when a host loses one, the '
        "next that all have is used. Without any, ranks use the interface that reaches the controller.",
    )


class JobFile(Section):
    """A training job."""

    name: str = option(JOB.name, "Name of the job and of its run folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = option(JOB.seed, "Seed of the weights and of the order of the samples.", ge=0, lt=2**63)
    model: ModelSection = ModelSection()
    layout: LayoutSection = LayoutSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    collectives: CollectivesSection = CollectivesSection()
    data: DataSection = DataSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    recovery: RecoverySection = RecoverySection()
    run: RunSection = RunSection()


# Input fields that shape the job without being part of it.
INPUT_ONLY = {"model": {"preset"}, "layout": {"ranks"}}
