"""Whether the composed config has what the chosen options of `skip` say."""

from __future__ import annotations

from rlskip.config.check import Problem
from rlskip.config.choices import chosen_options, overrides_of
from rlskip.config.settings import SkipSettings


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
    for option, _ in chosen_options(config, "skip"):
        role, _, action = option.rpartition("_")
        local = settings.roles.get(role)
        if local is None:
            problems.append(_overridden(settings, f"skip.{role}.enable", "false", option))
        elif action == "replay" and settings.start_engine:
            # With an engine, too, that is what the job asked for, if it says so.
            if not (settings.gives("on_miss", role) and local.on_miss == "generate"):
                problems.append(_overridden(settings, "skip.start_engine", "true", option))
        elif action == "repeat" and local.action != action:
            problems.append(_overridden(settings, f"skip.{role}.action", str(local.action), option))
    if not problems and not settings.roles:
        what = "no role is enabled"
        return [Problem("skip", what, "choose an option, e.g. +skip=rollout_cache")]
    return problems


def _overridden(settings: SkipSettings, key: str, value: str, option: str) -> Problem:
    """`option` sets `key`, and something after it in the composition sets it to `value`."""
    typed = [
        o
        for o in overrides_of(settings.facts.config)
        if o.lstrip("+").startswith(f"{key}=")
        or (o.startswith("~") and f"{key}.".startswith(f"{o[1:].partition('=')[0]}."))
    ]
    if typed:
        what = f"{typed[-1]} overrides the option {option}"
        return Problem(key, what, f"remove {typed[-1]}, or the option")
    what = f"it is {value}, although the option {option} was chosen: a later entry sets it"
    remedy = (
        f"in the defaults list, put `- skip: {option}` after that entry, which is `_self_` in "
        "verl's ppo_trainer.yaml; or put it into a config that includes this one"
    )
    return Problem(key, what, remedy)
