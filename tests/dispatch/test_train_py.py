"""The example trainer generates the same rollouts however its sessions are dispatched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlskip.dispatch.journal import frames

ROOT = Path(__file__).parents[2]
SMALL = (
    "trainer.total_training_steps=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
)
DISPATCH = "+dispatch=rollout_level"


def start(*overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train.py", *SMALL, *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Train, and return what `metrics.jsonl` says, times aside."""

    def run(*overrides: str) -> list[dict[str, float]]:
        output = tmp_path_factory.mktemp("train")
        process = start(f"hydra.run.dir={output}", *overrides)
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said[-3000:]
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


@pytest.mark.slow
def test_a_killed_step_resumes_from_its_journal(figures, undispatched, tmp_path):
    options = (
        DISPATCH, "dispatch.journal=true", "dispatch.workers=1",
        "dispatch.max_concurrent_rollouts_per_worker=1", "+skip=rollout_cache",
        f"skip.dump_dir={tmp_path}",
    )  # fmt: skip
    killed = start(f"hydra.run.dir={tmp_path / 'killed'}", *options)
    deadline = time.monotonic() + 60
    while not (found := [f for f in tmp_path.rglob("1.journal") if f.stat().st_size > 3000]):
        assert killed.poll() is None
        assert time.monotonic() < deadline
    killed.kill()
    killed.communicate()
    (journal,) = found
    before = journal.read_bytes()

    assert figures(*options, "trainer.total_training_steps=1") == undispatched[:1]
    # The journal was only appended to, and only the rest was generated.
    assert journal.read_bytes().startswith(before)
    with journal.open("rb") as file:
        ends = [start + len(line) for start, line, found in frames(file, "") if found]
    assert 1 <= sum(end <= len(before) for end in ends) < 16
    assert len(ends) == 16


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_on_ray(figures, undispatched):
    assert figures(DISPATCH, "dispatch.pool=ray", "dispatch.workers=2") == undispatched
