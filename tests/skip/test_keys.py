"""The keys of a role: drop_fields, restore_rng, log_metrics."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlskip import SkipManager
from rlskip.errors import ConfigError
from rlskip.store import StepStore
from tests.clock import MockClock
from tests.faults.operations import STAGES
from tests.skip.trainers import Stage, prompts, visit


def test_drop_fields(init: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    init()
    stage = Stage()
    [stage.at(1) for _ in range(3)]
    assert caplog.text.count("scores are replayed with the rollouts (rm_scores)") == 1
    init(drop_fields=["rm_scores", "nowhere"], at=1)
    assert set(stage.generate({"ids": torch.arange(3) + 1})) == {"tokens"}
    assert "drop_fields names nowhere" in caplog.text


@pytest.mark.parametrize("role", STAGES)
def test_restore_rng(init: Callable[..., Path], role: str) -> None:
    def run(restores: bool) -> tuple[Any, ...]:
        init(role, restore_rng=restores, n=1, at=1)
        STAGES[role](1)
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    generated = run(True)
    assert run(True) == generated, "whatever was drawn before"
    assert run(False) != generated


def test_what_a_dump_by_hand_lacks_is_said(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    StepStore(SkipManager.skip_instances["rollout"].dumps.directory).save(1, {"tokens": [[7]]})
    visit(1)
    assert Stage().generate({"ids": [1]}) == {"tokens": [[7]]}
    assert "record no prompts; they are not compared" in caplog.text
    init(restore_rng=True)
    with pytest.raises(ConfigError, match="has no states of the random generators"):
        Stage().at(1)
    with pytest.raises(ConfigError, match="restore_rng"):
        init(match="prompt", restore_rng=True)


def test_off_policy_is_said_once(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    caplog.set_level(logging.INFO)
    stage = Stage()
    [stage.at(step) for step in (1, 2, 1, 2)]
    assert caplog.text.count("off-policy") == 1
    # The path and the job are said once, too.
    shown = [line for line in caplog.messages if line.startswith("rlskip: step")]
    assert ["ago by job job" in line for line in shown] == [True, False]
    assert shown[1] == "rlskip: step 2 replayed"


def test_a_replay_names_the_call_as_ls_does_and_the_role_of_the_users_own(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for calls in ("ab", "abc"):
        init("values")
        SkipManager.set_step(2)
        for call in calls:
            SkipManager.annotate(role="values")(lambda prompts: prompts)([call])
    assert "rlskip: step 2/1 replayed (role values)" in caplog.messages
    assert "rlskip: role values: step 2/2 is generated: no unused dump" in caplog.text


# -- what a host logs of a step's rollouts: how many were replayed, from where, what that saved --

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


def test_a_replayed_step_says_so_and_if_it_is_anothers(
    init: Callable[..., Path], clock: MockClock
) -> None:
    first = logged(init, 1, 2)
    assert first == [{REPLAYED: 0.0, OFF_POLICY: 0.0, SAVED: 0.0}] * 2
    (one, two, three) = logged(init, 1, 2, 3)
    assert [step[REPLAYED] for step in (one, two, three)] == [1.0, 1.0, 0.0]
    assert [step[OFF_POLICY] for step in (one, two, three)] == [0.0] * 3
    assert SkipManager.logged() == {}, "nothing since"
    (four,) = logged(init, 4, action="repeat")
    assert (four[REPLAYED], four[OFF_POLICY]) == (1.0, 1.0)


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
