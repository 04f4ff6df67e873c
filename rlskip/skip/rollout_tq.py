"""The role for groups: of trainers that submit prompts and later sample a replay buffer.

Where prompts are *submitted*, dumped groups enter the queue under the new uids, and only prompts
that have none reach the trainer's own function. Where a batch is *sampled*, the groups that were
generated are dumped. The root tags carry what that must know, so it may be in another process.

A trainer that discards groups has two seams more: those that are *evicted* are dumped with the next
sampled batch, and what the dump lacks of a *refill* is generated, which is not a mismatch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rlskip.batch.columns import select
from rlskip.batch.prompts import uids_of
from rlskip.config.facts import HostFacts
from rlskip.config.skip import SkipAction, to_generate
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.keys import RUNNING, STATUS, dump_tag
from rlskip.skip.call import Call
from rlskip.skip.dumps import restore_rng
from rlskip.skip.groups import GroupReplay, Plan, by_content, without_superseded
from rlskip.skip.queue_dumping import (
    REFILL,
    GroupDumps,
    Submitted,
    partition_of,
    phase_of,
    queue_of,
)
from rlskip.skip.run_dumps import Group, RunDumps, queued_groups
from rlskip.skip.step_calls import Key
from rlskip.store import (
    CorruptDumpError,
    DumpError,
    DumpMeta,
    Identity,
    TooLargeDumpError,
)

log = logging.getLogger(__name__)


class GroupRole(GroupDumps):
    """Replays groups into the trajectory queue, prompt by prompt, and dumps those that leave it.

    Options of ``annotate``: `queue` (a :class:`~rlskip.queue.TrajectoryQueue`, or a function of
    the call's arguments that returns one), `partition_id` (default ``train``), and `phase`,
    ``submit`` (default), ``refill``, ``sample`` or ``evict``.
    """

    stage_options = frozenset({"queue", "partition_id", "phase"})

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        super().__init__(role, local_config, facts)
        if local_config.match == "run":
            raise ConfigError(
                "the role matches prompt by prompt, in the dump of the step itself or of any",
                f"skip.{role}.match",
                f"set skip.{role}.match=prompt",
            )
        self._identities = self.dumps.identities
        self._run = RunDumps(lambda: self.dumps.stores, self._ledger)
        self._repeats = local_config.action == SkipAction.REPEAT

    def count(self, call: Call, result: Any, *, replayed: bool) -> None:
        """The seconds alone: prompts are counted as they are submitted."""
        if self.figures is not None and replayed:
            self.figures.append((0, 0, 0, call.facts["seconds_saved"]))

    def begin_visit(self) -> None:
        for submitted in self._submitted.values():
            submitted.prompts, submitted.found, submitted.served = 0, None, set()

    def prompts_dumped(self, step: int) -> int:
        """How many prompts the run that made the dump of `step` submitted there; 0 without one."""
        if step not in self.local_config.steps or self.dumps.by_prompt:
            return 0
        groups = self._dumped(self._source(step), self._identities.conditions)
        return groups[-1].position + 1 if groups else 0

    # -- submit ------------------------------------------------------------------------------

    def find(self, call: Call) -> bool:
        plan = call.identity = self._plan(call)
        if plan.rest:
            self.dumps.notices.log_hidden()
        if plan.served and plan.rest and self.local_config.on_miss == "error":
            call.record("miss", step=call.step)
            raise MissError(
                f"{plan}, and the stage must not run",
                f"skip.{self.role}.on_miss=error",
                f"generate the others once with {to_generate(self.role, self.local_config)}",
            )
        return not plan.rest

    def replay(self, call: Call) -> None:
        plan: Plan = call.identity
        with call.timed():
            replay = self._replay(plan, call)
            if self.local_config.restore_rng:
                restore_rng(self.dumps.store.load(plan.source, part="aside"))
            replay.put(queue_of(call), partition_of(call))
        self._count(plan, plan.groups)
        metas = [*plan.metas.values()]
        took = sum(meta.info.get("seconds", 0.0) for meta in metas)
        call.facts["source"] = metas[0].step
        call.facts["bytes"] = sum(map(self.dumps.store.size_of, metas))
        call.facts["seconds_saved"] = took - call.seconds if took else 0.0
        found = str(plan) if plan.by_prompt else Key(plan.source)
        self.dumps.notices.replayed(call.step, metas[0], found)

    def before_stage(self, call: Call) -> None:
        plan: Plan = call.identity
        queue, partition_id = queue_of(call), partition_of(call)
        # Without a `rest` the dump has just proved unusable, and all prompts are submitted.
        replay = self._replay_some(plan, call) if plan.served and plan.rest else None
        rest = [*range(len(plan.uids))] if replay is None else plan.rest
        if replay is not None:
            # Running until the others are submitted, so that no sampler considers the step finished
            # before.
            underway = [
                {**tag, STATUS: RUNNING} if STATUS in tag else tag for tag in replay.roots.values()
            ]
            queue.put(list(replay.roots), partition_id, None, underway)
            call.cleanup.add(functools.partial(replay.put, queue, partition_id))
            log.info("rlskip: step %d: %s; the others are submitted", call.step, plan)
        submitted = self._submitted[call.step]
        first, submitted.generates = submitted.prompts, True
        self._count(plan, plan.groups if replay is not None else [])
        tags = [dump_tag(call.step, first + i, plan.contents[i]) for i in rest]
        queue.put([plan.uids[i] for i in rest], partition_id, tags=tags)

    def _count(self, plan: Plan, replayed: Iterable[Group | None]) -> None:
        """Count a submitted batch, and the groups that are `replayed`."""
        submitted, taken = self._submitted[plan.step], {group for group in replayed if group}
        submitted.served |= taken
        if self.dumps.by_prompt:
            self._ledger.serve(taken)
        submitted.prompts += len(plan.uids)
        if self.figures is not None:
            elsewhere = sum(group.key.step != plan.step for group in taken)
            self.figures.append((len(plan.uids), len(taken), elsewhere, 0.0))

    # -- which group for which prompt --------------------------------------------------------

    def _plan(self, call: Call) -> Plan:
        submitted = self._submitted.setdefault(call.step, Submitted())
        refills, by_prompt = phase_of(call.stage) == REFILL, self.dumps.by_prompt
        if not refills:
            # The stage and arguments that differ from their defaults count for each prompt.
            arguments = self._identities.arguments_of(call)
            if arguments is not None:
                usual = {n: v for n, v in arguments.values.items() if n in arguments.usual}
                arguments.values = usual
            made = self._identities.made_by(call, arguments, {})
            submitted.conditions = made.without("stage")
        present = submitted.conditions or self._identities.conditions
        contents = self._identities.contents_of(call)
        if by_prompt:
            match = self._by_prompt(call.step, contents, present)
        else:
            if submitted.found is None:
                submitted.source = self._source(call.step)
                submitted.found = self._dumped(submitted.source, present)
            match = self._by_step(contents, submitted)
        metas: dict[Key, DumpMeta] = {}
        for key in dict.fromkeys(group.key for group in match if group and group.count):
            if meta := self.dumps.stores[key.size].read_meta(key.step, key.call):
                self._identities.differences(present, meta)  # logs what is noteworthy
                metas[key] = meta
        groups = [g if g and g.count and g.key in metas else None for g in match]
        uids = uids_of(call.prompts)
        plan = Plan(call.step, submitted.source, uids, contents, metas, groups, by_prompt)
        if None in match and submitted.found and not refills:
            self._judge(plan, submitted)
        return plan

    def _by_prompt(
        self, step: int, contents: Sequence[str | None], present: Identity
    ) -> list[Group | None]:
        """For each prompt the first complete group of the run that was generated for it."""
        self._run.first = step if self._run.first is None else self._run.first
        choose = functools.partial(self._run.choose, contents, step, alone=self.serves_validation)
        with self._ledger.lock:
            found = choose(lambda group: present.fits(group.made))
            if None in found and None not in (others := choose(lambda group: True)):
                odd = next(one for one in others if one and not present.fits(one.made))
                self._reject(odd, present, replaces=False)
        return found

    def _by_step(self, contents: Sequence[str | None], submitted: Submitted) -> list[Group | None]:
        """For each prompt a group that the visit found at its step, and has not used."""
        prompts = len(contents)
        if self._repeats:
            if len(submitted.left) < prompts:
                submitted.served.clear()  # one that used all starts over
            return [*submitted.left, *[None] * prompts][:prompts]
        if any(contents):  # they have more than uids
            return by_content(submitted.left, contents)
        return [*submitted.left] if len(submitted.left) == prompts else [None] * prompts

    def _dumped(self, step: int, present: Identity) -> list[Group]:
        """The groups of a step's dump, if they were made under the `present` conditions."""
        metas = self._parts(step)
        groups = [group for key, meta in metas.items() for group in queued_groups(key, meta)]
        if not self._repeats:
            odd = next((group for group in groups if not present.fits(group.made)), None)
            if odd is not None:
                self._reject(odd, present)
                return []
        return without_superseded(groups)

    def _reject(self, odd: Group, present: Identity, *, replaces: bool = True) -> None:
        differs = "; ".join(present.differences(odd.made)[0])
        what = f"the dump of step {odd.key.step} was made for another call: {differs}"
        self.dumps.reject(what, Key(odd.key.step, size=odd.key.size), replaces=replaces)

    def _judge(self, plan: Plan, submitted: Submitted) -> None:
        """Refuse a visit's first batch if the dump lacks prompts, which are not to be generated.

        The run that made the dump may have ended before a later batch.
        """
        if self._submitted.get(plan.source, submitted).generates:
            return
        what, told_apart = str(plan), self._repeats or any(plan.contents)
        if not told_apart:
            groups = len(submitted.found or ())
            what += f": only uids tell them apart, and it holds {groups} groups"
        if submitted.prompts and not self._repeats:
            log.info("rlskip: step %d: %s; what a later batch lacks is generated", plan.step, what)
        elif self.local_config.on_mismatch == "error":
            raise MismatchError(
                what,
                str(self.dumps.directory / str(plan.source)),
                self.dumps.ways_out("generates what the dump lacks and adds it"),
            )
        elif not told_apart:
            self.dumps.store.quarantine(plan.source, what)

    def _source(self, step: int) -> int:
        """The step whose dump is replayed at `step`: itself unless a repeat finds another."""
        nearest = self.dumps.store.nearest(step) if self._repeats else None
        return step if nearest is None else nearest

    # -- from the dump into the queue --------------------------------------------------------

    def _replay(self, plan: Plan, call: Call) -> GroupReplay:
        """All that enters the queue for the planned groups, verified, before any of it does."""
        replay = GroupReplay()
        for dump, meta in plan.metas.items():
            groups = zip(plan.uids, plan.groups, strict=True)
            chosen = [(uid, group) for uid, group in groups if group and group.key == dump]
            store = self.dumps.stores[dump.size]
            loaded = store.load(dump.step, call=dump.call, meta=meta)
            try:
                from rlskip.queue import to_rows  # needs torch

                rows = to_rows(self.dumps.without_dropped(loaded["fields"]))
                replay.add(chosen, loaded, rows, plan.step)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CorruptDumpError(
                    "it does not hold groups of a queue",
                    str(store.directory / str(dump.step)),
                ) from error
            step = Key(dump.step, size=dump.size)
            self.dumps.check_fields(loaded["fields"], meta, call, step, replaces=not dump.size)
            self.dumps.notices.changed(meta, store.directory)
        return replay

    def _replay_some(self, plan: Plan, call: Call) -> GroupReplay | None:
        """As `_replay` where some prompts are to be submitted; None when it must be all."""
        try:
            replay = self._replay(plan, call)
        except TooLargeDumpError:
            raise
        except DumpError as error:
            log.warning("rlskip: all prompts of step %d are submitted: %s", plan.step, error)
            return None
        prompts = call.prompts
        if not any(arg is prompts for arg in (*call.args, *call.kwargs.values())):
            what = "%s; all prompts are submitted: no argument holds them"
            self.dumps.notices.once("computed", what, plan)
            return None
        rest = select(prompts, plan.rest)
        call.args = tuple(rest if arg is prompts else arg for arg in call.args)
        call.kwargs = {k: rest if v is prompts else v for k, v in call.kwargs.items()}
        return replay
