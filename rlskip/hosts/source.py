"""What hosts without Hydra share: where their config is from, whether it names their role."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlskip.config.check import Problem, raise_all
from rlskip.config.skip import skip_node
from rlskip.errors import ConfigError

CONFIG_VARIABLE = "RLSKIP_CONFIG"

log = logging.getLogger(__name__)

# A role that the user registered has its stage in the user's own code.
_BUILT_IN = ("rollout", "async_rollout", "rollout_tq")


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


def is_on(role: str, config: Any, host: str) -> bool:
    """Whether what is installed switches on `role`, the only one that `host` asks.

    Where it does not although `config` has a `skip` entry, a warning says so.

    Raises
    ------
    ConfigError
        Names every other built-in role that is on: nothing of it would be skipped.
    """
    from rlskip.skip.manager import SkipManager

    raise_all(
        [
            Problem(
                f"skip.{other}.enable",
                f"{host} never calls a stage {other!r}: nothing would be skipped",
                f"use skip.{role}.enable=true in its place",
            )
            for other in SkipManager.skip_instances
            if other in _BUILT_IN and other != role
        ]
    )
    if role in SkipManager.skip_instances:
        return True
    if config is not None and skip_node(config) is not None:
        log.warning(
            "rlskip: NOTHING that %s generates is skipped or cached: skip.enable is false, or "
            "skip.%s.enable is not true",
            host, role,
        )  # fmt: skip
    return False
