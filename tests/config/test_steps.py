"""The steps grammar."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.config.steps import EXAMPLE, Steps
from rlskip.errors import ConfigError

step = st.integers(0, 10**9)


@st.composite
def ranges(draw: st.DrawFn) -> range:
    first = draw(step)
    # Short and long ranges: the latter are kept as ranges.
    length = draw(st.integers(0, 40) | st.integers(10_000, 10**8))
    return range(first, first + length + 1, draw(st.integers(1, 50)))


def write(part: range, spaces: str) -> str:
    if len(part) == 1 and part.step == 1:
        return f"{spaces}{part.start}"
    stride = f":{part.step}" if part.step > 1 else ""
    return f"{part.start}{spaces}-{spaces}{part.stop - 1}{stride}{spaces}"


@given(st.lists(ranges(), min_size=1, max_size=5), st.sampled_from(["", " "]), st.data())
def test_a_string_contains_exactly_its_ranges(
    parts: list[range], spaces: str, data: st.DataObject
) -> None:
    steps = Steps.parse(",".join(write(part, spaces) for part in parts))
    part = data.draw(st.sampled_from(parts))
    near = [part[0], part[-1], part[-1] + 1, part[0] + 1, data.draw(step)]
    for probe in near:
        assert (probe in steps) == any(probe in part for part in parts)


@pytest.mark.parametrize(
    ("value", "listed"),
    [
        ("all", range(30)),
        (" all ", range(30)),
        (["1-3", 7, "10-20:5"], [1, 2, 3, 7, 10, 15, 20]),
        ([3, 1], [1, 3]),
        ("3,1", [1, 3]),
        (5, [5]),
        ([], []),
    ],
)
def test_forms(value: object, listed: Iterable[int]) -> None:
    steps = Steps.parse(value)
    assert [step for step in range(30) if step in steps] == list(listed)
    assert (10**12 in steps) is ("all" in str(steps))


@pytest.mark.parametrize(
    "bad",
    [
        [[1, 2], [3]], [1, None], -1, [-3], "-3", 1.5, [2.0], True, [1, True], "5-3", "1-9:0", "",
        "1,,2", "one", "1:5", "1-2-3", "1-" + "9" * 30, "٣", None, {"a": 1},
    ],
)  # fmt: skip
def test_errors_name_the_key_and_show_an_example(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Steps.parse(bad, "skip.rollout.steps")
    assert caught.value.where == "skip.rollout.steps"
    assert caught.value.remedy == EXAMPLE
