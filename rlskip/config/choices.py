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

ADD_CALLBACK = "add hydra/callbacks=rlskip"


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


def dropped_callback(config: Any) -> str | None:
    """What to add to a sweep's command of which Hydra dropped rlskip's callback; else None."""
    # The job's config has the callback, and the one from which Hydra built callbacks had not.
    composed = "rlskip" in (OmegaConf.select(config, "hydra.callbacks") or {})
    if composed and str(OmegaConf.select(config, "hydra.mode")) == "RunMode.MULTIRUN":
        why = "Hydra drops the callback of an option that is swept, or that a swept choice makes"
        return f"{ADD_CALLBACK} ({why})"
    return None


def refuse_displaced(name: str, config: Any) -> None:
    """Raise if what a job chose for node `name` is not at key `name`, not alone, or not in order.

    `config` is a job's with its node `hydra`; if it is another, the job is that of this process.

    Raises
    ------
    ConfigError
        The option's node was put below another one, or it replaced a value of the application's; or
        two of the options are for one role; or the node's schema comes after what sets its keys.
    """
    there = OmegaConf.is_dict(config) and name in config  # a struct refuses what is not there
    typed = there and dataclasses.is_dataclass(OmegaConf.get_type(config, name))
    if not (OmegaConf.is_dict(config) and "hydra" in config):
        config = hydra_config()
    if config is None:
        return
    roles: dict[str, str] = {}
    option = ""
    for option, package in chosen_options(config, name):
        if package not in ("", "_global_"):
            what = f"it puts the node below `{package}`, where it is not read"
            raise ConfigError(what, f"{name}@{package}", f"choose it with +{name}={option}")
        other = roles.setdefault(option.rpartition("_")[0], option)
        if other != option and name == "skip":
            what = f"{other} and {option} are options of one role"
            raise ConfigError(what, name, f"choose one of them: +{name}={other}")
    if not (option or typed):
        return
    before: dict[str, str] = {}
    for path, values in _entries(config, every=typed):
        own = values.get(name)  # what a mapping of rlskip's replaced
        if option and own is not None and not re.match(r"\{\}|\$\{|\?\?\?", str(own)):
            what = f"the application's own key `{name}` ({own!r}) is in the place of rlskip's node "
            what += f"`{name}`, which the option {option} sets"
            raise ConfigError(what, name, "rename the application's key")
        # Hydra merges the entries in their order, so the schema's defaults win in silence.
        if path == f"{SCHEMAS}/{name}" and before:
            lost = ", ".join(f"{key} (in {where})" for key, where in before.items())
            what = f"{path} comes too late in the defaults list: its defaults replace {lost}"
            raise ConfigError(what, name, f"put {path} first in the defaults list, before `_self_`")
        before |= {key: path for key in values if key.startswith(f"{name}.")}


def _entries(config: Any, every: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a job was composed of, in that order: the path of each config, and its full keys.

    Without `every` the primary config alone: to load all of a large application takes its time.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    if not GlobalHydra.instance().is_initialized():
        return
    loader = GlobalHydra.instance().config_loader()
    config_name = OmegaConf.select(config, "hydra.job.config_name")
    places = [(config_name, "")]
    if every:
        given = [*overrides_of(config, "hydra"), *overrides_of(config)]
        listed = loader.compute_defaults_list(config_name, given, RunMode.RUN).defaults
        places = [(one.config_path, one.package or "") for one in listed]
    for path, package in places:
        sources = (one for one in loader.get_sources() if path and one.is_config(path))
        source = next(sources, None)
        if source is not None and not path.startswith("hydra/"):
            yield path, dict(leaves(source.load_config(path).config, package, resolve=False))
