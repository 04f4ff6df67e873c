"""Links, FIFOs and devices below a dump_dir: never followed, never waited for."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.errors import ConfigError
from rlskip.format.dump_errors import UnreadableDumpError
from rlskip.store import AbsentDumpError, CorruptDumpError, StepStore, run_directory


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
    instead: str, level: str, ranks: int, tmp_path: Path, no_fsync: None
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
