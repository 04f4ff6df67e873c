"""Shared by hosts without Hydra: where the config comes from, whether it enables their role."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlskip.config.check import Problem, is_below, leaves, look_up, raise_all
from rlskip.config.other_nodes import DispatchConfig, MergeConfig, ReplayConfig
from rlskip.errors import ConfigError
from rlskip.skip.manager import SkipManager
from rlskip.skip.said import refuse_without_node

CONFIG_VARIABLE = "RLSKIP_CONFIG"

#: The role that these hosts call in training.
ROLE = "rollout"

log = logging.getLogger(__name__)

# The stage of a role that the user registered is in the user's own code.
_NEVER_CALLED = ("async_rollout", "rollout_tq")
_NODES = {"dispatch": DispatchConfig, "replay": ReplayConfig, "merge": MergeConfig}


def read_config(config: Any) -> Any:
    """`config` itself, or the content of the YAML file that it names; raises ConfigError.

    None is the file that the environment variable ``RLSKIP_CONFIG`` names; without it None.
    """
    where = str(config)
    if config is None:
        config = os.environ.get(CONFIG_VARIABLE) or None
        where = f"{CONFIG_VARIABLE}={config}"
    if not isinstance(config, (str, Path)):
        if not (isinstance(config, Mapping) and "merge" in config):
            refuse_without_node(config)
        return config
    try:
        loaded = OmegaConf.load(Path(config).expanduser())
    except Exception as error:  # OSError, and any error of a YAML parser
        remedy = "name a YAML file with a `skip` entry"
        raise ConfigError(f"{type(error).__name__}: {error}", where, remedy) from error
    if not isinstance(loaded, Mapping) or not loaded.keys() & {"skip", "merge", "record"}:
        raise ConfigError("expected a mapping with an entry `skip`, `merge` or `record`", where)
    return loaded


def warn_of_idle(config: Any, host: str, *names: str) -> None:
    """Warn of nodes that `config` turns on or sets, and that `host` does nothing with."""
    for name in names:
        usual, given = vars(_NODES[name]()), dict(leaves(look_up(config, name)))
        ours = (value for key, value in given.items() if is_below(key, usual))
        if given != usual and not {*map(repr, ours)} <= {"None", "False"}:
            log.warning("rlskip: %s does nothing with the node `%s`: leave it out", host, name)


def is_on(given: bool, host: str) -> bool:
    """Whether the role that `host` calls is on; a warning says so if it is off in a `given` config.

    Every other built-in role that is on is refused by name: none of its stages would be skipped.
    """
    remedy = f"use skip.{ROLE}.enable=true instead"
    raise_all(
        [
            Problem(f"skip.{role}.enable", f"{host} never calls a stage {role!r}", remedy)
            for role in SkipManager.skip_instances
            if role in _NEVER_CALLED
        ]
    )
    if ROLE in SkipManager.skip_instances:
        return True
    settings = SkipManager.settings
    if given and settings is not None and settings.node is not None:
        what = f"skip.enable is false, or skip.{ROLE}.enable is not true"
        log.warning("rlskip: NOTHING that %s generates is skipped or cached: %s", host, what)
    return False
