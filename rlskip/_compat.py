"""The only place for version switches: what Hydra 1.4 and OmegaConf 2.4 do differently."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


def store_config(group: str, name: str, node: Any, provider: str) -> None:
    """Put `node` into Hydra's ConfigStore, in place of one that is there already.

    Hydra 1.3 always replaces; 1.4 needs ``replace=True``.
    """
    more: dict[str, Any] = {"replace": True} if _takes_replace(ConfigStore.store) else {}
    ConfigStore.instance().store(group=group, name=name, node=node, provider=provider, **more)


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver, in place of one of that name.

    OmegaConf 2.4 deprecates ``register_new_resolver`` in favour of ``register_resolver``, which
    is an older function before 2.4.
    """
    new = OmegaConf.register_resolver
    register: Any = new if _takes_replace(new) else OmegaConf.register_new_resolver
    register(name, resolver, replace=True)


def after_compose(note: Callable[[Any], None]) -> None:
    """Call ``note(config)`` with each whole config that ``hydra.compose`` makes from now on.

    Hydra has no public hook for that; without the private method nothing is noted.
    """
    hydra = sys.modules.get("hydra._internal.hydra")  # imported before any plug-in
    compose_config = getattr(getattr(hydra, "Hydra", None), "compose_config", None)
    if compose_config is None or hasattr(compose_config, "__wrapped__"):
        return

    @functools.wraps(compose_config)
    def noting(*args: Any, from_shell: bool = True, **kwargs: Any) -> Any:
        config = compose_config(*args, from_shell=from_shell, **kwargs)
        if not from_shell:  # hydra.main composes what comes from the shell
            note(config)
        return config

    hydra.Hydra.compose_config = noting  # type: ignore[union-attr]


def version_of(package: str) -> tuple[int, ...] | None:
    """The leading numbers of a package's version, (0, 9, 1); None without it.

    An imported package states its own: a source tree on the path has no metadata.
    """
    # Every Hydra application loads this module at its start, and metadata takes milliseconds.
    from importlib import metadata

    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        version = str(version or metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else None


def _takes_replace(function: Callable[..., Any]) -> bool:
    return "replace" in inspect.signature(function).parameters
