"""The steps grammar."""

from __future__ import annotations

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


@given(st.lists(step))
def test_a_list_contains_exactly_its_items(items: list[int]) -> None:
    steps = Steps.parse(items)
    assert all(item in steps for item in items)
    assert (10**9 + 1) not in steps


@given(st.lists(step, min_size=1))
def test_list_and_string_agree(items: list[int]) -> None:
    assert Steps.parse(items) == Steps.parse(",".join(map(str, items)))


def test_all_is_every_step() -> None:
    assert 0 in Steps.parse("all")
    assert 10**12 in Steps.parse(" all ")


def test_mixed_forms() -> None:
    steps = Steps.parse(["1-3", 7, "10-20:5"])
    assert [s for s in range(30) if s in steps] == [1, 2, 3, 7, 10, 15, 20]
    assert Steps.parse(5) == Steps.parse([5])
    assert 1 not in Steps.parse([])


def test_a_huge_range_needs_no_memory() -> None:
    steps = Steps.parse("1-1000000000:3,5")
    assert len(steps.singles) == 1
    assert 1_000_000_000 in steps
    assert 999_999_999 not in steps


@pytest.mark.parametrize(
    "bad",
    [
        [[1, 2], [3]],
        [1, None],
        -1,
        [-3],
        "-3",
        1.5,
        [2.0],
        True,
        [1, True],
        "5-3",
        "1-9:0",
        "",
        "1,,2",
        "one",
        "1:5",
        "1-2-3",
        "٣",
        None,
        {"a": 1},
    ],
)
def test_errors_name_the_key_and_show_an_example(bad: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Steps.parse(bad, "skip.rollout.steps")
    assert caught.value.where == "skip.rollout.steps"
    assert caught.value.remedy == EXAMPLE
