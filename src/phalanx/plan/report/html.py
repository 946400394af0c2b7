"""Render the plan as one self-contained page: memory bar, waterfall of a step, pipeline, scaling curve, and the plan's
figures."""

from __future__ import annotations

from html import escape

from phalanx.plan.planner import Plan
from phalanx.plan.report import svg, words
from phalanx.plan.report.answer import Answer, sizes
from phalanx.plan.report.timeline import DRAWN, play

MOST_RANKS, MOST_MICRO, MOST_CHUNKS = 8, 24, 3  # of a pipeline in the picture
CHUNKED = (("forward", "darker: later chunks of the model"),)
STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5d6878; --page: #ffffff; --trough: #eef1f5; --line: #c9d0da;
  --c0: #3b6fd4; --c1: #58a4b0; --c2: #7bb662; --c3: #e0a93b; --c4: #d9703f; --c5: #b8477a; --c6: #7d57c1;
  --c7: #8a94a6; --c8: #4a7a5c; --on: #ffffff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #98a3b3; --page: #14181f; --trough: #222933;
  --line: #3a4453; --c0: #6d9bf1; --c1: #6fc3d0; --c2: #96cf7c; --c3: #f0c060; --c4: #ee8f5f; --c5: #d874a2;
  --c6: #a284e0; --c7: #a3adbd; --c8: #74ad8b; --on: #10141a } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 900px;
  margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem }
h3 { font-size: .9rem; font-weight: 500; color: var(--dim); margin: .8rem 0 .2rem }
p { margin: .2rem 0 } .dim { color: var(--dim); fill: var(--dim) }
svg { width: 100%; height: auto; overflow: visible } text { font-size: 13px; fill: var(--ink) }
text.dim { fill: var(--dim) } text.number { fill: var(--on); font-size: 10px; pointer-events: none }
.picture { overflow-x: auto } .legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; color: var(--dim) }
.legend i { display: inline-block; width: 1.1rem; height: .7rem; margin-right: .4rem; border-radius: 2px }
i.forward { background: var(--c0) } i.backward { background: var(--c4) } i.idle { background: var(--trough) }
i.plan { background: var(--c0); height: .2rem } i.proportion { border-top: 2px dashed var(--dim); height: 0 }
i.limit-line { border-top: 2px dashed var(--c4); height: 0 } i.term { background: var(--c0) }
@media (max-width: 640px) { body { margin: 1rem auto; font-size: 16px } svg { min-width: 600px }
  table, tbody, tr, td { display: block } td:first-child { margin-top: .6rem } .tile { flex: 1 1 40% } }
.trough { fill: var(--trough) } .limit { stroke: var(--c4); stroke-width: 2; stroke-dasharray: 4 3 }
.axis { stroke: var(--line) } .curve { fill: none; stroke: var(--c0); stroke-width: 2.5 }
.ideal { fill: none; stroke: var(--dim); stroke-dasharray: 5 4 }
table { border-collapse: collapse; width: 100% } td { padding: .2rem .8rem .2rem 0; vertical-align: top }
td:first-child { color: var(--dim); white-space: nowrap } td:nth-child(2) { font-variant-numeric: tabular-nums }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.2rem }
.tile { background: var(--trough); border-radius: 8px; padding: .7rem 1rem; min-width: 7.5rem }
.tile b { display: block; font-size: 1.25rem }
"""


def page(answer: Answer) -> str:
    plan = answer.plan
    sections = [
        f"<h1>{escape(plan.model)} on {plan.chips:,} x {escape(plan.hardware)}</h1>",
        f"<p>{escape(words.layout_text(plan))}</p><p class=dim>{escape(words.choices_text(plan))}</p>",
        _tiles(plan),
        _memory(answer),
        f"<h2>A step: {words.seconds_text(plan.step_s)} (P5 {words.seconds_text(plan.step_low_s)}, P95 "
        f"{words.seconds_text(plan.step_high_s)})</h2>",
        svg.legend([("term", "a term of the step, beginning where the one before ended")]),
        svg.waterfall([(name, value, share) for name, value, share, _ in words.step_rows(plan)]),
        _pipeline(plan),
        _scaling(answer),
        "<h2>Failures</h2>" + _table([list(row) for row in words.goodput_rows(plan)]),
        f"<h2>{words.count_text(plan.bill.tokens)} tokens</h2>" + _table([list(row) for row in words.bill_rows(plan)]),
        "<h2>What binds</h2>" + _paragraphs(list(answer.binds)),
        "<h2>What would help</h2>" + _paragraphs([words.change_text(c) for c in answer.changes] or ["nothing tried"]),
    ]  # fmt: skip
    if answer.second:
        sections.append("<h2>Why the next best lost</h2>" + _paragraphs([words.reason_text(plan, answer.second)]))
    foot = f"plan {plan.hash}; {answer.considered:,} layouts; {escape(plan.profile)}; {escape(plan.evidence)}"
    sections.append(f"<p class=dim>{foot}</p>")
    title = escape(f"{plan.model} on {plan.chips:,} {plan.hardware}")
    screen = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{screen}<title>{title}</title>'
    body = "".join(sections)
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n"


def _tiles(plan: Plan) -> str:
    money = plan.bill.dollars
    tiles = [
        (f"{plan.mfu['full']:.1%}", "MFU, as a run prints it"),
        (f"{words.count_text(plan.tokens_per_s)}/s", "tokens"),
        (f"{plan.goodput['share']:.1%}", "goodput"),
        (f"{plan.bill.days:,.1f}", f"days (P95 {plan.bill_high.days:,.1f})"),
        ("-" if money is None else f"${words.count_text(money)}", "rent"),
        ("-" if plan.bill.mwh is None else f"{plan.bill.mwh:,.0f} MWh", "energy"),
    ]
    return "<div class=tiles>" + "".join(f"<div class=tile><b>{a}</b>{b}</div>" for a, b in tiles) + "</div>"


def _memory(answer: Answer) -> str:
    plan = answer.plan
    parts = [(name, value, share) for name, value, share, _ in words.memory_rows(plan)]
    high = plan.memory_high_bytes / plan.capacity_bytes
    title = f"Memory: {plan.memory_bytes / 1e9:.1f} of {plan.capacity_bytes / 1e9:.1f} GB on the fullest chip"
    note = svg.legend([("limit-line", f"P95: {plan.memory_high_bytes / 1e9:.1f} GB, which has to fit")])
    return f"<h2>{title}</h2>{note}" + svg.memory_bar(parts, min(high, 1.0))


def _pipeline(plan: Plan) -> str:
    at = plan.layout
    if at["pp"] == 1:
        return "<h2>Pipeline</h2><p class=dim>none: every rank holds all layers</p>"
    ranks, micro = min(at["pp"], MOST_RANKS), min(plan.micro_batches, MOST_MICRO)
    if at["schedule"] not in DRAWN:
        return f"<h2>Pipeline</h2><p class=dim>{escape(at['schedule'])} is not drawn</p>"
    micro = max(ranks, micro // ranks * ranks) if at["schedule"] == "interleaved" else micro
    chunks = min(at["vpp"], MOST_CHUNKS)
    whole = (ranks, micro, chunks) == (at["pp"], plan.micro_batches, at["vpp"])
    drawn = f"drawn with {ranks} of {at['pp']} ranks, {micro} of {plan.micro_batches} micro-batches"
    note = "" if whole else f"<p class=dim>{drawn}, {chunks} of {at['vpp']} chunks</p>"
    blocks = play(at["schedule"], ranks, chunks, micro)
    title = f"Pipeline: {at['schedule']}, bubble {plan.seconds['bubble'] / plan.step_s:.1%} of the step"
    key = svg.legend([("forward", "forward"), ("backward", "backward"), ("idle", "idle"), *CHUNKED[: chunks > 1]])
    return f"<h2>{escape(title)}</h2>{note}{key}" + svg.pipeline(blocks, ranks, chunks)


def _scaling(answer: Answer) -> str:
    points = [(float(chips), figures["tokens_per_s"]) for chips, figures in sizes(answer.request)]
    if len(points) < 2:
        return ""
    title = "<h2>Tokens per second by number of chips</h2>"
    note = "<p class=dim>the best layout for each size with the same batch, failures included</p>"
    key = svg.legend([("plan", "predicted"), ("proportion", "in proportion to the smallest")])
    pictures = [
        f"<h3>{name}</h3>" + svg.curve(points, float(answer.plan.chips), "tokens/s", log)
        for name, log in (("Linear", False), ("Logarithmic", True))
    ]
    return title + note + key + "".join(pictures)


def _table(rows: list[list[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _paragraphs(texts: list[str]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in texts)
