"""One call of `sample`: its arguments, what it evicted, its metrics and its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from rlskip.keys import ROLLOUT_ROOT_KEYS, TRAIN
from rlskip.queue.filtering import GroupFilter
from rlskip.queue.incomplete import IncompleteRolloutError, ReplayTimeoutError, name_prompts
from rlskip.queue.partitions import Partition
from rlskip.queue.protocol import KVBatchMeta, Tag
from rlskip.queue.readiness import PromptGroup, PromptOutcome, State


@attrs.define
class Eviction:
    """What one look decides: the groups to evict, by cause, and the prompts to replace.

    Each of these comes with the number of refills in a row that its replacement will have had.
    `now` begins with what earlier evictions left, `later` is left for the next.
    """

    now: list[tuple[PromptOutcome, int]]
    later: list[tuple[PromptOutcome, int]] = attrs.field(factory=list)
    stale: list[PromptGroup] = attrs.field(factory=list)
    dropped: list[PromptGroup] = attrs.field(factory=list)
    refilled: list[PromptGroup] = attrs.field(factory=list)
    rejected: list[PromptGroup] = attrs.field(factory=list)

    @property
    def groups(self) -> list[PromptGroup]:
        return [*self.stale, *self.dropped, *self.refilled, *self.rejected]

    def replace(self, groups: Sequence[PromptGroup], refills: Sequence[int] = ()) -> None:
        """Have these prompts replaced."""
        outcomes = [group.outcome() for group in groups]
        self.now += zip(outcomes, refills or [0] * len(outcomes), strict=True)


@attrs.define
class SampleCall:
    """One call of `sample`: its arguments, when it began, and what it evicted."""

    # Every prompt that the call evicted was counted once: as stale, dropped, refilled, rejected or
    # surplus. `submitted` counts the prompts that replace them.
    # `awaited` has those of `uids` that the call has not evicted.
    step: int
    partition: Partition
    batch_size: int | None
    uids: set[str] | None  # the prompts to sample; None: all
    group_filter: GroupFilter | None
    started: float  # on the buffer's clock, in seconds
    logged: float  # when the last progress line was written
    stale_spans: list[int] = attrs.field(factory=list)
    refilled: int = 0
    short: int = 0
    dropped: list[PromptOutcome] = attrs.field(factory=list)
    submitted: int = 0
    #: The groups that the filter rejected, by the value of the metric; those that no batch took.
    rejected: Counter[float] = attrs.field(factory=Counter)
    surplus: int = 0
    most: int = 1  # prompts that were there at once
    awaited: set[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.awaited = set(self.uids or ())

    @property
    def only_step(self) -> int | None:
        """The step whose prompts are sampled; None for any step."""
        return self.step if self.batch_size is None else None

    @property
    def discards_surplus(self) -> bool:
        """Whether all that was submitted is awaited, and what the batch does not take deleted."""
        return self.group_filter is not None and self.group_filter.discards_surplus

    def __str__(self) -> str:
        return f"partition {self.partition.name!r}, step {self.step}"

    def groups(self, state: State) -> Iterator[PromptGroup]:
        """The groups in `state` that the call may sample, the oldest first."""
        return self.partition.groups(state, self.only_step, self.uids)

    def count(self, state: State) -> int:
        """Their number."""
        return self.partition.count(state, self.only_step, self.uids)

    def wanted(self) -> int:
        """How many prompts the call samples: the most that were there at once, if no number."""
        states = State.COMPLETE, State.RUNNING, State.INCOMPLETE
        self.most = max(self.most, sum(map(self.count, states)))
        return self.most if self.batch_size is None else self.batch_size

    def count_evicted(self, found: Eviction, uids: Sequence[str]) -> None:
        """Count what was evicted, and wait for the prompts that replace it."""
        self.stale_spans += [self.step - (group.step or 0) + 1 for group in found.stale]
        self.dropped += [group.outcome() for group in found.dropped]
        self.refilled += len(found.refilled)
        self.rejected.update(group.metric for group in found.rejected)
        self.submitted += len(uids)
        self.awaited.difference_update(group.uid for group in found.groups)
        if self.uids is not None:
            self.uids.update(uids)
            self.awaited.update(uids)

    def announced(self) -> list[str]:
        """The uids of replacements that the queue does not hold yet."""
        return [group.uid for group in self.partition.groups(State.ANNOUNCED, None, self.uids)]

    def absent(self) -> list[str]:
        """The uids that the call waits for and cannot sample: somebody else deleted them, say."""
        if self.batch_size is not None:
            return []
        states = State.COMPLETE, State.RUNNING, State.INCOMPLETE
        there = {group.uid for state in states for group in self.groups(state)}
        return sorted(self.awaited - there - {*self.announced()})

    def running(self) -> list[PromptOutcome]:
        """The running prompts that the call waits for."""
        return [group.outcome() for group in self.groups(State.RUNNING)]

    def situation(self) -> str:
        """What there is to sample and what is missing, in one line."""
        partition = self.partition
        complete, running, sampled = map(self.count, (State.COMPLETE, State.RUNNING, State.SAMPLED))
        refills, absent = self.announced(), self.absent()
        every = complete + running + len(refills) + len(absent)
        wanted = every if self.batch_size is None else self.batch_size
        facts = [f"{complete} of {wanted} prompts are complete, {running} are running"]
        if partition.about_to_be_stale(self.step):
            facts.append("running prompts that are about to be stale come first")
        if refills:
            facts.append(f"refills that have not arrived: {_names(refills)}")
        if absent:
            facts.append(f"not submitted at this step, or deleted: {_names(absent)}")
        if self.dropped:
            facts.append(f"{len(self.dropped)} were incomplete and dropped")
        if self.rejected:
            facts.append(self.rejections())
        if sampled:
            facts.append(f"{sampled} were sampled before")
        if orphaned := [group.uid for group in partition.groups(State.ORPHANED)]:
            facts.append(f"keys without a prompt that has a step: {_names(orphaned)}")
        return "; ".join(facts)

    def batch(
        self,
        groups: Sequence[PromptGroup],
        rows_of: Callable[[PromptGroup], Iterable[tuple[str, Tag]]],
    ) -> KVBatchMeta:
        """These groups as a batch of these rows of each."""
        # Two lists, not a list of pairs: a million tuples slow down the garbage collector.
        keys: list[str] = []
        tags: list[Any] = []  # KVBatchMeta copies them
        for group in groups:
            for key, tag in rows_of(group):
                keys.append(key)
                tags.append(tag)
        roots = {ROLLOUT_ROOT_KEYS: [group.uid for group in groups]}
        return KVBatchMeta(keys, tags, self.partition.name, extra_info=roots)

    def metrics(self) -> dict[str, float]:
        """What the call evicted, under the names that verl logs."""
        counts = len(self.dropped), self.refilled, self.short
        metrics = sample_metrics(self.partition.name, self.stale_spans, *counts)
        prefix = "training" if self.partition.name == TRAIN else "validation"
        if rejected := self.rejected.total():
            metrics[f"{prefix}/filter_groups/evicted_samples"] = rejected
        if self.surplus:
            metrics[f"{prefix}/filter_groups/discarded_surplus_samples"] = self.surplus
        return metrics

    # -- errors --------------------------------------------------------------------------------

    def rejections(self, more: Sequence[PromptGroup] = ()) -> str:
        """How many groups were rejected, and by what."""
        counts = self.rejected + Counter(group.metric for group in more)
        assert self.group_filter is not None
        values = ", ".join(
            f"{value:g} in {count}" for value, count in sorted(counts.items(), key=str)
        )
        return (
            f"the filter {self.group_filter.name!r} rejected {counts.total()} groups (a metric "
            f"that is the same in all rows, or not a number): {values}"
        )

    def rejected_too_many(
        self, passed: int, rejected: Sequence[PromptGroup]
    ) -> IncompleteRolloutError:
        what = (
            f"{passed} of {self.wanted()} groups passed the filter, and {self.submitted} more "
            f"prompts, the most allowed, were submitted; {self.rejections(rejected)}"
        )
        remedy = (
            "are the prompts too easy or too hard? Raise replay.max_refills or the filter's "
            "max_submitted; for verl, algorithm.filter_groups.max_num_gen_batches (0: no limit)"
        )
        return self._error(what, remedy, [group.outcome() for group in rejected])

    def incomplete(
        self, prompts: Sequence[PromptOutcome], when: str = "", what: str = "incomplete "
    ) -> IncompleteRolloutError:
        said = f"{what or 'incomplete '}groups{f' {when}' if when else ''}:{name_prompts(prompts)}"
        remedy = (
            "find the cause in the logs of the sessions; replay.on_incomplete can drop, refill or "
            "accept such groups (raise, drop, refill, min_viable)"
        )
        return self._error(said, remedy, prompts)

    def timed_out(self, now: float) -> IncompleteRolloutError:
        missing = self.running() + [self.partition.find(uid).outcome() for uid in self.absent()]
        if self.rejected:
            missing += [outcome for outcome, _ in self.partition.owed]
        situation = f"{self.situation()}{name_prompts(missing)}"
        what = f"no batch after {now - self.started:.1f} s; {situation}"
        remedy = (
            "find out why the sessions are missing; raise replay.timeout_s if they are only slow"
        )
        return self._error(what, remedy, missing, ReplayTimeoutError)

    def _error(
        self,
        what: str,
        remedy: str,
        prompts: Sequence[PromptOutcome],
        kind: type[IncompleteRolloutError] = IncompleteRolloutError,
    ) -> IncompleteRolloutError:
        name = self.partition.name
        return kind(what, str(self), remedy, partition=name, step=self.step, prompts=prompts)


def _names(uids: Iterable[str], most: int = 10) -> str:
    uids = list(uids)
    return ", ".join(uids[:most]) + (f" and {len(uids) - most} more" if len(uids) > most else "")


def sample_metrics(
    partition: str, spans: Sequence[int], dropped: int, refilled: int = 0, short: int = 0
) -> dict[str, float]:
    """Numbers of prompts, and steps that stale ones spanned, under the names that verl logs."""
    metrics: dict[str, float] = {
        "off_policy/evicted_samples": len(spans),
        "rollout_failure/evicted_samples": dropped + refilled,
        "rollout_failure/refilled_samples": refilled,
        "rollout_failure/short_samples": short,
    }
    if spans:
        metrics["off_policy/evicted_samples_staleness/mean"] = sum(spans) / len(spans)
        metrics["off_policy/evicted_samples_staleness/max"] = max(spans)
        metrics["off_policy/evicted_samples_staleness/min"] = min(spans)
    prefix = "training" if partition == TRAIN else "validation"
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
