"""verl's stages after the rollouts: reference log-probs, role ``ref``; scores, role ``reward``."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlskip._wrap import around
from rlskip.config.check import Problem, leaves, look_up
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import SKIP_REGISTRY, VALIDATION_ROLE
from rlskip.errors import ConfigError
from rlskip.hosts.verl.names import SCORES
from rlskip.hosts.verl.seams import LATER_STAGES, REWARD_LOOP, V0_TRAINER, V1_TRAINER, seams
from rlskip.skip import SkipManager
from rlskip.skip.names import ALL

log = logging.getLogger(__name__)

REF = "ref"
REWARD = "reward"

_MODEL = "actor_rollout_ref.model"
_PRECISION = tuple(
    f"{engine}.{name}"
    for engine in ("fsdp_config", "megatron")
    for name in ("model_dtype", "dtype", "mixed_precision")
)
# What log-probs of given tokens depend on, besides the engine that computes them.
_OF_REF = (
    f"{_MODEL}.path", f"{_MODEL}.hf_config_path", f"{_MODEL}.override_config",
    f"{_MODEL}.external_lib", "actor_rollout_ref.rollout.temperature",
)  # fmt: skip
_FUNCTION = "reward.custom_reward_function"
_MANAGER = "reward.reward_manager"
_OF_REWARD = (
    _FUNCTION, _MANAGER, "reward.reward_kwargs", "reward.reward_model.enable",
    "reward.reward_model.model_path", "reward.sandbox_fusion.url",
)  # fmt: skip
# Fields of a batch that log-probs depend on, and the tensors that scores depend on.
_TOKENS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses")
_IMAGES = ("multi_modal_inputs", "raw_prompt")
_SCORED = ("prompts", "responses", "attention_mask")
_ROWS = ("input_ids", "position_ids", "prompts", "responses", "raw_prompt")

# The roles whose model this run does without, the identities of the others as they were loaded, and
# whether the trainer validates at present.
_left_out: set[str] = set()
_loaded: dict[str, Mapping[str, Any]] = {}
_validating = False


# -- what the config says ----------------------------------------------------------------------


def scores_while_generating(config: Any) -> bool:
    """Whether verl scores each session as it ends, so that rollouts come with their scores."""
    judge = "reward.reward_model"
    own_gpus = look_up(config, f"{judge}.enable_resource_pool")
    return not look_up(config, f"{judge}.enable") or bool(own_gpus)


def _ref_is_actor(config: Any) -> bool:
    """Whether the reference is the actor without its LoRA adapter."""
    ranks = (look_up(config, f"{_MODEL}.{key}") or 0 for key in ("lora.rank", "lora_rank"))
    return max(ranks) > 0 or look_up(config, f"{_MODEL}.lora_adapter_path") is not None


def identity(role: str, config: Any) -> dict[str, Any]:
    """What the calls of a role of this module add to the identity of their dumps.

    Raises ConfigError for a reward function that cannot be read: a change of it would go unnoticed.
    """
    if role == REWARD:
        modules = (f"{_FUNCTION}.path", f"{_MANAGER}.module.path")
        contents = {f"content of {key}": _content_at(config, key) for key in modules}
        known = {name: content for name, content in contents.items() if content}
        return {**_values(config, _OF_REWARD), **known}
    engine = "actor" if _ref_is_actor(config) else "ref"
    precision = (f"actor_rollout_ref.{engine}.{name}" for name in _PRECISION)
    return {**_values(config, (*_OF_REF, *precision)), "reference": engine}


def loaded_identity(role: str, config: Any) -> Mapping[str, Any]:
    """As :func:`identity` was before workers were made, which load what may be edited later."""
    if role not in _loaded:
        _loaded[role] = identity(role, config)
    return _loaded[role]


def _values(config: Any, keys: Collection[str]) -> dict[str, Any]:
    found = (leaf for key in keys for leaf in leaves(look_up(config, key), key))
    return {k: v for k, v in found if v not in (None, {}) and not k.endswith("._target_")}


def _content_at(config: Any, key: str) -> str | None:
    """A hash of the module that a key names: a reward function is often changed in its place."""
    if not (name := look_up(config, key)):
        return None
    try:  # verl takes the module's path, as an URL, too, or its name
        file = Path(str(name).removeprefix("file://")).expanduser()
        if str(name).startswith("pkg://"):
            module = str(name).removeprefix("pkg://").replace("/", ".")
            file = Path(str(find_spec(module).origin))  # type: ignore[union-attr]
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except (OSError, ImportError, ValueError, AttributeError) as error:
        what = f"{name!r} cannot be read here ({error}): if it is edited, its old scores would stay"
        remedy = f"name a file that is here, too, or set skip.{REWARD}.enable=false"
        raise ConfigError(what, key, remedy) from error


def refused(config: Any, settings: SkipSettings) -> list[Problem]:
    """The roles of this module that are on and never called; a role of the user's own may be."""
    found = []
    uses_ref = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    for role in settings.roles.keys() & {REF, REWARD}:
        key = f"skip.{role}.enable"
        if role in settings.attach or role in SKIP_REGISTRY:
            continue
        if look_up(config, "async_training") is not None:
            what = f"the fully async application has no stage {role!r}: nothing would be skipped"
            found.append(Problem(key, what, f"set {key}=false"))
        elif role == REF and not any(look_up(config, name) for name in uses_ref):
            what = f"no reference log-probs are computed: {' and '.join(uses_ref)} are off"
            found.append(Problem(key, what, f"set {key}=false, or one of these to True"))
        elif (
            role == REWARD
            and look_up(config, "trainer.use_v1")
            and "rollout_tq" in settings.roles
            and scores_while_generating(config)
        ):
            what = "V1 scores each session as it ends: the scores are in the dumps of rollout_tq"
            remedy = f"set {key}=false; to score replayed rollouts again: "
            found.append(Problem(key, what, f"{remedy}skip.drop_fields=[{SCORES}]"))
    return found


def adapt(settings: SkipSettings) -> None:
    """Complete the settings of these roles, in place, for the trainer of this process."""
    facts, roles = settings.facts, settings.roles
    _loaded.clear()
    if roles.keys() & {REF, REWARD}:
        seams.require(LATER_STAGES)
    for role in roles.keys() & {REF, REWARD}:
        local = roles[role]
        local.drop_fields = [name for name in local.drop_fields or () if name != SCORES]
        if local.action == "repeat" or (
            facts.samples_dynamically and not settings.gives("match", role)
        ):
            # The rollouts may be those of any step; log-probs and scores belong to their tokens.
            local.action, local.match = "cache", "run"
    if REWARD in roles and scores_while_generating(facts.config):
        for role in roles.keys() & {"rollout", VALIDATION_ROLE}:
            # The scores of a dump are those of the reward function that made it.
            roles[role].drop_fields = [*(roles[role].drop_fields or ()), SCORES]


# -- what is left out --------------------------------------------------------------------------


def leave_out(config: Any, steps: Collection[int], validated: Collection[int]) -> None:
    """Choose the models that a run of these steps never computes with, and log the choice."""
    _left_out.clear()
    for role, model in ((REF, "reference model"), (REWARD, "reward worker or reward model")):
        if (skip := SkipManager.skip_instances.get(role)) is None:
            continue
        if role == REF:
            due, is_replayed = {*steps}, not _ref_is_actor(config)
        else:
            due = {*steps, *validated}
            is_replayed = not validated or VALIDATION_ROLE in SkipManager.skip_instances
        is_replayed &= skip.local_config.on_miss == "error" and bool(steps)
        if is_replayed and all(step in skip.local_config.steps for step in due):
            _left_out.add(role)
            log.info("rlskip: role %s: no %s is started, all is replayed", role, model)
        else:
            log.info("rlskip: role %s: nothing is left out, because it may be needed", role)


@contextmanager
def without_reference(trainer: Any) -> Iterator[None]:
    """While V0's trainer makes its workers: they load no reference model if the run needs none."""
    if REF not in _left_out:
        yield
        return
    for mapping in (trainer.role_worker_mapping, trainer.resource_pool_manager.mapping):
        _drop_reference(mapping)
    trainer.use_reference_policy = False
    yield
    trainer.use_reference_policy = True
    trainer.ref_policy_wg = trainer.actor_rollout_wg  # profiled together


def _drop_reference(mapping: dict[Any, Any]) -> None:
    """Give verl's ``Role.ActorRolloutRef`` the role of an actor without reference."""
    for role in [role for role in mapping if role.name == "ActorRolloutRef"]:
        mapping[type(role).ActorRollout] = mapping.pop(role)


@seams.around(f"{V1_TRAINER}._init_resource_pool_mgr")
def _mapping_roles(init: Callable[..., None], self: Any) -> None:
    """V1 loads no reference model if the run needs none."""
    init(self)
    if REF in _left_out:
        _drop_reference(self.role_worker_mapping)
        _drop_reference(self.mapping)  # the pool manager's own


@seams.around(f"{REWARD_LOOP}.__init__")
def _making_judge(
    init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Neither reward workers nor a reward model are started if the run needs none."""
    if REWARD not in _left_out:
        init(self, config, *args, **kwargs)
        return
    self.config = config
    self.reward_model_manager = self.reward_router_address = None
    self.reward_loop_workers = []


# -- the stages --------------------------------------------------------------------------------


@seams.around(f"{V0_TRAINER}._validate", f"{V1_TRAINER}._validate")
def _validation(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Validation is scored by a stage only where it is replayed (``skip.validation=replay``)."""
    global _validating
    _validating = True
    try:
        return validate(self, *args, **kwargs)
    finally:
        _validating = False


def _annotated(role: str, prompts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method of an object with the trainer's config as this role's stage."""
    return SkipManager.annotate(
        role,
        stage=f"verl.{role}",
        prompts=prompts,
        identity=lambda self, *_, **__: loaded_identity(role, self.config),
        ignore=[ALL],
        derived=True,
    )


@seams.decorated(f"{V0_TRAINER}._compute_ref_log_prob")
def _computing_ref(compute: Callable[..., Any]) -> Callable[..., Any]:
    def tokens(self: Any, batch: Any) -> dict[str, Any]:
        return {**_some(batch.batch, _TOKENS), **_some(batch.non_tensor_batch, _IMAGES)}

    return _annotated(REF, tokens)(compute)


@seams.decorated(f"{V1_TRAINER}._compute_ref_log_prob")
def _computing_ref_v1(compute: Callable[..., Any]) -> Callable[..., Any]:
    """V1's rows are read from and written to TransferQueue."""

    def ref_log_probs(self: Any, batch: Any, metrics: Any, rows: Any) -> Any:
        compute(self, batch, metrics)
        return _rows_of(batch, ["ref_log_prob"])

    stage = _annotated(REF, "rows")(ref_log_probs)

    @functools.wraps(compute)
    def computing(self: Any, batch: Any, metrics: Any) -> Any:
        if REF not in SkipManager.skip_instances:
            return compute(self, batch, metrics)
        import transfer_queue as tq

        found = stage(self, batch, metrics, rows=_rows_of(batch, _ROWS))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=found)
        return batch

    return computing


def _rows_of(batch: Any, fields: Collection[str]) -> Any:
    import transfer_queue as tq

    return tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields)
    )


@seams.decorated(f"{REWARD_LOOP}.compute_rm_score")
def _scoring(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The trainers call it where a reward model shares the rollouts' GPUs.

    rlskip calls it where V0 has scored while generating.
    """

    def contents(self: Any, data: Any) -> dict[str, Any]:
        """Without `tool_extra_fields`, which has the same values as fields of their own names."""
        others = [name for name in data.non_tensor_batch if name != "tool_extra_fields"]
        return {**_some(data.batch, _SCORED), **_some(data.non_tensor_batch, others)}

    @around
    def scores(compute: Callable[..., Any], self: Any, data: Any) -> Any:
        given = getattr(self, "given_scores", None)
        return compute(self, data) if given is None else given

    plain = scores(compute)
    stage = _annotated(REWARD, contents)(plain)

    @functools.wraps(compute)
    def compute_rm_score(self: Any, data: Any) -> Any:
        replayable = VALIDATION_ROLE in SkipManager.skip_instances
        return (plain if _validating and not replayable else stage)(self, data)

    return compute_rm_score


def _some(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields.keys()}  # noqa: SIM118
