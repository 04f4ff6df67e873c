"""What a comparison found: of a stage, a step, and where."""

from __future__ import annotations

from typing import Any

import attrs

EQUAL, ROUNDING, DIFFERS, UNPAIRED = "equal", "within rounding", "differs", "not comparable"

#: The names of what is compared of the rows themselves.
ROLLOUTS, MASK = "rollouts", "mask"


@attrs.frozen
class RowName:
    """What a row is: the hash of its prompt, its session and turn (None: the batch has none)."""

    prompt: str
    session: int | None
    turn: int | None
    tokens: int

    def __str__(self) -> str:
        numbers = (("session", self.session), ("turn", self.turn))
        named = [f"{what} {number}" for what, number in numbers if number is not None]
        return ", ".join([f"prompt {self.prompt}", *named])


@attrs.frozen
class Place:
    """The largest difference of a stage.

    Parameters
    ----------
    a, b
        Both values; of a digest the moment that differs most.
    what
        The moment's name; None for a value itself.
    row
        None where the stage has no rows.
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
    row: RowName | None = None
    entry: int | None = None
    token: int | None = None
    around: tuple[list[int], int] | None = None


@attrs.frozen
class StageResult:
    """A stage of one step compared.

    Parameters
    ----------
    state
        ``equal`` (to the bit), ``within rounding``, ``differs``, or ``not comparable``.
    order
        Of the first record that differs, among the records of A's step; else of the first one.
    records
        How many records it has in A.
    unit, compared, off
        What was compared (rows or values), how many, and how many of them differ beyond rounding.
    largest
        The largest difference, inf where one is NaN and the other is not.
    dtypes
        What A and B computed in.
    note
        What else is to know.
    at
        Where the largest difference is; None where there is none.
    """

    step: int
    stage: str
    state: str
    order: int
    records: int = 1
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
