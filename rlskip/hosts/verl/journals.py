"""Journals of verl's V1 trainer: a killed run resumes in mid-step.

With rollout-level dispatch and ``dispatch.journal=true`` verl's agent-loop workers append each
session to its step's journal, before its rows go to TransferQueue. The dispatcher of the next run
takes them (:mod:`rlskip.dispatch.resume`).

Journals are beside the dumps of role ``rollout_tq``, and hold what the role compares. A session
also depends on verl's release and on what its rows must have (log-probs, say).

verl sets the weights of step s - 1 before it submits a batch of step s. A sync trainer resumes
sessions of these weights only; an asynchronous one those that its sampler would not call stale.
What verl's own checkpoint restores, its queue and unfinished prompts, is verl's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from rlskip.config.check import look_up
from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.resume import Journals, journal_identity
from rlskip.hosts.verl.facts import NEEDED, verl_release
from rlskip.hosts.verl.handshake import refuse_unshared
from rlskip.hosts.verl.names import MODE_KEY, SAMPLER_KEY
from rlskip.jobs.records import job_id
from rlskip.queue import TrajectoryQueue
from rlskip.skip import SkipManager
from rlskip.skip.rollout_tq import GroupRole
from rlskip.store import Identity

_ROLE = "rollout_tq"

# Those of the trainer in this process.
_journals: Journals | None = None


def start_journals(
    config: DictConfig, dispatch: DispatchConfig, queue: TrajectoryQueue
) -> Journals | None:
    """The journals of the run; None if it has none."""
    global _journals
    _journals = None
    if dispatch.journal:
        role = SkipManager.skip_instances[_ROLE]
        assert isinstance(role, GroupRole)
        identity = journal_identity(journaled_as(role, config), dispatch)
        _journals = Journals(role.dumps.store, identity, queue, max_span=_max_span(config))
    return _journals


def tidy_journals() -> None:
    """Remove the journals that are done with."""
    if _journals is not None:
        _journals.tidy()


def journaled_as(role: GroupRole, config: Any) -> Identity:
    """What verl's sessions depend on besides their prompts and `dispatch`."""
    needed = {f"config.{key}": look_up(config, key) for key in NEEDED}
    made = {"stage": "verl.submit", "verl": verl_release(), **needed}
    return role.dumps.identities.conditions.adding(made)


def sharing() -> Callable[[], None]:
    """What each worker that journals calls first, wherever Ray has placed it.

    It raises :class:`ConfigError` where the directory is another one than in this process, which
    has acknowledged its role there.
    """
    dump_dir = str(SkipManager.skip_instances[_ROLE].local_config.dump_dir)
    key = f"skip.{_ROLE}.dump_dir (dispatch.journal)"
    return functools.partial(refuse_unshared, key, dump_dir, job_id(), _ROLE)


def _max_span(config: Any) -> int | None:
    """How many steps a group may span, by the settings that rlskip's buffer got."""
    if look_up(config, MODE_KEY) == "sync":
        return 1
    kwargs = look_up(config, f"{SAMPLER_KEY}.sampler_kwargs")
    span: int | None = kwargs.max_off_policy_threshold
    return None if kwargs.max_off_policy_strategy == "none" else span
