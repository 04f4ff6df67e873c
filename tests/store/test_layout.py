"""Where dumps are: names that never become one another, and links that are never followed."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlskip._files import safe_name
from rlskip.errors import ConfigError
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.store import AbsentDumpError, CorruptDumpError, StepStore, run_directory
from rlskip.store.layout import (
    Place,
    as_step,
    name_before_quarantine,
    places_among,
    quarantine_name,
    run_name,
    shape_of,
)

_NAMES = st.text() | st.text(st.sampled_from("a./é"), min_size=100, max_size=300)


def test_the_layout_of_the_design() -> None:
    directory = run_directory("/dumps", "exp", "proj", 256, 8, 1024, 4096)
    assert directory == Path("/dumps/exp_proj/GBS256_N8_in1024_out4096")
    assert run_directory("~/d", "e", "p", 1, 1, 1, 1).is_relative_to(Path.home())
    assert run_directory("d", "e", "p", 1, 1, 1, 1).parts[0] == "d"
    directory = run_directory("/dumps", "exp", "proj", 256, 8, "any", 4096)
    assert run_name(directory) == "exp_proj/GBS256_N8_inany_out4096"
    assert run_name(directory / "reward") == "exp_proj/GBS256_N8_inany_out4096/reward"
    assert shape_of(directory.name) == {
        "gbs": "256", "n": "8", "prompt_len": "any", "response_len": "4096",
    }  # fmt: skip
    assert shape_of("reward") is None


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
    numbers = as_step(place.name), as_step("2026112817101112345678")  # a file's, by its date
    assert numbers == (place.step if is_first else None, None)
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


# -- links, FIFOs and devices below a dump_dir: never followed, never waited for -----------------


@pytest.mark.parametrize("level", [0, 1, 2])
def test_dump_dir_itself_may_be_a_link_and_a_runs_directory_may_not(
    tmp_path: Path, level: int
) -> None:
    outside, dumps = tmp_path / "outside", tmp_path / "dumps"
    directory = run_directory(dumps, "e", "p", 1, 1, 1, 1)
    link = [dumps, directory.parent, directory][level]
    for path in (outside, link.parent):
        path.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    if level == 0:
        StepStore(run_directory(dumps, "e", "p", 1, 1, 1, 1)).save(1, "x")
        assert list(outside.glob("e_p/*/1"))
        assert StepStore(directory).load(1) == "x"
        return
    with pytest.raises(ConfigError) as caught:
        run_directory(dumps, "e", "p", 1, 1, 1, 1)
    assert caught.value.where == "skip.dump_dir"
    assert str(link) in caught.value.what


_INSTEAD: dict[str, Callable[[Path, Path], Any]] = {
    "a link to a directory": lambda path, outside: path.symlink_to(outside),
    "a link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "a link to itself": lambda path, outside: path.symlink_to(path),
    "a link to /dev/zero": lambda path, outside: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path, outside: path.symlink_to(outside / "nothing"),
    "a FIFO": lambda path, outside: os.mkfifo(path),
    "a file": lambda path, outside: path.write_text("x"),
    "a directory": lambda path, outside: path.mkdir(),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("instead", "ranks"),
    [*((instead, 1) for instead in _INSTEAD), ("a link to a directory", 2), ("a FIFO", 2)],
)
@pytest.mark.parametrize(
    "level", ["1", "1/gen_batch.dp", "1/meta.json", "1.part-2", "1.part-2/meta.json"]
)
def test_nothing_is_followed_or_waited_for_at_any_level(
    instead: str, level: str, ranks: int, tmp_path: Path
) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (outside / "meta.json").write_text("mine, too")
    before = {path: path.lstat().st_mtime_ns for path in (outside, *outside.rglob("*"))}
    if ranks == 2:
        level = re.sub(r"^1[^/]*", r"\g<0>.r0-of-2", level)
    (run / level).parent.mkdir(parents=True)
    _INSTEAD[instead](run / level, outside)
    stores = [StepStore(run, keep_last=1, rank=rank, world_size=ranks) for rank in range(ranks)]
    for call in ("", "part-2"):
        store = stores[0]
        assert store.read_meta(1, call) is None
        assert store.steps() == ([1] if call else [])
        with pytest.raises((AbsentDumpError, CorruptDumpError)):
            store.load(1, call=call)
        store.quarantine(1, "for a test", call)
        for store in stores:
            store.save(1, "x", call=call)
        assert stores[0].load(1, call=call) == "x"
    assert {path: path.lstat().st_mtime_ns for path in (outside, *outside.rglob("*"))} == before


@pytest.mark.parametrize("instead", [one for one in _INSTEAD if one != "a directory"])
def test_what_is_in_the_place_of_work_is_named_and_nothing_is_written(
    instead: str, tmp_path: Path
) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    for path in (outside, run):
        path.mkdir()
    _INSTEAD[instead](run / ".work", outside)
    with pytest.raises(OSError, match=r"\.work"):
        StepStore(run).save(1, "x")
    assert [path.name for path in run.iterdir()] == [".work"]
    assert not [*outside.iterdir()]


@pytest.mark.parametrize("instead", ["a file", "a link to itself", "no permission"])
def test_a_dump_dir_that_is_gone_ends_nothing(
    instead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    store = StepStore(run)
    store.save(1, "x")
    os.rename(run, tmp_path / "away")
    if instead == "a file":
        run.touch()
    elif instead == "a link to itself":
        run.symlink_to(run)
    elif os.getuid() == 0:
        pytest.skip("root may read everything")
    else:
        run.mkdir(0o000)
    assert (store.read_meta(1), store.steps(), store.nearest(1)) == (None, [], None)
    assert len(caplog.records) == 3
    for look in (store.load, functools.partial(store.load, part="aside")):
        with pytest.raises(AbsentDumpError) as caught:
            look(1)
        assert isinstance(caught.value, UnreadableDumpError)
    assert store.quarantine(1, "for a test") is None
    with pytest.raises(OSError):
        store.save(1, "y")
