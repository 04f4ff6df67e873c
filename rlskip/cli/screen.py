"""Where every command's answer is shown: tables for people, or JSON for programs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs
from rich import box
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

_WIDTH = 120  # where the output is no terminal and COLUMNS says nothing
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


@attrs.frozen
class Answer:
    """What a command found.

    Parameters
    ----------
    data
        The whole of it, as JSON keeps it.
    view
        The same for people: lines and tables, in order.
    exit_code
        0 all is well, 1 the command found what its name looks for (damage, differences).
    """

    data: Any
    view: Sequence[RenderableType]
    exit_code: int = 0


def put(answer: Answer, as_json: bool) -> None:
    """Print `answer` on stdout."""
    if as_json:
        print(json.dumps(finite(answer.data), indent=2))
        return
    console = _console(stderr=False)
    for part in answer.view:
        console.print(part)


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"rlskip: {plain(message)}", file=sys.stderr)


def progress(items: Sequence[T], doing: str) -> Iterable[T]:
    """`items`, with a bar on stderr where that is a terminal."""
    console = _console(stderr=True)
    if not console.is_terminal or len(items) < 2:
        return items
    return track(items, f"{doing} ...", console=console, transient=True)


def table(*columns: str) -> Table:
    """A table; a column whose name starts with ``>`` is aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    return made


def facts(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Names and values below each other, without those that are None."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            made.add_row(text(name), text(value))
    return made


def text(value: Any, style: str = "") -> Text:
    """`value` as text that is shown as it stands: no markup, no control characters."""
    return Text(plain(str(value)), style=style)


def plain(value: str) -> str:
    """`value` on one line and harmless to a terminal, whoever wrote it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)


def short(value: str, length: int = 72) -> str:
    return value if len(value) <= length else value[: length - 3] + "..."


def size(nbytes: float) -> str:
    return decimal(int(nbytes))


def duration(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}" if unit != "s" else f"{seconds:.0f} s"
    return f"{seconds:.1f} s"


def age(written: float) -> str:
    return duration(max(0.0, time.time() - written))


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def finite(data: Any) -> Any:
    """JSON knows no NaN: null."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data
