"""What is said of a job's roles and of decorated functions, and what of them is refused.

A job that chose an option of `skip` must not run without `SkipManager.init`. No code acts on the
option when Hydra's callback was lost (a swept option, ``~hydra.callbacks.rlskip``) or when Hydra
did not discover the plug-in.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Mapping, Set
from typing import Any, NoReturn

from omegaconf import OmegaConf

from rlskip.config.check import leaves, look_up
from rlskip.config.dump_dir import hydra_config
from rlskip.config.nodes import add_callback, chosen_options, dropped_callback, overrides_of
from rlskip.config.settings import has_own_key
from rlskip.config.skip import (
    BUILT_IN_ROLES,
    SHARED_KEYS,
    SKIP_REGISTRY,
    SkipManagerConfig,
    as_given,
)
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.skip.attach import attached
from rlskip.skip.role import Role
from rlskip_conf import options

log = logging.getLogger(__name__)

# By role Hydra's config of the job of which it is known that it did not choose skip.
_not_chosen: dict[str, Any] = {}

_KINDS: dict[str, tuple[Any, str]] = {
    "prompts": (str, "the name of an argument, or a function"),
    "identity": (Mapping, "a mapping, or a function"),
    "lacks": ((), "a function"),
    "ignore": ((list, tuple, Set), "a list of names"),
    "rows": (Mapping, "a mapping, or a function"),
    "on_replay": ((), "a function"),
}
"""What an option of ``annotate`` is, besides a function, and in words."""


def warn_of_uncalled(
    roles: Mapping[str, Role], bypassed: Collection[str], decorated: Collection[str], step: int
) -> bool:
    """Warn of roles that should have been called up to `step`; returns whether there are any.

    `bypassed` are the roles of functions that were called although their role is off, `decorated`
    those of all decorated functions.
    """
    # Validation may come later, or alone before the first step of training.
    validated = any(skip.recorder and skip.serves_validation for skip in roles.values())
    if not bypassed and (step == 0 or validated):
        return False
    # A call that was replayed may enclose those of a stage of another role.
    enclosed = decorated if any(skip.has_replayed for skip in roles.values()) else ()
    unused = [
        role
        for role, skip in roles.items()
        if not (skip.recorder or skip.serves_validation or role in enclosed)
        if bypassed or not skip.support_online_step  # else perhaps in another process
    ]
    if unused:
        what = "rlskip: role %s is enabled and was NEVER CONSULTED up to step %d: %s"
        log.warning(what, ", ".join(unused), step, why_uncalled(bypassed))
    return bool(unused)


def warn_of_unlisted(role: str, local_config: Any) -> None:
    """Warn that no call of a role was at one of its steps."""
    what = "rlskip: role %s: its function was called, but at no step that is listed: %s lists %s"
    log.warning(what, role, as_given("skip.steps", role, local_config), local_config.steps)


def warn_of_unmet(roles: Mapping[str, Role]) -> None:
    """Warn of names in an ``ignore`` that no stage of the job had, so that they say nothing."""
    kept = [skip.dumps.identities for skip in roles.values() if skip.dumps is not None]
    met = {name for one in kept for name in one.met}
    unmet = sorted({n for one in kept for n in one.ignored if n.partition(".")[0] not in met})
    if met and unmet:
        what = "rlskip: skip.ignore or annotate(ignore=...) names %s, which no stage has: a typo?"
        log.warning(what, ", ".join(unmet))


def why_uncalled(bypassed: Collection[str]) -> str:
    """Why a role that is on was not called, and what to type instead."""
    if names := ", ".join(name for name, one in attached.items() if not one.stages):
        return f"skip.attach names {names}, which nobody called: is it imported, by that name?"
    if not bypassed:
        return (
            "no function decorated with it was called; decorate the stage with "
            "SkipManager.annotate, or name it: skip.attach.ROLE=package.module:function"
        )
    job = hydra_config() is not None
    choose = [
        f"+skip={role}_cache" if role in BUILT_IN_ROLES and job else f"skip.{role}.enable=true"
        for role in sorted(bypassed)
    ]
    called = ", ".join(sorted(bypassed))
    return f"functions of role {called} were called instead: {' '.join(choose)}"


def warn_of_idle_keys(node: Mapping[str, Any] | None, roles: Mapping[str, Role]) -> None:
    """Warn if a node `skip` turns no role on, and does not say that none is to be on."""
    if node is None or roles or node.get("enable") is False:
        return
    usual = dict(leaves(SkipManagerConfig()))
    given = [key for key, one in leaves(node) if one not in (None, False, {}, usual.get(key))]
    own = [role for name, role in node.items() if name not in SHARED_KEYS]
    # Where a dataclass lists its defaults, or a role is off by name, that may be meant.
    meant = {*SHARED_KEYS} <= node.keys() or any("enable" in role for role in own)
    if given or not meant:
        first = ".".join(["skip", *[*given, *node][:1]])
        log.warning(
            "rlskip: NOTHING is skipped or cached: %s is set, and no role is on; set "
            "skip.rollout.enable=true, here {'skip': {'rollout': {'enable': True}, ...}}",
            first,
        )


def refuse_without_node(config: Any) -> None:
    """Refuse the node instead of a full config; one without `skip` is an application's."""
    if not isinstance(config, Mapping) or not {"skip", "record"}.isdisjoint(config):
        return
    is_node = {*config} <= {*SHARED_KEYS, *BUILT_IN_ROLES} and not {*config} <= {*SHARED_KEYS}
    if isinstance(config, dict) or is_node or getattr(config, "_key", str)() == "skip":
        raise ConfigError(
            f"the config has no entry skip, only {', '.join(map(str, config)) or 'nothing'}",
            "SkipManager.init",
            "give the full config, e.g. SkipManager.init({'skip': {'rollout': {'enable': True}}})",
        )


def refuse_misspelt(role: str) -> None:
    """Refuse a role that is not known and looks like one that is, or has the name of a key."""
    known = {*BUILT_IN_ROLES, *SKIP_REGISTRY}
    near = difflib.get_close_matches(str(role), known, n=1, cutoff=0.75)
    what, remedy = f"there is no role {role!r}", f"known: {', '.join(sorted(known))}"
    if near:
        remedy = f"did you mean {near[0]!r}? A role of your own needs a name that is less alike"
    if isinstance(role, str) and role.isidentifier():
        if role in SHARED_KEYS:
            what += f": skip.{role} is a key"
        elif role in known or not near:
            return
    raise ConfigError(what, "SkipManager.annotate", remedy)


def refuse_other_kinds(role: str, **options: Any) -> None:
    for name, value in options.items():
        kind, words = _KINDS[name]
        if not (value is None or callable(value) or isinstance(value, kind)):
            where = f"SkipManager.annotate(role={role!r}, {name}=...)"
            raise ConfigError(f"expected {words}, got {value!r:.80}", where)


def refuse_other_objects(func: Any) -> None:
    if isinstance(func, type) or not callable(func):
        remedy = "decorate a function, a method, a functools.partial or a callable object"
        raise ConfigError(f"{func!r:.80} is not a function", "SkipManager.annotate", remedy)


def refuse_chosen(role: str) -> None:
    """Raise where Hydra's present job chose an option of `skip`, which nobody acts on."""
    config = hydra_config()
    if config is _not_chosen.get(role):
        return
    if chosen := chosen_by(config, role):
        raise NotInstalledError(
            f"{chosen} was chosen for this job, but no SkipManager was installed",
            "skip",
            _remedy(config, chosen),
        )
    _not_chosen[role] = config


def refuse(reason: str, role: str) -> NoReturn:
    """Raise whatever was chosen: the start failed."""
    raise NotInstalledError(reason, "skip", "correct the config, then start the job again")


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
            f"rlskip's callback; or {add_callback(config)}, or call SkipManager.init(cfg) first"
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
