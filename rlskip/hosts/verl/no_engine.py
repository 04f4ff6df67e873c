"""verl before workers are made: what the run must not generate, and no inference engine for it.

The launcher process looks before Ray starts, as far as the config tells; the process that trains
looks again when its data loader tells the number of steps. Under ``skip.start_engine: false`` it
then names the engine :data:`NO_ENGINE`, and what verl finds under that name starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rlskip.batch.meta import is_validation, meta_of
from rlskip.config.check import Problem, look_up, raise_all
from rlskip.config.facts import HostFacts
from rlskip.config.settings import SkipSettings
from rlskip.errors import NoEngineError
from rlskip.hosts.verl.facts import MODE_KEY, with_steps
from rlskip.hosts.verl.seams import LOOPS, REPLICAS, ROLLOUTS, WEIGHTS, seams
from rlskip.hosts.verl.seams import NO_ENGINE as FEATURE
from rlskip.skip import SkipManager
from rlskip.skip.preflight import Roles, preflight

NO_ENGINE = "rlskip_no_engine"

_START = "skip.start_engine=true"
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
# Keys that put the engine on GPUs of its own: the value that does so, and one that does not.
_SEPARATES = (
    (MODE_KEY, "separate_async", "colocate_async"),
    ("actor_rollout_ref.hybrid_engine", False, True),
)
# V1 replays what a manager submits, so the user's manager need not make its workers. A manager
# of V0 may work on what is replayed.
_MANAGER = "agent.agent_loop_manager_class"


def problems(
    settings: SkipSettings, roles: Roles, trains: HostFacts | None = None
) -> list[Problem]:
    """All that a run would generate although it must not; `trains`: in the process that trains."""
    # Without a data loader it is certain that an epoch has one step.
    config, facts = settings.facts.config, trains or with_steps(settings.facts, None, 1)
    found = preflight(roles, facts, engine=settings.start_engine, here=trains is not None)
    if settings.start_engine:
        return found
    if look_up(config, "async_training") is not None:
        what = "the fully async application keeps its engine on separate GPUs"
        return [Problem("skip.start_engine", what, f"set {_START}")]
    return found + [
        Problem(key, "the engine is on separate GPUs", f"set {key}={shared}, or {_START}")
        for key, separate, shared in _SEPARATES
        if look_up(config, key) == separate
    ]


def before_workers(config: Any, total: int | None, per_epoch: int | None = None) -> None:
    """Refuse the same in the process that trains, which knows its steps; choose the engine."""
    settings = SkipManager.settings
    if settings is None or not settings.roles:
        return
    facts = with_steps(settings.facts, total, per_epoch)
    raise_all(problems(settings, SkipManager.skip_instances, facts))
    if not settings.start_engine:
        choose(config)


def choose(config: DictConfig) -> None:
    """Change verl's config, in place, so that no engine is started."""
    seams.require(FEATURE)
    chosen = _CHOSEN | ({_MANAGER: None} if look_up(config, "trainer.use_v1") else {})
    with open_dict(config):
        for key, value in chosen.items():
            if look_up(config, f"{_ROLLOUT}.{key}") is not None:
                OmegaConf.update(config, f"{_ROLLOUT}.{key}", value)


@seams.on_import(ROLLOUTS)
def _register_rollout(registry: Any) -> None:
    registry[(NO_ENGINE, "async")] = f"{__package__}.no_rollout.NoRollout"


@seams.on_import(REPLICAS)
def _register_replica(register: Any) -> None:
    """Replicas without servers: waking them, putting them to sleep and aborting do nothing."""

    def load() -> Any:
        from verl.workers.rollout.replica import RolloutReplica

        class NoReplica(RolloutReplica):  # type: ignore[misc]
            async def launch_servers(self) -> None:
                """Start nothing; verl wants different addresses."""
                self._server_address = f"rlskip-no-engine-{self.replica_rank}"

        return NoReplica

    register(NO_ENGINE, load)


class NoWorker:
    """In the place of agent-loop workers: an actor that refuses to generate."""

    @property
    def generate_sequences(self) -> NoWorker:
        return self

    def remote(self, prompts: Any) -> None:
        meta = meta_of(prompts) or prompts  # a DataProto, or the TensorDict of V1
        what = "validation" if is_validation(prompts) else "generation"
        raise NoEngineError.of(f"step {meta.get('global_steps', None)} asks for {what}")


@seams.around(f"{LOOPS}._init_agent_loop_workers")
async def _making_workers(start: Callable[..., Any], self: Any) -> None:
    if look_up(self.config, f"{_ROLLOUT}.name") == NO_ENGINE:
        self.agent_loop_workers = [NoWorker()]
    else:
        await start(self)


@seams.around(WEIGHTS)
async def _syncing(update: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Nothing is sent: FSDP1 and LoRA would gather weights."""
    engine = look_up(self.config, "rollout.name")
    return {} if engine == NO_ENGINE else await update(self, *args, **kwargs)
