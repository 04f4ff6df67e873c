"""The role for groups: of trainers that submit prompts and later sample a replay buffer.

Where prompts are *submitted*, dumped groups enter the queue under the new uids, and only prompts
that have none reach the trainer's own function. Where a batch is *sampled*, the groups that were
generated are dumped. That may be in another process: the root tags carry the step, position and
content of their prompt, and under which name it is kept what its rollouts depend on besides.

A trainer that discards groups has two seams more: those that are *evicted* are dumped with the next
sampled batch, and what the dump lacks of a *refill* is generated, which is not a mismatch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from rlskip import keys
from rlskip.batch.columns import select, uids_of
from rlskip.config.facts import HostFacts
from rlskip.errors import ConfigError, MismatchError
from rlskip.skip.call import Call, Stage
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng
from rlskip.skip.groups import (
    EVICT,
    REFILL,
    SAMPLE,
    SUBMIT,
    Entering,
    Plan,
    Submitted,
    groups_of_batch,
    is_complete,
    phase_of,
    queue_of,
    without_superseded,
)
from rlskip.skip.kept_config import keep_config, read_config
from rlskip.skip.preflight import made_for_others
from rlskip.skip.role import Role
from rlskip.skip.run_dumps import Group, groups_in
from rlskip.skip.stage_runner import not_dumped
from rlskip.store import CorruptDumpError, DumpError, Identity
from rlskip.store.index import QUEUED
from rlskip.store.layout import part_name, part_number

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
        self._submitted: dict[int, Submitted] = {}
        self._evicted: list[dict[str, Any]] = []  # what one dump has, each

    def observes(self, stage: Stage) -> bool:
        return phase_of(stage) in (SAMPLE, EVICT)

    def count(self, call: Call, result: Any, *, replayed: bool) -> tuple[int, int, int, float]:
        """Count prompts: some may be replayed where the stage ran for the others."""
        plan: Plan = call.found
        elsewhere = sum(group.key.step != call.step for group in plan.served)
        return len(plan.uids), len(plan.served), elsewhere, call.facts.get("seconds_saved", 0.0)

    def begin_visit(self) -> None:
        for submitted in self._submitted.values():
            submitted.prompts, submitted.found, submitted.served = 0, None, set()

    def prompts_dumped(self, step: int) -> int:
        """How many prompts the run that made the dump of `step` submitted there; 0 without one."""
        dumps = self.dumps
        if step not in self.local_config.steps or dumps.by_prompt:
            return 0
        dumped = self._dumped(self._source(step))
        if not dumps.repeats:
            dumped = [one for one in dumped if not made_for_others(dumps, [one.meta], {})]
        return max((one.position + 1 for one in dumped), default=0)

    def find(self, call: Call) -> bool:
        """Plan the batch, and load all that enters the queue for it before any of it does."""
        plan = call.found = self._plan(call)
        call.at_end(self._undo, call)
        if plan.rest:
            self.dumps.notices.log_hidden()
            call.reason = str(plan) if plan.served else ""
        if plan.served:
            with call.timed():
                plan.enters = self._load(plan, call)
        return bool(plan.served) and not plan.rest

    def replay(self, call: Call) -> None:
        plan: Plan = call.found
        first, metas = plan.served[0], plan.served.metas.values()
        if self.local_config.restore_rng:
            restore_rng(self.dumps.store.load(first.key.step, part="aside"))
        assert plan.enters is not None
        call.ending.pop_all()  # from here on it is not undone
        plan.enters.put(*queue_of(call))
        nbytes = sum(map(self.dumps.store.size_of, metas))
        took = sum(meta.info.get("seconds", 0.0) for meta in metas)
        call.is_served(first.key.step, nbytes, took)
        found = str(plan) if self.dumps.by_prompt else self.dumps.store.place(first.key.step)
        self.dumps.notices.replayed(call.step, first.meta, found)

    def before_stage(self, call: Call) -> None:
        plan: Plan = call.found
        (queue, partition_id), enters = queue_of(call), plan.enters
        call.ending.pop_all()  # from here on it is not undone
        # Without a `rest` the dump has just proved unusable.
        if plan.rest and enters and self._give_rest(call, plan):
            # Running until the others are submitted, so that no sampler considers the step finished
            # before.
            running = {keys.STATUS: keys.RUNNING}
            roots = enters.roots.values()
            underway = [{**tag, **running} if keys.STATUS in tag else tag for tag in roots]
            queue.put(list(enters.roots), partition_id, None, underway)
            call.at_end(enters.put, queue, partition_id)
            log.info("rlskip: step %d: %s; the others are submitted", call.step, plan)
        else:
            self._submitted[call.step].served.difference_update(plan.served)
            self.dumps.ledger.give_back(call.parts)
            plan.groups = [None] * len(plan.uids)  # all prompts are submitted
        self._submitted[call.step].generates = True
        try:
            made = keep_config(self.dumps.directory, call.identity.as_json())
        except OSError as error:
            not_dumped(self, call, error)
            return
        tags = [
            keys.dump_tag(call.step, plan.position + i, plan.contents[i] or None, made)
            for i in plan.rest
        ]
        queue.put([plan.uids[i] for i in plan.rest], partition_id, tags=tags)

    def _undo(self, call: Call) -> None:
        """A call that failed before any of it entered the queue is as if it had not been made."""
        plan: Plan = call.found
        if call.failed:
            submitted = self._submitted[call.step]
            submitted.prompts -= len(plan.uids)
            submitted.served.difference_update(plan.served)
            self.dumps.ledger.give_back(call.parts)

    def _give_rest(self, call: Call, plan: Plan) -> bool:
        """Let the stage get the prompts that have no group; whether it gets its prompts at all."""
        prompts = call.prompts
        if not any(arg is prompts for arg in (*call.args, *call.kwargs.values())):
            what = "%s; all prompts are submitted: no argument holds them"
            self.dumps.notices.once("computed", what, plan)
            return False
        rest = select(prompts, plan.rest)
        call.args = tuple(rest if arg is prompts else arg for arg in call.args)
        call.kwargs = {k: rest if v is prompts else v for k, v in call.kwargs.items()}
        return True

    # -- which group for which prompt --------------------------------------------------------

    def _plan(self, call: Call) -> Plan:
        step, refills = call.step, phase_of(call.stage) == REFILL
        submitted = self._submitted.setdefault(step, Submitted())
        within = submitted.identity if refills else None
        contents, present = self._identities.of_prompts(call, within)
        call.identity = present
        if present.says_more_than(self._identities.conditions):  # else who has no role resumes, too
            call.name = "groups"
        # The lock from the look until they are taken: of two batches that are submitted side by
        # side each gets groups of its own.
        with self.dumps.ledger.lock:
            if self.dumps.by_prompt:
                run = self.dumps.run
                run.first = step if run.first is None else run.first
                where, match = "the run", run.choose(contents, step, present)
                if None in match:
                    run.refuse_odd(call, contents, present)
            else:
                if submitted.found is None:
                    submitted.found = self._dumped(self._source(step))
                source = next((group.key.step for group in submitted.found), step)
                where = f"the dump of step {source}"
                match, odd = submitted.match(contents, None if self.dumps.repeats else present)
                if odd and not refills:
                    self._replace(odd, submitted, present)
            groups = [group if group and group.count else None for group in match]
            plan = Plan(uids_of(call.prompts), contents, groups, where, submitted.prompts)
            for meta in plan.served.metas.values():
                self._identities.differences(present, meta)  # logs what is noteworthy
                self._identities.learn(call, meta)
            if None in match and submitted.found and not refills:
                self._judge(step, plan, submitted)
            submitted.prompts += len(plan.uids)
            submitted.identity = submitted.identity if refills else present
            submitted.served.update(plan.served)
            # Nor do their sessions serve that are left in the step's journal: told before they are
            # loaded, because a dispatcher may be submitting the same prompts.
            own = (group for group in plan.served if group.key.root == self.dumps.directory)
            journaled = [group.journal_name for group in own if group.journal_name is not None]
            call.parts = [*(plan.served if self.dumps.by_prompt else ()), *journaled]
            self.dumps.ledger.serve(call.parts)
        return plan

    def _replace(self, odd: Sequence[Group], submitted: Submitted, present: Identity) -> None:
        """Refuse a batch because of these groups; or what is generated replaces their dumps.

        Dumps that differ more stay, and those that serve the visit.
        """
        served = {group.key for group in submitted.served}
        by_dump = {group.key: group for group in odd}
        differs = {key: present.differences(group.made)[0] for key, group in by_dump.items()}
        least = min(map(len, differs.values()))
        for key in [key for key in by_dump if len(differs[key]) == least]:
            self.dumps.reject_group(by_dump[key], differs[key], replaces=key not in served)
            submitted.found = [one for one in submitted.found or () if one.key != key]

    def _source(self, step: int) -> int:
        """The step whose dump is replayed at `step`: itself unless a repeat finds another."""
        nearest = self.dumps.store.nearest(step) if self.dumps.repeats else None
        return step if nearest is None else nearest

    def _dumped(self, step: int) -> list[Group]:
        """The groups of a step's dump."""
        groups, store = list[Group](), self.dumps.store
        try:
            found = map(part_number, {*store.calls(step), *store.quarantined(step)})
            numbers = sorted(number for number in found if number is not None)
            metas = {part: store.read_meta(step, part) for part in map(part_name, numbers)}
            # One may be gone, damaged or not readable now: what it had is a miss.
            if None in metas.values() or numbers != [*range(len(numbers))]:
                self._submitted.setdefault(step, Submitted()).generates = True
            for part, meta in metas.items():
                groups += groups_in(store.place(step, part), meta)
        except (DumpError, OSError) as error:
            log.warning("rlskip: step %d of role %s is not replayed: %s", step, self.role, error)
            return []
        return without_superseded(groups, self.dumps.repeats)

    def _judge(self, step: int, plan: Plan, submitted: Submitted) -> None:
        """Refuse a visit's first batch if the dump lacks prompts, which are not to be generated.

        The run that made the dump may have ended before a later batch.
        """
        groups = submitted.found or []
        source = groups[0].key.step
        if self._submitted.get(source, submitted).generates:
            return
        what, told_apart = str(plan), self.dumps.repeats or any(plan.contents)
        if not told_apart:
            what += f": only uids tell them apart, and it holds {len(groups)} groups"
        if submitted.prompts and not self.dumps.repeats:
            log.info("rlskip: step %d: %s; what a later batch lacks is generated", step, what)
        elif self.local_config.on_mismatch == "error":
            remedy = self.dumps.ways_out("generates what the dump lacks and adds it")
            raise MismatchError(what, str(self.dumps.store.place(source).directory), remedy)
        elif not told_apart:
            self.dumps.store.quarantine(source, what)

    # -- from the dump into the queue --------------------------------------------------------

    def _load(self, plan: Plan, call: Call) -> Entering:
        """All that enters the queue for the planned groups, verified."""
        from rlskip.queue import to_rows  # needs torch

        enters = Entering()
        for key, meta in plan.served.metas.items():
            groups = zip(plan.uids, plan.groups, strict=True)
            chosen = [(uid, group) for uid, group in groups if group and group.key == key]
            store = self.dumps.stores[key.root]
            step = store.place(key.step)
            loaded = store.load(key.step, call=key.call, meta=meta)
            try:
                fields = self.dumps.usable(loaded["fields"], meta, call, step)
                enters.add(chosen, loaded, to_rows(fields), call.step)
            except (MismatchError, CorruptDumpError):  # it lacks fields that this run needs
                raise
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                what = "it does not hold groups of a queue"
                raise CorruptDumpError(what, str(step.directory)) from error
            self.dumps.notices.changed(meta, store.directory)
        return enters

    # -- from the queue into a dump ----------------------------------------------------------

    def keep(self, call: Call, result: Any) -> None:
        """Dump the groups that left the queue with `result`, as the next part of their step."""
        if (phase := phase_of(call.stage)) in (SUBMIT, REFILL):
            self._identities.ran(call)
            return  # the prompts are submitted; their rollouts are generated later
        batch = result[0] if isinstance(result, tuple) else result
        parts = groups_of_batch(queue_of(call)[0], batch)
        if phase == EVICT:
            # With the next sampled batch: a dump without one would serve too few prompts.
            self._evicted += parts
            return
        total = sum(len(part["groups"]) for part in parts)
        for part in parts:
            self._dump(part, call, call.seconds * len(part["groups"]) / total)
        while self._evicted:  # one that cannot be dumped keeps none of the others back
            self._dump(self._evicted.pop(0), call, 0.0)

    def _dump(self, part: dict[str, Any], call: Call, seconds: float) -> None:
        """Write the next part of a step; `seconds` is its share of the sampling."""
        root = part["groups"][0]["tags"][""]
        step, made = root[keys.DUMP_STEP], root[keys.DUMP_IDENTITY]
        queued, n = [], self._identities.conditions.compared["n"]
        for group in part["groups"]:
            root, whole = group["tags"][""], is_complete(group, part["keys"], n)
            place = [root[keys.DUMP_CONTENT], root[keys.DUMP_POSITION]]
            queued.append([*place, whole, root.get(keys.JOURNAL_NAME)])
        store = self.dumps.store
        there = store.calls(step)
        first = next(number for number in itertools.count() if part_name(number) not in there)
        about = {QUEUED: queued, "seconds": seconds, "place": first}
        dump = store.prepare(
            step,
            part,
            identity=Identity.from_json(read_config(self.dumps.directory, made)),
            info={**self.dumps.info(call, part["fields"]), **about},
            sidecar=capture_rng(),
        )
        with self.dumps.ledger.lock:  # who finds the dump knows that this process wrote it
            for number in itertools.count(first):  # another job may take one meanwhile
                meta, is_own = store.write(dump.named(part_name(number)))
                if is_own:
                    break
            self.dumps.ledger.write(store.place(step, meta.call))
        call.record("dumped", step=step, call=meta.call, bytes=store.size_of(meta))
