"""Small charts as SVG, without scripts or links. They are as wide as a telephone's page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape

import attrs

WIDTH, HEIGHT = 400, 200
_WIDE = 880  # a timeline
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 24, 36
_BASE = HEIGHT - _BOTTOM
_MAX_BARS, _BINS, _LABELS = 160, 24, 8
_LARGEST = 1e150  # of a number that a chart shows: differences of two stay finite


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
    up = _Axis.of(0.0, max(totals, default=0.0), _BASE, _TOP)
    step = (WIDTH - _LEFT - _RIGHT) / max(1, n)
    parts = []
    for i in range(n):
        at = 0.0
        for css, values in series:
            title = f"{x} {labels[i]}: {values[i]:.4g} {unit}"
            parts.append(_bar(css, up, _LEFT + i * step, step, at, at + values[i], title))
            at += max(0.0, values[i])
    parts += [
        _text(_LEFT + (i + 0.5) * step, _BASE + 14, "middle", labels[i]) for i in _few(labels)
    ]
    return _frame(parts, up, unit, x)


def curve(points: Sequence[tuple[int, float]], unit: str, x: str) -> str:
    """A line through points ``(x, y)``, in the order of x."""
    across = _Axis.of(
        points[0][0], points[-1][0], _LEFT, WIDTH - _RIGHT, whole=True, fit=True, count=6
    )
    up = _Axis.of(min(y for _, y in points), max(y for _, y in points), _BASE, _TOP)
    at = [(across(step), up(y)) for step, y in points]
    line = " ".join(f"{left:.1f},{top:.1f}" for left, top in at)
    parts = [f'<polyline points="{line}"/>']
    if len(points) <= _MAX_BARS:
        parts += [
            f'<circle class="a" cx="{left:.1f}" cy="{top:.1f}" r="3">'
            f"<title>{escape(f'{x} {step}: {y:.4g} {unit}')}</title></circle>"
            for (left, top), (step, y) in zip(at, points, strict=True)
        ]
    parts += [_text(across(t), _BASE + 14, "middle", _figure(t)) for t in across.ticks]
    return _frame(parts, up, unit, x)


def histogram(values: Sequence[float], x: str) -> str:
    """The distribution of `values`, in bars with round bounds; whole numbers have their own."""
    if not values:
        return ""
    found = Counter(map(_clip, values))
    low, high = min(found), max(found)
    whole = high - low < _BINS and all(value.is_integer() for value in found)
    width = 1.0 if whole else _round_up((high - low) / _BINS or abs(low) or 1.0)
    places = {value: math.floor(_steps(value, width)) for value in found}
    first = min(places.values())
    counts = [0] * (max(places.values()) - first + 1)
    for value, place in places.items():
        counts[place - first] += found[value]
    up = _Axis.of(0.0, max(counts), _BASE, _TOP, whole=True)
    step = (WIDTH - _LEFT - _RIGHT) / len(counts)
    parts, labels = [], [_figure((first + i) * width) for i in range(len(counts) + 1)]
    for i, count in enumerate(counts):
        span = labels[i] if whole else f"{labels[i]} to {labels[i + 1]}"
        title = f"{x} {span}: {count} session{'' if count == 1 else 's'}"
        parts.append(_bar("a", up, _LEFT + i * step, step, 0.0, count, title))
    every = _every(len(labels))
    parts += [
        _text(_LEFT + (i + 0.5 * whole) * step, _BASE + 14, "middle", labels[i])
        for i in range(len(counts) + (not whole))
        if (first + i) % every == 0
    ]
    return _frame(parts, up, "sessions", x)


def timeline(boxes: Sequence[Box], lanes: Sequence[str]) -> str:
    """Rectangles in lanes over time; `lanes` are their names, empty for none."""
    end = max((box.end for box in boxes), default=0.0)
    left = 60
    across = _Axis.of(0.0, end, left, _WIDE - _RIGHT, count=8, fit=True)
    height = max(0.8, min(14.0, 420.0 / max(1, len(lanes))))
    total = _TOP + _BOTTOM + height * len(lanes)
    parts = [
        f'<rect class="{box.css}" x="{across(box.start):.1f}" y="{_TOP + box.lane * height:.1f}" '
        f'width="{max(0.7, across(box.end) - across(box.start)):.1f}" '
        f'height="{height * 0.85:.1f}"><title>{escape(box.title)}</title></rect>'
        for box in boxes
    ]
    parts += [
        _text(left - 6, _TOP + i * height + 9, "end", name) for i, name in enumerate(lanes) if name
    ]
    parts += [
        _text(across(tick), total - _BOTTOM + 14, "middle", _figure(tick)) for tick in across.ticks
    ]
    parts.append(_text(_WIDE / 2, total - 6, "middle", "seconds"))
    return _svg(parts, _WIDE, total)


# -- axes ------------------------------------------------------------------------------------


@attrs.frozen
class _Axis:
    """A scale with round ticks: a value's place between `start` and `stop` of the picture."""

    low: float
    high: float
    start: float
    stop: float
    ticks: list[float]

    @classmethod
    def of(
        cls,
        low: float,
        high: float,
        start: float,
        stop: float,
        *,
        whole: bool = False,
        fit: bool = False,
        count: int = 4,
    ) -> _Axis:
        """About `count` ticks over the values; with `fit` none lies beyond them."""
        low, high = _clip(low), _clip(high)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: the axis begins at 0
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low < 1 / _LARGEST:
            high = low + 1.0
        step = _round_up((high - low) / count)
        step = max(1.0, step) if whole else step
        first = (math.ceil if fit else math.floor)(_steps(low, step))
        last = (math.floor if fit else math.ceil)(_steps(high, step))
        ticks = [i * step for i in range(first, last + 1)]
        return cls(*((low, high) if fit else (ticks[0], ticks[-1])), start, stop, ticks)

    def __call__(self, value: float) -> float:
        share = (_clip(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ..., or of 0.1, 0.2, 0.5, ..."""
    value = max(value, 1e-150)
    power = float(f"1e{math.floor(math.log10(value))}")
    return next(power * by for by in (1, 2, 5, 10) if power * by >= value * (1 - 1e-9))


def _steps(value: float, step: float) -> float:
    """`value` in steps, so that 0.3 is three steps of 0.1."""
    return round(_clip(value) / step, 9)


def _clip(value: float) -> float:
    return max(-_LARGEST, min(_LARGEST, float(value)))


def _every(count: int) -> int:
    """Of how many labels one is shown."""
    return int(_round_up(max(1.0, count / _LABELS)))


def _few(labels: Sequence[str]) -> list[int]:
    """The indices of the labels to show: of steps those with round numbers."""
    every = _every(len(labels))
    if every == 1 or not all(label.isdecimal() for label in labels):
        return list(range(0, len(labels), every))
    round_ones = [i for i, label in enumerate(labels) if int(label) % every == 0]
    return round_ones if 2 <= len(round_ones) <= _LABELS + 1 else list(range(0, len(labels), every))


def _figure(value: float) -> str:
    """A round number, short enough for the room left of an axis: 0.25, 7500, 100k, 2.5M."""
    if 1e4 <= abs(value) < 1e9:
        return f"{value / 1e6:.5g}M" if abs(value) >= 1e6 else f"{value / 1e3:.5g}k"
    return f"{value:.5g}"


# -- elements --------------------------------------------------------------------------------


def _bar(css: str, up: _Axis, left: float, step: float, low: float, high: float, title: str) -> str:
    top, width = up(max(low, high)), max(0.5, step - min(2.0, step * 0.2))
    return (
        f'<rect class="{css}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{up(low) - top:.1f}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, anchor: str, what: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def _frame(parts: Sequence[str], up: _Axis, unit: str, x: str) -> str:
    axis = []
    for tick in up.ticks:
        y = up(tick)
        axis.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        axis.append(_text(_LEFT - 6, y + 4, "end", _figure(tick)))
    names = [_text(0, 11, "start", unit), _text(WIDTH / 2, HEIGHT - 6, "middle", x)]
    return _svg([*axis, *parts, *names], WIDTH, HEIGHT)


def _svg(parts: Sequence[str], width: float, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" '
        f'style="max-width:{width}px">{"".join(parts)}</svg>'
    )
