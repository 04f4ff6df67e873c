"""A sweep over later stages generates the rollouts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.launchers.conftest import table

pytestmark = pytest.mark.launchers

# As in many trainers, each job of a sweep names its experiment after the swept value.
CONFIG = """
optim: {lr: 1e-3}
trainer: {experiment_name: "lr-${optim.lr}", project_name: demo}
"""
# With $JOBS_THAT_MEET, no job trains before that many have started.
MEET = """
import glob
here = os.environ["GENERATED"] + ".started"
open(f"{here}.{os.getpid()}", "w").close()
while len(glob.glob(f"{here}.*")) < int(os.environ.get("JOBS_THAT_MEET", 0)):
    time.sleep(0.05)
train(cfg)
"""
SWEEP = ("-m", "optim.lr=1e-4,3e-4,1e-3", "+skip=rollout_cache", "skip.dump_dir=dumps")


@pytest.mark.parametrize("launcher", ["basic", "joblib", "ray"], indirect=True)
def test_jobs_that_share_generate_each_step_once(
    make_app: Callable[..., Any], launcher: Any
) -> None:
    app = make_app(config=CONFIG, task=MEET, python=launcher.python)
    share = "skip.experiment_name=shared"
    jobs = {"JOBS_THAT_MEET": "2", "SECONDS_A_STEP": "3"} if launcher.name == "ray" else {}
    run = app.run(*SWEEP, share, *launcher.options, **jobs)
    assert app.generated == [1, 2]
    hits, misses = (sum(int(row[at]) for row in table(run.out)) for at in (2, 3))
    assert (hits, misses) == (4, 2)
    assert [place.name for place in (app.folder / "dumps").glob("*_demo")] == ["shared_demo"]
    if launcher.name == "ray":
        assert "another job generates step 1; waiting for it, 3600 s at most" in run.out


# -- a sweeper that asks for job after job: what later jobs sample again is replayed --------------
# Without `_self_`, Hydra drops a primary config that lists nothing else when a group is added.
OPTUNA = "defaults: [override hydra/sweeper: optuna, _self_]\nlr: 0.1\n"


def test_trials_share_the_rollouts(
    make_app: Callable[..., Any], python_of: Callable[[str], str]
) -> None:
    python = python_of("optuna")
    app = make_app(config=OPTUNA, task="train(cfg)\nreturn cfg.lr", python=python)
    trials = ("-m", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    on = ("+skip=rollout_cache", "skip.dump_dir=dumps", "lr=interval(0.01,0.1)")
    run = app.run(*trials, *on)
    assert app.generated == [1, 2]
    assert [row[2:] for row in table(run.out)] == [["0", "2"], ["2", "0"], ["2", "0"]]
    assert "Best parameters: {'lr': 0.0" in run.out
