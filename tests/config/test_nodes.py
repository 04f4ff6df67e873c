"""From a full config to complete roles, and to the nodes `dispatch`, `replay` and `merge`."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import RoleConfig, SkipAction
from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, MergeConfig, ReplayConfig
from rlskip.config.settings import read_skip
from rlskip.config.skip import SKIP_REGISTRY, role_configs
from rlskip.errors import ConfigError


@dataclass
class CriticConfig(RoleConfig):
    warm: int = 3


class Critic:
    config_class = CriticConfig
    support_actions = (SkipAction.CACHE,)
    stage_options: frozenset[str] = frozenset()
    support_online_step = False


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SKIP_REGISTRY, "critic", Critic)


HOST = {
    "trainer": {"experiment_name": "exp", "project_name": "proj"},
    "data": {"train_batch_size": 32, "max_prompt_length": 64, "max_response_length": 16},
    "actor_rollout_ref": {"rollout": {"n": 8}},
}


def read_roles(config: Any) -> dict[str, RoleConfig]:
    return read_skip(config).roles


def rollout(skip: dict[str, Any], host: dict[str, Any] | None = None) -> Any:
    return read_roles({**(host or {}), "skip": skip})["rollout"]


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_null_keys_come_from_the_host(wrap: Any) -> None:
    config = wrap({**copy.deepcopy(HOST), "skip": {"rollout": {"enable": True}}})
    role = read_roles(config)["rollout"]
    assert (role.experiment_name, role.project_name) == ("exp", "proj")
    assert (role.gbs, role.n, role.prompt_len, role.response_len) == (32, 8, 64, 16)
    config["data"]["gen_batch_size"] = 48
    config["actor_rollout_ref"]["rollout"]["response_length"] = 8  # verl samples by this
    role = read_roles(config)["rollout"]
    assert (role.gbs, role.prompt_len, role.response_len) == (48, 64, 8)


def test_a_step_of_the_v1_trainer_has_train_batch_size_prompts() -> None:
    """gen_batch_size is what it fetches at a time."""
    config = {**copy.deepcopy(HOST), "skip": {"rollout_tq": {"enable": True}}}
    config["data"]["gen_batch_size"] = 1
    assert read_roles(config)["rollout_tq"].gbs == 32
    del config["data"]["train_batch_size"]
    assert read_roles(config)["rollout_tq"].gbs == 1


@pytest.mark.parametrize(
    "config",
    [
        OmegaConf.create({"skip": None}),
        {"skip": {"enable": True}},
        {"skip": {"enable": False, "rollout": {"enable": True}}},
        {"skip": {"rollout": {}}},
    ],
)
def test_off(config: Any) -> None:
    assert read_roles(config) == {}


def test_verls_own_defaults_do_not_override_shared_keys() -> None:
    leaf = {"enable": False, "dump_dir": "~/.verl/rollout_dump", "steps": [], "action": "cache"}
    node = {
        "_target_": "verl.utils.skip.SkipManagerConfig",
        "steps": "1-2",
        "action": "repeat",
        "dump_dir": "/mine",
        "rollout": {**leaf, "enable": True},
        "rollout_tq": dict(leaf),
        "async_rollout": dict(leaf),
    }
    roles = read_roles({"skip": node})
    assert list(roles) == ["rollout"]
    role = roles["rollout"]
    assert 2 in role.steps
    assert (role.action, role.dump_dir) == ("repeat", "/mine")
    # A value that differs from verl's default counts.
    node["rollout"] = {**leaf, "enable": True, "steps": [5]}
    assert 5 in read_roles({"skip": node})["rollout"].steps
    # Without verl's class every value counts.
    del node["_target_"]
    node["rollout"] = {**leaf, "enable": True}
    dumps = Path("~/.verl/rollout_dump").expanduser()
    assert read_roles({"skip": node})["rollout"].dump_dir == str(dumps)


def test_validation_is_a_role_beside_the_one_of_training() -> None:
    skip = {"steps": [1], "on_miss": "error", "validation": "replay"}
    training = {"enable": True, "dump_dir": "/d"}
    config = {**HOST, "data": {"train_batch_size": 4, "gen_batch_size": 1}}
    first = {"reward": {"enable": True, "dump_dir": "/r"}}  # an option's role comes after it
    roles = read_roles({**config, "skip": {**first, **skip, "rollout_tq": training}})
    assert list(roles) == ["rollout_tq", "reward", "rollout_val"]
    role = roles["rollout_val"]
    assert (0 in role.steps, role.on_miss) == (True, "error")
    assert (role.dump_dir, role.gbs) == ("/d", 4), "those of rollout_tq"
    own = {"rollout_val": {"dump_dir": "/v", "steps": "2-4"}}
    role = read_roles({"skip": {**own, **skip, "rollout": training}})["rollout_val"]
    assert (role.dump_dir, str(role.steps)) == ("/v", "2-4")
    for off in ({**skip}, {**skip, "validation": "generate", "rollout": training}):
        assert "rollout_val" not in read_roles({"skip": off})


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"validation": "repaly"}, "'repaly' is not one of generate, replay"),
        ({"rollout": {"validation": "replay"}}, "skip.rollout.validation: unknown key"),
        (
            {"rollout_val": {"enable": True}},
            "skip.rollout_val.enable: skip.validation turns it on\n  -> set skip.validation=replay",
        ),
        ({"max_size": "200GB"}, "skip.max_size: unknown key"),
        ({"stepz": 1}, "skip.stepz: unknown key\n  -> did you mean skip.steps?"),
        ({"rolout": {"enable": True}}, "did you mean skip.rollout?"),
        ({"reward": {"warmup": 3}}, "@register_skip('reward', config=...)"),
        ({"reward": {"stesp": 3}}, "did you mean skip.reward.steps?"),
        ({"atach": {"rollout": "a:b"}}, "did you mean skip.attach?"),
        ({"my-role": {"enable": True}}, "unknown key\n  -> docs/keys.md lists all keys"),
        (
            {"rollout": True},
            "skip.rollout: expected a mapping, got True\n  -> set skip.rollout.enable=true",
        ),
        ({"skip": {"rollout": {"enable": True}}}, "skip.skip: a node inside the node"),
        ({"rollout.enable": True}, "unknown key\n  -> nest it: {rollout: {enable: True}}"),
        ({"on_miss": None}, "'on_miss' is not Optional\n  -> give one of generate, error"),
        ({"rollout": {"steps": [1.5]}}, "skip.rollout.steps: 1.5 (float) is not a step"),
        ({"rollout": {"action": "random"}}, "'random' is not one of cache, repeat"),
        (
            {"critic": {"action": "repeat"}},
            "skip.critic.action: role critic does not support 'repeat'\n  -> use one of cache",
        ),
        ({"dump_dir": "s3://bucket/x"}, "'s3://bucket/x' is a URL"),
        ({"dump_dir": "ü" * 200}, "is longer than 255 bytes"),
        ({"dump_dir": ""}, "skip.dump_dir: it is empty\n  -> name a directory"),
        ({"dump_dir": "???"}, "skip.dump_dir: Missing mandatory value"),
        ({"steps": None}, "skip.steps: no value was given (null); the default is all\n  -> give a"),
        ({"steps": range(3)}, "'range' is not a supported primitive type\n  -> give a list such"),
        ({1: {"enable": True}}, "skip.1: unknown key"),
        ({"rollout": OmegaConf.create({"steps": "${nowhere}"})}, "skip.rollout.steps: Interp"),
        (
            OmegaConf.create({"n": "${nowhere}"}),
            "skip.n: Interpolation key 'nowhere' not found\n  -> ",
        ),
        ({"dump_dir": "~nobody-is-called-so/x"}, "skip.dump_dir: '~nobody-is-called-so/x': "),
        # Contradictions.
        (
            {"on_mismatch": "regenerate", "rollout": {"enable": True, "on_miss": "error"}},
            "skip.rollout.on_miss: error never runs the stage, and skip.on_mismatch=regenerate",
        ),
        (
            {"start_engine": False, "on_mismatch": "regenerate", "rollout": {"enable": True}},
            "skip.start_engine: false never runs the stage",
        ),
        (
            {"start_engine": False, "rollout": {"enable": True, "on_miss": "generate"}},
            "skip.rollout.on_miss: skip.start_engine=false leaves no inference engine to generate",
        ),
    ],
)
def test_refused(skip: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": skip})
    assert message in str(caught.value)


def test_a_wrong_shared_key_is_reported_once() -> None:
    with pytest.raises(ConfigError, match=r"^skip\.steps: "):
        read_roles({"skip": {"steps": "1-", **{role: {} for role in role_configs()}}})


def test_what_one_role_sets_contradicts_no_other_key() -> None:
    for other in ({"on_miss": "generate"}, {"on_mismatch": "error"}, {"enable": False}):
        skip = {"on_miss": "error", "on_mismatch": "regenerate"}
        read_roles({"skip": {**skip, "rollout": {"enable": True, **other}}})


def test_without_an_engine_nothing_can_be_generated() -> None:
    assert rollout({"start_engine": False, "rollout": {"enable": True}}).on_miss == "error"
    own = {"enable": True, "on_miss": "generate"}
    assert read_roles({"skip": {"start_engine": False, "own": own}})["own"].on_miss == "generate"


def test_an_interpolation_in_the_hosts_keys_is_named_by_its_key() -> None:
    for wrap in (dict, OmegaConf.create):
        config = wrap(
            {"skip": {"rollout": {"enable": True}}, "data": {"train_batch_size": "${nowhere}"}}
        )
        if wrap is dict:
            config["data"] = OmegaConf.create(config["data"])
        with pytest.raises(ConfigError, match="nowhere") as caught:
            read_roles(config)
        assert caught.value.where == "data.train_batch_size"


# -- the other nodes -----------------------------------------------------------------------------


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
