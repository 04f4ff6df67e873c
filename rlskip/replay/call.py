"""One call of `sample`: what it was asked for, what it did on the way, what it raises."""

from __future__ import annotations

import time

import attrs

from rlskip.keys import TRAIN
from rlskip.replay.errors import IncompleteRolloutError, ReplayTimeoutError, name_prompts
from rlskip.replay.readiness import PromptOutcome


@attrs.define
class Call:
    """One call of `sample`: what was asked for, since when, and what it did on the way."""

    global_steps: int
    partition_id: str
    batch_size: int | None
    started: float = attrs.field(factory=time.monotonic)
    spoke: float = attrs.field(factory=time.monotonic)
    stale: int = 0
    refilled: int = 0
    short: int = 0
    dropped: list[PromptOutcome] = attrs.field(factory=list)

    @property
    def only_step(self) -> int | None:
        """The step whose prompts are sampled; None for any."""
        return self.global_steps if self.batch_size is None else None

    def __str__(self) -> str:
        return f"partition {self.partition_id!r}, step {self.global_steps}"

    def metrics(self) -> dict[str, int]:
        """Counts of prompts, under the names that verl's trainer logs."""
        prefix = "training" if self.partition_id == TRAIN else "validation"
        return {
            f"{prefix}/off_policy/evicted_samples": self.stale,
            f"{prefix}/rollout_failure/evicted_samples": len(self.dropped) + self.refilled,
            f"{prefix}/rollout_failure/refilled_samples": self.refilled,
            f"{prefix}/rollout_failure/short_samples": self.short,
        }

    def incomplete(self, prompts: list[PromptOutcome], when: str = "") -> IncompleteRolloutError:
        return IncompleteRolloutError(
            f"incomplete groups{f' {when}' if when else ''}:{name_prompts(prompts)}",
            str(self),
            "look for the cause where the sessions ran; replay.on_incomplete can drop, refill or "
            "accept such groups (raise, drop, refill, min_viable)",
            partition_id=self.partition_id,
            global_steps=self.global_steps,
            prompts=prompts,
        )

    def timed_out(self, missing: list[PromptOutcome], situation: str) -> ReplayTimeoutError:
        waited = time.monotonic() - self.started
        return ReplayTimeoutError(
            f"no batch after {waited:.1f} s; {situation}{name_prompts(missing)}",
            str(self),
            "look for the sessions that are missing; raise replay.timeout_s if they are only slow",
            partition_id=self.partition_id,
            global_steps=self.global_steps,
            prompts=missing,
        )
