"""The nodes `dispatch`, `replay` and `merge`: defaults, the host's keys, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, MergeConfig, ReplayConfig
from rlskip.errors import ConfigError


def test_without_a_dispatch_node_it_is_the_legacy_path() -> None:
    config = read_node(DispatchConfig, {})
    assert config.rollout_level is False
    assert (config.workers, config.n, config.val_n, config.seed) == (4, 1, 1, 0)
    assert read_node(DispatchConfig, {"seed": 3}).seed == 3


def test_the_hosts_keys_of_dispatch_mean_the_same() -> None:
    host = """
        trainer.v1.rollout_level_dispatch=true trainer.v1.max_concurrent_rollouts_per_worker=7
        actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.agent.num_workers=3
        actor_rollout_ref.rollout.temperature=0.7 actor_rollout_ref.rollout.top_p=0.9
        actor_rollout_ref.rollout.val_kwargs.n=2 actor_rollout_ref.rollout.val_kwargs.temperature=0
        data.seed=5
    """
    config = read_node(DispatchConfig, OmegaConf.from_dotlist(host.split()))
    assert config.rollout_level is True
    assert config.max_concurrent_rollouts_per_worker == 7
    assert (config.workers, config.n, config.val_n, config.seed) == (3, 8, 2, 5)
    assert config.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert config.val_sampling == {"temperature": 0}


@pytest.mark.parametrize(
    ("node", "hosts_flag", "on"),
    [
        ({"stepwise_output": True}, None, True),
        (None, True, True),
        ({"strategy": "chain"}, True, True),
        ({"stepwise_output": True}, False, True),
        (None, False, False),
        ({"stepwise_output": False}, True, False),
        (None, None, False),
    ],
)
@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_merge_is_off_unless_the_node_or_the_hosts_flag_says_so(
    node: Any, hosts_flag: bool | None, on: bool, make: Any
) -> None:
    flag = {} if hosts_flag is None else {"merge_stepwise_output": hosts_flag}
    config = {"generator": flag, "merge": node}
    for given in (config, {key: value for key, value in config.items() if value}):
        read = read_node(MergeConfig, make(given))
        assert read == MergeConfig(**{**(node or {}), "stepwise_output": on})


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({"on_incomplete": "min_viable"}, "min_viable"),
        ({"max_off_policy_strategy": "wait"}, "max_off_policy_threshold"),
        ({"max_refills": 0}, "max_refills"),
        ({"timeout_s": 1e10}, "timeout_s"),  # longer than a thread can wait
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"progress_interval_s": 0}, "progress_interval_s"),
    ],
)
def test_invalid_settings_of_replay_are_refused(node: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"replay.{key}: ") as error:
        read_node(ReplayConfig, {"replay": node})
    assert str(error.value).count("replay.") == 1, error.value
