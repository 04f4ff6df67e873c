"""Where dumps are: names that are safe and never become one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlskip.store import run_directory
from rlskip.store.layout import (
    Place,
    as_step,
    name_before_quarantine,
    places_among,
    quarantine_name,
    run_name,
    safe_name,
    shape_of,
)

_NAMES = st.text() | st.text(st.sampled_from("a./é"), min_size=100, max_size=300)


def test_the_layout_of_the_design() -> None:
    directory = run_directory("/dumps", "exp", "proj", 256, 8, 1024, 4096)
    assert directory == Path("/dumps/exp_proj/GBS256_N8_in1024_out4096")
    assert run_directory("~/d", "e", "p", 1, 1, 1, 1).is_relative_to(Path.home())
    assert run_directory("d", "e", "p", 1, 1, 1, 1).parts[0] == "d"


@example("a/b", "a-b")
@example("a b", "a\tb")
@example("..", ".")
@example("", "-")
@settings(max_examples=50)
@given(_NAMES, _NAMES)
def test_no_name_leaves_dump_dir_and_no_two_collide(a: str, b: str) -> None:
    directory = run_directory("/dumps", a, b, a, b, a, b)
    assert directory.parent.parent == Path("/dumps")
    assert ".." not in directory.parts
    for part in directory.parts[2:]:
        assert part.isascii()
        assert len(part) < 255
        assert "\0" not in part
    assert (safe_name(a) == safe_name(b)) == (a == b)
    assert safe_name(safe_name(a)) == safe_name(a) or safe_name(a) != a


def test_a_run_is_named_after_its_directory() -> None:
    directory = run_directory("/dumps", "exp", "proj", 256, 8, "any", 4096)
    assert run_name(directory) == "exp_proj/GBS256_N8_inany_out4096"
    assert run_name(directory / "reward") == "exp_proj/GBS256_N8_inany_out4096/reward"
    assert shape_of(directory.name) == {
        "gbs": "256", "n": "8", "prompt_len": "any", "response_len": "4096",
    }  # fmt: skip
    assert shape_of("reward") is None


_PLACES = st.builds(
    lambda step, call, ranks: Place(Path("run"), step, call, *ranks),
    st.integers(0, 1 << 62),
    st.just("") | st.from_regex(r"([0-9a-f]{16}|part)-(0|[1-9][0-9]{0,3})", fullmatch=True),
    st.integers(2, 999_999).flatmap(lambda of: st.tuples(st.integers(0, of - 1), st.just(of)))
    | st.just((0, 1)),
)


@given(_PLACES)
def test_a_dumps_directory_names_its_step_its_call_and_its_rank(place: Place) -> None:
    assert Place.parse(place.root, place.name) == place
    is_first = place == Place(place.root, place.step)
    assert as_step(place.name) == (place.step if is_first else None)
    kept = quarantine_name(place.name)
    assert Place.parse(place.root, kept) is None
    assert name_before_quarantine(kept) == place.name
    assert name_before_quarantine(place.name) == ""


@pytest.mark.parametrize(
    "name",
    ["03", "3.", "3.part", "3.part-01", "3.ABCDEF0123456789-1", "3.r2-of-2", "3.r0-of-1", "²",
     "3.r00-of-2", "3.journal", "3.part-1.bad-x", "3.part-1.part-2", "-1", "3\n", "3/1"],
)  # fmt: skip
def test_what_is_no_name_of_a_dump_is_none(name: str) -> None:
    assert Place.parse(Path("run"), name) is None


def test_the_first_call_comes_first_and_calls_are_counted() -> None:
    ordered = ["3", "3.part-2", "3.part-10", "10.r0-of-12", "10.r2-of-12", "10.r10-of-12"]
    found = places_among(Path("run"), [*reversed(ordered), "notes", ".work"])
    assert [place.name for place in found] == ordered
