"""Steps of trainers that derive from verl's, in a process with a stub of verl: which one counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# As much of verl as the plug-in wraps.
VERL = {
    "__init__.py": "__version__ = '0.9.1'\nimport rlskip.hosts.verl.plugin\n",
    "protocol.py": "from rlskip.batch.tables import DataProtoParts as DataProto\n",
    "utils/ray_utils.py": """
        import asyncio, functools

        def auto_await(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return asyncio.run(function(*args, **kwargs))
            return wrapper
        """,
    "experimental/agent_loop/agent_loop.py": """
        class AgentLoopManager:
            made = []

            def __init__(self, config): ...

            async def generate_sequences(self, prompts):
                self.made.append(prompts.meta_info)
                return prompts
        """,
    "trainer/ppo/ray_trainer.py": """
        from verl.experimental.agent_loop.agent_loop import AgentLoopManager

        class RayPPOTrainer:
            def __init__(self, config):
                self.config = config

            def init_workers(self):
                self.manager = AgentLoopManager(self.config)
        """,
}

APP = """
import json, sys
import numpy as np, torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from rlskip import SkipManager

class Trainer(RayPPOTrainer):
    def generate(self, token, **meta):
        rows = TensorDict({"input_ids": torch.tensor([[token]])}, batch_size=1)
        self.manager.generate_sequences(DataProto(rows, {}, meta))
        return SkipManager.step

trainer = Trainer({"skip": {"dump_dir": sys.argv[1], "rollout": {"enable": True}}})
trainer.init_workers()
seen = []
"""


@pytest.fixture
def steps(tmp_path: Path, python: Any, python_path: Callable[..., str]) -> Callable[[str], object]:
    """``steps(loop)``: what `loop` appends to the list `seen`, in a process with the stub."""
    for name, source in VERL.items():
        file = tmp_path / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / parent / "__init__.py").touch()
        lines = source.splitlines()
        file.write_text("\n".join(line.removeprefix(" " * 8) for line in lines))

    def run(loop: str) -> object:
        env = {**os.environ, "PYTHONPATH": python_path(tmp_path), "RLSKIP_JOB": "job"}
        seen, _ = python.json(f"{APP}{loop}\nprint(json.dumps(seen))", tmp_path / "d", env=env)
        return seen

    return run


def test_a_trainer_that_never_states_the_step_counts_it(
    steps: Callable[[str], object], tmp_path: Path
) -> None:
    loop = """
for trainer.global_steps in (1, 2):
    seen.append(trainer.generate(trainer.global_steps))
seen.append(len(trainer.manager.made))
"""
    assert steps(loop) == [1, 2, 2]
    assert steps(loop) == [1, 2, 0]
    assert {path.parent.name for path in (tmp_path / "d").rglob("gen_batch.dp")} == {"1", "2"}


def test_validation_sets_no_step(steps: Callable[[str], object]) -> None:
    loop = """
trainer.global_steps = 3
seen += [trainer.generate(1, validate=True), trainer.generate(1)]
"""
    assert steps(loop) == [None, 3]


def test_validation_is_replayed_at_the_step_that_its_batch_states(
    steps: Callable[[str], object], tmp_path: Path
) -> None:
    loop = """
from rlskip.hosts.verl.trainer import next_step
skip = {"dump_dir": sys.argv[1], "rollout": {"enable": True}, "validation": "replay"}
trainer = Trainer({"skip": skip})
trainer.init_workers()
for step in (0, 1, 2):
    if step:
        next_step(step)
        trainer.generate(step, global_steps=step)
    seen += [trainer.generate(token, global_steps=step, validate=True) for token in (7, 8)]
seen.append(len(trainer.manager.made))
"""
    assert steps(loop) == [0, 0, 1, 1, 2, 2, 8]
    assert steps(loop) == [0, 0, 1, 1, 2, 2, 0]
    [folder] = (tmp_path / "d").rglob("rollout_val")
    calls = {str(file.parent.relative_to(folder)) for file in folder.rglob("gen_batch.dp")}
    assert calls == {f"{step}{call}" for step in (0, 1, 2) for call in ("", "/1")}


def test_a_trainer_that_states_the_step_of_validation_only_counts_the_others(
    steps: Callable[[str], object], tmp_path: Path
) -> None:
    """As DAPO's, which validates before training and after each step."""
    loop = """
skip = {"dump_dir": sys.argv[1], "rollout": {"enable": True}, "validation": "replay"}
trainer = Trainer({"skip": {**skip, "steps": [1, 2]}})
trainer.init_workers()
trainer.global_steps = 0
trainer.generate(0, global_steps=0, validate=True)
for trainer.global_steps in (1, 2, 3):
    seen += [trainer.generate(10 * trainer.global_steps + call) for call in (1, 2)]
    trainer.generate(0, global_steps=trainer.global_steps, validate=True)
seen.append([meta.get("global_steps") for meta in trainer.manager.made].count(None))
"""
    assert steps(loop) == [1, 1, 2, 2, 3, 3, 6]
    assert steps(loop) == [1, 1, 2, 2, 3, 3, 2], "step 3 is not listed"
    dumps = [path.parent for path in (tmp_path / "d").rglob("gen_batch.dp")]
    trained = {"/".join(p.parts[-2:]) for p in dumps if "rollout_val" not in p.parts}
    assert {name.removeprefix("GBSany_Nany_inany_outany/") for name in trained} == {
        *("1", "1/1", "2", "2/1")
    }


def test_a_step_that_the_trainer_states_counts_instead(steps: Callable[[str], object]) -> None:
    loop = """
for trainer.global_steps in (1, 2):
    seen.append(trainer.generate(trainer.global_steps, global_steps=7 + trainer.global_steps))
SkipManager.set_step(20)
for trainer.global_steps in (3, 4):
    seen.append(trainer.generate(20))
"""
    assert steps(loop) == [8, 9, 20, 20]
