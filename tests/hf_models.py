"""Tiny models of `transformers`, one for every class that we import and export, and their comparison with ours: the
same tokens through both, in fp64. The code of transformers computes norms, positions, routers and softmaxes in fp32
whatever the model's precision; `in_double` makes it use fp64 there, so that only the order of sums differs."""

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

from phalanx.checkpoint import torch_hf
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.hf_config import ARCHITECTURES, config_in
from phalanx.checkpoint.hf_names import pieces_of, table_of
from phalanx.checkpoint.torch_foreign import params_of, read_rows
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder
from phalanx.model.family import Batch, load_family

SIZES = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,  # large enough that attention is far from uniform
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64)
GEMMA_3 = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
)
MODELS: dict[str, tuple[str, dict]] = {
    "Llama 3": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    "Llama 3.1": ("Llama", dict(rope_parameters=LLAMA3)),
    "Llama 3.2, tied": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True, head_dim=16)),
    "Llama, biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "Llama, linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=4.0))),
    "Mistral 0.1, window": ("Mistral", dict(sliding_window=7)),
    "Mistral 0.3": ("Mistral", dict(sliding_window=None, head_dim=8)),
    "Mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "Qwen 2.5": ("Qwen2", dict()),
    "Qwen 2.5, YaRN, windows": (
        "Qwen2", dict(rope_parameters=YARN, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "Qwen 3": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "Qwen 3 MoE": (
        "Qwen3Moe", dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
                         norm_topk_prob=True),
    ),
    "Gemma": ("Gemma", dict(head_dim=16)),
    "Gemma 2": (
        "Gemma2", dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=12, attn_logit_softcapping=0.7,
                       final_logit_softcapping=1.5),
    ),
    "Gemma 3": (
        "Gemma3", dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=16, rope_parameters=GEMMA_3,
                       layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "OLMo 2": ("Olmo2", dict()),
    "OLMo 3": ("Olmo3", dict(sliding_window=7, rope_parameters=dict(
        full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "Phi-3, window": ("Phi3", dict(sliding_window=7)),
    "Phi-4-mini, partial rotary": (
        "Phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    ),
}  # fmt: skip
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(5))


@contextlib.contextmanager
def in_double():
    """Give fp64 to code that asks for fp32."""
    default, kept = torch.get_default_dtype(), (torch.float32, torch.float, torch.Tensor.float)
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept
        torch.set_default_dtype(default)


def make(transformers, name: str, double: bool = False):
    """Make a model, with random norms and biases too."""
    kind, more = MODELS[name]
    with in_double() if double else contextlib.nullcontext():
        torch.manual_seed(list(MODELS).index(name))
        config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**SIZES | more)
        config._attn_implementation = config._experts_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        if double:
            model = model.double()
        for param in model.parameters():
            if param.dim() == 1:  # norms start as ones or zeros, biases as zeros
                torch.nn.init.uniform_(param, 0.5, 1.5)
    return model


def their_side(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return their logits, and the gradients of a loss."""
    with in_double():
        logits = model(TOKENS).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        names = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(names.values()))
    return logits.detach(), dict(zip(names, grads, strict=True))


def our_side(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config = dataclasses.replace(config, balance_loss=0.0)  # their loss does not include it
    model = load_family(config.family).build(config).double().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= ({"head.weight"} if config.tied else set()), (missing, unexpected)
    logits = model(Batch(TOKENS, TOKENS, torch.ones(TOKENS.shape)))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    names = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(names.values()))
    return logits.detach(), dict(zip(names, grads, strict=True))


def weights_of(reader: Reader) -> dict[str, torch.Tensor]:
    held = [e.held for e in reader.manifest.entries if e.held.name.startswith("weights/")]
    return {h.name.removeprefix("weights/"): read_rows(reader, h.name, 0, h.num_rows) for h in held}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def gradient_error(config: ModelConfig, name: str, ours: dict, theirs: dict) -> float:
    """Return the largest norm-relative error of any piece."""
    worst = 0.0
    for piece in pieces_of(params_of(config), table_of(ARCHITECTURES[name].model_type, config)):
        want = theirs.get(piece.theirs.replace("block_sparse_moe", "mlp"))
        if want is None:  # their module stacks the experts, gate over up
            _, layer, _, _, which = piece.ours.split(".")
            expert, stack = piece.first // (piece.last - piece.first), f"model.layers.{layer}.mlp.experts."
            want = theirs[stack + ("down_proj" if which == "w2" else "gate_up_proj")][expert]
            want = want if which == "w2" else want.chunk(2)[which == "w3"]
        want = want[piece.at : piece.at + piece.last - piece.first]
        worst = max(worst, error(ours[piece.ours][piece.first : piece.last], want))
    return worst


def compare(transformers, name: str) -> dict:
    """Test one class: in, out and in again."""
    with tempfile.TemporaryDirectory() as place:
        folder, store = Path(place) / "theirs", Folder(Path(place) / "ours")
        model = make(transformers, name, double=True)
        with in_double():
            model.save_pretrained(folder)
        reader = Reader(store, torch_hf.read(folder, store, image_bytes=40_000).name)
        cls, config = config_in(folder)
        weights = weights_of(reader)
        (got, our_grads), (want, their_grads) = our_side(config, weights), their_side(model)
        torch_hf.write(reader, Path(place) / "back", max_shard_bytes=60_000)
        again = Folder(Path(place) / "again")
        second = weights_of(Reader(again, torch_hf.read(Path(place) / "back", again).name))
        cls_back, config_back = config_in(Path(place) / "back")
        with in_double():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(
                Path(place) / "back", attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
            )
        logits_back = their_side(loaded.eval())[0]
        shutil.rmtree(place, ignore_errors=True)
    same = all(torch.equal(second[key], value) for key, value in weights.items()) and set(second) == set(weights)
    return {
        "class": cls,
        "class_out": cls_back,
        "parameters": config.num_params,
        "logits": error(got, want),
        "gradients": gradient_error(config, cls, our_grads, their_grads),
        "logits_out": error(logits_back, want),
        "same_weights": same,
        "same_config": config_back == config,
    }
