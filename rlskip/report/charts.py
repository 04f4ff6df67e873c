"""Small charts as SVG, without scripts or links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import attrs

WIDTH, HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 8, 34
_MAX_BARS = 400


@attrs.frozen
class Box:
    """A rectangle of a timeline: from `start` to `end` seconds in `lane`."""

    start: float
    end: float
    lane: int
    css: str
    title: str


def bars(
    labels: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], unit: str, x: str
) -> str:
    """Stacked bars; `series` are the css class and the values of each layer, from below."""
    n = len(labels)
    if n > _MAX_BARS:  # neighbours share a bar, so the page does not grow with the run
        width = math.ceil(n / _MAX_BARS)
        labels = [labels[i] for i in range(0, n, width)]
        series = [
            (css, [sum(v[i : i + width]) / len(v[i : i + width]) for i in range(0, n, width)])
            for css, v in series
        ]
        n = len(labels)
    totals = [sum(max(0.0, values[i]) for _, values in series) for i in range(n)]
    top = max(totals, default=0.0) or 1.0
    room = WIDTH - _LEFT - _RIGHT
    step = room / max(1, n)
    parts = []
    for i in range(n):
        at = float(HEIGHT - _BOTTOM)
        for css, values in series:
            height = max(0.0, values[i]) / top * (HEIGHT - _TOP - _BOTTOM)
            at -= height
            title = escape(f"{x} {labels[i]}: {_figure(values[i])} {unit}")
            left, width_ = _LEFT + i * step, max(0.5, step - min(2.0, step * 0.2))
            parts.append(
                f'<rect class="{css}" x="{left:.1f}" y="{at:.1f}" width="{width_:.1f}" '
                f'height="{height:.1f}"><title>{title}</title></rect>'
            )
    every = max(1, math.ceil(n / 12))
    parts += [
        f'<text x="{_LEFT + (i + 0.5) * step:.1f}" y="{HEIGHT - _BOTTOM + 14}" '
        f'text-anchor="middle">{escape(labels[i])}</text>'
        for i in range(0, n, every)
    ]
    return _frame(parts, top, unit, x)


def histogram(values: Sequence[float], x: str, bins: int = 30) -> str:
    """The distribution of `values`; each bar is labelled with its lower bound."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high == low:
        labels, counts = [f"{low:.4g}"], [len(values)]
    else:
        span = (high - low) / bins
        if high - low < bins and all(float(value).is_integer() for value in values):
            bins, span = int(high - low) + 1, 1.0  # a bar for each whole number
        counts = [0] * bins
        for value in values:
            counts[min(bins - 1, int((value - low) / span))] += 1
        labels = [f"{low + i * span:.4g}" for i in range(bins)]
    return bars(labels, [("a", [float(count) for count in counts])], "sessions", x)


def timeline(boxes: Sequence[Box], lanes: Sequence[str]) -> str:
    """Rectangles in lanes over time; `lanes` are their names, empty for none."""
    end = max((box.end for box in boxes), default=0.0) or 1.0
    height = max(0.8, min(14.0, 420.0 / max(1, len(lanes))))
    total = _TOP + _BOTTOM + height * len(lanes)
    room = WIDTH - _LEFT - _RIGHT
    parts = [
        f'<rect class="{box.css}" x="{_LEFT + box.start / end * room:.1f}" '
        f'y="{_TOP + box.lane * height:.1f}" '
        f'width="{max(0.7, (box.end - box.start) / end * room):.1f}" height="{height * 0.85:.1f}">'
        f"<title>{escape(box.title)}</title></rect>"
        for box in boxes
    ]
    parts += [
        f'<text x="{_LEFT - 6}" y="{_TOP + i * height + 9:.1f}" text-anchor="end">{escape(name)}'
        "</text>"
        for i, name in enumerate(lanes)
        if name
    ]
    parts += [
        f'<text x="{_LEFT + f * room:.1f}" y="{total - _BOTTOM + 14:.1f}" text-anchor="middle">'
        f"{f * end:.3g}</text>"
        for f in (0, 0.25, 0.5, 0.75, 1)
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{total - 4:.0f}" text-anchor="middle">seconds</text>')
    return _svg(parts, total)


def _frame(parts: list[str], top: float, unit: str, x: str) -> str:
    base = HEIGHT - _BOTTOM
    axis = [
        f'<line x1="{_LEFT}" y1="{base}" x2="{WIDTH - _RIGHT}" y2="{base}"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{_figure(top)}</text>',
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0 {escape(unit)}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x)}</text>',
    ]
    return _svg(parts + axis, HEIGHT)


def _figure(value: float) -> str:
    """Short enough for the room left of an axis: 0.3152, 100,894, 1.01e+06."""
    if value >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'style="max-width:{WIDTH}px">{"".join(parts)}</svg>'
    )
