"""verl's stages after the rollouts: reference log-probs, role ``ref``; scores, role ``reward``.

Scores are a stage where a reward model shares the rollouts' GPUs. Else verl scores each session as
it ends, and the dumps of the rollouts hold the scores.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from rlskip.config.check import Problem, leaves, look_up
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import SKIP_REGISTRY, VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.hosts.verl.facts import SCORES, rows_of
from rlskip.hosts.verl.seams import LATER_STAGES, REWARD_LOOP, V0_TRAINER, V1_TRAINER, seams
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

REF = "ref"
REWARD = "reward"

_MODEL = "actor_rollout_ref.model"
_LORA = (f"{_MODEL}.lora.rank", f"{_MODEL}.lora_rank", f"{_MODEL}.lora_adapter_path")
_FUNCTION = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"
# What log-probs and scores of given tokens depend on, by role.
_SHAPING = {
    REF: (
        f"{_MODEL}.path", f"{_MODEL}.hf_config_path", f"{_MODEL}.override_config",
        f"{_MODEL}.external_lib", "actor_rollout_ref.rollout.temperature",
    ),
    REWARD: (
        _FUNCTION, _MANAGER, "reward.reward_kwargs", "reward.reward_model.enable",
        "reward.reward_model.model_path", "reward.sandbox_fusion.url",
    ),
}  # fmt: skip
# Of the engine that computes log-probs, for FSDP and Megatron.
_PRECISION = ("model_dtype", "dtype", "mixed_precision")
# Fields of a batch that log-probs depend on, and the tensors that scores depend on.
_TOKENS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses")
_IMAGES = ("multi_modal_inputs", "raw_prompt")
_SCORED = ("prompts", "responses", "attention_mask")
_ROWS = ("input_ids", "position_ids", "prompts", "responses", "raw_prompt")

# Whether the trainer validates at present, and no role replays that.
_validating = False


def identity(role: str, config: Any) -> dict[str, Any]:
    """What in `config` shapes the results of a role of this module."""
    keys, known = [*_SHAPING[role]], {}
    if role == REF:
        # Of an actor with a LoRA adapter the reference is the actor without it.
        engine = "actor" if any(look_up(config, key) for key in _LORA) else "ref"
        known["reference"] = engine
        for of in ("fsdp_config", "megatron"):
            keys += [f"actor_rollout_ref.{engine}.{of}.{name}" for name in _PRECISION]
    for key in (f"{_FUNCTION}.path", f"{_MANAGER}.module.path") if role == REWARD else ():
        if module := look_up(config, key):
            known[f"content of {key}"] = _content(module, key)
    values = {k: v for key in keys for k, v in leaves(look_up(config, key), key)}
    return {
        key: value
        for key, value in {**values, **known}.items()
        if value not in (None, {}) and not key.endswith("._target_")
    }


def _content(module: str, key: str) -> str:
    """A hash of the `module` that a key names: a reward function is often changed in its place."""
    try:  # verl takes the module's path, as an URL, too, or its name
        file = Path(module.removeprefix("file://")).expanduser()
        if module.startswith("pkg://"):
            spec = find_spec(module.removeprefix("pkg://").replace("/", "."))
            file = Path(str(spec and spec.origin))
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except (OSError, ImportError, ValueError) as error:
        what = f"{module!r} cannot be read here ({error}): if it is edited, its old scores would"
        remedy = f"name a file that is here, too, or set skip.{REWARD}.enable=false"
        raise ConfigError(f"{what} stay", key, remedy) from error


def refused(config: Any, settings: SkipSettings) -> list[Problem]:
    """The roles of this module that are on and never called; a role of the user's own may be."""
    whys = {}
    uses_ref = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    if not any(look_up(config, name) for name in uses_ref):
        whys[REF] = f"no reference log-probs are computed: {' and '.join(uses_ref)} are off"
    has_own_gpus = look_up(config, "reward.reward_model.enable_resource_pool")
    if has_own_gpus or not look_up(config, "reward.reward_model.enable"):
        whys[REWARD] = "verl scores each session as it ends: the scores are in the dumps of the"
        whys[REWARD] += f" rollouts, and skip.drop_fields=[{SCORES}] scores these again"
    if look_up(config, "async_training") is not None:
        whys = dict.fromkeys((REF, REWARD), "the fully async application has no such stage")
    return [
        Problem(f"skip.{role}.enable", why, f"set skip.{role}.enable=false")
        for role, why in whys.items()
        if role in settings.roles.keys() - settings.attach.keys() - SKIP_REGISTRY.keys()
    ]


def adapt(settings: SkipSettings) -> SkipSettings:
    """The settings with those of these roles complete for the trainer of this process."""
    called_with = {}  # as it is before workers load it
    for role in settings.roles.keys() & {REF, REWARD}:
        seams.require(LATER_STAGES)
        called_with[role] = identity(role, settings.facts.config)
        local = settings.roles[role]
        local.drop_fields = [name for name in local.drop_fields or () if name != SCORES]
        if local.action == "repeat" or (
            settings.facts.samples_dynamically and not settings.gives_match(role)
        ):
            # The rollouts may be those of any step; log-probs and scores belong to their tokens.
            local.action, local.match = "cache", "run"
    return attrs.evolve(settings, facts=attrs.evolve(settings.facts, called_with=called_with))


@seams.around(f"{V0_TRAINER}._validate")
def validation(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Validation is scored by a stage only where it is replayed (``skip.validation=replay``)."""
    global _validating
    _validating = VALIDATION_ROLE not in SkipManager.skip_instances
    try:
        return validate(self, *args, **kwargs)
    finally:
        _validating = False


def _stage(role: str, prompts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def called_with(*_: Any, **__: Any) -> Mapping[str, Any]:
        assert SkipManager.settings is not None  # or the role would be off
        return SkipManager.settings.facts.called_with[role]

    return SkipManager.annotate(
        role,
        stage=f"verl.{role}",
        prompts=prompts,
        identity=called_with,
        ignore=[ALL],
        derived=True,
    )


@seams.decorated(f"{V0_TRAINER}._compute_ref_log_prob")
def _computing_ref(compute: Callable[..., Any]) -> Callable[..., Any]:
    def tokens(_: Any, batch: Any) -> dict[str, Any]:
        return {**_some(batch.batch, _TOKENS), **_some(batch.non_tensor_batch, _IMAGES)}

    return _stage(REF, tokens)(compute)


@seams.decorated(f"{V1_TRAINER}._compute_ref_log_prob")
def _computing_ref_v1(compute: Callable[..., Any]) -> Callable[..., Any]:
    """V1's rows are read from and written to TransferQueue."""

    def ref_log_probs(self: Any, batch: Any, metrics: Any, rows: Any) -> Any:
        compute(self, batch, metrics)
        return rows_of(batch, ["ref_log_prob"])

    stage = _stage(REF, "rows")(ref_log_probs)

    @functools.wraps(compute)
    def computing(self: Any, batch: Any, metrics: Any) -> Any:
        if REF not in SkipManager.skip_instances:
            return compute(self, batch, metrics)
        import transfer_queue as tq

        found = stage(self, batch, metrics, rows=rows_of(batch, _ROWS))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=found)
        return batch

    return computing


@seams.decorated(f"{REWARD_LOOP}.compute_rm_score")
def _scoring(compute: Callable[..., Any]) -> Callable[..., Any]:
    def contents(_: Any, data: Any) -> dict[str, Any]:
        return {**_some(data.batch, _SCORED), **data.non_tensor_batch}

    stage = _stage(REWARD, contents)(compute)

    @functools.wraps(compute)
    def compute_rm_score(self: Any, data: Any) -> Any:
        return (compute if _validating else stage)(self, data)

    return compute_rm_score


def _some(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields.keys()}  # noqa: SIM118
