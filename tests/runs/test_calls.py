"""Steps of several calls, as the commands name and remove them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rlskip.runs.opened import Run
from rlskip.runs.pruning import choose, remove
from rlskip.store import StepStore

CALLS = ("", f"{'b' * 16}-1", f"{'a' * 16}-1")
"""As they are made; by name they have another order."""


def rows(first: int) -> dict[str, torch.Tensor]:
    return {"prompts": torch.tensor([[first]]), "responses": torch.tensor([[first, 7]])}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Steps 1 (one call) and 2 (three calls)."""
    directory = tmp_path / "dumps" / "a_b" / "GBS1_N1_in1_out1"
    store = StepStore(directory)
    store.save(1, rows(0))
    for number, call in enumerate(CALLS):
        store.save(2, rows(number), call=call, info={"place": number})
    return Run(directory)


def test_the_quarantined_calls_of_a_step_are_listed_and_pruned(run: Run) -> None:
    store = StepStore(run.directory)
    for call in CALLS[:2]:
        store.quarantine(2, "a test", call)
    assert [dump.name for dump in run.dumps()] == ["1", "2/0"]
    quarantined = [str(path.relative_to(run.directory)) for path in run.quarantine()]
    assert [name.split(".bad-")[0] for name in quarantined] == ["2", f"2.{CALLS[1]}"]
    for old in choose([run], quarantined=True):
        assert remove(old, really=True).removed
    assert run.quarantine() == []
    assert [dump.name for dump in run.dumps()] == ["1", "2/0"]


def test_limits_remove_a_step_with_all_its_calls(run: Run) -> None:
    (old,) = choose([run], keep_last=1)
    assert old.name == "1"
    (_, other) = sorted(choose([run], older_than=-60), key=lambda one: one.name)
    shutil.rmtree(other.paths[-1])  # another process was quicker with this one
    remove(other, really=True)
    assert not list(run.directory.glob("2*"))
    assert [dump.name for dump in run.dumps()] == ["1"]
