"""How many sessions and groups rollouts have, what they earned, and how long they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

import attrs

from rlskip.runs.trajectories import (
    Columns,
    SessionRows,
    if_finite,
    lengths_of,
    rewards_of,
    sessions_of,
)


@attrs.frozen
class Counts:
    """Sessions counted, not the rows of their turns. A value for each session, in order.

    Parameters
    ----------
    rewards
        Sums over the turns; None for a session without a finite reward.
    lengths
        Tokens of the responses, over the turns, without padding. Empty if no column holds tokens.
    """

    sessions: list[SessionRows]
    rewards: list[float | None]
    lengths: list[int]

    @classmethod
    def of(cls, columns: Columns) -> Counts:
        sessions = sessions_of(columns)
        rewards, lengths = rewards_of(columns), lengths_of(columns)
        earned = [[r for i in one.rows if (r := rewards[i]) is not None] for one in sessions]
        return cls(
            sessions,
            [if_finite(math.fsum(some)) if some else None for some in earned],
            [sum(lengths[i] for i in one.rows) for one in sessions] if lengths else [],
        )

    @property
    def groups(self) -> int:
        return len({one.group for one in self.sessions})

    @property
    def mean_reward(self) -> float | None:
        return mean(self.rewards)

    @property
    def mean_length(self) -> float | None:
        return mean(self.lengths)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are given; None if there are none."""
    given = [value for value in values if value is not None]
    return if_finite(fmean(given)) if given else None
