"""TRL with vLLM: A (seed 1) dumps, B (seed 2) replays without an engine and logs the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

APP = Path(__file__).with_name("trl_app.py")
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
# Three steps of two prompts, four completions each.
REQUESTS = 24

# No module and no distribution of that name can be found.
WITHOUT_VLLM = """
import sys
from importlib.machinery import PathFinder

class Finder:
    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] == "vllm"
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def train(vllm: Any, name: str, trainer: str, seed: int = 2, **more: Any) -> tuple[Any, list[str]]:
    env = more.pop("env", {})
    skip = {"dump_dir": str(vllm.folder / f"dumps_{trainer}"), **more.pop("skip", {})}
    job = {"model": str(vllm.folder / "model"), "trainer": trainer, "seed": seed, "skip": skip}
    (vllm.folder / f"{name}.json").write_text(json.dumps({**job, **more}))
    result = vllm.folder / f"{name}.result"
    _, lines = vllm.run(name, vllm.python, APP, vllm.folder / f"{name}.json", result, **env)
    return json.loads(result.read_text()), lines


@pytest.fixture(scope="module")
def first(vllm: Any) -> dict[str, tuple[Any, list[str]]]:
    """A run of each trainer that dumps."""
    return {trainer: train(vllm, f"first_{trainer}", trainer, seed=1) for trainer in TRAINERS}


NO_ENGINE = {"start_engine": False}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_replay_starts_no_engine_and_logs_the_same(vllm: Any, first: Any, trainer: str) -> None:
    made, lines = first[trainer]
    assert made["error"] is None
    assert sum('"engine"' in line for line in lines) == 1
    assert sum('"generate"' in line for line in lines) == REQUESTS
    again, lines = train(vllm, f"again_{trainer}", trainer, skip=NO_ENGINE)
    assert again["error"] is None
    assert lines == []
    assert json.dumps(again["log"]) == json.dumps(made["log"])
    correction = "sampling/importance_sampling_ratio/mean"
    assert (correction in made["log"][0]) == (trainer == "GRPOTrainer")


def test_vllm_need_not_be_importable(vllm: Any, first: Any) -> None:
    (vllm.folder / "without").mkdir()
    (vllm.folder / "without" / "sitecustomize.py").write_text(WITHOUT_VLLM)
    env = {"PYTHONPATH": str(vllm.folder / "without")}
    again, lines = train(vllm, "importable", "GRPOTrainer", skip=NO_ENGINE, env=env)
    assert again["error"] is None
    assert lines == []
    assert json.dumps(again["log"]) == json.dumps(first["GRPOTrainer"][0]["log"])
    engine, _ = train(vllm, "engine", "GRPOTrainer", env=env)
    assert "ImportError" in engine["error"]


def test_no_server_is_asked(vllm: Any, first: Any) -> None:
    args = {"vllm_mode": "server", "vllm_server_timeout": 1.0}
    again, lines = train(vllm, "server", "GRPOTrainer", skip=NO_ENGINE, args=args)
    assert (again["error"], lines) == (None, [])
    assert json.dumps(again["log"]) == json.dumps(first["GRPOTrainer"][0]["log"])


def test_what_would_still_generate_is_refused(vllm: Any, first: Any) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 1}
    refused, lines = train(vllm, "evaluates", "GRPOTrainer", skip=NO_ENGINE, args=args)
    assert "eval_strategy: validation generates, and skip.start_engine=false" in refused["error"]
    holes, more = train(
        vllm, "holes", "GRPOTrainer", skip={**NO_ENGINE, "experiment_name": "another"}
    )
    assert "steps 1-3 have no usable dump" in holes["error"]
    assert lines == more == []
