"""The only place for version switches: Hydra 1.4, OmegaConf 2.4, Python 3.14.

This module imports nothing heavy: the start of every process of verl loads it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any


def store_config(group: str, name: str, node: Any, provider: str) -> None:
    """Put `node` into Hydra's ConfigStore, in place of one that is there already.

    Hydra 1.3 always replaces; 1.4 needs ``replace=True``.
    """
    from hydra.core.config_store import ConfigStore

    more: dict[str, Any] = {"replace": True} if _takes_replace(ConfigStore.store) else {}
    ConfigStore.instance().store(group=group, name=name, node=node, provider=provider, **more)


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver, in place of one of that name.

    OmegaConf 2.4 deprecates ``register_new_resolver`` in favour of ``register_resolver``, which
    is an older function before 2.4.
    """
    from omegaconf import OmegaConf

    new = OmegaConf.register_resolver
    register: Any = new if _takes_replace(new) else OmegaConf.register_new_resolver
    register(name, resolver, replace=True)


def gets_self(function: Any) -> bool:
    """Whether `function`, as a class's attribute, is called with self.

    A partial is from Python 3.14 on; 3.13 warns of that, and has the method for it already.
    """
    if isinstance(function, functools.partial):
        return sys.version_info >= (3, 14) and not isinstance(function, WithoutSelf)
    return hasattr(type(function), "__get__")


class WithoutSelf(functools.partial[Any]):
    """A partial that, as a class's attribute, is called without self by any Python."""

    def __get__(self, instance: Any, owner: Any = None) -> WithoutSelf:
        return self


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


def spare_own_keys(provider: str) -> None:
    """Let an override set an application's own key that is called like a group of `provider`.

    Hydra takes every ``name=value`` for the choice of an option if the search path has a group
    `name`, so the group would keep it from the key. Where no other source has the group, and the
    value cannot be an option's name or no defaults list has an entry to override, the override is
    one of a key. Without Hydra's private class nothing is changed.
    """
    module: Any = sys.modules.get("hydra._internal.defaults_list")
    base: Any = getattr(module, "Overrides", None)
    if base is None or base.__module__ == __name__:
        return

    class Overrides(base):  # type: ignore[misc]
        def __init__(self, repo: Any, overrides_list: list[Any]) -> None:
            self._repo, self._given = repo, overrides_list
            self._ours = [
                override
                for override in overrides_list
                if "." not in override.key_or_group and override.package is None
                if not override.is_sweep_override()
                if _sources(repo, override.key_or_group) == {provider}
            ]
            values = [o for o in self._ours if not _may_choose(o)]
            super().__init__(repo, [o for o in overrides_list if o not in values])
            self._take_for_values(values)

        def ensure_overrides_used(self) -> None:
            for choices in (self.override_metadata, self.deletions):
                unused = {key for key, choice in choices.items() if not choice.used}
                for override in self._ours:
                    key = override.get_key_element().lstrip("~")
                    if key in unused and not self._is_option(override):
                        choices.pop(key, None)
                        self._take_for_values([override])
            super().ensure_overrides_used()

        def _is_option(self, override: Any) -> bool:
            return override.value() in self._repo.get_group_options(override.key_or_group)

        def _take_for_values(self, overrides: list[Any]) -> None:
            self.config_overrides += overrides
            self.config_overrides.sort(key=self._given.index)

    module.Overrides = Overrides


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


def _sources(repo: Any, group: str) -> set[str]:
    return {source.provider for source in repo.get_sources() if source.is_group(group)}


def _may_choose(override: Any) -> bool:
    """Whether the value of an override may be the name of options, or none where it deletes."""
    value = override.value()
    names = value if isinstance(value, list) else [value]
    return override.is_delete() or all(isinstance(name, str) for name in names)


def _takes_replace(function: Callable[..., Any]) -> bool:
    return "replace" in inspect.signature(function).parameters
