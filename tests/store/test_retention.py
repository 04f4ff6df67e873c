"""Keeping so many dumps, or so many bytes: never too few, never the wrong ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.store import StepStore, commit


def test_keep_last_keeps_those_written_last(tmp_path: Path) -> None:
    store = StepStore(tmp_path, keep_last=3)
    for step in (10, 11, 12, 1, 2):  # a run that was started anew
        store.save(step, step)
    assert store.steps() == [1, 2, 12]


def test_max_size_counts_what_is_on_disk(tmp_path: Path) -> None:
    size = StepStore(tmp_path / "one").save(0, torch.rand(10_000)).stored
    store = StepStore(tmp_path / "run", max_size=int(3.5 * size))
    for step in range(6):
        store.save(step, torch.rand(10_000))
    assert store.steps() == [3, 4, 5]


def test_the_step_just_written_always_stays(tmp_path: Path) -> None:
    store = StepStore(tmp_path, max_size=0)
    for step in (1, 2):
        store.save(step, step)
        assert store.steps() == [step]


def test_a_step_being_read_stays(tmp_path: Path) -> None:
    store = StepStore(tmp_path, keep_last=1)
    store.save(1, "x")
    with commit.reading(tmp_path, 1):  # by whatever process
        store.save(2, "y")
        store.save(3, "z")
        assert store.steps() == [1, 3]
    store.save(4, "z")
    assert store.steps() == [4]


def test_reading_is_marked_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlskip.store import container

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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_limits_hold_after_every_save(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep_last: int, others: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for step in range(20, 20 + others):
        StepStore(folder).save(step, step)
    store = StepStore(folder, keep_last=keep_last)
    written: list[int] = []
    for step in steps:
        store.save(step, step, replace=True)
        written = [s for s in written if s != step] + [step]
        kept = store.steps()
        assert step in kept
        assert len(kept) <= keep_last
        assert set(written[-keep_last:]) <= set(kept)
