"""doctor on the commands of docs/verl.md's table: each trainer with each role, on genuine verl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(300)]

ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = (
    "verl.experimental.one_step_off_policy.main_ppo",
    "hydra.searchpath=[pkg://verl.trainer.config]",
)
V0, V1 = (("verl.trainer.main_ppo", f"trainer.use_v1={use}") for use in (False, True))
MODE = "trainer.v1.trainer_mode="
FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward")


@pytest.fixture
def verl_errors(
    rlskip: Any, python_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """``verl_errors(role, module, *overrides)``: what doctor refuses of that command."""
    python = python_of("verl091")

    def ask(option: str, module: str, *overrides: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        command = (python, "-m", module, f"++skip.dump_dir={tmp_path}", f"+skip={option}")
        answer = rlskip("doctor", "--json", "--", *command, *overrides)
        return [
            finding["what"]
            for finding in answer.json[-1]["findings"]
            if finding["level"] == "error"
        ]

    return ask


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("rollout_cache", V0),
        ("rollout_tq_cache", V1),
        ("rollout_tq_cache", (*V1, *FILTER)),
        ("rollout_tq_cache", (*V1, *FILTER, "+replay=fail_closed")),
        ("rollout_tq_cache", (*V1, f"{MODE}colocate_async")),
        ("rollout_tq_cache", (*V1, f"{MODE}separate_async")),
        ("rollout_cache", ONE_STEP),
        ("async_rollout_cache", (ASYNC,)),
    ],
)
def test_a_trainer_that_was_tested_is_accepted(
    verl_errors: Callable[..., list[str]], option: str, command: tuple[str, ...]
) -> None:
    assert verl_errors(option, *command) == []


@pytest.mark.parametrize(
    ("option", "command", "what"),
    [
        ("rollout_tq_cache", V0, "V0 trainer never calls a stage 'rollout_tq'"),
        ("rollout_cache", V1, "V1 trainer never calls a stage 'rollout'"),
        ("rollout_tq_cache", ONE_STEP, "V0 trainer never calls a stage 'rollout_tq'"),
        ("rollout_cache", (ASYNC,), "fully async application never calls a stage 'rollout'"),
    ],
)
def test_what_would_skip_nothing_is_refused(
    verl_errors: Callable[..., list[str]],
    option: str,
    command: tuple[str, ...],
    what: str,
) -> None:
    (error,) = verl_errors(option, *command)
    assert what in error
