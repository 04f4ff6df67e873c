"""The sessions of batches, on the event loop: from the queue of sessions to the marker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import Attempt, BatchHandle, Prompt
from rlskip.dispatch.failures import (
    DataFailure,
    InfrastructureFailure,
    SessionFailure,
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
from rlskip.dispatch.tasks import HiddenTasks
from rlskip.dispatch.timeline import Progress, Span, write_timeline
from rlskip.dispatch.timeouts import DaemonThreads, failure_of, write_seconds
from rlskip.dispatch.units import Job, Session, session_seed
from rlskip.keys import row_tag, session_key, session_tag, trajectory_key
from rlskip.queue import TrajectoryQueue

_GIVEN_UP = 100_000  # the most given-up sessions that are remembered

logger = logging.getLogger(__name__)


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

    What waits for the queue or the disk is a task that workers do not see.

    Parameters
    ----------
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
        pool: Pool,
        queue: TrajectoryQueue,
        config: DispatchConfig,
        scheduler: Scheduler[Prompt],
        history: History | None,
        journals: Journals | None,
    ) -> None:
        # A batch is in `batches` until nothing is written for it any more. A session waits in the
        # scheduler, or an attempt at it runs and counts in the scheduler's `in_flight`. Neither is
        # left once no batch is.
        self.batches: set[BatchHandle] = set()
        self.tasks = HiddenTasks()
        self._pool = pool
        pool.changed = self._worker_changed
        self._config = config
        self._scheduler = scheduler
        self._history = history
        self._journals = journals
        self._unjournaled = ""  # the cause that was warned of
        self._seconds = write_seconds(config)
        self._files = DaemonThreads(float("inf"), "rlskip-files")
        self._queue = DaemonThreads(float("inf"), "rlskip-queue")
        self._writer = QueueWriter(
            queue, self.tasks, self._queue, self._files, self._seconds, self._warn_of_journal
        )
        # The number of the next attempt at the sessions given up last, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    def close(self) -> None:
        """Let the threads end once their calls return."""
        self._files.close()
        self._queue.close()

    # -- a batch, from prompts to its last marker ----------------------------------------------

    def begin(self, batch: BatchHandle) -> None:
        """Run a batch."""
        self.tasks.start(self._begin(batch))

    async def _begin(self, batch: BatchHandle) -> None:
        """Open the journal, write the roots, and start the sessions."""
        try:
            if self._config.timeline_dir is not None:
                batch.spans = []
            if self._config.progress:
                batch.progress = Progress(batch.step, batch.sessions)
            if self._journals is not None and not batch.validate:
                await self._open_journal(batch, self._journals)
            roots = {prompt.uid: prompt.root_tag() for prompt in batch.prompts}
            written: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            self._writer.write(Leaving(batch.partition, roots, written.set_result))
            if (error := await written) is not None:
                raise error
            if batch.ended is None:
                self._add_sessions(batch)
        except Exception as error:
            self._give_up(batch, error)
        batch.begun = True
        if batch.ended is not None:
            self._end(batch, batch.ended)
        self._pump()

    async def _finish(self, batch: BatchHandle) -> None:
        """All is written: draw the timeline, and wake the callers."""
        self.batches.discard(batch)
        batch.seconds = batch.elapsed()
        batch.settled.set()
        if batch.progress is not None:
            batch.progress.close()
        if batch.journal is not None:
            with contextlib.suppress(OSError):
                batch.journal.close()
        if batch.spans:
            await self._draw(batch)
        batch.finish()

    async def _open_journal(self, batch: BatchHandle, journals: Journals) -> None:
        opened = self._files.run(journals.open, batch.step)
        error = await failure_of(opened, self._seconds, "the disk")
        if error is None:
            batch.journal = opened.result()
        else:
            self._warn_of_journal(f"step {batch.step}", text_of(error))

    def _warn_of_journal(self, where: object, cause: str) -> None:
        # Without a journal a killed step starts over; the step itself goes on.
        if cause != self._unjournaled:
            self._unjournaled = cause
            logger.warning("%s: sessions are not journaled: %s", where, cause)

    def _add_sessions(self, batch: BatchHandle) -> None:
        """Resume the sessions that the journal holds, and queue the others."""
        journaled = resumable(batch, self._journals)
        for prompt in batch.prompts:
            attempts = {i: self._next_attempts.get((prompt.uid, i), 0) for i in range(prompt.n)}
            for session, found, tokens in journaled.get(prompt.uid, ()):
                batch.resumed += 1
                first = attempts.pop(session)
                outcome = _Outcome(first, found.rows, tokens, tags=found.tags)
                self._leave(prompt, session, outcome)
            self._scheduler.add(prompt, attempts)
        batch.queued = batch.elapsed()

    async def _draw(self, batch: BatchHandle) -> None:
        name = f"{batch.partition}-{batch.step}"
        title = f"step {batch.step} ({batch.partition}): {batch.sessions} sessions"
        directory = self._config.timeline_dir or "."
        drawn = self._files.run(write_timeline, batch.spans, directory, name, title)
        failed = await failure_of(drawn, self._seconds, "the disk")
        if failed is not None:
            text = "the timeline of step %d was not written"
            logger.error(text, batch.step, exc_info=failed)

    # -- a session, from the queue of sessions to its marker -----------------------------------

    def _attempt(self, worker: int, unit: Unit[Prompt]) -> None:
        """Run an attempt at a session, until it returns, its deadline passes or its batch ends."""
        prompt, batch, seconds = unit.group, unit.group.batch, self._config.session_timeout_s
        queued = prompt.queued.get(unit.session, batch.queued)
        names = worker, prompt.prompt, prompt.uid, unit.session, unit.attempt
        attempt = Attempt(unit, Span(*names, queued, batch.elapsed()), self._start(worker, unit))
        batch.attempts += 1
        batch.running.add(attempt)
        if seconds is not None:
            loop = asyncio.get_running_loop()
            attempt.alarm = loop.call_later(seconds, self._expire, attempt)
        attempt.future.add_done_callback(functools.partial(self._returned, attempt))

    def _start(self, worker: int, unit: Unit[Prompt]) -> asyncio.Future[Any]:
        prompt, batch = unit.group, unit.group.batch
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
            future = self._pool.start(worker, Job(session, prompt.sample, prompt.sampling))
            if not asyncio.isfuture(future):
                raise DataFailure(f"the pool started a {type(future).__name__}, not a future")
        except BaseException as error:  # a pool may be the user's
            future = asyncio.get_running_loop().create_future()
            future.set_exception(portable(error))
        return future

    def _returned(self, attempt: Attempt, future: asyncio.Future[Any]) -> None:
        """The worker has returned or raised, perhaps after the attempt was given up."""
        batch = attempt.prompt.batch
        error = InfrastructureFailure("cancelled") if future.cancelled() else future.exception()
        if attempt not in batch.running:
            if error is None:
                batch.late += 1
                logger.info("dropped a late result of %s", attempt.span)
        elif error is not None:
            self._after_failure(attempt, as_failure(error))
        else:
            self._after_success(attempt, future.result())

    def _expire(self, attempt: Attempt) -> None:
        seconds = self._config.session_timeout_s
        cause = f"passed its deadline of {seconds:g} s (dispatch.session_timeout_s)"
        self._stop(attempt)
        self._after_failure(attempt, InfrastructureFailure(cause))

    def _stop(self, attempt: Attempt) -> None:
        """Stop what still runs; a pool that cannot stop it must not delay the others."""
        unit = attempt.unit
        self._next_attempts[unit.group.uid, unit.session] = unit.attempt + 1
        if len(self._next_attempts) > _GIVEN_UP:
            del self._next_attempts[next(iter(self._next_attempts))]
        try:
            self._pool.stop(attempt.span.worker, attempt.future)
        except BaseException:  # a pool may be the user's
            logger.exception("%s could not be stopped", attempt.span)

    def _after_success(self, attempt: Attempt, result: Any) -> None:
        prompt, unit = attempt.prompt, attempt.unit
        if isinstance(result, Unjournaled):
            self._warn_of_journal(f"step {prompt.batch.step}", result)
        try:
            rows = as_rows(result)
            tokens = tokens_of(rows or ())
        except BaseException as odd:  # whatever the rows raise
            self._after_failure(attempt, as_failure(odd))
            return
        attempt.end(tokens)
        length = tokens or attempt.span.ended - attempt.span.started
        if self._history is not None:
            self._history.learn(prompt.known_as, length)
        try:
            self._scheduler.done(attempt.span.worker, unit, length)
        except Exception as error:  # of the policy
            self._give_up(prompt.batch, error)
        self._leave(prompt, unit.session, _Outcome(unit.attempt, rows, tokens))
        self._pump()

    def _after_failure(self, attempt: Attempt, failure: SessionFailure) -> None:
        """Try again, where another attempt is left."""
        prompt, unit, span = attempt.prompt, attempt.unit, attempt.span
        text = text_of(failure)
        attempt.end(error=text)
        machine = isinstance(failure, InfrastructureFailure)
        allowed = self._config.max_retries if machine else self._config.max_data_retries
        prompt.failures[unit.session, machine] += 1
        if prompt.failures[unit.session, machine] <= allowed:
            logger.warning("%s failed and is tried again: %s", span, text)
            prompt.queued[unit.session] = span.ended
            self._scheduler.retry(span.worker, unit)
        else:
            logger.error("%s failed for good: %s", span, text, exc_info=failure)
            self._scheduler.done(span.worker, unit)
            self._leave(prompt, unit.session, _Outcome(unit.attempt, error=cause_of(failure)))
        self._pump()

    def _leave(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
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
        self._write(prompt, session, outcome)

    def _write(self, prompt: Prompt, session: int, outcome: _Outcome) -> None:
        """Write journal, then rows, then marker."""
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
            written=functools.partial(self._written, prompt, session, outcome),
        )
        self._writer.write(leaving)

    def _written(
        self, prompt: Prompt, session: int, outcome: _Outcome, error: Exception | None
    ) -> None:
        batch = prompt.batch
        if error is not None and outcome.error is None:
            # The queue refuses the session's rows, but perhaps not its marker.
            cause = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("session %d of %s failed: %s", session, prompt.uid, cause)
            self._write(prompt, session, _Outcome(outcome.attempt, error=cause))
            return
        batch.unwritten -= 1
        if error is not None:
            self._give_up(batch, error)
        elif batch.progress is not None:
            batch.progress.update(outcome.tokens, outcome.error is not None)
        if batch.unwritten == 0:
            self.tasks.start(self._finish(batch))

    # -- whose turn it is ------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start all sessions that can run."""
        try:
            while (found := self._scheduler.next()) is not None:
                self._attempt(*found)
        except Exception as error:  # of the policy
            self.give_up_all(error)
        if not self._scheduler.alive:
            for batch in list(self.batches):
                self._end(batch, "no worker is left")

    def _worker_changed(self, worker: int, state: str) -> None:
        self._scheduler.change(worker, state)
        self._pump()

    # -- early ends ------------------------------------------------------------------------------

    def cancel(self, batch: BatchHandle) -> None:
        """Stop a batch: each session without a marker gets one with status failure."""
        self._end(batch, "cancelled")
        self._pump()

    def give_up_all(self, error: BaseException) -> None:
        """No batch can go on: their callers get `error`."""
        for batch in list(self.batches):
            self._give_up(batch, error)

    def _give_up(self, batch: BatchHandle, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`."""
        batch.finish(error)
        self._end(batch, f"the batch was given up: {text_of(error)}")

    def _end(self, batch: BatchHandle, cause: str) -> None:
        """Stop every unfinished session of `batch`; each is marked failed."""
        batch.ended = batch.ended or cause
        if not batch.begun:  # it ends its sessions itself, after their roots
            return
        for attempt in list(batch.running):
            attempt.end(error=batch.ended)
            self._stop(attempt)
            self._scheduler.done(attempt.span.worker, attempt.unit)
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
            for session in sorted(prompt.open):
                self._leave(prompt, session, _Outcome(0, error=batch.ended))
