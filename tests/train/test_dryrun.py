"""A dry run that agrees with itself proves nothing: here the engine's real program, on each axis and in worlds of
thousands of ranks, must make exactly the calls that the planner counts, or plans are made for another engine."""

import dataclasses

import pytest
import torch.distributed as dist

from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import CollectivesConfig, Job, OptimizerConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.plan.cost import traffic as plan
from phalanx.train import dryrun
from phalanx.train.dryrun import dry_run

# Sizes that the degrees do not divide: rows are padded, and the vocabulary is cut unevenly.
DENSE = ModelConfig(vocab_size=101, dim=64, num_layers=2, num_heads=12, num_kv_heads=4, head_width=6, ffn_dim=171)
DEEP = dataclasses.replace(DENSE, num_layers=4)
MOE = dataclasses.replace(
    DENSE, family="moe", num_experts=6, top_k=3, expert_dim=37, shared_experts=1, dense_layers=1, num_layers=2
)
WIDE = dataclasses.replace(MOE, expert_dim=48)
BALANCED = dataclasses.replace(MOE, shared_experts=0, balance_bias=0.1)
OLMO = dataclasses.replace(DENSE, qk_norm="all", norm_place="post", attention_bias="all", ffn_bias=True)
GEMMA = dataclasses.replace(DENSE, norm_place="both", window=7, full_every=2, logit_softcap=2.0, qk_norm="head")
SHARED = dataclasses.replace(OLMO, num_kv_heads=2)
LEVELS = {"replica": "hierarchical", "shard": "hierarchical"}


def job(model=DENSE, micro=1, optimizer=None, collectives=None, train=None, **layout) -> Job:
    layout = Layout(**layout)
    batch = {"seq_len": 48, "micro_batch": 2, "precision": "bf16", "bucket_mb": 0.002}
    return Job(
        model=model,
        layout=layout,
        train=TrainConfig(global_batch=2 * micro * layout.data_ranks, **batch | (train or {})),
        optimizer=OptimizerConfig(**(optimizer or {})),
        collectives=CollectivesConfig(**(collectives or {})),
    )


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ("ZeRO-3 and TP, 16,384 ranks, the last", job(replica=64, shard=64, tp=4), -1),
    ("ZeRO-1, in the middle", job(micro=2, replica=4, shard=96, zero=1), 200),
    slow("ZeRO-2", job(micro=2, replica=4, shard=96, zero=2), 0),
    slow("one rank", job(), 0),
    ("1f1b, first stage", job(DEEP, micro=3, replica=8, pp=4, shard=64, tp=2), 0),
    slow("1f1b, middle stage", job(DEEP, micro=3, replica=8, pp=4, shard=64, tp=2), 300),
    ("1f1b, last stage", job(DEEP, micro=3, replica=8, pp=4, shard=64, tp=2), -1),
    slow("gpipe", job(DEEP, micro=2, pp=4, shard=4, schedule="gpipe"), 5),
    ("interleaved", job(DEEP, micro=2, replica=2, pp=2, shard=4, schedule="interleaved"), -1),
    (
        "interleaved, selective recomputation",
        job(DEEP, micro=2, pp=2, shard=2, schedule="interleaved", train={"recompute": "selective"}),
        -1,
    ),
    slow("interleaved, ZeRO-2", job(DEEP, micro=2, pp=2, shard=4, schedule="interleaved", zero=2), 0),
    ("interleaved-zb", job(DEEP, micro=2, pp=2, shard=4, schedule="interleaved-zb"), 0),
    ("zbv, both ends of the model", job(DEEP, micro=2, pp=2, shard=4, schedule="zbv"), 0),
    slow("zbv, the turn, ZeRO-1", job(DEEP, micro=2, pp=2, shard=4, schedule="zbv", zero=1), -1),
    ("ring", job(replica=64, shard=16, cp=4, tp=2), 3000),
    ("Ulysses, keys dealt out", job(replica=32, shard=32, cp=2, tp=2, cp_style="ulysses"), -1),
    slow("Ulysses, too few keys", job(shard=16, cp=3, tp=2, cp_style="ulysses"), 5),
    ("experts over all of a stage", job(MOE, replica=2, shard=32, cp=2, tp=2, ep=4), 77),
    slow(
        "experts, with a pipeline",
        job(dataclasses.replace(BALANCED, num_layers=3), micro=2, pp=3, shard=8, tp=2, ep=4),
        20,
    ),
    slow("experts, none of them elsewhere", job(MOE, replica=2, shard=8), 9),
    slow("experts in fp8", job(WIDE, shard=4, ep=2, train={"precision": "fp8", "seq_len": 4096}), 3),
    ("balanced experts, uneven ep", job(BALANCED, replica=2, shard=8, ep=4), 9),
    ("full recomputation", job(MOE, shard=4, cp=2, tp=2, ep=4, train={"recompute": "full"}), 3),
    slow("full recomputation, Ulysses", job(shard=4, cp=2, cp_style="ulysses", train={"recompute": "full"}), 3),
    ("selective recomputation", job(shard=4, cp=2, tp=2, train={"recompute": "selective"}), 3),
    slow("selective recomputation, experts", job(MOE, shard=4, ep=4, train={"recompute": "selective"}), 3),
    ("exact sums", job(micro=3, replica=3, shard=2, tp=2, train={"reduction": "exact"}), 5),
    slow("exact sums, ZeRO-1", job(micro=3, replica=3, shard=2, zero=1, train={"reduction": "exact"}), 5),
    slow("exact sums, experts", job(MOE, replica=2, shard=2, tp=2, train={"reduction": "exact"}), 5),
    ("8 bits across replicas", job(replica=4, shard=2, train={"compress": "int8"}), 5),
    slow("16 bits across replicas", job(replica=4, shard=2, train={"compress": "bf16"}), 5),
    ("two levels across replicas", job(replica=6, shard=2, ranks_per_node=4, collectives=LEVELS), 5),
    slow("two levels, 8 bits", job(replica=6, ranks_per_node=3, collectives=LEVELS, train={"compress": "int8"}), 5),
    slow("two levels, shards", job(MOE, shard=8, ep=2, ranks_per_node=4, collectives=LEVELS), 2),
    slow("two levels by size", job(shard=8, ranks_per_node=4, collectives={"crossover_kb": 10}), 2),
    slow(
        "two levels, exact sums",
        job(micro=3, shard=6, zero=1, ranks_per_node=3, collectives=LEVELS, train={"reduction": "exact"}),
        2,
    ),
    slow("moments in bf16", job(shard=2, optimizer={"state": "bf16"}), 0),
    slow("moments in a file", job(shard=2, optimizer={"offload": "nvme"}), 0),
    slow("fp64", job(shard=2, tp=2, train={"precision": "fp64"}), 0),
    ("a norm of all heads", job(OLMO, replica=8, shard=64, tp=4), 3),
    slow("a norm of all heads, full recomputation", job(OLMO, shard=4, tp=4, train={"recompute": "full"}), 3),
    slow("a norm of all heads, selective recomputation", job(OLMO, shard=4, tp=4, train={"recompute": "selective"}), 3),
    ("ranks that share keys", job(SHARED, shard=64, tp=4, cp=2), 3),
    slow("ranks that share keys, full recomputation", job(SHARED, shard=4, tp=4, train={"recompute": "full"}), 3),
    slow("ranks that share keys, selective", job(SHARED, shard=4, tp=4, train={"recompute": "selective"}), 3),
    slow("both norms, Ulysses", job(GEMMA, shard=4, tp=2, cp=2, cp_style="ulysses"), 3),
    slow("both norms, full recomputation", job(GEMMA, shard=4, tp=2, train={"recompute": "full"}), 3),
    slow("tied", job(dataclasses.replace(DENSE, tied=True), shard=2, tp=2), 0),
]


@pytest.mark.parametrize(("name", "case", "rank"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_the_plan_counts_what_the_program_does(name, case, rank):
    report = dry_run(case, rank % case.layout.world_size)
    assert report.differences == []
    assert report.seen.traffic or case.layout.world_size == 1, "nothing was recorded"
    assert report.text().endswith("byte by byte")
    assert not dist.is_initialized()


def test_a_wrong_plan_is_listed(monkeypatch):
    """Both ways are listed: what the plan has too much, and what it does not know of."""

    def wrong(job, coord):
        other = dataclasses.replace(job, layout=dataclasses.replace(job.layout, zero=1))
        expected = plan.expect(other, coord)
        expected.weight_bytes -= 1
        expected.add(plan.Key("all-reduce", "pp", 7), 1, 8)
        return expected

    monkeypatch.setattr(dryrun, "expect", wrong)
    report = dry_run(job(micro=2, shard=4), 1)
    kinds = [line.split(" over ")[0].split(":")[0] for line in report.differences]
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter", "weights"]
    assert "differs in 4" in report.text()


def test_a_program_that_fails_says_so(monkeypatch):
    """It also leaves nothing behind that the next dry run would trip over."""

    def broken(self, result):
        raise IndexError("no such expert")

    with monkeypatch.context() as patch:
        patch.setattr(dryrun.Engine, "update", broken)
        with pytest.raises(RunFailed, match="rank 1 fails with IndexError: no such expert"):
            dry_run(job(shard=4), 1)
    assert dry_run(job(shard=4), 1).differences == []


def test_fewer_micro_batches_on_request():
    """A run of hundreds of micro-batches must not take an hour to check."""
    report = dry_run(job(micro=64, pp=2, shard=2), 0, most_micro=3)
    assert report.job.micro_per_rank == 2  # whole rounds of the pipeline
    assert report.differences == []


@pytest.mark.parametrize(
    ("case", "rank", "field"),
    [
        (job(shard=4), 4, "rank"),
        (job(dataclasses.replace(DENSE, family="mine.py:FAMILY"), shard=4), 0, "model.family"),
        (job(tp=8), 0, "layout.tp"),
    ],
)
def test_what_cannot_be_run_is_refused(case, rank, field):
    with pytest.raises(UserError) as refused:
        dry_run(case, rank)
    assert refused.value.field == field and refused.value.remedy
    assert not dist.is_initialized()
