"""The sessions of batches, on the event loop: from the queue of sessions to the marker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import Attempt, BatchHandle, Prompt
from rlskip.dispatch.coroutines import Answer, failure_of, run
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
from rlskip.dispatch.queue_writer import Leaving, QueueWriter
from rlskip.dispatch.resume import Journals, resumable, to_journal
from rlskip.dispatch.scheduler import Scheduler, Unit
from rlskip.dispatch.timeouts import DaemonThreads, write_seconds
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


class Sessions:
    """The batches that a dispatcher runs; every call comes from its event loop.

    Each batch and each session is one coroutine (:mod:`rlskip.dispatch.coroutines`).

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
        queue: TrajectoryQueue,
        config: DispatchConfig,
        scheduler: Scheduler,
        history: History | None,
        journals: Journals | None,
    ) -> None:
        # A batch is in `batches` until all its markers are written or it was given up. A session
        # waits in the scheduler until it has a worker, and then has a coroutine. It counts in the
        # scheduler's load until it is reported, or it has a seat and waits for another worker.
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
        self._writer = QueueWriter(loop, queue, self._seconds, self._warn_of_journal)
        self._threads = DaemonThreads(4, "rlskip-files")
        self._seats: dict[Unit, Answer[int]] = {}  # of the sessions that are tried again
        # When each attempt that runs is given up, the earliest first; one alarm serves all of them,
        # because nearly every one ends long before.
        self._deadlines: dict[Attempt, float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # The number of the next attempt at the sessions given up last, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        """Let the threads end once their calls return."""
        self._writer.close()
        self._threads.close()

    # -- a batch, from prompts to its last marker ----------------------------------------------

    def begin(self, batch: BatchHandle) -> None:
        """Run a batch."""
        run(self._batch(batch))

    async def _batch(self, batch: BatchHandle) -> None:
        """Open the journal, write the roots, run the sessions."""
        error: BaseException | None = None
        try:
            if self._journals is not None and not batch.validate:
                await self._open_journal(batch, self._journals)
            await self._write_roots(batch)
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
        error = await self._writer.write(Leaving(batch.partition, tags))
        if error is not None:
            raise error
        batch.rooted.set()

    def _add_sessions(self, batch: BatchHandle) -> None:
        """Resume the sessions that the journal holds, and queue the others."""
        journaled = resumable(batch, self._journals)
        for prompt in batch.prompts:
            for session, found, tokens in journaled.get(prompt.uid, ()):
                batch.resumed += 1
                first = self._next_attempts.get((prompt.uid, session), 0)
                outcome = _Outcome(first, found.rows, tokens, tags=found.tags)
                run(self._leave(prompt, session, outcome))
            if batch.cancelled:
                continue
            attempts = {i: self._next_attempts.get((prompt.uid, i), 0) for i in sorted(prompt.open)}
            self._scheduler.add(prompt, attempts)
        if batch.cancelled:
            self._end_all(batch, "cancelled")

    # -- a session, from the queue of sessions to its marker -----------------------------------

    async def _session(self, worker: int, unit: Unit) -> None:
        """Run a session on its worker, try again on another, and leave rows and marker."""
        prompt: Prompt = unit.group  # type: ignore[assignment]
        batch, session = prompt.batch, unit.session
        failures: Counter[bool] = Counter()  # of attempts, by whether the infrastructure failed
        outcome: _Outcome | None = None
        try:
            while outcome is None:
                attempt = Attempt(worker, unit, batch.elapsed())
                try:
                    rows, tokens = await self._attempt(attempt)
                except _BatchEndedError:
                    raise
                except Exception as error:
                    again = self._after_failure(attempt, error, failures)
                    if isinstance(again, Unit):
                        unit = again
                        self._loop.call_soon(self._pump)  # once it waits for its seat
                        worker = await self._seat(batch, unit)
                    else:
                        outcome = _Outcome(unit.attempt, error=again)
                else:
                    self._after_success(attempt, tokens)
                    outcome = _Outcome(unit.attempt, rows, tokens)
        except _BatchEndedError as ended:
            outcome = _Outcome(0, error=str(ended))
        except Exception as error:
            self._abort(batch, error)
            outcome = _Outcome(0, error=f"the batch was given up: {text_of(error)}")
        run(self._leave(prompt, session, outcome))
        self._pump()

    async def _seat(self, batch: BatchHandle, unit: Unit) -> int:
        """The worker that the scheduler assigns to another attempt, once it is its turn."""
        seat: Answer[int] = Answer()
        self._seats[unit] = seat
        batch.waiting[seat] = None
        try:
            return await seat
        finally:
            del self._seats[unit], batch.waiting[seat]

    async def _attempt(self, attempt: Attempt) -> tuple[Rows, int]:
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
        batch.waiting[attempt] = None
        try:
            result = await attempt
            if isinstance(result, Unjournaled):
                self._warn_of_journal(f"step {batch.step}", result)
            return _rows_and_tokens(result)
        except _BatchEndedError:
            self._scheduler.done(attempt.worker, attempt.unit)
            raise
        finally:
            self._deadlines.pop(attempt, None)
            del batch.waiting[attempt]
            if not future.done():
                self._stop(attempt, future)

    def _start(self, attempt: Attempt) -> asyncio.Future[Any]:
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

    def _stop(self, attempt: Attempt, future: asyncio.Future[Any]) -> None:
        """Stop what still runs; a pool that cannot stop it must not delay the others."""
        unit = attempt.unit
        self._next_attempts[attempt.prompt.uid, unit.session] = unit.attempt + 1
        if len(self._next_attempts) > _GIVEN_UP:
            del self._next_attempts[next(iter(self._next_attempts))]
        try:
            self._pool.stop(attempt.worker, future)
        except BaseException:  # a pool may be the user's
            logger.exception("%s could not be stopped", attempt)

    def _after_success(self, attempt: Attempt, tokens: int) -> None:
        prompt = attempt.prompt
        length = tokens or prompt.batch.elapsed() - attempt.started
        if self._history is not None:
            self._history.learn(prompt.known_as, length)
        self._scheduler.done(attempt.worker, attempt.unit, length)

    def _after_failure(
        self, attempt: Attempt, error: Exception, failures: Counter[bool]
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

    async def _leave(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
        """Write a session's rows and its one marker."""
        batch = prompt.batch
        if session not in prompt.open:  # its batch was given up, and it has its marker
            return
        prompt.open.remove(session)
        batch.tokens += outcome.tokens
        if not prompt.open:
            try:
                self._pool.forget(prompt.sample)
            except BaseException:  # a pool may be the user's
                logger.exception("the pool could not forget %s", prompt.uid)
        error = await self._write(prompt, session, outcome)
        if error is not None and outcome.error is None:
            # The queue refuses the session's rows, but perhaps not its marker.
            cause = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("session %d of %s failed: %s", session, prompt.uid, cause)
            outcome = _Outcome(outcome.attempt, error=cause)
            error = await self._write(prompt, session, outcome)
        batch.unwritten -= 1
        if error is not None:
            self._abort(batch, error)
        if batch.unwritten == 0:
            batch.settled.set()
            batch.marked.set(None)  # unless the batch was aborted

    def _write(self, prompt: Prompt, session: int, outcome: _Outcome) -> Answer[Exception | None]:
        """Journal, then rows, then marker; the answer is why they are not written."""
        batch, rows, attempt = prompt.batch, outcome.rows, outcome.attempt
        if outcome.error is not None:
            batch.failed[prompt.uid, session] = outcome.error
        tag = row_tag(batch.step, attempt)
        own_tags = outcome.tags or [{}] * len(rows or ())
        count = None if rows is None else len(rows)
        marker = session_key(prompt.uid, session)
        leaving = Leaving(
            partition=batch.partition,
            rows={
                trajectory_key(prompt.uid, session, index): (row, {**own, **tag})
                for index, (row, own) in enumerate(zip(rows or (), own_tags, strict=True))
            },
            tags={marker: session_tag(session, attempt, outcome.error, count)},
            journal=batch.journal,
            entries=to_journal(prompt, session, rows, outcome.tags),
            put=functools.partial(prompt.marked.add, session),
        )
        return self._writer.write(leaving)

    # -- whose turn it is ------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start all sessions that can run."""
        try:
            while (found := self._scheduler.next()) is not None:
                worker, unit = found
                if unit in self._seats:
                    self._seats[unit].set(worker)
                else:
                    run(self._session(worker, unit))
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
        """Stop a batch: each session without a marker gets one with status failure."""
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
            batch.marked.fail(error)
            if not batch.rooted.is_set():  # its coroutine waits for the disk or the queue
                batch.finish(error)

    def _end_all(self, batch: BatchHandle, cause: str) -> None:
        """Stop every unfinished session of `batch`; each is marked failed."""
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
        for waits in list(batch.waiting):
            waits.fail(_BatchEndedError(cause))
        for prompt in batch.prompts:
            for session in sorted(prompt.open):  # those without a worker
                run(self._leave(prompt, session, _Outcome(0, error=cause)))


def _rows_and_tokens(result: Any) -> tuple[Rows, int]:
    """What a worker returned; raises an Exception for whatever its rows raise."""
    try:
        rows = as_rows(result)
        return rows, tokens_of(rows or ())
    except BaseException as odd:
        raise portable(odd)  # noqa: B904 - it is the error itself, or has it as its cause
