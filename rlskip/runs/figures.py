"""What is said of a run in numbers: its sessions, counted, and the figures of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.runs.on_disk import Dump
from rlskip.runs.rollouts import Rollouts


@attrs.frozen(eq=False)
class Sessions:
    """The sessions of a dump, counted: arrays with an entry for each, in the dump's order.

    ``groups`` are the names of the groups, and ``group`` which of them a session belongs to.
    ``reward`` and ``length`` are float64, NaN where they are not known; the others int64.
    """

    groups: list[str]
    group: np.ndarray
    number: np.ndarray
    reward: np.ndarray
    length: np.ndarray
    turns: np.ndarray

    @classmethod
    def of(cls, rollouts: Rollouts) -> Sessions:
        numbered: dict[str, int] = {}
        sessions = [
            (numbered.setdefault(s.group, len(numbered)), s.number, s.reward, s.length, len(s.rows))
            for s in rollouts.sessions
        ]
        dtypes = (np.int64, np.int64, np.float64, np.float64, np.int64)
        columns = zip(*sessions, strict=True) if sessions else [()] * len(dtypes)
        return cls(list(numbered), *map(np.array, columns, dtypes))

    @classmethod
    def joined(cls, some: Sequence[Sessions]) -> Sessions:
        """The sessions of several dumps, each of which has groups of its own."""
        firsts = np.cumsum([0, *(len(one.groups) for one in some)])
        group = [one.group + first for one, first in zip(some, firsts, strict=False)]
        names = ("number", "reward", "length", "turns")
        columns = [group, *([getattr(one, name) for one in some] for name in names)]
        arrays = (np.concatenate(parts or [np.empty(0, np.int64)]) for parts in columns)
        return cls([name for one in some for name in one.groups], *arrays)

    def __len__(self) -> int:
        return len(self.group)

    def of_group(self, values: np.ndarray) -> list[np.ndarray]:
        """The values that are known, of each group."""
        known = np.flatnonzero(~np.isnan(values))
        order = known[np.argsort(self.group[known], kind="stable")]
        ends = np.bincount(self.group[known], minlength=len(self.groups)).cumsum()
        return np.split(values[order], ends)[:-1]


def step_figures(dumps: Sequence[tuple[Dump, Sessions]], success: float) -> dict[str, float | None]:
    """The figures of a step, over the sessions or the groups of all its dumps; None: not known.

    ``pass_1`` is the share of sessions with a reward of at least `success`, as the mean of the
    groups; ``pass_k`` the share of groups with such a session; ``no_signal`` the share of groups
    with several sessions, all of one reward.
    """
    every = Sessions.joined([sessions for _, sessions in dumps])
    groups = [group for group in every.of_group(every.reward) if len(group)]
    several = [group for group in groups if len(group) > 1]
    seconds = [dump.seconds for dump, _ in dumps if dump.seconds is not None]
    return {
        "sessions": len(every),
        "groups": len(every.groups),
        **_spread("reward", every.reward),
        "pass_1": _mean([(group >= success).mean() for group in groups]),
        "pass_k": _mean([(group >= success).any() for group in groups]),
        "k": max(map(len, groups), default=None),
        "no_signal": _mean([group.min() == group.max() for group in several]),
        **_spread("length", every.length),
        "turns": _mean(every.turns),
        "seconds": sum(seconds) if seconds else None,
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    found = np.quantile(values, (0.25, 0.5, 0.75)).tolist() if len(values) else [None] * 3
    names = (f"{name}_{which}" for which in ("low", "median", "high"))
    return {name: _mean(values), **dict(zip(names, found, strict=True))}


def _mean(values: Any) -> float | None:
    return float(np.mean(values, dtype=np.float64)) if len(values) else None


def group_figures(sessions: Sessions) -> list[dict[str, Any]]:
    """For each group its ``name``, and figures over all its sessions."""
    counts = np.bincount(sessions.group, minlength=len(sessions.groups)).tolist()
    by_group = map(sessions.of_group, (sessions.reward, sessions.length))
    return [
        {
            "name": name,
            "sessions": n,
            "reward": _mean(rewards),
            "low": float(rewards.min()) if len(rewards) else None,
            "high": float(rewards.max()) if len(rewards) else None,
            "length": _mean(lengths),
        }
        for name, n, rewards, lengths in zip(sessions.groups, counts, *by_group, strict=True)
    ]


def by_interest(group: np.ndarray, reward: np.ndarray) -> np.ndarray:
    """The indices of sessions in the order in which to show them, always the same.

    A random one of each group comes first, then in turn one of the best, of the worst and of all.
    """
    drawn = np.random.default_rng(0).permutation(len(group))
    _, first = np.unique(group[drawn], return_index=True)
    rewarded = drawn[~np.isnan(reward[drawn])]
    worst = rewarded[np.argsort(reward[rewarded], kind="stable")]
    in_turn = np.stack([worst[::-1], worst, drawn[: len(worst)]], axis=1).reshape(-1)
    every = [*drawn[np.sort(first)].tolist(), *in_turn.tolist(), *drawn.tolist()]
    return np.array(list(dict.fromkeys(every)), np.int64)
