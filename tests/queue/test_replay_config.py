"""The `replay` node: defaults, where they come from, and what is refused."""

import pytest
from omegaconf import OmegaConf

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import ReplayConfig
from rlskip.errors import ConfigError


@pytest.mark.parametrize("config", [{}, OmegaConf.create({"trainer": {}}), None])
def test_without_a_node_the_defaults_fail_closed(config):
    assert read_node(ReplayConfig, config) == ReplayConfig(on_incomplete="raise", timeout_s=3600.0)


def test_the_number_of_sessions_comes_from_the_host():
    host = {"rollout": {"n": 8, "val_kwargs": {"n": 2}}}
    config = OmegaConf.create({"actor_rollout_ref": host})
    assert (read_node(ReplayConfig, config).n, read_node(ReplayConfig, config).val_n) == (8, 2)
    own = read_node(ReplayConfig, {"actor_rollout_ref": host, "replay": {"n": 4}})
    assert (own.n, own.val_n) == (4, 2)


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({"on_incomplete": "min_viable"}, "min_viable"),
        ({"on_incomplete": "min_viable", "min_viable": 5, "n": 4}, "min_viable"),
        ({"max_off_policy_strategy": "wait"}, "max_off_policy_threshold"),
        ({"max_refills": 0}, "max_refills"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": 1e10}, "timeout_s"),  # longer than a thread can wait
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"progress_interval_s": 0}, "progress_interval_s"),
        ({"n": True}, "n"),
    ],
)
def test_invalid_settings_are_refused(node, key):
    with pytest.raises(ConfigError, match=f"replay.{key}: ") as error:
        read_node(ReplayConfig, {"replay": node})
    assert str(error.value).count("replay.") == 1, error.value


def test_an_invalid_number_of_the_hosts_is_named_by_its_key():
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n: "):
        read_node(ReplayConfig, {"actor_rollout_ref": {"rollout": {"n": "eight"}}})
