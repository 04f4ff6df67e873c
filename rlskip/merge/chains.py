"""Link rows into chains; each chain becomes one row.

Row j continues row i if row i, prompt and response, is a prefix of j's prompt. A chain starts
with the prompt of its first row, which is not trained. After it, every token that a row of the
chain sampled keeps its mask, and the tokens between are observations, which are masked. However
the rows are linked, each sampled token is trained exactly once: in its own row's chain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from rlskip.config.other_nodes import MergeConfig
from rlskip.merge.turns import RESPONSES, expect

logger = logging.getLogger(__name__)

Chain = list[int]


@attrs.frozen
class Rows:
    """The tokens of a batch, as arrays of one dimension, and the rows of each trajectory."""

    prompts: Sequence[Any]
    responses: Sequence[Any]
    trajectories: list[range]

    def length(self, i: int) -> int:
        """The number of tokens of row i, prompt and response."""
        return len(self.prompts[i]) + len(self.responses[i])

    def turns(self, chain: Chain) -> list[tuple[int, int]]:
        """Each row of a chain, and where in its prompt the tokens new to the chain begin.

        For the first row, that is the end of its prompt, which precedes the merged response.
        """
        starts = [len(self.prompts[chain[0]]), *map(self.length, chain[:-1])]
        return list(zip(chain, starts, strict=True))

    def continues(self, j: int, i: int) -> bool:
        """Whether row i, prompt and response, is a prefix of the prompt of row j."""
        prompt, response, later = self.prompts[i], self.responses[i], self.prompts[j]
        start, end = len(prompt), len(prompt) + len(response)
        # The response first: it is short, and tokens drift there. Twice as fast as torch.equal.
        return (
            end <= len(later)
            and bool((response == later[start:end]).all())
            and bool((prompt == later[:start]).all())
        )


def link(rows: Rows, config: MergeConfig) -> list[list[Chain]]:
    """For each trajectory its chains of row indices, ordered by their last row, which stays last.

    With the strategy ``adjacent`` a row may continue the row just before it, with ``chain`` any
    earlier row that no other row continues, and continues the longest of those. That leaves the
    fewest chains, because the longest row that fits is the one that fits fewest others. A row of
    more than `max_seq_len` tokens starts a new chain (``split``), raises MergeError (``error``), or
    is merged with a warning (``warn``).
    """
    overlong: list[int] = []
    longest = config.max_seq_len or math.inf
    linked = []
    for trajectory in rows.trajectories:
        chains: list[Chain] = []
        for j in trajectory:
            candidates: Iterable[Chain] = chains[-1:]
            if config.strategy == "chain":
                candidates = sorted(chains, key=lambda chain: -rows.length(chain[-1]))
            chain = next((c for c in candidates if rows.continues(j, c[-1])), None)
            if chain is not None and rows.length(j) > longest:
                overlong.append(j)
                chain = None if config.on_overlong == "split" else chain
            if chain is None:
                chains.append([j])
            else:
                chain.append(j)
        linked.append(sorted(chains, key=lambda chain: chain[-1]))
    if overlong and config.on_overlong != "split":
        first = overlong[0]
        what = f"{len(overlong)} turns would be merged into rows of more than {longest} tokens"
        what += f"; the first is row {first}, with {rows.length(first)}"
        remedy = "merge.on_overlong=split stops merging at the turn before"
        where = f"{RESPONSES}[{first}]"
        expect(config.on_overlong == "warn", f"{what} (merge.max_seq_len)", where, remedy)
        logger.warning("rlskip: %s (merge.on_overlong=warn)", what)
    return linked
