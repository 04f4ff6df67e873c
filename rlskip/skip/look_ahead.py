"""Before the first step: which of the steps to come have a dump."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import attrs

from rlskip.config.check import Problem
from rlskip.config.facts import HostFacts
from rlskip.config.steps import compact
from rlskip.skip.dumping import DumpingSkip
from rlskip.skip.queue_dumping import QueueDumping
from rlskip.skip.role import BaseSkip, SkipAction
from rlskip.store import DumpError, Identity, StepStore
from rlskip.store.layout import journal_name


def not_replayable(skip: BaseSkip, steps: Iterable[int]) -> list[int]:
    """Those of `steps` that a role cannot replay, as far as that is known before the prompts are.

    A step can be replayed if it is listed and has a readable dump that was made under the same
    conditions (:class:`~rlskip.store.Identity`, the prompts apart); under ``action: repeat`` and
    ``match: run``, if any step has a readable dump.
    """
    if not isinstance(skip, DumpingSkip):
        return list(steps)
    # The role's own store asks torch.distributed for its rank, which is known only later.
    store = StepStore(skip.directory)
    part = 0 if isinstance(skip, QueueDumping) else None
    listed = skip.local_config.steps
    if skip.local_config.action == SkipAction.REPEAT or skip.local_config.match == "run":
        found = store.nearest(0, part) is not None
        return [step for step in steps if not found or step not in listed]
    return [step for step in steps if step not in listed or not _fits(skip, store, step, part)]


def _fits(skip: DumpingSkip, store: StepStore, step: int, part: int | None) -> bool:
    try:
        meta = store.read_meta(step, part)
    except DumpError:  # a newer format
        return False
    if meta is None or meta.identity is None or skip.local_config.on_mismatch == "ignore":
        return meta is not None
    return not differences(skip, meta.identity)


def differences(skip: DumpingSkip, made: Identity) -> list[str]:
    """How the config differs from the one that a dump was made with; prompts are not compared."""
    now = skip.conditions
    # Of `extra` the config decides a part (skip.identity); the call adds the others.
    extra = {**made.extra, **now.extra}
    now = attrs.evolve(now, prompts_hash=made.prompts_hash, extra=extra)
    return list(now.differences(made)[0])


def holes(
    roles: Mapping[str, BaseSkip], steps: Iterable[int], validated: Iterable[int] = ()
) -> list[Problem]:
    """A problem for each role that lists steps which it can neither replay nor generate.

    The steps of validation are `validated`, as far as they are known.
    """
    problems = []
    for role, skip in roles.items():
        local = skip.local_config
        if local.on_miss != "error" or skip.support_online_step:
            continue
        due = validated if skip.serves_validation else steps
        listed = [step for step in due if step in local.steps]
        missing = not_replayable(skip, listed)
        if missing and isinstance(skip, DumpingSkip):
            what = f"steps {compact(missing)} have no usable dump in {skip.directory}"
            there = compact(sorted({*listed} - {*missing}))
            remedy = "generate them once with skip.on_miss=generate skip.start_engine=true"
            killed = [s for s in missing if (skip.directory / journal_name(s)).exists()]
            if killed:
                remedy += f"; step {compact(killed)} has a journal, which that run completes"
            if there:
                remedy += f", or list those that have one: 'skip.steps=\"{there}\"'"
            problems.append(Problem(f"skip.{role}.on_miss=error", what, remedy))
    return problems


def steps_of(facts: HostFacts) -> range:
    """The steps of a run as far as its host knows them.

    Empty where that is unknown, or where several processes train and each has its own shards.
    """
    total = facts.total
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return range(1, total + 1) if isinstance(total, int) and alone else range(0)
