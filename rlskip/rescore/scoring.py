"""A reward function run over the sessions of cached rollouts, and what it changed."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlskip.batch.decoding import decoder_at
from rlskip.format.dump_errors import DumpError
from rlskip.rescore.arguments import Data, arguments, score_of
from rlskip.rescore.judge import Judge, RewardError
from rlskip.runs.opened import Scope
from rlskip.runs.rollouts import Rollouts, SessionRows

SHOWN = 10  # sessions that changed most
_KEPT_ERRORS = 20
_QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}


@attrs.define
class Rescored:
    """What scoring again found. Of a session that has a new score only its scores are kept.

    ``most_changed`` are the sessions that changed most. Groups that ``gained`` a signal have scores
    that differ now and were equal before, as ``step/group``. ``failures`` are the first of the
    sessions without a new score; ``unreadable`` says why a dump cannot be read.
    """

    sessions: int = 0
    failed: int = 0
    failures: list[dict[str, Any]] = attrs.field(factory=list)
    old: array[float] = attrs.field(factory=partial(array, "d"))
    new: array[float] = attrs.field(factory=partial(array, "d"))
    changed: int = 0
    most_changed: list[dict[str, Any]] = attrs.field(factory=list)
    groups: int = 0
    gained: list[str] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)
    unreadable: list[dict[str, str]] = attrs.field(factory=list)

    def add_session(self, place: dict[str, Any], old: float | None, new: float | Exception) -> None:
        self.sessions += 1
        if isinstance(new, Exception):
            self.failed += 1
            if self.failed <= _KEPT_ERRORS:
                self.failures.append({**place, "error": f"{type(new).__name__}: {new}"})
            return
        self.new.append(new)
        if old is not None:
            self.old.append(old)
        if old != new:
            self.changed += 1
            by = math.inf if old is None else abs(new - old)
            every = [*self.most_changed, {"by": by, **place, "old": old, "new": new}]
            self.most_changed = sorted(every, key=lambda one: -one["by"])[:SHOWN]

    def as_json(self) -> dict[str, Any]:
        scores = {"old": _described(self.old), "new": _described(self.new)}
        return attrs.asdict(self, filter=lambda field, _: field.name not in scores) | scores


def _described(scores: array[float]) -> dict[str, Any] | None:
    """``count``, ``mean``, ``std``, ``min``, ``p10``, ``p50``, ``p90``, ``max``."""
    if not scores:
        return None
    found = {"count": len(scores), "mean": float(np.mean(scores)), "std": float(np.std(scores))}
    quantiles = np.quantile(scores, list(_QUANTILES.values()), method="lower").tolist()
    return found | dict(zip(_QUANTILES, quantiles, strict=True))


def rescore(
    judge: Judge,
    steps: Sequence[Scope],
    *,
    workers: int = 8,
    data: Data | None = None,
    progress: Callable[[Sequence[Scope]], Iterable[Scope]] = iter,
) -> Rescored:
    """Score the sessions of some steps or calls again; one dump is in memory at a time.

    `workers` calls of the function are under way at a time; `data` has more columns, by prompt.
    Raises RlskipError where a dump does not record what the function takes.
    """

    async def run() -> Rescored:  # an async function has one loop for all
        pool = ThreadPoolExecutor(workers, "rlskip-judge")
        asyncio.get_running_loop().set_default_executor(pool)
        rescored = Rescored()
        for step in progress(steps):
            for dump in step.iter_dumps():
                try:
                    rollouts = step.read(dump)
                except DumpError as error:
                    problem = str(error).partition("\n")[0]
                    rescored.unreadable.append({"dump": dump.name, "problem": problem})
                    continue
                here = dump.tokenizer
                if rollouts.decode is None and here and Path(here).is_dir():
                    rollouts.decode = decoder_at(here, skip_special=True)
                verdicts = await _verdicts(judge, rollouts, workers, data)
                _add(rescored, dump.step, rollouts, verdicts)
        return rescored

    return asyncio.run(run())


def _add(
    rescored: Rescored, step: int, rollouts: Rollouts, verdicts: Sequence[float | Exception]
) -> None:
    cells = rollouts.columns.of("reward")
    dtype = getattr(cells[0], "dtype", None) if cells else None
    new: dict[tuple[str, int], float] = {}
    for one, found in zip(rollouts.sessions, verdicts, strict=True):
        place = {"step": step, "call": one.place["call"],
                 "group": one.group, "session": one.number}  # fmt: skip
        if not isinstance(found, Exception):
            # As the run's rewards are: 0.1 is another number in float32.
            found = float(dtype.type(found)) if dtype is not None and dtype.kind == "f" else found
            new[one.group, one.number] = found
        rescored.add_session(place, one.reward, found)
    for group in rollouts.groups:
        rescored.groups += 1
        # With the sessions that were not scored again.
        before = {one.reward for one in group.sessions} - {None}
        now = {new.get((one.group, one.number), one.reward) for one in group.sessions} - {None}
        if (len(before) > 1) != (len(now) > 1):
            (rescored.gained if len(now) > 1 else rescored.lost).append(f"{step}/{group.name}")


async def _verdicts(
    judge: Judge, rollouts: Rollouts, workers: int, data: Data | None
) -> list[float | Exception]:
    """Of each session its score, or why there is none."""
    sessions = rollouts.sessions
    size = math.ceil(len(sessions) / workers) if judge.takes_many else 1
    cuts = [sessions[i : i + size] for i in range(0, len(sessions), max(size, 1))]
    at_a_time = asyncio.Semaphore(workers)

    async def ask(cut: Sequence[SessionRows]) -> list[float | Exception]:
        async with at_a_time:
            # What the run lacks concerns every session, so it is raised here.
            given = arguments(judge, cut, rollouts.decode, data)
            try:
                if judge.is_async:
                    said = await judge.ask_async(given)
                else:
                    said = await asyncio.to_thread(judge.ask, given)
            except Exception as error:
                return [error] * len(cut)
            except SystemExit as error:  # it must not end the command, as if all were well
                return [RewardError(f"it ended with exit code {error.code}")] * len(cut)
        return [score_of(verdict) for verdict in said]

    answers = await asyncio.gather(*map(ask, cuts))
    return [score for scores in answers for score in scores]
