"""The keys of verl's config that decide what rlskip does, read together.

Who changes the config takes the config itself. :data:`Values` are as they were before the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlskip.config.application import TOTAL_STEPS
from rlskip.config.check import look_up
from rlskip.hosts.verl.names import FILTER, FILTER_KEY, MANAGER_KEY, MODE_KEY, SAMPLER_KEY

Values = Mapping[str, Any]
"""The value at each of these keys; None where the config has none."""

_KEYS = (
    # Which trainer it is.
    "async_training", "trainer.use_v1", MODE_KEY, "actor_rollout_ref.hybrid_engine",
    "ray_kwargs.ray_init.address",
    # Which steps it takes, and at which it validates.
    TOTAL_STEPS, "trainer.total_epochs", "trainer.resume_mode", "trainer.resume_from_path",
    "trainer.default_local_dir", "trainer.val_before_train", "trainer.test_freq",
    "trainer.val_only",
    # How it computes reference log-probs and scores.
    "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward",
    "actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_adapter_path",
    "reward.reward_model.enable", "reward.reward_model.enable_resource_pool",
    # What makes V1's batches.
    MANAGER_KEY, f"{SAMPLER_KEY}.custom_sampler.path", f"{SAMPLER_KEY}.custom_sampler.name",
    f"{SAMPLER_KEY}.sampler_kwargs", f"{SAMPLER_KEY}.sync_refill_failed_groups",
    f"{SAMPLER_KEY}.max_off_policy_strategy", f"{SAMPLER_KEY}.max_off_policy_threshold",
    FILTER_KEY, f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches",
    "data.gen_batch_size",
)  # fmt: skip


def values_of(config: Any) -> Values:
    """Read these keys of a full config.

    Raises
    ------
    ConfigError
        An interpolation does not resolve.
    """
    return {key: look_up(config, key) for key in _KEYS}
