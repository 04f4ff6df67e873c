"""Options that a later value overrides."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlskip.config.settings import SkipSettings, read_skip, why_off
from tests.hydra.conftest import compose_from


def settings(folder: Path, name: str) -> SkipSettings:
    return read_skip(compose_from(folder, name))


OFF = "skip: {rollout: {enable: false}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "lost"),
    [
        ("a: 1\n", [], ["skip: the config has no such node; add +skip=rollout_cache"]),
        (OFF, [], ["skip: no role is enabled"]),
        (OFF, ["+skip=rollout_cache"], []),
        (f"defaults: [_self_, skip: rollout_cache]\n{OFF}", [], []),
        (
            f"defaults: [skip: rollout_cache, _self_]\n{OFF}",
            [],
            ["skip.rollout.enable: it is false, although the option rollout_cache was chosen"],
        ),
        (
            "a: 1\n",
            ["+skip=rollout_cache", "skip.rollout.enable=false"],
            ["skip.rollout.enable: it is false, although the option rollout_cache was chosen"],
        ),
        (
            "a: 1\n",
            ["+skip=rollout_cache", "~skip.rollout"],
            ["skip.rollout.enable: it is false, although the option rollout_cache was chosen"],
        ),
        ("a: 1\n", ["+skip=rollout_cache", "skip.enable=false"], ["skip.enable: it is false"]),
        # Another role is on; what was chosen is lost all the same.
        (
            "defaults: [skip: rollout_cache, _self_]\n"
            + OFF.replace("rollout:", "rollout_tq: {enable: true}, rollout:"),
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


# -- primary configs of verl --------------------------------------------------------------------
PRIMARY = (
    "trainer/config/ppo_trainer.yaml",
    "trainer/config/evaluation.yaml",
    "trainer/config/_generated_ppo_trainer.yaml",
    "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
    "experimental/one_step_off_policy/config/one_step_off_ppo_trainer.yaml",
)


@pytest.mark.long
@pytest.mark.parametrize("file", PRIMARY)
def test_the_option_in_a_primary_config_of_verl(
    verl_configs: Path, tmp_path: Path, file: str
) -> None:
    package, folder = verl_configs.parents[1], tmp_path / "conf"
    shutil.copytree(package / "trainer" / "config", folder)
    text = (package / file).read_text(encoding="utf-8")
    for elsewhere in ("file://verl/trainer/config", "pkg://verl.trainer.config"):
        text = text.replace(elsewhere, f"file://{folder}")
    # In a config that includes verl's, which alone may name a search path.
    search = yaml.safe_load(text).get("hydra", {}).get("searchpath", [])
    (folder / "theirs.yaml").write_text(text.replace("hydra:\n  searchpath:", "hydra_: \n  s:"))
    mine = {
        "defaults": ["theirs", {"skip": "rollout_cache"}, "_self_"],
        "hydra": {"searchpath": search},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine), encoding="utf-8")
    assert list(settings(folder, "mine").roles) == ["rollout"]
    # In verl's own file, before what sets `skip`.
    first = "defaults:\n  - skip: rollout_cache\n"
    own = (
        text.replace("defaults:\n", first) if "defaults:" in text else f"{first}  - _self_\n{text}"
    )
    (folder / "edited.yaml").write_text(own)
    before = settings(folder, "edited")
    if settings(folder, "theirs").facts.config.get("skip") is None:
        assert list(before.roles) == ["rollout"]
    else:
        (lost,) = why_off(before)
        assert not before.roles
        assert "put `- skip: rollout_cache` after that entry" in lost.remedy
