"""Every reader takes any form of config, and returns what it read before as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlskip.config import (
    DispatchConfig,
    MergeConfig,
    ReplayConfig,
    RolloutSkipConfig,
    SkipManagerConfig,
)
from rlskip.config.dispatch import read_dispatch
from rlskip.config.merge import read_merge
from rlskip.config.replay import read_replay
from rlskip.config.settings import SkipSettings, read_skip
from rlskip.config.skip import BUILT_IN_ROLES, RoleSpec
from rlskip.errors import ConfigError

REGISTRY = {role: RoleSpec() for role in BUILT_IN_ROLES}


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
    return read_skip(config, REGISTRY).roles["rollout"]


READERS: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "dispatch": (read_dispatch, "workers", 3),
    "merge": (read_merge, "stepwise_output", True),
    "replay": (read_replay, "timeout_s", 5.0),
    "skip": (read_rollout, "dump_dir", "/d"),
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
@pytest.mark.parametrize("name", READERS)
def test_any_form_of_config(name: str, form: str) -> None:
    reader, key, expected = READERS[name]
    config = FORMS[form](name)
    read = reader(config)
    assert getattr(read, key) == expected
    if name != "merge" and form != "the node's dataclass" and name in str(config):
        n_of_host = None if form == "a mapping of dataclasses" else 7
        assert read.n == (n_of_host or (1 if name == "dispatch" else None))


@pytest.mark.parametrize("name", ["dispatch", "merge", "replay"])
def test_a_config_that_was_read_is_returned_as_it_is(name: str) -> None:
    reader = READERS[name][0]
    read = reader(Host())
    assert reader(read) is read
    # Not so one that the caller built: it is checked and completed.
    own = type(read)()
    assert reader(own) is not own


def test_skip_settings_are_returned_as_they_are() -> None:
    settings = read_skip(Host(), REGISTRY)
    assert isinstance(settings, SkipSettings)
    assert read_skip(settings, {}) is settings


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("config", ["rollout_cache", 5, ["a"], Host])
def test_what_is_not_a_config_is_refused(name: str, config: Any) -> None:
    with pytest.raises(ConfigError, match="expected a config with an entry"):
        READERS[name][0](config)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("dispatch", DispatchConfig(workers=0)),
        ("merge", MergeConfig(strategy="tree")),
        ("replay", ReplayConfig(max_refills=0)),
        ("skip", SkipManagerConfig(wait_s=-1.0)),
    ],
)
def test_a_dataclass_that_the_caller_built_is_checked(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}\."):
        READERS[name][0](bad)
