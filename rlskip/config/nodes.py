"""rlskip's nodes in a job's config: what chose them, whether they are in place, their values."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlskip.config import check
from rlskip.config.dump_dir import DEFAULT_DUMP_DIR, hydra_config, parse_directory
from rlskip.config.facts import of_host
from rlskip.config.other_nodes import RecordConfig
from rlskip.errors import ConfigError, NotInstalledError, RlskipError
from rlskip_conf import SCHEMAS, options

log = logging.getLogger(__name__)

T = TypeVar("T")


def add_callback(config: Any) -> str:
    """What to type for rlskip's callback; one of the application's own, which it chose, stays."""
    own = (OmegaConf.select(config, "hydra.runtime.choices") or {}).get("hydra/callbacks")
    name = "rlskip" if own in (None, "null", "rlskip") else f"[{own},rlskip]"
    return f"add hydra/callbacks={name}"


def overrides_of(config: Any, kind: str = "task") -> list[str]:
    """The overrides of a job, as they were typed: resolved in the list, each has another place."""
    given: Any = OmegaConf.select(config, f"hydra.overrides.{kind}") or []
    plain: Any = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    return list(plain)


def chosen_options(config: Any, group: str) -> list[tuple[str, str]]:
    """Those of rlskip's own options of a group that a job chose, and the package of their node."""
    ours = options(group)
    choices = OmegaConf.select(config, "hydra.runtime.choices") or {}
    chosen = [(str(choices[key]), key) for key in choices if key.partition("@")[0] == group]
    if not any(option in ours for option, _ in chosen):
        # Hydra records no list of options there.
        for override in overrides_of(config):
            if listed := re.fullmatch(rf"\+?({group}(?:@\w+)?)=(\[.*)", override):
                chosen = [(option, listed[1]) for option in re.findall(r"\w+", listed[2])]
    return [(option, key.partition("@")[2]) for option, key in chosen if option in ours]


def dropped_callback(config: Any) -> str | None:
    """What to add to a sweep's command of which Hydra dropped rlskip's callback; else None."""
    # The job's config has the callback, and the one from which Hydra built callbacks had not.
    composed = "rlskip" in (OmegaConf.select(config, "hydra.callbacks") or {})
    if composed and str(OmegaConf.select(config, "hydra.mode")) == "RunMode.MULTIRUN":
        why = "Hydra drops the callback of an option that is swept, or that a swept choice makes"
        return f"{add_callback(config)} ({why})"
    return None


def refuse_displaced(name: str, config: Any) -> None:
    """Raise if what a job chose for node `name` is at another key, not alone, or out of order."""
    is_config = OmegaConf.is_dict(config)
    job = config if is_config and "hydra" in config else hydra_config()
    if job is None:
        return
    roles: dict[str, str] = {}
    chosen = chosen_options(job, name)
    for option, package in chosen:
        if package not in ("", "_global_"):
            what = f"it puts the node below `{package}`, where it is not read"
            raise ConfigError(what, f"{name}@{package}", f"choose it with +{name}={option}")
        other = roles.setdefault(option.rpartition("_")[0], option)
        if other != option and name == "skip":
            what = f"{other} and {option} are options of one role"
            raise ConfigError(what, name, f"choose one of them: +{name}={other}")
    there = is_config and name in config  # a struct refuses what is not there
    typed = there and (
        dataclasses.is_dataclass(OmegaConf.get_type(config, name))
        or not dataclasses.is_dataclass(OmegaConf.get_type(job, "hydra"))  # as doctor reads it
    )
    before: dict[str, str] = {}
    for path, values in _composed_of(job, every=typed) if chosen or typed else ():
        own = values.get(name)  # what a mapping of rlskip's replaced
        if chosen and own is not None and not re.match(r"\{\}|\$\{|\?\?\?", str(own)):
            what = f"the application's own key `{name}` ({own!r}) is in the place of rlskip's node "
            what += f"`{name}`, which the option {chosen[-1][0]} sets"
            raise ConfigError(what, name, "rename the application's key")
        # Hydra merges the entries in their order, so the schema's defaults win in silence.
        if path == f"{SCHEMAS}/{name}" and before:
            lost = ", ".join(f"{key} (in {where})" for key, where in before.items())
            what = f"{path} comes too late in the defaults list: its defaults replace {lost}"
            raise ConfigError(what, name, f"put {path} first in the defaults list, before `_self_`")
        before |= {key: path for key in values if key.startswith(f"{name}.")}


def _composed_of(job: Any, every: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path of each config that a job was composed of, or of the primary one, and its keys."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import RunMode

    # Not with GlobalHydra's loader, which is gone where a config was composed by hand (doctor).
    Plugins.instance()  # finds the classes of the sources
    search_path = ConfigSearchPathImpl()
    for one in OmegaConf.select(job, "hydra.runtime.config_sources") or ():
        search_path.append(one.provider, f"{one.schema}://{one.path}")
    loader = ConfigLoaderImpl(search_path)
    config_name = OmegaConf.select(job, "hydra.job.config_name")
    places = [(config_name, "")]
    if every:  # which takes its time for a large application
        given = [*overrides_of(job, "hydra"), *overrides_of(job)]
        with suppress(HydraException):  # doctor lacks the application's dataclasses
            listed = loader.compute_defaults_list(config_name, given, RunMode.RUN).defaults
            places = [(one.config_path, one.package or "") for one in listed]
    for path, package in places:
        sources = (one for one in loader.get_sources() if path and one.is_config(path))
        source = next(sources, None)
        if source is not None and not path.startswith("hydra/"):
            yield path, dict(check.leaves(source.load_config(path).config, package, resolve=False))


def find_node(config: Any, name: str, schema: type | None = None) -> dict[str, Any] | None:
    """The top-level node `name` as a plain mapping with interpolations resolved; None without.

    `config` is a full one (a DictConfig, a mapping or a dataclass), or the node as a `schema`.
    """
    if config is not None and not check.is_node(config):
        what = f"expected a config with an entry {name!r}, got {config!r}"
        raise ConfigError(what, name, "give a DictConfig, a mapping or a dataclass")
    node = config
    if schema is None or not isinstance(config, schema):
        refuse_displaced(name, config)
        node = check.look_up(check.readable(config), name)
    if check.is_node(node) and not isinstance(node, Mapping):  # whose types are judged one by one
        node = dataclasses.asdict(node)
    try:
        if OmegaConf.is_config(node):
            plain: Any = OmegaConf.to_container(node, resolve=True)
        else:  # no part of a config: there is nothing that it could refer to
            made: Any = OmegaConf.create({name: node}, flags={"allow_objects": True})
            plain = OmegaConf.to_container(made)[name]  # type: ignore[index,call-overload]
    except OmegaConfBaseException as error:
        where = str(error.full_key)  # in a config of its own, the node is not in its keys
        where = where if where.startswith(name) else f"{name}.{where}"
        raise ConfigError(str(error).splitlines()[0], where, f"set {where}=...") from error
    for key, text in check.leaves(plain, name):
        check.refuse_own_resolver(text, key)
    if isinstance(plain, str) and OmegaConf.is_config(config):
        what = f"{plain!r} arrived as a plain string, so Hydra did not discover rlskip's plug-in"
        remedy = "install rlskip into the environment that runs this application and check with "
        remedy += "`python <app> --info plugins` (look for RlskipSearchPathPlugin)"
        if plain not in (known := sorted(options(name))):
            what, remedy = f"rlskip has no option {plain!r}", f"choose one: {', '.join(known)}"
        raise NotInstalledError(what, name, remedy + check.if_own(name))
    if plain is not None and not isinstance(plain, dict):
        what = f"expected a mapping, got {plain!r}"
        raise ConfigError(what, name, check.if_own(name).removeprefix("; "))
    return None if plain is None else {str(key): part for key, part in plain.items()}


def read_node(schema: type[T], config: Any) -> T:
    """The node `dispatch` of a config as its dataclass DispatchConfig, and so on.

    Keys that are null take the host's values. ConfigError names *every* problem by its full key.
    """
    name, problems = schema.__name__.removesuffix("Config").lower(), list[check.Problem]()
    node = find_node(config, name, schema) or {}
    null = [f.name for f in dataclasses.fields(schema) if node.get(f.name) is None]  # type: ignore[arg-type]
    settings = check.read(schema, node, name, problems, of_host=of_host(config, null))
    check.raise_all(problems)
    return settings


def read_record(config: Any) -> RecordConfig:
    """The `record` node of a config; if it is on, ``dump_dir`` is an absolute path."""
    settings = read_node(RecordConfig, config)
    if settings.enable and settings.dump_dir is None:
        dumps = check.look_up(config, "skip.dump_dir") or DEFAULT_DUMP_DIR
        settings.dump_dir = parse_directory(str(dumps), "skip.dump_dir")
    return settings


def read_record_of(config: Any) -> RecordConfig | None:
    """As :func:`read_record`; None without such a node, or where it is the application's own."""
    try:
        return None if find_node(config, "record") is None else read_record(config)
    except RlskipError as error:
        if not isinstance(config, DictConfig):  # which an application has
            raise
        log.warning("rlskip: `record` is taken for the application's own key: %s", error)
        return None


def record_chosen_by(config: Any, *, enabled: bool = False) -> str | None:
    """The option or key by which a job's node `record` is rlskip's, and `enabled`; else None."""
    # In Hydra's runtime config, the parent of `hydra` is the job's config.
    node = OmegaConf.select(config["hydra"], "..record", throw_on_resolution_failure=False)
    if enabled and check.look_up(node, "enable") is not True:
        return None
    if chosen := chosen_options(config, "record"):
        return f"record: {chosen[0][0]}"
    known = vars(RecordConfig())  # one with another key is the application's own
    return "record.enable: true" if OmegaConf.is_dict(node) and {*node} <= {*known} else None
