"""What is said of a job's roles and of decorated functions, and what of them is refused."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Set
from typing import Any

from rlskip.config.skip import BUILT_IN_ROLES, SHARED_KEYS, SKIP_REGISTRY, SkipManagerConfig
from rlskip.errors import ConfigError
from rlskip.jobs.records import job_id, read_events
from rlskip.skip.role import Role

log = logging.getLogger(__name__)

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


def why_uncalled(bypassed: Collection[str]) -> str:
    """Why a role that is on was not called, and what to type instead."""
    if not bypassed:
        return (
            "no function decorated with it was called; decorate the stage with "
            "SkipManager.annotate, or name it: skip.attach.ROLE=package.module:function"
        )
    choose = [
        f"+skip={role}_cache" if role in BUILT_IN_ROLES else f"skip.{role}.enable=true"
        for role in sorted(bypassed)
    ]
    called = ", ".join(sorted(bypassed))
    return f"functions of role {called} were called instead: {' '.join(choose)}"


def warn_of_idle_keys(node: Mapping[str, Any], roles: Mapping[str, Role]) -> None:
    """Warn if keys of the node `skip` are set, and no role that would take them is on."""
    usual = SkipManagerConfig()
    given = [k for k in SHARED_KEYS if node.get(k) not in (None, getattr(usual, k))]
    if given and not roles and node.get("enable") is not False:
        log.warning(
            "rlskip: NOTHING is skipped or cached: skip.%s is set, and no role is on; set "
            "skip.rollout.enable=true, here {'skip': {'rollout': {'enable': True}, ...}}",
            given[0],
        )


def say_what_is_kept(roles: Mapping[str, Role]) -> None:
    """After Ctrl-C: how many steps of each role that was called the job has dumped."""
    for role, skip in roles.items():
        if skip.recorder is not None:
            dump_dir = skip.local_config.dump_dir
            events = read_events(dump_dir, job_id())
            kept = {e.step for e in events if e.kind == "dumped" and e.role == role}
            what = "rlskip: interrupted; role %s: the rollouts of %d steps are kept in %s"
            log.warning(what, role, len(kept), skip.dumps.directory if skip.dumps else dump_dir)


def refuse_without_node(config: Any) -> None:
    if isinstance(config, dict) and not {"skip", "record"} & config.keys():
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
