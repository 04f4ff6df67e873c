"""The sessions of batches, on the event loop: from dispatch to marker, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import Attempt, BatchHandle, Progress, Prompt
from rlskip.dispatch.failures import (
    DataFailure,
    InfrastructureFailure,
    WorkerLostError,
    as_failure,
    kind_of,
    portable,
    text_of,
)
from rlskip.dispatch.history import History, tokens_of
from rlskip.dispatch.journal import SessionJournal
from rlskip.dispatch.pools import Pool, Rows, Unjournaled, as_rows
from rlskip.dispatch.queue_writer import Leaving, QueueWriter
from rlskip.dispatch.resume import Journals, resumable, to_journal
from rlskip.dispatch.scheduler import Scheduler, Unit
from rlskip.dispatch.timeouts import DaemonThreads, Deadlines, write_seconds
from rlskip.dispatch.units import Job, Session, session_seed
from rlskip.keys import RUNNING, STATUS, TrajectoryKey, row_tag
from rlskip.queue import TrajectoryQueue

_GIVEN_UP = 100_000  # the most given-up sessions that are remembered

logger = logging.getLogger(__name__)


class Sessions:
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
        queue: TrajectoryQueue,
        config: DispatchConfig,
        scheduler: Scheduler,
        history: History | None,
        journals: Journals | None,
    ) -> None:
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
        self._writer = QueueWriter(queue, self._seconds)
        self._threads = DaemonThreads(4, "rlskip-files")
        # The number of the next attempt at the sessions given up last, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}
        self._deadlines = Deadlines(loop, config.session_timeout_s, self._expire)

    async def run(self) -> None:
        """Write what sessions leave, for as long as the event loop runs."""
        try:
            await self._writer.run()
        finally:
            self._writer.close()
            self._threads.close()

    # -- a batch, from prompts to sessions ---------------------------------------------------

    def begin(self, batch: BatchHandle) -> None:
        """Open the batch's journal, write its roots, and queue its sessions."""
        for prompt in batch.prompts:  # first, so that whatever fails, each session gets a marker
            prompt.open = set(range(prompt.n))
            prompt.first_attempts = {
                session: attempt
                for session in prompt.open
                if (attempt := self._next_attempts.get((prompt.uid, session)))
            }
        try:
            if self._config.timeline_dir is not None:
                batch.spans = []
            if self._config.progress:
                batch.progress = Progress(batch.step, batch.sessions)
            if self._journals is not None and not batch.validate:
                opened = self._threads.run(self._journals.open, batch.step)
                self._loop.call_later(self._seconds, opened.cancel)
                opened.add_done_callback(functools.partial(self._opened, batch))
            else:
                self._write_roots(batch)
        except Exception as error:
            self._abort(batch, error)

    def _opened(self, batch: BatchHandle, opened: asyncio.Future[SessionJournal]) -> None:
        if opened.cancelled():
            self._warn_of_journal(batch, f"the disk did not answer within {self._seconds:g} s")
        elif (error := opened.exception()) is not None:
            self._warn_of_journal(batch, text_of(error))
        else:
            batch.journal = opened.result()
        self._write_roots(batch)

    def _warn_of_journal(self, batch: BatchHandle, cause: str) -> None:
        # Without a journal a killed step starts over; the step itself goes on.
        if cause != self._unjournaled:
            self._unjournaled = cause
            logger.warning("sessions of step %d are not journaled: %s", batch.step, cause)

    def _write_roots(self, batch: BatchHandle) -> None:
        tags = {prompt.uid: prompt.root_tag() for prompt in batch.prompts}
        then = functools.partial(self._rooted, batch)
        self._writer.add(Leaving(batch.partition, tags, then))

    def _rooted(self, batch: BatchHandle, error: Exception | None) -> None:
        if batch not in self.batches:
            return
        if error is not None:
            self._abort(batch, error)
            return
        batch.rooted = True
        try:
            journaled = resumable(batch, self._journals)
            for prompt in batch.prompts:
                for session, found, tokens in journaled.get(prompt.uid, ()):
                    batch.resumed += 1
                    first = prompt.first_attempts.get(session, 0)
                    self._settle(prompt, session, first, found.rows, None, tokens, found.tags)
                for session in prompt.open:
                    batch.queued[prompt.uid, session] = batch.elapsed()
                self._scheduler.add(prompt, sorted(prompt.open))
        except BaseException as failed:  # a policy is the user's
            self._abort(batch, portable(failed))
        if batch.cancelled:
            self._end_all(batch, "cancelled")
        self._pump()

    # -- sessions, from dispatch to marker -------------------------------------------------

    def _pump(self) -> None:
        """Start all sessions that can run."""
        try:
            while (found := self._scheduler.next()) is not None:
                self._start(*found)
        except BaseException as error:  # a policy is the user's
            self.abort_all(portable(error))
        if not self._scheduler.alive:
            for batch in list(self.batches):
                self._end_all(batch, "no worker is left")

    def _worker_changed(self, worker: int, state: str) -> None:
        self._scheduler.change(worker, state)
        self._pump()

    def _start(self, worker: int, unit: Unit) -> None:
        prompt: Prompt = unit.group  # type: ignore[assignment]
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
            future = self._pool.start(worker, Job(session, prompt.sample, prompt.sampling))
            if not asyncio.isfuture(future):
                raise DataFailure(f"the pool started a {type(future).__name__}, not a future")
        except BaseException as error:  # a pool may be the user's
            future = self._loop.create_future()
            future.set_exception(portable(error))
        attempt = Attempt(worker, unit, batch.elapsed(), future)
        self._deadlines.add(attempt)
        if not batch.counted and not prompt.running:
            prompt.running = True
            self._write_running(prompt)
        batch.attempts += 1
        batch.running.add(attempt)
        future.add_done_callback(functools.partial(self._ended, attempt))

    def _write_running(self, prompt: Prompt) -> None:
        batch = prompt.batch

        def then(error: Exception | None) -> None:
            if error is not None:
                self._abort(batch, error)

        self._writer.add(Leaving(batch.partition, {prompt.uid: {STATUS: RUNNING}}, then))

    def _ended(self, attempt: Attempt, future: asyncio.Future[Any]) -> None:
        batch = attempt.prompt.batch
        error = InfrastructureFailure("cancelled") if future.cancelled() else future.exception()
        if attempt.closed:
            if error is None:
                batch.late += 1
                logger.info("dropped a late result of %s", attempt)
            return
        self._close_attempt(attempt)
        try:
            rows, tokens = None, 0
            if error is None:
                try:
                    rows = as_rows(future.result())
                    if isinstance(future.result(), Unjournaled):
                        self._warn_of_journal(batch, future.result())
                    tokens = tokens_of(rows or ())
                except BaseException as odd:  # rows may be anything
                    error = odd
            if error is None:
                self._succeeded(attempt, rows, tokens)
            else:
                self._failed(attempt, error)
        except BaseException as failed:  # a policy is the user's
            self._abort(batch, portable(failed))
        self._pump()

    def _expire(self, attempts: list[Attempt]) -> None:
        """Give up the attempts that have passed their deadline."""
        seconds = self._config.session_timeout_s
        late = f"passed its deadline of {seconds:g} s (dispatch.session_timeout_s)"
        for attempt in attempts:
            self._stop(attempt)
            self._failed(attempt, InfrastructureFailure(late))
        self._pump()

    def _close_attempt(self, attempt: Attempt) -> None:
        attempt.closed = True
        attempt.prompt.batch.running.discard(attempt)
        self._deadlines.discard(attempt)

    def _stop(self, attempt: Attempt) -> None:
        """Stop a session; a pool that cannot stop it must not delay the others."""
        self._close_attempt(attempt)
        unit = attempt.unit
        self._next_attempts[attempt.prompt.uid, unit.session] = unit.attempt + 1
        if len(self._next_attempts) > _GIVEN_UP:
            del self._next_attempts[next(iter(self._next_attempts))]
        try:
            self._pool.stop(attempt.worker, attempt.future)
        except BaseException:  # a pool may be the user's
            logger.exception("%s could not be stopped", attempt)

    def _succeeded(self, attempt: Attempt, rows: Rows, tokens: int) -> None:
        prompt, unit = attempt.prompt, attempt.unit
        length = tokens or prompt.batch.elapsed() - attempt.started
        prompt.batch.note(attempt, tokens, None)
        if self._history is not None:
            self._history.learn(prompt.known_as, length)
        self._scheduler.done(attempt.worker, unit, length)
        self._settle(prompt, unit.session, unit.attempt, rows, None, tokens)

    def _failed(self, attempt: Attempt, error: BaseException) -> None:
        prompt, unit, failure = attempt.prompt, attempt.unit, as_failure(error)
        what = text_of(failure)
        prompt.batch.note(attempt, 0, what)
        if isinstance(failure, WorkerLostError) and getattr(failure, "gone", False):
            self._scheduler.change(attempt.worker, "lost")
        machine = isinstance(failure, InfrastructureFailure)
        allowed = self._config.max_retries if machine else self._config.max_data_retries
        prompt.failures[unit.session, machine] += 1
        if prompt.failures[unit.session, machine] <= allowed:
            logger.warning("%s failed and is tried again: %s", attempt, what)
            prompt.batch.queued[prompt.uid, unit.session] = prompt.batch.elapsed()
            self._scheduler.retry(attempt.worker, unit)
            return
        logger.error("%s failed for good: %s", attempt, what, exc_info=failure)
        self._scheduler.done(attempt.worker, unit)
        cause = f"{kind_of(failure)}: {what}"
        self._settle(prompt, unit.session, unit.attempt, None, cause)

    def _settle(
        self,
        prompt: Prompt,
        session: int,
        attempt: int,
        rows: Rows,
        error: str | None,
        tokens: int = 0,
        tags: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Finish a session: its rows and its one marker go to the queue."""
        batch = prompt.batch
        prompt.open.remove(session)
        batch.tokens += tokens
        if error is not None:
            prompt.fail(session, error)
        if not prompt.open:
            try:
                self._pool.forget(prompt.sample)
            except BaseException:  # a pool may be the user's
                logger.exception("the pool could not forget %s", prompt.uid)
        tag = row_tag(batch.step, attempt)
        tagged = zip(rows or (), tags or [{}] * len(rows or ()), strict=True)
        leaving = Leaving(
            partition=batch.partition,
            rows={
                str(TrajectoryKey(prompt.uid, session, index)): (row, {**own, **tag})
                for index, (row, own) in enumerate(tagged)
            },
            tags=prompt.last_tags(session, attempt, error, None if rows is None else len(rows)),
            then=functools.partial(self._written, prompt, session, attempt, tokens),
            journal=batch.journal,
            entries=to_journal(prompt, session, rows, tags),
        )
        self._writer.add(leaving)

    def _written(
        self, prompt: Prompt, session: int, attempt: int, tokens: int, error: Exception | None
    ) -> None:
        batch = prompt.batch
        failed = (prompt.uid, session) in batch.failed
        if error is not None and not failed:
            # The queue refuses the session's rows, but perhaps not its marker.
            failure = as_failure(error)
            cause = f"{kind_of(failure)}: its rows could not be written: {text_of(failure)}"
            logger.error("session %d of %s failed: %s", session, prompt.uid, cause)
            prompt.fail(session, cause)
            tags = prompt.last_tags(session, attempt, cause, None)
            then = functools.partial(self._written, prompt, session, attempt, tokens)
            self._writer.add(Leaving(batch.partition, tags, then))
            return
        if error is not None:
            self._abort(batch, error)
            return
        batch.unwritten -= 1
        if batch.progress is not None:
            batch.progress.update(tokens, failed)
        if batch.unwritten == 0:
            self._finish(batch, None)

    def _finish(self, batch: BatchHandle, error: BaseException | None) -> None:
        self.batches.discard(batch)
        batch.seconds = batch.elapsed()
        if batch.progress is not None:
            batch.progress.close()
        if batch.journal is not None:
            with contextlib.suppress(OSError):
                batch.journal.close()
        if not batch.spans:
            batch.finish(error)
            return
        drawn = self._threads.run(batch.write_timeline, self._config.timeline_dir or ".")
        self._loop.call_later(self._seconds, drawn.cancel)
        drawn.add_done_callback(functools.partial(self._drawn, batch, error))

    def _drawn(
        self, batch: BatchHandle, error: BaseException | None, drawn: asyncio.Future[None]
    ) -> None:
        failed = TimeoutError("it took too long") if drawn.cancelled() else drawn.exception()
        if failed is not None:
            text = "the timeline of step %d was not written"
            logger.error(text, batch.step, exc_info=failed)
        batch.finish(error)

    # -- early ends ------------------------------------------------------------------------

    def cancel(self, batch: BatchHandle) -> None:
        """Stop a batch: each session without a marker gets one with status failure."""
        batch.cancelled = True
        if batch in self.batches and batch.rooted:  # else _rooted does it
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
            self._finish(batch, error)

    def _end_all(self, batch: BatchHandle, cause: str) -> None:
        """Stop every unfinished session of `batch`; each is marked failed."""
        for attempt in list(batch.running):
            self._stop(attempt)
            batch.note(attempt, 0, cause)
            self._scheduler.done(attempt.worker, attempt.unit)
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
            for session in sorted(prompt.open):
                self._settle(prompt, session, 0, None, cause)
