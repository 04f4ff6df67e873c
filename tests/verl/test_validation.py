"""verl's validation under ``skip.validation=replay``: A (seed 1) dumps, B (seed 2) replays.

B starts no engine. Validation has two batches, before training and after its one step.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(1800)]

VALIDATES = (
    "trainer.val_before_train=True", "trainer.test_freq=1", "data.val_batch_size=1",
    "data.val_max_samples=2", "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "skip.validation=replay", "skip.steps=[1]",
)  # fmt: skip
_METRIC = re.compile(r"(val-(?:core|aux)/\S+?):(\S+)")
CASES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "v0": ("verl091", "v0", "rollout", {}),
    "v1": ("verl091", "v1", "rollout_tq", {}),
    "colocate_async": ("verl091", "v1", "rollout_tq", {"V1_MODE": "colocate_async"}),
    "verl 0.8": ("verl080", "legacy", "rollout", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_validation_is_replayed_without_an_engine(
    request: pytest.FixtureRequest, name: str
) -> None:
    version, mode, role, env = CASES[name]
    verl: Any = request.getfixturevalue(version)
    a = verl.train(
        "validates", mode, f"+skip={role}_cache", "skip.dump_dir=dumps", *VALIDATES, steps=1, **env
    )
    assert a.returncode == 0, a.output[-4000:]
    metrics = _METRIC.findall(a.output)
    assert len({name for name, _ in metrics}) < len(metrics), "before training and after"
    b = verl.train(
        "replays", mode, f"+skip={role}_replay", f"skip.dump_dir={a.folder}/dumps", *VALIDATES,
        "actor_rollout_ref.rollout.name=vllm", seed=2, steps=1, **env,
    )  # fmt: skip
    assert b.returncode == 0, b.output[-4000:]
    assert b.grad_norms == a.grad_norms
    assert len(b.grad_norms) == 1
    assert _METRIC.findall(b.output) == metrics
    assert not (b.folder / "server.jsonl").exists(), "no server, no weights, no generation"
    for job, hits in ((a, 0), (b, 4)):
        found = job.summary["rollout_val"]
        assert (found["hits"], found["misses"]) == (hits, 4 - hits), "twice two batches"
    assert "replayed validation does not show how the weights have changed since" in b.output
