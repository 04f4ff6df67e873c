"""The rows of a batch, named by their tokens, and where in other values each row's part is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip._copies import Memory
from rlskip._human import counted
from rlskip.batch.columns import cells_of, column_length, columns_of, values_at
from rlskip.batch.meta import plain
from rlskip.batch.padding import Misfit, Places, fit, places_of_response, refuse, unpadded
from rlskip.batch.ragged import Ragged, holds_numbers, is_padded, lengths_of, spans_of
from rlskip.batch.row_fields import RowFields
from rlskip.errors import RlskipError

_MASKS = ("attention", "prompt_mask", "mask")
_OF_TOKENS = ("prompt", "response", "whole", *_MASKS)
_VALUES = ("log_probs", "reward")

#: How a value's entries correspond to a row's tokens.
RESPONSE, WHOLE, SHIFTED, SAMPLED = "response", "whole", "shifted", "sampled"


class RecordError(RlskipError, ValueError):
    """A value that cannot be recorded."""


@attrs.frozen(eq=False)
class RowColumns:
    """The columns of a batch that name its rows, and those with a value for each token.

    ``tokens`` (and masks) and ``values`` (log-probs, rewards) are by what they hold, ``names`` is
    what the batch calls them. ``sessions`` and ``turns`` are int64 [B], or None.
    """

    tokens: dict[str, Any]
    values: dict[str, Any]
    names: dict[str, str]
    sessions: np.ndarray | None = None
    turns: np.ndarray | None = None

    @classmethod
    def of(cls, batch: Any, fields: RowFields | None = None) -> RowColumns:
        """Those of a batch of any kind, by their names or as `fields` describes them.

        Raises RecordError where it has no column of tokens.
        """
        columns = {str(k): c for k, c in columns_of(batch).items() if column_length(c) is not None}
        fields = fields or RowFields.of(columns)
        every = {what: getattr(fields, what) for what in (*_OF_TOKENS, *_VALUES)}
        names = {what: name for what, name in every.items() if name is not None}
        given = {
            what: columns[name] if name in columns else values_at(columns, name)
            for what, name in names.items()
        }
        values = {what: given.pop(what) for what in _VALUES if given.get(what) is not None}
        tokens = {
            what: column
            for what, column in given.items()
            if what in _MASKS or holds_numbers(column)
        }
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
        return cls(tokens, values, names, sessions, turns)

    def refuse_misfits(self, where: str) -> None:
        """Raise LengthError if masks, log-probs or token rewards do not fit their tokens."""
        if not self._fit_as_they_are():
            rows = Rows.of(self)
            of_values = (odd for what in _VALUES for odd in rows.spans(self, what)[1])
            refuse([*rows.misfits, *of_values], where)

    def _fit_as_they_are(self) -> bool:
        """Whether all are as long as their tokens, padding included; no value is read."""
        every = self.tokens | self.values
        lengths = {what: _lengths_of(what, column) for what, column in every.items()}
        own = lengths["response" if "response" in lengths else "whole"].clip(0)
        if any(len(found) != len(own) for found in lengths.values()):
            return False
        prompts = 0 * own
        if "response" in lengths and "prompt" in lengths:
            prompts = lengths["prompt"].clip(0)
        expected = {"attention": own + prompts, "prompt_mask": prompts}
        return all(
            ((found < 0) | (found == expected.get(what, own))).all()
            for what, found in lengths.items()
            if what not in ("prompt", "response", "whole")
        )


@attrs.frozen(eq=False, slots=False)
class Rows:
    """B rows without their padding. What names them is computed when it is first asked for.

    A response whose row is one column begins with the first sampled token. ``mask`` tells which
    tokens of the response were sampled, bool; None where no column tells: all of them, unless it
    is among the ``misfits``. ``has_prompts`` tells whether a column holds the prompts; else they
    are empty. ``extents`` has of the columns of prompts, responses and whole rows where in each row
    what is not padding starts and ends, int64 [B]; both are the row's length where nothing is.
    """

    prompt: Ragged
    response: Ragged
    mask: Ragged | None
    has_prompts: bool
    sessions: np.ndarray | None
    turns: np.ndarray | None
    misfits: list[Misfit]
    # Of the response's tokens, if they are a column, and of the row's, as padded values have them.
    places: list[Places]
    extents: Mapping[str, tuple[np.ndarray, np.ndarray]] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self.response)

    @classmethod
    def of(cls, columns: RowColumns, memory: Memory | None = None) -> Rows:
        """The rows that columns of tokens have: copied to `memory`, else views of them."""
        read: dict[str, Ragged] = {}
        for what, column in columns.tokens.items():
            found = Ragged.of(column, bool if what in _MASKS else np.int64)
            if found is not None:
                read[what] = found
        if not read.keys() & {"response", "whole"}:
            what = "the tokens of these rows are not whole numbers"
            raise RecordError(what, "rlskip.record(rows=...)")
        n = len(read["response" if "response" in read else "whole"])
        fitting = {what: column for what, column in read.items() if len(column) == n}
        cut = unpadded(fitting, columns.names)
        if "mask" in read and "mask" not in fitting:
            cut["misfits"].append(Misfit("mask", columns.names["mask"], None, len(read["mask"]), n))
        for what in columns.tokens.keys() & {*_MASKS} - read.keys():
            # What cannot be read is not absent: else all tokens would be taken for sampled.
            if any(cell is not None for cell in cells_of(columns.tokens[what]) or ()):
                cut["misfits"].append(Misfit(what, columns.names[what], None, None, n))
        if memory is not None:
            cut |= {what: cut[what].copied(memory) for what in ("prompt", "response")}
        return cls(sessions=columns.sessions, turns=columns.turns, **cut)

    def spans(
        self, columns: RowColumns, what: str
    ) -> tuple[list[tuple[int, int] | None], list[Misfit]]:
        """Where each row's values of its response start and end in a column, and what does not fit.

        Where a row has none, or one for the whole row, or where they do not fit, it has no span.
        """
        column, misfits = columns.values.get(what), list[Misfit]()
        nowhere: list[tuple[int, int] | None] = [None] * len(self)
        if column is None or column_length(column) is None:
            return nowhere, misfits
        name, lengths = columns.names[what], _lengths_of(what, column)
        if len(lengths) != len(self):
            if what == "log_probs":  # a reward may be that of a prompt
                misfits.append(Misfit(what, name, None, len(lengths), len(self)))
            return nowhere, misfits
        counts = self.prompt.lengths, self.response.lengths
        likely = places_of_response(*counts, self.places, is_padded=is_padded(column))
        places, fits = fit(lengths, likely, misfits, what, name)
        spans = zip(fits.tolist(), places.starts.tolist(), places.ends.tolist(), strict=True)
        return [(start, end) if is_there else None for is_there, start, end in spans], misfits

    @cached_property
    def unknown(self) -> frozenset[int]:
        """The rows of which it is not known what was sampled: their mask does not fit."""
        rows = {odd.row for odd in self.misfits if odd.what == "mask"}
        return frozenset(range(len(self)) if None in rows else rows)  # type: ignore[arg-type]

    @cached_property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has, int64 [B]."""
        return self.prompt.lengths + self.response.lengths  # type: ignore[no-any-return]

    @property
    def prompt_lengths(self) -> np.ndarray:
        """How many of them are the prompt's, int64 [B]."""
        return self.prompt.lengths

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
        """Which of the tokens of all rows were sampled, as far as that is known, bool."""
        found = np.zeros(int(self.lengths.sum()), bool)
        ends, counts = np.cumsum(self.lengths).tolist(), self.response.lengths.tolist()
        cells = [] if self.mask is None else self.mask.cells
        for i, (end, count) in enumerate(zip(ends, counts, strict=True)):
            is_given = self.mask is not None and self.mask.given[i]
            found[end - count : end] = cells[i] if is_given else i not in self.unknown
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
        return hashes_of(self.tokens)

    @cached_property
    def prompts(self) -> np.ndarray:
        """Hashes of each row's prompt, uint64 [B]."""
        rows = zip(self.tokens, self.prompt.lengths.tolist(), strict=True)
        return hashes_of([row[:length] for row, length in rows])

    @cached_property
    def masks(self) -> np.ndarray:
        """Hashes of which of each row's tokens were sampled, uint64 [B]; another if unknown."""
        found = hashes_of(self.sampled)
        found[list(self.unknown)] ^= np.uint64(1)
        return found

    def _cut(self, flat: np.ndarray) -> list[np.ndarray]:
        return np.split(flat, np.cumsum(self.lengths)[:-1]) if len(self) else []


def _lengths_of(what: str, column: Any) -> np.ndarray:
    """How many values for tokens each row has; -1 where it has none."""
    lengths = lengths_of(column)
    return np.where(lengths == 1, -1, lengths) if what == "reward" else lengths


def _whole_numbers(column: Any) -> np.ndarray | None:
    cells = None if column is None else plain(column)
    if not isinstance(cells, list) or not all(type(cell) is int for cell in cells):
        return None
    return np.array(cells, np.int64)


def hashes_of(rows: Sequence[np.ndarray]) -> np.ndarray:
    """A hash of the bytes of each of these arrays, uint64 [B]."""
    found = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data) for row in rows]
    return np.array(found, np.uint64)


@attrs.frozen(eq=False)
class Layout:
    """Where in a value each row's part is.

    ``align`` is what the entries of a part belong to: each token of the response, each token of
    the row (``whole``), each but the first (``shifted``: the logits before it), or each ``sampled``
    one; None if a part is not one value a token. ``spans`` are start and end of each row's part,
    int64 [B, 2]: along the second dimension, or of a flat value along the first; None if a part is
    one entry of the first dimension.
    """

    align: str | None = None
    spans: np.ndarray | None = None
    flat: bool = False

    def part(self, value: np.ndarray, row: int) -> np.ndarray:
        """The part of a value that belongs to a row."""
        if self.spans is None:
            return value[row : row + 1]
        start, end = self.spans[row].tolist()
        return value[start:end] if self.flat else value[row, start:end]

    @classmethod
    def of(cls, rows: Rows, shape: Sequence[int], lengths: Sequence[int] | None = None) -> Layout:
        """That of a value for `rows` which has this shape, or is flat with parts of these lengths.

        Raises RecordError where the value has no part for each row.
        """
        n = len(rows)
        if lengths is None and shape and shape[0] == n:
            return _padded(rows, shape[1]) if len(shape) > 1 else cls()
        counts = [int(np.count_nonzero(mask)) for mask in rows.sampled]
        if lengths is not None and len(lengths) == n:
            every: dict[str, Any] = {
                RESPONSE: rows.response.lengths,
                WHOLE: rows.lengths,
                SAMPLED: counts,
            }
            equal = (align for align, known in every.items() if list(lengths) == list(known))
            return cls(next(equal, None), spans_of(lengths), flat=True)
        if len(shape) == 1 and shape[0] == sum(counts):
            return cls(SAMPLED, spans_of(counts), flat=True)
        raise RecordError(
            f"a value of shape {list(shape)} has no part for each of {counted(n, 'row')}",
            remedy=f"give it one entry for each, or for each of {sum(counts)} sampled tokens",
        )


def _padded(rows: Rows, width: int) -> Layout:
    *alone, whole = rows.places
    places = [(RESPONSE, one, 0) for one in alone]
    if (whole.ends - whole.starts == rows.lengths).all():  # no padding within rows
        places += [(WHOLE, whole, 0), (SHIFTED, whole, 1)]
    for align, one, less in places:
        if (one.widths - less == width).all() and len(rows):
            spans = np.stack([one.starts, np.maximum(one.starts, one.ends - less)], axis=1)
            return Layout(align, spans)
    return Layout()


def token_places(
    align: str | None, entries: int, prompt_length: int, sampled: np.ndarray
) -> np.ndarray:
    """Which token of a row each entry of its part belongs to, int64; none without an alignment.

    `sampled` tells which of the row's tokens were, bool [T]. An entry beyond them has no place.
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
