"""verl 0.8's ``main_ppo_sync``, the forerunner of V1, with its own replay buffer.

The whole trainer is one module, which ``python -m`` runs as ``__main__``. Its classes then travel
to Ray by value and no seam reaches them, so the launcher process starts the task runner of the
imported module (:func:`start_imported_runner`).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict

from rlskip._wrap import Seams
from rlskip.batch.meta import is_validation
from rlskip.batch.prompts import uids_of
from rlskip.hosts.verl.names import MAIN_PPO_SYNC
from rlskip.hosts.verl.run_queue import expect_sessions, run_queue
from rlskip.hosts.verl.trainer import begin
from rlskip.hosts.verl.trainer_config import judge
from rlskip.hosts.verl.v1 import score_dropped, submit_stages
from rlskip.keys import GLOBAL_STEPS, RUNNING, STATUS, TRAIN
from rlskip.skip import SkipManager

_ROLE = "rollout_tq"

_seams = Seams(__name__)
attach = _seams.attach


def start_imported_runner() -> None:
    """In the launcher process: have ``__main__`` start the task runner of the imported module."""
    sys.modules["__main__"].TaskRunner = importlib.import_module(MAIN_PPO_SYNC).TaskRunner  # type: ignore[attr-defined]


@_seams.around(f"{MAIN_PPO_SYNC}:PPOTrainer.__init__")
def _beginning(
    init: Callable[..., None], self: Any, config: DictConfig, *args: Any, **kwargs: Any
) -> None:
    """The roles are switched on before any model is loaded."""
    judge(config, begin(config), main=MAIN_PPO_SYNC)
    init(self, config, *args, **kwargs)


@_seams.decorated(f"{MAIN_PPO_SYNC}:AgentLoopManagerTQ.generate_sequences")
def _submitting(generate: Callable[..., None]) -> Callable[..., None]:
    """Phase submit.

    The prompts are first marked as running in verl's buffer: a replayed group that it sees before
    that has no step.
    """
    stages = submit_stages(
        generate, _ROLE, "verl.submit", lambda *_: run_queue(), prompts="prompts"
    )

    @functools.wraps(generate)
    def submitting(self: Any, prompts: TensorDict) -> None:
        skip = SkipManager.skip_instances.get(_ROLE)
        if skip is None or is_validation(prompts):
            generate(self, prompts)
            return
        step, uids = prompts[GLOBAL_STEPS], uids_of(prompts)
        self.replay_buffer.add(TRAIN, {uid: {GLOBAL_STEPS: step, STATUS: RUNNING} for uid in uids})
        SkipManager.set_step(step)
        expect_sessions(prompts, TRAIN)
        stages["submit"](self, prompts)
        score_dropped(skip, prompts, self.reward_loop_worker_handles)

    return submitting


@_seams.decorated(f"{MAIN_PPO_SYNC}:ReplayBuffer.sample")
def _sampling(sample: Callable[..., Any]) -> Callable[..., Any]:
    stage = SkipManager.annotate(
        role=_ROLE, stage="verl.sample", phase="sample", queue=lambda *_, **__: run_queue()
    )(sample)

    @functools.wraps(sample)
    def sampling(self: Any, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        on = partition_id == TRAIN and _ROLE in SkipManager.skip_instances
        return (stage if on else sample)(self, partition_id, *args, **kwargs)

    return sampling
