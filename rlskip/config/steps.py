"""Which steps: one grammar for lists, strings and the resolver.

::

    all                       every step
    [1, 2, 3]                 these; an item may itself be a string of the grammar
    "1-128,200,300-400:10"    ranges include both ends; after the colon the stride

Steps are integers >= 0.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from rlskip.errors import ConfigError

EXAMPLE = 'write a list such as [1,2,3], a string such as "1-128,200,300-400:10", or all'

_ITEM = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*(?::\s*(\d+)\s*)?)?", re.ASCII)

# A range longer than this stays a range; shorter ones join the set. So membership is one
# set look-up, plus one comparison per long range, whatever the number of steps.
_EXPAND_UP_TO = 10_000
# What the resolver turns into a list: every item becomes an OmegaConf node.
_RESOLVE_UP_TO = 100_000


class StepsError(ConfigError):
    """Steps that are not of the grammar."""


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
        # Asked on every call of a stage: no generator for ranges that are hardly ever there.
        return any(step in long for long in self.ranges) if self.ranges else False

    def __bool__(self) -> bool:
        return self.everything or bool(self.singles) or bool(self.ranges)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, value: Any, key: str = "steps") -> Steps:
        """Read any form of the grammar.

        Parameters
        ----------
        value
            What the config holds: ``"all"``, a string, an int, or a list of ints and strings.
        key
            The full config key, for the error.

        Raises
        ------
        StepsError
            For nested lists, negatives, floats, bools, reversed ranges, zero strides and
            anything else that is not of the grammar.
        """
        if isinstance(value, Steps):
            return value
        if isinstance(value, str) and value.strip() == "all":
            return cls(everything=True, text="all")
        items = value if isinstance(value, (list, tuple)) else [value]
        singles: set[int] = set()
        ranges: list[range] = []
        for item in items:
            for part in _ranges_of(item, key):
                if len(part) <= _EXPAND_UP_TO:
                    singles.update(part)
                else:
                    ranges.append(part)
        return cls(singles=frozenset(singles), ranges=tuple(ranges), text=_write(value))


def resolve_steps(*pieces: Any) -> Any:
    """The resolver ``${rlskip.steps:1-128,200}``: a list of ints, or ``all``.

    For static YAML whose reader knows only lists (verl's own ``skip.rollout.steps``, say).
    Return type: ListConfig, or the string ``all``.
    """
    # Imported here: the grammar itself needs no OmegaConf.
    from omegaconf import OmegaConf

    steps = Steps.parse(",".join(map(str, pieces)), "${rlskip.steps:...}")
    if steps.everything:
        return "all"
    count = len(steps.singles) + sum(map(len, steps.ranges))
    if count > _RESOLVE_UP_TO:
        raise StepsError(
            f"{count} steps are too many for a list", "${rlskip.steps:...}",
            "give rlskip the string itself: steps: \"...\"",
        )  # fmt: skip
    # A plain list breaks `--cfg job --resolve` on OmegaConf 2.3.
    return OmegaConf.create(sorted(steps.singles.union(*steps.ranges)))


def _ranges_of(item: Any, key: str) -> list[range]:
    if isinstance(item, bool) or not isinstance(item, (int, str)):
        raise StepsError(f"{item!r} ({type(item).__name__}) is no step", key, EXAMPLE)
    if isinstance(item, int):
        if item < 0:
            raise StepsError(f"step {item} is negative", key, EXAMPLE)
        return [range(item, item + 1)]
    return [_range_of(piece, item, key) for piece in item.split(",")]


def _range_of(piece: str, whole: str, key: str) -> range:
    match = _ITEM.fullmatch(piece)
    if match is None:
        raise StepsError(f"{piece.strip()!r} in {whole!r} is no step or range", key, EXAMPLE)
    first, last, stride = (None if text is None else int(text) for text in match.groups())
    assert first is not None
    if last is None:
        return range(first, first + 1)
    if last < first:
        raise StepsError(f"the range {piece.strip()!r} runs backwards", key, EXAMPLE)
    if stride == 0:
        raise StepsError(f"the range {piece.strip()!r} has stride 0", key, EXAMPLE)
    return range(first, last + 1, stride or 1)


def _write(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
