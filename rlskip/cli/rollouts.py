"""`rlskip compare A B` of dumps: in which sessions prompts, tokens and log-probs differ."""

from __future__ import annotations

from typing import Any

import attrs
from rich.console import RenderableType

from rlskip._human import number, short
from rlskip.cli.screen import Answer, progress, table, text
from rlskip.config.steps import compact
from rlskip.format.dump_errors import DumpError
from rlskip.report.page import Verdict
from rlskip.runs.compare import Difference, StepTally, compare
from rlskip.runs.find import Target
from rlskip.runs.opened import Run, Step
from rlskip.runs.rollouts import Rollouts


def compare_rollouts(a: Target, b: Target, *, tolerance: float, limit: int) -> Answer:
    """Compare two steps, or all steps of two runs. Exit code 1 if anything differs."""
    pairs, only_a, only_b = _pairs(a, b)
    tallies, differences, unreadable = [], [], []
    for step, other in progress(pairs, "comparing"):
        try:
            found, tally = compare(_load(a, step), _load(b, other), step, tolerance)
        except DumpError as error:
            unreadable.append({"step": step, "problem": str(error).partition("\n")[0]})
            continue
        differences += found
        tallies.append(tally)
    data = {
        "a": _label(a, b),
        "b": _label(b, a),
        "only_in_a": only_a,
        "only_in_b": only_b,
        "unreadable": unreadable,
        "steps": [attrs.asdict(tally) for tally in tallies],
        "differences": [attrs.asdict(one) for one in differences],
    }
    differ = bool(differences or only_a or only_b or unreadable)
    return Answer(data, _view(data, tallies, differences, limit), 1 if differ else 0)


_COUNTS = ("prompts", "tokens", "log_probs", "rewards", "others")


def verdict_of(data: dict[str, Any]) -> Verdict:
    """What was found, for a page."""
    steps, differences = data["steps"], data["differences"]
    sessions, same = (sum(one[name] for one in steps) for name in ("sessions", "same"))
    words = [f"{same} of {sessions} sessions are the same"]
    if differences:
        first = Difference(**differences[0])
        place = first.a if first.a is not None else first.b
        words.append(f"session {place} of step {first.step} differs first: {_words(first)}")
    words += [
        f"only {side.upper()} has steps {compact(data[f'only_in_{side}'])}"
        for side in "ab"
        if data[f"only_in_{side}"]
    ]
    words += [f"step {one['step']} cannot be read: {one['problem']}" for one in data["unreadable"]]
    rows = [
        [str(one["step"]), f"{one['same']} of {one['sessions']}",
         f"{one['same_groups']} of {one['groups']}", *(str(one[name]) for name in _COUNTS)]
        for one in steps
    ]  # fmt: skip
    columns = (
        ">step",
        ">same sessions",
        ">same groups",
        *(f">{name.replace('_', '-')} differ" for name in _COUNTS),
    )
    return Verdict("; ".join(words), len(words) == 1, columns, rows)


def _label(one: Target, other: Target) -> str:
    """The name of a side; with its dump_dir if the other has the same name."""
    return one.name if one.name != other.name else f"{one.name} in {one.run.dump_dir}"


def _pairs(a: Target, b: Target) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """The pairs of steps to compare, and the steps that only one side has."""
    mine, theirs = _steps(a), _steps(b)
    if not (isinstance(a, Run) or isinstance(b, Run)):
        return [(mine[0], theirs[0])], [], []
    both = sorted(set(mine) & set(theirs))
    only_a, only_b = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    return [(step, step) for step in both], only_a, only_b


def _steps(target: Target) -> list[int]:
    if isinstance(target, Run):
        return target.steps()
    return [target.number if isinstance(target, Step) else target.step.number]


def _load(target: Target, step: int) -> list[Rollouts]:
    """The calls or parts of a step of `target`."""
    return list((target[step] if isinstance(target, Run) else target).rollouts())


def _view(
    data: dict[str, Any], tallies: list[StepTally], found: list[Difference], limit: int
) -> list[RenderableType]:
    view: list[RenderableType] = [text(f"A {data['a']}"), text(f"B {data['b']}"), text("")]
    view += [text(f"step {one['step']}: {one['problem']}", "red") for one in data["unreadable"]]
    if tallies:
        view.append(text("how many sessions and groups are the same; how many sessions differ in"))
    shown = table(
        ">step", ">sessions", ">groups", ">prompts", ">tokens", ">log-probs", ">rewards", ">others"
    )
    for tally in tallies:
        step, sessions, same, groups, same_groups, *counts = attrs.astuple(tally)
        same_of = (f"{same} of {sessions}", f"{same_groups} of {groups}")
        shown.add_row(str(step), *same_of, *map(str, counts))
    view.append(shown)
    for side, steps in (("A", data["only_in_a"]), ("B", data["only_in_b"])):
        if steps:
            view.append(text(f"only in {side}: steps {compact(steps)}"))
    if found:
        view.append(text(""))
        rows = table(">step", ">session", ">in B", "group", "what differs")
        for one in found[:limit]:
            rows.add_row(
                f"{one.step}/{one.call}" if one.call is not None else str(one.step),
                "" if one.a is None else str(one.a),
                "" if one.b is None else str(one.b),
                text(short(one.group, 24)),
                text(_words(one)),
            )
        view.append(rows)
        if more := max(0, len(found) - limit):
            view.append(text(f"{more} more sessions differ: --limit, or --json for all"))
    elif tallies and not (data["only_in_a"] or data["only_in_b"] or data["unreadable"]):
        view.append(text("no difference"))
    return view


def _words(one: Difference) -> str:
    if one.b is None:
        return "this prompt is not in B"
    if one.a is None:
        return "this prompt is not in A"
    words = [] if one.token is None else [f"tokens from {one.token} on"]
    if one.log_prob is not None:
        gap = "" if one.by is None else f" by up to {number(one.by)}"
        words.append(f"log-probs from token {one.log_prob} on{gap}")
    if one.reward is not None:
        a, b = (number(reward) or "none" for reward in one.reward)
        words.append(f"reward {a} / {b}")
    if one.mask:
        words.append("which tokens were sampled")
    if one.field is not None:
        words.append(one.field)
    return "; ".join(words)
