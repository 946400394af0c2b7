"""Converts between config.json of Hugging Face's transformers and our [model]. An imported model computes the same here
as there, or it is refused; an exported one gets the class that computes the same. Dropout, router noise and the loss
terms of transformers change training only, and are not imported. Needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from phalanx.core.errors import UserError
from phalanx.core.shape import ModelConfig

CONFIG = "config.json"
NO_FAMILY = "write a family for it, with a table of its names (docs/custom-models.md)"
PLAIN = ModelConfig()
POSITIONS = (
    "rope_scaling", "rope_factor", "rope_original", "rope_low", "rope_high", "rope_slow", "rope_fast", "rope_gain",
)  # fmt: skip
FEATURES = (
    *POSITIONS, "rope_fraction", "rope_local_theta", "qk_norm", "attention_bias", "attention_scale",
    "attention_softcap", "window", "window_from", "full_every", "norm_place", "norm_centered", "activation",
    "ffn_bias", "embedding_scale", "logit_softcap", "scoring", "shared_experts", "dense_layers", "route_scale",
    "balance_bias",
)  # fmt: skip
WINDOWS = ("window", "window_from", "full_every")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers: our family, the features it always has and those it may have, and the defaults for
    fields that its config leaves out."""

    model_type: str
    kv_heads: int | None = None  # None: as many as heads
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    context: int = 32768
    window: int | None = None
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    tied: bool = False
    family: str = "dense"
    fixed: dict[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()

    def computes(self, config: ModelConfig) -> str:
        """Return the field of `config` that this class does not compute; empty if it computes all."""
        for name in FEATURES:
            value, wanted = getattr(config, name), self.fixed.get(name, getattr(PLAIN, name))
            if name == "embedding_scale" and wanted == "sqrt(dim)":
                wanted = config.dim**0.5
            near = isinstance(value, float) and isinstance(wanted, float) and math.isclose(value, wanted, rel_tol=1e-6)
            if name not in self.free and name not in POSITIONS and value != wanted and not near:
                return name
        if "attention_bias" in self.free and config.attention_bias == "qkv":
            return "attention_bias"
        return ""


GEMMA = {"norm_centered": True, "activation": "gelu", "embedding_scale": "sqrt(dim)"}
GEMMA_2 = ("window", "window_from", "full_every", "attention_scale", "logit_softcap", "attention_bias")
OLMO = {"qk_norm": "all", "norm_place": "post"}
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", context=2048, free=("attention_bias", "ffn_bias")),
    "MistralForCausalLM": Architecture("mistral", 8, context=131072, window=4096, free=("window",)),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", 32, window=4096, fixed={"attention_bias": "qkv"}, free=("window", "window_from", "full_every")
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", 32, window=4096, head_dim=128, fixed={"qk_norm": "head"}, free=(*WINDOWS, "attention_bias")
    ),
    "GemmaForCausalLM": Architecture(
        "gemma", 16, context=8192, head_dim=256, tied=True, fixed=GEMMA, free=("attention_bias",)
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", 4, context=8192, window=4096, head_dim=256, tied=True,
        fixed=GEMMA | {"norm_place": "both"}, free=(*GEMMA_2, "attention_softcap"),
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", 4, rope_theta=1e6, context=131072, window=4096, head_dim=256, tied=True,
        fixed=GEMMA | {"norm_place": "both", "qk_norm": "head"}, free=(*GEMMA_2, "rope_local_theta"),
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", norm_eps=1e-5, context=2048, fixed=OLMO, free=("attention_bias",)),
    "Olmo3ForCausalLM": Architecture(
        "olmo3", norm_eps=1e-5, rope_theta=5e5, context=2048, window=4096, fixed=OLMO,
        free=(*WINDOWS, "attention_bias", "rope_local_theta"),
    ),
    "Phi3ForCausalLM": Architecture("phi3", norm_eps=1e-5, context=4096, free=("window", "rope_fraction")),
    "MixtralForCausalLM": Architecture(
        "mixtral", 8, norm_eps=1e-5, rope_theta=1e6, context=131072, family="moe", free=("window",)
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", 4, window=4096, family="moe", fixed={"qk_norm": "head"}, free=("attention_bias",)
    ),
}  # fmt: skip
OTHERS = {  # what is asked for most, and why it is refused
    "DeepseekV3ForCausalLM": "its attention is latent (MLA), that of the moe family is not",
    "DeepseekV2ForCausalLM": "its attention is latent (MLA), that of the moe family is not",
    "Gemma3ForConditionalGeneration": "it has a part that sees images; save its language_model by itself",
    "Llama4ForConditionalGeneration": "it has a part that sees images, and its experts add to what they read",
    "GptOssForCausalLM": "its experts have biases and a clamped gate, and its attention has sinks",
    "GPT2LMHeadModel": "it has learned positions and no gate in its FFN",
    "CohereForCausalLM": "its attention and FFN run side by side, with LayerNorm",
    "Qwen3NextForCausalLM": "most of its layers are linear attention",
}


class Fields:
    """config.json, and refusals that name its fields."""

    def __init__(self, path: Path):
        self.path = path
        table = read_json(path, "name the folder that save_pretrained wrote")
        if not isinstance(table, dict):
            raise UserError("it is not a table", field="file", value=str(path), remedy="fetch it again")
        self.table = table

    def get(self, name: str, default: Any = None) -> Any:
        return self.table.get(name, default)

    def error(self, name: str, what: str, remedy: str) -> UserError:
        return UserError(f"{what} ({self.path})", field=name, value=self.table.get(name), remedy=remedy)

    def refuse(self, name: str, what: str, remedy: str) -> NoReturn:
        raise self.error(name, what, remedy)

    def count(self, name: str, default: int | None = None, null: int | None = None) -> int:
        """Read a positive number: `default` if the field is missing, `null` if it is null."""
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


def read_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("there is no such file", field="file", value=str(path), remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is not JSON: {error}", field="file", value=str(path), remedy="fetch it again") from None


# -- in


def config_in(folder: Path) -> tuple[str, ModelConfig]:
    """Return the class and the model that config.json describes. Raises UserError if ours would compute something
    else."""
    fields = Fields(folder / CONFIG)
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
    heads, dim = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads if arch.kv_heads is None else arch.kv_heads, null=heads)
    head_dim = fields.count("head_dim", arch.head_dim or dim // heads, null=dim // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"it does not divide the {heads} heads", "correct it")
    if head_dim % 2:
        fields.refuse("head_dim", "rotary positions need an even width", "correct it")
    fixed = {k: dim**0.5 if v == "sqrt(dim)" else v for k, v in arch.fixed.items()}
    config = ModelConfig(
        family=arch.family,
        vocab_size=fields.count("vocab_size"),
        dim=dim,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_dim=fields.count("intermediate_size"),
        head_width=0 if head_dim * heads == dim else head_dim,
        tied=bool(fields.get("tie_word_embeddings", arch.tied)),
        norm_eps=fields.real("rms_norm_eps", arch.norm_eps),
        context=fields.count("max_position_embeddings", arch.context),
        **fixed,
        **_biases(fields, arch),
        **_experts(fields, arch),
        **_bends(fields, arch, head_dim),
    )
    config = dataclasses.replace(config, **_windows(fields, arch, config.num_layers))
    config = dataclasses.replace(config, **_positions(fields, arch, config))
    assert name is not None and not arch.computes(config), (name, arch.computes(config))
    return name, config


def _biases(fields: Fields, arch: Architecture) -> dict[str, Any]:
    act = fields.get("hidden_activation") or fields.get("hidden_act")
    gelu = arch.fixed.get("activation") == "gelu"
    if act is not None and act not in (("gelu_pytorch_tanh",) if gelu else ("silu", "swish")):
        what = f"the feed-forward layers here compute {'gelu_pytorch_tanh' if gelu else 'silu'}"
        fields.refuse("hidden_activation" if fields.get("hidden_activation") else "hidden_act", what, NO_FAMILY)
    out: dict[str, Any] = {}
    if fields.get("attention_bias", False):
        if "attention_bias" not in arch.free:
            fields.refuse("attention_bias", f"the attention of a {arch.model_type} has none", "correct it")
        out["attention_bias"] = "all"
    if fields.get("mlp_bias", False):
        if "ffn_bias" not in arch.free:
            fields.refuse("mlp_bias", f"the FFN of a {arch.model_type} has none", "correct it")
        out["ffn_bias"] = True
    if fields.get("use_bidirectional_attention"):
        fields.refuse("use_bidirectional_attention", "a token here sees those before it", NO_FAMILY)
    return out


def _experts(fields: Fields, arch: Architecture) -> dict[str, Any]:
    if arch.family != "moe":
        return {}
    qwen = arch.model_type == "qwen3_moe"
    number = "num_local_experts" if "num_local_experts" in fields.table else "num_experts"
    out = {"num_experts": fields.count(number, 128 if qwen else 8)}
    out["top_k"] = fields.count("num_experts_per_tok", 8 if qwen else 2)
    if out["top_k"] > out["num_experts"]:
        fields.refuse("num_experts_per_tok", f"there are {out['num_experts']} experts", "correct it")
    if not qwen:
        return out
    if not fields.get("norm_topk_prob", False):
        fields.refuse("norm_topk_prob", "the weights of a token's experts sum to one here", NO_FAMILY)
    if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
        fields.refuse("mlp_only_layers", "all layers of the moe family but the first have experts", NO_FAMILY)
    return out | {"expert_dim": fields.count("moe_intermediate_size", 768)}


def _bends(fields: Fields, arch: Architecture, head_dim: int) -> dict[str, Any]:
    """Return Gemma's softcaps, and its attention scale if that is not the usual one."""
    out: dict[str, Any] = {}
    if arch.model_type not in ("gemma2", "gemma3_text"):
        return out
    old = arch.model_type == "gemma2"
    for theirs, ours, default in (
        ("attn_logit_softcapping", "attention_softcap", 50.0 if old else None),
        ("final_logit_softcapping", "logit_softcap", 30.0 if old else None),
    ):
        if fields.get(theirs, default) is not None:
            if ours not in arch.free:
                fields.refuse(theirs, "the class of transformers does not use it", "set it to null")
            out[ours] = fields.real(theirs, default or 1.0)
    width = fields.real("query_pre_attn_scalar", 256)
    return out if width == head_dim else out | {"attention_scale": width**-0.5}


def _windows(fields: Fields, arch: Architecture, layers: int) -> dict[str, Any]:
    """Find which layers have a window: from `layer_types`, or from what the class does without it."""
    window = fields.get("sliding_window", arch.window)
    qwen = arch.model_type in ("qwen2", "qwen3", "qwen3_moe")
    if qwen and not fields.get("use_sliding_window", False):
        window = None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.get("max_window_layers", 28) if qwen else 0
        every = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}.get(arch.model_type, 0)
        every = fields.count("sliding_window_pattern", every) if every else 0
        kinds = [
            "full_attention" if i < first or (every and (i + 1) % every == 0) else "sliding_attention"
            for i in range(layers)
        ]
        kinds = ["full_attention"] * layers if window is None or "window" not in arch.free else kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        fields.refuse("layer_types", f"it must say full_attention or sliding_attention of {layers} layers", NO_FAMILY)
    sliding = [kind == "sliding_attention" for kind in kinds]
    if not any(sliding):
        return {}
    if "window" not in arch.free:
        fields.refuse("layer_types", f"the class of a {arch.model_type} has no windows", "correct it")
    if type(window) is not int or window < 1:
        fields.refuse("sliding_window", "it must be a positive whole number", "correct it")
    for first, every in itertools.product(range(layers), range(layers + 1)):
        out: dict[str, Any] = {"window": window, "window_from": first, "full_every": every}
        config = dataclasses.replace(PLAIN, num_layers=layers, **out)
        if [config.window_of(i) > 0 for i in range(layers)] == sliding:
            return out
    raise fields.error("layer_types", "layers here have a window from one on, or all but every n-th", NO_FAMILY)


def _positions(fields: Fields, arch: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier versions. Models with
    windows have one table for each kind of layer."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name) or {}
    if not isinstance(rope, dict):
        fields.refuse(name, "it is not a table", "correct it")
    theta = fields.real("rope_theta", arch.rope_theta)
    local: dict[str, Any] = {}
    if "full_attention" in rope or "sliding_attention" in rope:
        rope, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            fields.refuse(name, "positions in layers with a window are not scaled here", NO_FAMILY)
    out = _scaled(fields, name, rope, config)
    out["rope_theta"] = fields.real("rope_theta", theta, rope)
    near = 0.0
    if arch.model_type == "gemma3_text":
        near = fields.real("rope_theta", fields.real("rope_local_base_freq", 1e4), local)
    elif arch.model_type == "olmo3":
        near = fields.real("rope_theta", out["rope_theta"], local)
    if config.window and near and (near != out["rope_theta"] or out.get("rope_scaling", "none") != "none"):
        out["rope_local_theta"] = near
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        if "rope_fraction" not in arch.free:
            fields.refuse("partial_rotary_factor", f"the class of a {arch.model_type} rotates all of a head", NO_FAMILY)
        out["rope_fraction"] = share
    return out


def _scaled(fields: Fields, name: str, rope: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in ("linear", "llama3", "yarn"):
        remedy = "take a model whose positions are scaled by linear, llama3 or yarn, or not at all"
        fields.refuse(name, f"positions here are not scaled by {kind!r}", remedy)
    out: dict[str, Any] = {"rope_scaling": kind}
    original = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if kind != "linear":
        if type(original) is not int or original < 1:
            fields.refuse(name, "original_max_position_embeddings must be a positive whole number", "correct it")
        out["rope_original"] = original
    if kind == "yarn" and rope.get("factor") is None:
        out["rope_factor"] = config.context / original
    else:
        out["rope_factor"] = fields.real("factor", 1.0, rope)
    if kind == "llama3":
        out["rope_low"] = fields.real("low_freq_factor", 1.0, rope)
        out["rope_high"] = fields.real("high_freq_factor", 4.0, rope)
    if kind == "yarn":
        if not rope.get("truncate", True):
            fields.refuse(name, "truncate = false is not known here", NO_FAMILY)
        out["rope_slow"] = fields.real("beta_slow", 1.0, {k: v for k, v in rope.items() if v})
        out["rope_fast"] = fields.real("beta_fast", 32.0, {k: v for k, v in rope.items() if v})
        both = [rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")]
        if rope.get("attention_factor") is not None:
            out["rope_gain"] = fields.real("attention_factor", 1.0, rope)
        elif all(both):
            over, under = (0.1 * m * math.log(out["rope_factor"]) + 1.0 for m in both)
            out["rope_gain"] = over / under
    return out


# -- out


def architecture_of(config: ModelConfig) -> str:
    """Return the class that computes the same. Raises UserError if there is none."""

    def refusal(name: str, what: str) -> UserError:
        remedy = "convert it to dcp, which takes every model"
        return UserError(what, field=f"model.{name}", value=getattr(config, name), remedy=remedy)

    if config.family not in ("dense", "moe"):
        raise refusal("family", "transformers has no class for it; it has for dense and moe")
    lacks = {}
    for name, arch in ARCHITECTURES.items():
        if arch.family == config.family:
            lacks[name] = arch.computes(config)
            if not lacks[name]:
                if config.dim % config.num_heads and arch.model_type == "llama":
                    raise refusal("num_heads", f"{name} wants a number that divides the width, {config.dim}")
                return name
    field_name = lacks["MixtralForCausalLM" if config.family == "moe" else "LlamaForCausalLM"]
    raise refusal(field_name, "no class of transformers has it together with the other features of this model")


def config_out(config: ModelConfig, name: str, dtype: str, context: int) -> dict[str, Any]:
    """Make a config.json for transformers 4 and 5, which name the precision and the rotary base differently."""
    arch = ARCHITECTURES[name]
    scaled = _rope_out(config)
    out: dict[str, Any] = {
        "architectures": [name],
        "model_type": arch.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu" else "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": scaled,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,  # known to the tokenizer, not to the model
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if scaled["rope_type"] != "default":
        out["rope_scaling"] = scaled
    if "attention_bias" in arch.free:
        out["attention_bias"] = config.attention_bias == "all"
    if "ffn_bias" in arch.free:
        out["mlp_bias"] = config.ffn_bias
    if config.activation == "gelu":
        out["hidden_activation"] = "gelu_pytorch_tanh"
    if "rope_fraction" in arch.free:
        out["partial_rotary_factor"] = config.rope_fraction
        out["original_max_position_embeddings"] = config.rope_original or context
    return out | _windows_out(config, arch) | _experts_out(config, arch) | _bends_out(config, arch, scaled)


def _rope_out(config: ModelConfig) -> dict[str, Any]:
    kind = config.rope_scaling
    out: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": config.rope_theta}
    if kind != "none":
        out["factor"] = config.rope_factor
    if kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = config.rope_original
    if kind == "llama3":
        out |= {"low_freq_factor": config.rope_low, "high_freq_factor": config.rope_high}
    if kind == "yarn":
        out |= {"beta_slow": config.rope_slow, "beta_fast": config.rope_fast}
        if config.rope_gain:
            out["attention_factor"] = config.rope_gain
    if config.rope_fraction != 1.0:
        out["partial_rotary_factor"] = config.rope_fraction
    return out


def _windows_out(config: ModelConfig, arch: Architecture) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if arch.window is None and not config.window and arch.model_type not in ("mixtral",):
        return out
    windowed = config.windowed_layers > 0
    out["sliding_window"] = config.window if windowed else None
    if "full_every" in arch.free or "window_from" in arch.free:
        kinds = ["sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.num_layers)]
        out["layer_types"] = kinds
        if arch.model_type.startswith("qwen"):
            out |= {"use_sliding_window": windowed, "max_window_layers": config.window_from}
        elif not windowed:
            out["sliding_window"] = 4096  # not used: no layer has a window
    return out


def _experts_out(config: ModelConfig, arch: Architecture) -> dict[str, Any]:
    if arch.family != "moe":
        return {}
    if arch.model_type == "mixtral":
        number = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.top_k}
        return number | {"intermediate_size": config.expert_width}
    return {
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,  # as transformers 5 names it
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _bends_out(config: ModelConfig, arch: Architecture, scaled: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if arch.model_type in ("gemma2", "gemma3_text"):
        width = config.attention_scale**-2 if config.attention_scale else config.head_dim
        out["query_pre_attn_scalar"] = round(width) if math.isclose(width, round(width), rel_tol=1e-9) else width
        out["final_logit_softcapping"] = config.logit_softcap or None
        out["attn_logit_softcapping"] = config.attention_softcap or None
    if arch.model_type in ("gemma3_text", "olmo3"):
        local = {"rope_type": "default", "rope_theta": config.rope_local_theta or config.rope_theta}
        out["rope_parameters"] = {"full_attention": scaled, "sliding_attention": local}
        if arch.model_type == "gemma3_text":
            out["rope_local_base_freq"] = local["rope_theta"]
    return out
