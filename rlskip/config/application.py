"""The facts of a plain Hydra application: one whose config has verl's keys, as far as it has them.

This is the only module outside ``hosts/verl`` that knows them. ``docs/keys.md`` shows the table of
what is compared.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from rlskip.config.check import OfHost, leaves, look_up, look_up_first, readable
from rlskip.config.facts import HostFacts

ROLLOUT = "actor_rollout_ref.rollout"
DATA = "data"
DISTILLATION = "distillation"
TOTAL_STEPS = "trainer.total_training_steps"

# A key includes all keys below it. Seeds are never compared: another draw from
# the same distribution is an equally good sample.
COMPARED: dict[str, tuple[str, ...]] = {
    ROLLOUT: (
        "temperature", "top_p", "top_k", "min_p", "do_sample", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "ignore_eos", "stop", "stop_token_ids",
        "agent.default_agent_loop", "agent.agent_loop_config_path", "multi_turn",
    ),
    DATA: (
        "apply_chat_template_kwargs", "mm_processor_kwargs", "tool_config_path",
        "function_tool_path",
    ),
    "actor_rollout_ref.model": ("custom_chat_template",),
}  # fmt: skip
"""Another value is a mismatch that names the key and both values."""

OF_TEACHERS = (
    "teacher_key", "teacher_models.*.key", "teacher_models.*.model_path",
    "distillation_loss.loss_mode", "distillation_loss.topk",
)  # fmt: skip
"""So are these of an enabled ``distillation``: the rollouts of training bring its log-probs."""

# Compared elsewhere, part of the directory, warned about by name, or only how fast it is.
_SAID_ELSEWHERE = (
    "actor_rollout_ref.model.path", f"{ROLLOUT}.n", f"{ROLLOUT}.val_kwargs",
    f"{ROLLOUT}.max_num_batched_tokens", f"{DATA}.max_prompt_length",
    f"{DATA}.max_response_length",
)  # fmt: skip

_COMPARED_KEYS = tuple(f"{node}.{name}" for node, names in COMPARED.items() for name in names)
_KEYS = {
    "experiment": "trainer.experiment_name",
    "steps": TOTAL_STEPS,
    "n": f"{ROLLOUT}.n",
}
# For keys of `dispatch` and `replay` that are null.
_OF_HOST = {
    "n": f"{ROLLOUT}.n",
    "val_n": f"{ROLLOUT}.val_kwargs.n",
    "workers": f"{ROLLOUT}.agent.num_workers",
    "rollout_level": "trainer.v1.rollout_level_dispatch",
    "max_concurrent_rollouts_per_worker": "trainer.v1.max_concurrent_rollouts_per_worker",
}
_TOKENIZER = tuple(f"actor_rollout_ref.model.{name}" for name in ("tokenizer_path", "path"))
_SAMPLING = ("temperature", "top_p", "top_k")


def application_facts(config: Any) -> HostFacts:
    """The facts of an application; raises ConfigError for an interpolation that does not resolve.

    `config` is a full one, a DictConfig, a mapping or a dataclass, with any of verl's keys.
    """
    config, given = readable(config), config
    batch_sizes = ("data.gen_batch_size", "data.train_batch_size")
    total = look_up(config, TOTAL_STEPS)
    shaping = _shaping(config)
    # The keys of val_kwargs replace those of the same name, and add `n`.
    of_validation = leaves(look_up(config, f"{ROLLOUT}.val_kwargs"))
    own = {name: value for name, value in of_validation if name and name != "_target_"}
    return HostFacts(
        given,
        experiment=look_up(config, _KEYS["experiment"]),
        project=look_up(config, "trainer.project_name"),
        prompts=look_up_first(config, batch_sizes),
        # verl's V1 trainer submits train_batch_size prompts a step, gen_batch_size per fetch.
        queued_prompts=look_up_first(config, reversed(batch_sizes)),
        n=look_up(config, _KEYS["n"]),
        # The rollouts' own limits in tokens, which verl takes from the data unless they are set.
        prompt_len=look_up_first(config, (f"{ROLLOUT}.prompt_length", "data.max_prompt_length")),
        response_len=look_up_first(
            config, (f"{ROLLOUT}.response_length", "data.max_response_length")
        ),
        steps=range(1, total + 1) if isinstance(total, int) else (),
        samples_dynamically=look_up(config, "algorithm.filter_groups.enable") is True,
        model=look_up(config, "actor_rollout_ref.model.path"),
        engine=look_up(config, f"{ROLLOUT}.name"),
        tokenizer=look_up_first(config, _TOKENIZER),
        shaping={**shaping, **_of_teachers(config)},
        val_shaping={**shaping, **own},
        known=(*_COMPARED_KEYS, *_SAID_ELSEWHERE),
        # Of nodes that the application does not have, messages name rlskip's own keys.
        keys={k: key for k, key in _KEYS.items() if look_up(config, key.split(".")[0]) is not None},
    )


def _shaping(config: Any) -> dict[str, Any]:
    """The compared keys with their values, as an identity holds them.

    Names are relative to the rollout node, where most are; values that are None are left out.
    """
    found = (leaf for key in _COMPARED_KEYS for leaf in leaves(look_up(config, key), key))
    return {
        key.removeprefix(f"{ROLLOUT}."): value
        for key, value in found
        if value is not None and not key.endswith("._target_")
    }


def _of_teachers(config: Any) -> dict[str, Any]:
    node = look_up(config, DISTILLATION) if look_up(config, f"{DISTILLATION}.enabled") else None
    names = [f"{DISTILLATION}.{name}" for name in OF_TEACHERS]
    return {
        key: value
        for key, value in leaves(node, DISTILLATION)
        if value is not None and any(fnmatchcase(key, name) for name in names)
    }


def of_host(config: Any) -> OfHost:
    """For keys of `dispatch` and `replay` that are null: the application's key, and its value."""
    config = readable(config)
    found = {name: (key, look_up(config, key)) for name, key in _OF_HOST.items()}
    for name, node in (("sampling", ROLLOUT), ("val_sampling", f"{ROLLOUT}.val_kwargs")):
        given = {key: look_up(config, f"{node}.{key}") for key in _SAMPLING}
        found[name] = node, {key: value for key, value in given.items() if value is not None}
    found["seed"] = "data.seed", look_up_first(config, ("data.seed", "seed"))
    return found
