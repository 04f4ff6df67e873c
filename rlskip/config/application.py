"""The facts of a plain Hydra application, by verl's keys, which only ``hosts/verl`` knows, too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig
from omegaconf.omegaconf import read_write

from rlskip.config.check import leaves, look_up, readable
from rlskip.config.facts import HostFacts
from rlskip.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
DISTILLATION = "distillation"
TOTAL_STEPS = "trainer.total_training_steps"

# Another value is a mismatch that names the key and both values. A key includes all keys below it.
# Seeds are never compared: another draw from the same distribution is an equally good sample.
COMPARED: dict[str, tuple[str, ...]] = {
    ROLLOUT: (
        "temperature", "top_p", "top_k", "min_p", "do_sample", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "ignore_eos", "stop", "stop_token_ids",
        "agent.default_agent_loop", "agent.agent_loop_config_path", "multi_turn",
    ),
    "data": (
        "apply_chat_template_kwargs", "mm_processor_kwargs", "tool_config_path",
        "function_tool_path",
    ),
    "actor_rollout_ref.model": ("custom_chat_template",),
}  # fmt: skip
# Of an enabled ``distillation``, too: the rollouts of training bring its log-probs.
OF_TEACHERS = (
    "teacher_key", "teacher_models.*.key", "teacher_models.*.model_path",
    "distillation_loss.loss_mode", "distillation_loss.topk",
)  # fmt: skip
# Compared elsewhere, part of the directory, warned about by name, or only how fast it is.
_SAID_ELSEWHERE = (
    "actor_rollout_ref.model.path", f"{ROLLOUT}.n", f"{ROLLOUT}.val_kwargs",
    f"{ROLLOUT}.max_num_batched_tokens", "data.max_prompt_length", "data.max_response_length",
)  # fmt: skip
_COMPARED_KEYS = tuple(f"{node}.{name}" for node, names in COMPARED.items() for name in names)

# The first of these keys that has a value is the fact.
_FACTS = {
    "experiment": ["trainer.experiment_name"],
    "project": ["trainer.project_name"],
    "prompts": ["data.gen_batch_size", "data.train_batch_size"],
    # verl's V1 trainer submits train_batch_size prompts a step, gen_batch_size per fetch.
    "queued_prompts": ["data.train_batch_size", "data.gen_batch_size"],
    "n": [f"{ROLLOUT}.n"],
    # The rollouts' own limits in tokens, which verl takes from the data unless they are set.
    "prompt_len": [f"{ROLLOUT}.prompt_length", "data.max_prompt_length"],
    "response_len": [f"{ROLLOUT}.response_length", "data.max_response_length"],
    "model": ["actor_rollout_ref.model.path"],
    "engine": [f"{ROLLOUT}.name"],
    "tokenizer": ["actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path"],
}
# For keys of `dispatch`, `replay` and `merge` that are null.
_OF_NODES = {
    "n": [f"{ROLLOUT}.n"],
    "val_n": [f"{ROLLOUT}.val_kwargs.n"],
    "workers": [f"{ROLLOUT}.agent.num_workers"],
    "rollout_level": ["trainer.v1.rollout_level_dispatch"],
    "max_concurrent_rollouts_per_worker": ["trainer.v1.max_concurrent_rollouts_per_worker"],
    "sampling": [ROLLOUT],
    "val_sampling": [f"{ROLLOUT}.val_kwargs"],
    "seed": ["data.seed", "seed"],
    "stepwise_output": ["generator.merge_stepwise_output"],  # SkyRL's
}


def application_facts(config: Any) -> HostFacts:
    """The facts of an application; ConfigError names an interpolation that does not resolve."""
    config, given = readable(config), config
    facts = {fact: look_up(config, *keys) for fact, keys in _FACTS.items()}
    if look_up(config, "trainer") is not None:
        facts["experiment_key"] = "trainer.experiment_name"
    total = look_up(config, TOTAL_STEPS)
    # Names are relative to the rollout node, where most are.
    shaping = {
        key.removeprefix(f"{ROLLOUT}."): value
        for compared in _COMPARED_KEYS
        for key, value in leaves(look_up(config, compared), compared)
        if value is not None and not key.endswith("._target_")
    }
    # The keys of val_kwargs replace those of the same name, and add `n`.
    of_validation = leaves(look_up(config, f"{ROLLOUT}.val_kwargs"))
    own = {name: value for name, value in of_validation if name and name != "_target_"}
    teachers = look_up(config, DISTILLATION) if look_up(config, f"{DISTILLATION}.enabled") else {}
    of_teachers = {
        f"{DISTILLATION}.{key}": value
        for key, value in leaves(teachers)
        if value is not None and any(fnmatchcase(key, name) for name in OF_TEACHERS)
    }
    return HostFacts(
        given,
        **facts,
        steps=range(1, total + 1) if isinstance(total, int) else (),
        samples_dynamically=look_up(config, "algorithm.filter_groups.enable") is True,
        shaping={**shaping, **of_teachers},
        val_shaping={**shaping, **own},
        known=(*_COMPARED_KEYS, *_SAID_ELSEWHERE),
    )


def of_host(config: Any, names: Iterable[str]) -> Mapping[str, tuple[str, Any]]:
    """For those of the `names` of a node's keys that have one: the host's key, and its value."""
    config, found = readable(config), dict[str, tuple[str, Any]]()
    for name in names:
        for key in _OF_NODES.get(name, ()):
            value = look_up(config, key)
            if name in ("sampling", "val_sampling"):
                given = {one: look_up(value, one) for one in ("temperature", "top_p", "top_k")}
                value = {one: each for one, each in given.items() if each is not None}
            if value is not None:
                found.setdefault(name, (key, value))
    return found


# The skip flag of older versions of verl, which must not act beside rlskip.
LEGACY_FLAG = f"{ROLLOUT}.skip.enable"


class LegacyFlagWarning(DeprecationWarning):
    """An older trainer's skip flag is in use."""


# Python hides DeprecationWarning outside `__main__`; this one is for the user who typed the flag.
warnings.simplefilter("default", LegacyFlagWarning)


def retire_legacy_flag(config: Any) -> None:
    """Set the flag False in `config`, a DictConfig or a mapping, where it is on, and warn."""
    if look_up(config, LEGACY_FLAG) is not True:
        return
    node = look_up(config, f"{ROLLOUT}.skip")
    with read_write(node) if isinstance(node, DictConfig) else nullcontext():
        node["enable"] = False
    said = f"{LEGACY_FLAG} and skip.rollout.enable are both true; rlskip acts and the legacy flag "
    said += f"is forced to False. Remove {LEGACY_FLAG}."
    warnings.warn(said, LegacyFlagWarning, stacklevel=3)


def refuse_legacy_flag(config: Any) -> None:
    """Raise if the flag is on, because turning it off would not reach the task."""
    if look_up(config, LEGACY_FLAG) is True:
        what = "is true together with skip.rollout.enable, and in a multirun rlskip cannot turn it "
        what += "off for the task"
        raise ConfigError(what, LEGACY_FLAG, f"add the override {LEGACY_FLAG}=False")
