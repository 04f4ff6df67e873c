"""verl 0.9's V1 trainer with ``algorithm.filter_groups`` (DAPO): groups without variance in the
reward are discarded and replaced.

A (seed 1) dumps, B (seed 2) has A's dumps. The reward is a coin, so that
about half of the groups are filtered.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS, N = 2, 2
HERE = Path(__file__).parent
FILTER = (
    "trainer.experiment_name=mine",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=reward",
    f"reward.custom_reward_function.path={HERE / 'coin.py'}",
)
ON = ("+skip=rollout_tq_cache", "skip.steps=[1,2]")


def evicted(run: Any) -> int:
    found = re.findall(r"filter_groups/evicted_samples:(?:np\.float64\()?([0-9.]+)", run.output)
    return sum(int(float(n)) for n in found)


@pytest.fixture(scope="module")
def a(verl091: Any) -> Any:
    return verl091.train("filter_a", "v1", *FILTER, *ON, "skip.dump_dir=dumps")


@pytest.fixture(scope="module")
def b(verl091: Any, a: Any) -> Any:
    on = (*ON, f"skip.dump_dir={a.folder}/dumps", "skip.on_miss=error")
    return verl091.train("filter_b", "v1", *FILTER, *on, seed=2)


def test_filtered_groups_are_dumped_and_filtered_again(a: Any, b: Any) -> None:
    assert evicted(a) > 0
    assert evicted(b) > 0
    assert b.generated == 0
    assert len(a.grad_norms) == STEPS
    assert b.grad_norms == a.grad_norms
