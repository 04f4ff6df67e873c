"""Of each row's part of a value a checksum and its moments, in place of the part itself."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np

from rlskip.batch.columns import is_tensor
from rlskip.batch.rows import hashes_of
from rlskip.stages.parts import DIGEST, NUMBER, Entry

#: ``mean``, ``rms`` and ``order`` are of finite values that are not fills, and outliers count with
#: :func:`most`: either would hide the others.
#: ``order`` is a mean, too, with a weight for each place, so that it tells values that moved.
MOMENTS = ("count", "mean", "rms", "min", "max", "order")

# A fill is at least so large, and so many times what comes below it; so many others are below.
_LEAST, _APART, _SHARE = 1e3, 100.0, 0.25
# Weights k g mod 1 - 1/2: of the golden ratio, those of close places are far apart.
_GOLDEN = (math.sqrt(5) - 1) / 2


def digest(entry: Entry) -> Entry:
    """The record with a digest of its value; a number is its own digest.

    The value becomes a mapping: ``checksums``, uint64 [B], of each row's part, which are those of
    equal numbers in another dtype, ``bits``, which are others where a zero has another sign, and
    ``moments``, float64 [B, 6], as :data:`MOMENTS` names them, NaN where they are not defined. A
    value of the whole step is one row.
    """
    if entry.form == NUMBER:
        return entry
    parts = [whole := _as_array(entry.value)]
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


def _as_array(value: Any) -> np.ndarray:
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
    """
    sizes = np.abs(values)
    if not (sizes >= _LEAST).any():
        return np.zeros(values.shape, bool)
    found = np.unique(sizes[np.isfinite(sizes) & (sizes > 0)])
    first = np.flatnonzero((found[1:] >= _LEAST) & (found[1:] / _APART >= found[:-1])) + 1
    first = first[first >= _SHARE * len(found)]
    if not len(first):
        return np.zeros(values.shape, bool)
    return np.asarray(np.isfinite(sizes) & (sizes >= found[first[0]]))
