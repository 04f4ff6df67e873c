"""What a call says of groups: its errors, with the facts as attributes, and its metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rlskip.errors import RlskipError
from rlskip.keys import TRAIN, integer
from rlskip.queue.readiness import PromptOutcome

# A message names at most this many prompts; the attribute `prompts` holds all of them.
_NAMED = 20


class IncompleteRolloutError(RlskipError, RuntimeError):
    """Finished groups are incomplete, and ``replay.on_incomplete`` does not accept them.

    Attributes
    ----------
    partition
        The sampled partition.
    step
        The step of the call.
    prompts
        A :class:`PromptOutcome` for each prompt concerned.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        remedy: str = "",
        *,
        partition: str = "",
        step: int | None = None,
        prompts: Sequence[PromptOutcome] = (),
    ) -> None:
        super().__init__(what, where, remedy)
        self.partition = partition
        self.step = step
        self.prompts = tuple(prompts)


class ReplayTimeoutError(IncompleteRolloutError, TimeoutError):
    """``replay.timeout_s`` has passed; `prompts` are those with missing sessions."""


def name_prompts(prompts: Sequence[PromptOutcome]) -> str:
    """One indented line per prompt, for the first twenty."""
    lines = [f"\n  {prompt}" for prompt in prompts[:_NAMED]]
    if len(prompts) > _NAMED:
        lines.append(f"\n  and {len(prompts) - _NAMED} more")
    return "".join(lines)


class Call:
    """A call that waits for groups of a step and a partition, and how it names itself."""

    def __init__(self, partition: str, step: int, batch_size: int | None) -> None:
        if batch_size is not None and (integer(batch_size) or 0) < 1:
            raise ValueError(f"batch_size must be at least 1, or None, got {batch_size!r:.80}")
        self.name = partition
        self.step = step
        self.batch_size = batch_size

    def __str__(self) -> str:
        return f"partition {self.name!r}, step {self.step}"

    def incomplete(
        self, prompts: Sequence[PromptOutcome], when: str = "", kind: str = "incomplete"
    ) -> IncompleteRolloutError:
        """Groups that ``replay.on_incomplete`` does not accept."""
        remedy = (
            "find the cause in the logs of the sessions; replay.on_incomplete can drop, refill or "
            "accept such groups (raise, drop, refill, min_viable)"
        )
        return self.error(f"{kind} groups{when}:{name_prompts(prompts)}", remedy, prompts)

    def all_dropped(self, prompts: Sequence[PromptOutcome]) -> IncompleteRolloutError:
        """``drop`` left nothing to train on."""
        return self.incomplete(prompts, " (every prompt was dropped)")

    def timed_out(
        self, seconds: float, situation: str, missing: Sequence[PromptOutcome]
    ) -> IncompleteRolloutError:
        """``replay.timeout_s`` has passed."""
        what = f"no batch after {seconds:.1f} s; {situation}{name_prompts(missing)}"
        remedy = (
            "find out why the sessions are missing; raise replay.timeout_s if they are only slow"
        )
        return self.error(what, remedy, missing, ReplayTimeoutError)

    def error(
        self,
        what: str,
        remedy: str,
        prompts: Sequence[PromptOutcome],
        kind: type[IncompleteRolloutError] = IncompleteRolloutError,
    ) -> IncompleteRolloutError:
        """An error of this call about these prompts."""
        return kind(what, str(self), remedy, partition=self.name, step=self.step, prompts=prompts)

    def metrics_of(
        self, spans: Sequence[int], dropped: int, refilled: int = 0, short: int = 0
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
        prefix = "training" if self.name == TRAIN else "validation"
        return {f"{prefix}/{name}": value for name, value in metrics.items()}
