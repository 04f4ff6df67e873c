"""The output of every command: tables for people, JSON for programs, and files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlskip._human import age, duration, finite, number, one_line, short, size
from rlskip.config.steps import compact
from rlskip.errors import RlskipError

T = TypeVar("T")

Cell = object
"""A text with a style (:func:`text`), or any value, which is shown as its ``str``."""

# How a value is shown, by its key.
_SHOWN: dict[str, Callable[[Any], str]] = {
    "steps": compact, "size": size, "nbytes": size, "written": age, "seconds": duration,
    "seconds_saved": lambda seconds: duration(max(0.0, seconds)),
    "group": lambda name: short(name, 24),
}  # fmt: skip
_WIDTH = 120  # if the output is not a terminal and COLUMNS is not set


def put(as_json: bool, data: Any, view: Sequence[Table | Cell], *, failed: object = False) -> int:
    """Print what a command found on stdout: `data` as JSON, or the `view` of it for people.

    The result is the exit code: 1 if the command found what it looks for (damage, differences).
    """
    if as_json:
        print(json.dumps(finite(data), indent=2))
    else:
        console = _console(stderr=False)
        for part in view:
            console.print(part if isinstance(part, Table) else text(part))
    return int(bool(failed))


@contextlib.contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A temporary path that becomes `out` at the end, and is removed after an error.

    Raises RlskipError where `out` is a directory.
    """
    if out.is_dir():
        raise RlskipError("it is a directory", str(out), "name a file in it")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


def encode_stdout(**how: str) -> None:
    """Set how text is encoded on stdout, where that can be set."""
    with contextlib.suppress(AttributeError, OSError):
        getattr(sys.stdout, "reconfigure")(**how)  # noqa: B009 - of the streams that Python opens


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"rlskip: {one_line(message)}", file=sys.stderr)


def progress(items: Sequence[T], doing: str) -> Iterable[T]:
    """`items`, with a progress bar if stderr is a terminal."""
    console = _console(stderr=True)
    if not console.is_terminal or len(items) < 2:
        return items
    from rich.progress import track

    return track(items, f"{doing} ...", console=console, transient=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table; columns whose names start with ``>`` are aligned to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        justify: Literal["right", "left"] = "right" if name.startswith(">") else "left"
        made.add_column(name.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*map(text, row))
    return made


def listing(lines: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """A table of the lines' values by the heads of their columns; None is an empty cell."""
    keys = columns.values()
    rows = [
        ["" if line[key] is None else _SHOWN.get(key, number)(line[key]) for key in keys]
        for line in lines
    ]
    return table(list(columns), rows)


def grid(rows: Sequence[Sequence[Cell]]) -> Table:
    """Rows without heads; what is too long is folded in the last column."""
    made = Table(box=None, show_header=False, pad_edge=False)
    columns = max(map(len, rows), default=0)
    for i in range(columns):
        made.add_column(no_wrap=i < columns - 1, overflow="fold")
    for row in rows:
        made.add_row(*map(text, row))
    return made


def facts(pairs: Iterable[tuple[str, Cell]]) -> Table:
    """Names and values, one pair on each line, without the values that are None."""
    return grid([(text(name, "bold"), value) for name, value in pairs if value is not None])


def text(value: Cell, style: str = "") -> Text:
    """`value` as text without markup, its control characters escaped."""
    return value if isinstance(value, Text) else Text(one_line(str(value)), style=style)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)
