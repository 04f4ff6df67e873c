"""What a worker receives: one session and its prompt, and nothing else of the batch."""

from __future__ import annotations

from typing import Any

import attrs
import xxhash

from rlskip.keys import TrajectoryKey, row_tag


@attrs.frozen
class Session:
    """Names the session that a worker runs: number `session_id` of the `n` of prompt `uid`.

    `attempt` counts the earlier attempts, those of an earlier submission of the uid included;
    `step`, `sample_index`, `rollout_n` and `validate` are as :func:`build_trajectory_info` returns
    them; `seed` is below 2**63, and the same at every attempt and on any worker; rows go to
    `partition`. `prompt_key` names its prompt in the step's journal: a hash of its content and of
    the stage's call that submits it, and its number among the step's prompts of that hash. None:
    the session is not journaled.
    """

    uid: str
    session_id: int
    n: int
    attempt: int
    step: int
    sample_index: Any
    rollout_n: int
    validate: bool
    seed: int
    partition: str
    prompt_key: tuple[str, int] | None = None

    def key(self, index: int) -> str:
        """The queue key of its `index`-th row, for workers that write their rows themselves."""
        return str(TrajectoryKey.of_attempt(self.uid, self.session_id, index, self.attempt))

    def tag(self, **more: Any) -> dict[str, Any]:
        """The tag of its rows, for workers that write their rows themselves."""
        return row_tag(self.step, self.attempt, **more)


def session_seed(seed: int, step: int, prompt: int, session: int) -> int:
    """A 63-bit seed that is stable over processes, machines and versions."""
    text = f"{seed}/{step}/{prompt}/{session}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
