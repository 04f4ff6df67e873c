"""The example trainer generates the same rollouts however its sessions are dispatched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "trainer.total_training_steps=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
)
DISPATCH = "+dispatch=rollout_level"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Train, and return what `metrics.jsonl` says, times aside."""

    def run(*overrides: str) -> list[dict[str, float]]:
        output = tmp_path_factory.mktemp("train")
        done = subprocess.run(
            [sys.executable, "train.py", *SMALL, f"hydra.run.dir={output}", *overrides],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return [
            {name: value for name, value in json.loads(line).items() if "time/" not in name}
            for line in lines
        ]

    return run


@pytest.fixture(scope="module")
def undispatched(figures):
    return figures()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_in_this_process(figures, undispatched, workers):
    assert figures(DISPATCH, f"dispatch.workers={workers}") == undispatched


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_on_ray(figures, undispatched):
    assert figures(DISPATCH, "dispatch.pool=ray", "dispatch.workers=2") == undispatched
