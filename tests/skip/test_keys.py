"""The keys of a role: drop_fields, restore_rng, retention."""

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
from tests.skip.trainers import Stage, visit


def test_drop_fields(init: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    init()
    stage = Stage()
    stage.at(1)
    stage.at(1)
    stage.at(1)
    assert caplog.text.count("scores are replayed with the rollouts (rm_scores)") == 1
    init(drop_fields=["rm_scores", "nowhere"])
    SkipManager.set_step(1)
    assert set(stage.generate({"ids": torch.arange(3) + 1})) == {"tokens"}
    assert "drop_fields names nowhere" in caplog.text


def test_restore_rng(init: Callable[..., Path]) -> None:
    init(restore_rng=True)

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> int:
        torch.rand(100), np.random.rand(7), [random.random() for _ in range(5)]
        return 1

    def run() -> tuple[Any, ...]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        SkipManager.set_step(1)
        generate([1])
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    generated, replayed = run(), run()
    assert generated == replayed
    init(restore_rng=False)
    assert run() != generated


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
