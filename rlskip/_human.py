"""Sizes, durations and numbers as text for people: one style in every log line, table and page."""

from __future__ import annotations

import math
import time
from typing import Any

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def size(nbytes: float) -> str:
    """Bytes in decimal units: 796 bytes, 13.8 kB."""
    if abs(nbytes) < 1000:
        return "1 byte" if nbytes == 1 else f"{nbytes:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        nbytes /= 1000
        if abs(nbytes) < 999.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:,.1f} PB"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that fits: 0.2 s, 43 s, 1.5 min."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}" if unit != "s" else f"{seconds:.0f} s"
    return f"{seconds:.1f} s"


def age(written: float) -> str:
    """The time since `written` (seconds since the epoch)."""
    return duration(max(0.0, time.time() - written))


def counted(n: int, what: str) -> str:
    """So many of something: 1 miss, 2 misses."""
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('s') else 's'}"


def number(value: float | None) -> str:
    """Four digits of a float, all of an integer; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def short(value: str, length: int = 72) -> str:
    """`value`, or its beginning and ``...``: at most `length` characters."""
    return value if len(value) <= length else value[: length - 3] + "..."


def one_line(value: str) -> str:
    """`value` with its control characters escaped: one line, and harmless to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def finite(data: Any) -> Any:
    """`data` with null for every number that JSON lacks: NaN and the infinities."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data
