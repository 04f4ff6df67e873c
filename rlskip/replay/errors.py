"""What the replay buffer raises, with the facts as data beside the sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rlskip.errors import RlskipError
from rlskip.replay.readiness import PromptOutcome

# A message names so many prompts; the attribute `prompts` names all.
_NAMED = 20


class IncompleteRolloutError(RlskipError, RuntimeError):
    """Groups that are over are not whole, and the policy does not let them pass.

    Attributes
    ----------
    partition_id
        The partition that was sampled.
    global_steps
        The step it was sampled for.
    prompts
        Every prompt concerned: uid, expected and actual sessions, which failed and why.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        remedy: str = "",
        *,
        partition_id: str = "",
        global_steps: int | None = None,
        prompts: Sequence[PromptOutcome] = (),
    ) -> None:
        super().__init__(what, where, remedy)
        self.partition_id = partition_id
        self.global_steps = global_steps
        self.prompts = tuple(prompts)


class ReplayTimeoutError(IncompleteRolloutError, TimeoutError):
    """``replay.timeout_s`` is over; `prompts` are those whose sessions are still missing."""


def name_prompts(prompts: Sequence[PromptOutcome]) -> str:
    """One indented line per prompt, the first twenty of them."""
    lines = [f"\n  {prompt}" for prompt in prompts[:_NAMED]]
    if len(prompts) > _NAMED:
        lines.append(f"\n  and {len(prompts) - _NAMED} more")
    return "".join(lines)
