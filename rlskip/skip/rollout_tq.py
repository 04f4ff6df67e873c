"""The role for groups: of trainers that submit prompts and later sample a replay buffer.

Where prompts are *submitted*, dumped groups enter the queue under the new uids, and only prompts
that have none reach the trainer's own function. Where a batch is *sampled*, the groups that were
generated are dumped. The root tags carry the step, position and content of their prompt, so it may
be in another process.

A trainer that discards groups has two seams more: those that are *evicted* are dumped with the next
sampled batch, and what the dump lacks of a *refill* is generated, which is not a mismatch.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rlskip.batch.columns import select, uids_of
from rlskip.config.facts import HostFacts
from rlskip.config.skip import SkipAction
from rlskip.errors import ConfigError, MismatchError
from rlskip.jobs.served import ledger_of
from rlskip.keys import DUMP_CONTENT, DUMP_POSITION, RUNNING, STATUS, dump_tag
from rlskip.skip.call import Call, Stage
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng
from rlskip.skip.groups import (
    EVICT,
    REFILL,
    SAMPLE,
    SUBMIT,
    GroupReplay,
    Plan,
    Submitted,
    by_content,
    groups_of_batch,
    is_complete,
    partition_of,
    phase_of,
    queue_of,
    without_superseded,
)
from rlskip.skip.role import Role
from rlskip.skip.run_dumps import Group, RunDumps, queued_groups
from rlskip.skip.step_calls import Key
from rlskip.store import CorruptDumpError, DumpError, DumpMeta, Identity, TooLargeDumpError
from rlskip.store.index import QUEUED
from rlskip.store.layout import part_name

log = logging.getLogger(__name__)


class GroupRole(Role):
    """Replays groups into the trajectory queue, prompt by prompt, and dumps those that leave it.

    Options of ``annotate``: `queue` (a :class:`~rlskip.queue.TrajectoryQueue`, or a function of
    the call's arguments that returns one), `partition_id` (default ``train``), and `phase`,
    ``submit`` (default), ``refill``, ``sample`` or ``evict``.
    """

    stage_options = frozenset({"queue", "partition_id", "phase"})
    dumps: Dumps

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        super().__init__(role, local_config)
        if local_config.match == "run":
            raise ConfigError(
                "the role matches prompt by prompt, in the dump of the step itself or of any",
                f"skip.{role}.match",
                f"set skip.{role}.match=prompt",
            )
        self.dumps = Dumps(role, local_config, facts)
        self._identities = self.dumps.identities
        self._ledger = ledger_of(self.dumps.directory)
        self._run = RunDumps(lambda: self.dumps.stores, self._ledger)
        self._repeats = local_config.action == SkipAction.REPEAT
        self._submitted: dict[int, Submitted] = {}
        # By step, what one dump has.
        self._evicted: list[tuple[int, dict[str, Any]]] = []

    def observes(self, stage: Stage) -> bool:
        return phase_of(stage) in (SAMPLE, EVICT)

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

    def find(self, call: Call) -> bool:
        plan = call.identity = self._plan(call)
        if plan.rest:
            self.dumps.notices.log_hidden()
            call.reason = str(plan) if plan.served else ""
        return not plan.rest

    def replay(self, call: Call) -> None:
        plan: Plan = call.identity
        metas, first = [*plan.metas.values()], next(iter(plan.metas))
        with call.timed():
            replay = self._replay(plan, call)
            if self.local_config.restore_rng:
                restore_rng(self.dumps.store.load(first.step, part="aside"))
            replay.put(queue_of(call), partition_of(call))
        self._count(call, plan.groups)
        took = sum(meta.info.get("seconds", 0.0) for meta in metas)
        call.facts["source"] = first.step
        call.facts["bytes"] = sum(map(self.dumps.store.size_of, metas))
        call.facts["seconds_saved"] = took - call.seconds if took else 0.0
        found = str(plan) if self.dumps.by_prompt else Key(first.step)
        self.dumps.notices.replayed(call.step, metas[0], found)

    def before_stage(self, call: Call) -> None:
        plan: Plan = call.identity
        queue, partition_id = queue_of(call), partition_of(call)
        # Without a `rest` the dump has just proved unusable, and all prompts are submitted.
        replay = self._replay_some(plan, call) if plan.served and plan.rest else None
        rest = plan.rest if replay else [*range(len(plan.uids))]
        if replay:
            # Running until the others are submitted, so that no sampler considers the step finished
            # before.
            roots = replay.roots.values()
            underway = [{**tag, STATUS: RUNNING} if STATUS in tag else tag for tag in roots]
            queue.put(list(replay.roots), partition_id, None, underway)
            call.cleanup.add(functools.partial(replay.put, queue, partition_id))
            log.info("rlskip: step %d: %s; the others are submitted", call.step, plan)
        submitted = self._submitted[call.step]
        first, submitted.generates = submitted.prompts, True
        self._count(call, plan.groups if replay else [])
        tags = [dump_tag(call.step, first + i, plan.contents[i]) for i in rest]
        queue.put([plan.uids[i] for i in rest], partition_id, tags=tags)

    def _count(self, call: Call, replayed: Iterable[Group | None]) -> None:
        """Count a submitted batch, and the groups that are `replayed`."""
        submitted, taken = self._submitted[call.step], {group for group in replayed if group}
        prompts = len(call.identity.uids)
        submitted.served |= taken
        submitted.prompts += prompts
        if self.dumps.by_prompt:
            self._ledger.serve(taken)
        if self.figures is not None:
            elsewhere = sum(group.key.step != call.step for group in taken)
            self.figures.append((prompts, len(taken), elsewhere, 0.0))

    # -- which group for which prompt --------------------------------------------------------

    def _plan(self, call: Call) -> Plan:
        step, refills = call.step, phase_of(call.stage) == REFILL
        submitted = self._submitted.setdefault(step, Submitted())
        if not refills:
            # The stage and arguments that differ from their defaults count for each prompt.
            if (arguments := self._identities.arguments_of(call)) is not None:
                usual = {n: v for n, v in arguments.values.items() if n in arguments.usual}
                arguments.values = usual
            made = self._identities.made_by(call, arguments, {})
            submitted.conditions = made.without("stage")
        present = submitted.conditions or self._identities.conditions
        contents = self._identities.contents_of(call)
        if self.dumps.by_prompt:
            where, match = "the run", self._by_prompt(step, contents, present)
        else:
            if submitted.found is None:
                submitted.source = self._source(step)
                submitted.found = self._dumped(submitted.source, present)
            where = f"the dump of step {submitted.source}"
            match = self._by_step(contents, submitted)
        metas: dict[Key, DumpMeta] = {}
        for key in dict.fromkeys(group.key for group in match if group and group.count):
            if meta := self.dumps.stores[key.size].read_meta(key.step, key.call):
                self._identities.differences(present, meta)  # logs what is noteworthy
                metas[key] = meta
        groups = [g if g and g.count and g.key in metas else None for g in match]
        plan = Plan(uids_of(call.prompts), contents, groups, metas, where)
        if None in match and submitted.found and not refills:
            self._judge(step, plan, submitted)
        return plan

    def _by_prompt(
        self, step: int, contents: Sequence[str | None], present: Identity
    ) -> list[Group | None]:
        """For each prompt the first complete group of the run that was generated for it."""
        self._run.first = step if self._run.first is None else self._run.first
        only = step if self.serves_validation else None
        choose = functools.partial(self._run.choose, contents, only=only)
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

    def _source(self, step: int) -> int:
        """The step whose dump is replayed at `step`: itself unless a repeat finds another."""
        nearest = self.dumps.store.nearest(step) if self._repeats else None
        return step if nearest is None else nearest

    def _parts(self, step: int) -> dict[Key, DumpMeta]:
        """The metas of a step's parts, up to the first missing number."""
        parts: dict[Key, DumpMeta] = {}
        try:
            while meta := self.dumps.store.read_meta(step, call := part_name(len(parts))):
                parts[Key(step, call)] = meta
        except (DumpError, OSError) as error:
            log.warning("rlskip: step %d of role %s is not replayed: %s", step, self.role, error)
            return {}
        return parts

    def _dumped(self, step: int, present: Identity) -> list[Group]:
        """The groups of a step's dump, if they were made under the `present` conditions."""
        metas = self._parts(step)
        groups = [group for key, meta in metas.items() for group in queued_groups(key, meta)]
        odd = next((group for group in groups if not present.fits(group.made)), None)
        if odd is None or self._repeats:
            return without_superseded(groups)
        self._reject(odd, present)
        return []

    def _reject(self, odd: Group, present: Identity, *, replaces: bool = True) -> None:
        differs = "; ".join(present.differences(odd.made)[0])
        what = f"the dump of step {odd.key.step} was made for another call: {differs}"
        self.dumps.reject(what, Key(odd.key.step, size=odd.key.size), replaces=replaces)

    def _judge(self, step: int, plan: Plan, submitted: Submitted) -> None:
        """Refuse a visit's first batch if the dump lacks prompts, which are not to be generated.

        The run that made the dump may have ended before a later batch.
        """
        source = submitted.source
        if self._submitted.get(source, submitted).generates:
            return
        what, told_apart = str(plan), self._repeats or any(plan.contents)
        if not told_apart:
            groups = len(submitted.found or ())
            what += f": only uids tell them apart, and it holds {groups} groups"
        if submitted.prompts and not self._repeats:
            log.info("rlskip: step %d: %s; what a later batch lacks is generated", step, what)
        elif self.local_config.on_mismatch == "error":
            remedy = self.dumps.ways_out("generates what the dump lacks and adds it")
            raise MismatchError(what, self.dumps.path_of(Key(source)), remedy)
        elif not told_apart:
            self.dumps.store.quarantine(source, what)

    # -- from the dump into the queue --------------------------------------------------------

    def _replay(self, plan: Plan, call: Call) -> GroupReplay:
        """All that enters the queue for the planned groups, verified, before any of it does."""
        from rlskip.queue import to_rows  # needs torch

        replay = GroupReplay()
        for dump, meta in plan.metas.items():
            groups = zip(plan.uids, plan.groups, strict=True)
            chosen = [(uid, group) for uid, group in groups if group and group.key == dump]
            store, step = self.dumps.stores[dump.size], Key(dump.step, size=dump.size)
            loaded = store.load(dump.step, call=dump.call, meta=meta)
            try:
                rows = to_rows(self.dumps.without_dropped(loaded["fields"]))
                replay.add(chosen, loaded, rows, call.step)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                what = "it does not hold groups of a queue"
                raise CorruptDumpError(what, self.dumps.path_of(step)) from error
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
            log.warning("rlskip: all prompts of step %d are submitted: %s", call.step, error)
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

    # -- from the queue into a dump ----------------------------------------------------------

    def keep(self, call: Call, result: Any) -> None:
        """Dump the groups that left the queue with `result`, as the next part of their step."""
        if (phase := phase_of(call.stage)) in (SUBMIT, REFILL):
            return  # the prompts are submitted; their rollouts are generated later
        batch = result[0] if isinstance(result, tuple) else result
        parts = groups_of_batch(queue_of(call), batch)
        if phase == EVICT:
            # With the next sampled batch: a dump without one would serve too few prompts.
            self._evicted += parts.items()
            return
        total = sum(len(part["groups"]) for part in parts.values())
        for step, part in parts.items():
            self._dump(step, part, call, call.seconds * len(part["groups"]) / total)
        while self._evicted:  # one that cannot be dumped keeps none of the others back
            self._dump(*self._evicted.pop(0), call, 0.0)

    def _dump(self, step: int, part: dict[str, Any], call: Call, seconds: float) -> None:
        """Write the next part of a step; `seconds` is its share of the sampling."""
        submitted, conditions = self._submitted.get(step), self._identities.conditions
        queued, n = [], conditions.compared["n"]
        for group in part["groups"]:
            root, whole = group["tags"][""], is_complete(group, part["keys"], n)
            queued.append([root[DUMP_CONTENT], root[DUMP_POSITION], whole])
        first, store = len(self._parts(step)), self.dumps.store
        about = {QUEUED: queued, "seconds": seconds, "place": first}
        dump = store.prepare(
            step,
            part,
            identity=(submitted and submitted.conditions) or conditions,
            info={**self.dumps.info(call, part["fields"]), **about},
            sidecar=capture_rng(),
        )
        with self._ledger.lock:  # who finds the dump knows that this process wrote it
            for number in itertools.count(first):  # another job may take one meanwhile
                meta, is_own = store.write(dump.named(part_name(number)))
                if is_own:
                    break
            self._ledger.write(Key(step, meta.call))
        call.record("dumped", step=step, call=meta.call, bytes=store.size_of(meta))
