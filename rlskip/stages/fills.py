"""Which values of a part are fills: what a mask puts where nothing is, such as -1e9."""

from __future__ import annotations

import numpy as np

_LEAST, _APART, _SHARE = 1e3, 100.0, 0.25


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
