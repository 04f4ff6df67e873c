"""One call of `sample`: its arguments, what it evicted, its metrics and its errors."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rlskip.config.replay import ReplayConfig
from rlskip.keys import ROLLOUT_ROOT_KEYS, TRAIN
from rlskip.queue.filtering import GroupFilter
from rlskip.queue.incomplete import Call, IncompleteRolloutError, name_prompts
from rlskip.queue.partitions import Partition
from rlskip.queue.protocol import KVBatchMeta, Tag
from rlskip.queue.readiness import PromptGroup, PromptOutcome, State

log = logging.getLogger(__name__)

_THERE = State.COMPLETE, State.RUNNING, State.INCOMPLETE


@attrs.define
class Eviction:
    """What one look decides: the groups to evict, by cause, and the prompts to replace.

    Each of these comes with the number of refills in a row that its replacement will have had.
    """

    replaced: list[tuple[PromptOutcome, int]] = attrs.field(factory=list)
    stale: list[PromptGroup] = attrs.field(factory=list)
    dropped: list[PromptGroup] = attrs.field(factory=list)
    refilled: list[PromptGroup] = attrs.field(factory=list)
    rejected: list[PromptGroup] = attrs.field(factory=list)
    #: Prompts that replace rejected ones as soon as fewer are running.
    owed: list[tuple[PromptOutcome, int]] = attrs.field(factory=list)

    @property
    def groups(self) -> list[PromptGroup]:
        """All groups to evict."""
        return [*self.stale, *self.dropped, *self.refilled, *self.rejected]


class SampleCall(Call):
    """One call of `sample`: its arguments, when it began, and what it evicted.

    Parameters
    ----------
    config
        The node `replay`.
    partition
        The partition that it samples.
    step, batch_size, uids
        As `sample` takes them.
    group_filter
        The filter that applies to it.
    started
        On the buffer's clock, in seconds.
    """

    # Every prompt that the call evicted was counted once: as stale, dropped, refilled, rejected or
    # surplus. `submitted` counts the prompts that replace rejected ones.
    # `awaited` has those of `uids`, and those that replace prompts which the call has evicted.

    def __init__(
        self,
        config: ReplayConfig,
        partition: Partition,
        step: int,
        batch_size: int | None,
        uids: set[str] | None,
        group_filter: GroupFilter | None,
        started: float,
    ) -> None:
        super().__init__(partition.name, step, batch_size)
        self.partition = partition
        self.replaces_stale = False
        self._config = config
        self.uids = uids  # the prompts to sample; None: all
        self.group_filter = group_filter
        self.started = self._logged = started
        self.awaited = set(uids or ())
        self.stale_spans: list[int] = []
        self.refilled = self.short = self.surplus = self.submitted = 0
        self.dropped: list[PromptOutcome] = []
        self.owed: list[tuple[PromptOutcome, int]] = []
        #: The groups that the filter rejected, by the value of the metric.
        self.rejected: Counter[float] = Counter()
        self._most = 1  # prompts that were there at once
        # The step whose prompts are sampled; None for any step.
        self._only_step = step if batch_size is None else None

    @property
    def discards_surplus(self) -> bool:
        """Whether all that was submitted is awaited, and what the batch does not take deleted."""
        return self.group_filter is not None and self.group_filter.discards_surplus

    def groups(self, *states: State) -> list[PromptGroup]:
        """The groups in these states that the call may sample, the oldest first."""
        found = [self.partition.groups(state, self._only_step, self.uids) for state in states]
        return [*itertools.chain(*found)]

    def count(self, *states: State) -> int:
        """Their number."""
        return sum(self.partition.count(s, self._only_step, self.uids) for s in states)

    def wanted(self) -> int:
        """How many prompts the call samples: the most that were there at once, if no number."""
        self._most = max(self._most, self.count(*_THERE))
        return self._most if self.batch_size is None else self.batch_size

    # -- which groups must not be sampled; nothing changes, so what raises leaves them as they were

    def decide(self) -> Eviction:
        """Which groups to evict, and which prompts to replace."""
        found, policy = Eviction(), self._config.on_incomplete
        if self.batch_size is not None:
            found.stale = self.partition.stale(self.step, self.uids)
            if self.replaces_stale:
                found.replaced += self._chain(found.stale, "stale")
        incomplete = [g for g in self.groups(State.INCOMPLETE) if g not in found.stale]
        # A refill submits a training prompt, which must not stand in for one of validation.
        if policy == "drop" or (policy == "refill" and self.partition.validates):
            found.dropped = incomplete
        elif policy == "refill":
            found.refilled = incomplete
            found.replaced += self._chain(incomplete, "incomplete")
        elif incomplete:
            raise self.incomplete([group.outcome() for group in incomplete])
        if self.group_filter is not None:
            complete = [g for g in self.groups(State.COMPLETE) if g not in found.stale]
            rejected = self.group_filter.rejected(self.name, complete)
            self._reject(rejected, len(complete) - len(rejected), self.group_filter, found)
        return found

    def _chain(self, groups: Sequence[PromptGroup], kind: str) -> list[tuple[PromptOutcome, int]]:
        """The prompts, each with the refills in a row that its replacement will have had.

        Raises if one has had the most.
        """
        most = self._config.max_refills
        if spent := [group.outcome() for group in groups if group.refills >= most]:
            raise self.incomplete(spent, f" after {most} refills (replay.max_refills)", kind)
        return [(group.outcome(), group.refills + 1) for group in groups]

    def _reject(
        self,
        rejected: list[PromptGroup],
        passed: int,
        group_filter: GroupFilter,
        found: Eviction,
    ) -> None:
        """Evict and replace groups that teach nothing, as far as the limit allows.

        The others stay for the next call; raises if nothing but them is left to hope for. Without
        a limit a filter that rejects everything would generate until the timeout.
        """
        each, most = group_filter.refills, group_filter.max_inflight
        enough = passed >= (self.batch_size or 1)
        running = self.partition.count(State.RUNNING, None, self.uids) + len(self.announced())
        room = max(0, self._config.max_refills * self.wanted() - self.submitted)
        now = room if most is None else min(room, max(0, most - running))
        if enough and (self.discards_surplus or self.batch_size is None):
            found.rejected = rejected  # there is no next call for them
            room = 0 if self.discards_surplus else room
        else:
            # Each gets one replacement now, so that an error later leaves no step short.
            found.rejected = rejected[: max(0, -(-(now - len(self.owed)) // each))]
        due = [*self.owed, *((group.outcome(), 0) for group in found.rejected * each)][:room]
        found.replaced += due[:now]
        found.owed = due[now:]
        if len(found.rejected) < len(rejected) and not (found.replaced or running or enough):
            raise self._rejected_too_many(passed, rejected)

    # -- what it says --------------------------------------------------------------------------

    def count_evicted(self, found: Eviction, uids: Sequence[str]) -> None:
        """Count what was evicted, and wait for the prompts that replace it."""
        self.stale_spans += [self.step - (group.step or 0) + 1 for group in found.stale]
        self.dropped += [group.outcome() for group in found.dropped]
        self.refilled += len(found.refilled)
        self.rejected.update(group.metric for group in found.rejected)
        self.submitted += len(uids)
        self.owed = found.owed
        gone = {group.uid for group in found.groups}
        for waited in (self.awaited, self.uids):
            if waited is not None:
                waited -= gone
                waited.update(uids)

    def announced(self) -> list[str]:
        """The uids of replacements that the queue does not hold yet."""
        return [group.uid for group in self.partition.groups(State.ANNOUNCED, None, self.uids)]

    def absent(self) -> list[str]:
        """The uids that the call waits for and cannot sample: somebody else deleted them, say."""
        if self.batch_size is not None:
            return []
        there = {group.uid for group in self.groups(*_THERE)}
        return sorted(self.awaited - there - {*self.announced()})

    def running(self) -> list[PromptOutcome]:
        """The running prompts that the call waits for."""
        return [group.outcome() for group in self.groups(State.RUNNING)]

    def check_time(self, now: float) -> float:
        """Log a progress line when one is due; returns the seconds until the next.

        Raises ReplayTimeoutError when ``replay.timeout_s`` has passed.
        """
        timeout_s, interval_s = self._config.timeout_s, self._config.progress_interval_s
        waited = now - self.started
        if waited >= timeout_s:
            absent = [self.partition.find(uid).outcome() for uid in self.absent()]
            raise self.timed_out(waited, self.situation(), self.running() + absent)
        if now >= self._logged + interval_s:
            self._logged = now
            said = self.situation() + name_prompts(self.running())
            log.info("%s: waiting for %.0f of %.0f s; %s", self, waited, timeout_s, said)
        return min(self.started + timeout_s, self._logged + interval_s) - now

    def situation(self) -> str:
        """What there is to sample and what is missing, in one line."""
        complete, running, sampled = map(self.count, (State.COMPLETE, State.RUNNING, State.SAMPLED))
        refills, absent = self.announced(), self.absent()
        orphaned = [group.uid for group in self.partition.groups(State.ORPHANED)]
        every = complete + running + len(refills) + len(absent)
        wanted = every if self.batch_size is None else self.batch_size
        facts = {
            f"{complete} of {wanted} prompts are complete, {running} are running": True,
            "running prompts that are about to be stale come first": (
                self.partition.about_to_be_stale(self.step)
            ),
            f"refills that have not arrived: {_names(refills)}": refills,
            f"not submitted at this step, or deleted: {_names(absent)}": absent,
            f"{len(self.dropped)} were incomplete and dropped": self.dropped,
            self._rejections(): self.rejected,
            f"{sampled} were sampled before": sampled,
            f"keys without a prompt that has a step: {_names(orphaned)}": orphaned,
        }
        return "; ".join(fact for fact, is_so in facts.items() if is_so)

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
        return KVBatchMeta(keys, tags, self.name, extra_info=roots)

    def metrics(self) -> dict[str, float]:
        """What the call evicted, under the names that verl logs."""
        counts = len(self.dropped), self.refilled, self.short
        metrics = self.metrics_of(self.stale_spans, *counts)
        prefix = "training" if self.name == TRAIN else "validation"
        if rejected := self.rejected.total():
            metrics[f"{prefix}/filter_groups/evicted_samples"] = rejected
        if self.surplus:
            metrics[f"{prefix}/filter_groups/discarded_surplus_samples"] = self.surplus
        return metrics

    def _rejections(self) -> str:
        """How many groups were rejected, and by what."""
        values = ", ".join(
            f"{value:g} in {count}" for value, count in sorted(self.rejected.items(), key=str)
        )
        return (
            f"the filter {self.group_filter and self.group_filter.name!r} rejected "
            f"{self.rejected.total()} groups (a metric that is the same in all rows, or not a "
            f"number): {values}"
        )

    def _rejected_too_many(
        self, passed: int, rejected: Sequence[PromptGroup]
    ) -> IncompleteRolloutError:
        """The filter's limit was reached, and nothing is left to hope for."""
        self.rejected.update(group.metric for group in rejected)
        what = (
            f"{passed} of {self.wanted()} groups passed the filter, and {self.submitted} more "
            f"prompts, the most allowed, were submitted; {self._rejections()}"
        )
        remedy = (
            "are the prompts too easy or too hard? Raise replay.max_refills: so many refills for "
            "each prompt that is wanted are allowed"
        )
        return self.error(what, remedy, [group.outcome() for group in rejected])


def _names(uids: Sequence[str], most: int = 10) -> str:
    return ", ".join(uids[:most]) + (f" and {len(uids) - most} more" if len(uids) > most else "")
