"""The `replay` node: defaults, where they come from, and every problem named at once."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from rlskip.config.replay import ReplayConfig, read_replay
from rlskip.errors import ConfigError


@pytest.mark.parametrize("config", [{}, {"replay": {}}, OmegaConf.create({"trainer": {}}), None])
def test_without_a_node_the_defaults_fail_closed(config):
    settings = read_replay(config)
    assert settings == ReplayConfig()
    assert settings.on_incomplete == "raise"
    assert 0 < settings.timeout_s < float("inf")


def test_it_is_a_structured_config():
    node = OmegaConf.structured(ReplayConfig)
    assert OmegaConf.to_container(node) == dataclasses.asdict(ReplayConfig())


def test_the_number_of_sessions_comes_from_the_host():
    host = {"rollout": {"n": 8, "val_kwargs": {"n": 2}}}
    config = OmegaConf.create({"actor_rollout_ref": host})
    assert (read_replay(config).n, read_replay(config).val_n) == (8, 2)
    own = read_replay({"actor_rollout_ref": host, "replay": {"n": 4}})
    assert (own.n, own.val_n) == (4, 2)


def test_interpolations_resolve():
    config = OmegaConf.create({"limit": 5, "replay": {"timeout_s": "${limit}"}})
    assert read_replay(config).timeout_s == 5


def test_every_problem_is_named_at_once_by_its_full_key():
    with pytest.raises(ConfigError) as error:
        read_replay(
            {
                "replay": {
                    "on_incomplet": "drop",
                    "on_incomplete": "dorp",
                    "max_refills": 0,
                    "max_off_policy_strategy": "wait",
                    "timeout_s": float("inf"),
                    "progress_interval_s": 0,
                },
                "actor_rollout_ref": {"rollout": {"n": "eight"}},
            }
        )
    for said in (
        "replay.on_incomplet: unknown key; did you mean replay.on_incomplete?",
        "replay.on_incomplete: 'dorp' is not one of raise, drop, refill, min_viable",
        "did you mean 'drop'?",
        "replay.max_refills: must be at least 1",
        "replay.max_off_policy_threshold: max_off_policy_strategy: wait needs a value here",
        "replay.timeout_s: must be a finite number, got inf",
        "replay.progress_interval_s: expected a number of seconds above 0, got 0",
        "actor_rollout_ref.rollout.n: expected int or null, got 'eight'",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("node", "key"),
    [
        ({"on_incomplete": "min_viable"}, "min_viable"),
        ({"on_incomplete": "min_viable", "min_viable": 5, "n": 4}, "min_viable"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"n": True}, "n"),
    ],
)
def test_invalid_settings_are_refused(node, key):
    with pytest.raises(ConfigError, match=f"replay.{key}: ") as error:
        read_replay({"replay": node})
    assert str(error.value).count("replay.") == 1, error.value
