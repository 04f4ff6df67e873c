"""Options: the user's values are kept, no ``++`` is needed, roles inherit, host configs compose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

import rlskip_conf
from rlskip import RoleConfig
from rlskip.config.facts import Origin
from rlskip.config.settings import read_skip
from rlskip.errors import ConfigError
from rlskip_conf import NODES, options
from tests.hydra.conftest import compose_from
from tests.readers import READERS

CONF = Path(rlskip_conf.__file__).parent
SKIP_OPTIONS = sorted(file.stem for file in (CONF / "skip").glob("*.yaml"))

Compose = Callable[..., DictConfig]


def said(config: DictConfig) -> Any:
    """What is set under `skip`, without the key that each option has for verl's processes."""
    found: Any = OmegaConf.to_container(config.skip)
    assert found.pop("provider", "rlskip") == "rlskip"
    return found


def roles(config: DictConfig) -> dict[str, RoleConfig]:
    return read_skip(config).roles


# -- an application without a skip node --------------------------------------------------------
def test_an_application_without_a_skip_node(composed: Compose) -> None:
    config = composed("a: 1\n", "+skip=rollout_cache")
    assert said(config) == {"rollout": {"enable": True}}
    assert config.hydra.callbacks.rlskip._target_ == "rlskip.hooks.SkipCallback"
    role = roles(config)["rollout"]
    assert str(role.steps) == "all"
    assert role.dump_dir == str(Path("~/.rlskip/rollout_dump").expanduser())
    assert (role.action, role.on_miss, role.on_mismatch) == ("cache", "generate", "error")
    # What Hydra names the application; compose() names it so.
    assert (role.experiment_name, role.gbs) == (None, None)
    assert Origin.of(config).name == config.hydra.job.name == "app"


# Of each other node a value in the user's YAML, and one that the command sets.
OWN = {
    "dispatch": ("policy: chunk", "workers=8"),
    "merge": ("on_overlong: warn", "strategy=chain"),
    "replay": ("max_refills: 5", "min_viable=3"),
    "record": ("values: digest", "keep_last=2"),
}


@pytest.mark.parametrize("listed", [False, True], ids=["by the command", "in a defaults list"])
@pytest.mark.parametrize("node", OWN)
def test_options_of_the_other_nodes_keep_the_users_values(
    composed: Compose, node: str, listed: bool
) -> None:
    own, typed = OWN[node]
    (option,) = options(node)
    head = f"defaults: [{{{node}: {option}}}, _self_]\n" if listed else ""
    chosen = [] if listed else [f"+{node}={option}"]
    config = composed(f"{head}{node}: {{{own}}}\n", *chosen, f"{node}.{typed}")
    expected = OmegaConf.merge(
        OmegaConf.load(CONF / node / f"{option}.yaml")[node],
        OmegaConf.create(f"{{{own}}}"),
        OmegaConf.from_dotlist([typed]),
    )
    assert config[node] == expected
    read = READERS[node](config)
    assert all(getattr(read, key) == value for key, value in expected.items())


def test_the_users_own_callback_stays(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "hydra" / "callbacks").mkdir(parents=True)
    (tmp_path / "hydra" / "callbacks" / "mine.yaml").write_text("mine: {_target_: mine.Callback}\n")
    config = composed("a: 1\n", "+skip=rollout_cache", "hydra/callbacks=mine")
    assert config.hydra.callbacks.keys() == {"mine", "rlskip"}


# -- the genuine configs of verl ---------------------------------------------------------------
ACTIONS = {option: option.rpartition("_")[2] for option in SKIP_OPTIONS}


@pytest.mark.parametrize("action", sorted(set(ACTIONS.values())))
def test_verl_composes_every_option(verl_configs: Path, action: str) -> None:
    """Those of an action at once."""
    options = [option for option, its in ACTIONS.items() if its == action]
    chosen = (f"+skip=[{','.join(options)}]", "skip.dump_dir=/d")
    found = roles(compose_from(verl_configs, "ppo_trainer", *chosen))
    assert sorted(found) == [option.rpartition("_")[0] for option in options]
    for role in found.values():
        # The shared key counts even though verl filled the role's own leaf.
        expected = "cache" if action == "replay" else action
        assert (role.action, role.dump_dir, str(role.steps)) == (expected, "/d", "all")
        assert (role.on_miss == "error") is (action == "replay")
        assert (role.experiment_name, role.project_name) == ("gsm8k", "verl_examples")
        assert (role.gbs, role.n, role.prompt_len, role.response_len) == (1024, 1, 512, 512)


LONG = f"[{','.join(map(str, range(1, 129)))}]"  # what bash makes of "[$(seq -s, 1 128)]"


@pytest.mark.parametrize(
    ("name", "steps", "options"),
    [("rollout", "steps=[1,2,3,10]", []),
     ("async_rollout", f"steps={LONG}", ["+skip=async_rollout_cache"])],
    ids=["bare", "with an option"],
)  # fmt: skip
def test_flags_of_skip_manager_work_as_written(
    verl_configs: Path, name: str, steps: str, options: list[str]
) -> None:
    given = ("enable=True", "dump_dir=/path/to/rollout_dump", steps, "action=cache")
    flags = [f"skip.{name}.{flag}" for flag in given]
    config = compose_from(verl_configs, "ppo_trainer", *options, *flags)
    role = roles(config)[name]
    assert str(role.steps) == steps.removeprefix("steps=").strip("[]")
    assert (role.dump_dir, role.action) == ("/path/to/rollout_dump", "cache")


def test_options_add_no_key_that_verl_refuses(verl_configs: Path) -> None:
    """verl converts the node to its own dataclass, which refuses any other key."""
    bare = compose_from(verl_configs, "ppo_trainer")
    option = "+skip=[rollout_cache,async_rollout_repeat]"
    config = compose_from(verl_configs, "ppo_trainer", option)
    assert said(config).keys() == said(bare).keys()
    for name in ("rollout", "async_rollout", "rollout_tq"):
        assert config.skip[name].keys() == bare.skip[name].keys()
    assert OmegaConf.get_type(config.skip) is dict


# -- typed configs -----------------------------------------------------------------------------
@dataclass
class NoField:
    a: int = 1


@pytest.mark.parametrize("node", NODES)
def test_a_dataclass_needs_no_field_for_any_option(node: str) -> None:
    ConfigStore.instance().store("rlskip_test_typed", NoField)
    chosen = f"+{node}={options(node)[0]}"
    with initialize(version_base=None):
        config = compose("rlskip_test_typed", [chosen])
        assert config.a == 1
        assert config[node]
        assert isinstance(OmegaConf.to_object(config), NoField)
        # Its own keys are checked as before.
        with pytest.raises(Exception, match="Could not override 'b'"):
            compose("rlskip_test_typed", [chosen, "b=2"])


@pytest.mark.parametrize("other", ["rollout_repeat", "rollout_replay"])
def test_two_options_of_one_role_are_refused(composed: Any, other: str) -> None:
    config = composed("a: 1\n", f"+skip=[rollout_cache,{other}]")
    with pytest.raises(ConfigError, match=f"rollout_cache and {other} are options of one role"):
        read_skip(config)
    both = read_skip(composed("a: 1\n", "+skip=[rollout_cache,async_rollout_cache]"))
    assert [*both.roles] == ["rollout", "async_rollout"]
