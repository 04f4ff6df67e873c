"""Where a host without Hydra has its configuration from: an argument, a file, the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlskip.errors import ConfigError

CONFIG_VARIABLE = "RLSKIP_CONFIG"


def read_config(config: Any) -> Any:
    """`config` itself, or what the YAML file says that it names.

    None stands for the file that the environment variable ``RLSKIP_CONFIG`` names, and stays
    None without one.

    Raises
    ------
    ConfigError
        The file cannot be read, or has no entry `skip` or `merge`.
    """
    where = str(config)
    if config is None:
        config = os.environ.get(CONFIG_VARIABLE) or None
        where = f"{CONFIG_VARIABLE}={config}"
    if not isinstance(config, (str, Path)):
        return config
    try:
        loaded = OmegaConf.load(Path(config).expanduser())
    except Exception as error:  # OSError, and whatever a YAML parser thinks of
        raise ConfigError(
            f"{type(error).__name__}: {error}", where, "name a YAML file with a `skip` entry"
        ) from error
    if not isinstance(loaded, Mapping) or not loaded.keys() & {"skip", "merge"}:
        raise ConfigError("expected a mapping with an entry `skip` or `merge`", where)
    return loaded
