"""Of each row's part of a value a checksum and its moments, in place of the part itself."""

from __future__ import annotations

import math

import attrs
import numpy as np
import xxhash

from rlskip.batch.columns import is_tensor
from rlskip.stages.parts import DIGEST, NUMBER, Entry, raw_bytes

MOMENTS = ("count", "mean", "rms", "min", "max")


def digest(entry: Entry) -> Entry:
    """The record with a digest of its value; a number is its own digest.

    The value becomes a mapping: ``checksums``, uint64 [B], of the bytes of each row's part in its
    own dtype, and ``moments``, float64 [B, 5], as :data:`MOMENTS` names them, NaN where they are
    not defined. A value of the whole step is one row.
    """
    if entry.form == NUMBER:
        return entry
    raw, numbers = (_parts(value, entry) for value in _as_bytes(entry))
    checksums = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(part).data) for part in raw]
    found = {
        "checksums": np.array(checksums, np.uint64),
        "moments": np.array([_moments(part) for part in numbers], np.float64).reshape(-1, 5),
    }
    return attrs.evolve(entry, form=DIGEST, value=found)


def _parts(value: np.ndarray, entry: Entry) -> list[np.ndarray]:
    if entry.layout is None or entry.rows is None:
        return [value]
    return [entry.layout.part(value, row) for row in range(len(entry.rows))]


def _as_bytes(entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """The value's bytes, element by element, and its numbers."""
    value = entry.value
    flat = raw_bytes(value)
    raw = flat.reshape(*value.shape, len(flat) // max(math.prod(value.shape), 1))
    if is_tensor(value):
        value = value.detach().cpu()
        if not value.dtype.is_floating_point:
            value = value.double()
        value = (value.float() if raw.shape[-1] < 4 else value).numpy()
    return raw, value


def _moments(part: np.ndarray) -> tuple[float, ...]:
    if not part.size:
        return (0.0, *[math.nan] * 4)
    wide = part.astype(np.float64)
    with np.errstate(all="ignore"):
        mean, rms = float(wide.mean()), float(np.sqrt(np.square(wide).mean()))
    return float(wide.size), mean, rms, float(wide.min()), float(wide.max())
