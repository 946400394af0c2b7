"""The contenders of benchmarks/gpu_step.py: our engine and torchtitan, each in its own process, which reads orders as
lines of JSON. Both begin with the same weights and get the same batches."""

import importlib
import json
import os
import re
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from phalanx.core.job import Job, OptimizerConfig, TrainConfig
from phalanx.core.layout import Coord
from phalanx.core.shape import ModelConfig
from phalanx.model import Batch, init, load_family
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.parallel.schema import describe
from phalanx.train import state
from phalanx.train.engine import Engine
from phalanx.train.schedule import learning_rate
from phalanx.train.state import State


@dataclass(frozen=True)
class Shape:
    model: ModelConfig
    seq_len: int
    batch: int
    peer_recompute: str = "none"


def _llama(dim: int, layers: int, ffn: int, vocab: int = 128_256, heads: int = 32, kv: int = 8) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        ffn_dim=ffn,
        rope_theta=500_000.0,
    )


SHAPES = {
    "smoke": Shape(_llama(256, 2, 1024, vocab=4096, heads=4, kv=2), 512, 2),
    "1.5b": Shape(_llama(2048, 16, 8192), 4096, 4),
    "2.8b": Shape(_llama(4096, 8, 14336), 8192, 2),
    "8b": Shape(_llama(4096, 32, 14336), 8192, 1, peer_recompute="full"),
}
SEED = 11


def _moe(**sizes: int) -> ModelConfig:
    return ModelConfig(family="moe", vocab_size=128_256, num_heads=32, num_kv_heads=8, **sizes)


# Only for our engine: DeepSeek's and Mixtral's experts at their widths, with as many layers as fit; long rows.
SHAPES |= {
    "deepseek": Shape(
        _moe(dim=2048, num_layers=6, ffn_dim=10944, num_experts=64, top_k=6, expert_dim=1408, shared_experts=2), 4096, 4
    ),
    "mixtral": Shape(_moe(dim=4096, num_layers=2, ffn_dim=14336, num_experts=8, top_k=2), 4096, 4),
    "1.5b-32k": Shape(_llama(2048, 16, 8192), 32_768, 1),
    "1.5b-128k": Shape(_llama(2048, 16, 8192), 131_072, 1),
}


def job_of(shape: Shape, **train: object) -> Job:
    moments = train.pop("moments", "full")
    return Job(
        name="gpu-step",
        seed=SEED,
        model=shape.model,
        train=TrainConfig(
            steps=1000, seq_len=shape.seq_len, global_batch=shape.batch, micro_batch=shape.batch, **train
        ),
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10, state=str(moments)),
    )


def tokens_of(shape: Shape, step: int) -> np.ndarray:
    """Draw tokens by Zipf's law, so that there is something to learn: with equally likely tokens, losses differ by
    chance."""
    ends = np.cumsum(1.0 / np.arange(1, shape.model.vocab_size + 1))
    drawn = np.random.default_rng([SEED, step]).random((shape.batch, shape.seq_len + 1))
    return np.minimum(np.searchsorted(ends, drawn * ends[-1]), shape.model.vocab_size - 1)


def documents_of(shape: Shape, step: int, number: int) -> np.ndarray:
    """Draw documents of random lengths, `number` of them per row."""
    rng, out = np.random.default_rng([SEED, 1, step]), np.zeros((shape.batch, shape.seq_len), np.int64)
    for row in out:
        row[1 + rng.permutation(shape.seq_len - 1)[: number - 1]] = 1
    return out.cumsum(1)


class Ours:
    """The engine as a worker of `phalanx train` builds it."""

    def __init__(self, shape: Shape, **train: object):
        self.shape, self.job = shape, job_of(shape, **train)
        family, coord = load_family(shape.model.family), Coord(0, 0, 0)
        self.device = Device.pick("auto", 0, 1)
        self.state = State.create(self.job, family, coord, self.device)
        experts = bool(family.experts)
        self.groups = Groups.form(torch.distributed.HashStore(), 0, self.job.layout, coord, self.device, experts)
        self.engine = Engine(self.job, family, coord, self.groups, self.state, self.device)

    def prepare(self, step: int, documents: int) -> Batch:
        tokens = torch.from_numpy(tokens_of(self.shape, step))
        packed = torch.from_numpy(documents_of(self.shape, step, documents)) if documents else None
        weights = torch.ones(tokens[:, 1:].shape, dtype=torch.int64)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights, packed)

    def run(self, step: int, batch: Batch) -> torch.Tensor:
        result = self.engine.step([batch])
        return result.loss_sums.sum() / batch.weights_BL.numel()


class Titan:
    """torchtitan's Llama 3 as its trainer builds it on one GPU: compiled blocks, autocast, fused AdamW, clipping."""

    def __init__(self, shape: Shape, folder: str):
        sys.path.insert(0, folder)
        _stub_missing()
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama
        from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        torch.set_float32_matmul_precision("high")
        m, self.shape, self.job = shape.model, shape, job_of(shape, precision="bf16")
        args = TransformerModelArgs(
            dim=m.dim,
            n_layers=m.num_layers,
            n_heads=m.num_heads,
            n_kv_heads=m.num_kv_heads,
            vocab_size=m.vocab_size,
            multiple_of=256,
            ffn_dim_multiplier=m.ffn_dim / int(2 * 4 * m.dim / 3),
            rope_theta=m.rope_theta,
            max_seq_len=shape.seq_len,
            rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        )
        config = JobConfig()
        config.training.seq_len = shape.seq_len
        config.compile.enable = True
        config.activation_checkpoint.mode = shape.peer_recompute
        one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
        self.device = Device.pick("auto", 0, 1)
        with torch.device("meta"):
            model = Transformer(args)
        self.model = parallelize_llama(model, ParallelDims(**one), config)
        self.model.to_empty(device=self.device.torch)
        with torch.no_grad():
            self.model.init_weights(buffer_device=self.device.torch)
        self._load()
        self.loss = torch.compile(cross_entropy_loss)
        c = self.job.optimizer
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": c.weight_decay},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, fused=True)

    @torch.no_grad()
    def _load(self) -> None:
        """Load our first weights. torchtitan rotates neighbouring elements of a head, we rotate the two halves."""
        family, names = load_family("dense"), dict(self.model.named_parameters())
        names = {
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): p for name, p in names.items()
        }
        renamed = {"embed.": "tok_embeddings.", "head.": "output.", ".ffn.": ".feed_forward."}
        for info in describe(family, self.shape.model):
            whole = torch.empty(info.shape, device=self.device.torch)
            rows, cols = slice(0, info.shape[0]), slice(0, info.shape[-1])
            drawn = family.init(info.name, self.shape.model)
            init.draw_all(SEED, [init.Slice(info.name, info.shape, drawn, rows, cols, whole)], self.device.use)
            name = info.name
            for ours, theirs in renamed.items():
                name = name.replace(ours, theirs)
            if name.endswith(("wq.weight", "wk.weight")):
                halves = whole.view(-1, 2, self.shape.model.head_dim // 2, self.shape.model.dim)
                whole = halves.transpose(1, 2).reshape(whole.shape)
            names[name].copy_(whole)

    def prepare(self, step: int, documents: int) -> torch.Tensor:
        assert not documents
        return self.device.put(torch.from_numpy(tokens_of(self.shape, step)))

    def run(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.job.optimizer, step, self.job.train.steps)
        with torch.autocast(self.device.torch.type, dtype=torch.bfloat16):
            loss = self.loss(self.model(tokens[:, :-1]), tokens[:, 1:].contiguous()) / tokens[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _stub_missing() -> None:
    """Stub torchtitan's imports for data and metrics, which are not used here and may not be installed."""
    for name in ("datasets", "datasets.distributed", "tokenizers", "torch.utils.tensorboard"):
        try:
            __import__(name)
        except ImportError:
            module = types.ModuleType(name)
            for what in (
                "Dataset",
                "load_dataset",
                "split_dataset_by_node",
                "AddedToken",
                "Tokenizer",
                "SummaryWriter",
            ):
                setattr(module, what, object)
            sys.modules[name] = module


# -- profile ----------------------------------------------------------------------------------------

CLASSES = {
    "attention": r"sdpa|fmha|flash|dot_do_o|convert_dq",
    "loss": r"^_row|log_softmax|nll_loss|cross_entropy",
    "matmul": r"nvjet|gemm|cutlass|splitK|cublas",
    "fp8 casts": r"_round_both",
    "feed-forward": r"^_gate",
    "optimizer and norm": r"multi_tensor_apply|FusedAdam|lpnorm|adamw",
    "weight and gradient copies": r"split_with_sizes|chunk_cat|CatArray|direct_copy|bfloat16_copy|Mem(cpy|set)|Fill",
}
REST = "elementwise, norm, rope, embedding"


def profile(step, steps: int = 3) -> dict[str, float]:
    """Return the milliseconds of a step's kernels by class, in total, and without any kernel; and the longest
    kernels."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU]) as recorded:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            step()
        end.record()
        torch.cuda.synchronize()
    out, spans, longest = dict.fromkeys([*CLASSES, REST], 0.0), [], {}
    for event in recorded.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or re.search(
            "^ProfilerStep|^FSDP::|^Torch-Comp", event.name
        ):
            continue  # these are not kernels, but names for groups of them
        span = event.time_range
        name = next((name for name, known in CLASSES.items() if re.search(known, event.name)), REST)
        out[name] += (span.end - span.start) / steps / 1e3
        short = event.name[:90]
        longest[short] = longest.get(short, 0.0) + (span.end - span.start) / steps / 1e3
        spans.append((span.start, span.end, short))
    busy = until = 0.0
    before, gaps = "", []
    for first, last, name in sorted(spans):
        gaps.append(((first - until) / 1e3 if until else 0.0, before, name))
        busy, until, before = busy + max(0.0, last - max(first, until)), max(until, last), name
    wall = start.elapsed_time(end) / steps
    top = sorted(longest.items(), key=lambda item: -item[1])[:40]
    sizes = {"< 5 us": 0.005, "< 20 us": 0.02, "< 100 us": 0.1, "< 1 ms": 1.0, "more": 1e9}
    by_size = dict.fromkeys(sizes, 0.0)
    for ms, _, _ in gaps:
        by_size[next(name for name, limit in sizes.items() if ms < limit)] += max(0.0, ms) / steps
    gaps = [(round(ms, 2), before[:50], name[:50]) for ms, before, name in sorted(gaps)[: -3 * steps : -1]]
    return out | {
        "gaps": wall - busy / steps / 1e3,
        "wall": wall,
        "kernels": len(spans) / steps,
        **{f"gaps {name}": ms for name, ms in by_size.items()},
        "widest gaps": gaps,
        "longest": {n: round(v, 2) for n, v in top},
    }


# -- the process ------------------------------------------------------------------------------------


def _draw_on_device(seed: int, slices: list, *_: object) -> None:
    """Draw other first values without the host's work, when only times matter."""
    for s in slices:
        s.out.normal_(s.init.mean, s.init.std)


def main() -> None:
    """Read options from the command line, then one request per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    options = json.loads(sys.argv[1])
    importlib.import_module("torch._inductor.compile_fx")
    if not sys.stdin.readline():  # the imports are done; this line arrives when the device is free
        return
    shape, began = SHAPES[options.pop("shape")], time.perf_counter()
    if not options.pop("drawn", True):
        state.draw_all = init.draw_all = _draw_on_device
    contender = Titan(shape, options["titan"]) if "titan" in options else Ours(shape, **options)
    done = 0

    def tell(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    tell(built_s=time.perf_counter() - began)
    for line in sys.stdin:
        wanted = json.loads(line)
        documents = wanted.get("documents", 0)
        if wanted["do"] == "profile":
            batch = contender.prepare(done, documents)
            tell(profile=profile(lambda batch=batch, at=done: float(contender.run(at, batch))))
            continue
        times, launches, losses = [], [], []
        for _ in range(wanted["steps"]):
            batch = contender.prepare(done, documents)
            contender.device.synchronize()
            start = time.perf_counter()
            loss = contender.run(done, batch)
            launches.append(time.perf_counter() - start)
            losses.append(float(loss))
            contender.device.synchronize()
            times.append(time.perf_counter() - start)
            done += 1
        peak = 0 if contender.device.is_cpu else torch.accelerator.max_memory_allocated()
        tell(times=times, launches=launches, losses=losses, peak_gib=peak / 2**30)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
