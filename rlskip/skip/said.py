"""What is said of a job's roles: of one that is not called, of keys that none takes, at Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from rlskip.config.skip import BUILT_IN_ROLES, SHARED_KEYS, SkipManagerConfig
from rlskip.jobs.records import job_id, read_events
from rlskip.skip.role import Role

log = logging.getLogger(__name__)


def warn_of_uncalled(
    roles: Mapping[str, Role], bypassed: Collection[str], decorated: Collection[str], step: int
) -> bool:
    """Warn of roles that should have been called up to `step`; returns whether there are any.

    Functions of a role with its own steps may be called in another process. Validation may come
    later, or alone before the first step of training. `bypassed` are the roles of functions that
    were called although their role is off, `decorated` those of all decorated functions.
    """
    validated = any(skip.was_called and skip.serves_validation for skip in roles.values())
    if not bypassed and (step == 0 or validated):
        return False
    # A call that was replayed may enclose those of a stage of another role.
    enclosed = decorated if any(skip.has_replayed for skip in roles.values()) else ()
    unused = [
        role
        for role, skip in roles.items()
        if not (skip.was_called or skip.serves_validation or role in enclosed)
        if bypassed or not skip.support_online_step
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
    """Say of each role that was called how many steps the job has dumped."""
    for role, skip in roles.items():
        if skip.was_called:
            events = read_events(skip.local_config.dump_dir, job_id())
            kept = {e.step for e in events if e.kind == "dumped" and e.role == role}
            what = "rlskip: interrupted; role %s: the rollouts of %d steps are kept in %s"
            log.warning(what, role, len(kept), skip.directory or skip.local_config.dump_dir)
