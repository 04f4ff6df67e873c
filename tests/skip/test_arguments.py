"""Arguments that cannot be right are refused; nothing is skipped or run without notice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlskip import SkipManager
from rlskip.errors import ConfigError


@SkipManager.annotate(role="rollout")
def generate(prompts: list[int]) -> list[int]:
    return prompts


@SkipManager.annotate(role="async_rollout")
def generate_one(prompts: list[int]) -> list[int]:
    return prompts


def test_what_is_not_a_config_is_refused() -> None:
    for config in ("rollout_cache", 5, ["skip"], {}, {"trainer": {}}):
        with pytest.raises(ConfigError, match="skip"):
            SkipManager.init(config)  # type: ignore[arg-type]


def test_any_integer_is_a_step_and_nothing_else(init: Callable[..., Path]) -> None:
    init()
    for step in (4, np.int64(4), np.uint8(4), torch.tensor(4)):
        SkipManager.set_step(3)
        SkipManager.set_step(step)  # type: ignore[arg-type]
        assert (SkipManager.step, type(SkipManager.step)) == (4, int)
    odd: Any
    for odd in ("1", 1.0, -1, None, [1], torch.tensor([1, 2])):
        with pytest.raises(ConfigError, match=r"SkipManager\.set_step: .* is not a step"):
            SkipManager.set_step(odd)
        assert SkipManager.step == 4


def test_an_option_of_another_kind_is_refused(init: Callable[..., Path]) -> None:
    options = {"prompts": 5, "identity": ["n"], "lacks": ["n"], "ignore": "n", "on_replay": 3}
    for name, value in options.items():
        with pytest.raises(ConfigError, match=rf"{name}=\.\.\.\): expected "):
            SkipManager.annotate(role="rollout", **{name: value})  # type: ignore[arg-type]
    init()
    SkipManager.set_step(1)
    stage = SkipManager.annotate(role="rollout", identity=lambda prompts: None)(len)
    with pytest.raises(ConfigError, match="returns None, and not a mapping"):
        stage([1])


def test_what_is_no_role_is_refused() -> None:
    for role in ("rolout", "rollouts", "asyncrollout", "rollout-tq"):
        with pytest.raises(ConfigError, match=r"did you mean '.*rollout(_tq)?'"):
            SkipManager.annotate(role=role)
    odd: Any
    for odd in ("", "my role", 5, ["rollout"], "steps", np.zeros(0), np.zeros(2)):
        with pytest.raises(ConfigError, match="there is no role"):
            SkipManager.annotate(role=odd)


def test_two_roles_do_not_share_a_directory(tmp_path: Path) -> None:
    roles = {"rollout": {"enable": True}, "async_rollout": {"enable": True}}
    with pytest.raises(
        ConfigError, match=r"skip\.async_rollout\.dump_dir: roles rollout and async"
    ):
        SkipManager.init({"skip": {"dump_dir": str(tmp_path), **roles}})
    roles["async_rollout"]["dump_dir"] = str(tmp_path / "other")  # type: ignore[assignment]
    SkipManager.init({"skip": {"dump_dir": str(tmp_path), **roles}})
    assert set(SkipManager.skip_instances) == set(roles)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warnings of a test."""
    caplog.set_level(logging.WARNING)
    return caplog


def test_a_function_of_another_role_is_named(init: Callable[..., Path], warned: Any) -> None:
    init("async_rollout")
    SkipManager.set_step(1)
    generate([1])
    assert warned.text == ""
    for step in (2, 3, 4):
        SkipManager.set_step(step)
        generate([1])
    what = (
        "role async_rollout is enabled and was NEVER CONSULTED up to step 1: functions of role "
        "rollout were called instead: +skip=rollout_cache"
    )
    assert warned.text.count("NEVER CONSULTED") == warned.text.count(what) == 1
    assert SkipManager.bypassed == {"rollout"}
    init("rollout")
    assert SkipManager.bypassed == set()
    SkipManager.set_step(1)
    generate([1])
    warned.clear()
    generate_one([1])
    SkipManager.set_step(2)
    assert warned.text == ""


def test_a_stage_that_nobody_calls_is_named_after_the_first_step(
    init: Callable[..., Path], warned: Any
) -> None:
    # The functions of async_rollout may be called in another process.
    for role, times in ("rollout", 1), ("async_rollout", 0):
        init(role)
        warned.clear()
        for step in (1, 1, 2, 3):
            assert "NEVER CONSULTED" not in warned.text or step == 3
            SkipManager.set_step(step)
        assert warned.text.count(f"role {role} is enabled and was NEVER CONSULTED up to") == times
        assert warned.text.count("skip.attach.ROLE=package.module:function") == times


def test_a_stage_within_a_replayed_one_is_not_missed(
    init: Callable[..., Path], warned: Any
) -> None:
    @SkipManager.annotate(role="experience")
    def experience(prompts: list[int]) -> list[int]:
        return generate(prompts)

    for again in (False, True):
        init("rollout", experience={"enable": True})
        for step in (1, 2, 3):
            SkipManager.set_step(step)
            assert experience([step]) == [step]
        assert (SkipManager.skip_instances["rollout"].recorder is None) is again
    assert "NEVER CONSULTED" not in warned.text


@pytest.mark.parametrize(
    ("validated", "warns"),
    [(0, False), (7, False), (None, True)],
    ids=["before training", "at a checkpoint", "never"],
)
def test_validation_before_training_is_no_step_that_the_stage_missed(
    init: Callable[..., Path], warned: Any, validated: int | None, warns: bool
) -> None:
    init("rollout", validation="replay")
    validate = SkipManager.annotate(role="rollout_val")(lambda prompts: prompts)
    first = 7 if validated is None else validated
    SkipManager.set_step(first)
    if validated is not None:
        validate({"validate": True, "ids": [1]})
    SkipManager.set_step(first + 1)
    assert ("NEVER CONSULTED" in warned.text) is warns
    warned.clear()
    generate([1])
    for step in (2, 3):  # validation may come later
        SkipManager.set_step(first + step)
    assert "NEVER CONSULTED" not in warned.text
