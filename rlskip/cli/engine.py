"""`rlskip compare RUN`: what the engine said against what the trainer computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import numpy as np
from rich.table import Table

from rlskip._human import number
from rlskip.cli.screen import Answer, Cell, progress, table
from rlskip.compare.mismatch import ENGINE, TRAINER, Gaps, StepMismatch, mismatch
from rlskip.compare.sides import find_side
from rlskip.compare.verdict import Decode, in_context
from rlskip.config.steps import Steps
from rlskip.runs.opened import NoSuchPlaceError

_FIGURES = (">tokens", ">mean", ">largest", ">k3 KL", ">beyond 1.0", "")
_WORST = 5


def compare_engine(run: str, within: Path, *, steps: str, decode: Decode | None) -> Answer:
    """Compare the log-probs of the engine and of the trainer in one job.

    Raises
    ------
    RlskipError
        No step recorded both, or a record cannot be read.
    """
    side, wanted = find_side(run, within), Steps.parse(steps, "--steps")
    chosen = [step for step in side.steps() if step in wanted]
    results = (mismatch(step, side.records(step)) for step in progress(chosen, "comparing"))
    found = [one for one in results if one is not None]
    if not found:
        raise NoSuchPlaceError(
            f"no step recorded {ENGINE} and one of {', '.join(TRAINER)}",
            side.name,
            "let the engine return log-probs (verl: calculate_log_probs=true of the rollout; TRL: "
            "vLLM), and record again",
        )
    data = {"run": side.name, "steps": [attrs.asdict(one) for one in found]}
    return Answer(data, _view(side.name, found, decode))


def _view(name: str, found: list[StepMismatch], decode: Decode | None) -> list[Cell]:
    lines: list[Cell] = [f"{name}: {found[0].stage} minus {ENGINE}, of sampled tokens", ""]
    lines.append(_table(">step", [(one.step, one.all) for one in found]))
    parts = [_together(one.by_position[i] for one in found) for i in range(4)]
    names = ("first fourth", "second", "third", "last")
    lines += ["", _table("of the response", list(zip(names, parts, strict=True)))]
    turns = sorted({turn for one in found for turn in one.by_turn})
    if len(turns) > 1:
        of_turns = [
            (turn, _together(one.by_turn[turn] for one in found if turn in one.by_turn))
            for turn in turns
        ]
        lines += ["", _table(">turn", of_turns)]
    worst = sorted((token for one in found for token in one.worst), reverse=True)[:_WORST]
    rows = [
        (one.step, one.row, one.token, number(one.engine), number(one.trainer),
         in_context(*one.around, decode))
        for one in worst
    ]  # fmt: skip
    shown = table((">step", "row", ">token", ">engine", ">trainer", "within"), rows)
    return [*lines, "", "the worst tokens", shown]


def _table(first: str, rows: Sequence[tuple[Cell, Gaps]]) -> Table:
    cells = [
        (name, gaps.tokens, *map(number, (gaps.mean, gaps.largest, gaps.kl)),
         f"{100 * gaps.beyond:.2g} %", "")
        for name, gaps in rows
    ]  # fmt: skip
    return table((first, *_FIGURES), cells)


def _together(some: Iterable[Gaps]) -> Gaps:
    """The figures of several steps as one."""
    there = [gaps for gaps in some if gaps.tokens]
    weights = [gaps.tokens for gaps in there]
    if not there:
        return Gaps(0, *[float("nan")] * 4)
    mean, kl, beyond = (
        float(np.average([getattr(gaps, name) for gaps in there], weights=weights))
        for name in ("mean", "kl", "beyond")
    )
    return Gaps(sum(weights), mean, max(gaps.largest for gaps in there), kl, beyond)
