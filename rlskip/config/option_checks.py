"""Which options a Hydra job chose, and whether the composed config has what they say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from rlskip._nodes import ABOVE, as_typed
from rlskip.config.check import Problem, look_up
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import ACTIONS, BUILT_IN_ROLES
from rlskip.errors import ConfigError

log = logging.getLogger(__name__)


def lost_choices(settings: SkipSettings) -> list[Problem]:
    """What the job asked for and will not get: chosen options that a later value overrides.

    If no role is on, there is at least one problem, which is the reason.

    Parameters
    ----------
    settings
        Those of a full config, with the node `hydra`.
    """
    node = settings.node
    if node is None:
        what = "the config has no such node"
        return [Problem("skip", what, "add +skip=rollout_cache to the command")]
    if node.get("enable") is False:
        return [Problem("skip.enable", "it is false, so every role is off", "set skip.enable=true")]
    problems, config = [], settings.facts.config
    for option, _ in _options(config, "skip"):
        if not is_shipped(option):
            continue
        role, _, action = option.rpartition("_")
        local = settings.roles.get(role)
        if local is None:
            problems.append(_overridden(settings, f"skip.{role}.enable", "false", option))
        elif action == "replay" and settings.start_engine and not _generates(settings, role):
            problems.append(_overridden(settings, "skip.start_engine", "true", option))
        elif action in ("repeat", "verify") and local.action != action:
            problems.append(_overridden(settings, f"skip.{role}.action", str(local.action), option))
    if not problems and not settings.roles:
        what = "no role is enabled"
        return [Problem("skip", what, "choose an option, e.g. +skip=rollout_cache")]
    return problems


def is_chosen(config: Any, group: str) -> bool:
    """Whether the job chose an option of a group."""
    return bool(_options(config, group))


def is_shipped(option: str) -> bool:
    """Whether an option of `skip` is one of rlskip's, and not the application's own."""
    role, _, action = option.rpartition("_")
    return role in BUILT_IN_ROLES and action in (*ACTIONS, "replay")


def overrides_of(config: Any, kind: str = "task") -> list[str]:
    """The overrides of a Hydra job, as they were typed.

    Iterating over the list would resolve each one's interpolations, which have another place there.
    """
    given: Any = look_up(config, f"hydra.overrides.{kind}") or []
    if OmegaConf.is_config(given):
        given = OmegaConf.to_container(given, resolve=False)
    return list(given)


def with_callback(config: Any) -> str:
    """The override that adds rlskip's callback to the job's chosen ones, quoted for a shell."""
    choices = look_up(config, "hydra.runtime.choices") or {}
    lists = [o for o in overrides_of(config, "hydra") if o.startswith("hydra/callbacks=[")]
    chosen = re.findall(r"\w+", lists[-1].partition("=")[2]) if lists else []
    chosen = [str(choices.get("hydra/callbacks") or ""), *chosen]
    others = ",".join(name for name in chosen if name not in ("", "rlskip"))
    return f"'hydra/callbacks=[{others},rlskip]'" if others else "hydra/callbacks=rlskip"


def refuse_replaced_keys(config: Any, groups: Iterable[str]) -> None:
    """Raise if an option of `groups` replaced a key of the application's own.

    The merged config does not show a value that was not a mapping any more, so the application is
    composed again without the option. Call it in a process that runs Hydra's main.

    Raises
    ------
    ConfigError
        Names the value that the option replaced, or a package that no node of rlskip is read from.
    """
    for group in groups:
        for option, package in _options(config, group):
            if package not in ("", ABOVE):
                raise ConfigError(
                    f"it puts the node below `{package}`, where it is not read",
                    f"{group}@{package}",
                    f"choose it with +{group}={option}; if the application has its own key "
                    f"`{group}`, with +{group}@{ABOVE}={option}",
                )
            own = _compose_without(config, f"{group}@{package}" if package else group)
            for key in (package, f"{package}.{group}") if package else (group,):
                value = look_up(own, key)
                if value is None or value == "???" or hasattr(value, "keys"):
                    continue
                remedy = f"choose it with +{group}@{ABOVE}={option}: then rlskip's keys are below "
                raise ConfigError(
                    f"the application has its own key `{key}` ({value!r}), and the option "
                    f"{option} would replace it",
                    key,
                    "rename the application's key" if package else f"{remedy}{ABOVE}.{group}",
                )


def _compose_without(config: Any, choice: str) -> Any:
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not GlobalHydra.instance().is_initialized():
        return None
    group, _, above = choice.partition("@")
    of_node = re.compile(rf"[+~]*({re.escape(choice)}=|{above + '.' if above else ''}{group}[.=])")
    overrides = [*overrides_of(config, "hydra"), *overrides_of(config)]
    kept = [override for override in overrides if not of_node.match(override)]
    if not any(override.startswith(f"+{choice}=") for override in overrides):
        kept.append(f"~{choice}")  # an entry of the defaults list chose the option
    try:
        parsed = OverridesParser.create().parse_overrides(kept)
        single = [o.input_line for o in parsed if o.input_line and not o.is_sweep_override()]
        return compose(config.hydra.job.config_name, single)
    except Exception as error:  # the application itself composes, so nothing is wrong with it
        log.debug("rlskip: the application does not compose without the option: %s", error)
        return None


def _options(config: Any, group: str) -> list[tuple[str, str]]:
    """The chosen options of a group, each with the package that its node was put below."""
    choices = look_up(config, "hydra.runtime.choices") or {}
    found = [
        (str(option), package)
        for name, _, package in (key.partition("@") for key in choices)
        if name == group and (option := choices[f"{name}@{package}" if package else name])
    ]
    if found:
        return found
    # Hydra records no list of options there.
    listing = re.compile(rf"\+?{group}(?:@(\w+))?=(\[.*)")
    lists = [listing.fullmatch(override) for override in overrides_of(config)]
    return [
        (option, package)
        for listed in [one for one in lists if one][-1:]
        for package in [listed[1] or ""]
        # A list there is the application's own key.
        if hasattr(look_up(config, f"{package}.{group}" if package else group), "keys")
        for option in re.findall(r"\w+", listed[2])
    ]


def _generates(settings: SkipSettings, role: str) -> bool:
    """Whether the user says so: with an engine, too, that is what the job asked for."""
    return settings.gives("on_miss", role) and settings.roles[role].on_miss == "generate"


def _overridden(settings: SkipSettings, key: str, value: str, option: str) -> Problem:
    """`option` sets `key`, and something after it in the composition sets it to `value`."""
    key = as_typed(key)
    typed = [o for o in overrides_of(settings.facts.config) if o.lstrip("+").startswith(f"{key}=")]
    if typed:
        what = f"{typed[-1]} overrides the option {option}"
        return Problem(key, what, f"remove {typed[-1]}, or the option")
    what = f"it is {value}, although the option {option} was chosen: a later entry sets it"
    remedy = (
        f"in the defaults list, put `- skip: {option}` after that entry, which is `_self_` in "
        "verl's ppo_trainer.yaml; or put it into a config that includes this one"
    )
    return Problem(key, what, remedy)
