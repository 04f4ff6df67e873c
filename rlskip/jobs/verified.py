"""What was found where a stage ran although a dump fitted: counted, and added up over calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlskip._human import number


@attrs.frozen
class Verified:
    """Calls of a stage compared with the dumps that replaced them.

    Parameters
    ----------
    calls
        How many calls were compared.
    rows, same
        How many rows they have (of dump and stage the larger number), and how many of them have
        equal tokens. Rows without tokens have equal values instead.
    rows_then, rows_now, tokens_then, tokens_now
        Rows, and tokens of their responses, in the dumps and in what the stage returned.
    log_probs, log_prob_sum, log_prob_gap
        How many log-probs of equal tokens were compared, and the sum and the largest of their
        absolute differences, in nats.
    first
        Where the first difference is; empty where there is none.
    changed
        What has changed since the dumps were made: identity, versions, config.
    """

    calls: int = 0
    rows: int = 0
    same: int = 0
    rows_then: int = 0
    rows_now: int = 0
    tokens_then: int = 0
    tokens_now: int = 0
    log_probs: int = 0
    log_prob_sum: float = 0.0
    log_prob_gap: float = 0.0
    first: str = ""
    changed: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Verified:
        """What a line of the records says; a value of another type counts as absent."""
        known = attrs.asdict(cls())
        given: dict[str, Any] = {name: record.get(name) for name in known}
        if isinstance(given["changed"], list):
            given["changed"] = tuple(map(str, given["changed"]))
        return cls(**{k: v for k, v in given.items() if type(v) is type(known[k])})

    def __add__(self, other: Verified) -> Verified:
        together = {
            "log_prob_gap": max(self.log_prob_gap, other.log_prob_gap),
            "first": self.first or other.first,
            "changed": tuple(dict.fromkeys((*self.changed, *other.changed))),
        }
        mine, theirs = (attrs.asdict(one, recurse=False) for one in (self, other))
        return Verified(**{name: mine[name] + theirs[name] for name in mine} | together)

    @property
    def is_equal(self) -> bool:
        """Whether every row has equal tokens."""
        return self.same == self.rows

    def __str__(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        said = f"{calls} verified: {self.same} of {self.rows} rows are equal"
        if self.first:
            said += f"; the first difference: {self.first}"
        if self.log_probs:
            mean = self.log_prob_sum / self.log_probs
            said += (
                f"; log-probs of equal tokens differ by {number(mean)} on average, by at most "
                f"{number(self.log_prob_gap)}"
            )
        if self.tokens_then and self.tokens_now:
            then, now = self.tokens_then / self.rows_then, self.tokens_now / self.rows_now
            said += f"; a response has {then:.1f} tokens in the dump, {now:.1f} now"
        if self.changed:
            said += f"; changed since: {', '.join(self.changed)}"
        return said
