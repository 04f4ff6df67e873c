"""Keeping a number of dumps: never too few, never the wrong ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlskip.jobs.alive import WORK
from rlskip.store import StepStore, dump, step_store


@pytest.mark.parametrize("ticks", [(1, 2, 3), (1, 1, 1)])
def test_a_step_is_as_old_as_the_last_call_added_to_it(
    tmp_path: Path, ticks: tuple[int, ...]
) -> None:
    """Within a tick of the clock, the order of the writes decides."""
    store = StepStore(tmp_path, keep_last=2)
    names = ("1", "2", "1.part-1")
    for name in names:
        store.save(int(name[0]), name, call=name[2:])
    for name, tick in zip(names, ticks, strict=True):
        os.utime(tmp_path / name, (tick, tick))
    store.save(3, 3)
    assert store.steps() == [1, 3]


def test_a_step_goes_with_all_its_calls_and_ranks_the_first_call_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever is killed meanwhile leaves one that lacks its last calls."""
    for rank in (1, 0):
        store = StepStore(tmp_path, rank=rank, world_size=2)
        for call in ("", "part-1", "part-10", "part-2"):
            store.save(1, "x", call=call)
    StepStore(tmp_path, keep_last=1, rank=1, world_size=2).save(2, "of another rank's")
    assert 1 in store.listed_by_step(), "the first rank removes"
    real, removed = dump.remove, list[str]()
    monkeypatch.setattr(
        step_store, "remove", lambda at, run: removed.append(at.name) or real(at, run)
    )
    StepStore(tmp_path, keep_last=1, world_size=2).save(2, "y")
    ranks = ("r1-of-2", "r0-of-2")
    calls = ("1.part-10", "1.part-2", "1.part-1", "1")
    assert removed == [f"{call}.{rank}" for call in calls for rank in ranks]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".work", "2.r0-of-2", "2.r1-of-2", "dumps.index"]


def test_a_link_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    StepStore(tmp_path / "outside").save(1, "x")
    store = StepStore(tmp_path / "run", keep_last=2)
    store.directory.mkdir()
    (store.directory / "9").symlink_to(tmp_path / "outside" / "1")
    (store.directory / "8").write_text("notes")
    for step in (1, 2):
        store.save(step, step)
    assert (store.directory / "9").is_symlink()
    assert (store.directory / "8").exists()
    assert store.steps() == [1, 2]


def test_who_has_opened_a_step_reads_it_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlskip.format import container

    store, other = StepStore(tmp_path), StepStore(tmp_path, keep_last=1)
    store.save(1, torch.arange(10))
    original = container.Reader.array

    def removed_before(self: container.Reader, number: int) -> object:
        other.save(2, "y")
        assert other.steps() == [2]
        return original(self, number)

    monkeypatch.setattr(container.Reader, "array", removed_before)
    assert torch.equal(store.load(1), torch.arange(10))
    monkeypatch.undo()
    assert store.read_meta(1) is None
    assert not list(tmp_path.glob("*.bad-*"))


def test_a_number_that_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        StepStore(tmp_path, keep_last=0)


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.sampled_from([1, 3]),
    st.integers(0, 3),
    st.sampled_from(["", "part-1"]),
)
@example([1, 2, 2, 3, 4], 3, 0, "part-1")
def test_the_number_holds_after_every_save(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[int],
    keep_last: int,
    others: int,
    call: str,
) -> None:
    """Those written last stay, and the one just written in any case.

    A step of which all calls are quarantined is none.
    """
    folder, rollouts = tmp_path_factory.mktemp("run"), torch.rand(10)
    kept = [*range(20, 20 + others)]
    for step in kept:
        StepStore(folder).save(step, rollouts, call=call)
    store = StepStore(folder, keep_last=keep_last)
    for step in steps:
        if step in kept:
            store.quarantine(step, "for a test", call)
            kept.remove(step)
            continue
        store.save(step, rollouts, call=call)
        kept = [*kept, step][-keep_last:]
        assert sorted(store.listed_by_step()) == sorted(kept)
        assert not list((folder / WORK).glob("*~*")), "removed for good"
