"""An option of `skip` is chosen, and nothing would be skipped: a call, or the job, says why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import open_dict

from rlskip import SkipManager
from rlskip.config.nodes import refuse_displaced
from rlskip.config.settings import read_skip, why_off
from rlskip.errors import NotInstalledError

generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
score = SkipManager.annotate(role="reward")(lambda prompts: prompts)
A, FRAMES = "a: 1", "skip: {frames: 4}"
TURNS_ON = "skip: {rollout: {enable: true}"
ADD = "or add hydra/callbacks=rlskip, or call SkipManager.init(cfg)"


@pytest.mark.parametrize(
    ("primary", "override", "chosen", "remedy"),
    [
        (A, "+skip=rollout_cache ~hydra.callbacks.rlskip", "+skip=rollout_cache",
         "remove ~hydra.callbacks.rlskip, or call SkipManager.init(cfg) first"),
        (A, "+skip=rollout_cache ~skip", "+skip=rollout_cache",
         "remove ~skip, or call SkipManager.init(cfg) first"),
        (A, "+skip.rollout.enable=true", "+skip.rollout.enable=true",
         "choose an option instead of single keys"),
        (A, "+skip=rollout_cache", "+skip=rollout_cache",
         "if Hydra does not list RlskipSearchPathPlugin"),
        # What the application's YAML turns on.
        (f"{TURNS_ON}}}", "", "rollout.enable: true", ADD),
        (f"{TURNS_ON}, reward: {{enable: false}}}}", "", "rollout.enable: true", ADD),
        # Keys that are not the application's own.
        (FRAMES, "+skip.rolout.enable=true", "", ""),
        (A, "+skip=true", "", ""),
        (FRAMES, "+skip.rollout.enable=true", "", ""),
        ("skip: {reward: {steps: 4}}", "skip.reward.steps=5", "", ""),  # a role without a class
    ],
)  # fmt: skip
def test_a_job_without_the_callback_refuses(
    composed: Any, monkeypatch: Any, primary: str, override: str, chosen: str, remedy: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", *override.split()])
    hydras = [one for one in override.split() if one.startswith("~hydra")]
    config = composed(f"{primary}\n", *(one for one in override.split() if one not in hydras))
    with open_dict(config.hydra):
        config.hydra.mode = RunMode.RUN
        config.hydra.overrides.hydra = hydras
    HydraConfig.instance().set_config(config)
    stages = [score] if "reward.steps" in override else [generate, score]
    for stage in stages:
        with pytest.raises(NotInstalledError) as caught:
            stage([1])
        assert f"{chosen} was chosen" in caught.value.what
        assert remedy in caught.value.remedy


OFF = "skip: {enable: true, rollout: {enable: false}}"
OWN_GROUP = "defaults: [{skip: slow}, _self_]"


@pytest.mark.parametrize(
    ("primary", "override"),
    [
        (OFF, "skip.enable=false"),
        ("skip: {enable: false, rollout: {enable: true}}", "a=1"),
        ("skip: {frames: 4, slow: {enable: true}}", "a=1"),
        (OFF, "skip.rollout.enable=False"),
        # The application's own key or group.
        ("skip: {frames: 4}", "skip.frames=8"),
        ("skip: {frames: 4}", "+skip.more=8"),
        ("skip: 4", "skip=8"),
        ("skip: false", "skip=true"),
        ("skip: [1]", "skip=[a,b]"),
        ("skip: ${oc.env:RLSKIP_TEST_UNSET}", "a=1"),
        (OWN_GROUP, "skip=fast"),
        (OWN_GROUP, "skip=elsewhere"),
    ],
)
def test_skip_is_not_chosen(
    composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, primary: str, override: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["app.py", override])
    options = {"slow": "frames: 4", "fast": "frames: 8", "elsewhere": "# @package other\nb: 1"}
    for name, text in options.items() if primary == OWN_GROUP else ():
        (tmp_path / "skip").mkdir(exist_ok=True)
        (tmp_path / "skip" / f"{name}.yaml").write_text(f"{text}\n", encoding="utf-8")
    config = composed(f"{primary}\na: 1\n", override)
    with open_dict(config.hydra):
        config.hydra.mode = RunMode.RUN
    HydraConfig.instance().set_config(config)
    assert generate([1]) == [1]


# What resolves in its own place in the config, or in the job, but not in the list of overrides.
@pytest.mark.parametrize("value", ["${.a}", "${oc.env:RLSKIP_TEST_UNSET}", "${hydra:job.num}"])
def test_an_override_with_an_interpolation_is_read_as_typed(composed: Any, value: str) -> None:
    config = composed("a: 1\nskip: {enable: false}\n", f"+b='{value}'")
    HydraConfig.instance().set_config(config)
    assert generate([1]) == [1]
    refuse_displaced("skip", config)
    (lost,) = why_off(read_skip(config))
    assert lost.key == "skip.enable"
    config = composed("a: 1\n", "+skip=rollout_cache", f"+b='{value}'", "skip.enable=false")
    HydraConfig.instance().set_config(config)
    with pytest.raises(NotInstalledError):
        generate([1])
    refuse_displaced("skip", config)


ROLE_OFF = "skip: {rollout: {enable: false}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "lost"),
    [
        (ROLE_OFF, [], ["skip: no role is enabled"]),
        (ROLE_OFF, ["+skip=rollout_cache"], []),
        (f"defaults: [_self_, skip: rollout_cache]\n{ROLE_OFF}", [], []),
        (
            f"defaults: [skip: rollout_cache, _self_]\n{ROLE_OFF}",
            [],
            ["skip.rollout.enable: it is false, although the option rollout_cache was chosen"],
        ),
        ("a: 1\n", ["+skip=rollout_cache", "skip.enable=no"], ["skip.enable: it is false"]),
        # Another role is on; what was chosen is lost all the same.
        (
            "defaults: [skip: rollout_cache, _self_]\n"
            + ROLE_OFF.replace("rollout:", "rollout_tq: {enable: true}, rollout:"),
            [],
            ["skip.rollout.enable: it is false, although"],
        ),
        (
            "a: 1\n",
            ["+skip=[rollout_cache,async_rollout_cache]", "skip.async_rollout.enable=False"],
            ["skip.async_rollout.enable: it is false, although the option async_rollout_cache"],
        ),
        # What rlskip advises where a dump is missing.
        ("a: 1\n", ["+skip=rollout_replay", "skip.on_miss=generate", "skip.start_engine=true"], []),
    ],
)
def test_what_is_lost(composed: Any, text: str, overrides: list[str], lost: list[str]) -> None:
    found = list(map(str, why_off(read_skip(composed(text, *overrides)))))
    assert len(found) == len(lost), found
    for problem, expected in zip(found, lost, strict=True):
        assert problem.startswith(expected)
