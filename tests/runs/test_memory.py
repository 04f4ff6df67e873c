"""A loop over many steps takes the memory of one."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import rlskip
from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Dumps, compare_sides
from rlskip.config.steps import Steps
from rlskip.runs.opened import Run
from rlskip.store import StepStore

STEPS, ROWS, WIDTH = 100, 8, 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("long") / "e_p" / "GBS4_N2_in1_out1"
    store = StepStore(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        for step in range(1, STEPS + 1):
            rows = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) + step
            columns = {"uid": [f"{i // 2}" for i in range(ROWS)], "responses": rows}
            store.save(step, {**columns, "rewards": np.zeros(ROWS)})
    found = rlskip.open(directory)
    assert isinstance(found, Run)
    return found


def compare(run: Run) -> None:
    assert compare_sides(*Dumps.pair(run, run), Rounding(), Steps.parse("all")).is_equal


READERS: dict[str, Callable[[Run], object]] = {
    "rows": lambda run: sum(1 for _ in run.iter_rows()),
    "groups": lambda run: sum(len(group.sessions) for group in run.groups()),
    "compare": compare,
}


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is traced, and only reference counts free it: a cycle would keep what it holds."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("no_fsync", "traced")
def test_memory_does_not_grow_with_the_steps(run: Run, name: str) -> None:
    def peak(some: Run) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        READERS[name](some)
        return tracemalloc.get_traced_memory()[1] - before

    peak(run[:3])  # imports
    few = peak(run[:21])
    # What one step takes, and 2 kB for each step; its rows take 13 kB. What another thread of the
    # tests takes meanwhile counts, too, but not every time.
    found: list[int] = []
    while not found or (found[-1] >= few + 2000 * STEPS and len(found) < 3):
        found.append(peak(run))
    assert found[-1] < few + 2000 * STEPS, (few, found)
