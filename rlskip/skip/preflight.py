"""What is refused before the first step: what a run would have to generate or write, and cannot."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rlskip._files import cannot_write
from rlskip.config.check import Problem
from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE, as_given, to_generate
from rlskip.config.steps import compact
from rlskip.jobs.ranks import shard
from rlskip.skip.agreement import only_on_one_rank
from rlskip.skip.dumps import Dumps
from rlskip.skip.role import Role
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
    Without an `engine` every step must be listed. `here`: the stages run on this machine.
    """
    all_dumps = [role.dumps for role in roles.values() if role.dumps is not None]
    found = [*_of_directories(all_dumps, here)]
    if os.environ.get("WORLD_SIZE", "1") == "1":
        found += [problem for skip in roles.values() for problem in _holes(skip, facts)]
    else:
        ranked = [dumps for dumps in all_dumps if dumps.role != "rollout_tq"]
        for why in filter(None, map(only_on_one_rank, ranked)):
            found.append(attrs.evolve(why, what=f"there are several ranks, and {why.what}"))
    return found if engine else [*found, *_without_engine(roles, facts)]


def unusable(skip: Role, steps: Iterable[int], called_with: Mapping[str, Any]) -> dict[int, str]:
    """Those of `steps` that a role cannot replay, as far as that is known before the prompts are.

    A step can be replayed if it is listed and has a readable dump of every call, made under the
    same conditions (:class:`~rlskip.store.Identity`, the prompts apart). If any step's may serve,
    it is enough that one has such a dump, or a readable one for a repeat. The text says what the
    step's dumps lack or how they differ; it is empty where there is none. `called_with` is what a
    call will add to the identity, as far as the host knows it.
    """
    dumps, local = skip.dumps, skip.local_config
    why: dict[int, str | None] = dict.fromkeys(steps, "")
    listed = [step for step in why if step in local.steps]
    if dumps is None or not listed:
        return dict.fromkeys(why, "")
    # The role's own store makes the ranks agree; not all of them need ask here.
    rank, ranks = shard()
    store = dumps.store_at(dumps.directory, rank=rank, world_size=ranks, quarantines=False)
    stores = [store, *dumps.other_sizes()]
    if dumps.repeats and not dumps.by_prompt:  # it compares nothing
        why |= dict.fromkeys(listed, "" if store.nearest(0) is None else None)
    elif local.match == "step":
        why |= {step: _why_not(dumps, store, step, called_with) for step in listed}
    else:
        every = [(one, p) for one in stores for of in one.listed_by_step().values() for p in of]
        own = skip.serves_validation  # another step's shows another model
        for steps in [[step] for step in listed] if own else [listed]:
            reason: str | None = ""
            read = (one.read_meta(p.step, p.call) for one, p in every if not own or p.step in steps)
            for meta in filter(None, read):
                if (reason := made_for_others(dumps, [meta], called_with)) is None:
                    break
            why |= dict.fromkeys(steps, reason)
    return {step: reason for step, reason in why.items() if reason is not None}


def _why_not(
    dumps: Dumps, store: StepStore, step: int, called_with: Mapping[str, Any]
) -> str | None:
    """Why a step cannot be replayed, None if it can: each call, or part of a queue, is looked at.

    Names are enough: what was moved away as bad, and a gap in the places of the calls, shows that a
    dump is missing. Only a deleted last call of a step is found when the run comes to it; so is
    whether the shards of several ranks are of the same calls.
    """
    calls = {*store.calls(step)}
    try:
        metas = {call: meta for call in calls if (meta := store.read_meta(step, call))}
    except DumpError as error:
        return f"have another format ({error.what})"
    if not metas:
        return ""
    places = [meta.info.get("place", 0) for meta in metas.values()]
    # Of calls that were made in another order, and one of them generated, two have one place.
    if len(places) <= max(places) and (gaps := {*range(max(places))} - {*places}):
        return f"lack call {compact(sorted(gaps))}, whose dump is missing or damaged"
    if lost := sorted((calls - metas.keys()) | ({*store.quarantined(step)} - calls)):
        named = ", ".join(store.place(step, call).name for call in lost)
        return f"lack {named}, which is damaged (once made again, prune --quarantined forgets it)"
    if differs := made_for_others(dumps, metas.values(), called_with):
        return differs
    if (ranks := store.world_size) > 1:
        listed = store.listed_by_step().get(step, ())
        shards = Counter(one.rank for one in listed if one.world_size == ranks)
        if len(shards) < ranks or len({*shards.values()}) > 1:
            return "lack the shard of another rank"
    return None


def made_for_others(
    dumps: Dumps, metas: Iterable[DumpMeta], called_with: Mapping[str, Any]
) -> str | None:
    """What dumps were made for instead, if that is a mismatch; prompts are not compared."""
    differing: list[str] = []
    by_host = {f"identity.{name}": value for name, value in called_with.items()}
    for made in (meta.identity for meta in metas if meta.identity):
        # The config decides a part of what is compared; the call adds the others, its function's
        # source among them.
        known = {name: by_host[name] for name in by_host.keys() & made.compared.keys()}
        ours = dumps.identities.conditions.adding(known)
        added = {k: v for k, v in made.compared.items() if not k.startswith(_OF_CONFIG)}
        source = {"code": made.noted["code"]} if "code" in made.noted else {}
        ours = Identity({**added, **ours.compared}, {**ours.noted, **source})
        differing += ours.differences(made)[0]
    named = "; ".join(dict.fromkeys(differing))
    return f"were made for other rollouts: {named}" if named else None


def _holes(skip: Role, facts: HostFacts) -> Iterator[Problem]:
    """The steps that a role lists, and can neither replay nor generate."""
    role, local, dumps = skip.role, skip.local_config, skip.dumps
    if dumps is None or local.on_miss != "error" or skip.support_online_step:
        return
    listed = [step for step in _due(skip, facts) if step in local.steps]
    missing = unusable(skip, listed, facts.called_with.get(role, {}))
    if not missing:
        return
    generate, found = to_generate(role, local), []
    remedy = f"generate them once with {generate}"
    for reason in sorted({*missing.values()}):
        steps = [step for step, why in missing.items() if why == reason]
        if reason:
            found.append(f"the dumps of steps {compact(steps)} in {dumps.directory} {reason}")
        else:
            found.append(f"steps {compact(steps)} have no usable dump in {dumps.directory}")
        if hidden := [*dumps.notices.other_shapes()] if not reason and steps == listed else []:
            found += hidden
            remedy = f"set back what differs, or {remedy}"
        if reason.startswith("were made"):
            remedy = "set back what differs, or name another skip.dump_dir and generate them "
            remedy += f"there once with {generate}"
    if killed := [step for step in missing if (dumps.directory / journal_name(step)).exists()]:
        remedy += f"; step {compact(killed)} has a journal, which dispatch.journal=true completes"
    # Without an engine every step must be listed.
    if (there := {*listed} - {*missing}) and not local.lacks_engine:
        remedy += f", or list those that have one: 'skip.steps=\"{compact(sorted(there))}\"'"
    yield Problem(f"skip.{role}.on_miss=error", "; ".join(found), as_given(remedy, role, local))


def _without_engine(roles: Roles, facts: HostFacts) -> Iterator[Problem]:
    """Steps that are not listed, and validation that is not replayed: both would generate."""
    for role, skip in roles.items():
        local, due = skip.local_config, _due(skip, facts)
        unlisted = [step for step in due if step not in local.steps]
        if unlisted and local.on_miss == "error" and not skip.support_online_step:
            what = f"steps {compact(unlisted)} are not listed and would generate, and "
            typed = f"'skip.steps=\"{compact(due)}\"'"
            typed = f"skip.{role}.steps=all" if skip.serves_validation else typed
            remedy = as_given(f"set {typed}", role, local)
            yield Problem(f"skip.{role}.steps", what + "skip.start_engine=false", remedy)
    for key, off in facts.validates.items() if VALIDATION_ROLE not in roles else ():
        what = "validation generates, and skip.start_engine=false"
        yield Problem(key, what, f"set {key}={off}, or skip.validation=replay")


def _due(skip: Role, facts: HostFacts) -> list[int]:
    """The steps at which the run will call the role, as far as they are certain.

    With dynamic sampling its last step is not: the run may end with that of the dumps.
    """
    due = list(facts.validated if skip.serves_validation else facts.steps)
    if due and facts.samples_dynamically and skip.dumps is not None and skip.role != "rollout_tq":
        dumped = StepStore(skip.dumps.directory).listed()
        due = [step for step in due if step <= max([due[0], *dumped])]
    return due


def _of_directories(all_dumps: Iterable[Dumps], here: bool) -> Iterator[Problem]:
    """Directories of two roles, and such as cannot be written, where a role may generate."""
    owners: dict[Path, str] = {}
    for dumps in all_dumps:
        role, local, directory = dumps.role, dumps.local_config, dumps.directory
        if (owner := owners.setdefault(directory, role)) != role:
            what = f"roles {owner} and {role} would both have their dumps in {directory}"
            remedy = f"give one of them another directory: skip.{role}.dump_dir=/another/directory"
            yield Problem(f"skip.{role}.dump_dir", what, remedy)
        if here and local.on_miss != "error" and (reason := cannot_write(directory)) is not None:
            what = f"{local.dump_dir} cannot be written ({reason}), and role {role} may generate"
            remedy = "name a directory that can be written; to use only the dumps that are there, "
            remedy = as_given(remedy + "set skip.on_miss=error", role, local)
            yield Problem(as_given("skip.dump_dir", role, local), what, remedy)
