"""Which releases and applications of verl rlskip supports."""

from __future__ import annotations

from typing import Any

from rlskip._compat import version_of
from rlskip.config.check import look_up
from rlskip.errors import ConfigError

#: The oldest release that loads plug-ins, and the newest that is tested.
SUPPORTED = (0, 9)


def is_verls(config: Any) -> bool:
    """Whether `config` looks like the config of one of verl's applications."""
    parts = ("actor_rollout_ref", "ray_kwargs", "trainer")
    return all(look_up(config, part) is not None for part in parts)


def verl_release() -> str:
    """The installed release, for example 0.9.1; 0 if it is unknown."""
    return ".".join(map(str, version_of("verl") or (0,)))


def is_old_release() -> bool:
    """Whether the installed verl is older than the supported release."""
    return (version_of("verl") or (0,)) < SUPPORTED


def refuse_old_release() -> None:
    """Raise :class:`ConfigError` if the installed verl is older than the supported release."""
    if is_old_release():
        raise ConfigError(
            f"verl {verl_release()} loads no plug-ins and would train without skipping",
            "skip",
            "pip install 'verl>=0.9'; or, if a program of your own generates in "
            "its own process, name each function: skip.attach.ROLE=package.module:function",
        )
