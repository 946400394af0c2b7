"""Reading published runs: the facts of a row, what it leaves open, and its errors."""

import csv
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.hardware import load
from phalanx.plan.lab.prose import facts
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.lab.runs import COLUMNS, FACTS
from phalanx.plan.lab.validate import validate

CATALOGUE = load()
ROW = {
    "source": "somebody's table", "model": "Llama-3.1-70B", "params_b": "70.6", "layers": "80", "hidden": "8192",
    "heads": "64", "kv_heads": "8", "ffn": "28672", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB-SXM",
    "num_gpus": "64", "tp": "4", "pp": "4", "vpp": "5", "cp": "2", "ep": "1", "dp": "2", "zero_stage": "1",
    "micro_batch": "1", "global_batch": "128", "precision": "bf16", "recompute": "none", "tflops_per_gpu": "",
    "mfu": "", "tokens_per_s_per_gpu": "", "step_time_s": "14.66", "notes": "",
}  # fmt: skip


def table(tmp_path: Path, *rows: dict, columns=COLUMNS) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(ROW | row for row in rows)
    return path


def one(tmp_path: Path, **row):
    runs, bad = read_runs(table(tmp_path, row), CATALOGUE)
    assert not bad, bad
    return runs[0]


def test_a_complete_row_leaves_nothing_open(tmp_path):
    run = one(tmp_path)
    assert len(run.options) == 1 and run.stratum == "dense bf16, complete" and run.step_s == 14.66
    assert run.options[0].layout["shard"] == 2 and run.cluster.num_chips == 64
    assert float(run.shape.params) / 1e9 == pytest.approx(70.6, rel=0.01)


def test_the_step_from_the_figure_that_is_given(tmp_path):
    """14.66 s are 1,117.6 tokens/s and GPU, and 54.3 % of 989 TFLOP/s with attention in full."""
    rate = one(tmp_path, step_time_s="", tokens_per_s_per_gpu="1117.6")
    mfu = one(tmp_path, step_time_s="", mfu="0.5432", notes="MFU uses FULL attention FLOPs")
    tflops = one(tmp_path, step_time_s="", tflops_per_gpu="537.2", notes="full-attention FLOPs")
    for run in (rate, mfu, tflops):
        assert run.step_s == pytest.approx(14.66, rel=0.015)
    assert one(tmp_path, step_time_s="", mfu="54.32%").step_s == pytest.approx(mfu.step_s)


def test_conventions_differ_as_the_notes_say(tmp_path):
    def took(notes: str, **row: str) -> float:
        return one(tmp_path, step_time_s="", tflops_per_gpu="500", notes=notes, **row).step_s

    full = took("full-attention FLOPs")
    assert took("model FLOPs with CAUSAL-halved attention") < full == took("FULL (non-causal) attention")
    assert took("6N") < full
    assert took("hardware-FLOP convention", recompute="full") > 1.1 * full


def test_columns_win_over_words(tmp_path):
    """In a table with the fact columns, only these are read."""
    columns = (*COLUMNS, *FACTS)
    row = {"software": "nemo", "flops": "causal", "graphs": "full", "notes": "torchtitan, eager, full-attention FLOPs"}
    (run,), bad = read_runs(table(tmp_path, row, columns=columns), CATALOGUE)
    assert not bad and run.engine == "nemo" and run.software.graphs == "full" and run.software.fused
    (words,), _ = read_runs(table(tmp_path, {"notes": row["notes"]}), CATALOGUE)
    assert words.engine == "torchtitan" and not words.software.fused


def test_words_become_columns_once():
    """Facts come from the prose, and from the recipe in NVIDIA's container release for a model on a chip."""
    old = {"source": "Megatron-Bridge [26.04 NeMo Container; x]", "model": "Qwen3_30B_a3B", "gpu": "GB200",
           "precision": "MXFP8", "notes": "MoE 128 experts top-8; CAUSAL-halved"}  # fmt: skip
    now = facts(dict.fromkeys(COLUMNS, "") | old)
    then = facts(dict.fromkeys(COLUMNS, "") | old | {"source": old["source"].replace("26.04", "26.06")})
    assert now["software"] == "nemo" and now["release"] == "26.04" and now["flops"] == "causal"
    assert (now["graphs"], now["fused_experts"]) == ("partial", "") and now["experts"] == "128"
    assert (then["graphs"], then["fused_experts"], then["overlaps_ep"]) == ("full", "yes", "yes")


def test_a_table_of_words_alone_reads_like_the_packaged_one(tmp_path):
    """A file with only the 28 columns and prose gives the same runs."""
    with packaged().open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    own, _ = read_runs(packaged(), CATALOGUE)
    words, bad = read_runs(table(tmp_path, *rows), CATALOGUE)
    assert not bad
    for one, other in zip(own, words, strict=True):
        assert one == other, one.row


def test_the_packaged_table_has_columns_for_all_facts():
    with packaged().open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        assert set(reader.fieldnames or ()) == {*COLUMNS, *FACTS}
        assert all(row["software"] for row in reader)


def test_what_is_missing_is_marginalised(tmp_path):
    run = one(tmp_path, vpp="", micro_batch="", recompute="", zero_stage="")
    kinds = {key: {o.layout[key] for o in run.options} for key in ("vpp", "micro_batch", "recompute", "zero")}
    assert kinds == {
        "vpp": {1, 2, 4, 5, 10},
        "micro_batch": {1, 2, 4},
        "recompute": {"none", "selective", "full"},
        "zero": {0, 1},
    }
    assert run.stratum == "dense bf16, incomplete"


def test_paxml_is_no_nemo(tmp_path):
    """NVIDIA/dgxc-benchmarking has recipes of both; what XLA compiles is closest to MaxText."""
    assert one(tmp_path, source="NVIDIA/dgxc-benchmarking paxml/README_175b.md").engine == "maxtext"
    assert one(tmp_path, source="NVIDIA/dgxc-benchmarking llama3.1/README.md").engine == "nemo"


def test_experts_are_read_from_the_notes(tmp_path):
    run = one(
        tmp_path,
        model="x",
        params_b="",
        ffn="1024",
        tp="1",
        pp="1",
        vpp="",
        cp="1",
        ep="8",
        dp="64",
        notes="MoE 64 experts top-4",
    )
    assert (run.shape.experts, run.shape.top_k, run.shape.expert_ffn) == (64, 4, 1024) and run.stratum == "MoE"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("A100-SXM4-40GB", "a100-40"), ("A100-80GB 400W", "a100-80"), ("NVIDIA GB200 NVL72", "gb200"), ("B200", "b200"),
        ("TPU v5 lite", "tpu-v5e"), ("TPU v5p-512", "tpu-v5p"), ("H200-141GB-SXM", "h200"), ("AMD MI300X", "mi300x"),
        ("H100-96GB-HBM2e 500W", "h100-hbm2e"), ("H100-80GB-SXM", "h100"), ("A800-80GB", "a800"),
    ],
)  # fmt: skip
def test_chips_by_what_people_call_them(tmp_path, said, meant):
    assert one(tmp_path, gpu=said).chip == meant


def test_slices_and_groups_of_sharding(tmp_path):
    run = one(tmp_path, tp="1", pp="1", vpp="", cp="1", dp="64", zero_stage="3", notes="FSDP=16 then DP across")
    assert {(o.layout["shard"], o.layout["replica"]) for o in run.options} == {(16, 4)}
    tpu = one(
        tmp_path,
        gpu="TPU v5p",
        tp="",
        pp="",
        vpp="",
        cp="",
        dp="",
        micro_batch="",
        recompute="",
        zero_stage="",
        notes="2 slice(s)",
    )
    assert {o.layout["replica"] for o in tpu.options} == {2} and len({o.layout["tp"] for o in tpu.options}) > 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"gpu": "H10"}, "H10"),
        ({"gpu": ""}, "gpu is empty"),
        ({"num_gpus": ""}, "num_gpus is empty"),
        ({"num_gpus": "many"}, "num_gpus = 'many' is no number"),
        ({"num_gpus": "-8"}, "num_gpus = '-8' is not a sensible number"),
        ({"tp": "2.5"}, "tp = '2.5' is not a whole number"),
        ({"layers": "0"}, "layers = '0' is not a sensible number"),
        ({"zero_stage": "9"}, "zero_stage = '9' is none of 0, 1, 2, 3"),
        ({"precision": "int3"}, "precision = 'int3' is none of"),
        ({"recompute": "banana"}, "recompute = 'banana' is none of"),
        ({"tp": "3"}, "does not divide 64 GPUs"),
        ({"micro_batch": "100"}, "is more than global_batch 128"),
        ({"step_time_s": ""}, "to compare with"),
        ({"step_time_s": "nan"}, "not a sensible number"),
        ({"model": "x", "layers": "", "params_b": ""}, "the sizes of 'x'"),
    ],
)
def test_a_bad_row_says_why_and_the_others_are_read(tmp_path, row, reason):
    runs, bad = read_runs(table(tmp_path, {}, row, {}), CATALOGUE)
    assert len(runs) == 2 and [b.row for b in bad] == [3] and reason in bad[0].reason


def test_a_bad_file_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="no column notes"):
        validate(table(tmp_path, {}, columns=COLUMNS[:-1]))
    with pytest.raises(UserError, match="cannot be read"):
        validate(tmp_path / "nowhere.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError):
        validate(tmp_path / "bytes.csv")
    with pytest.raises(UserError, match="no row can be used"):
        validate(table(tmp_path, {"gpu": "H10"}))


def test_a_table_nobody_has_seen(tmp_path):
    """Other sources, chips and gaps give sane figures, and none is missing."""
    rows = [
        {"gpu": "MI300X", "source": "a blog"}, {"gpu": "H200", "precision": "fp8", "step_time_s": "8"},
        {"gpu": "Gaudi3", "step_time_s": "20"}, {"gpu": "NVIDIA GH200 96GB", "vpp": "", "micro_batch": ""},
        {"gpu": "B200", "model": "Mixtral-8x22B", "layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn": "",
         "vocab": "", "params_b": "", "seq_len": "4096", "tp": "2", "pp": "4", "vpp": "", "cp": "1", "ep": "8",
         "step_time_s": "5"},
        {"gpu": "A100-80GB", "notes": "OOM", "step_time_s": ""},
    ]  # fmt: skip
    result = validate(table(tmp_path, *rows))
    assert not result.bad and len(result.rows) == 6
    assert all(0.05 < row.predicted_s < 500 and row.low_s < row.predicted_s < row.high_s for row in result.rows)
    figures = result.to_json()
    assert figures["rows"] == 6 and set(figures["by_source"]) == {"a blog", "somebody's table"}
    assert {"median_abs_error", "p95_abs_error", "bias", "rank_correlation", "coverage"} <= set(figures)
