"""Old scores against new ones: what changed. Of a session only its scores are kept."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

SHOWN = 10
_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


@attrs.frozen
class Change:
    """A session whose score changed, by `by`."""

    by: float
    step: int
    call: int | None
    group: str
    session: int
    old: float | None
    new: float | None


def _described(scores: array[float]) -> dict[str, Any] | None:
    """``count``, ``mean``, ``std``, ``min``, ``p10``, ``p50``, ``p90``, ``max``."""
    if not scores:
        return None
    found = {"count": len(scores), "mean": float(np.mean(scores)), "std": float(np.std(scores))}
    quantiles = np.quantile(scores, list(_QUANTILES.values()), method="lower").tolist()
    return found | dict(zip(_QUANTILES, quantiles, strict=True))


def _scores() -> array[float]:
    return array("d")


@attrs.define
class Changes:
    """What scoring again changed.

    Parameters
    ----------
    old, new
        The scores of the sessions that were scored again.
    changed
        How many of them have another score.
    groups, gained, lost
        Groups; those whose scores differ now and were equal before, and the other way round, the
        names of the first of them as ``step/group``.
    most
        The sessions that changed most.
    """

    old: array[float] = attrs.field(factory=_scores)
    new: array[float] = attrs.field(factory=_scores)
    changed: int = 0
    groups: int = 0
    gained: int = 0
    lost: int = 0
    gained_names: list[str] = attrs.field(factory=list)
    lost_names: list[str] = attrs.field(factory=list)
    most: list[Change] = attrs.field(factory=list)

    def add_session(self, change: Change) -> None:
        for scores, score in ((self.old, change.old), (self.new, change.new)):
            if score is not None:
                scores.append(score)
        if change.old == change.new:
            return
        self.changed += 1
        self.most = sorted([*self.most, change], key=lambda one: -one.by)[:SHOWN]

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

    def result(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "old": _described(self.old),
            "new": _described(self.new),
            "changed": self.changed,
            "groups": {
                "count": self.groups,
                "gained_signal": self.gained,
                "lost_signal": self.lost,
                "gained": self.gained_names,
                "lost": self.lost_names,
            },
            "most_changed": [attrs.asdict(one) for one in self.most],
        }
