"""Why is nothing skipped? What is installed, and what a command would skip."""

from __future__ import annotations

import attrs

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"


@attrs.frozen
class Finding:
    """One thing that was checked: its level (ok, note, warning, error), and what to do about it."""

    topic: str
    level: str
    what: str
    remedy: str = ""
