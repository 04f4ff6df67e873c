"""verl without an inference engine (``skip.start_engine: false``).

The process that trains chooses :data:`NO_ENGINE` as ``actor_rollout_ref.rollout.name`` before it
makes workers (:func:`choose`). What verl then finds under that name starts nothing; reward models
and teachers keep their own engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rlskip._wrap import around
from rlskip.batch.meta import is_validation, meta_of
from rlskip.config.check import look_up
from rlskip.errors import NoEngineError
from rlskip.hosts.verl.seams import AGENT_LOOP, SERVERS, seams
from rlskip.hosts.verl.seams import NO_ENGINE as FEATURE

NO_ENGINE = "rlskip_no_engine"

_ROLLOUT = "actor_rollout_ref.rollout"
# An engine's own settings, which verl checks against the number of GPUs or the engine's name.
_CHOSEN = {
    "name": NO_ENGINE,
    "tensor_model_parallel_size": 1,
    "data_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_parallel_size": 1,
    "moe_tensor_parallel_size": None,
    "disaggregation.enabled": False,
    "prometheus.enable": False,
}
# V1 replays what a manager submits, so the user's manager need not make its workers. A manager
# of V0 may work on what is replayed.
_CHOSEN_IN_V1 = {"agent.agent_loop_manager_class": None}


def choose(config: DictConfig) -> None:
    """Change verl's config, in place, so that no engine is started."""
    seams.require(FEATURE)
    chosen = {**_CHOSEN, **(_CHOSEN_IN_V1 if look_up(config, "trainer.use_v1") else {})}
    with open_dict(config):
        for key, value in chosen.items():
            if OmegaConf.select(config, f"{_ROLLOUT}.{key}") is not None:
                OmegaConf.update(config, f"{_ROLLOUT}.{key}", value)


def is_chosen(config: Any) -> bool:
    """Whether :func:`choose` was applied to `config`."""
    return bool(look_up(config, f"{_ROLLOUT}.name") == NO_ENGINE)


@seams.on_import("verl.workers.rollout.base:_ROLLOUT_REGISTRY")
def _register_rollout(registry: Any) -> None:
    """The actor's workers get a rollout that keeps nothing and takes no weights."""
    registry[(NO_ENGINE, "async")] = f"{__name__}_classes.NoRollout"


@seams.on_import("verl.workers.rollout.replica:RolloutReplicaRegistry.register")
def _register_replica(register: Any) -> None:
    """Replicas whose ``launch_servers`` starts nothing."""

    def load() -> Any:
        from rlskip.hosts.verl.no_engine_classes import NoReplica

        return NoReplica

    register(NO_ENGINE, load)


# -- the seams -----------------------------------------------------------------------------


@seams.around(f"{SERVERS}:LLMServerManager._init_global_load_balancer")
async def _balancing(start: Callable[..., Any], self: Any) -> None:
    """No actor, because there are no servers."""
    if is_chosen(self.config):
        self.global_load_balancer = None
    else:
        await start(self)


@seams.around(f"{AGENT_LOOP}:AgentLoopManager._init_agent_loop_workers")
async def _making_workers(start: Callable[..., Any], self: Any) -> None:
    if is_chosen(self.config):
        self.agent_loop_workers = []
    else:
        await start(self)


@seams.decorated("verl.checkpoint_engine.base:CheckpointEngineManager.update_weights")
def _syncing(update: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is sent: FSDP1 and LoRA would gather weights."""
    from verl.utils.ray_utils import auto_await

    @around
    async def syncing(update: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.replicas and all(replica.config.name == NO_ENGINE for replica in self.replicas):
            return {}
        return await update(self, *args, **kwargs)

    return auto_await(syncing(inspect.unwrap(update)))  # type: ignore[no-any-return]


def refuse_to_generate(config: Any, prompts: Any) -> None:
    """Raise :class:`NoEngineError` if the engine that would answer `prompts` was not started."""
    if not is_chosen(config):
        return
    meta = meta_of(prompts) or prompts  # a DataProto, or the TensorDict of V1
    step = meta.get("global_steps", None)
    what = "validation" if is_validation(prompts) else "generation"
    raise NoEngineError.of(f"step {step} asks for {what}")
