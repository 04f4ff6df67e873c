"""The rows of a batch, named by their tokens, and where in a value each row's part is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import xxhash

from rlskip.batch.columns import cells_of, column_length, columns_of, is_tensor
from rlskip.batch.meta import plain
from rlskip.batch.row_fields import RowFields
from rlskip.errors import RlskipError

#: How a value's entries correspond to a row's tokens.
RESPONSE, WHOLE, SHIFTED, SAMPLED = "response", "whole", "shifted", "sampled"

_MASKS = ("attention", "prompt_mask", "mask")


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
        tokens = {
            what: columns[name]
            for what in ("prompt", "response", "whole", *_MASKS)
            if (name := getattr(fields, what)) in columns and _holds_numbers(columns[name])
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
        return cls(tokens, sessions, turns)


@attrs.frozen(eq=False)
class Rows:
    """B rows without their padding.

    Parameters
    ----------
    keys
        A hash of each row's tokens, uint64 [B]. Rows with equal tokens have equal keys.
    tokens
        Of each row the prompt and the response, int64: a view of `flat_tokens`.
    sampled
        Of each row which of its tokens were sampled, bool: a view of `flat_sampled`.
    flat_tokens, flat_sampled
        Those of all rows, one after the other.
    prompt_lengths
        How many of each row's tokens precede the response, int64 [B].
    prompts, masks
        Hashes of each row's prompt, and of which of its tokens were sampled, uint64 [B].
    sessions, turns
        What the batch calls them, int64 [B]; None where it has no such numbers.
    """

    keys: np.ndarray
    tokens: list[np.ndarray]
    sampled: list[np.ndarray]
    flat_tokens: np.ndarray
    flat_sampled: np.ndarray
    prompt_lengths: np.ndarray
    prompts: np.ndarray
    masks: np.ndarray
    sessions: np.ndarray | None
    turns: np.ndarray | None
    _responses: list[tuple[int, int, int]]  # width, start and end of the response's tokens
    _wholes: list[tuple[int, int, int]]  # the same of the row's tokens

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, columns: RowColumns) -> Rows:
        """The rows that columns of tokens have."""
        read = {
            what: _numbers(column, bool if what in _MASKS else np.int64) or []
            for what, column in columns.tokens.items()
        }
        n = len(read.get("response") or read.get("whole") or ())
        rows = [
            _row({what: cells[i] for what, cells in read.items() if len(cells) == n})
            for i in range(n)
        ]
        # Each token is copied once, because a step has millions of them.
        pieces = [piece for row in rows for piece in row.tokens]
        flat_tokens = np.concatenate([np.empty(0, np.int64), *pieces])
        flat_sampled = np.zeros(len(flat_tokens), bool)
        ends = np.cumsum([sum(map(len, row.tokens)) for row in rows], dtype=np.int64)
        tokens = np.split(flat_tokens, ends[:-1]) if rows else []
        sampled = np.split(flat_sampled, ends[:-1]) if rows else []
        for row, its in zip(rows, sampled, strict=True):
            if row.sampled is not None:
                its[len(its) - len(row.sampled) :] = row.sampled
        hashed = zip(tokens, rows, strict=True)
        return cls(
            keys=np.array([_hash(its, row.fill) for its, row in hashed], np.uint64),
            tokens=tokens,
            sampled=sampled,
            flat_tokens=flat_tokens,
            flat_sampled=flat_sampled,
            prompt_lengths=np.array([row.prompt_length for row in rows], np.int64),
            prompts=_hashes(
                [its[: row.prompt_length] for its, row in zip(tokens, rows, strict=True)]
            ),
            masks=_hashes(sampled),
            sessions=columns.sessions,
            turns=columns.turns,
            responses=[row.response for row in rows],
            wholes=[row.whole for row in rows],
        )

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
            return Layout(self._align_of(list(lengths), counts), _spans(lengths), flat=True)
        if len(shape) == 1 and shape[0] == sum(counts):
            return Layout(SAMPLED, _spans(counts), flat=True)
        raise RecordError(
            f"a value of shape {list(shape)} has no part for each of {n} rows",
            remedy=f"give it {n} entries, or one for each of the {sum(counts)} sampled tokens",
        )

    def _padded(self, width: int) -> Layout:
        places = ((RESPONSE, self._responses, 0), (WHOLE, self._wholes, 0),
                  (SHIFTED, self._wholes, 1))  # fmt: skip
        for align, spans, less in places:
            if all(whole - less == width for whole, _, _ in spans) and len(self):
                found = [(start, max(start, end - less)) for _, start, end in spans]
                return Layout(align, np.array(found, np.int64))
        return Layout()

    def _align_of(self, lengths: list[int], counts: list[int]) -> str | None:
        whole = [len(row) for row in self.tokens]
        responses = [len(row) - p for row, p in zip(self.tokens, self.prompt_lengths, strict=True)]
        known = ((RESPONSE, responses), (WHOLE, whole), (SAMPLED, counts))
        return next((align for align, expected in known if lengths == expected), None)


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


@attrs.frozen(eq=False)
class _Row:
    """A row of columns: views of its tokens, and which of the last ones were sampled, bool.

    ``fill`` names the row, too.
    """

    tokens: Sequence[np.ndarray]
    sampled: np.ndarray | None
    prompt_length: int
    response: tuple[int, int, int]
    whole: tuple[int, int, int]
    fill: bytes = b""


def _row(cell: dict[str, np.ndarray]) -> _Row:
    if "response" in cell:
        return _row_of_two(cell)
    whole, mask = cell["whole"], cell.get("mask")
    start, end = _extent(cell.get("attention"), len(whole))
    fill = b""
    if "attention" not in cell and len(whole) > 1:
        # A run at the end is taken for padding; its token is part of what names the row.
        others = np.flatnonzero(whole != whole[-1])
        run = len(whole) - (int(others[-1]) + 1 if len(others) else 0)
        if run > 1:
            end, fill = len(whole) - run, whole[-1:].tobytes()
    sampled = mask[start:end] if mask is not None and len(mask) == len(whole) else None
    first = int(sampled.argmax()) if sampled is not None and sampled.any() else end - start
    spans = (-1, 0, 0), (len(whole), start, end)
    return _Row([whole[start:end]], sampled, first, *spans, fill)


def _row_of_two(cell: dict[str, np.ndarray]) -> _Row:
    response, mask = cell["response"], cell.get("mask")
    prompt = cell.get("prompt", np.empty(0, np.int64))
    attention = cell.get("attention")
    if attention is not None and len(attention) == len(prompt) + len(response):
        of_prompt: np.ndarray | None = attention[: len(prompt)]
        of_response: np.ndarray | None = attention[len(prompt) :]
    else:
        of_prompt, of_response = cell.get("prompt_mask"), mask
    start, stop = _extent(of_prompt, len(prompt))
    # A gap in the response belongs to it; what follows its last real token is padding.
    end = _extent(of_response, len(response))[1]
    has_mask = mask is not None and len(mask) == len(response)
    width = len(prompt) + len(response)
    return _Row(
        [prompt[start:stop], response[:end]],
        mask[:end] if has_mask else np.ones(end, bool),  # type: ignore[index]
        stop - start,
        (len(response), 0, end),
        (width if stop == len(prompt) else -1, start, len(prompt) + end),
    )


def _extent(mask: np.ndarray | None, length: int) -> tuple[int, int]:
    """The first and the last place that are not padding, as a span; all without such a mask."""
    if mask is None or len(mask) != length:
        return 0, length
    if not mask.any():
        return length, length
    return int(mask.argmax()), length - int(mask[::-1].argmax())


def _holds_numbers(column: Any) -> bool:
    """Whether a column has a sequence of whole numbers for each row, as far as its type tells."""
    if is_tensor(column):
        return column.is_nested or (column.dim() == 2 and not column.dtype.is_floating_point)
    if isinstance(column, np.ndarray):
        return column.ndim == 2 and column.dtype.kind in "biu"
    cells = cells_of(column)
    return bool(cells) and np.ndim(plain(cells[0])) == 1  # type: ignore[index]


def _numbers(column: Any, dtype: type) -> list[np.ndarray]:
    """A column as one array for each row."""
    if is_tensor(column) and not column.is_nested:
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray):
        return list(np.ascontiguousarray(column, dtype))
    return [np.asarray(plain(cell), dtype) for cell in cells_of(column) or ()]


def _whole_numbers(column: Any) -> np.ndarray | None:
    cells = None if column is None else plain(column)
    if not isinstance(cells, list) or not all(type(cell) is int for cell in cells):
        return None
    return np.array(cells, np.int64)


def _spans(lengths: Sequence[int]) -> np.ndarray:
    ends = np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)
    return np.stack([ends - np.asarray(lengths, np.int64), ends], axis=1)


def _hash(tokens: np.ndarray, more: bytes = b"") -> int:
    found = xxhash.xxh3_64(np.ascontiguousarray(tokens).data)
    found.update(more)
    return found.intdigest()


def _hashes(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([_hash(row) for row in rows], np.uint64)
