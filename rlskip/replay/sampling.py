"""One call of `sample`: its arguments, what it evicted, its metrics and its errors."""

from __future__ import annotations

import time
from collections import Counter

import attrs

from rlskip.keys import TRAIN
from rlskip.replay.filtering import GroupFilter
from rlskip.replay.incomplete import IncompleteRolloutError, ReplayTimeoutError, name_prompts
from rlskip.replay.readiness import PromptOutcome


@attrs.define
class SampleCall:
    """One call of `sample`: its arguments, when it began, and what it evicted."""

    step: int
    partition: str
    batch_size: int | None
    group_filter: GroupFilter | None
    started: float = attrs.field(factory=time.monotonic)
    logged: float = attrs.field(factory=time.monotonic)
    stale_spans: list[int] = attrs.field(factory=list)
    refilled: int = 0
    short: int = 0
    dropped: list[PromptOutcome] = attrs.field(factory=list)
    #: Evicted prompts to replace, each with the number of refills in a row that its replacement
    #: will have had; and how many prompts this call has replaced.
    to_replace: list[tuple[PromptOutcome, int]] = attrs.field(factory=list)
    submitted: int = 0
    #: The groups that the filter rejected, by the value of the metric; those that no batch took.
    rejected: Counter[float] = attrs.field(factory=Counter)
    surplus: int = 0

    @property
    def discards_surplus(self) -> bool:
        return self.group_filter is not None and self.group_filter.discards_surplus

    @property
    def only_step(self) -> int | None:
        """The step whose prompts are sampled; None for any step."""
        return self.step if self.batch_size is None else None

    def __str__(self) -> str:
        return f"partition {self.partition!r}, step {self.step}"

    def metrics(self) -> dict[str, float]:
        """Numbers of prompts, and steps that stale ones spanned, under the names that verl logs."""
        prefix = "training" if self.partition == TRAIN else "validation"
        spans, rejected = self.stale_spans, self.rejected.total()
        metrics: dict[str, float] = {
            "off_policy/evicted_samples": len(spans),
            "rollout_failure/evicted_samples": len(self.dropped) + self.refilled,
            "rollout_failure/refilled_samples": self.refilled,
            "rollout_failure/short_samples": self.short,
        }
        if spans:
            metrics["off_policy/evicted_samples_staleness/mean"] = sum(spans) / len(spans)
            metrics["off_policy/evicted_samples_staleness/max"] = max(spans)
            metrics["off_policy/evicted_samples_staleness/min"] = min(spans)
        if rejected:
            metrics["filter_groups/evicted_samples"] = rejected
        if self.surplus:
            metrics["filter_groups/discarded_surplus_samples"] = self.surplus
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def rejected_too_many(self, passed: int) -> IncompleteRolloutError:
        return IncompleteRolloutError(
            f"{passed} of {self.batch_size} groups passed the filter, {self.rejected.total()} were "
            f"rejected (in all rows of a group the metric was one of {sorted(self.rejected)}), and "
            f"{self.submitted} more prompts, the most allowed, were submitted",
            str(self),
            "are the prompts too easy or too hard? For verl, raise "
            "algorithm.filter_groups.max_num_gen_batches, or set it to 0 for no limit",
            partition=self.partition,
            step=self.step,
            prompts=[outcome for outcome, _ in self.to_replace],
        )

    def incomplete(self, prompts: list[PromptOutcome], when: str = "") -> IncompleteRolloutError:
        return IncompleteRolloutError(
            f"incomplete groups{f' {when}' if when else ''}:{name_prompts(prompts)}",
            str(self),
            "find the cause in the logs of the sessions; replay.on_incomplete can drop, refill or "
            "accept such groups (raise, drop, refill, min_viable)",
            partition=self.partition,
            step=self.step,
            prompts=prompts,
        )

    def timed_out(self, missing: list[PromptOutcome], situation: str) -> ReplayTimeoutError:
        waited = time.monotonic() - self.started
        return ReplayTimeoutError(
            f"no batch after {waited:.1f} s; {situation}{name_prompts(missing)}",
            str(self),
            "find out why the sessions are missing; raise replay.timeout_s if they are only slow",
            partition=self.partition,
            step=self.step,
            prompts=missing,
        )
