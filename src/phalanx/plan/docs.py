"""Writes docs/planner.md: the words of page.md with tables of how good they are, from the code and its data, so that
the page cannot fall behind them: `python -m phalanx.plan.docs` in the root of the repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path

import numpy as np

from phalanx.plan import cost, memory
from phalanx.plan.profiles import CONSTANTS, fitted
from phalanx.plan.runs import STRATA
from phalanx.plan.validate import RowResult, Score, Validation, validate

FAR = 0.20
# Why a prediction is off by more than that: (pattern of the row) -> cause. The test asks for one for each.
CAUSES = {
    r"26\.0[68].*Qwen3_30B": "from 26.06 on this model has a faster path (599 -> 936 TFLOP/s on the same GB200); its "
    "factor is one for all releases",
    r"26\.06\.01.*GPT OSS": "the table gives 943 TFLOP/s for this layout in 26.06 and 597 in 26.06.01",
    r"(25\.11|26\.02) .*Qwen3_30B.*b200": "first recipe, micro-batch 1: 9,300-9,700 tokens/s, 26,859 two releases on",
    r"25\.11.*Qwen3_30B.*h100": "half of what the release before gives for the same layout (5,275 and 10,494 tokens/s)",
    r"25\.11.*GPT OSS.*h100": "a bubble of 26 % is predicted for 8 micro-batches on 4 stages; the published step has "
    "little room for one",
    r"Qwen3_235B.*b[23]00": "micro-batch 1 on 8 stages: 391 TFLOP/s in 26.02, 878 with micro-batch 2 in 26.04",
    r"DeepSeekV3.*b200": "experts over 4 nodes: half of the predicted step is their exchange, none of it hidden",
    r"25\.11.*DeepSeekV3.*gb300": "MXFP8 gains 13 % over bf16 in this release, 30 % and more where others are fitted",
    r"deepseek_v3/pretraining.*gb200": "the table says so itself: an early, untuned recipe",
    r"MPT-30b": "122 TFLOP/s at 8,192 tokens between 160 at 4,096 and 161 of the 13b at 32,768; full memory and "
    "an allocator that retries would explain it",
    r"MPT-760m": "slower with shorter samples, against the rest of its table and the same rows on 40 GB: not the GPU",
}


def planner_page() -> str:
    folder = resources.files("phalanx.plan")
    result = validate(Path(str(folder.joinpath("published_runs.csv"))))
    return (
        folder.joinpath("page.md")
        .read_text(encoding="utf-8")
        .format(
            seconds=_table(("term", "what it is"), [(f"`{n}`", text) for n, text in cost.TERMS.items()]),
            memory=_table(("term", "what it is"), [(f"`{n}`", text) for n, text in memory.TERMS.items()]),
            constants=_table(
                ("constant", "value"), [(f"`{f.name}`", f"{getattr(CONSTANTS, f.name):g}") for f in fields(CONSTANTS)]
            ),
            rows=len(result.rows),
            possible=sum(row.fits for row in result.rows),
            far=sum(abs(row.error) > FAR for row in result.rows),
            strata=_strata(result),
            sources=_sources(result),
            scaling=_scaling(result),
            misses=_misses(result),
            peaks=_peaks(result),
            intervals=_intervals(),
        )
    )


def _strata(result: Validation) -> str:
    kinds = [(name, result.by_stratum[name]) for name in STRATA if name in result.by_stratum]
    head = (
        "kind",
        "rows",
        "median",
        "p95",
        "bias",
        "rank",
        "P5-P95 covers",
        "median, source left out",
        "p95, left out",
    )
    return _table(head, [_score(name, score) for name, score in [*kinds, ("all", result.total)]])


def _sources(result: Validation) -> str:
    head = ("source", "rows", "MAPE", "bias", "rank", "median, left out")
    rows = []
    for name, s in result.by_source.items():
        rank = "" if s.rank_correlation is None else f"{s.rank_correlation:.2f}"
        rows.append((name, str(s.rows), _share(s.mean_abs_error), _signed(s.bias), rank, _share(s.left_out_median)))
    return _table(head, rows)


def _score(name: str, s: Score) -> tuple[str, ...]:
    rank = "" if s.rank_correlation is None else f"{s.rank_correlation:.3f}"
    return (
        name, str(s.rows), _share(s.median_abs_error), _share(s.p95_abs_error), _signed(s.bias), rank,
        _share(s.coverage), _share(s.left_out_median), _share(s.left_out_p95),
    )  # fmt: skip


def _scaling(result: Validation) -> str:
    """Runs that grow with the batch, as published and as predicted, over the smallest."""
    rows = []
    dense, low = "dense bf16, complete", "fp8"
    for model, stratum in (
        ("Llama-3.1-8B", dense),
        ("Llama-3.1-70B", dense),
        ("Llama-3.1-70B", low),
        ("Nemotron4-15B", dense),
    ):
        runs = [
            r for r in result.rows if (r.model, r.chip, r.stratum) == (model, "h100", stratum) and "dgxc" in r.source
        ]
        first, *others = sorted(runs, key=lambda r: r.gpus)
        for last in others:
            measured, predicted = last.published_s / first.published_s, last.predicted_s / first.predicted_s
            grown = f"{first.gpus} -> {last.gpus:,}"
            rows.append((f"{model}, {stratum.split(',')[0]}", grown, f"{measured:.3f}", f"{predicted:.3f}"))
    return _table(("run", "GPUs", "step, measured", "step, predicted"), rows)


def cause_of(row: RowResult) -> str | None:
    about = f"{row.source} {row.model} {row.chip}"
    return next((cause for pattern, cause in CAUSES.items() if re.search(pattern, about)), None)


def _misses(result: Validation) -> str:
    far = [row for row in result.rows if abs(row.error) > FAR]
    rows = [
        (str(r.row), r.model, r.chip, _release(r.source), _signed(r.error), cause_of(r) or "not explained") for r in far
    ]
    return _table(("line", "model", "chip", "source", "error", "cause"), rows)


def _release(source: str) -> str:
    found = re.search(r"\[([^;\]]*)", source)
    return (found[1] if found else source).replace(" NeMo Container", "")[:40]


def _peaks(result: Validation) -> str:
    rows = []
    for r in result.rows:
        if r.peak_bytes:
            figures = (f"{r.peak_bytes / 1e9:.1f}", f"{r.memory_bytes / 1e9:.1f}")
            rows.append((str(r.row), r.model, str(r.gpus), *figures, _signed(r.memory_bytes / r.peak_bytes - 1)))
    return _table(("line", "model", "GPUs", "peak, GB", "predicted, GB", "error"), rows)


def _intervals() -> str:
    rows = [
        (*key.split("|"), _signed(float(np.expm1(low))), _signed(float(np.expm1(high))))
        for key, (low, high) in fitted().error.items()
    ]
    return _table(("kind", "cluster", "P5", "P95"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


if __name__ == "__main__":
    Path("docs/planner.md").write_text(planner_page(), encoding="utf-8")
