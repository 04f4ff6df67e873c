"""Which keys of a host's config shape rollouts: the one table.

verl's names, because the other hosts name what they compare themselves. ``docs/skip.md`` shows the
table; a test compares both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlskip.config.check import look_up
from rlskip.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
DATA = "data"
MODEL = "actor_rollout_ref.model.path"
ENGINE = f"{ROLLOUT}.name"

# A key stands for itself and for what is below it. Seeds are never compared: another draw from
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

NOT_COMPARED: dict[str, tuple[str, ...]] = {
    ROLLOUT: (
        # Where and how fast.
        "nnodes", "n_gpus_per_node", "tensor_model_parallel_size", "data_parallel_size",
        "expert_parallel_size", "pipeline_model_parallel_size", "gpu_memory_utilization",
        "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "max_num_batched_tokens",
        "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy",
        "load_format", "layered_summon", "update_weights_bucket_megabytes", "multi_stage_wake_up",
        "skip_tokenizer_init", "checkpoint_engine", "disaggregation", "router_config_path",
        "agent.num_workers", "agent.agent_loop_manager_class",
        # What is logged.
        "disable_log_stats", "moe_load_balance_metrics_interval", "profiler", "prometheus", "trace",
        # Of training and of validation.
        "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "calculate_log_probs",
        "val_kwargs",
        # Compared elsewhere: part of the directory, or warned about by name.
        "n", "prompt_length", "response_length", "name",
        # Seeds, and skipping itself.
        "seed", "full_determinism", "skip", "skip_rollout", "skip_dump_dir", "skip_use_default_dir",
    ),
    DATA: (
        # Which prompts come, and in which order: the prompts' content says that.
        "train_files", "val_files", "train_max_samples", "val_max_samples", "train_batch_size",
        "gen_batch_size", "val_batch_size", "max_prompt_length", "max_response_length",
        "prompt_key", "reward_fn_key", "image_key", "video_key", "audio_key", "shuffle",
        "validation_shuffle", "seed", "sampler", "filter_overlong_prompts",
        "filter_overlong_prompts_workers", "dataloader_num_workers", "use_shm",
    ),
}  # fmt: skip
"""A change goes unnoticed. So do all keys with ``timeout`` in their name, and ``_target_``."""


def sampling_of(config: Any, *, validation: bool = False) -> dict[str, Any]:
    """The compared keys of a config with their values, as an identity holds them.

    Names are relative to the rollout node, where most are; values that are None are left out. For
    `validation` the keys of ``val_kwargs`` replace those of the same name, and add `n`.
    """
    found: dict[str, Any] = {}
    for node, names in COMPARED.items():
        for name in names:
            key = f"{node}.{name}"
            for leaf, value in leaves(look_up(config, key), key):
                if value is not None and not leaf.endswith("._target_"):
                    found[leaf.removeprefix(f"{ROLLOUT}.")] = value
    if validation:
        own = leaves(look_up(config, f"{ROLLOUT}.val_kwargs"))
        found |= {name: value for name, value in own if name and name != "_target_"}
    return found


def engine_of(config: Any) -> dict[str, str]:
    """The kind of inference engine; another one is logged as a warning, as a version is."""
    name = look_up(config, ENGINE)
    return {} if name is None else {"engine": str(name)}


def value_at(config: Any, key: str, at: str) -> Any:
    """The value of a key that ``skip.identity`` names.

    Raises
    ------
    ConfigError
        The config has no such key.
    """
    above, _, name = key.rpartition(".")
    node = look_up(config, above) if above else config
    if dataclasses.is_dataclass(node):
        node = vars(node)
    if not isinstance(node, Mapping | DictConfig) or name not in node:
        raise ConfigError(
            f"the config has no key {key}",
            f"{at}.identity",
            "name a full key of the config, such as actor_rollout_ref.rollout.temperature",
        )
    return dict(leaves(look_up(config, key), key)).get(key, dict(leaves(look_up(config, key))))


def may_matter(key: str) -> bool:
    """Whether a key is neither compared nor known not to shape rollouts."""
    name = key.rsplit(".", 1)[-1]
    if "timeout" in name or name == "_target_":
        return False
    return not (_is_listed(key, COMPARED) or _is_listed(key, NOT_COMPARED))


def is_unknown(key: str) -> bool:
    """Whether a key that may matter is one of the host's for rollouts or data."""
    return key.startswith((f"{ROLLOUT}.", f"{DATA}.")) and may_matter(key)


def _is_listed(key: str, table: Mapping[str, tuple[str, ...]]) -> bool:
    keys = [f"{node}.{name}" for node, names in table.items() for name in names]
    return any(f"{key}.".startswith(f"{listed}.") for listed in keys)


def leaves(node: Any, at: str = "", *, resolve: bool = True) -> Iterator[tuple[str, Any]]:
    """The leaves of a config with their dotted keys; what does not resolve is left out.

    Lists are leaves, and so are empty mappings. Without `resolve` interpolations stay as they are.
    """
    if not resolve and OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, Mapping | DictConfig) and node:
        for name in list(node):
            try:
                value = node[name]
            except OmegaConfBaseException:  # unresolved, or ???
                continue
            yield from leaves(value, f"{at}.{name}" if at else str(name), resolve=resolve)
    elif OmegaConf.is_config(node):
        try:
            yield at, OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException:
            return
    else:
        yield at, node
