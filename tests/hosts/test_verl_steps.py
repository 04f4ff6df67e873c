"""Steps of trainers that derive from verl's: which one counts. On a stub of verl."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlskip import SkipManager
from rlskip.batch.tables import DataProtoParts
from rlskip.hosts.verl import trainer as host
from rlskip.hosts.verl.seams import seams
from rlskip.runs.opened import Run
from tests.hosts import verl_stub

# What replaces modules of the stub.
VERL = {
    "agent_loop": """
        import asyncio
        import functools

        from verl.utils.skip.skip_manager import SkipManager

        def auto_await(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return asyncio.run(function(*args, **kwargs))
            return wrapper

        class AgentLoopManager:
            made = []

            def __init__(self, config): ...

            async def _init_agent_loop_workers(self): ...

            @auto_await
            @SkipManager.annotate(role="rollout")
            async def generate_sequences(self, prompts):
                self.made.append(prompts.meta_info)
                return prompts
        """,
    "ray_trainer": """
        from verl.experimental.agent_loop.agent_loop import AgentLoopManager

        def compute_advantage(data): ...

        class RayPPOTrainer:
            def __init__(self, config):
                self.config = config

            def init_workers(self):
                self.manager = AgentLoopManager(self.config)

            def fit(self): ...
            def _validate(self): ...
            def _compute_ref_log_prob(self, batch): ...
        """,
}


@pytest.fixture
def start(
    tmp_path: Path, job: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Callable[..., Any]]]:
    """``start(**skip)``: the trainer of a new run, and its ``generate(token, **meta_info)``.

    `generate` returns the step at which the stage was called.
    """
    verl_stub.write(tmp_path / "site", **VERL)
    (tmp_path / "site/verl/protocol.py").write_text(
        "from rlskip.batch.tables import DataProtoParts as DataProto"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(seams, "missing", {})
    verl_stub.forget()
    seams.attach()

    def start(**skip: Any) -> tuple[Any, Callable[..., Any]]:
        SkipManager.reset()
        for name in ("_installed", "_stated", "_trainer"):
            monkeypatch.setattr(host, name, None)
        trainer_class = importlib.import_module("verl.trainer.ppo.ray_trainer").RayPPOTrainer
        on = {"dump_dir": str(tmp_path / "d"), "rollout": {"enable": True}, **skip}
        trainer = trainer_class({"skip": on})
        trainer.init_workers()
        trainer.manager.made.clear()

        def generate(token: int, **meta: Any) -> int | None:
            rows = TensorDict({"input_ids": torch.tensor([[token]])}, batch_size=1)
            own = {"uid": np.array([object.__repr__(rows)], object)}
            found = trainer.manager.generate_sequences(DataProtoParts(rows, own, meta))
            assert found.non_tensor_batch["uid"].tolist() == own["uid"].tolist(), "not the dump's"
            return SkipManager.step

        return trainer, generate

    yield start
    verl_stub.forget()


def dumped(tmp_path: Path) -> set[str]:
    """The calls that have a dump."""
    [folder] = (tmp_path / "d").glob("*/GBS*")
    return {dump.name for dump in Run(folder).dumps()}


def test_a_trainer_that_never_states_the_step_counts_it(start: Any, tmp_path: Path) -> None:
    for made in (2, 0):
        trainer, generate = start()
        for trainer.global_steps in (1, 2):
            assert generate(trainer.global_steps) == trainer.global_steps
        assert len(trainer.manager.made) == made
    assert dumped(tmp_path) == {"1", "2"}


def test_validation_sets_no_step(start: Any) -> None:
    trainer, generate = start()
    trainer.global_steps = 3
    assert [generate(1, validate=True), generate(1)] == [None, 3]


def test_a_trainer_that_states_the_step_of_validation_only_counts_the_others(
    start: Any, tmp_path: Path
) -> None:
    """As DAPO's, which validates before training and after each step."""
    for made in (6, 2):  # step 3 is not listed
        trainer, generate = start(validation="replay", steps=[1, 2])
        trainer.global_steps = 0
        generate(0, global_steps=0, validate=True)
        for trainer.global_steps in (1, 2, 3):
            for call in (1, 2):
                assert generate(10 * trainer.global_steps + call) == trainer.global_steps
            generate(0, global_steps=trainer.global_steps, validate=True)
        assert [meta.get("global_steps") for meta in trainer.manager.made].count(None) == made
    assert dumped(tmp_path) == {"1/0", "1/1", "2/0", "2/1"}


def test_a_step_that_the_trainer_states_counts_instead(start: Any) -> None:
    trainer, generate = start()
    for trainer.global_steps in (1, 2):
        stated = 7 + trainer.global_steps
        assert generate(trainer.global_steps, global_steps=stated) == stated
    host.next_step(20)
    trainer.global_steps = 3
    assert generate(20) == 20
