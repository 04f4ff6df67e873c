"""Ranks of one job decide together: none enters a collective alone, or waits for ever."""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from rlskip.errors import RlskipError


class RankTimeoutError(RlskipError, TimeoutError):
    """Some rank did not come to decide in time."""


def world_size() -> int:
    """Ranks of this job as torch.distributed knows them; 1 without it."""
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if joined else 1


class RankGroup:
    """The ranks that call a stage together.

    Parameters
    ----------
    timeout_s
        How long to wait for the other ranks, in seconds.

    With torch.distributed initialised and more than one rank, constructing is itself a
    collective (a gloo group of its own, so that no accelerator's stream is touched): every
    rank constructs it at the same place. Otherwise this is rank 0 of 1 and never waits.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.world_size = world_size()
        self.rank: int = dist.get_rank() if self.world_size > 1 else 0
        self.decision = ""
        """Of the last :meth:`agree`: the same text on all its ranks, and no other's."""
        self._timeout_s = timeout_s
        self._group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            if self.world_size > 1
            else None
        )

    def agree(self, hit: bool, what: str = "the step") -> bool:
        """True when it is a hit on every rank.

        Raises
        ------
        RankTimeoutError
            After `timeout_s`, when some rank did not answer.
        """
        words = self._gather(secrets.randbits(60) << 1 | hit, what)
        self.decision = f"{words[0] >> 1:015x}"
        return all(word & 1 for word in words)

    def follow(self, word: int, what: str = "the step") -> int:
        """Rank 0's `word` on every rank; raises as :meth:`agree` does."""
        return self._gather(int(word), what)[0]

    def _gather(self, word: int, what: str) -> list[int]:
        if self._group is None:
            return [word]
        answers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        try:
            dist.all_gather(answers, torch.tensor([word]), group=self._group)
        except RuntimeError as error:
            raise RankTimeoutError(
                f"rank {self.rank} of {self.world_size} waited up to {self._timeout_s:g} s for "
                f"all ranks to decide together whether {what} is skipped",
                remedy="a rank died, or not every rank calls the stage at this step",
            ) from error
        return [int(answer) for answer in answers]
