"""What a comparison found of stages, steps and jobs, and its verdict: what first differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlskip._human import number
from rlskip.config.steps import compact
from rlskip.runs.rollouts import Decode

EQUAL, ROUNDING, DIFFERS, UNPAIRED = "equal", "within rounding", "differs", "not comparable"

if TYPE_CHECKING:
    from rlskip.compare.records import RowTable

_AROUND = 8  # tokens that are shown on each side of one

#: The names of what is compared of the rows themselves.
ROLLOUTS, MASK = "rollouts", "mask"


@attrs.frozen
class Place:
    """The largest difference of a stage: the values of both sides, and where they are.

    Parameters
    ----------
    what
        The moment of a digest that differs most; None for a value itself.
    row
        Group or prompt, session and turn; None where the stage has no rows.
    entry
        Which entry of the row's part; None where a row has one value, or with digests.
    token
        Which token of the row, prompt included, that entry belongs to; None where it is not known.
    around
        The tokens around it, and the place of `token` among them; None with digests.
    """

    a: Any
    b: Any
    what: str | None = None
    row: str | None = None
    entry: int | None = None
    token: int | None = None
    around: tuple[list[int], int] | None = None


def name_of(rows: RowTable, at: int) -> str:
    """The name of the row at an index of the table: its prompt's is a hash if it has no group."""
    group = rows.groups[at]
    named = [f"group {group}" if group else f"prompt {f'{int(rows.prompts[at]):016x}'[:8]}"]
    for what, n in (("session", rows.sessions[at]), ("turn", rows.turns[at])):
        named += [f"{what} {n}"] if n >= 0 else []
    return ", ".join(named)


def around_token(tokens: np.ndarray, at: int) -> tuple[list[int], int]:
    """The tokens around the one at `at`, and where that is among them."""
    start = max(0, at - _AROUND)
    return tokens[start : at + _AROUND + 1].tolist(), at - start


@attrs.frozen
class StageResult:
    """A stage of one step compared.

    Parameters
    ----------
    order
        Of the first record that differs, among the records of A's step; else of the first one.
    unit, compared, off
        What was compared (rows or values), how many, and how many of them differ beyond rounding.
    largest
        The largest difference, inf where one is NaN and the other is not.
    """

    step: int
    stage: str
    state: str
    order: int
    unit: str = "rows"
    compared: int = 0
    off: int = 0
    largest: float = 0.0
    dtypes: tuple[str, str] = ("", "")
    note: str = ""
    at: Place | None = None


@attrs.frozen
class StepResult:
    """A step compared: the stages in the order in which A recorded them, and what one side has."""

    step: int
    stages: list[StageResult]
    only_a: list[str]
    only_b: list[str]


@attrs.frozen
class Comparison:
    """Two jobs compared, by the steps that both recorded; `only_a` are those of A alone.

    ``rule`` is what counts as rounding, in words.
    """

    a: str
    b: str
    steps: list[StepResult]
    only_a: list[int]
    only_b: list[int]
    rule: str = ""
    unreadable: dict[int, str] = attrs.field(factory=dict)

    @property
    def stages(self) -> list[StageResult]:
        """In the order in which A recorded them; each follows from those before it."""
        return [
            stage for step in self.steps for stage in sorted(step.stages, key=lambda one: one.order)
        ]

    @property
    def first(self) -> StageResult | None:
        """The first stage that differs beyond rounding; None where none does."""
        return next((stage for stage in self.stages if stage.state == DIFFERS), None)

    @property
    def follow(self) -> set[tuple[int, str]]:
        """The stages, by step and name, that come after the first that differs, and differ too."""
        names = [(one.step, one.stage) for one in self.stages if one.state != EQUAL]
        if self.first is None:
            return set()
        return set(names[names.index((self.first.step, self.first.stage)) + 1 :])

    @property
    def is_equal(self) -> bool:
        """Whether both recorded the same, up to rounding, and nothing that the other lacks."""
        incomparable = any(stage.state == UNPAIRED for stage in self.stages)
        alone = any(step.only_a or step.only_b for step in self.steps)
        alone = alone or bool(self.only_a or self.only_b or self.unreadable)
        return not (self.first or incomparable or alone)

    def verdict(self, decode: Decode | None = None) -> str:
        """One sentence: what differs first, where, and both values, in text by `decode`."""
        first = self.first
        if first is None:
            return self._verdict_of_equals()
        where = f"at step {first.step}"
        if first.stage == ROLLOUTS:
            said = f"the rollouts differ first, {where}: {first.note}"
        elif first.stage == MASK:
            said = f"the masks of {first.off} rows differ first, {where}: {first.note}"
        else:
            said = f"{first.stage} differs first, {where}"
            said += f": in {first.off} of {first.compared} {first.unit}" if first.off else ""
            said += f" ({first.note})" if first.note else ""
        said += _words(first.at, decode) if first.at is not None else ""
        rollouts = [one for one in self.stages if (one.step, one.stage) == (first.step, ROLLOUTS)]
        are_equal = any(one.state == EQUAL for one in rollouts)
        return f"{said}; the rollouts are equal" if are_equal else said

    def _verdict_of_equals(self) -> str:
        steps = compact([step.step for step in self.steps])
        compared = {stage.stage for stage in self.stages if stage.state != UNPAIRED}
        named = f"{len(compared - {ROLLOUTS, MASK})} stages of steps {steps}"
        rounded = [stage for stage in self.stages if stage.state == ROUNDING]
        if rounded:
            first = rounded[0]
            by = f"by {number(first.largest)}" if first.largest else "in the sign of a zero"
            said = (
                f"equal within rounding: {named}; {first.stage} of step {first.step} is the first "
                f"that is not equal to the bit, {by}"
            )
        else:
            said = f"equal to the bit: {named}"
        if self.is_equal:
            return said
        return f"what could be compared is {said}; not everything could be compared"


def _words(at: Place, decode: Decode | None) -> str:
    said = ""
    if at.row is not None:
        said += f", row ({at.row})"
    if at.token is not None:
        said += f", token {at.token}"
    if at.a is not None or at.b is not None:
        what = f"{at.what} " if at.what else ""
        said += f": {what}{shown(at.a)} in A, {shown(at.b)} in B"
    if at.around is not None:
        said += f", within {in_context(*at.around, decode)}"
    return said


def in_context(tokens: Sequence[int], at: int, decode: Decode | None) -> str:
    """The tokens, the one at `at` between brackets; as text where they can be decoded."""

    def text(some: Sequence[int]) -> str:
        return decode(some) if decode is not None else " ".join(map(str, some))

    gap = "" if decode is not None else " "
    parts = (text(tokens[:at]), f"[{text(tokens[at : at + 1])}]", text(tokens[at + 1 :]))
    joined = gap.join(part for part in parts if part)
    return repr(joined) if decode is not None else joined


def shown(value: Any) -> str:
    """A value with the digits that tell it from its neighbours."""
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


# -- the table -----------------------------------------------------------------------------------

COLUMNS = (">step", "stage", ">compared", ">differ", ">largest", "result")


_NAMED = 3  # stages of a line


def table_of(found: Comparison) -> list[tuple[str, ...]]:
    """The cells of :data:`COLUMNS`, in the order of the stages.

    The first difference and what is not comparable have a line each. What is equal, within
    rounding, or follows from the first difference is one line each.
    """
    follow = found.follow
    lines: dict[tuple[str, object], list[StageResult]] = {}
    for one in found.stages:
        follows = (one.step, one.stage) in follow
        alone = one.state in (DIFFERS, UNPAIRED) and not follows
        lines.setdefault((_state(one, follows), id(one) if alone else None), []).append(one)
    return [_line(words, stages) for (words, _), stages in lines.items()]


def _line(words: str, stages: Sequence[StageResult]) -> tuple[str, ...]:
    names = list(dict.fromkeys(one.stage for one in stages))
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    counts: dict[str, int] = {}
    for one in stages:
        counts[one.unit] = counts.get(one.unit, 0) + one.compared
    notes = list(dict.fromkeys(one.note for one in stages if one.note))
    largest = max(one.largest for one in stages)
    return (
        compact(sorted({one.step for one in stages})),
        ", ".join([*names[:_NAMED], *more]),
        ", ".join(f"{count} {unit}" for unit, count in counts.items()),
        str(sum(one.off for one in stages) or ""),
        number(largest) if largest else "",
        f"{words}: {notes[0]}" if len(notes) == 1 else words,
    )


def only_one_has(found: Comparison) -> list[str]:
    """A line for each kind of thing that only one side has, and for what cannot be read."""
    lines = []
    for side, attribute in (("A", "only_a"), ("B", "only_b")):
        names = {stage for step in found.steps for stage in getattr(step, attribute)}
        if names:
            lines.append(f"only {side} recorded {', '.join(sorted(names))}")
        if steps := getattr(found, attribute):
            lines.append(f"only {side} has steps {compact(steps)}")
    return lines + [f"step {step}: {problem}" for step, problem in found.unreadable.items()]


def _state(stage: StageResult, follows: bool) -> str:
    words = "equal to the bit" if stage.state == EQUAL else stage.state
    return words + (", follows" if follows else "")
