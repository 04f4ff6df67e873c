"""`rlskip rescore` of what verl's genuine trainer rewarded, with the same function."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.verl.conftest import Verl

pytestmark = pytest.mark.verl

# verl's own scorer; wrong numbers earn something, too, so that the scores differ.
SCORER = """
import os

import rlskip
from verl.utils.reward_score import gsm8k

def score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{solution_str!r}\\n")
    return gsm8k.compute_score(solution_str, ground_truth, method="flexible", format_score=0.1)

compute_score = rlskip.cached_reward(
    score, version="1", directory=os.environ["VERDICTS"], ignore=["extra_info"]
)
"""


def test_the_rewards_are_reproduced_to_the_bit_and_paid_for_once(
    verl091: Verl, tmp_path: Path
) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    told = {"ASKED": str(tmp_path / "asked"), "VERDICTS": str(tmp_path / "verdicts")}
    reward = f"reward.custom_reward_function.path={tmp_path / 'scorer.py'}"
    name = "reward.custom_reward_function.name=compute_score"
    skip = ("+skip=rollout_tq_cache", f"skip.dump_dir={tmp_path / 'dumps'}")
    verl091.train("scored", "v1", *skip, reward, name, **told)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len({*asked}), "of equal texts one is asked for"

    (run,) = (tmp_path / "dumps").glob("*/GBS*")

    def rescore(function: str, *more: object) -> Any:
        command = (verl091.python, "-m", "rlskip.cli.main", "rescore", run, *more)
        options = ("--reward", function, "--json")
        env = {**os.environ, **told, "HOME": str(tmp_path)}
        done = subprocess.run(
            [*map(str, command), *options], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    again = rescore("scorer:compute_score")
    assert (again["sessions"], again["asked"], again["changed"]) == (16, 0, 0)
    anew = rescore("scorer:score")
    assert (anew["changed"], anew["old"]) == (0, anew["new"])
    assert len(asked) <= anew["asked"] <= 16
    assert anew["old"]["count"] == 16
