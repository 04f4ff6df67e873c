"""Which steps there are, and which one `repeat` takes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.store import (
    StepStore,
)


@settings(max_examples=50)
@given(st.sets(st.integers(0, 30), max_size=8), st.integers(0, 30))
def test_repeat_chooses_by_the_four_rules(
    tmp_path_factory: pytest.TempPathFactory, present: set[int], step: int
) -> None:
    store = StepStore(tmp_path_factory.mktemp("run"))
    for number in present:
        (store.directory / str(number)).mkdir()
        (store.directory / str(number) / "half").touch()
    complete = {number for number in present if number % 3}
    for number in complete:
        shutil.rmtree(store.directory / str(number))
        store.save(number, number)
    expected = (
        step
        if step in complete
        else max((s for s in complete if s < step), default=None)
        if any(s < step for s in complete)
        else min((s for s in complete if s > step), default=None)
    )
    assert store.nearest(step) == expected
    assert store.steps() == sorted(complete)


def test_steps_of_another_process_are_seen(store: StepStore) -> None:
    other = StepStore(store.directory)
    for step in range(5):
        other.save(step, step)
        assert store.nearest(9) == step
        assert store.steps() == list(range(step + 1))
    shutil.rmtree(store.directory / "4")
    assert store.nearest(9) == 3


def test_saving_hides_no_step_of_another_process(store: StepStore) -> None:
    store.save(1, 1)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    assert store.steps() == [1]
    StepStore(store.directory).save(2, 2)
    store.save(3, 3)
    assert store.steps() == [1, 2, 3]


def test_a_step_added_within_a_tick_of_the_clock_is_seen(store: StepStore) -> None:
    store.save(1, 1)
    other = StepStore(store.directory)
    assert other.steps() == [1]
    then = os.stat(store.directory).st_mtime_ns
    store.save(2, 2)
    os.utime(store.directory, ns=(then, then))
    assert other.steps() == [1, 2]


@pytest.fixture
def store_in_memory() -> Iterator[StepStore]:
    """On a disk, 100 000 directories take a minute to remove."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield StepStore(f"{directory}/run")


def test_choosing_among_100_000_takes_milliseconds(store_in_memory: StepStore) -> None:
    store = store_in_memory
    store.save(50_000, 1)
    for step in range(100_000):
        os.makedirs(store.directory / str(step), exist_ok=True)
    for step in (20, 21, 22, 23, 99_990):
        os.rmdir(store.directory / str(step))
    for step in (20, 99_990):
        store.save(step, step)
    past = time.time() - 60
    os.utime(store.directory, (past, past))
    store.nearest(5)  # the first look

    def seconds(step: int) -> float:
        began = time.thread_time()
        assert store.nearest(step) == step
        return time.thread_time() - began

    assert min(seconds(99_990) for _ in range(5)) < 0.005
    after_saves = []
    for step in (21, 22, 23):
        store.save(step, step)
        after_saves.append(seconds(step))
    assert min(after_saves) < 0.005
    assert store.nearest(24) == 23
