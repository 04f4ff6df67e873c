"""What a comparison found of stages, steps and jobs, and its verdict: what first differs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from rlskip._human import counted, number
from rlskip.batch.decoding import Decode
from rlskip.config.steps import compact

EQUAL, ROUNDING, DIFFERS, UNPAIRED = "equal", "within rounding", "differs", "not comparable"

#: The names of what is compared of the rows themselves.
ROLLOUTS, MASK = "rollouts", "mask"


@attrs.frozen
class Place:
    """The largest difference of a stage: the values of both sides, and where they are.

    ``what`` is the moment of a digest that differs most. ``entry`` counts within the row's part,
    ``token`` within the row. ``around`` are the tokens around it, and its place among them.
    """

    a: Any = None
    b: Any = None
    what: str | None = None
    row: str | None = None
    entry: int | None = None
    token: int | None = None
    around: tuple[list[int], int] | None = None

    def words(self, decode: Decode | None) -> str:
        said = "" if self.row is None else f", row ({self.row})"
        said += "" if self.token is None else f", token {self.token}"
        if self.a is not None or self.b is not None:
            what = f"{self.what} " if self.what else ""
            a, b = (f"{v:.9g}" if isinstance(v, float) else repr(v) for v in (self.a, self.b))
            said += f": {what}{a} in A, {b} in B"
        if self.around is not None:
            said += f", within {_in_context(*self.around, decode)}"
        return said


def _in_context(tokens: Sequence[int], at: int, decode: Decode | None) -> str:
    """The tokens, the one at `at` between brackets; as text where they can be decoded."""
    parts = [tokens[:at], tokens[at : at + 1], tokens[at + 1 :]]
    if decode is not None:
        return repr("{}[{}]{}".format(*map(decode, parts)))
    return "{} [{}] {}".format(*(" ".join(map(str, part)) for part in parts)).strip()


@attrs.frozen
class StageResult:
    """A stage of one step compared.

    ``order`` is that of A's first record that differs, else of the first one. Of ``compared`` rows
    or values (``unit``) ``off`` differ beyond rounding, at most by ``largest``: inf where one is
    NaN and the other is not.
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
    """The stages of a step that both recorded, and the names of those that only one did."""

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
        return [one for step in self.steps for one in sorted(step.stages, key=lambda x: x.order)]

    @property
    def first(self) -> StageResult | None:
        """The first stage that differs beyond rounding; None where none does."""
        return next((stage for stage in self.stages if stage.state == DIFFERS), None)

    @property
    def follow(self) -> set[tuple[int, str]]:
        """The stages, by step and name, that come after the first that differs, and differ too."""
        after = itertools.dropwhile(lambda one: one.state != DIFFERS, self.stages)
        return {(one.step, one.stage) for one in [*after][1:] if one.state != EQUAL}

    @property
    def only_one_has(self) -> list[str]:
        """A line for each kind of thing that only one side has, and for what cannot be read."""
        lines = []
        for side, attribute in (("A", "only_a"), ("B", "only_b")):
            names = {stage for step in self.steps for stage in getattr(step, attribute)}
            if names:
                lines.append(f"only {side} recorded {', '.join(sorted(names))}")
            if steps := getattr(self, attribute):
                lines.append(f"only {side} has steps {compact(steps)}")
        return lines + [f"step {step}: {problem}" for step, problem in self.unreadable.items()]

    @property
    def is_equal(self) -> bool:
        """Whether both recorded the same, up to rounding, and nothing that the other lacks."""
        bad = any(stage.state in (DIFFERS, UNPAIRED) for stage in self.stages)
        return not (bad or self.only_one_has)

    def verdict(self, decode: Decode | None = None) -> str:
        """One sentence: what differs first, where, and both values, in text by `decode`."""
        first = self.first
        if first is None:
            return self._verdict_of_equals()
        differs = "the rollouts differ" if first.stage == ROLLOUTS else f"{first.stage} differs"
        said = f"{differs} first, at step {first.step}"
        compared = counted(first.compared, first.unit[:-1])
        said += f": in {first.off} of {compared}" if first.off else ""
        said += f" ({first.note})" if first.note else ""
        said += first.at.words(decode) if first.at is not None else ""
        equal = {(one.step, one.stage) for one in self.stages if one.state == EQUAL}
        return f"{said}; the rollouts are equal" if (first.step, ROLLOUTS) in equal else said

    def _verdict_of_equals(self) -> str:
        steps = compact([step.step for step in self.steps])
        compared = {stage.stage for stage in self.stages if stage.state != UNPAIRED}
        n = len(compared - {ROLLOUTS, MASK})
        said = f"equal to the bit: {counted(n, 'stage') if n else 'the rollouts'} of steps {steps}"
        first = next((stage for stage in self.stages if stage.state == ROUNDING), None)
        if first is not None:
            by = f"by {number(first.largest)}" if first.largest else "in the sign of a zero"
            said = said.replace("to the bit", "within rounding", 1)
            said += f"; {first.stage} of step {first.step} is the first that is not equal to the "
            said += f"bit, {by}"
        more = f"what could be compared is {said}; not everything could be compared"
        return said if self.is_equal else more


COLUMNS = (">step", "stage", ">compared", ">differ", ">largest", "result")

_NAMED = 3  # stages of a line


def table_of(found: Comparison) -> list[tuple[str, ...]]:
    """The cells of :data:`COLUMNS`, in the order of the stages.

    What is equal, within rounding, or follows from the first difference is one line each.
    """
    follow = found.follow
    lines: dict[tuple[str, object], list[StageResult]] = {}
    for one in found.stages:
        words, alone = "equal to the bit" if one.state == EQUAL else one.state, None
        if (one.step, one.stage) in follow:
            words += ", follows"
        elif one.state in (DIFFERS, UNPAIRED):
            alone = id(one)
        lines.setdefault((words, alone), []).append(one)
    return [_line(words, stages) for (words, _), stages in lines.items()]


def _line(words: str, stages: Sequence[StageResult]) -> tuple[str, ...]:
    names = list(dict.fromkeys(one.stage for one in stages))
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    counts: dict[str, int] = {}
    for one in stages:
        counts[one.unit] = counts.get(one.unit, 0) + one.compared
    notes = list(dict.fromkeys(one.note for one in stages if one.note))
    return (
        compact(sorted({one.step for one in stages})),
        ", ".join([*names[:_NAMED], *more]),
        ", ".join(counted(count, unit[:-1]) for unit, count in counts.items()),
        str(sum(one.off for one in stages) or ""),
        number(max(one.largest for one in stages) or None),
        f"{words}: {notes[0]}" if len(notes) == 1 else words,
    )
