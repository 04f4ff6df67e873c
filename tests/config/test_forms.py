"""Every reader takes any form of config, and what it returned before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip import DispatchConfig, MergeConfig, ReplayConfig, RolloutSkipConfig, SkipManagerConfig
from rlskip.config.nodes import read_node
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.errors import ConfigError
from tests.readers import READERS


@dataclass
class Rollout:
    n: int = 7


@dataclass
class Actor:
    rollout: Rollout = field(default_factory=Rollout)


@dataclass
class Host:
    """A trainer that keeps its config in dataclasses."""

    dispatch: DispatchConfig = field(default_factory=lambda: DispatchConfig(workers=3))
    merge: MergeConfig = field(default_factory=lambda: MergeConfig(stepwise_output=True))
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(timeout_s=5.0))
    skip: SkipManagerConfig = field(
        default_factory=lambda: SkipManagerConfig(
            dump_dir="/d", rollout=RolloutSkipConfig(enable=True)
        )
    )
    actor_rollout_ref: Actor = field(default_factory=Actor)


def read_rollout(config: Any) -> Any:
    return read_skip(config).roles["rollout"]


KEYS = {
    "dispatch": ("workers", 3),
    "merge": ("stepwise_output", True),
    "replay": ("timeout_s", 5.0),
    "skip": ("dump_dir", "/d"),
}
FORMS: dict[str, Callable[[str], Any]] = {
    "the node's dataclass": lambda name: getattr(Host(), name),
    "a dataclass of the host": lambda name: Host(),
    "a structured DictConfig": lambda name: OmegaConf.structured(Host),
    "a mapping of dataclasses": lambda name: {name: getattr(Host(), name)},
    "a mapping": lambda name: OmegaConf.to_container(OmegaConf.structured(Host)),
    "an untyped DictConfig": lambda name: OmegaConf.create(
        OmegaConf.to_container(OmegaConf.structured(Host))  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KEYS)
def test_any_form_of_config(name: str, form: str) -> None:
    key, expected = KEYS[name]
    config = FORMS[form](name)
    read = read_rollout(config) if name == "skip" else READERS[name](config)
    assert getattr(read, key) == expected
    if name != "skip":
        assert READERS[name](read) == read, "what was read is a form, too"
    if name != "merge" and form != "the node's dataclass" and name in str(config):
        n_of_host = None if form == "a mapping of dataclasses" else 7
        assert read.n == (n_of_host or (1 if name == "dispatch" else None))


def test_a_path_is_a_directory() -> None:
    for skip in (
        {"rollout": {"enable": True, "dump_dir": Path("/d")}},
        SkipManagerConfig(dump_dir=Path("/d"), rollout=RolloutSkipConfig(enable=True)),  # type: ignore[arg-type]
    ):
        assert read_rollout({"skip": skip}).dump_dir == "/d"


def test_a_default_that_a_dataclass_lists_leaves_the_choice_to_the_host() -> None:
    host = {
        "algorithm": {"filter_groups": {"enable": True}},
        "trainer": {"v1": {"rollout_level_dispatch": True}},
    }
    settings = read_skip({**host, "skip": Host().skip})
    role = settings.roles["rollout"]
    assert (role.match, role.restore_rng) == ("run", None)  # under TRL it is true
    assert read_node(DispatchConfig, {**host, "dispatch": Host().dispatch}).rollout_level
    assert not read_node(DispatchConfig, {"dispatch": Host().dispatch}).rollout_level


def test_skip_settings_are_returned_as_they_are() -> None:
    settings = read_skip(Host())
    assert isinstance(settings, SkipSettings)
    assert read_skip(settings) is settings


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("config", ["rollout_cache", 5, ["a"], Host])
def test_what_is_not_a_config_is_refused(name: str, config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a config with an entry"):
        READERS[name](config)


def test_a_dataclass_that_the_caller_built_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"^dispatch\.workers: must be at least 1"):
        read_node(DispatchConfig, DispatchConfig(workers=0))
    with pytest.raises(ConfigError, match=r"^skip\.wait_s: must be at least 0"):
        read_skip(SkipManagerConfig(wait_s=-1.0))
    wrong = SkipManagerConfig(wait_s="5 min", rollout=RolloutSkipConfig(n="x"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"skip\.wait_s: Value (.|\n)*skip\.rollout\.n: Value"):
        read_skip({"skip": wrong})


def test_threads_that_read_configs_side_by_side_read_their_own() -> None:
    def read(n: int) -> set[int | None]:
        return {read_node(DispatchConfig, {"dispatch": {"n": n}}).n for _ in range(40)}

    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(read, range(1, 9))] == [{n} for n in range(1, 9)]
    finally:
        sys.setswitchinterval(usual)
