"""Compositions for the parity tests and benchmarks, and the functions that each rank runs on them.

`CASES` is the table: a name, the layout, and the differences from the base job. Functions named `case_*` run inside
pool workers (tests/pool.py) and return JSON."""

import dataclasses
import gc
import hashlib
import os

import numpy as np
import torch

from phalanx.core.image import ImageShape
from phalanx.core.job import CollectivesConfig, Job, OptimizerConfig, RunConfig, TrainConfig
from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig
from phalanx.model import Batch, load_family
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups, form_cross
from phalanx.parallel.rendezvous import MeetingStore
from phalanx.parallel.schema import describe
from phalanx.train.engine import Engine
from phalanx.train.schedule import learning_rate
from phalanx.train.state import State
from tests.feature_cases import FEATURE_CASES

STEPS = 5
CPU = Device(torch.device("cpu"), "gloo")  # the zygote imports this file, so nothing may run here

EVEN = ModelConfig(vocab_size=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=160)
# 101 and 171 are odd; 60 / 4 heads = 15 would be odd for RoPE, so 6 heads of 10.
ODD = ModelConfig(vocab_size=101, dim=60, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=171)
TIED = dataclasses.replace(ODD, tied=True)
DEEP = dataclasses.replace(ODD, num_layers=5)  # does not divide evenly over the stages
DEEPER = dataclasses.replace(ODD, num_layers=9)
NARROW = dataclasses.replace(EVEN, ffn_dim=9)
# One dense layer and two with experts. The experts of MOE_ODD have an odd width.
MOE = ModelConfig(
    family="moe",
    vocab_size=96,
    dim=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    ffn_dim=160,
    num_experts=4,
    top_k=2,
    expert_dim=48,
    shared_experts=1,
    dense_layers=1,
    balance_loss=0.01,
)
MOE_ODD = ModelConfig(
    family="moe",
    vocab_size=101,
    dim=60,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_width=14,
    ffn_dim=171,
    num_experts=6,
    top_k=3,
    expert_dim=37,
    scoring="sigmoid",
    route_scale=2.5,
    balance_loss=0.02,
    balance_bias=0.05,
)
MOE_DEEP = dataclasses.replace(MOE, num_layers=4)
# 16 patches of 27 numbers, an odd number, like that of the classes.
IMAGE = ModelConfig(
    family="image",
    vocab_size=7,
    dim=60,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_dim=85,
    options={"image": 12, "patch": 3, "channels": 3},
)

FLAT, TWO_LEVELS = ({"replica": name, "shard": name} for name in ("flat", "hierarchical"))
BY_SIZE = {"crossover_kb": 60}  # buckets and units lie on both sides of it


def make_job(
    layout=(1, 1, 1),
    *,
    zero=3,
    model=ODD,
    ranks_per_node=0,
    clip=0.3,
    axes=None,
    collectives=None,
    optimizer=None,
    **train,
) -> Job:
    batch = max(2, min(8, 2 * layout[0] * layout[1]))  # two micro-batches per rank, one when there are many
    if axes and axes.get("pp", 1) > 1:
        batch = max(batch, 4 * layout[0] * layout[1])
    defaults = dict(
        steps=STEPS, seq_len=16, global_batch=batch, micro_batch=1, precision="fp64", bucket_mb=0.05, compile="none"
    )
    return Job(
        name="case",
        seed=7,
        model=model,
        layout=Layout(*layout, zero=zero, ranks_per_node=ranks_per_node, **(axes or {})),
        train=TrainConfig(**(defaults | train)),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, clip=clip, **(optimizer or {})),
        collectives=CollectivesConfig(**(collectives or {})),
        run=RunConfig(device=os.environ.get("PHALANX_TEST_DEVICE", "cpu")),
    )


# name, replica x shard x tp, keyword arguments of make_job
CASES = [
    ("single", (1, 1, 1), {}),
    ("shard 2", (1, 2, 1), {}),
    ("shard 3, uneven rows", (1, 3, 1), dict(global_batch=6)),
    ("shard 4, ZeRO-1", (1, 4, 1), dict(zero=1)),
    ("shard 4, ZeRO-2", (1, 4, 1), dict(zero=2)),
    ("shard 8", (1, 8, 1), {}),
    ("shard 4, no accumulation", (1, 4, 1), dict(global_batch=4)),
    ("shard 2, even sizes", (1, 2, 1), dict(model=EVEN)),
    ("tp 2", (1, 1, 2), {}),
    ("tp 4", (1, 1, 4), dict(model=EVEN)),
    ("tp 4, 9 FFN features", (1, 1, 4), dict(model=NARROW, global_batch=2)),
    ("tp 2, odd vocabulary, tied", (1, 1, 2), dict(model=TIED)),
    ("tp 2, no mask", (1, 1, 2), dict(document_mask=False)),
    ("tp 2, full recompute", (1, 1, 2), dict(recompute="full")),
    ("tp 2, selective recompute", (1, 1, 2), dict(recompute="selective")),
    ("replica 2", (2, 1, 1), {}),
    ("replica 3", (3, 1, 1), dict(global_batch=6)),
    ("replica 4, two nodes", (4, 1, 1), dict(ranks_per_node=2)),
    ("replica 8, two nodes", (8, 1, 1), dict(ranks_per_node=4)),
    ("replica 4, two nodes, flat", (4, 1, 1), dict(ranks_per_node=2, collectives=FLAT)),
    ("replica 8, two nodes, hierarchical", (8, 1, 1), dict(ranks_per_node=4, collectives=TWO_LEVELS)),
    ("shard 4, two nodes, hierarchical", (1, 4, 1), dict(ranks_per_node=2, collectives=TWO_LEVELS)),
    ("shard 8, two nodes, hierarchical", (1, 8, 1), dict(ranks_per_node=4, collectives=TWO_LEVELS)),
    ("shard 4 x tp 2, ZeRO-1, two nodes, by size", (1, 4, 2), dict(ranks_per_node=4, zero=1, collectives=BY_SIZE)),
    ("replica 2 x shard 4, four nodes, by size", (2, 4, 1), dict(ranks_per_node=2, collectives=BY_SIZE)),
    ("shard 2 x cp 2, two nodes", (1, 2, 1), dict(ranks_per_node=2, collectives=TWO_LEVELS, axes=dict(cp=2))),
    ("shard 2 x tp 2", (1, 2, 2), {}),
    ("shard 2 x tp 2, tied", (1, 2, 2), dict(model=TIED)),
    ("shard 2 x tp 2, ZeRO-1", (1, 2, 2), dict(zero=1)),
    ("shard 2 x tp 4", (1, 2, 4), dict(model=EVEN)),
    ("shard 4 x tp 2", (1, 4, 2), {}),
    ("shard 4 x tp 2, full recompute, tied", (1, 4, 2), dict(model=TIED, recompute="full")),
    ("replica 2 x shard 2", (2, 2, 1), {}),
    ("replica 2 x shard 2, ZeRO-1", (2, 2, 1), dict(zero=1)),
    ("replica 2 x shard 2, no mask", (2, 2, 1), dict(document_mask=False)),
    ("replica 4 x shard 2, two nodes", (4, 2, 1), dict(ranks_per_node=4)),
    ("replica 2 x shard 4", (2, 4, 1), {}),
    ("replica 2 x tp 2", (2, 1, 2), {}),
    ("replica 2 x tp 4", (2, 1, 4), dict(model=EVEN)),
    ("replica 4 x tp 2, two nodes", (4, 1, 2), dict(ranks_per_node=4)),
    ("replica 2 x shard 2 x tp 2", (2, 2, 2), {}),
    ("replica 2 x shard 2 x tp 2, tied, full recompute", (2, 2, 2), dict(model=TIED, recompute="full")),
    ("replica 2 x shard 2 x tp 2, ZeRO-2, selective", (2, 2, 2), dict(zero=2, recompute="selective")),
    ("replica 2 x shard 2 x tp 2, micro-batch 2", (2, 2, 2), dict(micro_batch=2, global_batch=16)),
    ("exact: shard 4", (1, 4, 1), dict(reduction="exact")),
    ("exact: shard 3, 6 leaves", (1, 3, 1), dict(reduction="exact", global_batch=6)),
    ("exact: replica 3 x shard 2, ZeRO-1", (3, 2, 1), dict(reduction="exact", global_batch=12, zero=1)),
    ("exact: replica 2 x shard 2 x tp 2", (2, 2, 2), dict(reduction="exact")),
    ("exact: replica 4 x shard 2, two nodes", (4, 2, 1), dict(reduction="exact", ranks_per_node=4)),
    ("exact: shard 4, two nodes", (1, 4, 1), dict(reduction="exact", ranks_per_node=2, collectives=TWO_LEVELS)),
    ("exact: shard 8, two nodes", (1, 8, 1), dict(reduction="exact", ranks_per_node=4, collectives=TWO_LEVELS)),
    # Pipelines: every schedule, an uneven number of layers, every ZeRO stage under a split backward.
    ("pp 2, GPipe", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, schedule="gpipe"))),
    ("pp 2, 1F1B", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2))),
    ("pp 4, 1F1B", (1, 1, 1), dict(model=DEEP, axes=dict(pp=4))),
    ("pp 2, interleaved", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, schedule="interleaved"))),
    ("pp 2, interleaved zero-bubble", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, schedule="interleaved-zb"))),
    ("pp 2, ZB-V", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, schedule="zbv"))),
    ("pp 4, ZB-V", (1, 1, 1), dict(model=DEEPER, axes=dict(pp=4, schedule="zbv"))),
    ("pp 2, ZB-V, full recompute", (1, 1, 1), dict(model=DEEP, recompute="full", axes=dict(pp=2, schedule="zbv"))),
    ("replica 2 x pp 2", (2, 1, 1), dict(model=DEEP, axes=dict(pp=2))),
    ("replica 2 x pp 4, interleaved", (2, 1, 1), dict(model=DEEPER, axes=dict(pp=4, schedule="interleaved"))),
    ("shard 2 x pp 2", (1, 2, 1), dict(model=DEEP, axes=dict(pp=2))),
    ("shard 2 x pp 2, ZB-V, ZeRO-3", (1, 2, 1), dict(model=DEEP, axes=dict(pp=2, schedule="zbv"))),
    ("shard 2 x pp 2, ZB-V, ZeRO-1", (1, 2, 1), dict(model=DEEP, zero=1, axes=dict(pp=2, schedule="zbv"))),
    (
        "shard 2 x pp 2, interleaved zero-bubble, ZeRO-2",
        (1, 2, 1),
        dict(model=DEEP, zero=2, axes=dict(pp=2, schedule="interleaved-zb")),
    ),
    ("tp 2 x pp 2", (1, 1, 2), dict(model=DEEP, axes=dict(pp=2))),
    ("tp 2 x pp 2, ZB-V", (1, 1, 2), dict(model=DEEP, axes=dict(pp=2, schedule="zbv"))),
    # Context: documents cross the boundaries between ranks.
    ("cp 2, ring", (1, 1, 1), dict(axes=dict(cp=2))),
    ("cp 4, ring", (1, 1, 1), dict(axes=dict(cp=4))),
    ("cp 4, ring, no mask", (1, 1, 1), dict(document_mask=False, axes=dict(cp=4))),
    ("cp 2, Ulysses", (1, 1, 1), dict(axes=dict(cp=2, cp_style="ulysses"))),
    ("cp 3, Ulysses, 2 key/value heads", (1, 1, 1), dict(seq_len=18, axes=dict(cp=3, cp_style="ulysses"))),
    ("cp 2, ring, selective recompute", (1, 1, 1), dict(recompute="selective", axes=dict(cp=2))),
    ("replica 2 x cp 2", (2, 1, 1), dict(axes=dict(cp=2))),
    ("shard 2 x cp 2", (1, 2, 1), dict(axes=dict(cp=2))),
    ("tp 2 x cp 2", (1, 1, 2), dict(axes=dict(cp=2))),
    ("tp 2 x cp 2, Ulysses", (1, 1, 2), dict(model=EVEN, axes=dict(cp=2, cp_style="ulysses"))),
    ("pp 2 x cp 2", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, cp=2))),
    (
        "pp 2 x cp 2, ZB-V, Ulysses",
        (1, 1, 1),
        dict(model=DEEP, axes=dict(pp=2, schedule="zbv", cp=2, cp_style="ulysses")),
    ),
    # Experts.
    ("moe: single", (1, 1, 1), dict(model=MOE)),
    ("moe: single, sigmoid, bias", (1, 1, 1), dict(model=MOE_ODD)),
    ("moe: shard 2", (1, 2, 1), dict(model=MOE)),
    ("moe: tp 2", (1, 1, 2), dict(model=MOE)),
    ("moe: pp 2", (1, 1, 1), dict(model=MOE, axes=dict(pp=2))),
    ("moe: cp 2", (1, 1, 1), dict(model=MOE, axes=dict(cp=2))),
    ("moe: replica 2, bias", (2, 1, 1), dict(model=MOE_ODD)),
    ("moe: shard 2, ep 2", (1, 2, 1), dict(model=MOE, axes=dict(ep=2))),
    ("moe: shard 4, ep 4, 6 experts", (1, 4, 1), dict(model=MOE_ODD, axes=dict(ep=4))),
    ("moe: shard 4, ep 2, ZeRO-1", (1, 4, 1), dict(model=MOE, zero=1, axes=dict(ep=2))),
    ("moe: shard 4, two nodes", (1, 4, 1), dict(model=MOE, ranks_per_node=2, collectives=TWO_LEVELS)),
    (
        "moe: shard 8, ep 2, two nodes",
        (1, 8, 1),
        dict(model=MOE, ranks_per_node=4, collectives=TWO_LEVELS, axes=dict(ep=2)),
    ),
    ("moe: tp 2, ep 2", (1, 1, 2), dict(model=MOE, axes=dict(ep=2))),
    ("moe: cp 2, ep 2, bias", (1, 1, 1), dict(model=MOE_ODD, axes=dict(cp=2, ep=2))),
    ("moe: replica 2 x shard 2, ep 2, bias", (2, 2, 1), dict(model=MOE_ODD, axes=dict(ep=2))),
    ("moe: shard 2 x pp 2, ep 2", (1, 2, 1), dict(model=MOE_ODD, axes=dict(pp=2, ep=2))),
    ("moe: shard 2, ep 2, full recompute", (1, 2, 1), dict(model=MOE_ODD, recompute="full", axes=dict(ep=2))),
    ("moe: shard 2, ep 2, selective recompute", (1, 2, 1), dict(model=MOE, recompute="selective", axes=dict(ep=2))),
    # Three, four and five at once, on 8 ranks. ZeRO shards over shard x cp, so a cp axis alone carries it.
    ("replica 2 x shard 2 x pp 2, interleaved", (2, 2, 1), dict(model=DEEP, axes=dict(pp=2, schedule="interleaved"))),
    ("replica 2 x shard 2 x cp 2", (2, 2, 1), dict(axes=dict(cp=2))),
    ("replica 2 x tp 2 x cp 2", (2, 1, 2), dict(axes=dict(cp=2))),
    ("replica 2 x tp 2 x pp 2", (2, 1, 2), dict(model=DEEP, axes=dict(pp=2))),
    ("replica 2 x pp 2 x cp 2", (2, 1, 1), dict(model=DEEP, axes=dict(pp=2, cp=2))),
    ("shard 2 x tp 2 x pp 2", (1, 2, 2), dict(model=DEEP, axes=dict(pp=2))),
    ("shard 2 x tp 2 x pp 2, ZB-V", (1, 2, 2), dict(model=DEEP, axes=dict(pp=2, schedule="zbv"))),
    ("shard 2 x tp 2 x cp 2", (1, 2, 2), dict(axes=dict(cp=2))),
    ("shard 2 x pp 2 x cp 2, Ulysses", (1, 2, 1), dict(model=DEEP, axes=dict(pp=2, cp=2, cp_style="ulysses"))),
    ("tp 2 x pp 2 x cp 2, ZB-V", (1, 1, 2), dict(model=DEEP, axes=dict(pp=2, schedule="zbv", cp=2))),
    ("moe: shard 2 x tp 2 x pp 2, ep 4 (4 axes)", (1, 2, 2), dict(model=MOE, axes=dict(pp=2, ep=4))),
    ("moe: shard 2 x tp 2 x cp 2, ep 2 (4 axes)", (1, 2, 2), dict(model=MOE, axes=dict(cp=2, ep=2))),
    ("moe: shard 2 x pp 2 x cp 2, ep 2 (4 axes)", (1, 2, 1), dict(model=MOE_ODD, axes=dict(pp=2, cp=2, ep=2))),
    ("moe: replica 2 x shard 2 x pp 2, ep 2 (4 axes)", (2, 2, 1), dict(model=MOE_ODD, axes=dict(pp=2, ep=2))),
    ("moe: replica 2 x tp 2 x cp 2, ep 4 (4 axes)", (2, 1, 2), dict(model=MOE, axes=dict(cp=2, ep=4))),
    (
        "moe: tp 2 x pp 2 x cp 2, ep 2, ZeRO-3 (5 axes)",
        (1, 1, 2),
        dict(model=MOE_ODD, axes=dict(pp=2, cp=2, ep=2)),
    ),
    (
        "moe: tp 2 x pp 2 x cp 2, ep 4, ZeRO-3, ZB-V (5 axes)",
        (1, 1, 2),
        dict(model=MOE_DEEP, axes=dict(pp=2, schedule="zbv", cp=2, ep=4)),
    ),
    # The exact sum under the new axes.
    (
        "exact: replica 2 x shard 2 x pp 2, ZB-V",
        (2, 2, 1),
        dict(model=DEEP, reduction="exact", axes=dict(pp=2, schedule="zbv")),
    ),
    ("exact: shard 2 x cp 2, ZeRO-1", (1, 2, 1), dict(reduction="exact", zero=1, axes=dict(cp=2))),
    ("exact, moe: replica 2 x shard 2 x tp 2", (2, 2, 2), dict(model=MOE, reduction="exact")),
    # Tokens that are not text.
    ("image: single", (1, 1, 1), dict(model=IMAGE, document_mask=False)),
    ("image: shard 2 x tp 2", (1, 2, 2), dict(model=IMAGE, document_mask=False)),
    ("image: pp 2 x cp 2 x tp 2", (1, 1, 2), dict(model=IMAGE, document_mask=False, axes=dict(pp=2, cp=2))),
    # Ways to save memory, where they interact with an axis.
    (
        "activations offloaded: pp 2, ZB-V x tp 2",
        (1, 1, 2),
        dict(model=DEEP, offload_activations=True, seq_len=32, axes=dict(pp=2, schedule="zbv")),
    ),
    (
        "everything offloaded, moe: shard 2, ep 2",
        (1, 2, 1),
        dict(model=MOE, offload_activations=True, optimizer=dict(offload="nvme"), axes=dict(ep=2)),
    ),
    # Compiled blocks: traced, not generated, so that the table needs no compiler.
    ("compile: shard 2 x tp 2", (1, 2, 2), dict(compile="aot_eager")),
    ("compile: shard 2, selective recompute", (1, 2, 1), dict(compile="aot_eager", recompute="selective")),
    ("compile: pp 2 x cp 2", (1, 1, 1), dict(model=DEEP, compile="aot_eager", axes=dict(pp=2, cp=2))),
    ("compile: moe, shard 2, ep 2", (1, 2, 1), dict(model=MOE, compile="aot_eager", axes=dict(ep=2))),
    *FEATURE_CASES,
]


def make_batch(job: Job, step: int, index: int) -> Batch:
    """Make micro-batch `index` of a step: random tokens cut into documents of random lengths, or random images."""
    rng = np.random.default_rng([job.seed, step, index])
    shape = (job.train.micro_batch, job.train.seq_len)
    if job.model.family == "image":
        return _image_batch(ImageShape.of(job.model.options), job.model.vocab_size, shape, rng)
    tokens = rng.integers(0, job.model.vocab_size, (shape[0], shape[1] + 1))
    ends = rng.random(shape) < 0.15
    documents = np.cumsum(ends, axis=1) - ends
    return Batch(
        torch.from_numpy(tokens[:, :-1].copy()),
        torch.from_numpy(tokens[:, 1:].copy()),
        torch.from_numpy((~ends).astype(np.int64)),
        torch.from_numpy(documents) if job.train.document_mask else None,
    )


def _image_batch(image: ImageShape, classes: int, shape: tuple[int, int], rng) -> Batch:
    assert image.num_patches == shape[1], (image, shape)
    kinds = rng.integers(0, classes, (shape[0], 1))
    patches = rng.standard_normal((*shape, image.features)).astype(np.float32) + 0.2 * kinds[:, :, None]
    targets = torch.from_numpy(np.repeat(kinds, shape[1], axis=1))
    return Batch(torch.from_numpy(patches.astype(np.float32)), targets, torch.ones_like(targets))


def reference_inputs(job: Job):
    """Return the initial weights, and every step's micro-batches and rate, as plain tensors."""
    single = dataclasses.replace(job, layout=Layout())
    state = State.create(single, load_family(job.model.family), Coord(0, 0, 0), CPU)
    steps = []
    for step in range(STEPS):
        batches = [make_batch(job, step, i) for i in range(job.num_micro)]
        plain = [(b.tokens_BL, b.targets_BL, b.weights_BL, b.documents_BL) for b in batches]
        steps.append((plain, learning_rate(job.optimizer, step, job.train.steps)))
    return {k: state.master(k).clone() for k in state.params}, steps


class Rank:
    """One rank of a job, inside a pool worker; it forms the groups and builds the engine."""

    def __init__(self, job: Job, rank: int, store, generation: int, prepare=lambda rank: None):
        """Build the rank. `prepare(self)` is called before the engine is bound to the state."""
        if job.train.compile != "none":  # after 8 compilations of a function torch runs it uncompiled
            torch._dynamo.reset()
        self.job, self.coord = job, job.layout.coord(rank)
        self.store, self.generation = store, generation
        self.family = load_family(job.model.family)
        self.device = Device.pick(job.run.device, 0, 64, share=True)  # ranks may share a device
        self.state = State.create(job, self.family, self.coord, self.device)
        prepare(self)
        self.build()

    def build(self):
        layout, experts = self.job.layout, bool(self.family.experts)
        collectives = self.job.collectives
        self.groups = Groups.form(self.store, self.generation, layout, self.coord, self.device, experts, collectives)
        self.engine = Engine(self.job, self.family, self.coord, self.groups, self.state, self.device)
        self.engine.rejoin(form_cross(self.store, self.generation, layout, self.coord, self.device, collectives))

    def batches(self, step):
        return [make_batch(self.job, step, i) for i in self.job.micro_indices(self.coord)]

    def close(self):
        self.engine.close()
        del self.engine
        gc.collect()
        self.groups.close()


def connect(args, what: str = "case") -> Rank:
    """Build this worker's rank. `what`: another word for cases that number their generations differently."""
    job = Job.from_dict(args["job"])
    store = MeetingStore(args["store"], (what, args["generation"]))
    return Rank(job, args["rank"], store, args["generation"])


def compare(rank: Rank, local: dict, reference) -> dict:
    """Return, per parameter, the squared norms of the difference and of the reference, on this rank's slice."""
    out = {}
    for info in rank.state.infos:
        rows, cols = info.local_slice(rank.job.layout, rank.coord)
        want = torch.from_numpy(reference[info.name])
        want = want[rows, cols] if want.dim() > 1 else want[rows]
        got = local[info.name].detach().cpu().double()
        out[info.name] = [float(((got - want) ** 2).sum()), float((want**2).sum())]
    return out


def save(path: str, tensors: dict) -> None:
    np.savez(path, **{k: v.detach().cpu().double().numpy() for k, v in tensors.items()})


def case_save(args):
    """Keep our own single-process run as a reference."""
    rank = connect(args)
    for step in range(STEPS):
        out = rank.engine.gradients(rank.batches(step))
        if step == 0:
            save(args["stem"] + "-single-grads.npz", clipped(out))
        rank.engine.update(out)
    save(args["stem"] + "-single-weights.npz", rank.state.params)
    rank.close()


def clipped(out) -> dict:
    """Return the gradients as the update takes them."""
    return {k: g.clone() if out.clip is None else g * out.clip.to(g.dtype) for k, g in out.grads.items()}


def _array(tensor):
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def case_train(args):
    """Train for `steps` steps, and save this rank's slices of weights and moments to a file. Every replica saves."""
    rank = connect(args)
    result = {"loss_sums": [], "norms": [], "peak_pending_bytes": 0, "sent_bytes": 0}
    for step in range(args["steps"]):
        out = rank.engine.step(rank.batches(step))
        result["loss_sums"].append(out.loss_sums.tolist() if rank.coord.tp == 0 else [])
        result["norms"].append(float(out.grad_norm).hex())
    result["peak_pending_bytes"] = rank.engine.reducer.peak_pending_bytes
    result["sent_bytes"] = rank.groups.cross.sent_bytes if rank.groups.cross else 0
    result["digest"] = rank.state.digest()
    arrays = {}
    for name, param in rank.state.params.items():
        moments = rank.state.moments(name)
        arrays["weights/" + name] = rank.state.master(name).cpu().numpy()
        for key in ("exp_avg", "exp_avg_sq"):
            arrays[f"{key}/{name}"] = _array(moments[key]) if moments else _array(param.detach())
    np.savez(f"{args['stem']}-{args['rank']}.npz", **arrays)
    rank.close()
    return result


def assemble(job: Job, stem: str, replica: int = 0) -> dict:
    """Assemble the whole tensors of one replica from its ranks' files."""
    infos = {i.name: i for i in describe(load_family(job.model.family), job.model, job.layout)}
    whole: dict = {}
    for rank in range(job.layout.world_size):
        coord = job.layout.coord(rank)
        if coord.replica != replica:
            continue
        with np.load(f"{stem}-{rank}.npz") as arrays:
            for key, part in arrays.items():
                info = infos[key.partition("/")[2]]
                out = whole.setdefault(key, np.full(info.shape, np.nan, part.dtype))
                rows, cols = info.local_slice(job.layout, coord)
                out[(rows, cols)[: out.ndim]] = part
    return whole


def fingerprint(arrays: dict) -> dict[str, str]:
    """Return the SHA-256 of the bytes of all weights, and of all moments."""
    out = {}
    for kind, wanted in (("weights", ("weights/",)), ("moments", ("exp_avg",))):
        digest = hashlib.sha256()
        for key in sorted(k for k in arrays if k.startswith(wanted)):
            digest.update(key.encode() + arrays[key].tobytes())
        out[kind] = digest.hexdigest()[:16]
    return out


def case_parity(args):
    """Run five steps; compare the first step's gradients and the last weights with the references."""
    rank = connect(args)
    result = {"losses": [], "norms": []}
    references = {name: np.load(path) for name, path in args["references"].items()}
    for step in range(STEPS):
        out = rank.engine.gradients(rank.batches(step))
        if step == 0:
            grads = clipped(out)
        rank.engine.update(out)
        result["losses"].append([float(x) for x in out.loss_sums])
        result["norms"].append(float(out.grad_norm))
    for name, arrays in references.items():
        result[name] = compare(rank, grads if name.endswith("grads") else rank.state.params, arrays)
    result["digest"] = rank.state.digest()
    rank.close()
    return result
