"""The steps grammar of lists and strings.

::

    all                       every step
    [1, 2, 3]                 these; an item may itself be a string of the grammar
    "1-128,200,300-400:10"    ranges include both ends; the stride follows the colon

Steps are integers >= 0.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

import attrs

from rlskip.errors import ConfigError

EXAMPLE = 'write a list such as [1,2,3], a string such as "1-128,200,300-400:10", or all'

# Longer numbers would not fit into the length of a range.
_DIGITS = 18
_N = rf"(\d{{1,{_DIGITS}}})"
_ITEM = re.compile(rf"\s*{_N}\s*(?:-\s*{_N}\s*(?::\s*{_N}\s*)?)?", re.ASCII)

# A longer range stays a range; shorter ones join the set. Membership therefore takes one set
# look-up, plus one comparison per long range, for any number of steps.
_EXPAND_UP_TO = 10_000
# The most wrong items that an error names.
_SHOW_UP_TO = 10


class StepsError(ConfigError):
    """Steps that do not follow the grammar."""


@attrs.frozen(str=False)
class Steps:
    """A set of steps with O(1) membership: ``3 in Steps.parse("1-128")``."""

    everything: bool = False
    singles: frozenset[int] = frozenset()
    ranges: tuple[range, ...] = ()
    text: str = attrs.field(default="", eq=False)

    def __contains__(self, step: object) -> bool:
        if step in self.singles or self.everything:
            return True
        # Runs on every call of a stage: no generator for ranges, which are rare.
        return any(step in long for long in self.ranges) if self.ranges else False

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
        StepsError
            Names each item outside the grammar: nested lists, negatives, floats, bools, reversed
            ranges, zero strides.
        """
        if isinstance(value, Steps):
            return value
        if isinstance(value, str) and value.strip() == "all":
            return cls(everything=True, text="all")
        items = value if isinstance(value, (list, tuple)) else [value]
        singles: set[int] = set()
        ranges: list[range] = []
        wrong: list[str] = []
        for item in items:
            for part in _ranges_of(item, wrong):
                if len(part) <= _EXPAND_UP_TO:
                    singles.update(part)
                else:
                    ranges.append(part)
        if wrong:
            shown = wrong[:_SHOW_UP_TO]
            if len(wrong) > len(shown):
                shown.append(f"{len(wrong) - len(shown)} more are wrong")
            raise StepsError("; ".join(shown), key, EXAMPLE)
        return cls(singles=frozenset(singles), ranges=tuple(ranges), text=_write(value))


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


def _ranges_of(item: Any, wrong: list[str]) -> list[range]:
    """The ranges of one item of a list; what is wrong with it is appended to `wrong`."""
    if isinstance(item, bool) or not isinstance(item, (int, str)):
        wrong.append(f"{reprlib.repr(item)} ({type(item).__name__}) is not a step")
        return []
    if isinstance(item, str):
        return [found for part in item.split(",") for found in _range_of(part, item, wrong)]
    if abs(item) >= 10**_DIGITS:  # a larger one may not even be printable
        wrong.append(f"a step has more than {_DIGITS} digits")
        return []
    if item < 0:
        wrong.append(f"step {item} is negative")
        return []
    return [range(item, item + 1)]


def _range_of(part: str, whole: str, wrong: list[str]) -> list[range]:
    part = part.strip()
    match = _ITEM.fullmatch(part)
    if match is None:
        within = "" if part == whole else f" in {reprlib.repr(whole)}"
        wrong.append(f"{reprlib.repr(part)}{within} is not a step or range")
        return []
    first, last, stride = (None if text is None else int(text) for text in match.groups())
    assert first is not None
    if last is None:
        return [range(first, first + 1)]
    if last < first:
        wrong.append(f"the range {part!r} runs backwards")
    elif stride == 0:
        wrong.append(f"the range {part!r} has stride 0")
    else:
        return [range(first, last + 1, stride or 1)]
    return []


def _write(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
