"""verl's V1 trainer, killed in mid-step: the next start generates what is missing, and no more.

The agent loop samples by prompt, session and weights, so a run that resumes equals one that was
never killed, to the last bit.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip.keys import split_session, split_trajectory
from rlskip.store import StepStore

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(2400)]

STEPS, PROMPTS, N = 2, 4, 2
A_STEP = PROMPTS * N
SESSIONS = STEPS * A_STEP
HERE = Path(__file__).parent
AGENT = "actor_rollout_ref.rollout.agent"
JOURNAL = ("+skip=rollout_tq_cache", "+dispatch=rollout_level", "dispatch.journal=true")
WHERE = "mine_verlcpu/GBS4_N2_in64_out16"


def run(
    verl: Any,
    name: str,
    *more: str,
    stop_at: int | None = None,
    kill: Any = None,
    journal: tuple[str, ...] = JOURNAL,
    **env: Any,
) -> Any:
    """A run whose sessions are seeded; `kill` acts once `stop_at` were made and journaled."""
    loops = verl.folder / "seeded.yaml"
    loops.write_text("- {name: seeded, _target_: loops.Seeded}\n")
    dumps = verl.folder / name

    notes = Path(f"{dumps}-notes-{stop_at}")

    def killed() -> bool:
        if not notes.exists() or len(notes.read_text().splitlines()) < (stop_at or 0):
            return False
        time.sleep(5)  # until they are journaled, and nothing else can happen
        return True

    if stop_at is not None:
        env.update(STOP_AT=str(stop_at), until=killed, kill=kill)
    return verl.train(
        name, "v1", *journal, "trainer.experiment_name=mine", f"skip.dump_dir={dumps}",
        f"{AGENT}.agent_loop_config_path={loops}", f"{AGENT}.default_agent_loop=seeded",
        *more, PYTHONPATH=str(HERE), NOTES=str(notes), **env,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(verl091: Any) -> Any:
    done = run(verl091, "whole")
    assert done.generated == SESSIONS
    assert len(done.grad_norms) == STEPS
    return done


def everything(processes: Any) -> None:
    processes.end()


def the_driver(processes: Any) -> None:
    """The process that the user started, and no other; Ray ends by itself."""
    processes.kill(b"verl.trainer.main_ppo")
    deadline = time.monotonic() + 120
    while processes.find() and time.monotonic() < deadline:
        time.sleep(0.2)
    processes.end()


@pytest.mark.parametrize("kill", [everything, the_driver])
def test_a_killed_run_resumes_in_mid_step(
    verl091: Any, whole: Any, kill: Callable[[Any], None]
) -> None:
    name = f"killed_{kill.__name__}"
    killed = run(verl091, name, stop_at=A_STEP + 3, kill=kill)
    assert killed.generated == A_STEP + 3
    assert len(killed.grad_norms) == 1
    again = run(verl091, name)
    assert again.generated == SESSIONS - A_STEP - 3
    assert again.grad_norms == whole.grad_norms


def test_a_killed_worker_costs_the_sessions_in_flight(verl091: Any, whole: Any) -> None:
    """Its successor runs them in the same job."""
    notes = Path(f"{verl091.folder / 'worker'}-notes-{A_STEP + 3}")

    def kill(processes: Any) -> None:
        [worker] = processes.find(b"ray::Actor")
        os.kill(worker, signal.SIGKILL)
        notes.with_name(f"{notes.name}.go").touch()

    done = run(verl091, "worker", stop_at=A_STEP + 3, kill=kill)
    assert done.returncode == 0, done.output[-4000:]
    assert done.generated == SESSIONS
    assert done.grad_norms == whole.grad_norms
    made = Counter(notes.read_text().splitlines())
    assert set(made.values()) == {1}, "no session twice"


def test_a_replay_refuses_a_killed_step_until_a_run_completes_it(verl091: Any, whole: Any) -> None:
    run(verl091, "plain", stop_at=A_STEP + 3)
    refused = run(verl091, "plain", "+skip=rollout_tq_replay", journal=(), fails=True)
    assert "step 2 has a journal, which dispatch.journal=true completes" in refused.output
    assert not refused.started_ray
    done = run(verl091, "plain")
    assert done.generated == A_STEP - 3
    assert done.grad_norms == whole.grad_norms


def test_colocate_async_resumes_the_step_that_has_no_dump(verl091: Any) -> None:
    mode = {"V1_MODE": "colocate_async"}
    whole = run(verl091, "async_whole", **mode)
    killed = run(verl091, "async_killed", stop_at=A_STEP + 3, **mode)
    assert killed.generated == A_STEP + 3
    folder = verl091.folder / "async_killed" / WHERE
    assert StepStore(folder).steps() == [1]
    assert [path.name for path in folder.glob("*.journal")] == ["2.journal"]
    again = run(verl091, "async_killed", **mode)
    assert again.generated == A_STEP - 3
    assert again.grad_norms == whole.grad_norms
    assert list(folder.glob("*.journal")) == [], "the dumps are there"
    for group in StepStore(folder).load(2)["groups"]:
        keys = [group["uid"] + suffix for suffix in group["tags"] if suffix]
        assert sorted(filter(None, map(split_session, keys))) == [
            (group["uid"], session) for session in range(N)
        ], "one marker a session"
        assert len([key for key in keys if split_trajectory(key)]) == N
