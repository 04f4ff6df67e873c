"""Which releases and applications of verl rlskip supports."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from rlskip._compat import version_of
from rlskip.config.check import look_up
from rlskip.errors import ConfigError
from rlskip.hosts.verl.names import PLUGIN_GROUP

#: The oldest release that is tested.
OLDEST = (0, 7, 1)
#: The newest.
NEWEST = (0, 9)

log = logging.getLogger(__name__)


def is_verls(config: Any) -> bool:
    """Whether `config` looks like the config of one of verl's applications."""
    parts = ("actor_rollout_ref", "ray_kwargs", "trainer")
    return all(look_up(config, part) is not None for part in parts)


def loads_entry_points() -> bool:
    """Whether the installed verl loads entry points as plug-ins; imports nothing of it."""
    root = _root()
    return root is not None and PLUGIN_GROUP in (root / "__init__.py").read_text(encoding="utf-8")


def lacks(module: str) -> bool:
    """Whether verl is installed and has no such module; imports nothing of it."""
    root = _root()
    return (
        root is not None and not Path(root.parent, *module.split(".")).with_suffix(".py").exists()
    )


def _root() -> Path | None:
    try:
        spec = importlib.util.find_spec("verl")
    except ValueError:  # a module that was not imported from a file
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def verl_version() -> tuple[int, ...]:
    """The installed release, for example (0, 9, 1); (0,) if it is unknown."""
    return version_of("verl") or (0,)


def refuse_old_release() -> None:
    """Raise :class:`ConfigError` if the installed verl is older than the oldest tested one."""
    if verl_version() < OLDEST:
        raise ConfigError(
            f"verl {_dotted(verl_version())} is not supported and would train without skipping",
            "skip",
            f"use verl {_dotted(OLDEST)} or later, or turn skip off",
        )


def warn_of_new_release() -> None:
    """Log a warning if the installed verl is newer than the newest tested one."""
    if verl_version()[: len(NEWEST)] > NEWEST:
        log.warning(
            "rlskip: verl %s is newer than %s, the newest that was tested: it is tried, and a seam "
            "that has changed ends the run",
            _dotted(verl_version()),
            _dotted(NEWEST),
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
