"""The grammar of steps, which are integers >= 0, in lists and strings.

::

    all                       every step
    [1, 2, 3]                 these; an item may itself be a string of the grammar
    "1-128,200,300-400:10"    ranges include both ends; the stride follows the colon
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import attrs

from rlskip._human import short
from rlskip.errors import ConfigError

FORMS = 'a list such as [1,2,3], a string such as "1-128,200,300-400:10", or all'
EXAMPLE = f"write {FORMS}"

# Longer numbers would not fit into the length of a range.
_N = r"(\d{1,18})"
_ITEM = re.compile(rf"\s*{_N}\s*(?:-\s*{_N}\s*(?::\s*{_N}\s*)?)?", re.ASCII)


@attrs.frozen(str=False)
class Steps:
    """A set of steps: ``3 in Steps.parse("1-128")`` takes one look-up, and one for each range."""

    parts: tuple[frozenset[int] | range, ...]
    text: str = attrs.field(eq=False)

    def __contains__(self, step: object) -> bool:
        return any(step in part for part in self.parts)

    def __str__(self) -> str:
        return self.text or "none"

    @classmethod
    def parse(cls, value: Any, key: str = "steps") -> Steps:
        """Parse the value of config key `key`; ConfigError names the first item that fails."""
        if isinstance(value, str) and value.strip() == "all":
            return cls((range(sys.maxsize),), "all")
        items = value if isinstance(value, list | tuple) else [value]
        ranges = [part for item in items for part in _ranges_of(item, key)]
        singles = frozenset(part.start for part in ranges if len(part) == 1)
        longer = (part for part in ranges if len(part) > 1)
        return cls((singles, *longer), ",".join(map(str, items)))


def _ranges_of(item: Any, key: str) -> Iterator[range]:
    if isinstance(item, bool) or not isinstance(item, int | str):
        raise ConfigError(f"{item!r} ({type(item).__name__}) is not a step", key, EXAMPLE)
    for part in str(item).split(","):
        match = _ITEM.fullmatch(part)
        if match is None:
            raise ConfigError(f"{short(repr(part))} is not a step or a range", key, EXAMPLE)
        first = int(match[1])
        last, stride = int(match[2] or first), int(match[3] or 1)
        if last < first or not stride:
            wrong = "has stride 0" if not stride else "runs backwards"
            raise ConfigError(f"the range {part!r} {wrong}", key, EXAMPLE)
        yield range(first, last + 1, stride)


def compact(steps: list[int]) -> str:
    """Ascending steps as the grammar writes them.

    >>> compact([1, 2, 3, 7, 10, 20, 30])
    '1-3,7,10-30:10'
    """
    parts = []
    while steps:
        first, stride = steps[0], steps[1] - steps[0] if len(steps) > 1 else 1
        run = next((i for i, step in enumerate(steps) if step != first + i * stride), len(steps))
        every = f":{stride}" if stride > 1 else ""
        parts.append(f"{first}-{steps[run - 1]}{every}" if run > 2 else str(first))
        steps = steps[run if run > 2 else 1 :]
    return ",".join(parts)
