"""What is refused before the first step: what a run would have to generate or write, and cannot."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from rlskip._files import cannot_write
from rlskip.config.check import Problem
from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE, SkipAction, as_given, to_generate
from rlskip.config.steps import compact
from rlskip.jobs.ranks import shard
from rlskip.skip.agreement import only_on_one_rank
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import Role
from rlskip.skip.step_calls import Key
from rlskip.store import DumpError, DumpMeta, Identity, StepStore
from rlskip.store.layout import journal_name

Roles = Mapping[str, Role]

_OF_CONFIG = ("n", "prompt_len", "response_len", "sampling.", "config.")
"""How names of an identity begin that the config alone decides."""


def preflight(
    roles: Roles, facts: HostFacts, *, engine: bool = True, here: bool = True
) -> list[Problem]:
    """Everything that a run with these `roles` could not do, as far as its host knows its steps.

    Processes that train together each have a shard of a step, so their dumps are not looked for.

    Parameters
    ----------
    facts
        `steps` and `validated` are the steps that the run will take.
    engine
        Whether the host can generate at all. If not, every step must be listed.
    here
        Whether the stages run on this machine.
    """
    all_dumps = [role.dumps for role in roles.values() if role.dumps is not None]
    found = _shared(all_dumps)
    if here:
        found += [problem for dumps in all_dumps for problem in _unwritable(dumps)]
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    found += _holes(roles, facts) if alone else _several_ranks(all_dumps)
    return found if engine else [*found, *_unlisted(roles, facts), *_validation(roles, facts)]


# -- which steps have a dump -----------------------------------------------------------------


def unusable(
    skip: Role, steps: Iterable[int], called_with: Mapping[str, Any] = MappingProxyType({})
) -> dict[int, str]:
    """Those of `steps` that a role cannot replay, as far as that is known before the prompts are.

    A step can be replayed if it is listed and has a readable dump of every call, made under the
    same conditions (:class:`~rlskip.store.Identity`, the prompts apart). If any step's may serve,
    it is enough that one has such a dump, or a readable one for a repeat. The text says what the
    step's dumps lack or how they differ; it is empty where there is none. `called_with` is what a
    call will add to the identity, as far as the host knows it.
    """
    dumps = skip.dumps
    if dumps is None:
        return dict.fromkeys(steps, "")
    # The role's own store makes the ranks agree; not all of them need ask here.
    rank, ranks = shard()
    store = dumps.store_at(dumps.directory, rank=rank, world_size=ranks, quarantines=False)
    listed = skip.local_config.steps
    if skip.local_config.action == SkipAction.REPEAT or skip.local_config.match != "step":
        stores = [store, *(dumps.other_sizes().values() if dumps.by_prompt else ())]
        if skip.serves_validation and dumps.by_prompt:  # another step's shows another model
            there = {step for one in stores for step in one.steps()}
            return {step: "" for step in steps if step not in there or step not in listed}
        none = _why_none(dumps, stores, called_with)
        return {
            step: none or "" if step in listed else ""
            for step in steps
            if none is not None or step not in listed
        }
    why = {
        step: _why_not(dumps, store, step, called_with) if step in listed else "" for step in steps
    }
    if ranks > 1:
        apart = _apart(store, [step for step, reason in why.items() if reason is None])
        why |= dict.fromkeys(apart, "lack the shard of another rank, or have one of another call")
    return {step: reason for step, reason in why.items() if reason is not None}


def _why_not(
    dumps: Dumps, store: StepStore, step: int, called_with: Mapping[str, Any]
) -> str | None:
    """Why a step cannot be replayed, None if it can: each call, or part of a queue, is looked at.

    Names are enough: what was moved away as bad, and a gap in the places of the calls, shows that a
    dump is missing. Only a deleted last call of a step is found when the run comes to it.
    """
    calls = store.calls(step)
    try:
        metas = {call: store.read_meta(step, call) for call in calls or [""]}
    except DumpError as error:
        return f"have another format ({error.what})"
    there = [meta for meta in metas.values() if meta is not None]
    if not there:
        return ""
    places = {meta.info.get("place", 0) for meta in there}
    if gaps := {*range(max(places))} - places:
        return f"lack call {compact(sorted(gaps))}, whose dump is missing or damaged"
    damaged = {call for call, meta in metas.items() if meta is None}
    if lost := sorted(damaged | {*store.quarantined(step)} - {*calls}):
        return f"lack {', '.join(Key(step, call).path for call in lost)}, which is damaged"
    return _made_for_others(dumps, there, called_with)


def _apart(store: StepStore, steps: Sequence[int]) -> list[int]:
    """The steps of which not all ranks have shards of the same calls.

    All ranks see which names are there, and each compares its shards with the next rank's.
    """

    def shards(step: int) -> Counter[int]:
        """How many calls of a step each rank has."""
        places = store.listed_by_step().get(step, ())
        return Counter(one.rank for one in places if one.world_size == store.world_size)

    following = StepStore(
        store.directory,
        rank=(store.rank + 1) % store.world_size,
        world_size=store.world_size,
        quarantines=False,
    )

    def generations(of: StepStore, step: int) -> set[Any]:
        metas = (of.read_meta(step, call) for call in of.calls(step))
        return {meta and meta.info.get("generation") for meta in metas}

    return [
        step
        for step in steps
        if len(shards(step)) < store.world_size
        or len({*shards(step).values()}) > 1
        or generations(store, step) != generations(following, step)
    ]


def _why_none(
    dumps: Dumps, stores: Iterable[StepStore], called_with: Mapping[str, Any]
) -> str | None:
    """Why no dump of the run can serve any of its steps; None if one can."""
    found: str | None = ""
    for store in stores:
        for step in store.listed():
            if (meta := store.read_meta(step)) is not None:
                found = _made_for_others(dumps, [meta], called_with)
            if found is None:
                return None
    return found


def _made_for_others(
    dumps: Dumps, metas: Iterable[DumpMeta], called_with: Mapping[str, Any]
) -> str | None:
    """What dumps were made for instead, if that is a mismatch."""
    if dumps.local_config.action == SkipAction.REPEAT:
        return None
    differing = [
        line
        for meta in metas
        if meta.identity
        for line in differences(dumps, meta.identity, called_with)
    ]
    named = "; ".join(dict.fromkeys(differing))
    return f"were made for other rollouts: {named}" if named else None


def differences(
    dumps: Dumps, made: Identity, called_with: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """How the config differs from the one that a dump was made with; prompts are not compared.

    `called_with` is that of :func:`unusable`.
    """
    # The config decides a part of what is compared; the call adds the others, its function's source
    # among them.
    known = {f"identity.{name}": value for name, value in called_with.items()}
    known = {name: value for name, value in known.items() if name in made.compared}
    ours = dumps.identities.conditions.adding(known)
    added = {k: v for k, v in made.compared.items() if not k.startswith(_OF_CONFIG)}
    source = {"code": made.noted["code"]} if "code" in made.noted else {}
    compared, noted = {**added, **ours.compared}, {**ours.noted, **source}
    return attrs.evolve(ours, compared=compared, noted=noted).differences(made)[0]


# -- what is refused -------------------------------------------------------------------------


def _holes(roles: Roles, facts: HostFacts) -> list[Problem]:
    """A problem for each role that lists steps which it can neither replay nor generate."""
    problems = []
    for role, skip in roles.items():
        local, dumps = skip.local_config, skip.dumps
        if dumps is None or local.on_miss != "error" or skip.support_online_step:
            continue
        listed = [step for step in _due(skip, facts) if step in local.steps]
        missing = unusable(skip, listed, facts.called_with.get(role, {})) if listed else {}
        if not missing:
            continue
        absent = [step for step, reason in missing.items() if not reason]
        found = []
        if absent:
            found.append(f"steps {compact(absent)} have no usable dump in {dumps.directory}")
        generate = to_generate(role, local)
        remedy = f"generate them once with {generate}"
        if hidden := list(dumps.notices.other_shapes()) if absent == listed else []:
            found += hidden
            remedy = f"set back what differs, or {remedy}"
        for reason in sorted({*missing.values()} - {""}):
            others = compact([step for step, why in missing.items() if why == reason])
            found.append(f"the dumps of steps {others} in {dumps.directory} {reason}")
            if reason.startswith("were made"):
                remedy = "set back what differs, or name another skip.dump_dir and generate them "
                remedy += f"there once with {generate}"
        killed = [step for step in missing if (dumps.directory / journal_name(step)).exists()]
        if killed:
            has = f"step {compact(killed)} has a journal"
            remedy += f"; {has}, which dispatch.journal=true completes"
        # Without an engine every step must be listed.
        if (there := {*listed} - {*missing}) and not local.lacks_engine:
            remedy += f", or list those that have one: 'skip.steps=\"{compact(sorted(there))}\"'"
        remedy = as_given(remedy, role, local)
        problems.append(Problem(f"skip.{role}.on_miss=error", "; ".join(found), remedy))
    return problems


def _several_ranks(all_dumps: Iterable[Dumps]) -> list[Problem]:
    """A problem for each role whose calls the several ranks here cannot replay together."""
    return [
        attrs.evolve(why, what=f"there are several ranks, and {why.what}")
        for dumps in all_dumps
        if dumps.role != "rollout_tq" and (why := only_on_one_rank(dumps)) is not None
    ]


def _unlisted(roles: Roles, facts: HostFacts) -> list[Problem]:
    """A problem for each role that does not list all of its steps, and never runs."""
    found = []
    for role, skip in roles.items():
        if skip.local_config.on_miss != "error" or skip.support_online_step:
            continue
        due = _due(skip, facts)
        unlisted = [step for step in due if step not in skip.local_config.steps]
        if not unlisted:
            continue
        what = f"steps {compact(unlisted)} are not listed and would generate, and "
        if skip.serves_validation:
            remedy = f"set skip.{role}.steps=all"
        else:
            remedy = f"set 'skip.steps=\"{compact(due)}\"'"
            if unlisted[0] > due[0] and "steps" in facts.keys:
                remedy += f", or train fewer steps: {facts.keys['steps']}={unlisted[0] - 1}"
        what += "skip.start_engine=false"
        remedy = as_given(remedy, role, skip.local_config)
        found.append(Problem(f"skip.{role}.steps", what, remedy))
    return found


def _validation(roles: Roles, facts: HostFacts) -> list[Problem]:
    """A problem for each key of the host that makes it validate, which is not replayed."""
    what = "validation generates, and skip.start_engine=false"
    return [
        Problem(key, what, f"set {key}={off}, or skip.validation=replay")
        for key, off in facts.validates.items()
        if VALIDATION_ROLE not in roles
    ]


def _due(skip: Role, facts: HostFacts) -> list[int]:
    """The steps at which the run will call the role, as far as they are certain.

    With dynamic sampling its last step is not: the run may end with that of the dumps.
    """
    due = list(facts.validated if skip.serves_validation else facts.steps)
    if due and facts.samples_dynamically and skip.dumps is not None and skip.role != "rollout_tq":
        dumped = StepStore(skip.dumps.directory).listed()
        due = [step for step in due if step <= max([due[0], *dumped])]
    return due


def _shared(all_dumps: Iterable[Dumps]) -> list[Problem]:
    """A problem for each role whose dumps would be in another role's directory."""
    owners: dict[Path, str] = {}
    return [
        Problem(
            f"skip.{dumps.role}.dump_dir",
            f"roles {owner} and {dumps.role} would both have their dumps in {dumps.directory}",
            f"give one of them another directory: skip.{dumps.role}.dump_dir=/another/directory",
        )
        for dumps in all_dumps
        if (owner := owners.setdefault(dumps.directory, dumps.role)) != dumps.role
    ]


def _unwritable(dumps: Dumps) -> list[Problem]:
    """The problem of a directory that cannot be written, unless it has a dump of each listed step.

    A role that never generates (``on_miss: error``) writes nothing.
    """
    local = dumps.local_config
    if local.on_miss == "error" or (reason := cannot_write(dumps.directory)) is None:
        return []
    there = {*dumps.store.steps()}
    if there if local.action == SkipAction.REPEAT else local.steps.are_among(there):
        return []
    what = f"{local.dump_dir} cannot be written ({reason}), and role {dumps.role} has steps "
    remedy = "name a directory that can be written; to use only the dumps that are there, set "
    remedy += "skip.on_miss=error"
    key, remedy = (as_given(text, dumps.role, local) for text in ("skip.dump_dir", remedy))
    return [Problem(key, f"{what}without a dump there", remedy)]
