"""Print a plan: bars beside the terms of memory and of a step, then goodput, the bill and advice."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from rich.table import Table

from phalanx.core.errors import UserError
from phalanx.core.layout import CHUNKS
from phalanx.plan.planner import Plan
from phalanx.plan.report import words
from phalanx.plan.report.answer import Answer
from phalanx.plan.search.runnable import RUN_PRECISIONS
from phalanx.plan.settings import job_lines
from phalanx.run.console import PlainConsole

BAR = 30  # characters of a full bar


def print_answer(answer: Answer, explain: bool) -> None:
    plan, out = answer.plan, Lines()
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
        f"memory of the fullest chip: {plan.memory_bytes / 1e9:.1f} GB (P5 {plan.memory_low_bytes / 1e9:.1f}, P95 "
        f"{plan.memory_high_bytes / 1e9:.1f}) of {plan.capacity_bytes / 1e9:.1f} GB"
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
        if plan.layout["precision"] in RUN_PRECISIONS and plan.layout["schedule"] in CHUNKS:
            out.head("in a job file")
            for text in job_lines(plan):
                out.line(f"  {text}" if text else "")
    out.head(
        f"{answer.considered:,} layouts, {answer.costed:,} of them costed in full and the others proven worse, "
        f"in {answer.search_s:.2f} s of CPU time"
    )
    for text in (
        f"predicted with: {plan.profile}; {plan.evidence}",
        *(f"assumed: {a}" for a in answer.request.assumed),
    ):
        out.line(text)
    out.line(f"plan {plan.hash}")


def _advice(answer: Answer, out: Lines) -> None:
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


class Lines:
    """A printer of lines, bars and tables. A terminal folds tables; a file gets one line per row."""

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
            "layout": plan.layout, "global_batch": plan.global_batch, "step_s": plan.step_s, "mfu": plan.mfu["full"],
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
