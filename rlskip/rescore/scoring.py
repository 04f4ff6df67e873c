"""A reward function run over the sessions of cached rollouts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from rlskip.batch.decoding import decoder_at
from rlskip.format.dump_errors import DumpError
from rlskip.rescore.arguments import Data, arguments, score_of
from rlskip.rescore.figures import Change, Changes
from rlskip.rescore.judge import Judge, RewardError
from rlskip.runs.on_disk import Dump
from rlskip.runs.rollouts import Decode, Rollouts, SessionRows
from rlskip.runs.scope import Scope

_KEPT_ERRORS = 20


@attrs.frozen
class Failure:
    """A session that has no new score, and why."""

    step: int
    call: int | None
    group: str
    session: int
    error: str


@attrs.define
class Rescored:
    """What scoring again found.

    Parameters
    ----------
    sessions
        How many were to be scored.
    failures, failed
        Of those without a new score how many, and the first of them.
    unreadable
        Why a dump cannot be read, by its name.
    """

    changes: Changes = attrs.field(factory=Changes)
    sessions: int = 0
    failed: int = 0
    failures: list[Failure] = attrs.field(factory=list)
    unreadable: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Rescoring:
    """How to score again.

    Parameters
    ----------
    workers
        How many calls of the function are under way at a time.
    data
        More columns, by prompt (:func:`rlskip.rescore.arguments.read_data`).
    """

    judge: Judge
    workers: int = 8
    data: Data | None = None

    def run(
        self,
        steps: Sequence[Scope],
        progress: Callable[[Sequence[Scope]], Iterable[Scope]] = iter,
    ) -> Rescored:
        """Score the sessions of some steps or calls; one dump is in memory at a time.

        Raises
        ------
        RlskipError
            A dump does not record what the function takes.
        """
        return asyncio.run(self._run(steps, progress))  # an async function has one loop for all

    async def _run(
        self, steps: Sequence[Scope], progress: Callable[[Sequence[Scope]], Iterable[Scope]]
    ) -> Rescored:
        pool = ThreadPoolExecutor(self.workers, "rlskip-judge")
        asyncio.get_running_loop().set_default_executor(pool)
        rescored = Rescored()
        for step in progress(steps):
            for dump in step.iter_dumps():
                try:
                    rollouts = step.read(dump)
                except DumpError as error:
                    rescored.unreadable[dump.name] = str(error).partition("\n")[0]
                else:
                    await self._score(rollouts, dump, rescored)
        return rescored

    async def _score(self, rollouts: Rollouts, dump: Dump, rescored: Rescored) -> None:
        sessions = rollouts.sessions
        rollouts.decode = rollouts.decode or _recorded(dump)
        rescored.sessions += len(sessions)
        new: dict[tuple[str, int], float] = {}
        kept = _dtype_of(rollouts)
        verdicts = await self._verdicts(sessions, rollouts.decode)
        for one, found in zip(sessions, verdicts, strict=True):
            place = dump.step, one.place["call"], one.group, one.number
            if isinstance(found, Exception):
                rescored.failed += 1
                if len(rescored.failures) < _KEPT_ERRORS:
                    text = f"{type(found).__name__}: {found}"
                    rescored.failures.append(Failure(*place, text))
            else:
                new[one.group, one.number] = score = kept(found)
                by = math.inf if one.reward is None else abs(score - one.reward)
                rescored.changes.add_session(Change(by, *place, one.reward, score))
        for group in rollouts.groups:
            old = [one.reward for one in group.sessions]
            now = [new.get((one.group, one.number), one.reward) for one in group.sessions]
            rescored.changes.add_group(f"{dump.step}/{group.name}", old, now)

    async def _verdicts(
        self, sessions: Sequence[SessionRows], decode: Decode | None
    ) -> list[float | Exception]:
        """Of each session its score, or why there is none."""
        size = math.ceil(len(sessions) / self.workers) if self.judge.takes_many else 1
        cuts = [sessions[i : i + size] for i in range(0, len(sessions), max(size, 1))]
        at_a_time = asyncio.Semaphore(self.workers)

        async def ask(cut: Sequence[SessionRows]) -> list[float | Exception]:
            async with at_a_time:
                # What the run lacks concerns every session, so it is raised here.
                given = arguments(self.judge, cut, decode, self.data)
                try:
                    if self.judge.is_async:
                        said = await self.judge.ask_async(given)
                    else:
                        said = await asyncio.to_thread(self.judge.ask, given)
                except Exception as error:
                    return [error] * len(cut)
                except SystemExit as error:  # it must not end the command, as if all were well
                    return [RewardError(f"it ended with exit code {error.code}")] * len(cut)
            return [score_of(verdict) for verdict in said]

        answers = await asyncio.gather(*map(ask, cuts))
        return [score for scores in answers for score in scores]


def _dtype_of(rollouts: Rollouts) -> Callable[[float], float]:
    """Rounds a score as the run's rewards are: 0.1 is another number in float32."""
    cells = rollouts.columns.of("reward")
    dtype = getattr(cells[0], "dtype", None) if cells else None
    if dtype is None or dtype.kind != "f":
        return float
    return lambda score: float(dtype.type(score))


def _recorded(dump: Dump) -> Decode | None:
    """The decoder of the tokenizer that a dump names, where that is here."""
    path = dump.tokenizer
    return decoder_at(path, skip_special=True) if path and Path(path).is_dir() else None
