"""The errors of incomplete groups, with the facts as attributes."""

from __future__ import annotations

from collections.abc import Sequence

from rlskip.errors import RlskipError
from rlskip.queue.readiness import PromptOutcome

# A message names at most this many prompts; the attribute `prompts` holds all of them.
_NAMED = 20


class IncompleteRolloutError(RlskipError, RuntimeError):
    """Finished groups are incomplete, and ``replay.on_incomplete`` does not accept them.

    `prompts` has a :class:`PromptOutcome` for each prompt concerned, of this `partition` and the
    call's `step`.
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
