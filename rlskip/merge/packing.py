"""Packing: lay rows out so that each token that they share is computed once.

The prompt of a group, and what its sessions share beyond it, is the same computation in every
row: a causal model's state at a token depends only on the tokens before it. A pack is a sequence
of a model's input in which each position attends to the tokens before it in its own row.

The idea is that of tree attention (Medusa, SpecInfer) and of prefix grouping (verl's and TRL's
trainers), as a planner that needs no trainer. :func:`rlskip.testing.assert_exact_packing` checks
a forward pass on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from rlskip.keys import integer
from rlskip.merge.checks import comparable
from rlskip.merge.token_rows import TokenRows, token_rows
from rlskip.merge.trie import Branches, branches, cut, first_fit_decreasing
from rlskip.merge.turns import MergeError


def pack(rows: Any, max_tokens: int, *, groups: Sequence[Hashable] | None = None) -> list[Pack]:
    """Pack rows into sequences of at most `max_tokens` positions, computing shared prefixes once.

    Parameters
    ----------
    rows
        A sequence of rows of token ids, or a mapping (or TensorDict) of `input_ids` and, if there
        are any, `attention_mask` (0 at padding, on either side) and `loss_mask` (0 at tokens that
        are not trained, such as a prompt or an observation). Each is a sequence of rows, a jagged
        nested tensor, or of shape ``(rows, width)``.
    max_tokens
        The most positions of a pack. A group that needs more is cut where the fewest tokens are
        computed twice.
    groups
        One value per row; rows share tokens within a group. By default all rows are one group.

    Returns
    -------
    list[Pack]
        Each row is in one of them (:attr:`Pack.rows`). Groups are packed first fit decreasing.

    Raises
    ------
    MergeError
        Rows that cannot be read, a row of more than `max_tokens` tokens, or another number of
        groups than of rows; or `max_tokens` is not a whole number.
    """
    if (size := integer(max_tokens)) is None:
        raise MergeError(f"expected a whole number of tokens, got {max_tokens!r:.80}", "max_tokens")
    tokens = token_rows(rows)
    parts = [
        part for members in _members(groups, len(tokens.offsets) - 1)
        for part in cut(branches(tokens, members), size)
    ]  # fmt: skip
    bins = first_fit_decreasing([part.size for part in parts], size)
    return [_lay_out(tokens, [parts[i] for i in sorted(chosen)]) for chosen in bins]


def _members(groups: Sequence[Hashable] | None, n: int) -> list[np.ndarray]:
    """The rows of each group."""
    if groups is None:
        return [np.arange(n)] if n else []
    if len(groups) != n:
        raise MergeError(f"{len(groups)} groups for {n} rows", "groups")
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(comparable(group, f"groups[{row}]"), []).append(row)
    return [np.array(rows) for rows in members.values()]


@attrs.frozen(
    eq=False, repr=False, slots=False
)  # slots would leave no room for the cached properties
class Pack:
    """Rows in one sequence, each shared prefix once.

    Attributes
    ----------
    rows
        Numbers of the rows that this pack holds, in the order of its results.
    input_ids
        int64 ``[T]``.
    position_ids
        int64 ``[T]``: each position's depth, which is its place in its rows.
    ends
        int64 ``[T]``: the positions that attend to position ``k`` are ``k`` to ``ends[k] - 1``.
    parents
        int64 ``[T]``: the position of the token before; -1 for a row's first token.
    labels
        int64 ``[T]``: the token after this position, or -1 if no row goes on here.
    path
        int64: the positions of each row's tokens, one row after the other.
    offsets
        int64 ``[len(rows) + 1]``: where each row begins in `path`.
    trained
        bool, as long as `path`: the row's loss uses this token's log-probability.
    """

    rows: list[int]
    input_ids: Tensor
    position_ids: Tensor
    ends: Tensor
    parents: Tensor
    labels: Tensor
    path: Tensor
    offsets: Tensor
    trained: Tensor

    def __len__(self) -> int:
        """How many positions the pack has."""
        return len(self.input_ids)

    def __repr__(self) -> str:
        return f"Pack({len(self.rows)} rows, {len(self.path)} tokens in {len(self)} positions)"

    def dense_mask(self) -> Tensor:
        """Which positions each one attends to: bool ``[T, T]``, queries first."""
        positions = torch.arange(len(self))
        query = positions[:, None]
        return (positions <= query) & (query < self.ends)

    def block_mask(self, device: str | torch.device = "cpu", **options: Any) -> Any:
        """The same as a BlockMask of ``torch.nn.attention.flex_attention``.

        `options` go to ``create_block_mask``, for example ``BLOCK_SIZE``.
        """
        from torch.nn.attention.flex_attention import create_block_mask

        ends = self.ends.to(device)

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return create_block_mask(attends, None, None, len(self), len(self), device, **options)

    @cached_property
    def needed(self) -> Tensor:
        """The positions whose logits a loss needs, int64 ``[N]``, ascending."""
        needed: Tensor = self._predictors[self._predictors >= 0].unique()
        return needed

    @cached_property
    def _predictors(self) -> Tensor:
        """For each entry of `path` the position that predicts it; -1 where none is needed."""
        predictors = self.path.roll(1)
        predictors[~self.trained] = -1
        predictors[self.offsets[:-1]] = -1  # nothing predicts a row's first token
        return predictors

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the rows' tokens.

        Parameters
        ----------
        logits
            Of shape ``(T, vocabulary)``, or ``(len(needed), vocabulary)`` at :attr:`needed`.

        Returns
        -------
        Tensor
            Jagged, one row per row of the pack and one value per token. It is 0 at a row's
            first token and at tokens that are not trained. Half precision is computed in float32.
        """
        logits = self._at_needed(logits)
        labels = self.labels[self.needed].to(logits.device)
        return self._by_row(-nn.functional.cross_entropy(logits, labels, reduction="none"))

    def entropy(self, logits: Tensor) -> Tensor:
        """Entropies of the distributions that the rows' tokens were drawn from, in nats.

        Parameters and result are those of :meth:`log_probs`.
        """
        log_probs = self._at_needed(logits).log_softmax(-1)
        return self._by_row(-(log_probs.exp() * log_probs).sum(-1))

    def _at_needed(self, logits: Tensor) -> Tensor:
        if len(logits) not in (len(self), len(self.needed)):
            raise MergeError(
                f"expected {len(self)} or {len(self.needed)} positions, got {len(logits)}", "logits"
            )
        if len(logits) != len(self.needed):
            logits = logits[self.needed.to(logits.device)]
        return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

    def _by_row(self, values: Tensor) -> Tensor:
        """Values at `needed` as one jagged row per row, 0 where a token is not trained."""
        place = torch.full((len(self) + 1,), len(self.needed))  # its last entry serves -1
        place[self.needed] = torch.arange(len(self.needed))
        index = place[self._predictors].to(values.device)
        flat = torch.cat([values, values.new_zeros(1)])[index]
        return torch.nested.nested_tensor_from_jagged(flat, self.offsets.to(values.device))


def _lay_out(tokens: TokenRows, parts: list[Branches]) -> Pack:
    """Number the positions of some tries, one after the other."""
    size = sum(part.size for part in parts)
    ids, depths, ends, parents = (np.zeros(size, np.int64) for _ in range(4))
    labels = np.full(size, -1)
    paths, trained, rows, lengths = [], [], [], []
    position = 0
    for part in parts:
        path = np.empty(0, np.int64)
        for row, start, length in zip(*(column.tolist() for column in part), strict=True):
            first = tokens.offsets[row]
            content = tokens.ids[first : first + length]
            own = slice(position, position + length - start)
            ids[own] = content[start:]
            depths[own] = np.arange(start, length)
            parents[own] = np.arange(own.start - 1, own.stop - 1)
            if own.start < own.stop:
                parents[own.start] = path[start - 1] if start else -1
            # The subtrees of what this row does not share end here.
            ends[path[start:]] = position
            path = np.concatenate([path[:start], np.arange(own.start, own.stop)])
            labels[path[:-1]] = content[1:]
            position = own.stop
            rows.append(row)
            lengths.append(length)
            paths.append(path)
            trained.append(tokens.trained[first : first + length])
        ends[path] = position
    arrays = (
        *(ids, depths, ends, parents, labels),
        np.concatenate(paths),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate(trained),
    )
    return Pack(rows, *map(torch.from_numpy, arrays))
