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
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlskip.batch.columns import select
from rlskip.batch.prompts import uids_of
from rlskip.config.facts import HostFacts
from rlskip.config.skip import QUEUE_OPTIONS, VALIDATION_ROLE, SkipAction
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.format.fingerprint import contents_of
from rlskip.keys import REPLAYED, RUNNING, STATUS, STEP_TAGS, dump_tag
from rlskip.queue import Row, Tag, TrajectoryQueue, to_rows
from rlskip.skip.call import Call, Stage
from rlskip.skip.dumps import Dumps, restore_rng, seconds_saved
from rlskip.skip.groups import (
    DumpedGroup,
    QueuedGroup,
    by_content,
    by_position,
    uid_of,
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
from rlskip.skip.visit import Found
from rlskip.store import (
    CorruptDumpError,
    DumpError,
    DumpMeta,
    UnsupportedTypeError,
)

log = logging.getLogger(__name__)


@attrs.frozen
class _Plan:
    """What becomes of a submitted batch: which prompts are replayed, and from where."""

    step: int
    source: int
    uids: list[str]
    contents: list[str | None]
    metas: list[DumpMeta]
    groups: list[DumpedGroup | None]  # for each prompt the complete group that replaces it

    @property
    def rest(self) -> list[int]:
        """The prompts to generate."""
        return [i for i, group in enumerate(self.groups) if group is None]

    @property
    def served(self) -> int:
        return len(self.groups) - len(self.rest)

    def __str__(self) -> str:
        return (
            f"the dump of step {self.source} serves {self.served} of the batch's "
            f"{len(self.uids)} prompts"
        )


@attrs.frozen
class _Replay:
    """What enters the queue for the prompts that are replayed."""

    roots: dict[str, Tag]
    bare: dict[str, Tag]  # markers, and rows that no batch takes: tags only
    rows: list[dict[str, tuple[Row, Tag]]]  # one mapping for each part: fields may differ


class GroupRole(Role):
    """Replays groups into the trajectory queue, prompt by prompt, and dumps those that leave it.

    Options of ``annotate``: `queue` (a :class:`~rlskip.queue.TrajectoryQueue`, or a function of
    the call's arguments that returns one), `partition_id` (default ``train``), and `phase`,
    ``submit`` (default), ``refill``, ``sample`` or ``evict``.
    """

    stage_options = QUEUE_OPTIONS
    first_part = 0

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        super().__init__(role, local_config)
        if local_config.match == "run":
            raise ConfigError(
                "the role matches prompt by prompt, in the dump of the step itself",
                f"skip.{role}.match",
                f"set skip.{role}.match=step",
            )
        self.serves_validation = role == VALIDATION_ROLE
        self.dumps: Dumps = Dumps(role, local_config, facts)
        self._groups = GroupDumps(self.dumps)

    def observes(self, stage: Stage) -> bool:
        return phase_of(stage) in (SAMPLE, EVICT)

    def keep(self, call: Call, result: Any) -> None:
        self._groups.keep(call, result)

    def prompts_dumped(self, step: int) -> int:
        """The number of prompts that were submitted at `step` in the run that made its dump.

        0 if nothing will be replayed: the step is not listed, or has no dump that fits the config.
        """
        if step not in self.local_config.steps:
            return 0
        metas = self._groups.parts(self._source(step))
        if not self._fits(metas):
            return 0
        groups = (g for part, meta in enumerate(metas) for g in DumpedGroup.of_part(part, meta))
        return max((group.position + 1 for group in groups), default=0)

    # -- submit ------------------------------------------------------------------------------

    def find(self, call: Call) -> bool:
        plan = call.identity = self._plan(call)
        if plan.served and plan.rest and self.local_config.on_miss == "error":
            call.record("miss", step=call.step)
            raise MissError(
                f"{plan}, and the stage must not run",
                f"skip.{self.role}.on_miss=error",
                "generate the others once with skip.on_miss=generate",
            )
        return not plan.rest

    def replay(self, call: Call) -> None:
        plan: _Plan = call.identity
        store, began = self.dumps.store, time.perf_counter()
        replay = self._replay(plan, call)
        if self.local_config.restore_rng:
            restore_rng(store.load_sidecar(plan.source, part=0))
        _put(replay, queue_of(call), partition_of(call))
        used = [plan.metas[part] for part in sorted({g.part for g in plan.groups if g})]
        self._count(plan, plan.groups)
        call.facts.update(
            source=plan.source,
            bytes=sum(map(store.size_of, used)),
            seconds_saved=seconds_saved(used, time.perf_counter() - began),
        )
        self.dumps.notices.replayed(call.step, plan.metas[0], Found(plan.metas[0].step))

    def before_stage(self, call: Call) -> None:
        plan: _Plan = call.identity
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
            call.cleanup.add(functools.partial(_put, replay, queue, partition_id))
            log.info("rlskip: step %d: %s; the others are submitted", call.step, plan)
        first = self._count(plan, plan.groups if replay is not None else [])
        submitted = self._groups.submitted[call.step]
        submitted.seconds = submitted.seconds or 0.0
        queue.put(
            [plan.uids[i] for i in rest],
            partition_id,
            tags=[dump_tag(call.step, first + i, plan.contents[i]) for i in rest],
        )

    def _count(self, plan: _Plan, replayed: Iterable[DumpedGroup | None]) -> int:
        """Count a submitted batch; returns how many prompts its step had before."""
        submitted = self._groups.submitted[plan.step]
        submitted.served |= {(group.part, group.index) for group in replayed if group}
        submitted.prompts += len(plan.uids)
        return submitted.prompts - len(plan.uids)

    # -- which group for which prompt --------------------------------------------------------

    def _plan(self, call: Call) -> _Plan:
        step, source = call.step, self._source(call.step)
        metas = self._groups.parts(source)
        uids, contents = self._contents(call)
        repeats = self.local_config.action == SkipAction.REPEAT
        if not self._fits(metas):
            metas = []
        # A dump without an identity (an imported one) names no contents: it goes by place.
        nameless = bool(metas) and all(meta.identity is None for meta in metas)
        known = not nameless and any(content is not None for content in contents)
        refill = phase_of(call.stage) == REFILL
        submitted = self._groups.submitted.setdefault(step, Submitted())
        if not refill:
            submitted.prompts, submitted.served = 0, set()
        under_way = self._groups.submitted.get(source, submitted).seconds is not None
        if under_way and source == step and (repeats or not known):
            metas = []  # these groups may belong to another batch
        parts = [DumpedGroup.of_part(part, meta) for part, meta in enumerate(metas)]
        dumped = without_superseded([group for part in parts for group in part])
        dumped = [group for group in dumped if (group.part, group.index) not in submitted.served]
        match = by_position(dumped, len(uids))
        if known and not repeats:
            match = by_content(dumped, contents)
        lacking = None in match or (not known and not repeats and len(dumped) != len(uids))
        plan = _Plan(step, source, uids, contents, metas, _whole(match))
        if metas and lacking and not under_way and not refill:
            return self._judge(plan, dumped, known or repeats)
        return plan

    def _fits(self, metas: Sequence[DumpMeta]) -> bool:
        """Whether parts were made under conditions that this run accepts."""
        return self.local_config.action == SkipAction.REPEAT or all(map(self._is_accepted, metas))

    def _is_accepted(self, meta: DumpMeta) -> bool:
        """Whether a part was made under the conditions of this run, or may be replayed anyway."""
        differs = self.dumps.differences(self.dumps.conditions, meta)
        what = f"the dump of step {meta.step} was made for another call: {'; '.join(differs)}"
        return not differs or self.dumps.accept_mismatch(what, Found(meta.step))

    def _contents(self, call: Call) -> tuple[list[str], list[str | None]]:
        """The prompts' uids and their contents.

        Raises
        ------
        UnsupportedTypeError
            The prompts cannot be compared, and ``on_mismatch`` is ``error``. Else the contents are
            None.
        """
        uids = uids_of(call.prompts)
        try:
            # What the config adds is compared once for the whole dump.
            usual = self.dumps.conditions.extra
            extra = {k: v for k, v in self.dumps.extra_of(call).items() if k not in usual}
            if (arguments := self.dumps.arguments_of(call)) is not None:
                extra |= {f"arguments.{name}": value for name, value in arguments.given.items()}
            return uids, contents_of(call.prompts, extra, call.stage.stage)
        except UnsupportedTypeError as error:
            self.dumps.refuse_uncomparable(error)
            return uids, [None] * len(uids)

    def _judge(self, plan: _Plan, dumped: list[DumpedGroup], told_apart: bool) -> _Plan:
        """What to do with a batch for which the dump lacks prompts."""
        policy = self.local_config.on_mismatch
        what = str(plan)
        if not told_apart:
            what = (
                f"the dump of step {plan.source} holds {len(dumped)} groups for the batch's "
                f"{len(plan.uids)} prompts, and only uids tell which group is for which prompt"
            )
        if policy == "regenerate":
            if told_apart:
                return plan
            self.dumps.store.quarantine(plan.source, what)
            return attrs.evolve(plan, metas=[], groups=[None] * len(plan.uids))
        if policy == "ignore" and len(dumped) >= len(plan.uids):
            self.dumps.notices.once("ignored", "%s; replayed in order (on_mismatch=ignore)", what)
            return attrs.evolve(plan, groups=_whole(by_position(dumped, len(plan.uids))))
        raise MismatchError(
            what,
            str(self.dumps.directory / str(plan.source)),
            f"choose one: skip.{self.role}.on_mismatch=regenerate generates what the dump lacks "
            "and adds it; on_mismatch=ignore replays in order if there are at least as many "
            "groups as prompts; another skip.dump_dir or "
            f"{self.dumps.facts.key('experiment')} starts from nothing",
        )

    def _source(self, step: int) -> int:
        """The step whose dump is replayed at `step`: itself unless a repeat finds another."""
        if self.local_config.action != SkipAction.REPEAT:
            return step
        nearest = self.dumps.store.nearest(step, part=0)
        return step if nearest is None else nearest

    # -- from the dump into the queue --------------------------------------------------------

    def _replay(self, plan: _Plan, call: Call) -> _Replay:
        """All that enters the queue for the planned groups, verified, before any of it does."""
        replay = _Replay({}, {}, [])
        for part in range(len(plan.metas)):
            groups = zip(plan.uids, plan.groups, strict=True)
            chosen = [(uid, group) for uid, group in groups if group and group.part == part]
            if not chosen:
                continue
            loaded = self.dumps.store.load(plan.source, part=part)
            try:
                fields = loaded["fields"]
                self._add(replay, plan, chosen, loaded)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CorruptDumpError(
                    "it does not hold groups of a queue",
                    str(self.dumps.directory / str(plan.source)),
                ) from error
            self.dumps.check_fields(fields, plan.metas[part], call)
        return replay

    def _add(
        self, replay: _Replay, plan: _Plan, chosen: list[tuple[str, DumpedGroup]], loaded: Any
    ) -> None:
        """Add the chosen groups of a part to `replay`, under their new uids."""
        columns = to_rows(self.dumps.without_dropped(loaded["fields"]))
        fields = dict(zip(loaded["keys"], columns, strict=True))
        rows: dict[str, tuple[Row, Tag]] = {}
        new_keys: dict[str, str] = {}
        for uid, dumped in chosen:
            old = QueuedGroup(**loaded["groups"][dumped.index])
            for suffix, tag in {"": old.root, **old.tags}.items():
                key = uid + suffix
                if suffix and uid_of(key) != uid:
                    raise ValueError(f"{suffix!r} is not a row or a marker of a group")
                tag = _shifted(tag, plan.step - plan.source)
                row = fields.get(old.uid + suffix)
                if not suffix:
                    replay.roots[key] = _replayed(tag, plan.source)
                elif row is None:
                    replay.bare[key] = tag
                else:
                    rows[key] = (_renamed(row, old.uid, uid), tag)
                    new_keys[old.uid + suffix] = key
        # In the order in which they were sampled: a sampler that takes rows in order of arrival
        # then sums in the same order.
        sampled = (new_keys[key] for key in loaded["keys"] if key in new_keys)
        replay.rows.append({key: rows[key] for key in sampled})

    def _replay_some(self, plan: _Plan, call: Call) -> _Replay | None:
        """As `_replay` where some prompts are to be submitted; None when it must be all."""
        if not plan.served or not plan.rest:
            return None  # without a rest the dump has just proved unusable
        try:
            replay = self._replay(plan, call)
        except DumpError as error:
            log.warning("rlskip: all prompts of step %d are submitted: %s", plan.step, error)
            return None
        if call.replace_prompts(select(call.prompts, plan.rest)):
            return replay
        self.dumps.notices.once(
            "computed", "%s; all prompts are submitted: no argument holds them", plan
        )
        return None


def _put(replay: _Replay, queue: TrajectoryQueue, partition_id: str) -> None:
    """Rows, then markers, then all roots at once: no group is finished before it is complete."""
    for rows in replay.rows:
        if rows:
            fields, tags = zip(*rows.values(), strict=True)
            queue.put(list(rows), partition_id, fields, tags)
    for tags_only in (replay.bare, replay.roots):
        if tags_only:
            queue.put(list(tags_only), partition_id, tags=list(tags_only.values()))


def _whole(match: Sequence[DumpedGroup | None]) -> list[DumpedGroup | None]:
    return [group if group is not None and group.complete else None for group in match]


def _shifted(tag: Tag, steps: int) -> Tag:
    """As the trajectory would be tagged, had it been generated so many steps later."""
    return {
        name: value + steps if name in STEP_TAGS and isinstance(value, int) else value
        for name, value in tag.items()
    }


def _replayed(root: Tag, source: int) -> Tag:
    to_dump: Mapping[str, Any] = dump_tag(0, 0, None)
    return {**{name: root[name] for name in root if name not in to_dump}, REPLAYED: source}


def _renamed(row: Row, old: str, new: str) -> Row:
    return {**row, "uid": new} if row.get("uid") == old else row
