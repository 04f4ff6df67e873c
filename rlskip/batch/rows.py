"""The rows of a batch, named by their tokens, and where in a value each row's part is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip._copies import Memory, fresh
from rlskip.batch.columns import cells_of, column_length, columns_of, is_tensor, values_at
from rlskip.batch.meta import plain
from rlskip.batch.padding import completed, unpadded
from rlskip.batch.ragged import Ragged, numbers, spans_of
from rlskip.batch.row_fields import RowFields
from rlskip.errors import RlskipError

#: How a value's entries correspond to a row's tokens.
RESPONSE, WHOLE, SHIFTED, SAMPLED = "response", "whole", "shifted", "sampled"

_MASKS = ("attention", "prompt_mask", "mask")
_OF_TOKENS = ("prompt", "response", "whole", *_MASKS, "labels")
_NO_LABEL = -100


class RecordError(RlskipError, ValueError):
    """A value that cannot be recorded."""


@attrs.frozen(eq=False)
class Layout:
    """Where in a value each row's part is.

    Parameters
    ----------
    align
        What the entries of a part belong to: each token of the response, each token of the row
        (``whole``), each but the first (``shifted``: the logits before it), or each ``sampled``
        one. None: a part is not one value a token.
    spans
        Start and end of each row's part, int64 [B, 2]: along the second dimension of a padded
        value, or along the first one of a `flat` one. None: a part is one entry of the first
        dimension.
    """

    align: str | None = None
    spans: np.ndarray | None = None
    flat: bool = False

    def part(self, value: Any, row: int) -> Any:
        """The part of a value that belongs to a row."""
        if self.spans is None:
            return value[row : row + 1]
        start, end = self.spans[row].tolist()
        return value[start:end] if self.flat else value[row, start:end]


@attrs.frozen(eq=False)
class RowColumns:
    """The columns of a batch that name its rows.

    Parameters
    ----------
    tokens
        Those of tokens and masks, by what they hold (:class:`RowFields`).
    sessions, turns
        Whole numbers, int64 [B]; None where the batch has no such column.
    """

    tokens: dict[str, Any]
    sessions: np.ndarray | None = None
    turns: np.ndarray | None = None

    @classmethod
    def of(cls, batch: Any, fields: RowFields | None = None) -> RowColumns:
        """Those of a batch of any kind, by their names or as `fields` describes them.

        Raises
        ------
        RecordError
            It has no column of tokens.
        """
        columns = {str(name): column for name, column in columns_of(batch).items()}
        columns = {k: column for k, column in columns.items() if column_length(column) is not None}
        fields = fields or RowFields.of(columns)
        named = {what: getattr(fields, what) for what in _OF_TOKENS}
        given = {
            what: columns[name] if name in columns else values_at(columns, name)
            for what, name in named.items()
            if name is not None
        }
        tokens = {what: column for what, column in given.items() if holds_numbers(column)}
        if (labels := tokens.pop("labels", None)) is not None and "mask" not in tokens:
            tokens["mask"] = _labelled(labels)
        if not tokens.keys() & {"response", "whole"}:
            there = ", ".join(sorted(columns)) or "no columns"
            raise RecordError(
                f"these rows have no field of tokens, only {there}",
                "rlskip.record(rows=...)",
                "give the batch with the tokens of its rows",
            )
        sessions, turns = (
            _whole_numbers(columns.get(name or "")) for name in (fields.session, fields.turn)
        )
        return cls(tokens, sessions, turns)


@attrs.frozen(eq=False, slots=False)
class Rows:
    """B rows without their padding. What names them is computed when it is first asked for.

    Parameters
    ----------
    prompt, response
        The tokens of each row. A response whose row is one column begins with the first sampled
        token.
    mask
        Which tokens of the response were sampled, bool; None where no column tells: all of them.
    has_prompts
        Whether a column holds the prompts; else they are empty.
    sessions, turns
        What the batch calls them, int64 [B]; None where it has no such numbers.
    """

    prompt: Ragged
    response: Ragged
    mask: Ragged | None
    has_prompts: bool
    sessions: np.ndarray | None
    turns: np.ndarray | None
    # Width, start and end of the response's tokens and of the row's, as padded values have them.
    _of_response: tuple[np.ndarray, np.ndarray, np.ndarray]
    _of_whole: tuple[np.ndarray, np.ndarray, np.ndarray]
    _fills: Sequence[bytes] = ()  # they name the rows, too

    def __len__(self) -> int:
        return len(self.response)

    @classmethod
    def of(cls, columns: RowColumns, memory: Memory | None = None) -> Rows:
        """The rows that columns of tokens have.

        Parameters
        ----------
        memory
            Where the tokens are copied to. By default the rows are views of the columns, which must
            not change.
        """
        read: dict[str, Ragged] = {}
        for what, column in columns.tokens.items():
            is_objects = isinstance(column, np.ndarray) and column.dtype == object
            is_list = is_objects or isinstance(column, list)
            if what == "mask" and is_list and read.keys() & {"response", "whole"}:
                column = completed(column, read)
            found = Ragged.of(column, bool if what in _MASKS else np.int64, memory or fresh)
            if found is not None:
                read[what] = found
        if not read.keys() & {"response", "whole"}:
            what = "the tokens of these rows are not whole numbers"
            raise RecordError(what, "rlskip.record(rows=...)")
        n = len(read["response" if "response" in read else "whole"])
        read = {what: column for what, column in read.items() if len(column) == n}
        cut = unpadded(read)
        if memory is not None:
            cut |= {what: cut[what].copied(memory) for what in ("prompt", "response")}
        return cls(sessions=columns.sessions, turns=columns.turns, **cut)

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """How many of each row's tokens precede the response, int64 [B]."""
        return self.prompt.lengths

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has, int64 [B]."""
        return self.prompt.lengths + self.response.lengths  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, as they were read and as `flat_tokens`."""
        return self.prompt.flat.nbytes + self.response.flat.nbytes + 8 * int(self.lengths.sum())

    @cached_property
    def flat_tokens(self) -> np.ndarray:
        """The tokens of all rows, one after the other, int64: prompt and response of each."""
        pieces = zip(self.prompt.cells, self.response.cells, strict=True)
        every = [np.empty(0, np.int64), *itertools.chain.from_iterable(pieces)]
        return np.concatenate(every, dtype=np.int64, casting="unsafe")

    @cached_property
    def flat_sampled(self) -> np.ndarray:
        """Which of the tokens of all rows were sampled, bool."""
        found = np.zeros(int(self.lengths.sum()), bool)
        ends, counts = np.cumsum(self.lengths).tolist(), self.response.lengths.tolist()
        cells = [True] * len(self) if self.mask is None else self.mask.cells
        for end, count, cell in zip(ends, counts, cells, strict=True):
            found[end - count : end] = cell
        return found

    @cached_property
    def tokens(self) -> list[np.ndarray]:
        """The tokens of each row: a view of `flat_tokens`."""
        return self._cut(self.flat_tokens)

    @cached_property
    def sampled(self) -> list[np.ndarray]:
        """Which of each row's tokens were sampled: a view of `flat_sampled`."""
        return self._cut(self.flat_sampled)

    @cached_property
    def keys(self) -> np.ndarray:
        """A hash of each row's tokens, uint64 [B]. Rows with equal tokens have equal keys."""
        return _hashes(self.tokens, self._fills)

    @cached_property
    def prompts(self) -> np.ndarray:
        """Hashes of each row's prompt, uint64 [B]."""
        rows = zip(self.tokens, self.prompt_lengths.tolist(), strict=True)
        return _hashes([row[:length] for row, length in rows])

    @cached_property
    def masks(self) -> np.ndarray:
        """Hashes of which of each row's tokens were sampled, uint64 [B]."""
        return _hashes(self.sampled)

    def _cut(self, flat: np.ndarray) -> list[np.ndarray]:
        return np.split(flat, np.cumsum(self.lengths)[:-1]) if len(self) else []

    def layout_of(self, shape: Sequence[int], lengths: Sequence[int] | None = None) -> Layout:
        """Where the parts of a value are that has this shape, or that is flat with these lengths.

        Raises
        ------
        RecordError
            The value has no part for each row.
        """
        n = len(self)
        if lengths is None and shape and shape[0] == n:
            return self._padded(shape[1]) if len(shape) > 1 else Layout()
        counts = [int(np.count_nonzero(mask)) for mask in self.sampled]
        if lengths is not None and len(lengths) == n:
            return Layout(self._align_of(list(lengths), counts), spans_of(lengths), flat=True)
        if len(shape) == 1 and shape[0] == sum(counts):
            return Layout(SAMPLED, spans_of(counts), flat=True)
        raise RecordError(
            f"a value of shape {list(shape)} has no part for each of {n} rows",
            remedy=f"give it {n} entries, or one for each of the {sum(counts)} sampled tokens",
        )

    def response_spans(self, width: int) -> np.ndarray | None:
        """Where along the second dimension of a padded value each response's entries are.

        Int64 [B, 2]; None if the value has neither the width of responses nor that of rows.
        """
        for widths, _, ends in (self._of_response, self._of_whole):
            if (widths == width).all():
                return np.stack([ends - self.response.lengths, ends], axis=1)
        return None

    def _padded(self, width: int) -> Layout:
        places = [(RESPONSE, self._of_response, 0)]
        _, starts, ends = self._of_whole
        if (ends - starts == self.lengths).all():  # no padding within rows
            places += [(WHOLE, self._of_whole, 0), (SHIFTED, self._of_whole, 1)]
        for align, (widths, starts, ends), less in places:
            if (widths - less == width).all() and len(self):
                spans = np.stack([starts, np.maximum(starts, ends - less)], axis=1)
                return Layout(align, spans)
        return Layout()

    def _align_of(self, lengths: list[int], counts: list[int]) -> str | None:
        whole = self.lengths
        known = ((RESPONSE, whole - self.prompt_lengths), (WHOLE, whole), (SAMPLED, counts))
        return next((align for align, expected in known if lengths == list(expected)), None)


def token_places(
    align: str | None, entries: int, prompt_length: int, sampled: np.ndarray
) -> np.ndarray:
    """Which token of a row each entry of its part belongs to, int64; none without an alignment.

    Parameters
    ----------
    align
        That of the :class:`Layout`.
    entries
        How many entries the part has.
    sampled
        Which of the row's tokens were sampled, bool [T]. An entry beyond them has no place.
    """
    if align is None:
        return np.empty(0, np.int64)
    if align == SAMPLED:
        return np.flatnonzero(sampled)[:entries]
    first = {WHOLE: 0, SHIFTED: 1}.get(align, prompt_length)
    return np.arange(first, min(first + entries, len(sampled)))


def by_token(
    part: np.ndarray, align: str | None, prompt_length: int, sampled: np.ndarray
) -> np.ndarray:
    """A row's part as one float64 for each of the row's tokens; NaN where it has none."""
    found = np.full(len(sampled), np.nan)
    places = token_places(align, len(part), prompt_length, sampled)
    found[places] = part.reshape(len(part), -1)[: len(places), 0] if len(places) else 0
    return found


def holds_numbers(column: Any) -> bool:
    """Whether a column has a sequence of whole numbers for each row, as far as its type tells."""
    if is_tensor(column):
        return column.is_nested or (column.dim() == 2 and not column.dtype.is_floating_point)
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column.ndim == 2 and column.dtype.kind in "biu"
    cells = (cell for cell in cells_of(column) or () if cell is not None)
    cell = plain(next(cells, None))
    return isinstance(cell, list | tuple) and numbers(cell) is not None


def _labelled(labels: Any) -> Any:
    """A mask of the tokens that have a label."""
    if (is_tensor(labels) and not labels.is_nested) or isinstance(labels, np.ndarray):
        return labels != _NO_LABEL
    cells = map(numbers, cells_of(labels) or ())
    return [None if cell is None else cell != _NO_LABEL for cell in cells]


def _whole_numbers(column: Any) -> np.ndarray | None:
    cells = None if column is None else plain(column)
    if not isinstance(cells, list) or not all(type(cell) is int for cell in cells):
        return None
    return np.array(cells, np.int64)


def _hashes(rows: Sequence[np.ndarray], more: Sequence[bytes] = ()) -> np.ndarray:
    found = []
    for row, end in itertools.zip_longest(rows, more, fillvalue=b""):
        state = xxhash.xxh3_64(np.ascontiguousarray(row).data)
        state.update(end)
        found.append(state.intdigest())
    return np.array(found, np.uint64)
