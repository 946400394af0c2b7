"""Hugging Face folders (config.json and safetensors) in and out. What comes in computes here what it computes there,
or it is refused: Llama and Mistral are the dense family, Mixtral the moe family. No row is permuted, since both sides
rotate the pairs (e, e + E/2); experts, which they keep one by one, are rows one after the other here. Of a training run
only the weights go out; dropout, router noise and loss terms of theirs change training only, and are not taken over."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from phalanx.checkpoint import safetensors
from phalanx.checkpoint.catalog import OnProgress, ignore
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.safetensors import File, Slot
from phalanx.checkpoint.torch_foreign import (
    Image,
    bytes_of,
    config_of,
    dtype_name,
    entry_of,
    new_folder,
    params_of,
    read_rows,
)
from phalanx.core.checkpoint import Manifest
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Store

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers: our family, and what its config means where it is silent."""

    family: str
    model_type: str
    kv_heads: int | None  # None: as many as heads
    norm_eps: float
    rope_theta: float
    has_window: bool = False
    window: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("dense", "llama", None, 1e-6, 1e4),
    "MistralForCausalLM": Architecture("dense", "mistral", 8, 1e-6, 1e4, has_window=True, window=4096),
    "MixtralForCausalLM": Architecture("moe", "mixtral", 8, 1e-5, 1e6, has_window=True),
}
OTHERS = {  # what is asked for most, and why not
    "DeepseekV3ForCausalLM": "its attention is latent (MLA), that of the moe family is not",
    "DeepseekV2ForCausalLM": "its attention is latent (MLA), that of the moe family is not",
    "Qwen2ForCausalLM": "its attention has biases, that of the dense family has none",
    "Qwen3ForCausalLM": "it normalizes queries and keys, the dense family does not",
    "Qwen3MoeForCausalLM": "it normalizes queries and keys, the moe family does not",
}
NO_FAMILY = "write a family for it (docs/custom-models.md)"

TOP = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
    "moe.gate": "block_sparse_moe.gate",
}
HEAD, EMBEDDING = TOP["head.weight"], TOP["embed.weight"]


class Piece(NamedTuple):
    """One of their tensors: rows of one of ours."""

    theirs: str
    ours: str
    first: int
    last: int
    shape: tuple[int, ...]


def pieces_of(config: ModelConfig) -> list[Piece]:
    pieces = []
    for held in params_of(config):
        names = _their_names(held.name, held.experts)
        rows = held.shape[0] // len(names)
        for i, theirs in enumerate(names):
            pieces.append(Piece(theirs, held.name, i * rows, (i + 1) * rows, (rows, *held.shape[1:])))
    return pieces


def _their_names(name: str, experts: int) -> list[str]:
    if name in TOP:
        return [TOP[name]]
    _, layer, inner = name.split(".", 2)
    if experts:
        which = inner.rpartition(".")[2]
        return [f"model.layers.{layer}.block_sparse_moe.experts.{e}.{which}.weight" for e in range(experts)]
    return [f"model.layers.{layer}.{LAYER[inner.removesuffix('.weight')]}.weight"]


# -- in


def read(folder: Path, out: Store, progress: OnProgress = ignore) -> Manifest:
    """Make a committed checkpoint of it: weights only, in their own precision, for an optimizer that starts anew."""
    config = config_in(folder)
    with contextlib.ExitStack() as stack:
        theirs = _open_all(folder, stack)
        pieces = pieces_of(config)
        _check(folder, theirs, pieces, config)
        ours = {v: k for k, v in safetensors.NAMES.items()}
        dtypes = {p.ours: ours[theirs[p.theirs][1].dtype] for p in pieces}
        entries = [entry_of("weights", held, dtypes[held.name]) for held in params_of(config)]
        image, done = Image(entries, Job(model=config).to_dict()), 0
        for piece in pieces:
            file, slot = theirs[piece.theirs]
            file.read_into(slot.start, bytes_of(image.tensor(f"weights/{piece.ours}")[piece.first : piece.last]))
            done += slot.stop - slot.start
            progress(done, image.size_bytes)
    return image.commit(out)


def config_in(folder: Path) -> ModelConfig:
    """The model that config.json describes. UserError where ours would compute something else."""
    fields = _Fields(folder / CONFIG)
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    arch = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if arch is None:
        why = OTHERS.get(str(name), "no built-in family computes what it computes")
        fields.refuse("architectures", f"{why}; known are {', '.join(ARCHITECTURES)}", NO_FAMILY)
    if fields.get("auto_map"):
        fields.refuse("auto_map", "it brings code of its own, which is never run", NO_FAMILY)
    if fields.get("quantization_config"):
        fields.refuse("quantization_config", "its weights are quantized", "convert the weights in full precision")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "the feed-forward layers here compute silu", NO_FAMILY)
    for bias in ("attention_bias", "mlp_bias"):
        if fields.get(bias, False):
            fields.refuse(bias, "no layer here has a bias", NO_FAMILY)
    _check_window(fields, arch)
    heads, dim = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads if arch.kv_heads is None else arch.kv_heads, null=heads)
    head_dim = fields.count("head_dim", dim // heads, null=dim // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it does not divide the {heads} heads", "correct it")
    if head_dim % 2:
        fields.refuse("head_dim", "rotary positions need an even width", "correct it")
    moe: dict[str, Any] = {}
    if arch.family == "moe":
        moe = {"num_experts": fields.count("num_local_experts", 8), "top_k": fields.count("num_experts_per_tok", 2)}
        if moe["top_k"] > moe["num_experts"]:
            fields.refuse("num_experts_per_tok", f"there are {moe['num_experts']} experts", "correct it")
    return ModelConfig(
        family=arch.family,
        vocab_size=fields.count("vocab_size"),
        dim=dim,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=fields.count("intermediate_size"),
        head_width=0 if head_dim * heads == dim else head_dim,
        tied=bool(fields.get("tie_word_embeddings", False)),
        rope_theta=_rope_theta(fields, arch),
        norm_eps=fields.real("rms_norm_eps", arch.norm_eps),
        **moe,
    )


class _Fields:
    """config.json, and refusals that name its fields."""

    def __init__(self, path: Path):
        self.path = path
        table = _read_json(path, "name the folder that save_pretrained wrote")
        if not isinstance(table, dict):
            raise UserError("it is not a table", field="file", value=str(path), remedy="fetch it again")
        self.table = table

    def get(self, name: str, default: Any = None) -> Any:
        return self.table.get(name, default)

    def refuse(self, name: str, what: str, remedy: str) -> NoReturn:
        raise UserError(f"{what} ({self.path})", field=name, value=self.table.get(name), remedy=remedy)

    def count(self, name: str, default: int | None = None, null: int | None = None) -> int:
        """A positive number. `default` where the field is not there, `null` where it is null."""
        value = self.table.get(name, default)
        value = null if value is None else value
        if type(value) is not int or value < 1:
            self.refuse(name, "it must be a positive whole number", "correct it")
        return value

    def real(self, name: str, default: float, table: dict[str, Any] | None = None) -> float:
        value = (self.table if table is None else table).get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(name, f"it must be a positive number, not {value!r}", "correct it")
        return float(value)


def _check_window(fields: _Fields, arch: Architecture) -> None:
    if any(kind != "full_attention" for kind in fields.get("layer_types") or ()):
        fields.refuse("layer_types", "every layer here attends to all that came before", NO_FAMILY)
    if not arch.has_window:
        return
    window = fields.get("sliding_window", arch.window)
    longest = fields.count("max_position_embeddings", 131072)
    if window is not None and (type(window) is not int or window < longest):
        what = f"attention here has no window, so sequences of up to {longest} tokens would come out otherwise"
        remedy = (
            f"if yours will never be longer than {window} tokens, lower max_position_embeddings in config.json to "
            f"{window}; else take a model without a window"
        )
        fields.refuse("sliding_window", what, remedy)


def _rope_theta(fields: _Fields, arch: Architecture) -> float:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of those before."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind != "default":
        what = f"rotary positions here are not scaled; it has the kind {kind!r}"
        fields.refuse(name, what, "take a model without scaled positions, such as Llama 3 in place of Llama 3.1")
    for table in (rope, fields.table):
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            fields.refuse("partial_rotary_factor", "all of a head is rotated here", NO_FAMILY)
    return fields.real("rope_theta", fields.real("rope_theta", arch.rope_theta), rope)


def _open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[File, Slot]]:
    """Every tensor by name, from the files of the index, or from all there are."""
    index = folder / INDEX
    if index.exists():
        table = _read_json(index, "fetch it again")
        wanted = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(wanted, dict) or not all(_is_plain(name) for name in wanted.values()):
            what = "its weight_map does not say for each tensor in which file of this folder it is"
            raise UserError(what, field="file", value=str(index), remedy="fetch it again")
        names = sorted(set(wanted.values()))
    else:
        names = [SINGLE] if (folder / SINGLE).exists() else sorted(p.name for p in folder.glob("*.safetensors"))
        wanted = None
    if not names:
        remedy = "save it with save_pretrained(…, safe_serialization=True): files of pickles are never read"
        raise UserError("it has no *.safetensors", field="source", value=str(folder), remedy=remedy)
    found: dict[str, tuple[File, Slot]] = {}
    for name in names:
        try:
            file = stack.enter_context(File(folder / name))
        except FileNotFoundError:
            what = f"the file is missing, and {INDEX} names it"
            raise UserError(what, field="file", value=str(folder / name), remedy="fetch all files") from None
        for tensor, slot in file.tensors.items():
            if wanted is not None and wanted.get(tensor) != name:
                what = f"tensor {tensor!r} is in it, but {INDEX} has it in {wanted.get(tensor)}"
                raise UserError(what, field="file", value=str(file.path), remedy="fetch the index and its files again")
            if tensor in found:
                what = f"tensor {tensor!r} is in it, and in {found[tensor][0].path.name} as well"
                raise UserError(what, field="file", value=str(file.path), remedy="remove the file that is too much")
            found[tensor] = file, slot
    return found


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name


def _check(folder: Path, theirs: dict[str, tuple[File, Slot]], pieces: list[Piece], config: ModelConfig) -> None:
    """Nothing is missing, nothing is left over, and all has the shape and a precision that we expect."""

    def refuse(what: str, remedy: str) -> NoReturn:
        raise UserError(what, field="source", value=str(folder), remedy=remedy)

    dtypes: dict[str, str] = {}
    for piece in pieces:
        if piece.theirs not in theirs:
            remedy = "fetch all files; experts must be saved one by one, as save_pretrained does by default"
            refuse(f"tensor {piece.theirs!r} is missing", remedy)
        slot = theirs[piece.theirs][1]
        if slot.shape != piece.shape:
            what = f"tensor {piece.theirs!r} has the shape {slot.shape} instead of {piece.shape}"
            refuse(what, "correct config.json, or fetch the files that belong to it")
        if slot.dtype not in safetensors.NAMES.values():
            remedy = f"save it in one of {', '.join(safetensors.NAMES.values())}"
            refuse(f"tensor {piece.theirs!r} is in {slot.dtype}", remedy)
        if dtypes.setdefault(piece.ours, slot.dtype) != slot.dtype:
            refuse(f"the experts of {piece.ours!r} are not all in the same precision", "save them in one")
    left = set(theirs) - {piece.theirs for piece in pieces}
    if config.tied and HEAD in left:
        if not _equal(theirs[HEAD], theirs[EMBEDDING]):
            what = f"tie_word_embeddings is true, but {HEAD!r} differs from {EMBEDDING!r}"
            refuse(what, "set tie_word_embeddings to false in config.json")
        left.remove(HEAD)
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}  # follows from rope_theta
    if left:
        few = ", ".join(sorted(left)[:3])
        refuse(f"{len(left)} tensors have no place in the {config.family} family: {few}", NO_FAMILY)


def _equal(a: tuple[File, Slot], b: tuple[File, Slot], step: int = 1 << 24) -> bool:
    if a[1][:2] != b[1][:2]:
        return False
    size = a[1].stop - a[1].start
    for at in range(0, size, step):
        rooms = [bytearray(min(step, size - at)) for _ in range(2)]
        for (file, slot), room in zip((a, b), rooms, strict=True):
            file.read_into(slot.start + at, memoryview(room))
        if rooms[0] != rooms[1]:
            return False
    return True


def _read_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("there is no such file", field="file", value=str(path), remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not JSON: {error}", field="file", value=str(path), remedy="fetch it again") from None


# -- out


def write(
    reader: Reader, folder: Path, dtype: str = "", max_shard_bytes: float = 5e9, progress: OnProgress = ignore
) -> None:
    """A folder that AutoModelForCausalLM loads. `dtype` is bf16 or fp32; "": as the weights are stored."""
    if dtype and dtype not in DTYPES:
        raise UserError("unknown precision", field="dtype", value=dtype, remedy=f"use one of {', '.join(DTYPES)}")
    config = config_of(reader)
    architecture = _architecture(config)
    stored = {e.held.name: getattr(torch, e.dtype) for e in reader.manifest.entries}
    pieces = pieces_of(config)
    dtypes = {p.ours: DTYPES[dtype] if dtype else stored[f"weights/{p.ours}"] for p in pieces}
    shards = _shards(pieces, dtypes, max_shard_bytes)
    total = sum(_size(p, dtypes) for p in pieces)
    done = 0

    def data(shard: list[Piece]) -> Iterator[memoryview]:
        nonlocal done
        for p in shard:
            rows = read_rows(reader, f"weights/{p.ours}", p.first, p.last)
            yield bytes_of(rows.to(dtypes[p.ours]).contiguous())
            done += _size(p, dtypes)
            progress(done, total)

    with new_folder(folder) as near:
        weight_map = {}
        for i, shard in enumerate(shards):
            name = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            tensors = [(p.theirs, safetensors.NAMES[dtype_name(dtypes[p.ours])], p.shape) for p in shard]
            safetensors.write(near / name, tensors, data(shard))
            weight_map.update({p.theirs: name for p in shard})
        if len(shards) > 1:
            _write_json(near / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        widest = max(set(dtypes.values()), key=lambda d: d.itemsize)
        positions = reader.manifest.job.get("train", {}).get("seq_len", 2048)
        _write_json(near / CONFIG, config_out(config, architecture, dtype_name(widest), positions))


def _architecture(config: ModelConfig) -> str:
    """The class that computes the same; UserError where there is none."""

    def refuse(field: str, what: str) -> NoReturn:
        remedy = "convert it to dcp, which takes every model"
        raise UserError(what, field=f"model.{field}", value=getattr(config, field), remedy=remedy)

    if config.family not in ("dense", "moe"):
        refuse("family", "transformers has no class for it; it has for dense and moe")
    if config.family == "dense":
        if config.dim % config.num_heads:
            refuse("num_heads", f"LlamaForCausalLM wants a number that divides the width, {config.dim}")
        return "LlamaForCausalLM"
    plain = {"dense_layers": 0, "shared_experts": 0, "scoring": "softmax", "route_scale": 1.0, "balance_bias": 0.0}
    for field, value in plain.items():
        if getattr(config, field) != value:
            refuse(field, f"MixtralForCausalLM, the nearest that transformers has, computes it with {value!r}")
    return "MixtralForCausalLM"


def config_out(config: ModelConfig, architecture: str, dtype: str, positions: int) -> dict[str, Any]:
    """For transformers 4 and 5, which name the precision and the rotary base differently."""
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,  # the tokenizer knows, the model does not
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if architecture == "LlamaForCausalLM":
        return out | {"intermediate_size": config.ffn_dim, "attention_bias": False, "mlp_bias": False}
    experts = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.top_k}
    return out | {"intermediate_size": config.expert_width, "sliding_window": None, **experts}


def _size(piece: Piece, dtypes: dict[str, torch.dtype]) -> int:
    return math.prod(piece.shape) * dtypes[piece.ours].itemsize


def _shards(pieces: list[Piece], dtypes: dict[str, torch.dtype], limit: float) -> list[list[Piece]]:
    """In order, none beyond the limit but one that is a single tensor."""
    shards: list[list[Piece]] = [[]]
    room = limit
    for piece in pieces:
        size = _size(piece, dtypes)
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(piece)
        room -= size
    return shards


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
