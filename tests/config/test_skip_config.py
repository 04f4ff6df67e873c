"""From a full config to complete roles."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip.config import (
    AsyncRolloutSkipConfig,
    RoleConfig,
    RolloutSkipConfig,
    RolloutTqSkipConfig,
    SkipManagerConfig,
)
from rlskip.config.skip import DEFAULT_DUMP_DIR, RoleSpec, read_roles
from rlskip.errors import ConfigError, NotInstalledError


@dataclass
class CriticConfig(RoleConfig):
    warm: int = 3


REGISTRY = {
    "rollout": RoleSpec(RolloutSkipConfig),
    "async_rollout": RoleSpec(AsyncRolloutSkipConfig),
    "rollout_tq": RoleSpec(RolloutTqSkipConfig),
    "critic": RoleSpec(CriticConfig, ("cache",)),
}

HOST = {
    "trainer": {"experiment_name": "exp", "project_name": "proj"},
    "data": {"train_batch_size": 32, "max_prompt_length": 64, "max_response_length": 16},
    "actor_rollout_ref": {"rollout": {"n": 8}},
}


def rollout(skip: dict[str, Any], host: dict[str, Any] | None = None) -> Any:
    return read_roles({**(host or {}), "skip": skip}, REGISTRY)["rollout"]


def test_what_a_role_was_not_given_it_takes_from_above() -> None:
    role = rollout(
        {"steps": "1-3", "action": "repeat", "dump_dir": "/a", "rollout": {"enable": True}}
    )
    assert 3 in role.steps
    assert 4 not in role.steps
    assert (role.action, role.dump_dir) == ("repeat", "/a")
    role = rollout(
        {
            "steps": "1-3",
            "action": "repeat",
            "dump_dir": "/a",
            "rollout": {"enable": True, "steps": [9], "action": "cache", "dump_dir": "/b"},
        }
    )
    assert 9 in role.steps
    assert 3 not in role.steps
    assert (role.action, role.dump_dir) == ("cache", "/b")


def test_role_and_shared_keys_are_the_same() -> None:
    shared = {f.name for f in dataclasses.fields(SkipManagerConfig)}
    assert {f.name for f in dataclasses.fields(RoleConfig)} == shared - {
        "attach",
        "rollout",
        "async_rollout",
        "rollout_tq",
    }


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_null_keys_come_from_the_host(wrap: Any) -> None:
    config = wrap({**copy.deepcopy(HOST), "skip": {"rollout": {"enable": True}}})
    role = read_roles(config, REGISTRY)["rollout"]
    assert (role.experiment_name, role.project_name) == ("exp", "proj")
    assert (role.gbs, role.n, role.prompt_len, role.response_len) == (32, 8, 64, 16)
    config["data"]["gen_batch_size"] = 48
    assert read_roles(config, REGISTRY)["rollout"].gbs == 48


def test_nothing_known_of_the_host() -> None:
    role = rollout({"rollout": {"enable": True}})
    assert role.experiment_name == "default_experiment_name"
    assert role.project_name == "default_project_name"
    assert role.gbs is None
    assert role.dump_dir == str(Path(DEFAULT_DUMP_DIR).expanduser())
    assert (
        rollout({"experiment_name": "own", "rollout": {"enable": True}}, HOST).experiment_name
        == "own"
    )


def test_a_relative_dump_dir_is_the_working_directorys(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    role = rollout({"dump_dir": "dumps", "rollout": {"enable": True}})
    assert role.dump_dir == os.path.join(os.getcwd(), "dumps")


@pytest.mark.parametrize(
    "skip",
    [
        {},
        {"enable": True},
        {"enable": False, "rollout": {"enable": True}},
        {"rollout": {"enable": False}},
        {"rollout": {}},
    ],
)
def test_off(skip: dict[str, Any]) -> None:
    assert read_roles({"skip": skip}, REGISTRY) == {}


def test_no_skip_node() -> None:
    assert read_roles({}, REGISTRY) == {}
    assert read_roles(OmegaConf.create({"skip": None}), REGISTRY) == {}


def test_a_skip_manager_config_stands_for_the_whole() -> None:
    config = SkipManagerConfig(dump_dir="/d", rollout=RolloutSkipConfig(enable=True, steps=[4]))
    for given in (config, {"skip": config}):
        role = read_roles(given, REGISTRY)["rollout"]
        assert 4 in role.steps
        assert role.dump_dir == "/d"


def test_verls_leaf_defaults_say_nothing() -> None:
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
    roles = read_roles({"skip": node}, REGISTRY)
    assert list(roles) == ["rollout"]
    role = roles["rollout"]
    assert 2 in role.steps
    assert (role.action, role.dump_dir) == ("repeat", "/mine")
    # What the user did say there counts.
    node["rollout"] = {**leaf, "enable": True, "steps": [5]}
    assert 5 in read_roles({"skip": node}, REGISTRY)["rollout"].steps


def test_a_custom_role_with_a_dataclass_of_its_own() -> None:
    role = read_roles({"skip": {"critic": {"enable": True, "warm": 7}}}, REGISTRY)["critic"]
    assert isinstance(role, CriticConfig)
    assert role.warm == 7
    assert 1 in role.steps


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"stepz": 1}, "skip.stepz: unknown key\n  -> did you mean skip.steps?"),
        ({"rolout": {"enable": True}}, "did you mean skip.rollout?"),
        ({"reward": {"enable": True}}, "@register_skip('reward')"),
        ({"rollout": True}, "skip.rollout: expected a mapping, got True"),
        ({"rollout": {"steps": [1.5]}}, "skip.rollout.steps: 1.5 (float) is no step"),
        ({"steps": [[1]]}, "skip.steps: [1] (list) is no step"),
        ({"rollout": {"action": "random"}}, "'random' is planned, but not there yet"),
        (
            {"critic": {"action": "repeat"}},
            "skip.critic.action: role critic does not support 'repeat'\n  -> use one of cache",
        ),
        ({"dump_dir": "s3://bucket/x"}, "'s3://bucket/x' is a URL"),
        ({"rollout": {"dump_dir": "hdfs://x"}}, "skip.rollout.dump_dir"),
        ({"dump_dir": "s3:/b"}, "skip.dump_dir: 's3:/b' is a URL"),
        ({"dump_dir": ""}, "skip.dump_dir: it is empty\n  -> name a directory"),
        ({"rollout": {"dump_dir": " "}}, "skip.rollout.dump_dir: it is empty"),
        ({"dump_dir": "???"}, "skip.dump_dir: no value was given (???)"),
        ({"rollout": {"experiment_name": "???"}}, "skip.rollout.experiment_name: no value was"),
        ({"dump_dir": "~nobody-is-called-so/x"}, "skip.dump_dir: '~nobody-is-called-so/x': "),
        ({"max_size": -1}, "skip.max_size: -1 is no size"),
        ({"rollout": {"max_size": "-1GB"}}, "skip.rollout.max_size: '-1GB' is no size"),
        ({"on_miss": "generat"}, "did you mean 'generate'?"),
        ({"gbs": 0}, "skip.gbs: must be at least 1"),
    ],
)
def test_refused(skip: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": skip}, REGISTRY)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ({"max_size": "5 apples"}, "skip.max_size: '5 apples' is no size"),
        ({"max_size": -1}, "skip.max_size: -1 is no size"),
        ({"action": "random"}, "skip.action: 'random' is planned, but not there yet"),
        ({"dump_dir": ""}, "skip.dump_dir: it is empty"),
        ({"steps": "1-"}, "skip.steps: "),
    ],
)
def test_what_several_roles_inherit_is_wrong_once(skip: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": {**skip, **{role: {} for role in REGISTRY}}}, REGISTRY)
    assert str(caught.value).startswith(message)
    assert "problems" not in str(caught.value)


def test_an_inherited_action_is_named_where_it_was_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": {"action": "repeat", "rollout": {}, "critic": {}}}, REGISTRY)
    assert str(caught.value).startswith("skip.action: role critic does not support 'repeat'")


def test_never_to_run_the_stage_and_to_run_it_again_contradict_each_other() -> None:
    with pytest.raises(ConfigError) as caught:
        rollout(
            {"on_mismatch": "regenerate", "rollout": {"enable": True, "on_miss": "error"}},
        )
    text = str(caught.value)
    assert text.startswith("skip.rollout.on_miss: error never runs the stage")
    assert "skip.on_mismatch=regenerate" in text
    for other in ({"on_miss": "generate"}, {"on_mismatch": "ignore"}, {"enable": False}):
        skip = {"on_miss": "error", "on_mismatch": "regenerate"}
        read_roles({"skip": {**skip, "rollout": {"enable": True, **other}}}, REGISTRY)


def test_every_problem_at_once() -> None:
    skip = {
        "stepz": 1,
        "steps": [-1],
        "rollout": {"enable": "yes", "action": "empty"},
        "async_rollout": {"dump_dir": 3},
    }
    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": skip}, REGISTRY)
    text = str(caught.value)
    assert "5 problems" in text
    for key in (
        "skip.stepz",
        "skip.steps",
        "skip.rollout.enable",
        "skip.rollout.action",
        "skip.async_rollout.dump_dir",
    ):
        assert f"- {key}:" in text


def test_a_plain_string_means_that_the_plug_in_is_missing() -> None:
    with pytest.raises(NotInstalledError, match="did not discover"):
        read_roles(OmegaConf.create({"skip": "rollout_cache"}), REGISTRY)


def test_an_interpolation_that_does_not_resolve_is_named() -> None:
    config = OmegaConf.create({"skip": {"dump_dir": "${nowhere}"}})
    with pytest.raises(ConfigError, match="nowhere"):
        read_roles(config, REGISTRY)


def test_a_config_error_survives_pickling() -> None:
    import pickle

    with pytest.raises(ConfigError) as caught:
        read_roles({"skip": {"stepz": 1}}, REGISTRY)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.where == "skip.stepz"
