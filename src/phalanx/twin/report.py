"""Report a simulation as one self-contained page: the answer first, then where the time went, how much luck matters,
and what happened when."""

from __future__ import annotations

from html import escape

from phalanx.plan.report.html import STYLE
from phalanx.twin.assumed import DAY_S
from phalanx.twin.seeds import Result
from phalanx.twin.spent import PARTS

WIDTH, BAR = 860, 26
COLOURS = dict(zip(PARTS, ("c2", "c1", "c4", "c3", "c5", "c6", "c7", "c0"), strict=True))
MEANING = {
    "productive": "steps that count", "checkpoint": "standing still for checkpoints", "lost": "work done again",
    "detect": "nobody knew yet", "restart": "deciding, starting, forming groups, loading",
    "straggler": "steps that were slow", "degraded": "replicas that were missing", "waiting": "no node was left",
}  # fmt: skip


def page(results: list[Result], tables: list[tuple[str, list[list[str]]]] | None = None) -> str:
    """Render the page. `tables`: titles and rows of additional results."""
    first = results[0]
    s = first.scenario
    sections = [
        f"<h1>{escape(s.name)}</h1><p>{escape(s.about)}</p>",
        _tiles(first),
        "<h2>Where the time of the GPUs went</h2>",
        _legend(),
        *(_bar(result) for result in results),
        "<h2>In GPU-hours and money</h2>",
        _costs(first),
        "<h2>Luck: every dot is a fleet with its own failures</h2>",
        _dots(results),
        *(_table(title, rows) for title, rows in tables or ()),
        "<h2>What failed, seed 0</h2>",
        _causes(first),
        f"<h2>When: {_shown(first)}, one line each</h2>",
        _timeline(first),
        f"<p class=dim>seed 0: digest {first.outcomes[0].digest}. Rates and durations: docs/twin.md</p>",
    ]
    screen = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<meta charset=utf-8>{screen}<title>{escape(s.name)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(sections)}</body></html>"


def _tiles(result: Result) -> str:
    s = result.scenario
    cells = [
        (f"{result.effective:.1%}", "effective training time"),
        (f"{result.quantile(0.05):.1%} to {result.quantile(0.95):.1%}", "nine seeds in ten"),
        (f"{result.interruptions:,.0f}", f"interruptions in {s.days:g} days"),
        (f"{s.gpus:,}", "GPUs"),
        (f"{result.spares_used} of {result.spares()['nodes']:,}", "spare nodes used, 95 % of seeds"),
    ]
    tiles = "".join(f"<div class=tile><b>{value}</b>{escape(text)}</div>" for value, text in cells)
    return f"<div class=tiles>{tiles}</div>"


def _table(title: str, rows: list[list[str]]) -> str:
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<h2>{escape(title)}</h2><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _legend() -> str:
    items = (f'<span><i style="background: var(--{COLOURS[p]})"></i>{p}: {MEANING[p]}</span>' for p in PARTS)
    return f"<div class=legend>{''.join(items)}</div>"


def _bar(result: Result) -> str:
    x, boxes = 0.0, []
    for part, share in result.waterfall.items():
        width = share * WIDTH
        text = f"<title>{part} {share:.2%}</title>"
        boxes.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="{BAR}" fill="var(--{COLOURS[part]})">{text}</rect>'
        )
        x += width
    title = f"{escape(result.scenario.name)}: {result.effective:.2%}"
    return f'<h3>{title}</h3><svg viewBox="0 0 {WIDTH} {BAR}" role=img aria-label="{title}">{"".join(boxes)}</svg>'


def _costs(result: Result) -> str:
    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    rows = ["<tr><td></td><td>share</td><td>GPU-hours</td><td>dollars</td><td>kWh</td><td>kg CO2</td></tr>"]
    for part, cost in result.costs().items():
        cells = "".join(f"<td>{cell(cost[key])}</td>" for key in ("gpu_hours", "dollars", "kwh", "kg_co2"))
        rows.append(f"<tr><td>{part}</td><td>{result.waterfall[part]:.2%}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _dots(results: list[Result]) -> str:
    values = [o.effective for result in results for o in result.outcomes]
    low, high = min(values) - 0.005, max(values) + 0.005
    parts = []
    for row, result in enumerate(results):
        y = 16 + 26 * row
        for o in result.outcomes:
            x = (o.effective - low) / (high - low) * (WIDTH - 20) + 10
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="var(--c0)" opacity=".6">'
                f"<title>seed {o.seed}: {o.effective:.2%}</title></circle>"
            )
    height = 26 * len(results) + 22
    parts.append(
        f'<text x="0" y="{height - 2}" class=dim>{low:.1%}</text>'
        f'<text x="{WIDTH - 50}" y="{height - 2}" class=dim>{high:.1%}</text>'
    )
    name = "effective training time by seed"
    return f'<svg viewBox="0 0 {WIDTH} {height}" role=img aria-label="{name}">{"".join(parts)}</svg>'


def _causes(result: Result) -> str:
    counts = sorted(result.outcomes[0].causes.items(), key=lambda row: -row[1])
    rows = "".join(f"<tr><td>{escape(what)}</td><td>{count:,}</td></tr>" for what, count in counts)
    return f"<table>{rows}</table>"


def _shown(result: Result) -> str:
    first = result.outcomes[0]
    shown, total = len(first.incidents), sum(first.causes.values())
    return f"{'all' if shown == total else f'the first {shown:,} of'} {total:,} failures of seed 0"


def _timeline(result: Result) -> str:
    whole = result.scenario.days * DAY_S
    lines = []
    for at, what, decided in result.outcomes[0].incidents:
        x = at / whole * WIDTH
        text = escape(f"day {at / DAY_S:.2f}: {what}. {decided[:200]}")
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="38" stroke="var(--c4)" opacity=".6">'
            f"<title>{text}</title></line>"
        )
    axis = f'<line x1="0" x2="{WIDTH}" y1="40" y2="40" class=axis />'
    last = f'<text x="{WIDTH - 60}" y="56" class=dim>day {result.scenario.days:g}</text>'
    ends = f'<text x="0" y="56" class=dim>day 0</text>{last}'
    return f'<svg viewBox="0 0 {WIDTH} 60" role=img aria-label="failures over time">{"".join(lines)}{axis}{ends}</svg>'
