"""The sessions of batches, on the event loop: from hand-out to marker, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import logging
from itertools import takewhile
from typing import Any

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import Attempt, Batch, Progress, Prompt
from rlskip.dispatch.failures import (
    InfrastructureFailure,
    SessionFailure,
    WorkerLostError,
    as_failure,
)
from rlskip.dispatch.history import History, length_of
from rlskip.dispatch.pools import Pool, Rows
from rlskip.dispatch.resume import open_journal, resumable
from rlskip.dispatch.scheduler import Scheduler, Unit
from rlskip.dispatch.timeline import Span
from rlskip.dispatch.units import Job, Session, session_seed
from rlskip.dispatch.writer import Leaving, Writer
from rlskip.keys import (
    ERROR,
    EXPECTED_ROLLOUTS,
    FAILURE,
    FINISHED,
    PENDING,
    RUNNING,
    STATUS,
    SessionKey,
    TrajectoryKey,
    prompt_tag,
    row_tag,
    session_tag,
    status_tag,
)
from rlskip.queue import TrajectoryQueue
from rlskip.store import Identity, StepStore

logger = logging.getLogger(__name__)


class Sessions:
    """What a dispatcher has under way; every call comes from its event loop.

    Parameters
    ----------
    loop
        That event loop.
    pool, queue, config
        The dispatcher's.
    scheduler
        Says which session runs next, and where.
    history
        What learns the lengths of sessions; None where nobody asks for them.
    store, identity
        Where journals lie (None without them), and what must be the same to resume one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        queue: TrajectoryQueue,
        config: DispatchConfig,
        scheduler: Scheduler,
        history: History | None,
        store: StepStore | None,
        identity: Identity,
    ) -> None:
        self.batches: set[Batch] = set()
        self._loop = loop
        self._pool = pool
        self._queue = queue
        self._config = config
        self._scheduler = scheduler
        self._history = history
        self._store = store
        self._identity = identity
        self._writer = Writer(queue)
        # When each attempt must have ended, by the loop's clock, earliest first; and one timer
        # for all, as nearly every attempt ends long before.
        self._deadlines: dict[Attempt, float] = {}
        self._alarm: asyncio.TimerHandle | None = None

    # -- a batch, from prompts to units ------------------------------------------------------

    async def begin(self, batch: Batch) -> None:
        """Write the roots of a batch, and let its sessions run."""
        self.batches.add(batch)
        try:
            await self._open(batch)
        except Exception as error:
            self._abort(batch, error)
        else:
            if batch.cancelled:
                self._end_all(batch, "cancelled")
            self._pump()

    async def _open(self, batch: Batch) -> None:
        if self._config.timeline_dir is not None:
            batch.spans = []
        if self._config.progress:
            batch.progress = Progress(batch.step, batch.sessions)
        if self._config.journal and not batch.validate:
            assert self._store is not None
            batch.journal = await asyncio.to_thread(
                open_journal, self._store, batch.step, self._identity
            )
        for prompt in batch.prompts:  # all of them, so that whatever fails, each gets its markers
            prompt.open = set(range(prompt.n))
        tags = [self._root_tag(batch, prompt) for prompt in batch.prompts]
        uids = [prompt.uid for prompt in batch.prompts]
        await self._queue.aput(uids, batch.partition, tags=tags)
        for prompt in batch.prompts:
            for session, rows in resumable(prompt):
                batch.resumed += 1
                self._settle(prompt, session, 0, rows, None)
            for session in prompt.open:
                batch.queued[prompt.uid, session] = batch.elapsed()
            self._scheduler.add(prompt, sorted(prompt.open))

    def _root_tag(self, batch: Batch, prompt: Prompt) -> dict[str, Any]:
        if self._config.rollout_level:
            return {**prompt_tag(batch.step, prompt.n), EXPECTED_ROLLOUTS: prompt.n}
        return status_tag(batch.step, PENDING, expected=prompt.n)

    # -- sessions, from hand-out to marker -----------------------------------------------------

    def _pump(self) -> None:
        """Hand out all that can run."""
        try:
            while (handed := self._scheduler.next()) is not None:
                self._start(*handed)
        except Exception as error:  # a policy is the user's
            for batch in list(self.batches):
                self._abort(batch, error)
        if not self._scheduler.alive:
            for batch in list(self.batches):
                self._end_all(batch, "no worker is left")

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
            **prompt.info,
        )
        job = Job(session, prompt.sample, prompt.sampling)
        future = self._pool.start(worker, job)
        attempt = Attempt(worker, unit, batch.elapsed(), future)
        if self._config.session_timeout_s is not None:
            self._deadlines[attempt] = self._loop.time() + self._config.session_timeout_s
            self._set_alarm()
        if not self._config.rollout_level and not prompt.running:
            prompt.running = True
            self._say_running(prompt)
        batch.attempts += 1
        batch.running.add(attempt)
        future.add_done_callback(functools.partial(self._ended, attempt))

    def _say_running(self, prompt: Prompt) -> None:
        batch = prompt.batch

        def then(error: BaseException | None) -> None:
            if error is not None:
                self._abort(batch, error)

        self._writer.add(Leaving(batch.partition, {prompt.uid: {STATUS: RUNNING}}, then))

    def _ended(self, attempt: Attempt, future: asyncio.Future[Rows]) -> None:
        batch = attempt.prompt.batch
        error = InfrastructureFailure("cancelled") if future.cancelled() else future.exception()
        if attempt.over:
            if error is None:
                batch.late += 1
                logger.info("dropped a late result of %s", _name(attempt))
            return
        self._close_attempt(attempt)
        try:
            if error is None:
                self._succeeded(attempt, future.result())
            else:
                self._failed(attempt, error)
        except Exception as failed:  # a policy is the user's
            self._abort(batch, failed)
        self._pump()

    def _set_alarm(self) -> None:
        if self._alarm is None and self._deadlines:
            first = next(iter(self._deadlines.values()))
            self._alarm = self._loop.call_at(first, self._expire)

    def _expire(self) -> None:
        """Give up the attempts that have passed their deadline."""
        self._alarm = None
        seconds = self._config.session_timeout_s
        late = f"passed its deadline of {seconds:g} s (dispatch.session_timeout_s)"
        now = self._loop.time()
        for attempt in list(takewhile(lambda a: self._deadlines[a] <= now, self._deadlines)):
            self._stop(attempt)
            self._failed(attempt, InfrastructureFailure(late))
        self._set_alarm()
        self._pump()

    def _close_attempt(self, attempt: Attempt) -> None:
        attempt.over = True
        attempt.prompt.batch.running.discard(attempt)
        self._deadlines.pop(attempt, None)

    def _stop(self, attempt: Attempt) -> None:
        """Take a session from its worker; one that cannot be told must not keep the others."""
        self._close_attempt(attempt)
        try:
            self._pool.stop(attempt.worker, attempt.future)
        except Exception:  # a pool may be the user's
            logger.exception("%s could not be stopped", _name(attempt))

    def _succeeded(self, attempt: Attempt, rows: Rows) -> None:
        prompt, unit = attempt.prompt, attempt.unit
        tokens = sum(map(length_of, rows or ()))
        length = tokens or prompt.batch.elapsed() - attempt.started
        self._note(attempt, tokens, None)
        if self._history is not None:
            self._history.learn(prompt.known_as, length)
        self._scheduler.done(attempt.worker, unit, length)
        self._settle(prompt, unit.session, unit.attempt, rows, None)

    def _failed(self, attempt: Attempt, error: BaseException) -> None:
        prompt, unit, failure = attempt.prompt, attempt.unit, as_failure(error)
        self._note(attempt, 0, failure.what)
        if isinstance(failure, WorkerLostError) and failure.gone:
            self._scheduler.lose(attempt.worker)
        machine = isinstance(failure, InfrastructureFailure)
        allowed = self._config.max_retries if machine else self._config.max_data_retries
        prompt.failures[unit.session, machine] += 1
        if prompt.failures[unit.session, machine] <= allowed:
            logger.warning("%s failed and is tried again: %s", _name(attempt), failure.what)
            prompt.batch.queued[prompt.uid, unit.session] = prompt.batch.elapsed()
            self._scheduler.retry(attempt.worker, unit)
            return
        logger.error("%s failed for good: %s", _name(attempt), failure.what, exc_info=failure)
        self._scheduler.done(attempt.worker, unit)
        cause = f"{_kind(failure)}: {failure.what}"
        self._settle(prompt, unit.session, unit.attempt, None, cause)

    def _settle(
        self, prompt: Prompt, session: int, attempt: int, rows: Rows, error: str | None
    ) -> None:
        """A session's end, for good: its rows and its one marker go to the queue."""
        batch = prompt.batch
        prompt.open.remove(session)
        tokens = sum(map(length_of, rows or ()))
        batch.tokens += tokens
        if error is not None:
            batch.failed[prompt.uid, session] = error
            prompt.error = prompt.error or f"session {session}: {error}"
        if not prompt.open:
            self._pool.forget(prompt.sample)
        tag = row_tag(batch.step, attempt)
        leaving = Leaving(
            partition=batch.partition,
            rows={
                str(TrajectoryKey(prompt.uid, session, index)): (row, tag)
                for index, row in enumerate(rows or ())
            },
            tags=self._last_tags(prompt, session, attempt, error),
            then=functools.partial(self._written, prompt, session, attempt, tokens),
        )
        key = None if prompt.journal_key is None else (*prompt.journal_key, session)
        if batch.journal is not None and rows is not None and key not in batch.journal.entries:
            leaving = attrs.evolve(leaving, journal=batch.journal, entries={key: rows})
        self._writer.add(leaving)

    def _last_tags(
        self, prompt: Prompt, session: int, attempt: int, error: str | None
    ) -> dict[str, dict[str, Any]]:
        """A session's marker and, after the last of a legacy prompt, the prompt's status."""
        tags = {str(SessionKey(prompt.uid, session)): session_tag(session, attempt, error)}
        if not prompt.open and not self._config.rollout_level:
            tags[prompt.uid] = {STATUS: FINISHED}
            if prompt.error is not None:
                tags[prompt.uid] = {STATUS: FAILURE, ERROR: prompt.error}
        return tags

    def _written(
        self,
        prompt: Prompt,
        session: int,
        attempt: int,
        tokens: int,
        error: BaseException | None,
    ) -> None:
        batch = prompt.batch
        failed = (prompt.uid, session) in batch.failed
        if error is not None and not failed:
            # The queue refuses what this session left; that it failed can still be said.
            failure = as_failure(error)
            cause = f"{_kind(failure)}: its rows could not be written: {failure.what}"
            logger.error("session %d of %s failed: %s", session, prompt.uid, cause)
            batch.failed[prompt.uid, session] = cause
            prompt.error = prompt.error or f"session {session}: {cause}"
            tags = self._last_tags(prompt, session, attempt, cause)
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

    def _finish(self, batch: Batch, error: BaseException | None) -> None:
        self.batches.discard(batch)
        batch.seconds = batch.elapsed()
        if batch.spans:
            self._loop.run_in_executor(None, self._draw_and_finish, batch, error)
        else:
            batch.finish(error)

    def _draw_and_finish(self, batch: Batch, error: BaseException | None) -> None:
        try:
            batch.write_timeline(self._config.timeline_dir or ".")
        except Exception:
            logger.exception("the timeline of step %d was not written", batch.step)
        batch.finish(error)

    # -- ends before their time ----------------------------------------------------------------

    def cancel(self, batch: Batch) -> None:
        """Stop a batch: each session without a marker gets one that says so."""
        batch.cancelled = True
        if batch in self.batches:
            self._end_all(batch, "cancelled")
            self._pump()

    def _abort(self, batch: Batch, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`."""
        if batch in self.batches:
            self.batches.discard(batch)
            self._end_all(batch, f"the batch was given up: {error}")
            self._finish(batch, error)

    def _end_all(self, batch: Batch, cause: str) -> None:
        """Stop every session of `batch` that has not ended; each is marked failed."""
        for attempt in list(batch.running):
            self._stop(attempt)
            self._note(attempt, 0, cause)
            self._scheduler.done(attempt.worker, attempt.unit)
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
            for session in sorted(prompt.open):
                self._settle(prompt, session, 0, None, cause)

    def _note(self, attempt: Attempt, tokens: int, error: str | None) -> None:
        prompt, unit, batch = attempt.prompt, attempt.unit, attempt.prompt.batch
        if batch.spans is not None:
            batch.spans.append(
                Span(
                    worker=attempt.worker,
                    prompt=prompt.prompt,
                    uid=prompt.uid,
                    session=unit.session,
                    attempt=unit.attempt,
                    queued=batch.queued[prompt.uid, unit.session],
                    started=attempt.started,
                    ended=batch.elapsed(),
                    tokens=tokens,
                    error=error,
                )
            )


def _kind(failure: SessionFailure) -> str:
    return "infrastructure" if isinstance(failure, InfrastructureFailure) else "data"


def _name(attempt: Attempt) -> str:
    unit = attempt.unit
    return (
        f"session {unit.session} of {attempt.prompt.uid} "
        f"(attempt {unit.attempt}, worker {attempt.worker})"
    )
