"""One call that samples groups: what it may sample, what it evicts, its metrics and its errors.

``ReplayBuffer.sample`` and ``RolloutDispatcher.collect`` follow the same rules, which are here.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import attrs

from rlskip.config.other_nodes import ReplayConfig
from rlskip.errors import RlskipError
from rlskip.keys import TRAIN, integer
from rlskip.queue.partition import Partition
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

    def rejected(self, partition: str, groups: list[PromptGroup]) -> list[PromptGroup]:
        """Those of these complete groups that are rejected; reads each group's rows once."""
        new = [(g, [key for key, _ in g.rows()]) for g in groups if g.varies is None]
        wanted = [key for _, keys in new for key in keys]
        found = self.metric(wanted, partition) if wanted else []
        try:
            values = [float(value) for value in found]
        except (TypeError, ValueError, OverflowError):
            values = []
        if len(values) != len(wanted):
            what = f"the metric returned {found!r:.200} for {len(wanted)} rows"
            raise RlskipError(what, "group_filter", "return one number for each key, in order")
        rest = iter(values)
        for group, keys in new:
            its = [next(rest) for _ in keys]
            # One NaN makes the advantages of its whole group NaN. It equals nothing, itself
            # neither, so it would count as variance.
            odd = [value for value in its if not math.isfinite(value)]
            group.varies = not odd and (len(its) == 1 or len({*its}) > 1)
            group.metric = [*odd, *its][0]
        return [group for group in groups if not group.varies]


@attrs.define
class Eviction:
    """The groups that a call evicts, by cause."""

    stale: list[Any] = attrs.field(factory=list)
    dropped: list[Any] = attrs.field(factory=list)
    refilled: list[Any] = attrs.field(factory=list)
    rejected: list[PromptGroup] = attrs.field(factory=list)

    @property
    def groups(self) -> list[Any]:
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
        trains = not self.partition.validates
        self.group_filter = self.group_filter if trains else None
        self._strategy = self.config.max_off_policy_strategy if trains and self.batch_size else ""
        # The step whose prompts are sampled; None for any step.
        self.only_step = self.step if self.batch_size is None else None
        self.gone = Eviction()  # all that was evicted
        self._logged = self.started
        self._submitted = self._short = 0

    def __str__(self) -> str:
        return f"partition {self.partition.name!r}, step {self.step}"

    def groups(self, *states: State) -> list[Any]:
        """The groups in these states that the call may sample, the oldest first."""
        return self.partition.groups(*states, step=self.only_step, uids=self.uids)

    def absent(self) -> list[str]:
        """What a call for a whole step waits for and is not there: refills, or named prompts."""
        if self.only_step is None:
            return []
        refills = {uid for uid, (step, _) in self.partition.refills.items() if step == self.step}
        awaited = refills if self.uids is None else self.uids
        return sorted(awaited - {group.uid for group in self.groups(*_THERE)}) if awaited else []

    def span(self, group: Any) -> int:
        """The steps that a group spans: 1 is on-policy."""
        return self.step - int(group.step) + 1

    # -- which groups must not be sampled; nothing changes, so what raises leaves them as they were

    def stale(self, groups: list[Any]) -> list[Any]:
        """Those of these groups that are too old."""
        most = self.config.max_off_policy_threshold or 0  # which a strategy needs
        return [g for g in groups if self._strategy == "drop" and self.span(g) > most]

    def decide(self) -> Eviction | None:
        """Which groups to evict; None: none."""
        policy, most = self.config.on_incomplete, self.config.max_refills
        found = Eviction(self.stale(self.groups(State.COMPLETE, State.INCOMPLETE)))
        incomplete = [g for g in self.groups(State.INCOMPLETE) if g not in found.stale]
        if policy == "refill" and not self.partition.validates:
            found.refilled = incomplete
        elif policy in ("drop", "refill"):
            # A refill submits a training prompt, which must not stand in for one of validation.
            found.dropped = incomplete
        elif incomplete:
            outcomes = [group.outcome() for group in incomplete]
            raise self._error(f"incomplete groups:{name_prompts(outcomes)}", outcomes)
        if spent := [prompt for prompt, count in self.replaced(found) if count > most]:
            what = f"stale or incomplete groups after {most} refills (replay.max_refills):"
            raise self._error(what + name_prompts(spent), spent)
        if self.group_filter is not None:
            self._reject(self.group_filter, found)
        return found if found.groups else None

    def replaced(self, found: Eviction) -> list[tuple[PromptOutcome, int]]:
        """The prompts to replace, each with the refills in a row that its replacement will have."""
        refills = self.partition.refills
        again = [*(found.stale if self.replaces_stale else ()), *found.refilled]
        counted = [(group.outcome(), refills.get(group.uid, (None, 0))[1] + 1) for group in again]
        return counted + [(group.outcome(), 0) for group in found.rejected]

    def _reject(self, group_filter: GroupFilter, found: Eviction) -> None:
        """Evict groups that teach nothing.

        Without a bound a filter that rejects everything would generate until the timeout.
        """
        complete = [g for g in self.groups(State.COMPLETE) if g not in found.stale]
        found.rejected = group_filter.rejected(self.partition.name, complete)
        passed = len(complete) - len(found.rejected)
        there = len(self.groups(*_THERE)) + len(self.absent())
        wanted = self.batch_size or there
        most = self.config.max_refills * max(wanted, there)
        if passed < wanted and self._submitted + len(found.rejected) > most:
            self.gone.rejected += found.rejected
            raise self._error(
                f"{passed} of {wanted} groups passed the filter, and {self._submitted} more "
                f"prompts were submitted, of the {most} allowed; {self._rejections()}",
                [group.outcome() for group in found.rejected],
                "are the prompts too easy or too hard? Raise replay.max_refills: so many refills "
                "are allowed for each prompt",
            )

    def evicted(self, found: Eviction, uids: Sequence[str] = ()) -> None:
        """Log and count what was evicted, and wait for the prompts `uids` that replace it."""
        no_number = [group for group in found.rejected if not math.isfinite(group.metric)]
        for kind, groups in (
            ("stale prompts", found.stale),
            ("incomplete prompts, which are dropped", found.dropped),
            ("incomplete prompts, which are refilled", found.refilled),
            ("prompts with a row whose metric is not a number", no_number),
        ):
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
        elif self._waits_for_old():
            return None
        complete = self.groups(State.COMPLETE)
        size = self.batch_size or max(1, len(complete))
        dropped = [group.outcome() for group in self.gone.dropped]
        if self.partition.validates and self.batch_size:
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

    def _waits_for_old(self) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        most = self.config.max_off_policy_threshold or 0
        running = self.partition.groups(State.RUNNING) if self._strategy == "wait" else ()
        return any(self.span(group) >= most for group in running)

    def metrics(self) -> dict[str, float]:
        """What the call evicted, and the groups with missing sessions, as verl names them."""
        gone = self.gone
        metrics: dict[str, float] = {
            "off_policy/evicted_samples": len(gone.stale),
            "rollout_failure/evicted_samples": len(gone.dropped) + len(gone.refilled),
            "rollout_failure/refilled_samples": len(gone.refilled),
            "rollout_failure/short_samples": self._short,
        }
        if gone.stale:
            for name, of in (("mean", fmean), ("max", max), ("min", min)):
                metrics[f"off_policy/evicted_samples_staleness/{name}"] = of(
                    map(self.span, gone.stale)
                )
        if gone.rejected:
            metrics["filter_groups/evicted_samples"] = len(gone.rejected)
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
            said, missing = self._situation()
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

    def _situation(self) -> tuple[str, list[PromptOutcome]]:
        """What there is to sample and what is missing, in words; and the latter as outcomes."""
        complete, running = self.groups(State.COMPLETE), self.groups(State.RUNNING)
        absent, usual = self.absent(), self.partition.usual
        wanted = self.batch_size or len(complete) + len(running) + len(absent)
        said = f"{len(complete)} of {wanted} prompts are complete, {len(running)} are running"
        if self._waits_for_old():
            said += "; running prompts that are about to be stale come first"
        if absent:
            said += f"; not submitted at this step, or deleted: {', '.join(absent[:10])}"
        if self.gone.rejected:
            said += f"; {self._rejections()}"
        late = running + [self.partition.find(uid) or PromptGroup(uid, usual) for uid in absent]
        missing = [group.outcome() for group in late]
        return said + name_prompts(missing), missing

    def _rejections(self) -> str:
        """How many groups were rejected, and by what."""
        metric = self.group_filter and self.group_filter.metric
        counts = Counter(f"{group.metric:g}" for group in self.gone.rejected)
        return (
            f"the filter {getattr(metric, '__name__', type(metric).__name__)!r} rejected "
            f"{counts.total()} groups (a metric that is the same in all rows, or not a number): "
            f"{', '.join(f'{value} in {count}' for value, count in sorted(counts.items()))}"
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
