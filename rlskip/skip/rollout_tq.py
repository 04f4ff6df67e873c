"""The role for groups: of trainers that submit prompts and later sample a replay buffer.

Such a stage has two seams. Where prompts are *submitted*, dumped groups enter the queue under
the new uids, and only the prompts that have none reach the trainer's own function. Where a
batch is *sampled*, the groups that were generated are dumped. The root tags
carry what the second seam must know, so the two may be in different processes.

A trainer that discards groups instead of sampling them (no variance in the reward, say) has two
more. Where groups are *evicted*, they are kept, and dumped with the next sampled batch. Where it
submits a *refill*, what the dump lacks is generated: it is not a mismatch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlskip.batch.columns import select
from rlskip.batch.prompts import uids_of
from rlskip.config.facts import HostFacts
from rlskip.config.skip import QUEUE_OPTIONS, SkipAction, to_generate
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.jobs.served import ledger_of
from rlskip.keys import RUNNING, STATUS, dump_tag
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, restore_rng
from rlskip.skip.groups import (
    DumpedGroup,
    GroupReplay,
    Plan,
    by_content,
    groups_of_parts,
    without_superseded,
)
from rlskip.skip.queue_dumping import (
    EVICT,
    REFILL,
    SAMPLE,
    GroupDumps,
    Submitted,
    partition_of,
    phase_of,
    queue_of,
)
from rlskip.skip.role import Role
from rlskip.skip.run_dumps import Group, RunDumps
from rlskip.skip.stage import Stage
from rlskip.skip.step_calls import Key
from rlskip.store import (
    CorruptDumpError,
    DumpError,
    DumpMeta,
    Identity,
    TooLargeDumpError,
)

log = logging.getLogger(__name__)


class GroupRole(Role):
    """Replays groups into the trajectory queue, prompt by prompt, and dumps those that leave it.

    Options of ``annotate``: `queue` (a :class:`~rlskip.queue.TrajectoryQueue`, or a function of
    the call's arguments that returns one), `partition_id` (default ``train``), and `phase`,
    ``submit`` (default), ``refill``, ``sample`` or ``evict``.
    """

    stage_options = QUEUE_OPTIONS

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        super().__init__(role, local_config)
        if local_config.match == "run":
            raise ConfigError(
                "the role matches prompt by prompt, in the dump of the step itself or of any",
                f"skip.{role}.match",
                f"set skip.{role}.match=prompt",
            )
        self.dumps: Dumps = Dumps(role, local_config, facts)
        self._identities = self.dumps.identities
        self._ledger = ledger_of(self.dumps.directory)
        self._groups = GroupDumps(self.dumps, self._ledger)
        self._run = RunDumps(lambda: self.dumps.stores, self._ledger)
        self._has_all: dict[tuple[str, Key, str], bool] = {}

    def observes(self, stage: Stage) -> bool:
        return phase_of(stage) in (SAMPLE, EVICT)

    def keep(self, call: Call, result: Any) -> None:
        self._groups.keep(call, result)

    def count(self, call: Call, result: Any, *, replayed: bool) -> None:
        """The seconds alone: prompts are counted as they are submitted."""
        if self.figures is not None and replayed:
            self.figures.append((0, 0, 0, call.facts["seconds_saved"]))

    def begin_visit(self) -> None:
        for submitted in self._groups.submitted.values():
            submitted.begin_visit()

    def prompts_dumped(self, step: int) -> int:
        """The number of prompts that were submitted at `step` in the run that made its dump.

        0 if nothing will be replayed: the step is not listed, or has no dump that fits the config.
        """
        if step not in self.local_config.steps or self.dumps.by_prompt:
            return 0
        metas = self._groups.parts(self._source(step))
        if not self._fits(metas, self._identities.conditions):
            return 0
        return max((group.position + 1 for group in groups_of_parts(metas)), default=0)

    # -- submit ------------------------------------------------------------------------------

    def find(self, call: Call) -> bool:
        plan = call.identity = self._plan(call)
        if plan.rest:
            self.dumps.notices.log_hidden(call)
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
        dumps = {group.key for group in plan.groups if group}
        used = [meta for key, meta in plan.metas.items() if key in dumps]
        took = sum(meta.info.get("seconds", 0.0) for meta in used)
        self._count(plan, plan.groups)
        call.facts.update(
            source=used[0].step,
            bytes=sum(map(self.dumps.store.size_of, used)),
            seconds_saved=took - call.seconds if took else 0.0,
        )
        found = str(plan) if plan.by_prompt else Key(plan.source)
        self.dumps.notices.replayed(call.step, used[0], found)

    def before_stage(self, call: Call) -> None:
        plan: Plan = call.identity
        queue, partition_id = queue_of(call), partition_of(call)
        replay = self._replay_some(plan, call)
        rest: Sequence[int] = range(len(plan.uids))
        if replay is not None:
            rest = plan.rest
            # Running until the others are submitted, so that no sampler considers the step finished
            # before.
            underway = [
                {**tag, STATUS: RUNNING} if STATUS in tag else tag for tag in replay.roots.values()
            ]
            queue.put(list(replay.roots), partition_id, None, underway)
            call.cleanup.add(functools.partial(replay.put, queue, partition_id))
            log.info("rlskip: step %d: %s; the others are submitted", call.step, plan)
        first = self._count(plan, plan.groups if replay is not None else [])
        submitted = self._groups.submitted[call.step]
        submitted.seconds = submitted.seconds or 0.0
        submitted.generated |= {(plan.contents[i], first + i) for i in rest}
        queue.put(
            [plan.uids[i] for i in rest],
            partition_id,
            tags=[dump_tag(call.step, first + i, plan.contents[i]) for i in rest],
        )

    def _count(self, plan: Plan, replayed: Iterable[DumpedGroup | None]) -> int:
        """Count a submitted batch; returns how many prompts its step had before."""
        submitted = self._groups.submitted[plan.step]
        taken = {group for group in replayed if group}
        submitted.served |= taken
        if self.dumps.by_prompt:
            self._ledger.serve(group.part for group in taken)
        submitted.prompts += len(plan.uids)
        if self.figures is not None:
            elsewhere = sum(group.key.step != plan.step for group in taken)
            self.figures.append((len(plan.uids), len(taken), elsewhere, 0.0))
        return submitted.prompts - len(plan.uids)

    # -- which group for which prompt --------------------------------------------------------

    def _plan(self, call: Call) -> Plan:
        submitted = self._groups.submitted.setdefault(call.step, Submitted())
        if phase_of(call.stage) != REFILL:
            # The stage and arguments that differ from their defaults count for each prompt.
            arguments = self._identities.arguments_of(call)
            if arguments is not None:
                usual = {n: v for n, v in arguments.values.items() if n in arguments.usual}
                arguments = attrs.evolve(arguments, values=usual)
            made = self._identities.made_by(call, arguments, {})
            submitted.conditions = made.without("stage")
        if self.dumps.by_prompt:
            return self._plan_by_prompt(call)
        return self._plan_by_step(call, submitted)

    def _plan_by_prompt(self, call: Call) -> Plan:
        """For each prompt the first complete group of the run that was generated for it."""
        uids, contents = uids_of(call.prompts), self._identities.contents_of(call)
        present = self._groups.submitted[call.step].conditions or self._identities.conditions
        self._run.first = call.step if self._run.first is None else self._run.first
        choose = functools.partial(
            self._run.choose, contents, call.step, alone=self.serves_validation
        )
        has = functools.partial(self._has, call)
        found = choose(lambda group: present.fits(group.made), has)
        if None in found and None not in (others := choose(lambda group: True)):
            odd = next(one for one in others if one and not present.fits(one.made))
            differs = "; ".join(present.differences(odd.made)[0])
            self._reject(odd.key.step, differs, odd.key.size, replaces=False)
        metas: dict[Key, DumpMeta] = {}
        for key in dict.fromkeys(one.key for one in found if one):
            meta = self.dumps.stores[key.size].read_meta(key.step, key.call)
            if meta is not None:
                self._identities.differences(present, meta)  # logs what is noteworthy
                metas[key] = meta
        groups = [DumpedGroup.of(one) if one and one.key in metas else None for one in found]
        return Plan(call.step, call.step, uids, contents, metas, groups, True)

    def _has(self, call: Call, group: Group) -> bool:
        """Whether the dump of a group has every field that this run needs."""
        if call.stage.lacks is None:
            return True
        known = call.stage.name, group.key, group.checksum
        if known not in self._has_all:
            store, key = self.dumps.stores[group.key.size], group.key
            try:
                meta = store.read_meta(key.step, key.call)
                if meta is None:
                    return False
                loaded = store.load(key.step, call=key.call, meta=meta)
                self._has_all[known] = not self.dumps.lacking(call, loaded["fields"], meta)
            except (DumpError, OSError, MemoryError, LookupError, TypeError):
                return False  # that it cannot be used its replay says
        return self._has_all[known]

    def _plan_by_step(self, call: Call, submitted: Submitted) -> Plan:
        """For each prompt a group of the step's own dump, or of the step that a repeat takes."""
        step, source = call.step, self._source(call.step)
        metas = self._groups.parts(source)
        uids, contents = uids_of(call.prompts), self._identities.contents_of(call)
        repeats = self.local_config.action == SkipAction.REPEAT
        if not self._fits(metas, submitted.conditions or self._identities.conditions):
            metas = {}
        known = any(content is not None for content in contents)
        under_way = self._groups.submitted.get(source, submitted).seconds is not None
        if under_way and source == step and (repeats or not known):
            metas = {}  # these groups may belong to another batch
        dumped = without_superseded(groups_of_parts(metas))
        left = submitted.left_of(dumped)
        if not repeats or len(left) >= len(uids):  # a repeat that used all starts over
            dumped = left
        match = [*dumped[: len(uids)], *[None] * (len(uids) - len(dumped))]  # by their positions
        if known and not repeats:
            match = by_content(dumped, contents)
        lacking = None in match or (not known and not repeats and len(dumped) != len(uids))
        whole = [group if group and group.complete else None for group in match]
        plan = Plan(step, source, uids, contents, metas, whole)
        if metas and lacking and not under_way and phase_of(call.stage) != REFILL:
            first = repeats or submitted.prompts == 0
            return self._judge(plan, dumped, known or repeats, first)
        return plan

    def _fits(self, metas: Mapping[Key, DumpMeta], present: Identity) -> bool:
        """Whether parts were made under the `present` conditions; if not, they may be refused."""
        for meta in metas.values() if self.local_config.action != SkipAction.REPEAT else ():
            if differs := "; ".join(self._identities.differences(present, meta)):
                self._reject(meta.step, differs)
                return False
        return True

    def _reject(self, step: int, differs: str, size: str = "", *, replaces: bool = True) -> None:
        what = f"the dump of step {step} was made for another call: {differs}"
        self.dumps.reject(what, Key(step, size=size), replaces=replaces)

    def _judge(self, plan: Plan, dumped: list[DumpedGroup], told_apart: bool, first: bool) -> Plan:
        """What to do with a batch for which the dump lacks prompts.

        What one that is not the `first` of the visit lacks is generated: the run that made the dump
        may have ended before.
        """
        what = str(plan)
        if not told_apart:
            what = (
                f"the dump of step {plan.source} holds {len(dumped)} groups for the batch's "
                f"{len(plan.uids)} prompts, and only uids tell which group is for which prompt"
            )
        if not first:
            log.info("rlskip: step %d: %s; what a later batch lacks is generated", plan.step, what)
        if self.local_config.on_mismatch == "regenerate" or not first:
            if told_apart:
                return plan
            if first:
                self.dumps.store.quarantine(plan.source, what)
            return attrs.evolve(plan, metas={}, groups=[None] * len(plan.uids))
        raise MismatchError(
            what,
            str(self.dumps.directory / str(plan.source)),
            self.dumps.ways_out("generates what the dump lacks and adds it"),
        )

    def _source(self, step: int) -> int:
        """The step whose dump is replayed at `step`: itself unless a repeat finds another."""
        repeats = self.local_config.action == SkipAction.REPEAT
        nearest = self.dumps.store.nearest(step) if repeats else None
        return step if nearest is None else nearest

    # -- from the dump into the queue --------------------------------------------------------

    def _replay(self, plan: Plan, call: Call) -> GroupReplay:
        """All that enters the queue for the planned groups, verified, before any of it does."""
        replay = GroupReplay()
        for dump, meta in plan.metas.items():
            groups = zip(plan.uids, plan.groups, strict=True)
            chosen = [(uid, group) for uid, group in groups if group and group.key == dump]
            if not chosen:
                continue
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
        if not plan.served or not plan.rest:
            return None  # without a rest the dump has just proved unusable
        try:
            replay = self._replay(plan, call)
        except TooLargeDumpError:
            raise
        except DumpError as error:
            log.warning("rlskip: all prompts of step %d are submitted: %s", plan.step, error)
            return None
        if call.replace_prompts(select(call.prompts, plan.rest)):
            return replay
        self.dumps.notices.once(
            "computed", "%s; all prompts are submitted: no argument holds them", plan
        )
        return None
