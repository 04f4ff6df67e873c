"""What a part of a recorded step holds, in the dumps' format.

A part is one mapping, so that a reader can choose what it loads. Its entry ``index`` has one item
for each record, in order; the arrays of record `i` are entries of their own::

    "3"           the value: whole, or flat: without most of the padding
    "3.spans"     where in it each row's part is, int64 [B, 2]
    "3.keys"      which rows, uint64 [B]
    "3.sessions"  the rows' sessions, int64 [B], where the batch has such numbers

An entry is null where a record has no such array. Rows that no earlier part of the step describes
are described by ``rows.*``: ``keys``, ``prompts``, ``masks`` (hashes, uint64), ``prompt_lengths``,
``lengths``, ``sessions``, ``turns`` (int64), and with whole values ``tokens`` (int64) and
``sampled`` (bool), both flat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlskip._copies import Memory, gathered
from rlskip.batch.columns import is_tensor
from rlskip.batch.rows import Layout, RecordError, Rows, hashes_of

#: The entry of a part's meta by which it is known, and the version of what is described here.
MARK, VERSION = "stages", 1

#: The forms of a record's value.
NUMBER, WHOLE, ROWS, DIGEST = "number", "whole", "rows", "digest"

#: What describes the rows besides their tokens.
ROW_COLUMNS = ("keys", "prompts", "masks", "prompt_lengths", "lengths", "sessions", "turns")

#: The dtype of Python floats, numpy's float64 scalars among them. It does not tell in what
#: precision a number was computed: trainers make floats of float32 tensors and of their means.
FLOAT = "float"

#: ``mean``, ``rms`` and ``order`` are of finite values that are not fills, and outliers count with
#: :func:`most`: either would hide the others.
#: ``order`` is a mean, too, with a weight for each place, so that it tells values that moved.
MOMENTS = ("count", "mean", "rms", "min", "max", "order")

# A fill is at least so large, and so many times what comes below it; so many others are below.
_LEAST, _APART, _SHARE = 1e3, 100.0, 0.25
# Weights k g mod 1 - 1/2: of the golden ratio, those of close places are far apart.
_GOLDEN = (math.sqrt(5) - 1) / 2


@attrs.define(eq=False)
class Entry:
    """One record.

    ``order`` is among the records of its step in this process. ``dtype`` is the value's, by torch's
    or numpy's name, or :data:`FLOAT`. ``value`` is a number or a text, a tensor, an array, or what
    :func:`digest` made. ``rows`` and ``layout`` are the value's rows, and where in it they are;
    None for a value of the whole step. ``describes`` are the rows that this part describes.
    """

    name: str
    order: int
    rank: int
    form: str
    dtype: str
    value: Any
    rows: Rows | None = None
    layout: Layout | None = None
    describes: list[int] = attrs.field(factory=list)

    @classmethod
    def of(cls, name: str, value: Any, rows: Rows | None, *, order: int, rank: int) -> Entry:
        """The record of a value.

        Raises RecordError where it is of no kind that can be recorded, or has no part for each row.
        """
        if is_tensor(value):
            _refuse_spread(value)
        if rows is None and (number := _as_number(value)) is not None:
            return cls(name, order, rank, NUMBER, number[1], number[0])
        array, lengths = _as_array(value)
        shape = tuple(array.shape)
        layout = None if rows is None else Layout.of(rows, shape, lengths)
        form = WHOLE if rows is None else ROWS
        dtype = FLOAT if _has_floats(value) else _dtype_of(array)
        return cls(name, order, rank, form, dtype, array, rows, layout)

    def copied(self, memory: Memory) -> Entry:
        """The same record with a copy of its value, flat where each row's part is a span of it."""
        value, layout = self.value, self.layout
        if self.form in (NUMBER, DIGEST) or not math.prod(value.shape):
            return self
        shape = tuple(value.shape)
        if is_tensor(value):
            from rlskip.format.torch_maker import flat_bytes

            raw = flat_bytes(value)
        else:
            raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if layout is None or layout.spans is None:
            found, _ = gathered(raw, np.array([[0, len(raw)]]), memory)
        else:
            spans, dims = layout.spans, 1 if layout.flat else 2
            if not layout.flat:  # most of a padded value may be padding
                spans = spans + np.arange(len(spans))[:, None] * shape[1]
            found, spans = gathered(raw.reshape(math.prod(shape[:dims]), -1), spans, memory)
            layout = Layout(layout.align, spans, flat=True)
            shape = len(found), *shape[dims:]
        if is_tensor(value):
            from torch import from_numpy

            copy: Any = from_numpy(found.reshape(-1)).view(value.dtype)
        else:
            copy = found.reshape(-1).view(value.dtype)
        return attrs.evolve(self, value=copy.reshape(shape), layout=layout)

    @property
    def nbytes(self) -> int:
        """Bytes of its value in memory."""
        if isinstance(self.value, Mapping):
            return sum(array.nbytes for array in self.value.values())
        return int(getattr(self.value, "nbytes", 8))


def encode(entries: Sequence[Entry], *, tokens: bool) -> dict[str, Any]:
    """The part that holds `entries`, and with `tokens` those of the rows that it describes."""
    part: dict[str, Any] = {"index": []}
    for i, entry in enumerate(entries):
        rows, layout, is_number = entry.rows, entry.layout or Layout(), entry.form == NUMBER
        item = {name: getattr(entry, name) for name in ("name", "order", "rank", "form", "dtype")}
        item["value"] = entry.value if is_number else None
        part["index"].append({**item, "align": layout.align, "flat": layout.flat})
        part |= {
            f"{i}": None if is_number else entry.value,
            f"{i}.keys": None if rows is None else rows.keys,
            f"{i}.sessions": None if rows is None else rows.sessions,
            f"{i}.spans": layout.spans if entry.form == ROWS else None,
        }
    return part | _described(entries, tokens)


def _described(entries: Sequence[Entry], tokens: bool) -> dict[str, Any]:
    found = [(one.rows, one.describes) for one in entries if one.rows and one.describes]
    columns: dict[str, Any] = dict.fromkeys((*ROW_COLUMNS, "tokens", "sampled"))
    for name in ROW_COLUMNS:
        wholes = [getattr(rows, name) for rows, _ in found]
        if wholes and all(whole is not None for whole in wholes):
            some = [whole[of] for whole, (_, of) in zip(wholes, found, strict=True)]
            columns[name] = np.concatenate(some)
    for name in ("tokens", "sampled") if tokens and found else ():
        if len(found) == 1 and len(found[0][0]) == len(found[0][1]):  # all rows of one batch
            columns[name] = getattr(found[0][0], f"flat_{name}")
        else:
            pieces = [getattr(rows, name)[i] for rows, some in found for i in some]
            columns[name] = np.concatenate(pieces)
    return {f"rows.{name}": column for name, column in columns.items()}


def _as_number(value: Any) -> tuple[Any, str] | None:
    """A single number or text with the name of its dtype; None for anything else."""
    if is_tensor(value) and value.dim() == 0 and not value.is_complex():
        return value.item(), _dtype_of(value)
    if isinstance(value, float):
        return float(value), FLOAT
    if isinstance(value, np.generic | np.ndarray) and not value.ndim and value.dtype.kind in "biuf":
        return value.item(), value.dtype.name
    kinds = {bool: "bool", int: "int64", str: "text"}
    return (value, kinds[type(value)]) if type(value) in kinds else None


def _refuse_spread(value: Any) -> None:
    """Refuse a tensor of which other processes may have elements."""
    from torch import Tensor

    if not value.is_nested and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # To ask a DTensor for its values is a collective: another rank may not be here.
        what = f"a {type(value).__name__} may be spread over processes"
        raise RecordError(what, remedy="give its values: value.full_tensor(), called on every rank")


def _as_array(value: Any) -> tuple[Any, list[int] | None]:
    """A value as a tensor or an array; a ragged one is flat, with the lengths of its parts."""
    if is_tensor(value) and not value.is_complex():
        if not value.is_nested:
            return value.detach(), None
        value = value.unbind()  # not of what is detached, if it was made for inference
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value, None
    if isinstance(value, list | tuple) and value:
        parts = [_part(part) for part in value]
        dims = {None if part is None else part.ndim for part in parts}
        if dims in ({0}, {1}):
            flat = _joined([part.reshape(-1) for part in parts])
            return flat, [len(part) for part in parts] if dims == {1} else None
    kind = str(getattr(value, "dtype", type(value).__name__))
    what = f"a value of type {kind} cannot be recorded"
    remedy = "give a tensor or an array of numbers, a number, or a mapping of these"
    raise RecordError(what, remedy=remedy)


def _part(value: Any) -> Any:
    """A row's part of a ragged value, as a tensor or an array; None of what is neither."""
    if is_tensor(value):
        return None if value.is_complex() else value.detach().cpu()
    found = np.asarray(value)
    return found if found.dtype.kind in "biuf" else None


def _joined(parts: list[Any]) -> Any:
    """Parts of one dimension, one after the other, in their own dtype."""
    if not any(map(is_tensor, parts)):
        return np.concatenate(parts)
    from torch import as_tensor, cat

    return cat([as_tensor(part) for part in parts])


def _has_floats(value: Any) -> bool:
    """Whether a value is a list of Python floats, or of lists of them."""
    if not isinstance(value, list | tuple):
        return isinstance(value, float)
    return any(_has_floats(part) for part in value)


def _dtype_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


# -- digests -----------------------------------------------------------------------------------


def digest(entry: Entry) -> Entry:
    """The record with checksums and moments of each row's part; a number is its own digest.

    The value becomes a mapping: ``checksums``, uint64 [B], of each row's part, which are those of
    equal numbers in another dtype, ``bits``, which are others where a zero has another sign, and
    ``moments``, float64 [B, 6], as :data:`MOMENTS` names them, NaN where they are not defined. A
    value of the whole step is one row.
    """
    if entry.form == NUMBER:
        return entry
    parts = [whole := _on_host(entry.value)]
    if entry.layout is not None and entry.rows is not None:
        parts = [entry.layout.part(whole, row) for row in range(len(entry.rows))]
    parts = list(map(_wide, parts))
    moments = np.array(list(map(_moments, parts)), np.float64)
    found = {
        # Without the sign of a zero.
        "checksums": hashes_of([part + part.dtype.type(0) for part in parts]),
        "bits": hashes_of(parts),
        "moments": moments.reshape(-1, len(MOMENTS)),
    }
    return attrs.evolve(entry, form=DIGEST, value=found)


def _on_host(value: Any) -> np.ndarray:
    if not is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    if value.is_floating_point() and value.element_size() < 4:  # numpy may lack its dtype
        value = value.float()
    return value.numpy()  # type: ignore[no-any-return]


def _wide(part: np.ndarray) -> np.ndarray:
    """The numbers of a part such that equal ones have equal bytes: one NaN."""
    if part.dtype.kind in "iu":
        return part.astype(np.int64)
    wide = part.astype(np.float64)
    wide[np.isnan(wide)] = np.nan
    return wide


def _moments(part: np.ndarray) -> tuple[float, ...]:
    if not part.size:
        return (0.0, *[math.nan] * (len(MOMENTS) - 1))
    wide = part.astype(np.float64).reshape(-1)
    weights = np.arange(wide.size) * _GOLDEN % 1.0 - 0.5
    own = np.isfinite(wide) & ~fills(wide)
    limit = most(np.abs(wide[own]))
    known, weights = np.clip(wide[own], -limit, limit), weights[own]
    mean = rms = order = math.nan
    if known.size:
        mean, order = float(known.mean()), float((known * weights).mean())
        rms = float(np.sqrt(np.square(known).mean()))
    return float(wide.size), mean, rms, float(wide.min()), float(wide.max()), order


def most(sizes: np.ndarray) -> float:
    """10 times what nine tenths of the magnitudes that differ are below; 0 without any."""
    found = np.unique(sizes[sizes > 0])
    return 10 * float(found[int(0.9 * (len(found) - 1))]) if len(found) else 0.0


def fills(values: np.ndarray) -> np.ndarray:
    """Where float64 values are fills: far above all others in magnitude, finite ones.

    These are -1e4, -1e9 and the least number of a dtype: at least 1000, and 100 times what comes
    below them. A fourth of the magnitudes that differ must be below: where few are, those cancel.
    Zeros, which may be padding, count only where all other values are one fill.
    """
    sizes = np.abs(values)
    if not (sizes >= _LEAST).any():
        return np.zeros(values.shape, bool)
    found = np.unique(sizes[np.isfinite(sizes)])
    found = found if len(found) == 2 else found[found > 0]
    first = np.flatnonzero((found[1:] >= _LEAST) & (found[1:] / _APART >= found[:-1])) + 1
    first = first[first >= _SHARE * len(found)]
    if not len(first):
        return np.zeros(values.shape, bool)
    return np.asarray(np.isfinite(sizes) & (sizes >= found[first[0]]))
