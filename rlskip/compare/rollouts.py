"""Dumps compared: in which sessions prompts, tokens, log-probs and rewards differ."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import attrs

from rlskip._human import number
from rlskip.config.steps import Steps, compact
from rlskip.format.dump_errors import DumpError
from rlskip.runs.columns import plain, values
from rlskip.runs.conversation import Piece, recorded
from rlskip.runs.find import Target
from rlskip.runs.opened import NoSuchPlaceError, Run, Step
from rlskip.runs.rollouts import Rollouts
from rlskip.runs.scope import Scope


@attrs.frozen
class Difference:
    """A session of A and its counterpart in B, by their places in the step (None: there is none).

    ``token`` is the first token that differs, counted over the responses of the session's turns,
    ``log_prob`` the first log-prob that differs by more than the tolerance; ``by`` is the largest
    such gap. ``reward`` is the sum over the turns. ``call`` is the place of its call or part in the
    step, where there are several.
    """

    step: int
    a: int | None
    b: int | None
    group: str
    token: int | None = None
    log_prob: int | None = None
    by: float | None = None
    reward: tuple[float | None, float | None] | None = None
    mask: bool = False
    field: str | None = None
    call: int | None = None

    def __str__(self) -> str:
        if self.b is None:
            return "this prompt is not in B"
        if self.a is None:
            return "this prompt is not in A"
        words = [] if self.token is None else [f"tokens from {self.token} on"]
        if self.log_prob is not None:
            gap = "" if self.by is None else f" by up to {number(self.by)}"
            words.append(f"log-probs from token {self.log_prob} on{gap}")
        if self.reward is not None:
            a, b = (number(reward) or "none" for reward in self.reward)
            words.append(f"reward {a} / {b}")
        if self.mask:
            words.append("which tokens were sampled")
        if self.field is not None:
            words.append(self.field)
        return "; ".join(words)


@attrs.frozen
class StepTally:
    """A step that both sides have: of A's sessions and groups how many are the same in B.

    The others are how many sessions differ in what.
    """

    step: int
    sessions: int
    same: int
    groups: int
    same_groups: int
    prompts: int = 0
    tokens: int = 0
    log_probs: int = 0
    rewards: int = 0
    others: int = 0


COLUMNS = (">step", ">same sessions", ">same groups", ">prompts differ", ">tokens differ",
           ">log-probs differ", ">rewards differ", ">others differ")  # fmt: skip


@attrs.frozen
class RolloutComparison:
    """Two runs or steps compared by their rollouts.

    Parameters
    ----------
    a, b
        What the user calls them.
    only_in_a, only_in_b
        Steps that only one of them has.
    unreadable
        ``step`` and ``problem`` of each step that cannot be read.
    """

    a: str
    b: str
    only_in_a: list[int]
    only_in_b: list[int]
    unreadable: list[dict[str, Any]] = attrs.field(factory=list)
    steps: list[StepTally] = attrs.field(factory=list)
    differences: list[Difference] = attrs.field(factory=list)

    @property
    def is_equal(self) -> bool:
        return not (self.differences or self.only_in_a or self.only_in_b or self.unreadable)

    def verdict(self) -> str:
        """One sentence: how many sessions are the same, and what differs first."""
        sessions = sum(step.sessions for step in self.steps)
        words = [f"{sum(step.same for step in self.steps)} of {sessions} sessions are the same"]
        if self.differences:
            first = self.differences[0]
            place = first.a if first.a is not None else first.b
            words.append(f"session {place} of step {first.step} differs first: {first}")
        for side, steps in (("A", self.only_in_a), ("B", self.only_in_b)):
            if steps:
                words.append(f"only {side} has steps {compact(steps)}")
        words += [f"step {one['step']} cannot be read: {one['problem']}" for one in self.unreadable]
        return "; ".join(words)

    def table(self) -> list[tuple[str, ...]]:
        """The cells of :data:`COLUMNS` for each step."""
        found = []
        for tally in self.steps:
            step, sessions, same, groups, same_groups, *counts = attrs.astuple(tally)
            same_of = f"{same} of {sessions}", f"{same_groups} of {groups}"
            found.append((str(step), *same_of, *map(str, counts)))
        return found


def compare_rollouts(
    a: Target,
    b: Target,
    tolerance: float,
    wanted: Steps,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    rtol: float = 0.0,
) -> RolloutComparison:
    """Compare two steps or calls, whatever their numbers, or the steps of two runs.

    Parameters
    ----------
    tolerance, rtol
        Log-probs and rewards are equal if ``|a - b| <= tolerance + rtol * max(|a|, |b|)``.
    wanted
        The steps of runs to compare.
    progress
        Returns the steps that it is given, and shows how far it is.

    Raises
    ------
    NoSuchPlaceError
        Neither has such a step, or one that was named has no dump.
    """
    mine, theirs = _steps(a, wanted), _steps(b, wanted)
    if not mine and not theirs:
        raise NoSuchPlaceError("neither has a step to compare", f"{a.name}, {b.name}")
    if not (isinstance(a, Run) or isinstance(b, Run)):
        theirs = dict(zip(mine, theirs.values(), strict=True))
    # With its dump_dir if the other has the same name.
    name, other = (
        one.name if a.name != b.name else f"{one.name} in {one.run.dump_dir}" for one in (a, b)
    )
    only_a, only_b = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    found = RolloutComparison(name, other, only_a, only_b)
    for step in progress(sorted(mine.keys() & theirs.keys())):
        try:
            parts = list(mine[step].rollouts()), list(theirs[step].rollouts())
        except (DumpError, NoSuchPlaceError) as error:  # a live run may have removed it meanwhile
            problem = str(error).partition("\n")[0]
            found.unreadable.append({"step": step, "problem": problem})
            continue
        differences, tally = compare_sessions(*parts, step, tolerance, rtol)
        found.differences.extend(differences)
        found.steps.append(tally)
    return found


def _steps(target: Target, wanted: Steps) -> dict[int, Scope]:
    if isinstance(target, Run):
        return {step.number: step for step in target if step.number in wanted}
    next(target.iter_dumps())  # which raises where there is none
    step = target if isinstance(target, Step) else target.step
    return {step.number: target}


# -- a step --------------------------------------------------------------------------------------


@attrs.frozen
class _Session:
    """A session with its turns one after the other; `cells` are those of rows without tokens.

    Sessions with equal keys are compared: those of one prompt, else of one place.
    """

    key: Hashable
    place: int
    call: int
    group: str
    reward: float | None
    prompts: list[list[int]]
    response: list[int]
    mask: list[bool | None]
    log_probs: list[float] | None
    cells: list[dict[str, str]]


def compare_sessions(
    a: Sequence[Rollouts], b: Sequence[Rollouts], step: int, tolerance: float, rtol: float = 0.0
) -> tuple[list[Difference], StepTally]:
    """The sessions that differ.

    Sessions are matched by their prompts: the first session of a prompt in A with the first in B.
    `a` and `b` have the step's calls or parts in order.
    """
    mine, theirs = _sessions(a), _sessions(b)
    several = max(len(a), len(b)) > 1
    waiting: dict[Hashable, deque[_Session]] = defaultdict(deque)
    for one in theirs:
        waiting[one.key].append(one)
    found, differ = [], set()
    for one in mine:
        queue = waiting[one.key]
        other = queue.popleft() if queue else None
        difference = {} if other is None else _compare_sessions(one, other, tolerance, rtol)
        if other is None or difference:
            call = one.call if several else None
            b_place = None if other is None else other.place
            found.append(Difference(step, one.place, b_place, one.group, call=call, **difference))
            differ.add((one.call, one.group))
    left = sorted((one for queue in waiting.values() for one in queue), key=lambda one: one.place)
    found += [
        Difference(step, None, one.place, one.group, call=one.call if several else None)
        for one in left
    ]
    groups = {(one.call, one.group) for one in mine}
    return found, StepTally(
        step,
        sessions=len(mine),
        same=len(mine) - sum(one.a is not None for one in found),
        groups=len(groups),
        same_groups=len(groups - differ),
        prompts=sum(one.a is None or one.b is None for one in found),
        tokens=sum(one.token is not None for one in found),
        log_probs=sum(one.log_prob is not None for one in found),
        rewards=sum(one.reward is not None for one in found),
        others=sum(one.mask or one.field is not None for one in found),
    )


def _sessions(parts: Sequence[Rollouts]) -> list[_Session]:
    found: list[_Session] = []
    for call, part in enumerate(parts):
        cells = [] if part.has_tokens else _cells(part)
        for one in part.sessions:
            turns = one.turns
            said = recorded(turns[0], "user")
            key: Hashable = len(found) if said is None else repr(said)
            if part.has_tokens:
                key = tuple(turns[0]["prompt"] or ())
            else:
                turns = []
            pieces = one.pieces if part.has_tokens else []
            probs = [p for piece in pieces for p in piece.log_probs]
            log_probs = [math.nan if p is None else p for p in probs]
            has_log_probs = any(turn["log_probs"] is not None for turn in turns)
            found.append(
                _Session(
                    key=key,
                    place=len(found),
                    call=call,
                    group=one.group,
                    reward=one.reward,
                    prompts=[turn["prompt"] or [] for turn in turns],
                    response=[token for turn in turns for token in turn["response"]],
                    mask=[flag for piece in pieces for flag in _mask_of(piece)],
                    log_probs=log_probs if has_log_probs else None,
                    cells=[cells[i] for i in one.rows] if cells else [],
                )
            )
    return found


def _mask_of(piece: Piece) -> Sequence[bool | None]:
    """Which tokens of a turn were sampled; None for each where that is not known."""
    return [None] * len(piece.response) if piece.mask is None else piece.mask


def _compare_sessions(a: _Session, b: _Session, tolerance: float, rtol: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    token = _first(a.response, b.response)
    if token is not None:
        found["token"] = token
    # After the first token that differs, the log-probs belong to different texts.
    upto = len(a.response) if token is None else token
    pairs: list[tuple[float, float]] = []
    if a.log_probs is not None and b.log_probs is not None:
        pairs = list(zip(a.log_probs[:upto], b.log_probs[:upto], strict=True))
    beyond = [i for i, (x, y) in enumerate(pairs) if x != y and _are_apart(x, y, tolerance, rtol)]
    if beyond:
        gaps = [abs(x - y) if x == x and y == y else (x != x) != (y != y) for x, y in pairs]
        found |= {"log_prob": beyond[0], "by": float(max(gaps))}
    if (a.log_probs is None) != (b.log_probs is None):
        found["log_prob"] = 0
    if _are_apart(a.reward, b.reward, tolerance, rtol):
        found["reward"] = (a.reward, b.reward)
    if token is None and a.mask != b.mask:
        found["mask"] = True
    if token is None and a.prompts != b.prompts:
        found["field"] = "turns" if len(a.prompts) != len(b.prompts) else "observations"
    if not a.prompts and (names := _other_cells(a.cells, b.cells)):
        found["field"] = ", ".join(names)
    return found


def _first(a: Sequence[int], b: Sequence[int]) -> int | None:
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _are_apart(a: float | None, b: float | None, tolerance: float, rtol: float) -> bool:
    """Whether two values differ by more than the tolerance; NaN equals NaN alone."""
    if a is None or b is None or a != a or b != b:
        return (a is None, a != a) != (b is None, b != b)
    largest = max(abs(a), abs(b))
    return abs(a - b) > tolerance + (rtol * largest if math.isfinite(largest) else 0.0)


def _other_cells(a: Sequence[dict[str, str]], b: Sequence[dict[str, str]]) -> list[str]:
    """The columns in which a session's rows differ."""
    names = {name: None for row in (*a, *b) for name in row}
    return [name for name in names if [r.get(name) for r in a] != [r.get(name) for r in b]]


def _cells(part: Rollouts) -> list[dict[str, str]]:
    """The columns of each row but a reward, which is compared as the number that it is."""
    columns = {name: values(column) for name, column in part.columns.columns.items()}
    reward = part.columns.name_of("reward")
    return [
        # As text: a NaN equals a NaN.
        {n: repr(plain(c[i])) for n, c in columns.items() if n != reward or known is None}
        for i, known in enumerate(part.rewards)
    ]
