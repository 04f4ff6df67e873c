"""Rows of several dumps, and how their columns are padded to one width."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rlskip.batch.columns import column_length, columns_of, is_data_proto, select
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.errors import RlskipError
from rlskip.skip.prompt_rows import row_count

_MARKS = {
    "prompt": ("attention", "prompt_mask"),
    "response": ("attention", "mask"),
    "whole": ("attention",),
}
"""What marks the padding of tokens."""


class AssemblyError(RlskipError, ValueError):
    """Rows of several dumps that cannot be one batch."""


@attrs.frozen(eq=False)
class Source:
    """`n` rows of a dump and what its fields mean; 0 where its rows are not known."""

    rollouts: Any
    fields: RowFields
    n: int

    @classmethod
    def of(cls, rollouts: Any, fields: RowFields, rows: Sequence[int]) -> Source:
        """These rows of what a dump holds: tensors are copied."""
        n = row_count(rollouts, fields)
        if n is None:
            return cls(rollouts, fields, 0)
        some: Any
        if isinstance(rollouts, torch.Tensor | np.ndarray):
            some = rollouts[[*rows]]
        elif isinstance(rollouts, dict):
            some = _some(rollouts, rows, n)
        else:
            some = select(rollouts, rows)
            if is_data_proto(some):
                some.meta_info = _some(some.meta_info, rows, n)
        return cls(some, fields, len(rows))


class Widths:
    """The widths of what several sources hold of prompts, responses and whole rows."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources, self._fields = sources, sources[0].fields
        self._prompts, self._responses, self._rows = (
            [_width(source, what) for source in sources] for what in _MARKS
        )

    def padded(
        self, name: str, columns: Sequence[torch.Tensor], cells: list[torch.Tensor],
        sources: Sequence[int],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Cells of these columns, each of one of the `sources`, in the shape of the widest."""
        shapes = [tuple(column.shape[1:]) for column in columns]
        ranks = {*map(len, shapes)}
        sizes = [[*size] for size in zip(*shapes, strict=True)] if len(ranks) == 1 else []
        differ = [dim for dim, size in enumerate(sizes) if len({*size}) > 1]
        if len({*shapes}) == 1:
            # Equally wide in all, and yet its prompts and responses may have other widths.
            if not sizes or not self._is_both(name, sizes[0]) or len({*self._prompts}) == 1:
                return cells
            differ = [0]
        added = self._added(name, sizes[differ[0]]) if len(differ) == 1 else None
        if added is None:
            raise AssemblyError(
                f"{name} has the shapes {', '.join(map(str, sorted({*shapes})))} in the dumps, and "
                "nothing tells how it is padded",
                "skip.match=prompt",
                f"name what it holds: annotate(rows=...); or skip.drop_fields=[{name}]",
            )
        value, behind = self._padding(name), [0, 0] * (len(sizes) - 1 - differ[0])
        return [
            torch.nn.functional.pad(cell, (*behind, *(n[source] for n in added)), value=value)
            for cell, source in zip(cells, sources, strict=True)
        ]

    def _added(self, name: str, widths: list[int]) -> tuple[list[int], list[int]] | None:
        """By source how much is added before and after; None where that is not known.

        Responses and rows of one column are padded on the right.
        """
        fields, nothing = self._fields, [0] * len(widths)
        if self._is_both(name, widths):
            # Only padding at the two ends keeps prompts and responses together.
            ends = _missing(self._prompts), _missing(self._responses)
            return ends if self._prompts_are_padded_left else None
        differ = self._prompts != self._responses
        added = _missing(widths)
        if widths == self._prompts and (differ or name in (fields.prompt, fields.prompt_mask)):
            return (added, nothing) if self._prompts_are_padded_left else (nothing, added)
        of_response = name in (fields.response, fields.mask, fields.log_probs, fields.reward)
        if (widths == self._responses and (differ or of_response)) or widths == self._rows:
            return nothing, added
        return None

    def _is_both(self, name: str, widths: list[int]) -> bool:
        """Whether a field of these widths holds prompts followed by responses."""
        pairs = zip(self._prompts, self._responses, strict=True)
        both = [None if p is None or r is None else p + r for p, r in pairs]
        return widths == both and name not in (self._fields.prompt, self._fields.response)

    @functools.cached_property
    def _extents(self) -> list[Mapping[str, Any]]:
        """By source where its rows are no padding (:mod:`rlskip.batch.padding`)."""
        return [*map(_extents_of, self._sources)]

    @functools.cached_property
    def _prompts_are_padded_left(self) -> bool:
        """Usually they are."""
        for known, width in zip(self._extents, self._prompts, strict=True):
            starts, ends = known.get("prompt", (np.zeros(0), np.zeros(0)))
            if ((starts > 0) & (starts < ends)).any():
                return True
            if (ends < (width or 0)).any():
                return False
        return True

    def _padding(self, name: str) -> int:
        """The value that pads a field; raises AssemblyError for a token that is not known."""
        fields = self._fields
        what = next((what for what in _MARKS if name == getattr(fields, what)), "")
        if not what:
            return 0
        if fields.pad is not None:
            return fields.pad
        is_marked = True
        for source, known in zip(self._sources, self._extents, strict=True):
            columns = columns_of(source.rollouts)
            marks = {getattr(source.fields, mark) for mark in _MARKS[what]}
            is_marked = is_marked and not columns.keys().isdisjoint(marks)
            if what in known:
                tokens, (starts, ends) = torch.as_tensor(columns[name]), known[what]
                places = np.arange(tokens.shape[1])
                outside = (places < starts[:, None]) | (places >= ends[:, None])
                if outside.any():
                    return int(tokens[torch.from_numpy(outside)][0])
        if is_marked:
            return 0  # a mask tells that it is padding, whatever its value is
        raise AssemblyError(
            f"the token that pads {name} is not known",
            "skip.match=prompt",
            "name it: annotate(rows={'pad': TOKEN})",
        )


def _width(source: Source, what: str) -> int | None:
    column = columns_of(source.rollouts).get(getattr(source.fields, what))
    if isinstance(column, torch.Tensor | np.ndarray) and column.ndim > 1:
        return int(column.shape[1])
    return None


def _some(columns: Mapping[Any, Any], rows: Sequence[int], n: int) -> dict[Any, Any]:
    """These rows of a mapping's columns, and of the columns that its values hold."""
    long = {name: column for name, column in columns.items() if column_length(column) == n}
    inner = {name: _some(c, rows, n) for name, c in columns.items() if isinstance(c, dict)}
    return {**columns, **inner, **(select(long, rows) if long else {})}


def _extents_of(source: Source) -> Mapping[str, Any]:
    with contextlib.suppress(RecordError):  # it has no tokens
        return Rows.of(RowColumns.of(source.rollouts, source.fields)).extents
    return {}


def _missing(widths: Sequence[int | None]) -> list[int]:
    known = [width or 0 for width in widths]
    return [max(known) - width for width in known]
