"""What a decorated function meets before `SkipManager.init`, or after one that failed.

A job that chose an option of `skip` must not run without it. No code acts on the option when
Hydra's callback was lost (a swept option, ``~hydra.callbacks.rlskip``) or when Hydra did not
discover the plug-in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from omegaconf import OmegaConf

from rlskip.config.check import look_up
from rlskip.config.dump_dir import hydra_config
from rlskip.config.nodes import ADD_CALLBACK, chosen_options, dropped_callback, overrides_of
from rlskip.config.settings import has_own_key
from rlskip.errors import NotInstalledError
from rlskip_conf import options


def before_init() -> Callable[[str], None]:
    """A check of a role that raises where Hydra's present job chose an option of `skip`."""
    seen: dict[str, Any] = {}

    def check(role: str) -> None:
        config = hydra_config()
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


def refusing(reason: str) -> Callable[[str], None]:
    """A check that always raises: the start failed."""

    def check(role: str) -> NoReturn:
        raise NotInstalledError(reason, "skip", "correct the config, then start the job again")

    return check


def _remedy(config: Any, chosen: str) -> str:
    """What to type, by what is missing in the command."""
    removed = [o for o in overrides_of(config, "hydra") if o.startswith("~hydra.callbacks")]
    removed += [o for o in overrides_of(config) if re.match(r"~skip\b", o)]
    if removed:
        return f"remove {removed[0]}, or call SkipManager.init(cfg) first"
    if dropped := dropped_callback(config):
        return f"{dropped}; with it, skip.KEY=VALUE needs no `+`"
    if re.match(r"\+*skip\.", chosen):  # typed, or in YAML
        return (
            "choose an option instead of single keys, e.g. +skip=rollout_cache, which adds "
            f"rlskip's callback; or {ADD_CALLBACK}, or call SkipManager.init(cfg) first"
        )
    return (
        "call SkipManager.init(cfg) first; or, if Hydra does not list RlskipSearchPathPlugin "
        "under `--info plugins`, reinstall rlskip here"
    )


def chosen_by(config: Any, role: str = "") -> str | None:
    """The override or choice through which a job asked for skip.

    What sets an application's own key or group of that name does not ask for it. A key of a `role`
    always asks for it.
    """
    if config is None:
        return None
    typed, shipped = overrides_of(config), options("skip")
    # None where nothing is, or it is broken.
    node = OmegaConf.select(config["hydra"], "..skip", throw_on_resolution_failure=False)
    own = node is None or (
        # Of a key that is not a mapping, `+skip=true` says that it was not there before.
        role not in node and has_own_key({"skip": node})
        if hasattr(node, "keys")
        else "+skip=true" not in map(str.lower, typed)
    )
    for override in typed:
        key, _, value = override.lstrip("+").partition("=")
        asks = value.lower() not in ("false", "null", "none")
        ours = any(word in shipped for word in re.findall(r"\w+", value))
        ours |= re.match(r"\++skip\.\w+\.enable=", override) is not None  # a role, maybe misspelt
        if re.split("[.@]", key, maxsplit=1)[0] == "skip" and asks and (ours or not own):
            return override
    for option, _ in chosen_options(config, "skip"):
        return f"skip: {option}"
    if not own and look_up(node, "enable") is not False:
        for key in node or ():
            if look_up(node, f"{key}.enable") is True:  # the application's own YAML says so
                return f"skip.{key}.enable: true"
    return None
