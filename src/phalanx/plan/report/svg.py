"""Draw a plan as SVG: bars, a waterfall, a pipeline, curves. The shapes take their colours from the page's variables,
so that they look right on light and dark pages."""

from __future__ import annotations

import math
from html import escape

from phalanx.plan.report.timeline import Block

WIDTH = 880
HUES = 9  # colours --c0 .. --c8 of the page


def _svg(height: float, parts: list[str], label: str) -> str:
    body = "".join(parts)
    picture = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{body}</svg>'
    return f"<div class=picture>{picture}</div>"


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _box(x: float, y: float, w: float, h: float, colour: int, tip: str, css: str = "") -> str:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.5):.1f}" height="{h:.1f}" rx="2"'
    return f'<rect {shape} fill="var(--c{colour % HUES})" class="{css}"><title>{escape(tip)}</title></rect>'


def memory_bar(parts: list[tuple[str, str, float]], limit: float) -> str:
    """Draw one bar of stacked terms (name, value, share of the chip's memory), a line at `limit`, and a legend."""
    left, wide, shapes, x = 0.0, float(WIDTH), [], 0.0
    shapes.append(f'<rect x="0" y="0" width="{WIDTH}" height="46" rx="4" class="trough"/>')
    for i, (name, value, share) in enumerate(parts):
        shapes.append(_box(left + x * wide, 0, share * wide, 46, i, f"{name}: {value}"))
        x += share
    shapes.append(f'<line x1="{limit * wide:.1f}" y1="-4" x2="{limit * wide:.1f}" y2="50" class="limit"/>')
    per_row = 4
    for i, (name, value, _) in enumerate(parts):
        column, row = i % per_row, i // per_row
        at, y = column * wide / per_row, 74 + 24 * row
        shapes.append(_box(at, y - 11, 12, 12, i, name))
        shapes.append(_text(at + 18, y, f"{name} {value}"))
    return _svg(74 + 24 * math.ceil(len(parts) / per_row), shapes, "memory by term")


def waterfall(rows: list[tuple[str, str, float]]) -> str:
    """Draw a row for each term, starting where the previous one ended."""
    left, wide, line = 110.0, WIDTH - 230.0, 24
    shapes, x = [], 0.0
    for i, (name, value, share) in enumerate(rows):
        y = i * line
        shapes.append(_text(left - 10, y + 16, name, "end"))
        shapes.append(_box(left + x * wide, y + 3, share * wide, line - 6, i, f"{name}: {value}, {share:.1%}"))
        shapes.append(_text(left + (x + share) * wide + 8, y + 16, f"{value}  {share:.1%}", css="dim"))
        x += share
    return _svg(len(rows) * line + 4, shapes, "seconds of a step by term")


def legend(entries: list[tuple[str, str]]) -> str:
    """Explain the colours and lines of a picture, given as (CSS class, words)."""
    items = "".join(f'<span><i class="{mark}"></i>{escape(text)}</span>' for mark, text in entries)
    return f"<p class=legend>{items}</p>"


def pipeline(blocks: list[Block], ranks: int, chunks: int) -> str:
    """Draw ranks downwards and time to the right, with one colour for forward, another for backward, and a shade for
    each chunk."""
    left, line = 60.0, 22 if ranks <= 16 else 14
    end = max(block.end for block in blocks)
    wide = (WIDTH - left - 4) / end
    shapes = [_text(left - 10, rank * line + 15, f"rank {rank}", "end", "dim") for rank in range(ranks)]
    for rank in range(ranks):
        shapes.append(
            f'<rect x="{left}" y="{rank * line + 2}" width="{WIDTH - left - 4}" height="{line - 4}" class="trough"/>'
        )
    for b in blocks:
        tip = f"{'backward' if b.backward else 'forward'} of micro-batch {b.micro}" + (
            f", chunk {b.chunk}" if chunks > 1 else ""
        )
        x, w = left + b.start * wide, (b.end - b.start) * wide - 0.6
        part = _box(x, b.rank * line + 2, w, line - 4, 4 if b.backward else 0, tip)
        shade = 0.45 + 0.55 * (b.chunk + 1) / chunks
        shapes.append(part.replace("<rect ", f'<rect opacity="{shade:.2f}" ', 1))
        if w > 14:
            shapes.append(_text(x + w / 2, b.rank * line + line / 2 + 4, str(b.micro), "middle", "number"))
    return _svg(ranks * line + 6, shapes, "the pipeline")


def curve(points: list[tuple[float, float]], marked: float, unit: str, log: bool) -> str:
    """Draw tokens by chips on logarithmic axes, or on linear axes that begin at 0. The dashed line is in proportion to
    the first point."""
    left, top, wide, high = 90.0, 18.0, WIDTH - 130.0, 260.0
    straight = [(x, points[0][1] * x / points[0][0]) for x, _ in points]

    def scale(values: list[float]) -> tuple[float, float]:
        shown = [math.log10(v) for v in values] if log else [0.0, *values]
        return min(shown), max(max(shown) - min(shown), 1e-9)

    x_low, x_span = scale([x for x, _ in points])
    y_low, y_span = scale([y for _, y in (*points, *straight)])

    def place(x: float, y: float) -> tuple[float, float]:
        x, y = (math.log10(x), math.log10(y)) if log else (x, y)
        return left + (x - x_low) / x_span * wide, top + high - (y - y_low) / y_span * high

    def path(line: list[tuple[float, float]]) -> str:
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(x, y) for x, y in line))

    shapes = [
        f'<polyline points="{path(straight)}" class="ideal"/>',
        f'<polyline points="{path(points)}" class="curve"/>',
    ]
    last = -math.inf
    for x, y in points:
        px, py = place(x, y)
        size = 6 if x == marked else 3.5
        tip = f"<title>{x:,.0f} chips: {y:,.3g} {unit}</title>"
        shapes.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{size}" fill="var(--c0)">{tip}</circle>')
        if px - last > 70:  # so that labels do not touch
            shapes.append(_text(px, top + high + 26, f"{x:,.0f}", "middle", "dim"))
            shapes.append(_text(px - 10, py - 8, f"{y / 1e6:,.3g} M" if y >= 1e6 else f"{y:,.0f}", "end"))
            last = px
    shapes.append(f'<line x1="{left}" y1="{top + high + 8}" x2="{left + wide}" y2="{top + high + 8}" class="axis"/>')
    return _svg(top + high + 36, shapes, f"{unit}, {'logarithmic' if log else 'linear'}")
