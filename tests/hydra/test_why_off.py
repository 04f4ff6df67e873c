"""Options that a later value overrides."""

from __future__ import annotations

from typing import Any

import pytest

from rlskip.config.settings import read_skip, why_off

OFF = "skip: {rollout: {enable: false}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "lost"),
    [
        (OFF, [], ["skip: no role is enabled"]),
        (OFF, ["+skip=rollout_cache"], []),
        (f"defaults: [_self_, skip: rollout_cache]\n{OFF}", [], []),
        (
            f"defaults: [skip: rollout_cache, _self_]\n{OFF}",
            [],
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
