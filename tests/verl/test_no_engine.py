"""verl without an inference engine: A (seed 1) dumps, B (seed 2) replays and starts no server.

B asks for vLLM, which is not installed in these environments. Validation, where it is replayed, has
two batches, before training and after its one step.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800)]

STEPS = "skip.steps=[1,2]"
# name -> the harness's mode, the role, its environment variables
CASES: dict[str, tuple[str, str, dict[str, str]]] = {
    "v0": ("v0", "rollout", {}),
    "v1": ("v1", "rollout_tq", {}),
    "colocate_async": ("v1", "rollout_tq", {"V1_MODE": "colocate_async"}),
}
ALL = ("data.shuffle=True", "trainer.experiment_name=mine", STEPS)
EACH = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def made(verl091: Any) -> Callable[[str], Any]:
    """``made(name)``: A of that case, with a checkpoint of each step."""

    @functools.cache
    def run(name: str) -> Any:
        mode, role, env = CASES[name]
        on = (f"+skip={role}_cache", "skip.dump_dir=dumps", "trainer.save_freq=1")
        a = verl091.train("engine", mode, *ALL, *on, **env)
        assert len(a.grad_norms) == 2
        assert a.generated > 0
        return a

    return run


def replay(train: Any, a: Any, name: str, *more: str) -> Any:
    mode, role, env = CASES[name]
    on = (f"+skip={role}_replay", f"skip.dump_dir={a.folder}/dumps")
    vllm = "actor_rollout_ref.rollout.name=vllm"
    b = train("no_engine", mode, *ALL, *on, vllm, *more, seed=2, **env)
    assert not (b.folder / "server.jsonl").exists(), "no server, no weights, no generation"
    assert "AgentLoopWorker" not in b.output
    return b


@pytest.mark.parametrize(
    "name", ["v1", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "v1")]
)
def test_a_replay_starts_no_server_and_trains_the_same(verl091: Any, made: Any, name: str) -> None:
    a, role = made(name), CASES[name][1]
    b = replay(verl091.train, a, name)
    assert b.grad_norms == a.grad_norms
    assert (b.summary[role]["hits"], b.summary[role]["misses"]) == (2, 0)


@pytest.mark.long
@EACH
def test_a_resumed_run_replays_what_is_left_and_a_new_reward_scores_it(
    verl091: Any, made: Any, name: str
) -> None:
    a = made(name)
    resumed = replay(verl091.train, a, name, *a.resume_after(1))
    assert resumed.grad_norms == a.grad_norms[1:]
    assert replay(verl091.train_by_coin, a, name).grad_norms != a.grad_norms


VALIDATES = (
    "trainer.val_before_train=True", "trainer.test_freq=1", "data.val_batch_size=1",
    "data.val_max_samples=2", "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "skip.validation=replay", "skip.steps=[1]",
)  # fmt: skip
_METRIC = re.compile(r"(val-(?:core|aux)/\S+?):(\S+)")


@pytest.mark.long
@EACH
def test_validation_is_replayed_without_an_engine(verl091: Any, name: str) -> None:
    mode, role, env = CASES[name]
    a = verl091.train(
        "validates", mode, f"+skip={role}_cache", "skip.dump_dir=dumps", *VALIDATES, steps=1, **env
    )
    metrics = _METRIC.findall(a.output)
    assert len({name for name, _ in metrics}) < len(metrics), "before training and after"
    b = verl091.train(
        "replays", mode, f"+skip={role}_replay", f"skip.dump_dir={a.folder}/dumps", *VALIDATES,
        "actor_rollout_ref.rollout.name=vllm", seed=2, steps=1, **env,
    )  # fmt: skip
    assert b.grad_norms == a.grad_norms
    assert len(b.grad_norms) == 1
    assert _METRIC.findall(b.output) == metrics
    assert not (b.folder / "server.jsonl").exists(), "no server, no weights, no generation"
    for job, hits in ((a, 0), (b, 4)):
        found = job.summary["rollout_val"]
        assert (found["hits"], found["misses"]) == (hits, 4 - hits), "twice two batches"
    assert "replayed validation does not show how the weights have changed since" in b.output


@pytest.mark.long
def test_a_manager_of_the_users_own_works_on_what_is_replayed(verl091: Any, tmp_path: Path) -> None:
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=own_manager.OwnManager"
    env = {"PYTHONPATH": str(Path(__file__).parent), "NOTES": str(tmp_path / "notes")}
    a = verl091.train("own", "v0", "+skip=rollout_cache", STEPS, "skip.dump_dir=dumps", own, **env)
    b = verl091.train(
        "own", "v0", "+skip=rollout_replay", STEPS, f"skip.dump_dir={a.folder}/dumps", own, seed=2,
        **env,
    )  # fmt: skip
    assert b.grad_norms == a.grad_norms
    assert len(a.grad_norms) == 2
    assert len((tmp_path / "notes").read_text().splitlines()) == 2, "made in both runs"
    assert not (b.folder / "server.jsonl").exists()


def test_what_would_still_generate_is_refused_before_ray(verl091: Any) -> None:
    run = verl091.train(
        "refused", "v0", "+skip=rollout_replay", "skip.steps=[1]", "skip.dump_dir=dumps",
        "trainer.val_before_train=True", "trainer.test_freq=1", fails=True,
    )  # fmt: skip
    for problem in (
        "steps 1 have no usable dump in",
        "set trainer.val_before_train=False",
        "set trainer.test_freq=-1",
        "steps 2 are not listed and would generate",
    ):
        assert problem in run.output
    assert not run.started_ray


def test_verls_own_classes_start_nothing_and_refuse_by_name(verl091: Any) -> None:
    done = subprocess.run(
        [verl091.python, "-W", "ignore", Path(__file__).with_name("seams.py")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    what = "NoEngineError: skip.start_engine=false: rlskip started no inference engine, and "
    assert found.pop("manager").startswith(f"{what}step 7 asks for validation")
    nothing = {"missing": [], "synced": {}, "workers": ["NoWorker"]}
    assert found == {**nothing, "rollout": "NoRollout", "replica": "NoReplica"}
