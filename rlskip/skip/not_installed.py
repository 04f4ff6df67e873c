"""What a decorated function meets before `SkipManager.init`, or after one that failed.

A job that chose an option of `skip` must not run without it. No code acts on the option when
Hydra's callback was lost (a swept option, ``~hydra.callbacks.rlskip``) or when Hydra did not
discover the plug-in; nor under the compose API, which runs no callbacks.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from omegaconf import OmegaConf

from rlskip._nodes import ABOVE
from rlskip.config.check import look_up
from rlskip.config.option_checks import is_shipped, overrides_of, with_callback
from rlskip.config.settings import has_own_key
from rlskip.errors import NotInstalledError

log = logging.getLogger(__name__)

Guard = Callable[[str], None]
"""Called with the role of a decorated function whose role is off."""


def before_init() -> Guard:
    """A check that raises where Hydra's present job chose an option of `skip`.

    It warns where only the compose API did: what is composed need not be run.
    """
    seen: dict[str, Any] = {}

    def check(role: str) -> None:
        config = _hydra_config()
        if config is None:
            plug_in = sys.modules.get("rlskip._hydra")
            composed = None if plug_in is None else plug_in.composed
            if composed is not seen.get(role) and (chosen := chosen_by(composed, role)):
                log.warning(
                    "rlskip: NOTHING is skipped or cached: %s was chosen, and Hydra's compose API "
                    "runs no callback; call SkipManager.init(cfg) before role %s",
                    chosen, role,
                )  # fmt: skip
            seen[role] = composed
            return
        if config is seen.get(role):
            return
        if chosen := chosen_by(config, role):
            raise NotInstalledError(
                f"{chosen} was chosen for this job, but no SkipManager was installed",
                "skip",
                _remedy(config, chosen),
            )
        seen[role] = config

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
            f"when sweeping the option itself, add {with_callback(config)} (Hydra drops the "
            "option's own callback there); with it, skip.KEY=VALUE needs no `+`"
        )
    if re.match(r"\+*(rlskip\.)?skip\.", chosen):
        return (
            "choose an option instead of single keys, e.g. +skip=rollout_cache, which adds "
            f"rlskip's callback; or add {with_callback(config)}, or call SkipManager.init(cfg) "
            "first"
        )
    return (
        "call SkipManager.init(cfg) first; or, if Hydra does not list RlskipSearchPathPlugin "
        "under `--info plugins`, reinstall rlskip here"
    )


def _hydra_config() -> Any:
    """Hydra's runtime config of the present job; None outside a job. Imports nothing."""
    module = sys.modules.get("hydra.core.hydra_config")
    return None if module is None else module.HydraConfig.instance().cfg


def chosen_by(hydra_config: Any, role: str = "") -> str | None:
    """The override or choice through which a job asked for skip.

    What sets an application's own key or group of that name does not ask for it. A key of a `role`
    always asks for it.
    """
    if hydra_config is None:
        return None
    typed = overrides_of(hydra_config)
    own = _is_own(hydra_config["hydra"], typed, role)
    for override in typed:
        key, _, value = override.lstrip("+").partition("=")
        below = key.startswith(f"{ABOVE}.") or key == f"skip@{ABOVE}"
        key = re.split("[.@]", key.removeprefix(f"{ABOVE}."), maxsplit=1)[0]
        asks = value.lower() not in ("false", "null", "none")
        ours = any(map(is_shipped, re.findall(r"\w+", value)))
        ours |= re.match(r"\++skip\.\w+\.enable=", override) is not None  # a role, maybe misspelt
        if key == "skip" and asks and (below or ours or not own):
            return override
    choices = look_up(hydra_config, "hydra.runtime.choices") or {}
    for group, option in choices.items():
        name, _, package = group.partition("@")
        if name == "skip" and option and (package == ABOVE or is_shipped(option) or not own):
            return f"skip: {option}"
    return None


def _is_own(hydra: Any, typed: Sequence[str], role: str) -> bool:
    """Whether `skip` at the top of this node's config is not rlskip's, as far as it is there."""

    def above(key: str) -> Any:
        return OmegaConf.select(hydra, f"..{key}", throw_on_resolution_failure=False)

    node = above("skip")
    if node is None or above(f"{ABOVE}.skip") is not None:
        return True
    if not hasattr(node, "keys"):
        return "+skip=true" not in map(str.lower, typed)  # such a key was not there before
    return role not in node and has_own_key({"skip": node})
