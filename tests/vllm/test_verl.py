"""verl with vLLM: A (seed 1) dumps, B (seed 2) replays without an engine and trains the same."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

ROLES = {"v0": "rollout", "v1": "rollout_tq"}
# Two steps of four prompts, two sessions each.
REQUESTS = 16
_GRAD_NORM = re.compile(r"actor/grad_norm:(?:np\.float64\()?([0-9.e+-]+)")


def train(
    vllm: Any, name: str, mode: str, option: str, seed: int = 2, python: Path | None = None
) -> tuple[list[str], list[str]]:
    """Two steps; the grad norms to the last digit, and the lines of vLLM's log."""
    option, dumps = f"+skip={ROLES[mode]}_{option}", f"skip.dump_dir={vllm.folder}/dumps_{mode}"
    env = {
        "VENV": str((python or vllm.python).parents[1]),
        "ASSETS": str(vllm.folder),
        "OUT": str(vllm.folder / name),
        "RAY_TMP": str(vllm.ray),
        "VLLM_SEED": str(seed),
    }
    command = ("bash", vllm.harness / "run_verl.sh", mode, option, "skip.steps=[1,2]", dumps)
    output, lines = vllm.run(name, *command, **env)
    return _GRAD_NORM.findall(output), lines


@pytest.mark.parametrize("mode", ROLES)
def test_a_replay_starts_no_server_and_trains_the_same(vllm: Any, mode: str) -> None:
    made, lines = train(vllm, f"{mode}_a", mode, "cache", seed=1)
    assert len(made) == 2
    assert sum('"server"' in line for line in lines) == 1, "the server holds the engine"
    assert sum('"generate"' in line for line in lines) == REQUESTS
    again, lines = train(vllm, f"{mode}_b", mode, "replay")
    assert again == made
    assert lines == [], "no engine, no server, no request"
    # An environment without vLLM, whose verl is the same.
    other = os.environ.get("RLSKIP_VERL091")
    if other:
        again, lines = train(vllm, f"{mode}_without", mode, "replay", python=Path(other))
        assert (again, lines) == (made, [])
