"""Which dumped group replaces which prompt's generation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlskip.skip.groups import (
    DumpedGroup,
    QueuedGroup,
    by_content,
    by_position,
    groups_in,
    without_superseded,
)
from rlskip.skip.step_calls import Key
from rlskip.store.layout import part_name


def group(part: int, index: int, content: str | None, position: int, whole: bool) -> DumpedGroup:
    return DumpedGroup(Key(1, part_name(part)), index, content, position, whole)


def test_an_incomplete_group_is_superseded_by_a_complete_one() -> None:
    short, whole = group(0, 0, "a", 0, False), group(1, 0, "a", 0, True)
    assert without_superseded([short, whole]) == [whole]
    assert without_superseded([whole, short]) == [whole]
    other_place, other_prompt = group(0, 1, "a", 1, False), group(0, 2, "b", 0, False)
    kept = without_superseded([short, other_place, other_prompt, whole])
    assert kept == [other_prompt, whole, other_place]


def test_the_last_of_several_incomplete_groups_is_kept() -> None:
    first, second = group(0, 0, "a", 0, False), group(1, 0, "a", 0, False)
    assert without_superseded([first, second]) == [second]


def test_complete_groups_come_first() -> None:
    short, whole = group(0, 0, "a", 0, False), group(0, 1, "a", 1, True)
    assert by_content([short, whole], ["a"]) == [whole]
    assert by_content([short, whole], ["a", "a", "a", None, "b"]) == [whole, short, *[None] * 3]


_groups = st.lists(
    st.builds(
        DumpedGroup,
        key=st.builds(Key, st.just(1), st.sampled_from(["", "part-1", "part-2"])),
        index=st.integers(0, 3),
        content=st.sampled_from([None, "a", "b", "c"]),
        position=st.integers(0, 4),
        complete=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda g: (g.key, g.index),
)


@given(groups=_groups, contents=st.lists(st.sampled_from([None, "a", "b", "d"]), max_size=6))
def test_each_group_is_used_once_and_for_its_own_content(
    groups: list[DumpedGroup], contents: list[str | None]
) -> None:
    match = by_content(groups, contents)
    assert len(match) == len(contents)
    used = [one for one in match if one is not None]
    assert len({(one.key, one.index) for one in used}) == len(used)
    for content, one in zip(contents, match, strict=True):
        assert one is None or (content is not None and one.content == content)
    for content in {c for c in contents if c is not None}:
        available = sum(one.content == content for one in groups)
        assert sum(one.content == content for one in used) == min(
            available, contents.count(content)
        )


@given(groups=_groups)
def test_what_is_kept_is_in_order_and_never_superseded(groups: list[DumpedGroup]) -> None:
    kept = without_superseded(groups)
    assert [one.position for one in kept] == sorted(one.position for one in kept)
    assert [one for one in kept if one.complete] == sorted(
        (one for one in groups if one.complete), key=lambda g: g.place
    )
    complete = {(one.content, one.position) for one in groups if one.complete}
    assert all(one.complete or (one.content, one.position) not in complete for one in kept)
    assert by_position(kept, 2) == [*kept[:2], *[None] * (2 - len(kept[:2]))]


@pytest.mark.parametrize(
    ("root", "keys", "otherwise", "complete"),
    [
        ({"n": 2}, ["u_0_0", "u_1_0"], None, True),
        ({"n": 2}, ["u_0_0", "u_0_1"], None, False),
        ({"n": 2}, ["u_0_0", "v_1_0"], None, False),
        ({"expected_rollouts": 1, "n": 2}, ["u_0_0"], None, True),
        ({}, ["u_0_0"], 2, False),
        ({}, ["u_0_0"], None, True),
        ({}, [], None, False),
    ],
)
def test_a_group_is_complete_with_all_its_sessions(
    root: dict[str, Any], keys: list[str], otherwise: int | None, complete: bool
) -> None:
    assert QueuedGroup("u", {"": root}).is_complete(keys, otherwise) is complete


def test_only_groups_of_a_dumped_step_are_gathered() -> None:
    listing = {"a": {"dump_step": 3}, "b": {}, "a_0_0": {"x": 1}, "b_0_0": {}, "a_sess0": {}}
    (found,) = groups_in(listing, ["a", "b", "c"])
    assert found == QueuedGroup("a", {"": {"dump_step": 3}, "_0_0": {"x": 1}, "_sess0": {}})
