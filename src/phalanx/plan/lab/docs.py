"""Write docs/planner.md, docs/how-wrong.md and docs/plans-and-teams.md: the pages beside this file, with tables filled
in from the code and its data so that they cannot fall behind. Run `python -m phalanx.plan.lab.docs` in the root of the
repository."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost import evaluate, rank_bytes
from phalanx.plan.cost.chip import CLAMPED
from phalanx.plan.cost.intervals import MEMORY, UNKNOWN_CHIP, memory_interval
from phalanx.plan.cost.numbers import exceptions, fitted, numbers, values
from phalanx.plan.cost.profiles import FUSED, GENERATIONS
from phalanx.plan.lab.columns import RunTable
from phalanx.plan.lab.fit import STEP
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.lab.runs import STRATA
from phalanx.plan.lab.validate import LeftOut, Score, Validation, validate

FAR = 0.20
SHARE = 0.02  # of a step: a run supports a term that makes up at least this much
MOVED = 0.1  # slope of ln(step) by ln(number): 1 % for 10 %


def planner_page() -> str:
    runs, _ = read_runs(packaged(), load_packaged())
    table = RunTable.of(runs)
    costs = table.evaluate(values())
    supported = {
        name: np.bincount(table.owner, table.weight * seconds / costs.step_s, len(runs))
        for name, seconds in costs.seconds.items()
    }
    terms = [(f"`{n}`", what, str(int((supported[n] >= SHARE).sum()))) for n, what in evaluate.TERMS.items()]
    here = table.log_step(values())
    rows = []
    for number in numbers():
        value = values()[number.name]
        slope = (table.log_step(values() | {number.name: value * np.exp(STEP)}) - here) / STEP
        bounds = f"{number.low:g} to {number.high:g}"
        moved = str(int((np.abs(slope) >= MOVED).sum()))
        rows.append(
            (f"`{number.name}`", f"{value:.3g}", f"{number.prior:g}", bounds, moved, number.what, number.source)
        )
    return _page("planner.md").format(
        seconds=_table(("term", "what it is", "rows"), terms),
        memory=_table(("term", "what it is"), [(f"`{n}`", what) for n, what in rank_bytes.TERMS.items()]),
        count=len(numbers()),
        rows=len(runs),
        exceptions=_table(("share", "why"), list(exceptions().items())),
        numbers=_table(("number", "value", "prior", "bounds", "rows", "what it is", "source"), rows),
        assumed=(
            f"fused experts keep {FUSED:g} of their passes; biased and clamped ones (gpt-oss) have {CLAMPED:g} times "
            "the passes of plain ones."
        ),
    )


def wrong_page() -> str:
    result, left = validate(), LeftOut.read()
    far_error = np.abs(np.expm1(-left.errors[False]))
    peaks = [row for row in result.rows if row.peak_bytes]
    memory = result.memory
    seen = {name.split(" on ")[1] for name in fitted()["seen"]}
    chips = {chip for generation in seen for chip in GENERATIONS.get(generation, ())}
    return _page("how-wrong.md").format(
        sources=len(result.by_source),
        count=len(numbers()),
        rows=len(result.rows),
        median=_share(result.median_abs_error),
        p95=_share(result.p95_abs_error),
        coverage=_share(result.total.coverage),
        far_median=_share(float(np.median(far_error))),
        far_p95=_share(float(np.quantile(far_error, 0.95))),
        far_coverage=_share(left.publisher_coverage()),
        far=sum(abs(row.error) > FAR for row in result.rows),
        strata=_scores("kind", {name: result.by_stratum[name] for name in STRATA if name in result.by_stratum}),
        by_source=_scores("source", result.by_source),
        intervals=_intervals(),
        unknown=_signed(float(np.expm1(UNKNOWN_CHIP))),
        possible=sum(row.possible for row in result.rows),
        inside=round(memory["coverage"] * memory["peaks"]),
        peaks=memory["peaks"],
        above=memory["above_high"],
        peak_rows=_table(
            ("line", "model", "chips", "software", "peak, GB", "predicted, GB", "P5", "P95"),
            [
                (
                    str(r.row), r.model, str(r.gpus), r.engine, f"{(r.peak_bytes or 0) / 1e9:.1f}",
                    *(f"{size / 1e9:.1f}" for size in (r.memory_bytes, r.memory_low_bytes, r.memory_high_bytes)),
                )
                for r in peaks
            ],
        ),
        memory_low=_signed(float(np.expm1(MEMORY[0]))),
        memory_high=_signed(float(np.expm1(MEMORY[1]))),
        own_low=_signed(float(np.expm1(memory_interval("phalanx")[0]))),
        own_high=_signed(float(np.expm1(memory_interval("phalanx")[1]))),
        scaling=_scaling(result),
        misses=_misses(result),
        unseen=", ".join(sorted(chip for chip in load_packaged().chips if chip not in chips)),
    )  # fmt: skip


def _page(name: str) -> str:
    return resources.files("phalanx.plan.lab").joinpath(name).read_text(encoding="utf-8")


def _scores(title: str, scores: dict[str, Score]) -> str:
    head = (title, "rows", "median", "MAPE", "p95", "bias", "rank", "P5-P95 covers", "shipped")
    rows = []
    for name, s in scores.items():
        rank = "" if s.rank_correlation is None else f"{s.rank_correlation:.2f}"
        rows.append((
            name, str(s.rows), _share(s.median_abs_error), _share(s.mean_abs_error), _share(s.p95_abs_error),
            _signed(s.bias), rank, _share(s.coverage), _share(s.shipped_median),
        ))  # fmt: skip
    return _table(head, rows)


def _scaling(result: Validation) -> str:
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


def _misses(result: Validation) -> str:
    rows = [
        (str(r.row), r.model, f"{r.gpus:,} x {r.chip}", r.engine, _release(r.source), _signed(r.error))
        for r in result.rows
        if abs(r.error) > FAR
    ]
    return _table(("line", "model", "chips", "software", "source", "error"), rows)


def _release(source: str) -> str:
    found = re.search(r"\[([^;\]]*)", source)
    return (found[1] if found else source).replace(" NeMo Container", "")[:40]


def _intervals() -> str:
    rows = [
        (*key.split(", "), _signed(float(np.expm1(low))), _signed(float(np.expm1(high))))
        for key, (low, high) in fitted()["errors"].items()
    ]
    return _table(("kind", "software on such chips", "P5", "P95"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def main() -> None:
    from phalanx.plan.lab.teams import teams_page

    for name, text in (("planner", planner_page()), ("how-wrong", wrong_page()), ("plans-and-teams", teams_page())):
        Path(f"docs/{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
