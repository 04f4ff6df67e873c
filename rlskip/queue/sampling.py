"""One call that samples groups: which it waits for, what it evicts, its metrics and its errors.

``ReplayBuffer.sample`` and ``RolloutDispatcher.collect`` follow the same rules, which are here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import attrs

from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import TRAIN, integer
from rlskip.queue.readiness import (
    IncompleteRolloutError,
    Partition,
    PromptGroup,
    PromptOutcome,
    ReplayTimeoutError,
    State,
)

log = logging.getLogger(__name__)

_NAMED = 20  # prompts in a message; the attribute `prompts` of its error holds all of them

Eviction = dict[str, list[Any]]
"""Groups to evict, by cause: stale, dropped, refilled or rejected. Every prompt has one."""


@attrs.frozen
class GroupFilter:
    """Rejects complete training groups in which a metric does not vary, or is not a number.

    `metric` is called with keys of rows and their partition, and returns the metric of each row.
    """

    metric: Callable[[Sequence[str], str], Sequence[float]]

    def judge(self, partition: str, groups: list[PromptGroup]) -> None:
        """Note which of these complete groups vary; reads each group's rows once."""
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
            group.varies = len(its) == 1 or len({*its}) > 1
            # One NaN makes the advantages of its whole group NaN. It equals nothing, itself
            # neither, so it would count as variance.
            if odd := [value for value in its if not math.isfinite(value)]:
                group.varies = False
                log.warning("rlskip: prompt %s is rejected: a metric is %s", group.uid, odd[0])


class SampleCall:
    """One call: its arguments, when it began, and what it evicted.

    `step` is whose prompts are sampled, or with a `batch_size` from when their age counts.
    """

    def __init__(
        self,
        partition: Partition,
        step: int,
        batch_size: int | None,
        started: float,
        group_filter: GroupFilter | None = None,
        refills: bool = False,
    ) -> None:
        if batch_size is not None and (integer(batch_size) or 0) < 1:
            raise ConfigError(f"must be at least 1, or None, got {batch_size!r:.80}", "batch_size")
        trains, config = not partition.validates, partition.config
        self.config, self.partition, self.step = config, partition, step
        self.batch_size = batch_size
        self.group_filter = group_filter if trains else None
        self._strategy = config.max_off_policy_strategy if trains and batch_size else ""
        self._most = config.max_off_policy_threshold or 0  # which a strategy needs
        self._refills = refills
        self._gone: Eviction = {"stale": [], "dropped": [], "refilled": [], "rejected": []}
        self._started = self._logged = started
        self._short = 0

    def __str__(self) -> str:
        return f"partition {self.partition.name!r}, step {self.step}"

    def groups(self, *states: State) -> list[Any]:
        """The groups in these states that the call may sample, the oldest first."""
        step = self.step if self.batch_size is None else None
        return self.partition.groups(*states, step=step)

    def prompts(self) -> set[str]:
        """The prompts that it may sample, now or once they have finished."""
        return {group.uid for group in self.groups(*State)}

    def _span(self, group: Any) -> int:
        """The steps that a group spans: 1 is on-policy."""
        return self.step - int(group.step) + 1

    # -- which groups must not be sampled; nothing changes, so what raises leaves them as they were

    def _ended(self, *states: State, stale: bool = False) -> list[Any]:
        """The groups in these states that are too old, or those that are not."""
        drops = self._strategy == "drop"
        return [g for g in self.groups(*states) if (drops and self._span(g) > self._most) == stale]

    def judged(self) -> tuple[list[Any], list[Any]]:
        """The complete groups that can be sampled, and those that the filter rejects."""
        complete = self._ended(State.COMPLETE)
        if self.group_filter is None:
            return complete, []
        self.group_filter.judge(self.partition.name, complete)
        return [g for g in complete if g.varies], [g for g in complete if not g.varies]

    def decide(self) -> Eviction:
        """Which groups to evict; empty: none."""
        policy, incomplete = self.config.on_incomplete, self._ended(State.INCOMPLETE)
        if incomplete and policy not in ("drop", "refill"):
            raise self._error("incomplete groups:", incomplete)
        stale = self._ended(State.COMPLETE, State.INCOMPLETE, stale=True)
        passed, rejected = self.judged()
        # A refill submits a training prompt, which must not stand in for one of validation.
        refills = policy == "refill" and not self.partition.validates
        handled = "refilled" if refills else "dropped"
        found = {"stale": stale, handled: incomplete, "rejected": rejected}
        there, replaced = len(self.groups(*State)), self.replaced(found)
        wanted, submitted = self.batch_size or there, len(self.replaced(self._gone))
        most = self.config.max_refills * max(wanted, there)
        if not replaced or submitted + len(replaced) <= most:
            return {cause: groups for cause, groups in found.items() if groups}
        if len(passed) < wanted:
            self._gone["rejected"] += rejected
            raise self._error(
                f"{len(passed)} of {wanted} groups can be sampled, and {submitted} more prompts "
                f"were submitted, of the {most} allowed{self._rejections()}",
                replaced,
                "find out why they fail, or are too easy or too hard; or raise replay.max_refills: "
                "so many refills are allowed for each prompt",
            )
        return {}  # they are left to another call

    def replaced(self, found: Eviction) -> list[Any]:
        """The groups that refills replace."""
        causes = ("refilled", "rejected", "stale") if self._refills else ()
        return [group for cause in causes for group in found.get(cause, ())]

    def evicted(self, found: Eviction) -> None:
        """Log and count what was evicted."""
        for cause, groups in found.items():
            self._gone[cause] += groups
            if cause != "rejected":
                log.warning("rlskip: %s: prompts are %s:%s", self, cause, _names(_outcomes(groups)))

    # -- which groups are sampled --------------------------------------------------------------

    def choose(self) -> list[Any] | None:
        """The groups to return, or None to go on waiting."""
        whole = self.batch_size is None  # it waits for all that was submitted
        if self.groups(State.RUNNING) if whole else self._waits_for_old():
            return None
        complete, dropped = self.judged()[0], self._gone["dropped"]
        size = self.batch_size or max(1, len(complete))
        if self.partition.validates and self.batch_size:
            # Nothing replaces a dropped prompt of a validation batch, so nothing is waited for.
            size -= len(dropped)
        if size <= 0 or (dropped and not complete and whole):
            raise self._error("incomplete groups (every prompt was dropped):", dropped)
        if len(complete) < size:
            return None
        short = [outcome for outcome in _outcomes(complete[:size]) if not outcome.complete]
        if short:
            self._short = len(short)
            log.warning("rlskip: %s: returning groups that lack sessions:%s", self, _names(short))
        return complete[:size]

    def _waits_for_old(self) -> bool:
        """Whether to wait for a running prompt that has reached the threshold."""
        running = self.partition.groups(State.RUNNING) if self._strategy == "wait" else ()
        return any(self._span(group) >= self._most for group in running)

    def metrics(self) -> dict[str, float]:
        """What the call evicted, and the groups with missing sessions, as verl names them."""
        spans = [self._span(group) for group in self._gone["stale"]]
        counts = {cause: len(groups) for cause, groups in self._gone.items()}
        metrics: dict[str, float] = {
            "off_policy/evicted_samples": len(spans),
            "rollout_failure/evicted_samples": counts["dropped"] + counts["refilled"],
            "rollout_failure/refilled_samples": counts["refilled"],
            "rollout_failure/short_samples": self._short,
        }
        for name, of in (("mean", fmean), ("max", max), ("min", min)) if spans else ():
            metrics[f"off_policy/evicted_samples_staleness/{name}"] = of(spans)
        if counts["rejected"]:
            metrics["filter_groups/evicted_samples"] = counts["rejected"]
        prefix = "training" if self.partition.name == TRAIN else "validation"
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    # -- what it says --------------------------------------------------------------------------

    def check_time(self, now: float) -> float:
        """Log a progress line when one is due; returns the seconds until the next.

        Raises ReplayTimeoutError when ``replay.timeout_s`` has passed.
        """
        timeout_s, interval_s = self.config.timeout_s, self.config.progress_interval_s
        waited = now - self._started
        if waited >= timeout_s or now >= self._logged + interval_s:
            complete, running = len(self.groups(State.COMPLETE)), self.groups(State.RUNNING)
            wanted = self.batch_size or complete + len(running)
            said = f"{complete} of {wanted} prompts are complete, {len(running)} are running"
            if self._waits_for_old():
                said += "; running prompts that are about to be stale come first"
            said += self._rejections()
            if waited >= timeout_s:
                remedy = "submit more prompts of this step or, with a batch_size, ask for fewer"
                if running:
                    remedy = "find out why the sessions are missing; raise replay.timeout_s if "
                    remedy += "they are only slow"
                what = f"no batch after {waited:.1f} s; {said}"
                raise self._error(what, running, remedy, ReplayTimeoutError)
            self._logged = now
            said += _names(_outcomes(running))
            log.info("rlskip: %s: waiting for %.0f of %.0f s; %s", self, waited, timeout_s, said)
        return min(self._started + timeout_s, self._logged + interval_s) - now

    def _rejections(self) -> str:
        """How many groups were rejected, and by what."""
        metric, rejected = self.group_filter and self.group_filter.metric, self._gone["rejected"]
        name = getattr(metric, "__name__", type(metric).__name__)
        why = "a metric that is the same in all rows, or not a number"
        return f"; the filter {name!r} rejected {len(rejected)} groups ({why})" if rejected else ""

    def _error(
        self,
        what: str,
        groups: Sequence[Any],
        remedy: str = "find the cause in the logs of the sessions; replay.on_incomplete can drop, "
        "refill or accept such groups (raise, drop, refill, min_viable)",
        kind: type[IncompleteRolloutError] = IncompleteRolloutError,
    ) -> IncompleteRolloutError:
        prompts = _outcomes(groups)
        named = [p for p in prompts if not p.complete or kind is ReplayTimeoutError]
        error = kind(what + _names(named), str(self), remedy)
        error.partition, error.step, error.prompts = self.partition.name, self.step, tuple(prompts)
        return error


def _outcomes(groups: Iterable[Any]) -> list[PromptOutcome]:
    return [group.outcome() for group in groups]


def _names(prompts: Sequence[PromptOutcome]) -> str:
    """One indented line per prompt, for the first twenty."""
    lines = [f"\n  {prompt}" for prompt in prompts[:_NAMED]]
    if len(prompts) > _NAMED:
        lines.append(f"\n  and {len(prompts) - _NAMED} more")
    return "".join(lines)
