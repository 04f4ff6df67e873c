"""verl's V1 trainer, killed in mid-step: the next start generates what is missing, and no more.

The agent loop samples by prompt, session and weights, so a run that resumes equals one that was
never killed, to the last bit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.verl, pytest.mark.long, pytest.mark.timeout(2400)]

STEPS, PROMPTS, N = 2, 4, 2
A_STEP = PROMPTS * N
SESSIONS = STEPS * A_STEP
HERE = Path(__file__).parent
AGENT = "actor_rollout_ref.rollout.agent"
JOURNAL = ("+dispatch=rollout_level", "dispatch.journal=true", "trainer.experiment_name=mine")
WHERE = "mine_verlcpu/GBS4_N2_in64_out16"
ROLE = "+skip=rollout_tq_cache"


def run(verl: Any, name: str, *more: str, stop_at: int | None = None, **env: Any) -> Any:
    """A run whose sessions are seeded; killed once `stop_at` sessions were made and journaled."""
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
        env.update(STOP_AT=str(stop_at), until=killed)
    return verl.train(
        name, "v1", *JOURNAL, f"++skip.dump_dir={dumps}",
        f"{AGENT}.agent_loop_config_path={loops}", f"{AGENT}.default_agent_loop=seeded",
        *more, PYTHONPATH=str(HERE), NOTES=str(notes), **env,
    )  # fmt: skip


def test_a_run_without_dumps_resumes_from_its_journals(verl091: Any) -> None:
    killed = run(verl091, "killed", stop_at=A_STEP + 3)
    assert killed.generated == A_STEP + 3
    assert len(killed.grad_norms) == 1
    again = run(verl091, "killed")
    assert again.returncode == 0, again.output[-4000:]
    assert again.generated == SESSIONS - A_STEP - 3
    whole = run(verl091, "whole")
    assert whole.returncode == 0, whole.output[-4000:]
    assert whole.generated == SESSIONS
    assert again.grad_norms == whole.grad_norms
    assert len(whole.grad_norms) == STEPS
