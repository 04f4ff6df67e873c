"""The steps grammar of lists and strings.

::

    all                       every step
    [1, 2, 3]                 these; an item may itself be a string of the grammar
    "1-128,200,300-400:10"    ranges include both ends; the stride follows the colon

Steps are integers >= 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from rlskip._human import short
from rlskip.errors import ConfigError

EXAMPLE = 'write a list such as [1,2,3], a string such as "1-128,200,300-400:10", or all'

# Longer numbers would not fit into the length of a range.
_N = r"(\d{1,18})"
_ITEM = re.compile(rf"\s*{_N}\s*(?:-\s*{_N}\s*(?::\s*{_N}\s*)?)?", re.ASCII)


@attrs.frozen(str=False)
class Steps:
    """A set of steps: ``3 in Steps.parse("1-128")`` takes one look-up, and one for each range."""

    everything: bool = False
    singles: frozenset[int] = frozenset()
    ranges: tuple[range, ...] = ()
    text: str = attrs.field(default="", eq=False)

    def __contains__(self, step: object) -> bool:
        if step in self.singles or self.everything:
            return True
        # Runs on every call of a stage: no generator where there are no ranges.
        return any(step in part for part in self.ranges) if self.ranges else False

    def __bool__(self) -> bool:
        return self.everything or bool(self.singles) or bool(self.ranges)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, value: Any, key: str = "steps") -> Steps:
        """Parse any form of the grammar.

        Parameters
        ----------
        value
            The config's value: ``"all"``, a string, an int, or a list of ints and strings.
        key
            The full config key, for the error.

        Raises
        ------
        ConfigError
            Names the first item outside the grammar: a nested list, a negative number, a float, a
            bool, a range that runs backwards or has stride 0.
        """
        if isinstance(value, Steps):
            return value
        if isinstance(value, str) and value.strip() == "all":
            return cls(everything=True, text="all")
        items = value if isinstance(value, list | tuple) else [value]
        parts = [part for item in items for part in _ranges_of(item, key)]
        return cls(
            singles=frozenset(part.start for part in parts if len(part) == 1),
            ranges=tuple(part for part in parts if len(part) > 1),
            text=",".join(map(str, items)),
        )


def compact(steps: list[int]) -> str:
    """Ascending steps as the grammar writes them: ``1-5,8,10-30:10``.

    >>> compact([1, 2, 3, 7, 10, 20, 30])
    '1-3,7,10-30:10'
    """
    parts, i = [], 0
    while i < len(steps):
        j = i
        stride = steps[i + 1] - steps[i] if i + 1 < len(steps) else 1
        while j + 1 < len(steps) and steps[j + 1] - steps[j] == stride:
            j += 1
        if j - i < 2:
            parts.append(str(steps[i]))
            i += 1
            continue
        parts.append(f"{steps[i]}-{steps[j]}" + (f":{stride}" if stride > 1 else ""))
        i = j + 1
    return ",".join(parts)


def _ranges_of(item: Any, key: str) -> Iterator[range]:
    """The ranges of one item of a list; raises ConfigError."""
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
