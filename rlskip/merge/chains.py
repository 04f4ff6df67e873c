"""Link rows into chains; each chain becomes one row.

Row j continues row i if row i, prompt and response, is a prefix of j's prompt. A chain starts
with the prompt of its first row, which is not trained. After it, every token that a row of the
chain sampled keeps its mask, and the tokens between are observations, which are masked. However
the rows are linked, each sampled token is trained exactly once: in its own row's chain.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from rlskip.merge.turns import RESPONSES, MergeError

logger = logging.getLogger(__name__)

Chain = list[int]


@attrs.frozen
class Rows:
    """The tokens of a batch, as lists or as 1-D arrays, and the rows of each trajectory."""

    prompts: Sequence[Any]
    responses: Sequence[Any]
    trajectories: list[range]
    # Whether two slices of equal length hold the same tokens.
    same: Callable[[Any, Any], bool] = operator.eq

    def length(self, i: int) -> int:
        """The number of tokens of row i, prompt and response."""
        return len(self.prompts[i]) + len(self.responses[i])

    def observed_from(self, chain: Chain) -> list[int]:
        """For each row of a chain, where in its prompt the tokens new to the chain begin.

        For the first row, that is the end of its prompt, which precedes the merged response.
        """
        return [len(self.prompts[chain[0]]), *map(self.length, chain[:-1])]

    def continues(self, j: int, i: int) -> bool:
        """Whether row i, prompt and response, is a prefix of the prompt of row j."""
        prompt, response, later = self.prompts[i], self.responses[i], self.prompts[j]
        start, end = len(prompt), len(prompt) + len(response)
        # The response first: it is short, and tokens drift there.
        return (
            end <= len(later)
            and self.same(response, later[start:end])
            and self.same(prompt, later[:start])
        )

    def common(self, j: int, i: int) -> int:
        """The length of the common prefix of row i and the prompt of row j."""
        prompt, later = self.prompts[i], self.prompts[j]
        same = self._same_for(prompt, later)
        if same < len(prompt):
            return same
        return same + self._same_for(self.responses[i], later[same:])

    def agree_at(self, token: int, j: int, i: int) -> bool:
        """Whether row i and the prompt of row j have the same token at position `token`."""
        if token >= min(self.length(i), len(self.prompts[j])):
            return False
        inside = token - len(self.prompts[i])
        own = self.prompts[i][token] if inside < 0 else self.responses[i][inside]
        return bool(own == self.prompts[j][token])

    def _same_for(self, a: Any, b: Any) -> int:
        """The length of the common prefix, by bisection."""
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            if self.same(a[low:middle], b[low:middle]):
                low = middle
            else:
                high = middle - 1
        return low


def link(
    rows: Rows,
    strategy: str = "adjacent",
    max_seq_len: int | None = None,
    on_overlong: str = "split",
) -> list[list[Chain]]:
    """Link the rows of each trajectory into chains.

    Parameters
    ----------
    strategy
        ``adjacent``: a row may continue the row just before it. ``chain``: it may continue any
        earlier row that no other row continues, and continues the longest of those. That leaves
        the fewest chains, because the longest row that fits is the one that fits fewest others.
    max_seq_len, on_overlong
        A row of more than `max_seq_len` tokens starts a new chain (``split``), raises
        (``error``), or is merged with a warning (``warn``).

    Returns
    -------
    list
        For each trajectory its chains, ordered by their last row, so that the trajectory's
        last row stays last. A chain is a list of row indices in increasing order.

    Raises
    ------
    MergeError
        `on_overlong` is ``error`` and a merge would exceed `max_seq_len`.
    """
    overlong: list[int] = []

    def too_long(j: int) -> bool:
        return max_seq_len is not None and rows.length(j) > max_seq_len

    def chains_of(trajectory: range) -> list[Chain]:
        chains: list[Chain] = []
        for j in trajectory:
            candidates: Iterable[Chain] = chains[-1:]
            if strategy == "chain":
                candidates = sorted(chains, key=lambda chain: -rows.length(chain[-1]))
            chain = next((c for c in candidates if rows.continues(j, c[-1])), None)
            if chain is not None and too_long(j):
                if on_overlong == "split":
                    chain = None
                else:
                    overlong.append(j)
            if chain is None:
                chains.append([j])
            else:
                chain.append(j)
        return sorted(chains, key=lambda chain: chain[-1])

    linked = [chains_of(trajectory) for trajectory in rows.trajectories]
    if overlong:
        _overlong(overlong, rows, max_seq_len, on_overlong)
    return linked


def _overlong(overlong: list[int], rows: Rows, limit: int | None, on_overlong: str) -> None:
    first = overlong[0]
    what = (
        f"{len(overlong)} turns would be merged into rows of more than {limit} tokens; the first "
        f"is row {first}, with {rows.length(first)}"
    )
    if on_overlong == "error":
        raise MergeError(
            f"{what} (merge.max_seq_len)",
            f"{RESPONSES}[{first}]",
            "merge.on_overlong=split stops merging at the turn before",
        )
    logger.warning("%s (merge.on_overlong=warn)", what)
