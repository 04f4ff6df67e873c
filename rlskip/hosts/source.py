"""Where a host without Hydra has its configuration from: an argument, a file, the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlskip.config.skip import skip_node
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


def host_config(
    config: Any,
    *,
    experiment_name: str | None,
    project_name: str | None,
    gbs: int | None,
    n: int | None,
    response_len: int | None,
    prompt_len: int | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """The `skip` node of `config` beside what the host knows, where SkipManager looks for it."""
    return {
        "skip": skip_node(config),
        "trainer": {"experiment_name": experiment_name, "project_name": project_name},
        "data": {
            "train_batch_size": gbs,
            "max_prompt_length": prompt_len,
            "max_response_length": response_len,
        },
        "actor_rollout_ref": {"rollout": {"n": n}, "model": {"path": model}},
    }
