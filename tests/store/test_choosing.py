"""Which steps there are, and which one `repeat` takes."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.store import StepStore


@settings(max_examples=20)
@given(st.sets(st.integers(0, 30), max_size=8), st.integers(0, 30))
def test_repeat_chooses_by_the_four_rules(
    tmp_path_factory: pytest.TempPathFactory, no_fsync: None, present: set[int], step: int
) -> None:
    store = StepStore(tmp_path_factory.mktemp("run"))
    complete = {number for number in present if number % 3}
    for number in present:
        if number in complete:
            store.save(number, number)
        else:
            (store.directory / str(number)).mkdir()
            (store.directory / str(number) / "half").touch()
    below, above = ([s for s in complete if (s <= step) is low] for low in (True, False))
    assert store.nearest(step) == (max(below) if below else min(above, default=None))
    assert store.steps() == sorted(complete)


def test_a_step_added_within_a_tick_of_the_clock_is_seen(store: StepStore) -> None:
    store.save(1, 1)
    other = StepStore(store.directory)
    os.utime(store.directory)
    assert other.steps() == [1]
    then = os.stat(store.directory).st_mtime_ns
    store.save(2, 2)
    os.utime(store.directory, ns=(then, then))
    deadline = time.monotonic() + 30
    while other.steps() != [1, 2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert other.steps() == [1, 2]


def test_what_a_store_has_quarantined_is_not_listed_once_it_has_saved_another(
    store: StepStore,
) -> None:
    for step in (1, 2):
        store.save(step, step)
    assert store.listed() == [1, 2]
    store.quarantine(1, "for a test")
    store.save(3, 3)
    assert (store.listed(), store.quarantined(1)) == ([2, 3], [""])


def test_a_listing_that_failed_is_tried_again(
    store: StepStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(where: Any) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store.save(1, 1)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        assert store.calls(1) == []
    assert "cannot be listed" in caplog.text
    assert store.calls(1) == [""]
