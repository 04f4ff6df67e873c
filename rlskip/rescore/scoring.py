"""A reward function run over the sessions of cached rollouts."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_REWARDS = ("group", "session", "turn", "reward")


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
    only_failed
        Only sessions that have no reward, one of 0 or less, or less than the best of all.
    repeat
        How many independent verdicts to ask for; the new score is their mean.
    workers
        How many calls of the function are under way at a time.
    data
        More columns, by prompt (:func:`rlskip.rescore.arguments.read_data`).
    """

    judge: Judge
    only_failed: bool = False
    repeat: int = 1
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
        best = None
        if self.only_failed:
            read = (part for step in steps for _, part in _readable(step, _REWARDS, rescored))
            earned = (one.reward for part in read for one in part.sessions)
            best = max((reward for reward in earned if reward is not None), default=0.0)
        for step in progress(steps):
            for dump, rollouts in _readable(step, None, rescored):
                await self._score(rollouts, dump, best, rescored)
        return rescored

    async def _score(
        self, rollouts: Rollouts, dump: Dump, best: float | None, rescored: Rescored
    ) -> None:
        sessions = [
            one
            for one in rollouts.sessions
            if best is None or one.reward is None or one.reward <= 0 or one.reward < best
        ]
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
                new[one.group, one.number] = score = kept(statistics.mean(found))
                if self.repeat > 1:
                    rescored.changes.spread.append(statistics.pstdev(found))
                by = math.inf if one.reward is None else abs(score - one.reward)
                rescored.changes.add_session(Change(by, *place, one.reward, score))
        for group in rollouts.groups:
            old = [one.reward for one in group.sessions]
            now = [new.get((one.group, one.number), one.reward) for one in group.sessions]
            rescored.changes.add_group(f"{dump.step}/{group.name}", old, now)

    async def _verdicts(
        self, sessions: Sequence[SessionRows], decode: Decode | None
    ) -> list[list[float] | Exception]:
        """Of each session its scores, one a repetition, or why there are none."""
        size = math.ceil(len(sessions) / self.workers) if self.judge.takes_many else 1
        cuts = [sessions[i : i + size] for i in range(0, len(sessions), max(size, 1))]
        at_a_time = asyncio.Semaphore(self.workers)

        async def ask(cut: Sequence[SessionRows], k: int) -> list[float | Exception]:
            async with at_a_time:
                # What the run lacks concerns every session, so it is raised here.
                given = arguments(self.judge, cut, decode, self.data)
                try:
                    if self.judge.is_async:
                        said = await self.judge.ask_async(given, k)
                    else:
                        said = await asyncio.to_thread(self.judge.ask, given, k)
                except Exception as error:
                    return [error] * len(cut)
                except SystemExit as error:  # it must not end the command, as if all were well
                    return [RewardError(f"it ended with exit code {error.code}")] * len(cut)
            return [score_of(verdict) for verdict in said]

        asks = [ask(cut, k) for cut in cuts for k in range(self.repeat)]
        answers = iter(await asyncio.gather(*asks))
        found: list[list[float] | Exception] = []
        for _ in cuts:
            for scores in zip(*itertools.islice(answers, self.repeat), strict=True):
                errors = [score for score in scores if isinstance(score, Exception)]
                found.append(errors[0] if errors else list(scores))
        return found


def _readable(
    step: Scope, fields: Sequence[str] | None, rescored: Rescored
) -> Iterator[tuple[Dump, Rollouts]]:
    """The dumps of a step, read; of those that cannot be the reason is noted."""
    for dump in step.iter_dumps():
        try:
            rollouts = step.read(dump, fields)
        except DumpError as error:
            rescored.unreadable[dump.name] = str(error).partition("\n")[0]
        else:
            yield dump, rollouts


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
