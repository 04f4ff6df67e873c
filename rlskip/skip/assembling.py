"""A batch put together of rows of several dumps, as the stage would have returned it."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from rlskip.batch.columns import (
    cells_of,
    column_length,
    columns_of,
    is_data_proto,
    is_lazy,
    is_tensordict,
    is_wrapped,
    objects_of,
    own,
    unwrapped,
)
from rlskip.batch.meta import meta_of, plain
from rlskip.batch.padding import LengthError
from rlskip.batch.ragged import is_padded
from rlskip.batch.row_fields import RowFields
from rlskip.batch.rows import RecordError, RowColumns, Rows
from rlskip.batch.tables import Whole
from rlskip.errors import RlskipError
from rlskip.format.fingerprint import VOLATILE, fingerprint
from rlskip.skip.prompt_rows import prompt_groups, row_count

_WHERE = "skip.match=prompt"
_MARKS = {
    "prompt": ("attention", "prompt_mask"),
    "response": ("attention", "mask"),
    "whole": ("attention",),
}
"""What marks the padding of tokens."""


class AssemblyError(RlskipError, ValueError):
    """Rows of several dumps that cannot be one batch."""


def _bare(value: Any) -> Any:
    """A value without the marks of `some_rows`."""
    if type(value) is dict:
        return {name: _bare(part) for name, part in value.items()}
    return value.data if isinstance(value, Whole) else value


def _holds(value: Any, n: int) -> bool:
    """Whether it is a column of `n` values, or a mapping that has one."""
    inner = value.values() if isinstance(value, dict) else ()
    return column_length(value) == n or any(_holds(one, n) for one in inner)


@attrs.define(eq=False, slots=False)  # without slots, for the cached properties
class Assembly:
    """The picked rows as one batch of the parts' kind; it shares no memory with them.

    `parts` have the picked rows of a dump each, which `fields` describe; `picks` have the number of
    a part, and that of a row in it. Tensors of different widths are padded to the widest, on the
    side where the parts have padding. The rows' groups are named as the prompts are: `digests` has
    the hash of each of the prompts, `owners` for each of the picked rows the place of its prompt.
    `totals` are functions of the rows, by the name of a value for a whole batch. Without one the
    parts must have the same; what tells when it was made is left out. `dumps` gives all rows of the
    dumps, which may show padding that the picked ones lack. Of the dumps of several prompts `asked`
    has how many: they may have a value for each. It is empty where those are the only dump's.
    """

    _parts: Sequence[Any]
    _fields: RowFields
    _picks: Sequence[tuple[int, int]]
    _prompts: Any
    _digests: Sequence[str]
    _owners: Sequence[int]
    _totals: Mapping[str, Callable[[Any], Any]]
    _dumps: Callable[[], Iterable[Any]] = tuple
    _asked: Sequence[int] = ()
    # The columns that are put together so far.
    _rows: dict[str, Any] = attrs.field(init=False, factory=dict)

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
        parts, first = self._parts, self._parts[0]
        unknown = [part for part in parts if row_count(part, self._fields) is None]
        if unknown or len({*map(type, parts)}) > 1:
            kinds = ", ".join(sorted({type(part).__name__ for part in unknown or parts}))
            raise AssemblyError(
                f"the dumps hold a {kinds}: no rows that could be put together",
                _WHERE,
                "return a mapping of columns, or a list with one row or one group a prompt",
            )
        if is_tensordict(first):
            return self._table(parts)
        if is_data_proto(first):
            made = copy.copy(first)
            if first.batch is not None:
                made.batch = self._table([part.batch for part in parts])
            made.non_tensor_batch = self._columns([part.non_tensor_batch for part in parts])
            made.meta_info = self._columns([part.meta_info for part in parts], of_meta=True)
            return made
        if isinstance(first, Mapping):
            return self._columns(parts)
        made, name = self._column("", parts), self._fields.group
        if isinstance(made, list) and all(isinstance(row, dict) and name in row for row in made):
            for row, group in zip(made, self._groups([row[name] for row in made]), strict=True):
                row[name] = group
        return made

    def _table(self, parts: Sequence[Any]) -> Any:
        """TensorDicts as one."""
        if all(map(is_lazy, parts)):
            rows = [part.unbind(0) for part in parts]
            return lazy_stack([own(rows[number][row]) for number, row in self._picks])
        given = [columns_of(part) for part in parts]
        columns, size = self._columns(given), [len(self._picks), *parts[0].batch_size[1:]]
        for name, column in given[0].items():
            if is_wrapped(column) and name in columns:
                columns[name] = NonTensorData(columns[name], batch_size=size)
        return TensorDict(columns, batch_size=size, device=parts[0].device)

    def _columns(
        self, parts: Sequence[Mapping[Any, Any]], *, of_meta: bool = False, field: Any = None
    ) -> dict[Any, Any]:
        """Mappings of columns as one; if they are meta info, without what differs.

        Those within a `field` of the batch are left out with it.
        """
        odd = {name for part in parts for name in part.keys() ^ parts[0].keys()}
        if odd and not of_meta:
            fields = sorted(map(str, odd))
            remedy = f"leave it out: skip.drop_fields=[{field or ','.join(fields)}]"
            what = f"some dumps have {', '.join(fields)}, others have not"
            raise AssemblyError(what, _WHERE, remedy)
        counts = Counter(number for number, _ in self._picks)
        made, whole = dict[Any, Any](), dict[Any, list[Any]]()
        for name in [name for name in parts[0] if name not in odd]:
            columns = [part[name] for part in parts]
            if all(column_length(column) == counts[i] for i, column in enumerate(columns)):
                made[name] = self._column(str(name), columns)
            elif all(type(c) is dict and _holds(c, counts[i]) for i, c in enumerate(columns)):
                made[name] = self._columns(columns, of_meta=of_meta, field=field or name)
            else:
                whole[name] = columns
        self._rows |= made  # the outermost last, so that its names count
        for name, values in whole.items():  # totals are of all rows
            self._whole(made, name, values, of_meta, field or name)
        return made

    def _whole(
        self, made: dict[Any, Any], name: Any, values: Sequence[Any], of_meta: bool, field: Any
    ) -> None:
        """Put the value for the whole batch that all dumps have into `made`."""
        bare, values = [*map(_bare, values)], [*map(unwrapped, values)]
        if name in self._totals and any(value is not None for value in values):
            made[name] = self._totals[name](self._rows)
            return
        if name in VOLATILE:
            if all(isinstance(value, Mapping) for value in values):  # meta_info
                made[name] = self._columns(values, of_meta=True)
            elif name in (now := meta_of(self._prompts)):
                made[name] = now[name]
            return
        what = "is one value for a whole batch, and the dumps have different ones"
        if self._asked and all(map(_holds, bare, self._asked)) and not of_meta:
            what = "has as many values as its dump has prompts, and not as many as rows"
        elif len({fingerprint(unwrapped(value), volatile=()) for value in bare}) == 1:
            made[name] = own(unwrapped(bare[0]))
            return
        if not of_meta:
            raise AssemblyError(
                f"{name} {what}",
                _WHERE,
                f"leave it out: skip.drop_fields=[{field}]; or give a function of the rows: "
                f"annotate(totals={{{str(name)!r}: FUNCTION}})",
            )

    def _column(self, name: str, columns: Sequence[Any]) -> Any:
        """The picked cells of a column, as a column of the same kind."""
        given = [cells_of(column) for column in columns]
        cells = [(given[number] or ())[row] for number, row in self._picks]
        kind = columns[0]
        if name and name == self._fields.group:
            cells = self._groups(cells)
        if is_tensordict(kind) and not isinstance(kind, NonTensorStack):
            return self._table(columns)
        if isinstance(kind, torch.Tensor) and any(column.is_nested for column in columns):
            layout = torch.jagged if cells[0].ndim else torch.strided
            return torch.nested.as_nested_tensor(cells, layout=layout)
        if isinstance(kind, np.ndarray) and kind.dtype == object:
            return objects_of([own(cell) for cell in cells])
        if isinstance(kind, np.ndarray) and kind.ndim == 1:
            return np.array(cells)
        if is_padded(kind):
            made = torch.stack(self._padded(name, columns, [*map(torch.as_tensor, cells)]))
            return made.to(kind.dtype) if isinstance(kind, torch.Tensor) else made.numpy()
        cells = [own(cell) for cell in cells]
        return NonTensorStack(*cells) if isinstance(kind, NonTensorStack) else type(kind)(cells)

    def _groups(self, cells: list[Any]) -> list[Any]:
        """What the rows have as their group: as the prompts name it now.

        Where they do not, two prompts of different dumps must not be one group.
        """
        names = prompt_groups(self._prompts, self._fields)
        if names is not None and len(names) == len(self._digests):
            repeated = [names[i] for i in self._owners]
            if len({type(plain(name)) for name in (*repeated, cells[0])}) == 1:
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
        if {*shapes} == {()}:
            return cells
        sizes = [*zip(*shapes, strict=True)] if len({*map(len, shapes)}) == 1 else []
        differ = [dim for dim, widths in enumerate(sizes) if len({*widths}) > 1] or [0]
        added = self._added(name, [*sizes[differ[0]]]) if sizes and len(differ) == 1 else None
        if added is None:
            raise AssemblyError(
                f"{name} has the shapes {', '.join(map(str, sorted({*shapes})))} in the dumps, and "
                "nothing tells how it is padded",
                _WHERE,
                f"name what it holds: annotate(rows=...); or skip.drop_fields=[{name}]",
            )
        before, after = added
        if not any([*before, *after]):
            return cells
        value, behind = self._padding(name), [0, 0] * (len(sizes) - 1 - differ[0])
        return [
            torch.nn.functional.pad(cell, (*behind, before[i], after[i]), value=value)
            for cell, (i, _) in zip(cells, self._picks, strict=True)
        ]

    def _added(self, name: str, widths: list[int]) -> tuple[list[int], list[int]] | None:
        """How much is added before and after; None where that is not known.

        Responses and rows of one column are padded on the right.
        """
        fields, prompts, responses = self._fields, self._widths("prompt"), self._widths("response")
        nothing, added = [0] * len(widths), _missing(widths)
        both = [p + r if min(p, r) >= 0 else -1 for p, r in zip(prompts, responses, strict=True)]
        if widths == both and name not in (fields.prompt, fields.response):
            # Equally wide in all, and yet its prompts and responses may have other widths. Only
            # padding at the two ends keeps them together.
            before = _missing(prompts)
            return (before, _missing(responses)) if not any(before) or self._is_left else None
        if not any(added):
            return nothing, nothing
        differ = prompts != responses
        if widths == prompts and (differ or name in (fields.prompt, fields.prompt_mask)):
            return (added, nothing) if self._is_left else (nothing, added)
        of_response = name in (fields.response, fields.mask, fields.log_probs, fields.reward)
        is_response = widths == responses and (differ or of_response)
        return (nothing, added) if is_response or widths == self._widths("whole") else None

    @property
    def _is_left(self) -> bool:
        """Whether prompts are padded on the left; usually they are."""
        return self._seen.get("prompt", (True, 0))[0]

    def _widths(self, what: str) -> list[int]:
        """Those of each part's prompts, responses or whole rows; -1 where it has no such tensor."""
        columns: list[Any] = [columns_of(p).get(getattr(self._fields, what)) for p in self._parts]
        return [int(c.shape[1]) if is_padded(c) and c.ndim > 1 else -1 for c in columns]

    @functools.cached_property
    def _seen(self) -> dict[str, tuple[bool, int]]:
        """Of prompts, responses and whole rows the first padding in any part or dump.

        Whether it is on the left, and its value.
        """
        found: dict[str, tuple[bool, int]] = {}
        with contextlib.suppress(RecordError):  # they have no tokens
            for part in itertools.chain(self._parts, self._dumps()):
                columns = RowColumns.of(part, self._fields)
                for what, (starts, ends) in Rows.of(columns).extents.items():
                    column: Any = columns.tokens.get(what)
                    if is_padded(column):
                        tokens, places = torch.as_tensor(column), np.arange(column.shape[1])
                        front = (places < starts[:, None]) & (starts < ends)[:, None]
                        for is_left, outside in ((True, front), (False, places >= ends[:, None])):
                            if outside.any():
                                value = int(tokens[torch.from_numpy(outside)][0])
                                found.setdefault(what, (is_left, value))
        return found

    def _padding(self, name: str) -> int:
        """The value that pads a field; raises AssemblyError for a token that is not known."""
        fields = self._fields
        what = next((what for what in _MARKS if name == getattr(fields, what)), "")
        if not what:
            return 0
        if fields.pad is not None:
            return fields.pad
        if what in self._seen:
            return self._seen[what][1]
        marks = {getattr(fields, mark) for mark in _MARKS[what]}
        if not marks.isdisjoint(columns_of(self._parts[0])):
            return 0  # a mask tells that it is padding, whatever its value is
        what, remedy = f"the token that pads {name} is not known", "annotate(rows={'pad': TOKEN})"
        raise AssemblyError(what, _WHERE, f"name it: {remedy}")


def _missing(widths: Sequence[int]) -> list[int]:
    return [max(widths) - width for width in widths]
