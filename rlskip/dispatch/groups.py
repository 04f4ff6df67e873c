"""From a prompt to its group: a batch's prompts, their sessions, and what they leave.

:meth:`Groups.begin` starts a batch. Each session is one task, which begins when the scheduler has a
worker for it: an attempt, another one elsewhere if it fails, and the rows or the cause in the
prompt's :class:`Group`. If the batch has a sink, rows and marker are written before that.

All of it runs on the dispatcher's event loop, where no worker's code does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.failures import (
    DataFailure,
    InfrastructureFailure,
    as_failure,
    cause_of,
    portable,
    text_of,
)
from rlskip.dispatch.history import History, tokens_of
from rlskip.dispatch.pools import Pool, Rows, Unjournaled, as_rows
from rlskip.dispatch.resume import Journals, resumable, to_journal
from rlskip.dispatch.scheduler import Scheduler, Unit
from rlskip.dispatch.sink import Leaving, Sink
from rlskip.dispatch.timeouts import DaemonThreads, failure_of, write_seconds
from rlskip.dispatch.units import Job, Session, session_seed
from rlskip.keys import row_tag, session_key, session_tag, trajectory_key
from rlskip.queue import TrajectoryQueue

_GIVEN_UP = 100_000  # the most given-up sessions that are remembered

logger = logging.getLogger(__name__)


class _BatchEndedError(Exception):
    """Raised where a session waits when its batch is cancelled or given up."""


@attrs.frozen
class _Outcome:
    """How a session ended: with rows, which are None if the worker wrote them, or an error."""

    attempt: int
    rows: Rows = None
    tokens: int = 0
    error: str | None = None
    tags: Sequence[Mapping[str, Any]] = ()


@attrs.define(eq=False)
class _Attempt:
    """An attempt at a session; its task awaits `answer`."""

    worker: int
    unit: Unit
    started: float  # a time of its batch
    answer: asyncio.Future[Any]

    @property
    def prompt(self) -> Prompt:
        return self.unit.group  # type: ignore[return-value]

    def returned(self, future: asyncio.Future[Any]) -> None:
        """Its worker has returned or raised, perhaps after the attempt was given up."""
        error = InfrastructureFailure("cancelled") if future.cancelled() else future.exception()
        if not self.answer.done():
            if error is None:
                self.answer.set_result(future.result())
            else:
                self.answer.set_exception(error)
        elif error is None:
            self.prompt.batch.late += 1
            logger.info("dropped a late result of %s", self)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def __str__(self) -> str:
        session, attempt = self.unit.session, self.unit.attempt
        return f"session {session} of {self.prompt.uid} (attempt {attempt}, worker {self.worker})"


class Groups:
    """The batches that a dispatcher runs; every call comes from its event loop.

    Parameters
    ----------
    loop
        That event loop.
    pool, queue, config
        The dispatcher's.
    scheduler
        Decides which session runs next, and where.
    history
        Learns the lengths of sessions; None if the policy does not use them.
    journals
        The journals of its steps; None: nothing is journaled.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        queue: TrajectoryQueue | None,
        config: DispatchConfig,
        scheduler: Scheduler,
        history: History | None,
        journals: Journals | None,
    ) -> None:
        # A batch is in `batches` until its last session is settled or it was given up. A session
        # waits in the scheduler until it has a worker, and then has a task. It counts in the
        # scheduler's load until it is reported, or it has a turn and waits for another worker.
        # Neither is left once no batch is.
        self.batches: set[BatchHandle] = set()
        self._loop = loop
        self._pool = pool
        pool.changed = self._worker_changed
        self._config = config
        self._scheduler = scheduler
        self._history = history
        self._journals = journals
        self._unjournaled = ""  # the cause that was warned of
        self._seconds = write_seconds(config)
        self._sink = Sink(queue, self._seconds, self._warn_of_journal)
        self._threads = DaemonThreads(4, "rlskip-files")
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio keeps no reference to them
        self._turns: dict[Unit, asyncio.Future[int]] = {}  # of the sessions that are tried again
        # When each attempt that runs is given up, the earliest first; one alarm serves all of them,
        # because nearly every one ends long before.
        self._deadlines: dict[_Attempt, float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # The number of the next attempt at the sessions given up last, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        """Let the threads end once their calls return."""
        self._sink.close()
        self._threads.close()

    # -- a batch, from its prompts to its last group -------------------------------------------

    def begin(self, batch: BatchHandle) -> None:
        """Run a batch."""
        self._run(self._batch(batch))

    def _run(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _batch(self, batch: BatchHandle) -> None:
        """Open the journal, write the roots, run the sessions."""
        error: BaseException | None = None
        batch.marked = self._loop.create_future()
        try:
            if self._journals is not None and not batch.validate:
                await self._open_journal(batch, self._journals)
            if batch.sinks:
                await self._write_roots(batch)
            batch.rooted.set()
            self._add_sessions(batch)
            self._pump()
            await batch.marked
        except Exception as raised:
            error = raised
            self._abort(batch, error)
        self.batches.discard(batch)
        batch.seconds = batch.elapsed()
        if batch.journal is not None:
            with contextlib.suppress(OSError):
                batch.journal.close()
        batch.finish(error)

    async def _open_journal(self, batch: BatchHandle, journals: Journals) -> None:
        journals.name(batch)
        opened = self._threads.run(journals.open, batch.step)
        error = await failure_of(opened, self._seconds, "the disk")
        if error is None:
            batch.journal = opened.result()
            if batch.unjournaled:
                self._warn_of_journal(f"step {batch.step}", batch.unjournaled)
        else:
            self._threads.give_up(opened)
            self._warn_of_journal(f"step {batch.step}", text_of(error))

    def _warn_of_journal(self, where: object, cause: str) -> None:
        # Without a journal a killed step starts over; the step itself goes on.
        if cause != self._unjournaled:
            self._unjournaled = cause
            logger.warning("%s: sessions are not journaled: %s", where, cause)

    async def _write_roots(self, batch: BatchHandle) -> None:
        tags = {prompt.uid: prompt.root_tag() for prompt in batch.prompts}
        error = await self._sink.write(Leaving(self._loop.create_future(), batch.partition, tags))
        if error is not None:
            raise error

    def _add_sessions(self, batch: BatchHandle) -> None:
        """Resume the sessions that the journal holds, and queue the others."""
        journaled = resumable(batch, self._journals)
        for prompt in batch.prompts:
            for session, found, tokens in journaled.get(prompt.uid, ()):
                batch.resumed += 1
                first = self._next_attempts.get((prompt.uid, session), 0)
                self._end(prompt, session, _Outcome(first, found.rows, tokens, tags=found.tags))
            if batch.cancelled:
                continue
            attempts = {i: self._next_attempts.get((prompt.uid, i), 0) for i in sorted(prompt.open)}
            self._scheduler.add(prompt, attempts)
        if batch.cancelled:
            self._end_all(batch, "cancelled")

    # -- a session, from its worker to its group -----------------------------------------------

    async def _session(self, worker: int, unit: Unit) -> None:
        """Run a session on its worker, try again on another, and leave rows or cause."""
        prompt: Prompt = unit.group  # type: ignore[assignment]
        failures: Counter[bool] = Counter()  # of attempts, by whether the infrastructure failed
        outcome: _Outcome | None = None
        try:
            while outcome is None:
                if unit.session not in prompt.open:  # it was ended before this task began
                    self._scheduler.done(worker, unit)
                    return
                answer = self._loop.create_future()
                attempt = _Attempt(worker, unit, prompt.batch.elapsed(), answer)
                try:
                    rows, tokens = await self._attempt(attempt)
                except _BatchEndedError:
                    raise
                except Exception as error:
                    again = self._after_failure(attempt, error, failures)
                    if isinstance(again, Unit):
                        unit = again
                        self._loop.call_soon(self._pump)  # once it waits for its turn
                        worker = await self._turn(prompt.batch, unit)
                    else:
                        outcome = _Outcome(unit.attempt, error=again)
                else:
                    self._after_success(attempt, tokens)
                    outcome = _Outcome(unit.attempt, rows, tokens)
        except _BatchEndedError as ended:
            outcome = _Outcome(0, error=str(ended))
        except Exception as error:
            self._abort(prompt.batch, error)
            outcome = _Outcome(0, error=f"the batch was given up: {text_of(error)}")
        self._end(prompt, unit.session, outcome)
        self._pump()

    async def _turn(self, batch: BatchHandle, unit: Unit) -> int:
        """The worker that the scheduler assigns to another attempt, once it is its turn."""
        turn: asyncio.Future[int] = self._loop.create_future()
        self._turns[unit] = turn
        batch.waiting[turn] = None
        try:
            return await turn
        finally:
            del self._turns[unit], batch.waiting[turn]

    async def _attempt(self, attempt: _Attempt) -> tuple[Rows, int]:
        """Run a session on its worker until it returns, its deadline passes or its batch ends.

        Returns its rows and their number of tokens; raises why it failed.
        """
        batch = attempt.prompt.batch
        future = self._start(attempt)
        if (seconds := self._config.session_timeout_s) is not None:
            self._deadlines[attempt] = self._loop.time() + seconds
            if self._alarm is None:
                self._alarm = self._loop.call_later(seconds, self._expire)
        batch.attempts += 1
        batch.waiting[attempt.answer] = None
        try:
            result = await attempt.answer
            if isinstance(result, Unjournaled):
                self._warn_of_journal(f"step {batch.step}", result)
            return _rows_and_tokens(result, batch.sinks)
        except _BatchEndedError:
            self._scheduler.done(attempt.worker, attempt.unit)
            raise
        finally:
            self._deadlines.pop(attempt, None)
            del batch.waiting[attempt.answer]
            if not future.done():
                self._stop(attempt, future)

    def _start(self, attempt: _Attempt) -> asyncio.Future[Any]:
        prompt, unit = attempt.prompt, attempt.unit
        batch = prompt.batch
        session = Session(
            uid=prompt.uid,
            session_id=unit.session,
            n=prompt.n,
            attempt=unit.attempt,
            seed=session_seed(self._config.seed or 0, batch.step, prompt.prompt, unit.session),
            partition=batch.partition,
            prompt_key=prompt.journal_key if batch.journal is not None else None,
            **prompt.info,
        )
        try:
            job = Job(session, prompt.sample, prompt.sampling)
            future = self._pool.start(attempt.worker, job)
            if not asyncio.isfuture(future):
                raise DataFailure(f"the pool started a {type(future).__name__}, not a future")
        except BaseException as error:  # a pool may be the user's
            future = self._loop.create_future()
            future.set_exception(portable(error))
        future.add_done_callback(attempt.returned)
        return future

    def _expire(self) -> None:
        """Give up the attempts that have passed their deadline."""
        now, seconds = self._loop.time(), self._config.session_timeout_s
        late = [attempt for attempt, at in self._deadlines.items() if at <= now]
        then = next((at for at in self._deadlines.values() if at > now), None)
        self._alarm = None if then is None else self._loop.call_at(then, self._expire)
        for attempt in late:
            cause = f"passed its deadline of {seconds:g} s (dispatch.session_timeout_s)"
            attempt.fail(InfrastructureFailure(cause))

    def _stop(self, attempt: _Attempt, future: asyncio.Future[Any]) -> None:
        """Stop what still runs; a pool that cannot stop it must not delay the others."""
        unit = attempt.unit
        self._next_attempts[attempt.prompt.uid, unit.session] = unit.attempt + 1
        if len(self._next_attempts) > _GIVEN_UP:
            del self._next_attempts[next(iter(self._next_attempts))]
        try:
            self._pool.stop(attempt.worker, future)
        except BaseException:  # a pool may be the user's
            logger.exception("%s could not be stopped", attempt)

    def _after_success(self, attempt: _Attempt, tokens: int) -> None:
        prompt = attempt.prompt
        length = tokens or prompt.batch.elapsed() - attempt.started
        if self._history is not None:
            self._history.learn(prompt.known_as, length)
        self._scheduler.done(attempt.worker, attempt.unit, length)

    def _after_failure(
        self, attempt: _Attempt, error: Exception, failures: Counter[bool]
    ) -> Unit | str:
        """The session's next attempt; where none is left, the cause."""
        unit, failure = attempt.unit, as_failure(error)
        what = text_of(failure)
        machine = isinstance(failure, InfrastructureFailure)
        allowed = self._config.max_retries if machine else self._config.max_data_retries
        failures[machine] += 1
        if failures[machine] <= allowed:
            logger.warning("%s failed and is tried again: %s", attempt, what)
            return self._scheduler.retry(attempt.worker, unit)
        logger.error("%s failed for good: %s", attempt, what, exc_info=failure)
        self._scheduler.done(attempt.worker, unit)
        return cause_of(failure)

    # -- what a session leaves ---------------------------------------------------------------

    def _end(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
        """A session has its outcome: write it, where it is written, and settle it."""
        if session not in prompt.open:  # its batch was given up, and it has its outcome
            return
        prompt.open.remove(session)
        prompt.batch.tokens += outcome.tokens
        if not prompt.open:
            try:
                self._pool.forget(prompt.sample)
            except BaseException:  # a pool may be the user's
                logger.exception("the pool could not forget %s", prompt.uid)
        if prompt.batch.sinks or to_journal(prompt, session, outcome.rows, outcome.tags):
            self._run(self._write(prompt, session, outcome))
        else:
            self._settle(prompt, session, outcome)

    async def _write(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
        """Write a session's rows and its one marker."""
        error = await self._sink.write(self._leaving(prompt, session, outcome))
        if error is not None and outcome.error is None:
            # The queue refuses the session's rows, but perhaps not its marker.
            cause = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("session %d of %s failed: %s", session, prompt.uid, cause)
            outcome = _Outcome(outcome.attempt, error=cause)
            error = await self._sink.write(self._leaving(prompt, session, outcome))
        self._settle(prompt, session, outcome)
        if error is not None:
            self._abort(prompt.batch, error)

    def _leaving(self, prompt: Prompt, session: int, outcome: _Outcome) -> Leaving:
        """Journal, then rows, then marker."""
        batch, rows, attempt = prompt.batch, outcome.rows, outcome.attempt
        leaving = Leaving(
            self._loop.create_future(),
            batch.partition,
            journal=batch.journal,
            entries=to_journal(prompt, session, rows, outcome.tags),
        )
        if batch.sinks:
            tag = row_tag(batch.step, attempt)
            own_tags = outcome.tags or [{}] * len(rows or ())
            leaving.rows = {
                trajectory_key(prompt.uid, session, index): (row, {**own, **tag})
                for index, (row, own) in enumerate(zip(rows or (), own_tags, strict=True))
            }
            count = None if rows is None else len(rows)
            marker = session_tag(session, attempt, outcome.error, count)
            leaving.tags = {session_key(prompt.uid, session): marker}
        return leaving

    def _settle(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
        """Its group has the session: the last one ends the prompt, and the batch."""
        batch = prompt.batch
        if outcome.error is not None:
            batch.failed[prompt.uid, session] = prompt.group.failed[session] = outcome.error
        else:  # rows in the queue are not kept twice
            prompt.group.rows[session] = [] if batch.sinks else outcome.rows or []
        batch.unwritten -= 1
        if not prompt.running:
            batch.on_ended(prompt)
        if batch.unwritten == 0:
            batch.settled.set()
            if batch.marked is not None and not batch.marked.done():  # else it was aborted
                batch.marked.set_result(None)

    # -- whose turn it is ------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start all sessions that can run."""
        try:
            while (found := self._scheduler.next()) is not None:
                worker, unit = found
                if unit in self._turns:
                    self._turns[unit].set_result(worker)
                else:
                    self._run(self._session(worker, unit))
        except Exception as error:
            self.abort_all(error)
        if not self._scheduler.alive:
            for batch in list(self.batches):
                self._end_all(batch, "no worker is left")

    def _worker_changed(self, worker: int, state: str) -> None:
        self._scheduler.change(worker, state)
        self._pump()

    # -- early ends ------------------------------------------------------------------------------

    def cancel(self, batch: BatchHandle) -> None:
        """Stop a batch: each session without an outcome fails."""
        batch.cancelled = True
        if batch in self.batches and batch.rooted.is_set():  # else its coroutine does it later
            self._end_all(batch, "cancelled")
            self._pump()

    def abort_all(self, error: BaseException) -> None:
        """Abort every batch."""
        for batch in list(self.batches):
            self._abort(batch, error)

    def _abort(self, batch: BatchHandle, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`."""
        if batch in self.batches:
            self.batches.discard(batch)
            self._end_all(batch, f"the batch was given up: {text_of(error)}")
            if batch.marked is not None and not batch.marked.done():
                batch.marked.set_exception(error)
                batch.marked.exception()  # asyncio warns of one that nobody has looked at
            if not batch.rooted.is_set():  # its coroutine waits for the disk or the queue
                batch.finish(error)

    def _end_all(self, batch: BatchHandle, cause: str) -> None:
        """Stop every unfinished session of `batch`; each is marked failed."""
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
        for waits in list(batch.waiting):
            if not waits.done():
                waits.set_exception(_BatchEndedError(cause))
        # Those without a task: a session that runs ends once it is resumed.
        for prompt in batch.prompts:
            for session in sorted(prompt.open):
                self._end(prompt, session, _Outcome(0, error=cause))


def _rows_and_tokens(result: Any, sinks: bool) -> tuple[Rows, int]:
    """What a worker returned; raises an Exception for whatever its rows raise."""
    try:
        rows = as_rows(result)
        if rows is None and not sinks:
            raise DataFailure(
                "the worker returned no rows, as one that writes them to a queue itself",
                remedy="return the rows; or submit() to a dispatcher that has the queue",
            )
        return rows, tokens_of(rows or ())
    except BaseException as odd:
        raise portable(odd)  # noqa: B904 - it is the error itself, or has it as its cause
