"""Tables as HTML, for notebooks; text from a dump is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with a title."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table><caption>{escape(title)}</caption><tr>{head}</tr>{rows}</table>"
