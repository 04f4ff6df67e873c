"""Old scores against new ones: what changed, in memory that does not grow with the run."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

SHOWN = 10
_QUANTILES = (0.1, 0.5, 0.9)


@attrs.frozen(order=True)
class Change:
    """A session whose score changed, by `by`."""

    by: float
    step: int = attrs.field(order=False)
    call: int | None = attrs.field(order=False)
    group: str = attrs.field(order=False)
    session: int = attrs.field(order=False)
    old: float | None = attrs.field(order=False)
    new: float | None = attrs.field(order=False)


@attrs.define
class Distribution:
    """Of scores: their number, mean, deviation and range; quantiles are known to three digits."""

    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    # The mean, and the sum of squared differences from it (Welford).
    _mean: float = 0.0
    _squares: float = 0.0
    _rounded: Counter[float] = attrs.field(factory=Counter)

    def add(self, score: float) -> None:
        self.count += 1
        gap = score - self._mean
        self._mean += gap / self.count
        self._squares += gap * (score - self._mean)
        self.low, self.high = min(self.low, score), max(self.high, score)
        self._rounded[float(f"{score:.2e}")] += 1

    def result(self) -> dict[str, Any] | None:
        """``count``, ``mean``, ``std``, ``min``, ``p10``, ``p50``, ``p90``, ``max``."""
        if not self.count:
            return None
        deviation = math.sqrt(max(0.0, self._squares / self.count))
        found = {"count": self.count, "mean": self._mean, "std": deviation, "min": self.low}
        found |= {f"p{share * 100:.0f}": self._quantile(share) for share in _QUANTILES}
        return {**found, "max": self.high}

    def _quantile(self, share: float) -> float:
        ordered = sorted(self._rounded.items())
        upto = itertools.accumulate(count for _, count in ordered)
        place = share * (self.count - 1)
        found = next(score for (score, _), n in zip(ordered, upto, strict=True) if n > place)
        return min(max(found, self.low), self.high)


@attrs.define
class Changes:
    """What scoring again changed.

    Parameters
    ----------
    old, new
        The scores of the sessions that were scored again.
    changed
        How many of them have another score.
    spread
        The deviation of each session's scores, where several were asked for.
    pairs, turned
        Pairs of sessions of one group whose old scores differ; those that the new ones order the
        other way.
    groups, reordered, gained, lost
        Groups; those with such a pair; those whose scores differ now and were equal before, and the
        other way round, the names of the first of them as ``step/group``.
    most
        The sessions that changed most.
    """

    old: Distribution = attrs.field(factory=Distribution)
    new: Distribution = attrs.field(factory=Distribution)
    spread: Distribution = attrs.field(factory=Distribution)
    changed: int = 0
    groups: int = 0
    pairs: int = 0
    turned: int = 0
    reordered: int = 0
    gained: int = 0
    lost: int = 0
    gained_names: list[str] = attrs.field(factory=list)
    lost_names: list[str] = attrs.field(factory=list)
    most: list[Change] = attrs.field(factory=list)

    def add_session(self, change: Change) -> None:
        for scores, score in ((self.old, change.old), (self.new, change.new)):
            if score is not None:
                scores.add(score)
        if change.old == change.new:
            return
        self.changed += 1
        (heapq.heappush if len(self.most) < SHOWN else heapq.heappushpop)(self.most, change)

    def add_group(
        self, name: str, old: Sequence[float | None], new: Sequence[float | None]
    ) -> None:
        """All sessions of a group, those included that were not scored again."""
        self.groups += 1
        before, after = len({*old} - {None}) > 1, len({*new} - {None}) > 1
        for is_one, names in (
            (after and not before, self.gained_names),
            (before and not after, self.lost_names),
        ):
            if is_one and len(names) < SHOWN:
                names.append(name)
        self.gained += after and not before
        self.lost += before and not after
        turned = 0
        both = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
        for (a, b), (c, d) in itertools.combinations(both, 2):
            self.pairs += a != c
            turned += (a - c) * (b - d) < 0
        self.turned += turned
        self.reordered += turned > 0

    def result(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "old": self.old.result(),
            "new": self.new.result(),
            "spread": self.spread.result(),
            "changed": self.changed,
            "groups": {
                "count": self.groups,
                "reordered": self.reordered,
                "gained_signal": self.gained,
                "lost_signal": self.lost,
                "gained": self.gained_names,
                "lost": self.lost_names,
            },
            "pairs": {"count": self.pairs, "turned": self.turned},
            "most_changed": [attrs.asdict(one) for one in sorted(self.most, reverse=True)],
        }
