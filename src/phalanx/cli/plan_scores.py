"""Print how good the predictions are: by kind of run, by source, and in total."""

from __future__ import annotations

import math

from phalanx.cli.plan_text import Lines
from phalanx.plan.cost.numbers import numbers
from phalanx.plan.lab.validate import RowResult, Score, Validation
from phalanx.plan.report import words

HEAD = ["", "rows", "median", "MAPE", "p95", "bias", "rank", "P5-P95 covers", "shipped"]
RIGHT = tuple(range(1, len(HEAD)))


def print_validation(result: Validation, rows: bool) -> None:
    out = Lines()
    if rows:
        head = ["line", "model", "chip", "chips", "measured", "predicted", "P5", "P95", "error", "memory", "fits"]
        out.table([head, *(_run(row) for row in result.rows)])
        out.line("")
    fitted = sum(row.fitted for row in result.rows)
    out.line(
        f"{fitted} of {len(result.rows)} rows are among those that the {len(numbers())} numbers were fitted to: they "
        "are predicted with their whole source left out and everything fitted without it"
    )
    out.line("")
    for title, scores in (("kind of run", result.by_stratum), ("source", result.by_source)):
        out.line(title)
        out.table([HEAD, *([name[:60], *_score(s)] for name, s in scores.items())], right=RIGHT)
        out.line("")
    new = [["software new on such chips", *_score(result.new)]] if result.new.rows else []
    out.table([HEAD, *new, ["all", *_score(result.total)]], right=RIGHT)
    memory = result.memory
    if memory["peaks"]:
        out.line(
            f"memory: {memory['peaks']} published peaks, the prediction's middle {memory['median_error']:+.1%} off "
            f"in the median; {memory['coverage']:.0%} inside P5-P95, {memory['above_high']} above P95"
        )
    for bad in result.bad:
        out.line(f"line {bad.row}: {bad.reason}")


def _run(r: RowResult) -> list[str]:
    published = words.seconds_text(r.published_s) if math.isfinite(r.published_s) else "-"
    times = [published, *(words.seconds_text(s) for s in (r.predicted_s, r.low_s, r.high_s))]
    error = f"{r.error:+.1%}" if math.isfinite(r.error) else "out of memory"
    fits = [f"{r.memory_bytes / 1e9:.0f} GB", "yes" if r.fits else "perhaps" if r.possible else "no"]
    return [str(r.row), r.model, r.chip, f"{r.gpus:,}", *times, error, *fits]


def _score(s: Score) -> list[str]:
    if not s.rows:
        return ["0", *["-"] * (len(HEAD) - 2)]
    rank = "-" if s.rank_correlation is None else f"{s.rank_correlation:.2f}"
    return [
        str(s.rows), f"{s.median_abs_error:.1%}", f"{s.mean_abs_error:.1%}", f"{s.p95_abs_error:.1%}", f"{s.bias:+.1%}",
        rank, f"{s.coverage:.0%}", f"{s.shipped_median:.1%}",
    ]  # fmt: skip
