"""A plan on a screen: bars beside the terms of memory and of a step, then goodput, the bill and advice."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from rich.table import Table

from phalanx.core.errors import UserError
from phalanx.plan import explain as words
from phalanx.plan.answer import Answer
from phalanx.plan.planner import Plan
from phalanx.plan.validate import RowResult, Validation
from phalanx.run.console import PlainConsole

BAR = 30  # characters of a bar that is the whole


def print_answer(answer: Answer, explain: bool) -> None:
    plan, out = answer.plan, _Lines()
    out.line(
        f"{plan.model} ({words.count_text(plan.params)} parameters) on {plan.chips:,} x {plan.hardware}, {plan.fabric}"
    )
    low, high = words.seconds_text(plan.step_low_s), words.seconds_text(plan.step_high_s)
    rate = f"{words.count_text(plan.tokens_per_s)} tokens/s, {plan.tokens_per_s / plan.used:,.0f} per chip"
    size = words.count_text(plan.global_batch * plan.seq)
    out.table(
        [
            ["layout", words.layout_text(plan)],
            ["", words.choices_text(plan)],
            ["batch", f"{plan.global_batch:,} sequences of {plan.seq:,}: {size} tokens a step"],
            ["step", f"{words.seconds_text(plan.step_s)} (P5 {low}, P95 {high}); {rate}"],
            ["MFU", words.mfu_text(plan)],
        ]
    )
    out.head(
        f"memory of the fullest chip: {plan.memory_bytes / 1e9:.1f} of {plan.capacity_bytes / 1e9:.1f} GB, "
        f"{plan.margin:.1%} free"
    )
    out.bars(words.memory_rows(plan), explain)
    out.head(f"step: {words.seconds_text(plan.step_s)}")
    out.bars(words.step_rows(plan), explain, waterfall=True)
    out.head("failures")
    out.table([list(row) if explain else list(row[:2]) for row in words.goodput_rows(plan)])
    out.head(f"{words.count_text(plan.bill.tokens)} tokens")
    out.table([list(row) if explain else list(row[:2]) for row in words.bill_rows(plan)])
    _advice(answer, out)
    if explain:
        out.head(f"speeds and traits expected: {plan.profile}")
        out.table(words.profile_rows(answer.request.ask.profile))
        if plan.layout["precision"] in ("bf16", "fp32"):  # that the engine has
            out.head("in a job file")
            for text in words.job_lines(plan, bool(answer.request.ask.shape.tied)):
                out.line(f"  {text}" if text else "")
    out.head(
        f"{answer.considered:,} layouts, {answer.costed:,} of them costed in full and the others proven worse, "
        f"in {answer.search_s:.2f} s of CPU time"
    )
    for text in (f"predicted with: {plan.profile}", *(f"assumed: {a}" for a in answer.request.assumed)):
        out.line(text)
    out.line(f"plan {plan.hash}")


def _advice(answer: Answer, out: _Lines) -> None:
    plan = answer.plan
    out.head("what binds")
    for text in answer.binds:
        out.line(f"  {text}")
    if answer.changes:
        out.head("what would help")
        for change in answer.changes:
            out.line(f"  {words.change_text(change)}")
    if answer.second:
        out.head("why the next best lost")
        out.line(f"  {words.reason_text(plan, answer.second)}")
    if len(answer.pareto) > 1:
        out.head("less memory for more time")
        out.table([_trade(plan, p) for p in answer.pareto[1:]])
    if answer.compared:
        out.head("compared")
        for text, other in answer.compared:
            if isinstance(other, UserError):
                out.line(f"  {text} -> {other}")
                continue
            out.line(f"  {text} -> {words.layout_text(other)}; {words.choices_text(other)}")
            out.line(f"    step {words.seconds_text(other.step_s)}, {other.memory_bytes / 1e9:.1f} GB")
            out.line(f"    {words.reason_text(plan, other)}")


def _trade(plan: Plan, other: Plan) -> list[str]:
    slower = other.step_s / other.global_batch * plan.global_batch / plan.step_s - 1
    modes = f"zero {other.layout['zero']}, recompute {other.layout['recompute']}"
    return [f"{other.memory_bytes / 1e9:.1f} GB", f"{slower:+.1%} step", words.layout_text(other), modes]


class _Lines:
    """Tables fold to a terminal; a file gets one line for each row."""

    def __init__(self) -> None:
        self.console = PlainConsole()
        self.wide = self.console.is_terminal
        self.full, self.empty = ("█", "·") if "utf" in (sys.stdout.encoding or "").lower() else ("#", ".")

    def line(self, text: str) -> None:
        self.console.print(text, soft_wrap=not self.wide)

    def head(self, text: str) -> None:
        self.line("")
        self.line(text)

    def bars(self, rows: list[words.Row], explain: bool, waterfall: bool = False) -> None:
        lines, start = [], 0.0
        for name, value, share, formula in rows:
            left = round(start * BAR) if waterfall else 0
            bar = self.empty * left + self.full * max(
                1, round((start + share) * BAR) - left if waterfall else round(share * BAR)
            )
            start += share
            lines.append([name, value, f"{share:.1%}", bar, *([formula] if explain else [])])
        self.table(lines, right=(1, 2))

    def table(self, rows: list[list[str]], right: tuple[int, ...] = ()) -> None:
        if not self.wide:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                cells = [
                    c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
                ]
                self.line(("  " + "  ".join(cells)).rstrip())
            return
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        for column in range(len(rows[0])):
            table.add_column(no_wrap=not column, overflow="fold", justify="right" if column in right else "left")
        for row in rows:
            table.add_row("  " + row[0], *row[1:])
        self.console.print(table)


def as_dict(answer: Answer) -> dict[str, Any]:
    def brief(plan: Plan | None) -> dict[str, Any] | None:
        if plan is None:
            return None
        return {
            "layout": plan.layout, "global_batch": plan.global_batch, "step_s": plan.step_s, "mfu": plan.mfu["causal"],
            "memory_bytes": plan.memory_bytes, "goodput": plan.goodput["share"], "days": plan.bill.days,
            "lost_by_s": dict(words.differences(answer.plan, plan)),
        }  # fmt: skip

    return {
        "plan": answer.plan.to_json(),
        "objective": answer.request.objective,
        "runner_up": brief(answer.second),
        "pareto": [brief(p) for p in answer.pareto],
        "binds": list(answer.binds),
        "changes": [dataclasses.asdict(c) for c in answer.changes],
        "compared": [
            {"asked": text, **({"impossible": str(p)} if isinstance(p, UserError) else brief(p) or {})}
            for text, p in answer.compared
        ],
        "considered": answer.considered,
        "costed": answer.costed,
        "search_s": answer.search_s,
        "assumed": list(answer.request.assumed),
    }


def print_validation(result: Validation, rows: bool) -> None:
    out = _Lines()
    if rows:
        head = ["line", "model", "chip", "chips", "measured", "predicted", "P5", "P95", "error", "memory", "fits"]
        out.table([head, *(_run(row) for row in result.rows)])
        out.line("")
    header = ["", "rows", "median", "MAPE", "p95", "bias", "rank", "P5-P95", "left out: median", "p95"]
    for title, scores in (("kind of run", result.by_stratum), ("source", result.by_source)):
        out.line(title)
        out.table([header, *([name[:60], *_score(s)] for name, s in scores.items())], right=tuple(range(1, 10)))
        out.line("")
    out.table([header, ["all", *_score(result.total)]], right=tuple(range(1, 10)))
    for bad in result.bad:
        out.line(f"line {bad.row}: {bad.reason}")


def _run(r: RowResult) -> list[str]:
    published = words.seconds_text(r.published_s) if math.isfinite(r.published_s) else "-"
    times = [published, *(words.seconds_text(s) for s in (r.predicted_s, r.low_s, r.high_s))]
    error = f"{r.error:+.1%}" if math.isfinite(r.error) else "out of memory"
    fits = [f"{r.memory_bytes / 1e9:.0f} GB", "yes" if r.fits else "no"]
    return [str(r.row), r.model, r.chip, f"{r.gpus:,}", *times, error, *fits]


def _score(s: Any) -> list[str]:
    if not s.rows:
        return ["0", *["-"] * 8]
    rank = "-" if s.rank_correlation is None else f"{s.rank_correlation:.2f}"
    return [
        str(s.rows), f"{s.median_abs_error:.1%}", f"{s.mean_abs_error:.1%}", f"{s.p95_abs_error:.1%}", f"{s.bias:+.1%}",
        rank, f"{s.coverage:.0%}", f"{s.left_out_median:.1%}", f"{s.left_out_p95:.1%}",
    ]  # fmt: skip
