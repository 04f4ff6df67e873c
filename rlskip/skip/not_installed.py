"""What a decorated function meets before `SkipManager.init`, or after one that failed.

A job that chose an option of `skip` must not run without it. No code acts on the option when
Hydra's callback was lost (a swept option, ``~hydra.callbacks.rlskip``) or when Hydra did not
discover the plug-in; nor under the compose API, which runs no callbacks.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rlskip._nodes import ABOVE
from rlskip.config.check import look_up
from rlskip.config.option_checks import overrides_of
from rlskip.errors import NotInstalledError

log = logging.getLogger(__name__)

Guard = Callable[[str], None]
"""Called with the role of a decorated function whose role is off."""


def before_init() -> Guard:
    """A check that raises where Hydra's present job chose an option of `skip`.

    It warns where only the compose API did: what is composed need not be run.
    """
    seen: Any = None

    def check(role: str) -> None:
        nonlocal seen
        config = _hydra_config()
        if config is None:
            plug_in = sys.modules.get("rlskip._hydra")
            composed = None if plug_in is None else plug_in.composed
            if composed is not seen and (chosen := chosen_by(composed)):
                log.warning(
                    "rlskip: NOTHING is skipped or cached: %s was chosen, and Hydra's compose API "
                    "runs no callback; call SkipManager.init(cfg) before role %s",
                    chosen, role,
                )  # fmt: skip
            seen = composed
            return
        if config is seen:
            return
        if chosen := chosen_by(config):
            raise NotInstalledError(
                f"{chosen} was chosen for this job, but no SkipManager was installed",
                "skip",
                _remedy(config, chosen),
            )
        seen = config

    return check


def refusing(reason: str) -> Guard:
    """A check that always raises: the start failed."""

    def check(role: str) -> NoReturn:
        raise NotInstalledError(reason, "skip", "correct the config, then start the job again")

    return check


def _remedy(config: Any, chosen: str) -> str:
    """What to type, by what is missing in the command."""
    hydra = config.hydra
    removed = [o for o in overrides_of(config, "hydra") if o.startswith("~hydra.callbacks")]
    if removed:
        return f"remove {removed[0]}, or call SkipManager.init(cfg) first"
    if re.match(r"\+?skip(@\w+)?=", chosen) and str(hydra.mode) == "RunMode.MULTIRUN":
        return (
            "when sweeping the option itself, add hydra/callbacks=rlskip (Hydra drops the option's "
            "own callback there); with it, skip.KEY=VALUE needs no `+`"
        )
    if re.match(r"\+*(rlskip\.)?skip\.", chosen):
        return (
            "choose an option instead of single keys, e.g. +skip=rollout_cache, which adds "
            "rlskip's callback; or add hydra/callbacks=rlskip, or call SkipManager.init(cfg) first"
        )
    return (
        "call SkipManager.init(cfg) first; or, if Hydra does not list RlskipSearchPathPlugin "
        "under `--info plugins`, reinstall rlskip here"
    )


def _hydra_config() -> Any:
    """Hydra's runtime config of the present job; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    return None if module is None else module.HydraConfig.instance().cfg


def chosen_by(hydra_config: Any) -> str | None:
    """The override or choice through which a job asked for skip."""
    if hydra_config is None:
        return None
    choices = look_up(hydra_config, "hydra.runtime.choices") or {}
    for override in overrides_of(hydra_config):
        key, _, value = override.lstrip("+").removeprefix(f"{ABOVE}.").partition("=")
        asks = value.lower() not in ("false", "null", "none")
        if asks and re.split("[.@]", key, maxsplit=1)[0] == "skip":
            return str(override)
    for group, option in choices.items():
        if group.split("@")[0] == "skip" and option is not None:
            return f"skip: {option}"
    return None
