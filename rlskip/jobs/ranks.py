"""The ranks of a job decide together: none enters a collective alone or waits forever."""

from __future__ import annotations

import secrets
import sys
from datetime import timedelta

from rlskip.errors import RlskipError


class RankTimeoutError(RlskipError, TimeoutError):
    """Some rank did not take part in a decision in time."""


class RankError(RlskipError, RuntimeError):
    """Another rank raised instead of taking part in a decision."""


def shard() -> tuple[int, int]:
    """This rank of torch.distributed, and the number of its ranks; 0 and 1 without it."""
    # Who has ranks has imported it. `rlskip doctor` has none, and torch takes longer than all else.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


class RankGroup:
    """The ranks that call a stage together; rank 0 of 1, which never waits, without ranks.

    Constructing it is itself a collective where torch.distributed is initialised with more than one
    rank, so every rank constructs it at the same place. It uses its own gloo group, to touch no
    accelerator's stream, and waits `timeout_s` seconds for the other ranks. `exchange_id` names the
    last exchange of several: the same text on all its ranks, and for no other exchange.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.rank, self.world_size = shard()
        self.exchange_id = ""
        self._timeout_s = timeout_s
        self._group = None
        if self.world_size > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def exchange(
        self, *numbers: int, what: str = "the step", error: BaseException | None = None
    ) -> list[tuple[int, ...]]:
        """The `numbers` of every rank, each of 63 bits, in one round.

        An `error` is what this rank is about to raise. It is raised here, once all ranks know that
        they decide nothing: none waits for a rank that has left. Raises RankError where another
        rank has an `error`, and RankTimeoutError where one did not answer within `timeout_s`.
        """
        if self.world_size > 1:
            # Who is about to raise takes part first: a rank that left without it would keep the
            # others here until their timeout.
            answers = self._gathered([secrets.randbits(60), error is not None, *numbers], what)
        if error is not None:
            raise error
        if self.world_size == 1:
            return [numbers]
        self.exchange_id = f"{answers[0][0]:015x}"
        if failed := [rank for rank, (_, fails, *_) in enumerate(answers) if fails]:
            raise RankError(
                f"rank {', '.join(map(str, failed))} of {self.world_size} raised an error while "
                f"all ranks decided together whether {what} is skipped; rank {self.rank} ends, too",
                remedy="the log of that rank has the error",
            )
        return [tuple(answer[2:]) for answer in answers]

    def _gathered(self, numbers: list[int], what: str) -> list[list[int]]:
        import torch
        import torch.distributed as dist

        mine = torch.tensor(numbers)
        answers = [torch.zeros_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(answers, mine, group=self._group)
        except RuntimeError as error:
            raise RankTimeoutError(
                f"rank {self.rank} of {self.world_size} waited up to {self._timeout_s:g} s for "
                f"all ranks to decide together whether {what} is skipped",
                remedy="a rank died, or not every rank calls the stage at this step",
            ) from error
        return [answer.tolist() for answer in answers]
