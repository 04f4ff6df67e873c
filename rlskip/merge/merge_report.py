"""The counts of a merge, and the causes of its breaks.

A *break* is a row that starts a chain although it is not the first of its trajectory. Its cause
is found by comparing it with the chain with which it has most tokens in common, at the first
token that differs:

``overlong``
    The row continues that chain, but `max_seq_len` forbids it.
``branch``
    The row continues from another context (an interleaved sub-agent, a fork, a retry): the
    model's input differs, not its output.
``stripped``
    Tokens were removed from the context (thinking, old turns); those after them are unchanged.
``drift``
    Tokens changed, as when text is tokenized again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip.merge.chains import Chain, Rows

OVERLONG, BRANCH, STRIPPED, DRIFT = CAUSES = ("overlong", "branch", "stripped", "drift")

# Two contexts match again when this many tokens agree; at most as many may be inserted before.
_RUN = 8
_SHOWN = 8  # tokens that a break shows of each side


@attrs.frozen
class Break:
    """Row `row` could not be merged into the chain that ended with row `after`.

    They differ from token `token` of the context on. The chain has the tokens `was` there, and the
    row has `now` (the first few; empty if the context ends there). `text` holds both, decoded.
    """

    row: int
    after: int
    cause: str = attrs.field(validator=attrs.validators.in_(CAUSES))
    token: int
    was: tuple[int, ...]
    now: tuple[int, ...]
    text: tuple[str, str] | None = None

    def __str__(self) -> str:
        was, now = self.text or (list(self.was), list(self.now))
        return (
            f"row {self.row} does not continue row {self.after}: {self.cause} at token "
            f"{self.token}, {was!r} became {now!r}"
        )


class MergeReport(dict[str, int]):
    """A merge's metrics by name, ready to log, and its `breaks`. Empty when merging is off."""

    def __init__(self, metrics: Mapping[str, int] = {}, breaks: Sequence[Break] = ()) -> None:
        super().__init__(metrics)
        self.breaks = tuple(breaks)


def report_on(
    rows: Rows, linked: list[list[Chain]], strategy: str, tokenizer: Any = None
) -> MergeReport:
    """Count rows and tokens before and after, and find the cause of every break."""
    breaks = list(_breaks(rows, linked, strategy, tokenizer))
    causes = Counter(b.cause for b in breaks)
    metrics = {
        "generate/num_seq_before_merge": len(rows.prompts),
        "generate/num_seq_after_merge": sum(map(len, linked)),
        "generate/num_tokens_before_merge": sum(map(rows.length, range(len(rows.prompts)))),
        "generate/num_tokens_after_merge": sum(rows.length(c[-1]) for one in linked for c in one),
        **{f"generate/num_merge_breaks_{cause}": causes[cause] for cause in CAUSES},
    }
    return MergeReport(metrics, breaks)


def _breaks(
    rows: Rows, linked: list[list[Chain]], strategy: str, tokenizer: Any
) -> Iterator[Break]:
    for trajectory, chains in zip(rows.trajectories, linked, strict=True):
        if len(chains) == 1:
            continue
        both = {i: (rows.prompts[i], rows.responses[i]) for i in trajectory}
        whole = {i: np.concatenate([np.asarray(p, np.int64) for p in both[i]]) for i in trajectory}
        for j in sorted(chain[0] for chain in chains)[1:]:
            ends = [chain[bisect_left(chain, j) - 1] for chain in chains if chain[0] < j]
            now = whole[j][: len(rows.prompts[j])]
            after, token = j - 1, _common(whole[j - 1], now)
            for i in ends:
                # Nearly always the next token shows that this chain has no more in common.
                shown = token < min(len(whole[i]), len(now)) and whole[i][token] == now[token]
                if shown and (common := _common(whole[i], now)) > token:
                    after, token = i, common
            was, now = whole[after][token:], now[token:]
            if strategy == "adjacent" and after != j - 1:
                cause = BRANCH
            elif not was.size:
                cause = OVERLONG
            else:
                cause = _cause(was, now, kept=token - len(rows.prompts[after]))
            old, new = was[:_SHOWN].tolist(), now[:_SHOWN].tolist()
            text = None if tokenizer is None else (tokenizer.decode(old), tokenizer.decode(new))
            yield Break(j, after, cause, token, tuple(old), tuple(new), text)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def _cause(was: np.ndarray, now: np.ndarray, kept: int) -> str:
    """Why a context continues with `now` instead of `was`.

    `kept` is the number of tokens kept of the model's last output; below 0, the contexts differ
    before it.
    """
    if now.size == 0:
        return STRIPPED if kept > 0 else BRANCH
    inserted = _inserted(was, now)
    if inserted is None:
        return DRIFT if kept >= 0 else BRANCH
    return DRIFT if inserted else STRIPPED


def _inserted(was: np.ndarray, now: np.ndarray) -> int | None:
    """How many tokens of `now` precede a match with a later part of `was`; None without one."""
    for inserted in range(_RUN):
        rest = now[inserted:]
        for removed in np.flatnonzero(was == rest[0]) if rest.size else ():
            # A short output may end within the match, but only if nothing was inserted: the last
            # token alone is often the same.
            run = _RUN if inserted else min(_RUN, was.size - removed)
            if np.array_equal(was[removed : removed + run], rest[:run]) and rest.size >= run:
                return inserted
    return None
