"""Scalars of numpy and torch as those of Python."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rlskip.batch.columns import is_tensor

_PYTHON = (str, int, float, bool, type(None))


def scalar_of(value: Any) -> Any:
    """A scalar of numpy, a 0-d array or a 0-d tensor as Python's scalar of its value."""
    if type(value) in _PYTHON:
        return value
    is_masked = isinstance(value, np.ma.MaskedArray)
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and not is_masked:
        return scalar_of(value.item()) if value.dtype.kind in "OSU" or is_number(value) else value
    if is_tensor(value) and not value.is_nested and value.ndim == 0:
        from rlskip.format.torch_maker import is_plain

        with contextlib.suppress(NotImplementedError):  # of less than a byte
            return value.item() if is_plain(value) else value
    return value


def is_number(array: np.ndarray | np.generic) -> bool:
    """Whether numpy's elements are numbers without padding, as a long double's are not."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    return kind in "biu" or (kind == "f" and size <= 8) or (kind == "c" and size <= 16)
