"""Keeping a number of dumps, or of bytes: never too few, never the wrong ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlskip.store import StepStore, commit


@pytest.mark.parametrize("ranks", [1, 2])
def test_max_size_counts_later_calls_of_all_ranks(tmp_path: Path, ranks: int) -> None:
    call = torch.rand(10_000)
    size = StepStore(tmp_path / "one").save(0, call).stored * ranks
    first, *others = (
        StepStore(tmp_path, rank=rank, world_size=ranks, max_size=int(4.5 * size))
        for rank in range(ranks)
    )
    for step, part in [(1, None), (2, None), (2, 1), (2, 2), (2, 3)]:
        assert (tmp_path / "1").exists() == (part is not None or step == 2)
        for store in (*others, first):  # the first removes what is too much
            store.save(step, call, part=part)
    assert not (tmp_path / "1").exists()


def test_a_step_is_as_old_as_the_last_call_added_to_it(tmp_path: Path) -> None:
    store = StepStore(tmp_path)
    for written, step, part in [(1, 1, None), (2, 2, None), (3, 1, 1)]:
        store.save(step, step, part=part)
        folder = tmp_path / str(step) / ("" if part is None else str(part))
        for file in folder.glob("*.*"):
            os.utime(file, (written, written))
    StepStore(tmp_path, keep_last=2).save(3, 3)
    assert store.steps() == [1, 3]


def test_a_step_being_read_stays(tmp_path: Path) -> None:
    store = StepStore(tmp_path, keep_last=1)
    store.save(1, "x")
    with commit.reading(tmp_path, 1):  # by whatever process
        store.save(2, "y")
        store.save(3, "z")
        assert store.steps() == [1, 3]
    store.save(4, "z")
    assert store.steps() == [4]


@pytest.mark.parametrize("name", ["reading-x", "reading-", "reading-1", "reading-²", "reading-01"])
def test_a_mark_that_is_none_ends_nothing(name: str, tmp_path: Path) -> None:
    store = StepStore(tmp_path, keep_last=1)
    store.save(1, "x")
    (tmp_path / commit.WORK / name).touch()
    store.save(2, "y")
    store.save(3, "z")
    assert store.steps() == ([1, 3] if name == "reading-1" else [3])


def test_a_link_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    StepStore(tmp_path / "outside").save(1, "x")
    store = StepStore(tmp_path / "run", keep_last=2)
    store.directory.mkdir()
    (store.directory / "9").symlink_to(tmp_path / "outside" / "1")
    for step in (1, 2):
        store.save(step, step)
    assert store.steps() == [1, 2]
    assert (store.directory / "9").is_symlink()


def test_of_several_ranks_the_first_removes(tmp_path: Path) -> None:
    stores = [StepStore(tmp_path, rank=r, world_size=2, keep_last=1) for r in range(2)]
    for step in (1, 2):
        stores[1].save(step, step)
    assert sorted(path.name for path in tmp_path.glob("[0-9]")) == ["1", "2"]
    stores[0].save(2, 2)
    assert stores[0].steps() == [2]
    assert sorted(path.name for path in tmp_path.glob("[0-9]")) == ["2"]


def test_the_age_of_a_mark_is_that_of_the_file_systems_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StepStore(tmp_path).save(1, "x")
    with commit.reading(tmp_path, 1):
        monkeypatch.setattr("time.time", lambda: 1e11)  # this host's clock is wrong
        assert commit.being_read(tmp_path) == {1}


def test_reading_is_marked_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlskip.format import container

    store = StepStore(tmp_path)
    store.save(1, torch.arange(10))
    seen = []
    original = container.Reader.array

    def look(self: container.Reader, number: int) -> object:
        seen.append(commit.being_read(tmp_path))
        return original(self, number)

    monkeypatch.setattr(container.Reader, "array", look)
    store.load(1)
    assert seen == [{1}]
    assert commit.being_read(tmp_path) == set()


def test_a_read_only_directory_can_be_read(tmp_path: Path) -> None:
    StepStore(tmp_path).save(1, "x")
    os.chmod(tmp_path / commit.WORK, 0o500)
    os.chmod(tmp_path, 0o500)
    try:
        assert StepStore(tmp_path).load(1) == "x"
    finally:
        os.chmod(tmp_path, 0o700)
        os.chmod(tmp_path / commit.WORK, 0o700)


@pytest.mark.parametrize("limits", [{"keep_last": 0}, {"keep_last": -1}, {"max_size": -1}])
def test_limits_that_make_no_sense(limits: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        StepStore(tmp_path, **limits)


_LIMITS = st.sampled_from([("keep_last", 1), ("keep_last", 3), ("max_size", 0), ("max_size", 3.5)])


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    _LIMITS,
    st.integers(0, 3),
    st.sampled_from([None, 0]),
)
@example([1, 2, 2, 3, 4], ("keep_last", 3), 0, 0)
def test_limits_hold_after_every_save(
    tmp_path_factory: pytest.TempPathFactory,
    no_fsync: None,
    steps: list[int],
    limit: tuple[str, float],
    others: int,
    part: int | None,
) -> None:
    """Those written last stay, up to the limit, and the one just written in any case.

    A step of which all parts are quarantined is none.
    """
    folder, (name, most) = tmp_path_factory.mktemp("run"), limit
    rollouts = torch.rand(10_000)
    by_size = name == "max_size"
    part = None if by_size else part  # bytes of quarantined parts count with their step
    size = StepStore(folder / "one").save(1, rollouts).stored
    kept = [*range(20, 20 + others)]
    for step in kept:
        StepStore(folder / "run").save(step, rollouts, part=part)
    store = StepStore(folder / "run", **{name: int(most * (size + 1000)) if by_size else int(most)})
    for step in steps:
        if step in kept:
            store.quarantine(step, "for a test", part)
            kept.remove(step)
            continue
        store.save(step, rollouts, part=part)
        kept = [*kept, step][-max(1, int(most)) :]
        assert store.steps(part) == sorted(kept)
        assert not list((folder / "run" / commit.WORK).iterdir()), "removed for good"
