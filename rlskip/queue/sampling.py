"""One call that samples groups: what it may sample, what it evicts, its metrics and its errors.

``ReplayBuffer.sample`` and ``RolloutDispatcher.collect`` follow the same rules, which are here.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rlskip.config.other_nodes import ReplayConfig
from rlskip.errors import RlskipError
from rlskip.keys import TRAIN, integer
from rlskip.queue.partition import Group, Partition
from rlskip.queue.readiness import (
    IncompleteRolloutError,
    PromptGroup,
    PromptOutcome,
    ReplayTimeoutError,
    State,
    name_prompts,
)

log = logging.getLogger(__name__)

_THERE = State.COMPLETE, State.RUNNING, State.INCOMPLETE


@attrs.frozen
class GroupFilter:
    """Rejects complete training groups in which a metric does not vary, or is not a number.

    `metric` is called with keys of rows and their partition, and returns the metric of each row.
    """

    metric: Callable[[Sequence[str], str], Sequence[float]]

    def rejected(self, partition: str, groups: Iterable[PromptGroup]) -> list[PromptGroup]:
        """Those of these complete groups that are rejected; reads each group's rows once."""
        groups = list(groups)
        new = [group for group in groups if group.varies is None]
        keys = [[key for key, _ in group.rows()] for group in new]
        values = iter(self._values([key for some in keys for key in some], partition))
        for group, its_keys in zip(new, keys, strict=True):
            metrics = [next(values) for _ in its_keys]
            odd = [value for value in metrics if not math.isfinite(value)]
            # One NaN makes the advantages of its whole group NaN. It equals nothing, itself
            # neither, so it would count as variance.
            group.varies = not odd and (len(metrics) == 1 or len({*metrics}) != 1)
            # math.nan is one object, so that equal causes count as one.
            group.metric = math.nan if odd and math.isnan(odd[0]) else [*odd, *metrics][0]
        return [group for group in groups if not group.varies]

    def _values(self, keys: Sequence[str], partition: str) -> list[float]:
        found = self.metric(keys, partition) if keys else []
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError, OverflowError):
            values = []
        if len(values) != len(keys):
            what = f"the metric returned {found!r:.200} for {len(keys)} rows"
            raise RlskipError(what, "group_filter", "return one number for each key, in order")
        return values


@attrs.define
class Eviction:
    """The groups to evict, by cause, and the prompts to replace.

    Each of these comes with the number of refills in a row that its replacement will have had.
    """

    replaced: list[tuple[PromptOutcome, int]] = attrs.field(factory=list)
    stale: list[Any] = attrs.field(factory=list)
    dropped: list[Any] = attrs.field(factory=list)
    refilled: list[Any] = attrs.field(factory=list)
    rejected: list[PromptGroup] = attrs.field(factory=list)

    @property
    def groups(self) -> list[Any]:
        """All groups to evict."""
        return [*self.stale, *self.dropped, *self.refilled, *self.rejected]


@attrs.define(eq=False, slots=False)
class SampleCall:
    """One call: its arguments, when it began, and what it evicted.

    `uids` are the prompts to sample, or None for all. Every prompt that it evicts is counted once:
    as stale, dropped, refilled or rejected.
    """

    config: ReplayConfig
    partition: Partition
    step: int
    batch_size: int | None
    started: float
    uids: set[str] | None = None
    group_filter: GroupFilter | None = None
    replaces_stale: bool = False

    def __attrs_post_init__(self) -> None:
        if self.batch_size is not None and (integer(self.batch_size) or 0) < 1:
            what = f"batch_size must be at least 1, or None, got {self.batch_size!r:.80}"
            raise ValueError(what)
        if self.partition.validates:
            self.group_filter = None
        # The step whose prompts are sampled; None for any step.
        self.only_step = self.step if self.batch_size is None else None
        self.gone = Eviction()  # all that was evicted
        self._kept_back: list[PromptGroup] = []  # rejected, and not evicted
        self._logged = self.started
        self._submitted = self._short = 0

    def __str__(self) -> str:
        return f"partition {self.partition.name!r}, step {self.step}"

    def groups(self, *states: State) -> list[Any]:
        """The groups in these states that the call may sample, the oldest first."""
        return self.partition.groups(*states, step=self.only_step, uids=self.uids)

    def absent(self) -> list[str]:
        """The prompts that the call waits for and that are not there: refills, or named ones."""
        of = self.only_step
        awaited = {uid for uid, (step, _) in self.partition.refills.items() if of in (None, step)}
        if self.uids is not None:
            awaited = self.uids if self.batch_size is None else self.uids & awaited
        return sorted(awaited - {group.uid for group in self.groups(*_THERE)}) if awaited else []

    # -- which groups must not be sampled; nothing changes, so what raises leaves them as they were

    def decide(self) -> Eviction | None:
        """Which groups to evict, and which prompts to replace; None: nothing is to be done."""
        found, policy = Eviction(), self.config.on_incomplete
        if self.batch_size is not None and self.partition.strategy == "drop":
            ended = self.groups(State.COMPLETE, State.INCOMPLETE)
            found.stale = [g for g in ended if self.partition.is_stale(g.step, self.step)]
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
            outcomes = [group.outcome() for group in incomplete]
            raise self._error(f"incomplete groups:{name_prompts(outcomes)}", outcomes)
        if self.group_filter is not None:
            self._reject(self.group_filter, found)
        return found if found.groups else None

    def _chain(self, groups: Sequence[Group], kind: str) -> list[tuple[PromptOutcome, int]]:
        """The prompts, each with the refills in a row that its replacement will have had."""
        most, refills = self.config.max_refills, self.partition.refills
        replaced = [(g.outcome(), refills.get(g.uid, (None, 0))[1] + 1) for g in groups]
        if spent := [outcome for outcome, count in replaced if count > most]:
            after = f"after {most} refills (replay.max_refills)"
            raise self._error(f"{kind} groups {after}:{name_prompts(spent)}", spent)
        return replaced

    def _reject(self, group_filter: GroupFilter, found: Eviction) -> None:
        """Evict groups that teach nothing, and replace each with one prompt.

        Without a bound a filter that rejects everything would generate until the timeout. What
        exceeds it stays for the next call; raises if nothing else is left to hope for.
        """
        complete = [g for g in self.groups(State.COMPLETE) if g not in found.stale]
        rejected = group_filter.rejected(self.partition.name, complete)
        there = len(self.groups(*_THERE)) + len(self.absent())
        wanted = self.batch_size or there
        passed = len(complete) - len(rejected)
        room = max(0, self.config.max_refills * wanted - self._submitted)
        found.rejected, self._kept_back = rejected[:room], rejected[room:]
        found.replaced += [(group.outcome(), 0) for group in found.rejected]
        hopeless = passed < wanted and not found.replaced and there == len(complete)
        if self._kept_back and hopeless:
            self.gone.rejected += rejected
            raise self._error(
                f"{passed} of {wanted} groups passed the filter, and {self._submitted} more "
                f"prompts, the most allowed, were submitted; {self._rejections()}",
                [group.outcome() for group in rejected],
                "are the prompts too easy or too hard? Raise replay.max_refills: so many refills "
                "for each prompt that is wanted are allowed",
            )

    def evicted(self, found: Eviction, uids: Sequence[str] = ()) -> None:
        """Log and count what was evicted, and wait for the prompts `uids` that replace it."""
        odd = [group for group in found.rejected if not math.isfinite(group.metric)]
        kinds = {
            "stale prompts": found.stale,
            "incomplete prompts, which are dropped": found.dropped,
            "incomplete prompts, which are refilled": found.refilled,
            "prompts with a row whose metric is not a number": odd,
        }
        for kind, groups in kinds.items():
            if groups:
                names = name_prompts([group.outcome() for group in groups])
                log.warning("%s: evicting %s:%s", self, kind, names)
        for cause in ("stale", "dropped", "refilled", "rejected"):
            getattr(self.gone, cause).extend(getattr(found, cause))
        self._submitted += len(uids)
        if self.uids is not None:
            self.uids.difference_update(group.uid for group in found.groups)
            self.uids.update(uids)

    # -- which groups are sampled --------------------------------------------------------------

    def choose(self) -> list[Any] | None:
        """The groups to return, or None to go on waiting."""
        if self.batch_size is None:  # waits for all that was submitted
            if self.groups(State.RUNNING) or self.absent():
                return None
        elif self.partition.about_to_be_stale(self.step):
            return None
        complete = [g for g in self.groups(State.COMPLETE) if g not in self._kept_back]
        size = self.batch_size or max(1, len(complete))
        dropped = [group.outcome() for group in self.gone.dropped]
        if dropped and self.partition.validates and self.batch_size:
            # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
            size -= len(dropped)
        if size <= 0 or (dropped and not complete and self.batch_size is None):
            what = f"incomplete groups (every prompt was dropped):{name_prompts(dropped)}"
            raise self._error(what, dropped)
        if len(complete) < size:
            return None
        short = [outcome for g in complete[:size] if not (outcome := g.outcome()).complete]
        if short:
            self._short = len(short)
            log.warning("%s: returning groups with missing sessions:%s", self, name_prompts(short))
        return complete[:size]

    def metrics(self) -> dict[str, float]:
        """What the call evicted, and the groups with missing sessions, as verl names them."""
        gone, rejected = self.gone, len(self.gone.rejected)
        spans = [self.step - group.step + 1 for group in gone.stale]
        metrics: dict[str, float] = {
            "off_policy/evicted_samples": len(spans),
            "rollout_failure/evicted_samples": len(gone.dropped) + len(gone.refilled),
            "rollout_failure/refilled_samples": len(gone.refilled),
            "rollout_failure/short_samples": self._short,
        }
        if spans:
            metrics["off_policy/evicted_samples_staleness/mean"] = sum(spans) / len(spans)
            metrics["off_policy/evicted_samples_staleness/max"] = max(spans)
            metrics["off_policy/evicted_samples_staleness/min"] = min(spans)
        if rejected:
            metrics["filter_groups/evicted_samples"] = rejected
        prefix = "training" if self.partition.name == TRAIN else "validation"
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    # -- what it says --------------------------------------------------------------------------

    def check_time(self, now: float) -> float:
        """Log a progress line when one is due; returns the seconds until the next.

        Raises ReplayTimeoutError when ``replay.timeout_s`` has passed.
        """
        timeout_s, interval_s = self.config.timeout_s, self.config.progress_interval_s
        waited = now - self.started
        if waited >= timeout_s or now >= self._logged + interval_s:
            late = self.groups(State.RUNNING)
            late += [self.partition.find(u) or self.partition.empty_group(u) for u in self.absent()]
            missing = [group.outcome() for group in late]
            said = self._situation() + name_prompts(missing)
            if waited >= timeout_s:
                raise self._error(
                    f"no batch after {waited:.1f} s; {said}",
                    missing,
                    "find out why the sessions are missing; raise replay.timeout_s if they are "
                    "only slow",
                    ReplayTimeoutError,
                )
            self._logged = now
            log.info("%s: waiting for %.0f of %.0f s; %s", self, waited, timeout_s, said)
        return min(self.started + timeout_s, self._logged + interval_s) - now

    def _situation(self) -> str:
        """What there is to sample and what is missing, in one line."""
        complete, running = (len(self.groups(s)) for s in (State.COMPLETE, State.RUNNING))
        absent = self.absent()
        wanted = self.batch_size or complete + running + len(absent)
        facts = {
            f"{complete} of {wanted} prompts are complete, {running} are running": True,
            "running prompts that are about to be stale come first": (
                self.partition.about_to_be_stale(self.step)
            ),
            f"not submitted at this step, or deleted: {', '.join(absent[:10])}": absent,
            self._rejections(): self.gone.rejected,
        }
        return "; ".join(fact for fact, is_so in facts.items() if is_so)

    def _rejections(self) -> str:
        """How many groups were rejected, and by what."""
        metric = self.group_filter and self.group_filter.metric
        counts = sorted(Counter(group.metric for group in self.gone.rejected).items(), key=str)
        return (
            f"the filter {getattr(metric, '__name__', type(metric).__name__)!r} rejected "
            f"{len(self.gone.rejected)} groups (a metric that is the same in all rows, or not a "
            f"number): {', '.join(f'{value:g} in {count}' for value, count in counts)}"
        )

    def _error(
        self,
        what: str,
        prompts: Sequence[PromptOutcome],
        remedy: str = "find the cause in the logs of the sessions; replay.on_incomplete can drop, "
        "refill or accept such groups (raise, drop, refill, min_viable)",
        kind: type[IncompleteRolloutError] = IncompleteRolloutError,
    ) -> IncompleteRolloutError:
        error = kind(what, str(self), remedy)
        error.partition, error.step, error.prompts = self.partition.name, self.step, tuple(prompts)
        return error
