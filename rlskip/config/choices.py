"""Which options of `skip` a Hydra job chose, and whether the composed config still has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from rlskip.config.check import Problem, look_up
from rlskip.config.settings import SkipSettings
from rlskip.config.skip import ACTIONS, BUILT_IN_ROLES
from rlskip.errors import ConfigError

log = logging.getLogger(__name__)

_OF_SKIP = re.compile(r"[+~]*skip(?=[.@=]|$)")


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
    problems = []
    for option, role, action in _chosen(settings.config):
        local = settings.roles.get(role)
        if local is None:
            problems.append(_overridden(settings.config, f"skip.{role}.enable", "false", option))
        elif action == "replay" and settings.start_engine:
            problems.append(_overridden(settings.config, "skip.start_engine", "true", option))
        elif action == "repeat" and local.action != action:
            problems.append(_overridden(settings.config, f"skip.{role}.action", "cache", option))
    if not problems and not settings.roles:
        what = "no role is enabled"
        return [Problem("skip", what, "choose an option, e.g. +skip=rollout_cache")]
    return problems


def refuse_replaced_node(config: Any) -> None:
    """Raise if an option replaced an application's own `skip`, which was not a mapping.

    The merged config does not show it any more, so the application is composed again without the
    option. Call it in a process that runs Hydra's main.

    Raises
    ------
    ConfigError
        Names the value that the option replaced.
    """
    options = _options(config)
    if not options:
        return
    own = _compose_without_skip(config)
    if own is None or own == "???" or hasattr(own, "keys"):
        return
    raise ConfigError(
        f"the application has its own key `skip` ({own!r}), and the option "
        f"{', '.join(options)} would replace it",
        "skip",
        "rename the application's key: `skip` is the node of rlskip's keys",
    )


def _compose_without_skip(config: Any) -> Any:
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not GlobalHydra.instance().is_initialized():
        return None
    overrides = [*config.hydra.overrides.hydra, *config.hydra.overrides.task]
    kept = [override for override in overrides if not _OF_SKIP.match(override)]
    if not any(override.startswith("+skip=") for override in overrides):
        kept.append("~skip")  # an entry of the defaults list chose the option
    try:
        parsed = OverridesParser.create().parse_overrides(kept)
        single = [o.input_line for o in parsed if o.input_line and not o.is_sweep_override()]
        return look_up(compose(config.hydra.job.config_name, single), "skip")
    except Exception as error:  # the application itself composes, so nothing is wrong with it
        log.debug("rlskip: the application does not compose without the option: %s", error)
        return None


def _options(config: Any) -> list[str]:
    """The chosen options of the group `skip`."""
    choice = (look_up(config, "hydra.runtime.choices") or {}).get("skip")
    if choice is not None:
        return [str(choice)]
    # Hydra records no list of options there.
    given = look_up(config, "hydra.overrides.task") or []
    lists = [override for override in given if re.match(r"\+?skip=\[", override)]
    return re.findall(r"\w+", lists[-1].partition("=")[2]) if lists else []


def _chosen(config: Any) -> Iterator[tuple[str, str, str]]:
    """Each chosen option that rlskip ships, with its role and action."""
    for option in _options(config):
        role, _, action = option.rpartition("_")
        if role in BUILT_IN_ROLES and action in (*ACTIONS, "replay"):
            yield option, role, action


def _overridden(config: Any, key: str, value: str, option: str) -> Problem:
    """`option` sets `key`, and something after it in the composition sets it to `value`."""
    given = look_up(config, "hydra.overrides.task") or []
    typed = [o for o in given if o.lstrip("+").startswith(f"{key}=")]
    if typed:
        what = f"{typed[-1]} overrides the option {option}"
        return Problem(key, what, f"remove {typed[-1]}, or the option")
    what = f"it is {value}, although the option {option} was chosen: a later entry sets it"
    remedy = (
        f"in the defaults list, put `- skip: {option}` after that entry, which is `_self_` in "
        "verl's ppo_trainer.yaml; or put it into a config that includes this one"
    )
    return Problem(key, what, remedy)
