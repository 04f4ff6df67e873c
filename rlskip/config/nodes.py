"""The node of a job's config, whatever the form of the config, as a mapping or a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlskip.config.check import (
    NOTHING,
    OfHost,
    Problem,
    calls_own_resolver,
    entry,
    if_own,
    is_node,
    leaves,
    raise_all,
    read,
    readable,
)
from rlskip.config.choices import refuse_displaced
from rlskip.errors import ConfigError, NotInstalledError

T = TypeVar("T")


def find_node(config: Any, name: str, schema: type | None = None) -> dict[str, Any] | None:
    """The node `name` of a config, as a plain mapping with interpolations resolved; None without.

    Parameters
    ----------
    config
        A full config (a DictConfig, a mapping, or an instance of a dataclass), an instance of
        `schema`, which is the node itself, or None.
    name
        A top-level key.
    schema
        The node's dataclass.

    Raises
    ------
    NotInstalledError
        The node is a plain string: Hydra knew no group of that name.
    ConfigError
        The config or the node is not a mapping, an interpolation does not resolve, or only by the
        application's own resolver, or the job chose an option whose node is not here, or not alone.
    """
    if config is not None and not is_node(config):
        raise ConfigError(
            f"expected a config with an entry {name!r}, got {config!r}",
            name,
            "give a DictConfig, a mapping or a dataclass",
        )
    try:
        node = config
        if schema is None or not isinstance(config, schema):
            refuse_displaced(name, config)
            node = entry(readable(config), name)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], error.full_key or name) from error
    node = _plain(node, name)
    if isinstance(node, str):
        raise NotInstalledError(
            f"{node!r} arrived as a plain string, so Hydra did not discover rlskip's plug-in",
            name,
            "install rlskip into the environment that runs this application and check with "
            "`python <app> --info plugins` (look for RlskipSearchPathPlugin)" + if_own(name),
        )
    if node is None or isinstance(node, dict):
        return node
    raise ConfigError(f"expected a mapping, got {node!r}", name, if_own(name).removeprefix("; "))


def read_node(
    schema: type[T],
    name: str,
    config: Any,
    contradictions: Callable[[T], Iterable[Problem]] = lambda _: (),
    *,
    of_host: OfHost = NOTHING,
) -> T:
    """The node `name` of a config as its dataclass; the defaults when the config has none.

    The config is as for :func:`find_node`; what this function returned reads as itself. Of what was
    read, `contradictions` returns what is wrong with it as a whole. Raises one ConfigError that
    names *every* problem by its full key.
    """
    problems: list[Problem] = []
    node = find_node(config, name, schema) or {}
    settings = read(schema, node, name, problems, of_host=of_host)
    raise_all([*problems, *contradictions(settings)])
    return settings


def _plain(value: Any, name: str) -> Any:
    """The node `name` with all configs, mappings and dataclasses in it as plain containers."""
    try:
        if OmegaConf.is_config(value):
            plain: Any = OmegaConf.to_container(value, resolve=True)
        else:  # no part of a config: there is nothing that it could refer to
            made: Any = OmegaConf.create({name: value}, flags={"allow_objects": True})
            plain = OmegaConf.to_container(made)
            plain = plain[name]
    except OmegaConfBaseException as error:  # of its own, a part knows no full key
        key = error.full_key or ""
        where = key if key.startswith(name) else name
        raise ConfigError(str(error).splitlines()[0], where) from error
    for key, text in leaves(plain, name):
        if calls_own_resolver(str(text)):
            what = f"{text!r} needs a resolver of the application's own, which rlskip does not call"
            raise ConfigError(what, key, f"give the value: {key}=...")
    return {str(key): part for key, part in plain.items()} if isinstance(plain, dict) else plain
