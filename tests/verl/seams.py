"""Calls verl's own classes where no engine was chosen; prints what became of it, as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import verl.trainer.ppo.ray_trainer  # noqa: F401 - all modules that a trainer imports
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from rlskip.hosts.verl import no_engine
from rlskip.hosts.verl.seams import seams

CONFIG: Any = {"actor_rollout_ref": {"rollout": {"name": no_engine.NO_ENGINE}}}


def bare(cls: type, **attributes: Any) -> Any:
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        result = call(*args, **kwargs)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return "none"


worker = bare(ActorRolloutRefWorker, config=OmegaConf.create(CONFIG).actor_rollout_ref)
manager = bare(AgentLoopManager, config=CONFIG)
asyncio.run(manager._init_agent_loop_workers())
print(
    json.dumps(
        {
            "missing": list(seams.missing),
            "rollout": get_rollout_class(no_engine.NO_ENGINE, "async").__name__,
            "replica": get_rollout_replica_class(no_engine.NO_ENGINE).__name__,
            "synced": asyncio.run(worker.update_weights(3)),
            "workers": [type(worker).__name__ for worker in manager.agent_loop_workers],
            "manager": error(
                manager.generate_sequences,
                DataProto(meta_info={"global_steps": 7, "validate": True}),
            ),
        }
    )
)
