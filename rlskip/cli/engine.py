"""`rlskip compare RUN`: what the engine said against what the trainer computed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
import numpy as np
from rich.console import RenderableType

from rlskip._human import number
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.compare.mismatch import ENGINE, TRAINER, Gaps, StepMismatch, mismatch
from rlskip.compare.sides import find_side
from rlskip.compare.verdict import Decode, in_context
from rlskip.config.steps import Steps
from rlskip.runs.opened import NoSuchPlaceError

_FIGURES = (">tokens", ">mean", ">largest", ">k3 KL", ">beyond 1.0")
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


def _view(name: str, found: list[StepMismatch], decode: Decode | None) -> list[RenderableType]:
    said = f"{name}: {found[0].stage} minus {ENGINE}, of sampled tokens"
    lines: list[RenderableType] = [text(said), text("")]
    lines.append(_table(">step", [(str(one.step), one.all) for one in found]))
    parts = [_together(one.by_position[i] for one in found) for i in range(4)]
    names = ("first fourth", "second", "third", "last")
    lines += [text(""), _table("of the response", list(zip(names, parts, strict=True)))]
    turns = sorted({turn for one in found for turn in one.by_turn})
    if len(turns) > 1:
        of_turns = [
            (str(turn), _together(one.by_turn[turn] for one in found if turn in one.by_turn))
            for turn in turns
        ]
        lines += [text(""), _table(">turn", of_turns)]
    worst = sorted((token for one in found for token in one.worst), reverse=True)[:_WORST]
    shown = table(">step", "row", ">token", ">engine", ">trainer", "within")
    for one in worst:
        shown.add_row(
            str(one.step), text(one.row), str(one.token), number(one.engine), number(one.trainer),
            text(in_context(*one.around, decode)),
        )  # fmt: skip
    return [*lines, text(""), text("the worst tokens"), shown]


def _table(first: str, rows: list[tuple[str, Gaps]]) -> RenderableType:
    shown = table(first, *_FIGURES, "")
    for name, gaps in rows:
        figures = (gaps.mean, gaps.largest, gaps.kl)
        shown.add_row(
            name, str(gaps.tokens), *map(number, figures), f"{100 * gaps.beyond:.2g} %", ""
        )
    return shown


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
