"""A batch put together of rows of several dumps, as the stage would have returned it."""

from __future__ import annotations

import contextlib
import copy
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
    select,
    unwrapped,
)
from rlskip.batch.meta import meta_of, plain
from rlskip.batch.padding import LengthError
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import VOLATILE, fingerprint
from rlskip.skip.prompt_rows import prompt_groups, row_count

Totals = Mapping[str, Callable[[Any], Any]]

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


Pick = tuple[int, int]
"""The number of a source, and that of a row."""


@attrs.define(eq=False)
class Assembly:
    """The picked rows as one batch of the sources' kind; it shares no memory with them.

    Tensors of different widths are padded to the widest, on the side where the sources have
    padding. The rows' groups are named as the prompts are.

    Parameters
    ----------
    digests
        The hash of each of the prompts.
    owners
        For each of the picked rows the place of its prompt.
    totals
        By name the functions of the rows that give values which belong to a whole batch. Without
        one the sources must have the same value; those that tell when a batch was made are left
        out.
    """

    _sources: Sequence[Source]
    _picks: Sequence[Pick]
    _prompts: Any
    _digests: Sequence[str]
    _owners: Sequence[int]
    _totals: Totals
    # Where totals belong, and their names.
    _due: list[tuple[Any, Any]] = attrs.field(init=False, factory=list)
    _extents: list[Mapping[str, Any]] | None = attrs.field(init=False, default=None)

    @property
    def _fields(self) -> RowFields:
        return self._sources[0].fields

    def batch(self) -> Any:
        """Put it together.

        Raises
        ------
        AssemblyError
            A value differs, a field does not fit its tokens, or its padding is not known.
        """
        made = self._put_together()
        try:
            with contextlib.suppress(RecordError):  # it has no tokens
                RowColumns.of(made, self._fields).refuse_misfits("skip.match=prompt")
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
                "skip.match=prompt",
                "return a mapping of columns, or a list with one row or one group a prompt",
            )
        if not isinstance(first, list) and not columns_of(first):
            return self._column("", parts)
        if isinstance(first, list):
            return self._named([own(parts[source][row]) for source, row in self._picks])
        if is_data_proto(first):
            made = copy.copy(first)
            if first.batch is not None:
                made.batch = self._table([part.batch for part in parts])
            made.non_tensor_batch = self._columns([part.non_tensor_batch for part in parts])
            made.meta_info = self._columns([part.meta_info for part in parts], of_meta=True)
        elif is_tensordict(first):
            made = self._table(parts)
        else:
            made = self._columns([dict(part) for part in parts])
        for holder, name in self._due:
            holder[name] = self._totals[name](made)
        return made

    def _table(self, parts: Sequence[Any]) -> Any:
        """TensorDicts as one."""
        if all(map(is_lazy, parts)):
            rows = [part.unbind(0) for part in parts]
            return lazy_stack([own(rows[source][row]) for source, row in self._picks])
        columns = self._columns([columns_of(part) for part in parts])
        made = TensorDict(columns, batch_size=[len(self._picks)])
        self._due = [(made if at is columns else at, name) for at, name in self._due]
        return made

    def _columns(
        self, parts: Sequence[Mapping[Any, Any]], *, of_meta: bool = False
    ) -> dict[Any, Any]:
        """Mappings of columns as one; if they are meta info, without what differs."""
        names = parts[0].keys()
        odd = {name for part in parts for name in part.keys() ^ names}
        if odd and not of_meta:
            raise AssemblyError(
                f"some dumps have {', '.join(map(str, sorted(odd, key=str)))}, others have not",
                "skip.match=prompt",
                f"leave it out: skip.drop_fields=[{','.join(map(str, sorted(odd, key=str)))}]",
            )
        made = {}
        for name in [name for name in names if name not in odd]:
            columns = [part[name] for part in parts]
            lengths = zip(map(column_length, columns), self._sources, strict=True)
            if all(length == source.n for length, source in lengths):
                made[name] = self._column(str(name), columns)
            elif _hold_columns(columns, self._sources):
                made[name] = self._columns(columns, of_meta=of_meta)
            else:
                self._whole(made, name, columns, of_meta)
        return made

    def _named(self, rows: list[Any]) -> list[Any]:
        """The rows, if they are mappings, with their groups named as the prompts are."""
        name = self._fields.group
        if all(isinstance(row, dict) and name in row for row in rows):
            for row, group in zip(rows, self._groups([row[name] for row in rows]), strict=True):
                row[name] = group
        return rows

    # -- values for the whole batch ------------------------------------------------------

    def _whole(self, made: dict[Any, Any], name: Any, values: Sequence[Any], of_meta: bool) -> None:
        """Put the value for the whole batch that all dumps have into `made`."""
        if name in self._totals and any(value is not None for value in values):
            made[name] = None  # it keeps its place
            self._due.append((made, name))
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
                "skip.match=prompt",
                f"leave it out: skip.drop_fields=[{name}]; or give a function of the rows: "
                f"annotate(totals={{{str(name)!r}: FUNCTION}})",
            )

    # -- columns -------------------------------------------------------------------------

    def _column(self, name: str, columns: Sequence[Any]) -> Any:
        """The picked cells of a column, as a column of the same kind."""
        given = [cells_of(column) for column in columns]
        cells = [(given[source] or ())[row] for source, row in self._picks]
        kind = columns[0]
        if name and name == self._fields.group:
            cells = self._groups(cells)
        if isinstance(kind, torch.Tensor):
            if any(column.is_nested for column in columns):
                layout = torch.jagged if cells[0].ndim else torch.strided
                return torch.nested.as_nested_tensor(cells, layout=layout)
            padded = self._padded(name, columns, [torch.as_tensor(cell) for cell in cells])
            return torch.stack(padded).to(kind.dtype)
        if isinstance(kind, np.ndarray):
            if kind.dtype == object:
                return objects_of([own(cell) for cell in cells])
            if kind.ndim == 1:
                return np.array(cells, kind.dtype if kind.dtype.kind not in "SU" else None)
            tensors = [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
            padded = self._padded(name, tensors, [torch.as_tensor(cell) for cell in cells])
            return torch.stack(padded).numpy()
        cells = [own(cell) for cell in cells]
        if isinstance(kind, NonTensorStack):
            return NonTensorStack(*cells)
        return lazy_stack(cells) if is_tensordict(kind) else type(kind)(cells)

    def _groups(self, cells: list[Any]) -> list[Any]:
        """What the rows have as their group: as the prompts name it now.

        Raises
        ------
        AssemblyError
            The prompts do not, and two prompts of different dumps would be one group.
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
                    "skip.match=prompt",
                    "name the field of the prompts that it repeats: "
                    "annotate(rows={'prompt_group': FIELD})",
                )
        return cells

    # -- padding -------------------------------------------------------------------------

    def _padded(
        self, name: str, columns: Sequence[torch.Tensor], cells: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The cells in the shape of the widest column."""
        shapes = {tuple(column.shape[1:]) for column in columns}
        if len({len(shape) for shape in shapes}) > 1:
            raise AssemblyError(f"{name} has {len(shapes)} ranks in the dumps")
        sizes = [[*shape] for shape in zip(*(column.shape[1:] for column in columns), strict=True)]
        differ = [dim for dim, size in enumerate(sizes) if len({*size}) > 1]
        if not differ and sizes and self._is_both(name, sizes[0]):
            # Equally wide in all, and yet the parts may have other widths.
            differ = [0] * (len({*self._widths("prompt")}) > 1)
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
            for cell, (source, _) in zip(cells, self._picks, strict=True)
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
        return [*widths] == both and name not in (self._fields.prompt, self._fields.response)

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


def _hold_columns(values: Sequence[Any], sources: Sequence[Source]) -> bool:
    """Whether values are mappings that hold columns only."""
    return all(
        isinstance(value, dict)
        and bool(value)
        and all(column_length(column) == source.n for column in value.values())
        for value, source in zip(values, sources, strict=True)
    )
