"""The charts of a report: round ticks, every value in its place, any finite numbers."""

from __future__ import annotations

import re

import pytest

from rlskip.report.charts import Box, bars, curve, histogram, timeline

TICK = re.compile(r'<text x="[^"]*" y="[^"]*" text-anchor="(end|middle)">([^<]*)</text>')


def ticks(svg: str, anchor: str) -> list[str]:
    return [label for where, label in TICK.findall(svg) if where == anchor]


def number(label: str) -> float:
    factor = {"k": 1e3, "M": 1e6}.get(label[-1:], 1.0)
    return float(label.rstrip("kM")) * factor


@pytest.mark.parametrize(
    "values",
    [
        [0.1611, 0.4508, 0.333], [-0.0123, 0.0456], [3.594, 3.41], [7.0] * 9, [1.0, 100_894.0],
        [1e-9, 2e-9], [0.9841], [-3.0, 5.0], [12_345_678.0, 23_456_789.0],
    ],
)  # fmt: skip
def test_ticks_are_round_and_short_and_enclose_the_values(values: list[float]) -> None:
    svg = curve(list(enumerate(values, 1)), "reward", "step")
    labels = ticks(svg, "end")
    shown = [number(label) for label in labels]
    assert 2 <= len(shown) <= 7
    assert max(map(len, labels)) <= 7
    assert shown[0] <= min(values)
    assert max(values) <= shown[-1]
    step = shown[1] - shown[0]
    assert f"{step:.0e}"[0] in "125"
    assert f"{step:.4e}" == f"{float(f'{step:.0e}'):.4e}"
    assert all(abs(one / step - round(one / step)) < 1e-3 for one in shown)


@pytest.mark.parametrize("n", [7, 100_894, 1_234_567])
def test_an_axis_has_room_for_its_figures(n: int) -> None:
    labels = ticks(histogram([1.0] * n, "tokens"), "end")
    assert max(map(len, labels)) <= 5
    assert number(labels[-1]) >= n


@pytest.mark.parametrize(
    "values", [[0.0, 0.05, 0.1, 0.3, 1.0], [1.0, 2.0, 4.0, 4.0], [5.0], [0.3] * 4, [-7.0, 250.0]]
)
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    svg = histogram(values, "reward")
    bounds = re.findall(r"<title>reward (\S+?)(?: to (\S+))?: (\d+) sessions?</title>", svg)
    assert sum(int(count) for _, _, count in bounds) == len(values)
    for low, high, count in bounds:
        expected = [v for v in values if float(low) <= v < float(high or low) or v == float(low)]
        assert int(count) == len(expected)


def test_a_curve_has_a_point_for_each_step() -> None:
    svg = curve([(1, 0.5), (2, 0.25), (9, 1.0)], "reward", "step")
    assert re.findall(r"<title>([^<]*)</title>", svg) == [
        "step 1: 0.5 reward", "step 2: 0.25 reward", "step 9: 1 reward",
    ]  # fmt: skip
    places = [tuple(map(float, p.split(","))) for p in re.findall(r"[\d.]+,[\d.]+", svg)]
    left, top = zip(*places, strict=True)
    assert left[1] - left[0] == pytest.approx((left[2] - left[0]) / 8, abs=0.1)
    assert top[2] < top[0] < top[1], "more is higher"


@pytest.mark.parametrize(
    "values", [[-1e308, 1e308], [5e-324, 0.0], [1e16, 1e16 + 2], [0.0, 0.0], [-5.0, -5.0], [3e38]]
)
def test_any_finite_numbers_can_be_drawn(values: list[float]) -> None:
    made = [
        histogram(values, "reward"),
        curve(list(enumerate(values)), "reward", "step"),
        bars([str(i) for i, _ in enumerate(values)], [("a", values)], "seconds", "step"),
    ]
    for svg in made:
        for name, place in re.findall(r'\b(x|y|cx|cy|width|height)="([^"]*)"', svg):
            assert -10 <= float(place) <= 410, (name, svg)


def test_the_steps_of_bars_are_round_where_they_can_be() -> None:
    steps = [str(step) for step in range(1, 51)]
    svg = bars(steps, [("a", [1.0] * 50)], "seconds", "step")
    assert ticks(svg, "middle")[-1:] == ["step"]
    assert ticks(svg, "middle")[:-1] == ["10", "20", "30", "40", "50"]


def test_the_seconds_of_a_timeline_are_round() -> None:
    svg = timeline([Box(0.5, 13.7, 0, "a", "x")], ["worker 0"])
    assert ticks(svg, "middle") == ["0", "2", "4", "6", "8", "10", "12", "seconds"]


def test_steps_that_share_a_bar_are_averaged() -> None:
    n = 322  # three steps a bar; the last bar has one
    svg = bars([str(i) for i in range(n)], [("a", [2.0] * n)], "seconds", "step")
    assert re.findall(r"<title>step \d+: (.*?)</title>", svg) == ["2 seconds"] * 108


def test_the_layers_of_a_bar_are_stacked() -> None:
    layers: list[tuple[str, list[float]]] = [("a", [1.0]), ("b", [2.0]), ("r", [3.0])]
    svg = bars(["1"], layers, "seconds", "step")
    found = re.findall(r'<rect class="." .*?y="([\d.]+)".*?height="([\d.]+)"', svg)
    tops, heights = zip(*[(float(top), float(height)) for top, height in found], strict=True)
    assert heights[1:] == pytest.approx([2 * heights[0], 3 * heights[0]], abs=0.2)
    for i in (1, 2):
        assert tops[i] + heights[i] == pytest.approx(tops[i - 1], abs=0.2)
