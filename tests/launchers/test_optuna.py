"""A sweeper that asks for job after job: what its later jobs sample again is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.launchers.conftest import table

pytestmark = pytest.mark.launchers

# Without `_self_`, Hydra drops a primary config that lists nothing else when a group is added.
CONFIG = "defaults: [override hydra/sweeper: optuna, _self_]\nlr: 0.1\n"
SWEEP = ("-m", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")


@pytest.fixture
def app(make_app: Callable[..., Any], python_of: Callable[[str], str]) -> Any:
    return make_app(config=CONFIG, task="train(cfg)\nreturn cfg.lr", python=python_of("optuna"))


def test_trials_share_the_rollouts(app: Any) -> None:
    on = ("+skip=rollout_cache", "skip.dump_dir=dumps", "lr=interval(0.01,0.1)")
    run = app.run(*SWEEP, *on)
    assert app.generated == [1, 2]
    assert [row[2:] for row in table(run.out)] == [["0", "2"], ["2", "0"], ["2", "0"]]
    assert "Best parameters: {'lr': 0.0" in run.out


@pytest.mark.parametrize("named", [False, True])
def test_an_option_that_a_trial_chooses(app: Any, named: bool) -> None:
    # Of this seed, the sampler takes cache, repeat, cache. A repeat that came first would leave no
    # dump of step 2, and what it returns at step 2 is not what the application expects.
    seed = "hydra.sweeper.sampler.seed=10"
    swept = (*SWEEP, seed, "+skip=choice(rollout_cache,rollout_repeat)")
    if not named:
        assert "-> add hydra/callbacks=rlskip (Hydra drops" in app.run(*swept, fails=True).err
        assert app.generated == []
        return
    run = app.run(*swept, "hydra/callbacks=rlskip", "skip.dump_dir=dumps")
    assert [row[2:] for row in table(run.out)] == [["0", "2"], ["2", "0"], ["2", "0"]]
    assert app.generated == [1, 2]
    assert "#1 : +skip=rollout_repeat" in run.said
