"""Rows of several dumps, and how their columns are padded to one width.

A field is padded on the side where the dumps have padding, by the tokens that it belongs to.
"""

from __future__ import annotations

import contextlib
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

_NO_LABEL = -100
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
        if isinstance(rollouts, torch.Tensor | np.ndarray):
            return cls(rollouts[[*rows]], fields, len(rows))
        if isinstance(rollouts, dict):
            return cls(_some(rollouts, rows, n), fields, len(rows))
        some = select(rollouts, rows)
        if is_data_proto(some):
            some.meta_info = _some(some.meta_info, rows, n)
        return cls(some, fields, len(rows))


@attrs.define(eq=False)
class Widths:
    """The widths of what several sources hold of prompts, responses and whole rows."""

    _sources: Sequence[Source]
    _extents: list[Mapping[str, Any]] | None = attrs.field(init=False, default=None)

    @property
    def _fields(self) -> RowFields:
        return self._sources[0].fields

    def padded(
        self, name: str, columns: Sequence[torch.Tensor], cells: list[torch.Tensor],
        sources: Sequence[int],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Cells of these columns, each of one of the `sources`, in the shape of the widest.

        Raises
        ------
        AssemblyError
            Nothing tells how the field is padded.
        """
        shapes = {tuple(column.shape[1:]) for column in columns}
        if len({len(shape) for shape in shapes}) > 1:
            raise AssemblyError(f"{name} has {len(shapes)} ranks in the dumps")
        sizes = [[*shape] for shape in zip(*(column.shape[1:] for column in columns), strict=True)]
        differ = [dim for dim, size in enumerate(sizes) if len({*size}) > 1]
        if not differ and sizes and self._is_both(name, sizes[0]):
            # Equally wide in all, and yet the parts may have other widths.
            differ = [0] if len({*self._widths("prompt")}) > 1 else []
        if not differ:
            return cells
        before, after = self._sides(name, sizes[differ[0]]) if len(differ) == 1 else (None, None)
        if before is None or after is None:
            raise AssemblyError(
                f"{name} has the shapes {', '.join(map(str, sorted(shapes)))} in the dumps, and "
                "nothing tells how it is padded",
                "skip.match=prompt",
                f"name what it holds: annotate(rows=...); or skip.drop_fields=[{name}]",
            )
        value = self._padding(name)
        behind = [0, 0] * (len(sizes) - 1 - differ[0])
        return [
            torch.nn.functional.pad(
                cell, (*behind, before[source], after[source]), value=value
            )
            for cell, source in zip(cells, sources, strict=True)
        ]  # fmt: skip

    def _sides(
        self, name: str, widths: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]] | tuple[None, None]:
        """By source how much is added before and after; None where that is not known."""
        prompt, response, whole = map(self._widths, ("prompt", "response", "whole"))
        nothing, fields = [0] * len(widths), self._fields
        if self._is_both(name, widths):
            # Only padding at the two ends keeps prompts and responses together.
            if self._is_left("prompt") and not self._is_left("response"):
                return _missing(prompt), _missing(response)
            return None, None
        of_prompt = name in (fields.prompt, fields.prompt_mask)
        of_response = name in (fields.response, fields.mask, fields.log_probs, fields.reward)
        differ = prompt != response
        likely = [
            ("prompt", prompt, of_prompt or differ),
            ("response", response, of_response or differ),
            ("response", whole, True),
        ]
        for what, tokens, is_sure in likely:
            if is_sure and [*widths] == tokens:
                added = _missing(widths)
                return (added, nothing) if self._is_left(what) else (nothing, added)
        return None, None

    def _is_both(self, name: str, widths: Sequence[int]) -> bool:
        """Whether a field of these widths holds prompts followed by responses."""
        pairs = zip(self._widths("prompt"), self._widths("response"), strict=True)
        both = [None if None in pair else sum(pair) for pair in pairs]
        return [*widths] == both and name not in (
            self._fields.prompt,
            self._fields.response,
        )

    def _widths(self, what: str) -> list[Any]:
        return [self._width(source, what) for source in self._sources]

    def _width(self, source: Source, what: str) -> int | None:
        column = columns_of(source.rollouts).get(getattr(source.fields, what))
        if not isinstance(column, torch.Tensor | np.ndarray) or column.ndim < 2:
            return None
        return int(column.shape[1])

    def _is_left(self, what: str) -> bool:
        """Whether prompts, or whole rows, are padded on the left; usually only prompts are."""
        for source, known in zip(self._sources, self._known_extents(), strict=True):
            if what in known:
                starts, ends = known[what]
                if ((starts > 0) & (starts < ends)).any():
                    return True
                if (ends < (self._width(source, what) or 0)).any():
                    return False
        return what == "prompt"

    def _known_extents(self) -> list[Mapping[str, Any]]:
        """By source where its rows are no padding (:mod:`rlskip.batch.padding`)."""
        if self._extents is None:
            self._extents = [*map(_extents_of, self._sources)]
        return self._extents

    def _padding(self, name: str) -> int:
        """The value that pads a field.

        Raises
        ------
        AssemblyError
            It is a token that is not known.
        """
        fields = self._fields
        if name == fields.labels:
            return _NO_LABEL
        what = next((w for w in ("prompt", "response", "whole") if name == getattr(fields, w)), "")
        if not what:
            return 0
        if fields.pad is not None:
            return fields.pad
        is_marked = True
        for source, known in zip(self._sources, self._known_extents(), strict=True):
            columns = columns_of(source.rollouts)
            marks = [getattr(source.fields, mark) for mark in _MARKS[what]]
            is_marked = is_marked and not columns.keys().isdisjoint(filter(None, marks))
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


def _some(columns: Mapping[Any, Any], rows: Sequence[int], n: int) -> dict[Any, Any]:
    """These rows of a mapping's columns, and of the columns that its values hold."""
    some = {}
    for name, column in columns.items():
        if column_length(column) == n:
            column = select({name: column}, rows)[name]
        elif isinstance(column, dict):
            column = _some(column, rows, n)
        some[name] = column
    return some


def _extents_of(source: Source) -> Mapping[str, Any]:
    with contextlib.suppress(RecordError):  # it has no tokens
        return Rows.of(RowColumns.of(source.rollouts, source.fields)).extents
    return {}


def _missing(widths: Sequence[int]) -> list[int]:
    return [max(widths) - width for width in widths]
