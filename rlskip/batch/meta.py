"""What a batch carries besides its rows: `meta_info`, and whether it is a validation batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def meta_of(batch: Any) -> Mapping[str, Any]:
    """The `meta_info` of a DataProto, or that entry of a mapping or a TensorDict; else empty."""
    meta = getattr(batch, "meta_info", None)
    if meta is None and hasattr(batch, "get"):
        meta = batch.get("meta_info", None)
        meta = getattr(meta, "data", meta)  # NonTensorData
    return meta if isinstance(meta, Mapping) else {}


def is_validation(batch: Any) -> bool:
    """Whether the batch is marked as ``validate``.

    The mark is in its `meta_info`, or is an entry of a mapping or a TensorDict. If there is one
    for each row, all must be true. A string does not count.
    """
    for place in (meta_of(batch), batch):
        if not hasattr(place, "get") or (flag := plain(place.get("validate", None))) is None:
            continue
        flags = flag if isinstance(flag, list | tuple) else [flag]
        if flags and all(isinstance(one, int | float) and one for one in flags):
            return True
    return False


def plain(value: Any) -> Any:
    """A tensor, an array, a scalar of numpy or a NonTensorData as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value
