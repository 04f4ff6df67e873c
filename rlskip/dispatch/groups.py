"""From a prompt to its group: a batch's prompts, their sessions, and what they leave.

Read from top to bottom: a batch begins, a session starts on the worker that the scheduler has for
it, is tried again elsewhere if that fails, and ends with its rows or a cause in its prompt's
:class:`Group`. If the batch has a sink, rows and marker are written before that. All of it runs on
the dispatcher's event loop, where no worker's code does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlskip.config.dispatch import DispatchConfig
from rlskip.dispatch.batch import BatchHandle, Held, Prompt
from rlskip.dispatch.failures import (
    InfrastructureFailure,
    as_failure,
    cause_of,
    portable,
    text_of,
)
from rlskip.dispatch.history import History, tokens_of
from rlskip.dispatch.journal import Appender
from rlskip.dispatch.pools import Pool, Rows, as_rows
from rlskip.dispatch.resume import Journals, to_journal
from rlskip.dispatch.scheduler import Job, Scheduler
from rlskip.dispatch.sessions import Session, session_seed
from rlskip.dispatch.sink import Leaving, Sink
from rlskip.dispatch.timeouts import failure_of, in_thread, write_seconds
from rlskip.keys import ROWS_PER_ATTEMPT, row_tag, session_key, session_tag, trajectory_key
from rlskip.queue import TrajectoryQueue

_A_TURN = 512  # the most sessions that one turn of the event loop starts

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Ended:
    """How a session ended: with rows, which are None if the worker wrote them, or an error."""

    prompt: Prompt
    session: int
    attempt: int
    rows: Rows = None
    tokens: int = 0
    error: str | None = None
    tags: Sequence[Mapping[str, Any]] = ()


class Groups:
    """The batches that a dispatcher runs; every call comes from its event loop, `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Pool,
        queue: TrajectoryQueue | None,
        config: DispatchConfig,
        held: Held,
        scheduler: Scheduler,
        history: History | None,  # None: the policy uses no lengths
        journals: Journals | None,
    ) -> None:
        # A batch is in `batches` until its last session is settled. A session waits in the
        # scheduler, or is an attempt in `running` of its batch, and then counts in the scheduler's
        # load, or has its outcome. Neither is left once no batch is.
        self.batches: set[BatchHandle] = set()
        self._loop = loop
        self._pool = pool
        pool.changed, pool.done = self._worker_changed, self._returned
        self._config = config
        self._held = held
        self._scheduler = scheduler
        self._history = history
        self._journals = journals
        self._timeout_s = math.inf if (s := config.session_timeout_s) is None else s
        # When the next attempt is due; one alarm serves all, as nearly every one ends long before.
        self._alarm: asyncio.TimerHandle | None = None
        self._pumps = False  # whether what can run is started in the next turn
        self._seconds = write_seconds(config)
        self._appender = Appender(self._seconds)
        self._sink = Sink(queue, self._seconds, self._appender)
        self._beginning: set[asyncio.Task[None]] = set()  # asyncio keeps no reference to them
        # The number of the next attempt at the sessions given up, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    # -- a batch begins: journal, roots, sessions ----------------------------------------------

    def begin(self, batch: BatchHandle) -> None:
        """Run a batch."""
        task = self._loop.create_task(self._begin(batch))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, batch: BatchHandle) -> None:
        try:
            if self._journals is not None and not batch.validate:
                await self._open_journal(batch, self._journals)
            if batch.sinks:
                tags = {prompt.uid: prompt.root_tag() for prompt in batch.prompts}
                written: asyncio.Future[Exception | None] = self._loop.create_future()
                self._sink.write(Leaving(written.set_result, batch.partition, tags))
                if (error := await written) is not None:
                    raise error
            batch.rooted.set()
            if not batch.stopped:
                self._add_sessions(batch)
        except Exception as error:
            batch.rooted.set()
            self._abort(batch, error)
        if batch.stopped:
            self._end_all(batch)
        self._pump()

    async def _open_journal(self, batch: BatchHandle, journals: Journals) -> None:
        journals.name(batch)
        opened = in_thread(journals.open, batch.step)
        if error := await failure_of(opened, self._seconds, "the disk"):
            batch.unjournaled = text_of(error)
        else:
            batch.journal = opened.result()
        if batch.unjournaled:
            self._appender.warn(f"step {batch.step}", batch.unjournaled)

    def _add_sessions(self, batch: BatchHandle) -> None:
        """Resume the sessions that the journal holds, and queue the others."""
        journaled = {} if self._journals is None else self._journals.resume(batch)
        for prompt in batch.prompts:
            first = {i: self._next_attempts.get((prompt.uid, i), 0) for i in sorted(prompt.open)}
            for session, found in journaled.get(prompt.uid, {}).items():
                batch.resumed += 1
                tokens = tokens_of(found.rows)
                attempt = first.pop(session)
                self._end(_Ended(prompt, session, attempt, found.rows, tokens, tags=found.tags))
            self._scheduler.add(prompt, first)

    # -- a session runs on a worker ------------------------------------------------------------

    def _pump(self) -> None:
        """Start all sessions that can run, once for all that happens in this turn."""
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        self._pumps = False
        try:
            # A part of them: the workers run these while the next turn starts others. More at once
            # are more objects at once, which Python's garbage collector looks through each time.
            for _ in range(_A_TURN):
                if (job := self._scheduler.next()) is None:
                    break
                self._start(job)
            else:
                self._pump()
        except Exception as error:  # the policy is the user's
            for batch in list(self.batches):
                self._abort(batch, error)
        if not self._scheduler.alive:
            for batch in list(self.batches):
                self.stop(batch, "no worker is left")

    def _worker_changed(self, worker: int, state: str) -> None:
        self._scheduler.change(worker, state)
        self._pump()

    def _start(self, job: Job) -> None:
        prompt: Prompt = job.group
        batch = prompt.batch
        batch.attempts += 1
        job.session = Session(
            uid=prompt.uid,
            session_id=job.session_id,
            n=prompt.n,
            attempt=job.attempt,
            seed=session_seed(self._config.seed or 0, batch.step, prompt.prompt, job.session_id),
            partition=batch.partition,
            prompt_key=prompt.journal_key if batch.journal is not None else None,
            **prompt.info,
        )
        job.started = batch.elapsed()
        job.due = due = self._loop.time() + self._timeout_s
        batch.running[job] = None
        self._pool.start(job)
        if self._alarm is None and due < math.inf:
            self._alarm = self._loop.call_at(due, self._expire)

    def _returned(self, job: Job, result: Any, error: BaseException | None) -> None:
        """The worker has returned or raised, perhaps after the attempt was given up."""
        prompt: Prompt = job.group
        batch = prompt.batch
        if job not in batch.running:
            return
        del batch.running[job]
        try:
            if error is not None:
                raise error
            rows = as_rows(result, written=batch.sinks)
            tokens = tokens_of(rows or ())
        except BaseException as failed:  # rows raise what they like, which ends no event loop
            self._failed(job, portable(failed))
        else:
            length = tokens or batch.elapsed() - job.started
            if self._history is not None:
                self._history.learn(prompt.known_as, length)
            try:
                self._scheduler.done(job, length)
            except Exception as policys:
                self._abort(batch, policys)
            self._end(_Ended(prompt, job.session_id, job.attempt, rows, tokens))
        self._pump()

    def _expire(self) -> None:
        """Give up the attempts that are due."""
        now = self._loop.time()
        running = [job for batch in self.batches for job in batch.running]
        cause = f"passed its deadline of {self._timeout_s:g} s (dispatch.session_timeout_s)"
        then = min((job.due for job in running if job.due > now), default=None)
        self._alarm = None if then is None else self._loop.call_at(then, self._expire)
        for job in running:
            if job.due <= now and job in job.group.batch.running:
                self._give_up(job)
                self._failed(job, InfrastructureFailure(cause))
        self._pump()

    def _give_up(self, job: Job) -> None:
        """Stop an attempt that runs; it may write rows for a while."""
        del job.group.batch.running[job]
        self._next_attempts[job.group.uid, job.session_id] = job.attempt + 1
        self._pool.stop(job)

    def _failed(self, job: Job, error: Exception) -> None:
        """Try again on another worker, or end the session with the cause."""
        failure = as_failure(error)
        machine = isinstance(failure, InfrastructureFailure)
        allowed = self._config.max_retries if machine else self._config.max_data_retries
        job.failures[machine] = count = job.failures.get(machine, 0) + 1
        if count <= allowed:
            logger.warning("%s failed and is tried again: %s", job, text_of(failure))
            self._scheduler.retry(job)
            return
        logger.error("%s failed for good: %s", job, text_of(failure), exc_info=failure)
        self._scheduler.done(job)
        self._end(_Ended(job.group, job.session_id, job.attempt, error=cause_of(failure)))

    # -- what a session leaves -----------------------------------------------------------------

    def _end(self, ended: _Ended) -> None:
        """A session has its outcome: write it, where it is written, and settle it."""
        prompt = ended.prompt
        if ended.session not in prompt.open:  # its batch was given up, and it has its outcome
            return
        prompt.open.remove(ended.session)
        prompt.batch.tokens += ended.tokens
        if not prompt.open:
            self._pool.forget(prompt)
        entries = to_journal(prompt, ended.session, ended.rows, ended.tags)
        if prompt.batch.sinks or entries:
            self._write(ended, entries)
        else:
            self._settle(ended)

    def _write(self, ended: _Ended, entries: Mapping[Any, Any]) -> None:
        """Write a session: journal, then rows, then its one marker."""
        batch, uid, session = ended.prompt.batch, ended.prompt.uid, ended.session
        written = functools.partial(self._written, ended)
        leaving = Leaving(written, batch.partition, journal=batch.journal, entries={**entries})
        if batch.sinks:
            # Rows that are returned are written once, here. A worker that writes its own (those it
            # journaled have tags) may still write for an attempt that was given up.
            attempt = ended.attempt if ended.rows is None or ended.tags else 0
            rows, tag = ended.rows or [], row_tag(batch.step, attempt)
            tags = [{**own, **tag} for own in ended.tags or [{}] * len(rows)]
            first = attempt * ROWS_PER_ATTEMPT
            keys = [trajectory_key(uid, session, first + i) for i in range(len(rows))]
            leaving.rows = dict(zip(keys, zip(rows, tags, strict=True), strict=True))
            count = None if ended.rows is None else len(rows)
            marker = session_tag(session, attempt, ended.error, count)
            leaving.tags = {session_key(uid, session): marker}
        self._sink.write(leaving)

    def _written(self, ended: _Ended, error: Exception | None) -> None:
        prompt = ended.prompt
        if error is not None and ended.error is None:
            # The queue refuses the session's rows, but perhaps not its marker.
            cause = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("session %d of %s failed: %s", ended.session, prompt.uid, cause)
            self._write(_Ended(prompt, ended.session, ended.attempt, error=cause), {})
            return
        if error is not None:
            self._abort(prompt.batch, error)
        self._settle(ended)

    def _settle(self, ended: _Ended) -> None:
        """Its group has the session: the last one ends the prompt, and the batch."""
        prompt, batch, group = ended.prompt, ended.prompt.batch, ended.prompt.group
        if ended.error is not None:
            batch.failed[prompt.uid, ended.session] = group.failed[ended.session] = ended.error
        else:  # rows in the queue are not kept twice
            group.rows[ended.session] = [] if batch.sinks else ended.rows or []
        batch.unwritten -= 1
        if not group.running:
            self._held.group_ended(prompt)
        if batch.unwritten == 0:
            self.batches.discard(batch)
            batch.seconds = batch.elapsed()
            if batch.journal is not None:
                with contextlib.suppress(OSError):
                    batch.journal.close()
            batch.finish(batch.error)

    # -- early ends ----------------------------------------------------------------------------

    def cancel(self, batch: BatchHandle) -> None:
        """Stop a batch for its caller."""
        self.stop(batch, "cancelled")
        self._pump()

    def _abort(self, batch: BatchHandle, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`, once every session is marked failed."""
        batch.error = batch.error or error
        self.stop(batch, f"the batch was given up: {text_of(error)}")

    def stop(self, batch: BatchHandle, cause: str) -> None:
        """Each session that has no outcome fails."""
        batch.stopped = batch.stopped or cause
        if batch.rooted.is_set():  # else `_begin` does it, once the roots are written
            self._end_all(batch)

    def _end_all(self, batch: BatchHandle) -> None:
        for prompt in batch.prompts:
            self._scheduler.cancel(prompt)
        for job in list(batch.running):
            self._give_up(job)
            self._scheduler.done(job)
        for prompt in batch.prompts:
            for session in sorted(prompt.open):
                self._end(_Ended(prompt, session, 0, error=batch.stopped))
