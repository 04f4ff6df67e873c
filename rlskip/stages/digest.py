"""Of each row's part of a value a checksum and its moments, in place of the part itself."""

from __future__ import annotations

import math

import attrs
import numpy as np
import xxhash

from rlskip.batch.columns import is_tensor
from rlskip.stages.parts import DIGEST, NUMBER, Entry

MOMENTS = ("count", "mean", "rms", "min", "max")


def digest(entry: Entry) -> Entry:
    """The record with a digest of its value; a number is its own digest.

    The value becomes a mapping: ``checksums``, uint64 [B], of the bytes of each row's part in its
    own dtype, and ``moments``, float64 [B, 5], as :data:`MOMENTS` names them, NaN where they are
    not defined. A value of the whole step is one row.
    """
    if entry.form == NUMBER:
        return entry
    parts = cut(*_as_bytes(entry), entry)
    found = {
        "checksums": np.array([xxhash.xxh3_64_intdigest(raw.data) for raw, _ in parts], np.uint64),
        "moments": np.array([_moments(part) for _, part in parts], np.float64).reshape(-1, 5),
    }
    return attrs.evolve(entry, form=DIGEST, value=found)


def cut(raw: np.ndarray, wide: np.ndarray, entry: Entry) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each row's bytes and numbers: `raw` has one more dimension than `wide`, for the bytes."""
    if entry.layout is None:
        spans = [(raw, wide)]
    elif entry.layout.spans is None:
        spans = list(zip(raw, wide, strict=True))
    elif entry.layout.flat:
        spans = [(raw[start:end], wide[start:end]) for start, end in entry.layout.spans.tolist()]
    else:
        rows = zip(raw, wide, entry.layout.spans.tolist(), strict=True)
        spans = [(a[start:end], b[start:end]) for a, b, (start, end) in rows]
    return [(np.ascontiguousarray(a), b) for a, b in spans]


def _as_bytes(entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """The value's bytes, element by element, and its numbers."""
    value = entry.value
    if is_tensor(value):
        from rlskip.format.torch_maker import flat_bytes

        raw = flat_bytes(value).reshape(*value.shape, -1)
        value = value.detach().cpu()
        if not value.dtype.is_floating_point:
            value = value.double()
        return raw, (value.float() if raw.shape[-1] < 4 else value).numpy()
    plain = np.ascontiguousarray(value)
    return plain.view(np.uint8).reshape(*plain.shape, -1), plain


def _moments(part: np.ndarray) -> tuple[float, ...]:
    if not part.size:
        return (0.0, *[math.nan] * 4)
    wide = part.astype(np.float64)
    with np.errstate(all="ignore"):
        mean, rms = float(wide.mean()), float(np.sqrt(np.square(wide).mean()))
    return float(wide.size), mean, rms, float(wide.min()), float(wide.max())
