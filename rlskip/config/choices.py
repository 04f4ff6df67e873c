"""Which options a Hydra job chose, and whether their nodes are where rlskip reads them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from rlskip.config.check import leaves
from rlskip.config.register import SCHEMAS, hydra_config, options
from rlskip.errors import ConfigError


def overrides_of(config: Any, kind: str = "task") -> list[str]:
    """The overrides of a Hydra job, as they were typed.

    Iterating over the list would resolve each one's interpolations, which have another place there.
    """
    given = OmegaConf.select(config, f"hydra.overrides.{kind}") or []
    if OmegaConf.is_config(given):
        given = OmegaConf.to_container(given, resolve=False)
    return list(given)


def chosen_options(config: Any, group: str) -> list[tuple[str, str]]:
    """Those of rlskip's options of a group that a job chose, each with the package of its node.

    An application may have a group of that name, and options of its own in it.
    """
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    found = [
        (str(option), package)
        for name, _, package in (key.partition("@") for key in choices)
        if name == group
        if (option := choices[f"{name}@{package}" if package else name]) in options(group)
    ]
    if found:
        return found
    # Hydra records no list of options there.
    listing = re.compile(rf"\+?{group}(?:@(\w+))?=(\[.*)")
    lists = [listed for one in overrides_of(config) if (listed := listing.fullmatch(one))]
    return [
        (option, listed[1] or "")
        for listed in lists[-1:]
        for option in re.findall(r"\w+", listed[2])
        if option in options(group)  # else the list is the value of an application's own key
    ]


def with_callback(config: Any) -> str:
    """The override that adds rlskip's callback to the job's chosen ones, quoted for a shell."""
    chosen = OmegaConf.select(config, "hydra.runtime.choices.hydra/callbacks") or ""
    lists = [o for o in overrides_of(config, "hydra") if o.startswith("hydra/callbacks=[")]
    names = [str(chosen), *(re.findall(r"\w+", lists[-1].partition("=")[2]) if lists else [])]
    others = ",".join(name for name in names if name not in ("", "rlskip"))
    return f"'hydra/callbacks=[{others},rlskip]'" if others else "hydra/callbacks=rlskip"


def dropped_callback(config: Any) -> str | None:
    """What to add to a sweep's command of which Hydra dropped rlskip's callback; else None."""
    # The job's config has the callback, and the one from which Hydra built callbacks had not.
    composed = "rlskip" in (OmegaConf.select(config, "hydra.callbacks") or {})
    if composed and str(OmegaConf.select(config, "hydra.mode")) == "RunMode.MULTIRUN":
        why = "Hydra drops the callback of an option that is swept, or that a swept choice makes"
        return f"add {with_callback(config)} ({why})"
    return None


def is_typed(config: Any, name: str) -> bool:
    """Whether a composed config has a node from its schema, or from a typed host's."""
    there = OmegaConf.is_dict(config) and name in config  # a struct refuses what is not there
    return there and dataclasses.is_dataclass(OmegaConf.get_type(config, name))


def refuse_displaced(name: str, config: Any) -> None:
    """Raise if what a job chose for node `name` is not at key `name`, not alone, or not in order.

    `config` is a job's with its node `hydra`; if it is another, the job is that of this process.

    Raises
    ------
    ConfigError
        The option's node was put below another one, or it replaced a value of the application's; or
        two of the options are for one role; or the defaults of the node's schema replaced values.
    """
    typed = is_typed(config, name)
    if not (OmegaConf.is_dict(config) and "hydra" in config):
        config = hydra_config()
    if config is None:
        return
    if typed:
        _refuse_late_schema(name, config)
    roles: dict[str, str] = {}
    for option, package in chosen_options(config, name):
        other = roles.setdefault(option.rpartition("_")[0], option)
        if other != option and name == "skip":
            what = f"{other} and {option} are options of one role"
            raise ConfigError(what, name, f"choose one of them: +{name}={other}")
        if package not in ("", "_global_"):
            what = f"it puts the node below `{package}`, where it is not read"
            raise ConfigError(what, f"{name}@{package}", f"choose it with +{name}={option}")
        own = _own_value(OmegaConf.select(config, "hydra.job.config_name"), name)
        if own is not None:
            what = f"the application's own key `{name}` ({own!r}) is in the place of rlskip's node "
            what += f"`{name}`, which the option {option} sets"
            raise ConfigError(what, name, "rename the application's key")


def _refuse_late_schema(name: str, config: Any) -> None:
    """Raise if the defaults list of a job has the schema of node `name` after what sets its keys.

    Hydra merges the entries in their order, so the schema's defaults would win in silence.
    """
    schema, before = f"{SCHEMAS}/{name}", dict[str, tuple[Any, str]]()
    for path, content in _entries(config):
        values = {k: v for k, v in content.items() if k.startswith(f"{name}.") and v != "???"}
        if path == schema and (
            lost := [
                f"{key} ({value!r} in {where})"
                for key, (value, where) in before.items()
                if value is not None and values.get(key, value) != value
            ]
        ):
            what = f"{schema} comes too late in the defaults list: its defaults replace "
            remedy = f"put {schema} first in the defaults list, before `_self_`"
            raise ConfigError(what + ", ".join(lost), name, remedy)
        before |= {key: (value, path) for key, value in values.items()}


def _entries(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a job was composed of, in that order: the path of each config, and its full keys."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    if not GlobalHydra.instance().is_initialized():
        return
    given = [*overrides_of(config, "hydra"), *overrides_of(config)]
    config_name = OmegaConf.select(config, "hydra.job.config_name")
    loader = GlobalHydra.instance().config_loader()
    for entry in loader.compute_defaults_list(config_name, given, RunMode.RUN).defaults:
        path = entry.config_path or ""
        if not path.startswith("hydra/"):
            yield path, dict(leaves(_load(path), entry.package or "", resolve=False))


def _load(path: str) -> dict[str, Any]:
    """What a config on the job's search path holds by itself; empty where it is not there."""
    from hydra.core.global_hydra import GlobalHydra

    hydra = GlobalHydra.instance()
    sources = hydra.config_loader().get_sources() if path and hydra.is_initialized() else ()
    for source in sources:
        if source.is_config(path):
            loaded: Any = OmegaConf.to_container(source.load_config(path).config, resolve=False)
            return dict(loaded)
    return {}


def _own_value(config_name: str | None, key: str) -> Any:
    """What the primary config has at a top-level key; None for a mapping, such as rlskip's node.

    A composed config does not show another value: the option's mapping replaced it.
    """
    value = _load(config_name or "").get(key)
    unknown = isinstance(value, dict) or re.match(r"\$\{|\?\?\?", str(value))
    return None if unknown else value
