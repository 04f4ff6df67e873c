"""A batch put together of rows of several dumps, as the stage would have returned it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from rlskip.batch.columns import (
    cells_of,
    column_length,
    columns_of,
    is_data_proto,
    is_lazy,
    is_tensordict,
    objects_of,
    own,
    unwrapped,
)
from rlskip.batch.meta import meta_of, plain
from rlskip.batch.padding import LengthError
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import VOLATILE, fingerprint
from rlskip.skip.prompt_rows import Source, prompt_groups

_WHERE = "skip.match=prompt"
_MARKS = {
    "prompt": ("attention", "prompt_mask"),
    "response": ("attention", "mask"),
    "whole": ("attention",),
}
"""What marks the padding of tokens."""


class AssemblyError(RlskipError, ValueError):
    """Rows of several dumps that cannot be one batch."""


@attrs.define(eq=False, slots=False)  # without slots, for the cached property
class Assembly:
    """The picked rows as one batch of the sources' kind; it shares no memory with them.

    `picks` have the number of a source, and that of a row. Tensors of different widths are padded
    to the widest, on the side where the sources have padding. The rows' groups are named as the
    prompts are: `digests` has the hash of each of the prompts, `owners` for each of the picked rows
    the place of its prompt. `totals` are functions of the rows, by the name of a value for a whole
    batch. Without one the sources must have the same; what tells when it was made is left out.
    """

    _sources: Sequence[Source]
    _picks: Sequence[tuple[int, int]]
    _prompts: Any
    _digests: Sequence[str]
    _owners: Sequence[int]
    _totals: Mapping[str, Callable[[Any], Any]]
    # The columns that are put together so far.
    _rows: dict[str, Any] = attrs.field(init=False, factory=dict)
    _fields: RowFields = attrs.field(init=False)
    # By source, as are all widths below.
    _prompt_widths: list[int] = attrs.field(init=False)
    _response_widths: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._fields = self._sources[0].fields
        self._prompt_widths = [source.width("prompt") for source in self._sources]
        self._response_widths = [source.width("response") for source in self._sources]

    def batch(self) -> Any:
        """Put it together.

        Raises AssemblyError where a value differs, a field does not fit its tokens, or its padding
        is not known.
        """
        made = self._put_together()
        try:
            with contextlib.suppress(RecordError):  # it has no tokens
                RowColumns.of(made, self._fields).refuse_misfits(_WHERE)
        except LengthError as error:
            remedy = "generate them again, or leave the field out: skip.drop_fields=[FIELD]"
            raise AssemblyError(error.what, error.where, remedy) from error
        return made

    def _put_together(self) -> Any:
        parts = [source.rollouts for source in self._sources]
        first = parts[0]
        unknown = [p for s, p in zip(self._sources, parts, strict=True) if not s.n]
        if unknown or len({type(part) for part in parts}) > 1:
            kinds = ", ".join(sorted({type(part).__name__ for part in unknown or parts}))
            raise AssemblyError(
                f"the dumps hold a {kinds}: no rows that could be put together",
                _WHERE,
                "return a mapping of columns, or a list with one row or one group a prompt",
            )
        if not isinstance(first, list) and not columns_of(first):
            return self._column("", parts)
        if isinstance(first, list):
            return self._named([own(parts[source][row]) for source, row in self._picks])
        if is_tensordict(first):
            return self._table(parts)
        if is_data_proto(first):
            made = copy.copy(first)
            if first.batch is not None:
                made.batch = self._table([part.batch for part in parts])
            made.non_tensor_batch = self._columns([part.non_tensor_batch for part in parts])
            made.meta_info = self._columns([part.meta_info for part in parts], of_meta=True)
            return made
        return self._columns([dict(part) for part in parts])

    def _table(self, parts: Sequence[Any]) -> Any:
        """TensorDicts as one."""
        if all(map(is_lazy, parts)):
            rows = [part.unbind(0) for part in parts]
            return lazy_stack([own(rows[source][row]) for source, row in self._picks])
        columns = self._columns([columns_of(part) for part in parts])
        return TensorDict(columns, batch_size=[len(self._picks)])

    def _columns(
        self, parts: Sequence[Mapping[Any, Any]], *, of_meta: bool = False
    ) -> dict[Any, Any]:
        """Mappings of columns as one; if they are meta info, without what differs."""
        names = parts[0].keys()
        odd = {name for part in parts for name in part.keys() ^ names}
        if odd and not of_meta:
            fields = sorted(map(str, odd))
            remedy = f"leave it out: skip.drop_fields=[{','.join(fields)}]"
            what = f"some dumps have {', '.join(fields)}, others have not"
            raise AssemblyError(what, _WHERE, remedy)
        made = {}
        whole: dict[Any, list[Any]] = {}
        for name in [name for name in names if name not in odd]:
            columns = [part[name] for part in parts]
            pairs = [*zip(columns, self._sources, strict=True)]
            if all(column_length(column) == source.n for column, source in pairs):
                made[name] = self._rows[name] = self._column(str(name), columns)
            elif all(
                isinstance(column, dict) and {*map(column_length, column.values())} == {source.n}
                for column, source in pairs
            ):
                made[name] = self._columns(columns, of_meta=of_meta)
            else:
                whole[name] = columns
        for name, values in whole.items():  # totals are of all rows
            self._whole(made, name, values, of_meta)
        return made

    def _named(self, rows: list[Any]) -> list[Any]:
        """The rows, if they are mappings, with their groups named as the prompts are."""
        name = self._fields.group
        if all(isinstance(row, dict) and name in row for row in rows):
            for row, group in zip(rows, self._groups([row[name] for row in rows]), strict=True):
                row[name] = group
        return rows

    def _whole(self, made: dict[Any, Any], name: Any, values: Sequence[Any], of_meta: bool) -> None:
        """Put the value for the whole batch that all dumps have into `made`."""
        if name in self._totals and any(value is not None for value in values):
            made[name] = self._totals[name](self._rows)
        elif name in VOLATILE:
            if all(isinstance(value, Mapping) for value in values):  # meta_info
                made[name] = self._columns(values, of_meta=True)
            elif name in (now := meta_of(self._prompts)):
                made[name] = now[name]
        elif len({fingerprint(unwrapped(value), volatile=()) for value in values}) == 1:
            made[name] = own(unwrapped(values[0]))
        elif not of_meta:
            raise AssemblyError(
                f"{name} is one value for a whole batch, and the dumps have different ones",
                _WHERE,
                f"leave it out: skip.drop_fields=[{name}]; or give a function of the rows: "
                f"annotate(totals={{{str(name)!r}: FUNCTION}})",
            )

    def _column(self, name: str, columns: Sequence[Any]) -> Any:
        """The picked cells of a column, as a column of the same kind."""
        given = [cells_of(column) for column in columns]
        cells = [(given[source] or ())[row] for source, row in self._picks]
        kind = columns[0]
        if name and name == self._fields.group:
            cells = self._groups(cells)
        if isinstance(kind, torch.Tensor) and any(column.is_nested for column in columns):
            layout = torch.jagged if cells[0].ndim else torch.strided
            return torch.nested.as_nested_tensor(cells, layout=layout)
        if isinstance(kind, np.ndarray) and kind.dtype == object:
            return objects_of([own(cell) for cell in cells])
        if isinstance(kind, np.ndarray) and kind.ndim == 1:
            return np.array(cells, kind.dtype if kind.dtype.kind not in "SU" else None)
        if isinstance(kind, torch.Tensor | np.ndarray):
            made = torch.stack(self._padded(name, columns, [*map(torch.as_tensor, cells)]))
            return made.to(kind.dtype) if isinstance(kind, torch.Tensor) else made.numpy()
        cells = [own(cell) for cell in cells]
        if isinstance(kind, NonTensorStack):
            return NonTensorStack(*cells)
        return lazy_stack(cells) if is_tensordict(kind) else type(kind)(cells)

    def _groups(self, cells: list[Any]) -> list[Any]:
        """What the rows have as their group: as the prompts name it now.

        Where they do not, two prompts of different dumps must not be one group.
        """
        names = prompt_groups(self._prompts, self._fields)
        if names is not None and len(names) == len(self._digests):
            repeated = [names[i] for i in self._owners]
            kinds = {type(plain(name)) for name in (*repeated, cells[0])}
            if len(kinds) == 1:
                return repeated
        owner: dict[Any, str] = {}
        for i, cell in zip(self._owners, cells, strict=True):
            if owner.setdefault(plain(cell), self._digests[i]) != self._digests[i]:
                raise AssemblyError(
                    f"{self._fields.group} names groups of two prompts {plain(cell)!r:.60}",
                    _WHERE,
                    "name the field of the prompts that it repeats: "
                    "annotate(rows={'prompt_group': FIELD})",
                )
        return cells

    def _padded(
        self, name: str, columns: Sequence[Any], cells: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The picked cells of these columns in the shape of the widest."""
        shapes = [tuple(column.shape[1:]) for column in columns]
        ranks = {*map(len, shapes)}
        sizes = [[*size] for size in zip(*shapes, strict=True)] if len(ranks) == 1 else []
        differ = [dim for dim, size in enumerate(sizes) if len({*size}) > 1]
        if len({*shapes}) == 1:
            # Equally wide in all, and yet its prompts and responses may have other widths.
            if not sizes or len({*self._prompt_widths}) == 1 or not self._is_both(name, sizes[0]):
                return cells
            differ = [0]
        added = self._added(name, sizes[differ[0]]) if len(differ) == 1 else None
        if added is None:
            raise AssemblyError(
                f"{name} has the shapes {', '.join(map(str, sorted({*shapes})))} in the dumps, and "
                "nothing tells how it is padded",
                _WHERE,
                f"name what it holds: annotate(rows=...); or skip.drop_fields=[{name}]",
            )
        value, behind = self._padding(name), [0, 0] * (len(sizes) - 1 - differ[0])
        before, after = added
        return [
            torch.nn.functional.pad(cell, (*behind, before[i], after[i]), value=value)
            for cell, (i, _) in zip(cells, self._picks, strict=True)
        ]

    def _added(self, name: str, widths: list[int]) -> tuple[list[int], list[int]] | None:
        """How much is added before and after; None where that is not known.

        Responses and rows of one column are padded on the right.
        """
        fields, nothing, added = self._fields, [0] * len(widths), _missing(widths)
        prompts, responses = self._prompt_widths, self._response_widths
        if self._is_both(name, widths):
            # Only padding at the two ends keeps prompts and responses together.
            is_known = self._prompts_are_padded_left
            return (_missing(prompts), _missing(responses)) if is_known else None
        differ = prompts != responses
        if widths == prompts and (differ or name in (fields.prompt, fields.prompt_mask)):
            return (added, nothing) if self._prompts_are_padded_left else (nothing, added)
        of_response = name in (fields.response, fields.mask, fields.log_probs, fields.reward)
        is_whole = widths == [source.width("whole") for source in self._sources]
        if (widths == responses and (differ or of_response)) or is_whole:
            return nothing, added
        return None

    def _is_both(self, name: str, widths: list[int]) -> bool:
        """Whether a field of these widths holds prompts followed by responses."""
        pairs = zip(self._prompt_widths, self._response_widths, widths, strict=True)
        is_both = all(p and r and p + r == width for p, r, width in pairs)
        return is_both and name not in (self._fields.prompt, self._fields.response)

    @functools.cached_property
    def _prompts_are_padded_left(self) -> bool:
        """Usually they are."""
        for source, width in zip(self._sources, self._prompt_widths, strict=True):
            starts, ends = source.extents.get("prompt", (np.zeros(0), np.zeros(0)))
            if ((starts > 0) & (starts < ends)).any():
                return True
            if (ends < width).any():
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
        for source in self._sources:
            columns = columns_of(source.rollouts)
            marks = {getattr(source.fields, mark) for mark in _MARKS[what]}
            is_marked = is_marked and not columns.keys().isdisjoint(marks)
            if what in source.extents:
                tokens, (starts, ends) = torch.as_tensor(columns[name]), source.extents[what]
                places = np.arange(tokens.shape[1])
                outside = (places < starts[:, None]) | (places >= ends[:, None])
                if outside.any():
                    return int(tokens[torch.from_numpy(outside)][0])
        if is_marked:
            return 0  # a mask tells that it is padding, whatever its value is
        what, remedy = f"the token that pads {name} is not known", "annotate(rows={'pad': TOKEN})"
        raise AssemblyError(what, _WHERE, f"name it: {remedy}")


def _missing(widths: Sequence[int]) -> list[int]:
    return [max(widths) - width for width in widths]
