"""How far two values may be apart by rounding alone.

The rule, which docs/compare.md explains: two results of a reduction over `n` terms in a format of
unit roundoff `u` may differ by :data:`LAMBDA` sqrt(n) u times their scale.

Independent rounding errors of mean zero exceed lambda sqrt(n) u with a probability of at most
2 exp(-lambda^2 / 2) for each term (Higham and Mary, 2019). Both results have such errors: LAMBDA
sqrt(n) is lambda sqrt(2 n) with lambda = 5.7. A sum that cancels keeps the error of its terms, so
the values around it count in its scale. Of two formats the finer one counts.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from rlskip.stages.parts import FLOAT, fills, most

LAMBDA = 8.0

_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    FLOAT: 2.0**-24,  # made of a float32 tensor, most likely: it does not tell its precision
}


@attrs.frozen
class Rounding:
    """The tolerance of a comparison: the rule above, or what the user gave.

    Given, it is ``|a - b| <= atol + rtol * max(|a|, |b|)``.
    """

    rtol: float | None = None
    atol: float | None = None

    @property
    def rule(self) -> str:
        """The rule in words."""
        if self.rtol is None and self.atol is None:
            return f"|a - b| <= {LAMBDA:g} sqrt(n) u max(|a|, |b|, scale without fills)"
        return f"|a - b| <= {self.atol or 0:g} + {self.rtol or 0:g} max(|a|, |b|)"

    def allowed(
        self, a: np.ndarray, b: np.ndarray, dtypes: tuple[str, str], n: int, around: float
    ) -> np.ndarray:
        """The largest difference that counts as rounding, for each pair of float64 values.

        `n` are the terms of the reduction, `around` is the scale of the values around them.
        """
        largest = np.maximum(np.abs(a), np.abs(b))
        largest = np.where(np.isfinite(largest), largest, 0.0)  # no NaN is within rounding
        if self.rtol is not None or self.atol is not None:
            return (self.atol or 0.0) + (self.rtol or 0.0) * largest
        # Whole numbers and texts are not rounded.
        unit = min(_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes)
        return LAMBDA * math.sqrt(max(n, 1)) * unit * np.maximum(largest, around)


def scale(values: np.ndarray) -> float:
    """The root mean square of float64 values, fills and infinities aside; 0 without any.

    Each adds at most what :func:`most` says: one cannot make all others count as rounded.
    """
    sizes = np.abs(values[np.isfinite(values) & ~fills(values)])
    return float(np.sqrt(np.square(np.minimum(sizes, most(sizes))).mean())) if sizes.size else 0.0


def differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``|a - b|`` of float64 arrays; 0 for two NaN or two equal infinities, else inf for those."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(found), np.inf, found))
