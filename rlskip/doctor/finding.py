"""What the doctor finds."""

from __future__ import annotations

import attrs

from rlskip._nodes import as_typed

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


@attrs.frozen
class Finding:
    """One thing that was checked: its level (ok, note, warning, error), and what to do about it."""

    topic: str
    level: str
    what: str = attrs.field(converter=as_typed)
    remedy: str = attrs.field(default="", converter=as_typed)
