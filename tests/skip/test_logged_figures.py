"""What a host logs of a step's rollouts: how many were replayed, from where, what that saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from tests.clock import MockClock
from tests.skip.trainers import Stage, prompts

REPLAYED, OFF_POLICY, SAVED = "rlskip/replayed", "rlskip/off_policy", "rlskip/seconds_saved"


def logged(init: Callable[..., Path], *steps: int, **skip: Any) -> list[dict[str, float]]:
    """What a run logs after each of `steps`."""
    init(**skip)
    SkipManager.count_rollouts()
    stage, found = Stage(), []
    for step in steps:
        stage.at(step)
        found.append(SkipManager.logged())
    return found


def test_a_replayed_step_says_so(init: Callable[..., Path], clock: MockClock) -> None:
    first = logged(init, 1, 2)
    assert first == [{REPLAYED: 0.0, OFF_POLICY: 0.0, SAVED: 0.0}] * 2
    (one, two, three) = logged(init, 1, 2, 3)
    assert [step[REPLAYED] for step in (one, two, three)] == [1.0, 1.0, 0.0]
    assert [step[OFF_POLICY] for step in (one, two, three)] == [0.0] * 3
    assert SkipManager.logged() == {}, "nothing since"


def test_rollouts_of_another_step_are_off_policy(init: Callable[..., Path]) -> None:
    logged(init, 1)
    (found,) = logged(init, 2, action="repeat")
    assert (found[REPLAYED], found[OFF_POLICY]) == (1.0, 1.0)


@pytest.mark.parametrize("off", [{"log_metrics": False}, {"steps": [9]}, {"enable": False}])
def test_nothing_is_logged_where_it_is_off(init: Callable[..., Path], off: dict[str, Any]) -> None:
    assert logged(init, 1, 1, **off) == [{}, {}]


@pytest.mark.parametrize(
    ("texts", "share"), [("ab", 1.0), ("abcd", 0.5), ("xy", 0.0)], ids=["all", "half", "none"]
)
def test_groups_are_counted_as_they_are_submitted(
    run: Callable[..., Any], texts: str, share: float
) -> None:
    run("status").step(1, prompts(*"ab"))
    again = run("status", on_mismatch="regenerate")
    SkipManager.count_rollouts()
    again.step(1, prompts(*texts))
    found = SkipManager.logged()
    assert (found[REPLAYED], found[OFF_POLICY]) == (share, 0.0)
    assert found[SAVED] >= 0.0
