"""From a batch of prompts to their groups.

Read from top to bottom: a batch begins, a session starts on the worker that the scheduler has for
it, is tried again elsewhere if that fails, and ends with its rows or a cause in its prompt's group.
What goes to a queue or a journal is written before that. All but what callers ask runs on the
dispatcher's event loop, where no worker's code does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time

from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.policies import BLIND, History, Policy
from rlskip.dispatch.pools import NOTHING, Pool, Returned, returned
from rlskip.dispatch.resume import Journals
from rlskip.dispatch.scheduler import Job, Scheduler
from rlskip.dispatch.sessions import (
    BatchError,
    DataFailure,
    DispatcherClosedError,
    InfrastructureFailure,
    NoAnswerError,
    Session,
    as_failure,
    cause_of,
    portable,
    session_seed,
    text_of,
)
from rlskip.dispatch.sink import Sink
from rlskip.dispatch.timeouts import LoopThread, write_seconds
from rlskip.queue import TrajectoryQueue
from rlskip.queue.partition import Partition

_A_TURN = 512  # the most sessions that one turn of the event loop starts

logger = logging.getLogger(__name__)


class Groups:
    """The batches of a dispatcher that run, and their prompts until somebody takes the groups."""

    def __init__(
        self,
        pool: Pool,
        queue: TrajectoryQueue | None,
        config: DispatchConfig,
        replay: ReplayConfig,
        policy: Policy,
        journals: Journals | None,
    ) -> None:
        # `changed` is held while `closed`, `batches` or a partition changes. It is notified when a
        # batch has ended and, while a call waits for some of the prompts, with every group. A batch
        # is in `batches` until its last session is settled. A session waits in the scheduler, or is
        # an attempt in `running` of its batch, and then counts in the scheduler's load, or has its
        # outcome, and is in `open` of its prompt no more.
        self.changed = threading.Condition()
        self.closed = False
        self.batches: set[BatchHandle] = set()
        self._ahead: dict[str, Partition] = {}
        self.wait_for_some = 0
        self.host = LoopThread("rlskip-dispatch")
        self._loop = self.host.loop
        self._pool = pool
        pool.changed, pool.done, pool.post = self._worker_changed, self._returned, self.host.post
        self._config = config
        self._replay = replay
        caps = config.max_concurrent_rollouts_per_worker, pool.slots
        self._scheduler = Scheduler(pool.workers, policy, min(filter(None, caps), default=None))
        self._history = None if policy in BLIND else History()
        self._sink = Sink(queue, journals, write_seconds(config), self._written)
        self._timeout_s = math.inf if (s := config.session_timeout_s) is None else s
        # When the next attempt is due; one alarm serves all, as nearly every one ends long before.
        self._alarm: asyncio.TimerHandle | None = None
        self._pumps = False  # whether what can run is started in the next turn
        # The number of the next attempt at the sessions given up, which may still write: a
        # prompt that is submitted again does not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    # -- a caller submits a batch --------------------------------------------------------------

    def ahead(self, partition: str) -> Partition:
        """The groups of a partition that any call may take."""
        return self._ahead.setdefault(partition, Partition(partition, self._replay))

    def submit(self, batch: BatchHandle, within: Partition | None) -> None:
        """Run a batch; calls find its groups `within`. None: in the queue, where its roots are now.

        Raises BatchError for a uid of which there is another group, which it would be mixed with.
        """
        batch.within = within
        if self._history is not None:
            for prompt in batch.prompts:
                self._history.look_up(prompt)
        with self.changed:
            others = [other for other in self.batches if other.partition == batch.partition]
            held = {p.uid for other in others for p in other.prompts if p.group.running}
            ahead = self.ahead(batch.partition)
            for uid in (prompt.uid for prompt in batch.prompts):
                if uid in held or ahead.find(uid):
                    raise BatchError(
                        f"an earlier prompt of the uid {uid!r} is in flight",
                        "uid",
                        "give this one a uid of its own; or first take the other's group, or give "
                        "it up: cancel its batch",
                    )
            if self.closed:
                raise DispatcherClosedError("this dispatcher is closed")
            self.batches.add(batch)  # from here on, close() ends it
            if within is not None:
                for prompt in batch.prompts:
                    within.file(prompt.group)
        if within is None:
            try:
                self.host.within(self._sink.seconds, self._sink.check, batch)
            except BaseException:
                self.batches.discard(batch)
                raise
        batch.beginning = self.host.ask(self._begin, batch)
        if within is None:  # waits for the journal, and for the queue
            batch.rooted.wait(2 * self._sink.seconds)

    async def _begin(self, batch: BatchHandle) -> None:
        try:
            resumed = await self._sink.open(batch)
            batch.rooted.set()
            for prompt in batch.prompts if not batch.stopped else ():
                first = {i: self._next_attempts.get((prompt.uid, i), 0) for i in prompt.open}
                for session, found in resumed.get(prompt.uid, {}).items():
                    batch.report.resumed += 1
                    rows, tokens = returned(found.rows)
                    attempt = first.pop(session)
                    job = Job(prompt, session, attempt=attempt, rows=rows, tags=found.tags)
                    self._end(job, tokens)
                self._scheduler.add(prompt, first)
        except Exception as error:
            batch.rooted.set()
            self._abort(batch, error)
        if batch.stopped:
            self._end_all(batch)
        self._pump()

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
                self._stop(batch, "no worker is left")

    def _worker_changed(self, worker: int, state: str) -> None:
        self._scheduler.change(worker, state)
        self._pump()

    def _start(self, job: Job) -> None:
        prompt: Prompt = job.group
        batch = prompt.batch
        batch.report.attempts += 1
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
        job.started = self._loop.time()
        job.due = job.started + self._timeout_s
        batch.running[job] = None
        self._pool.start(job)
        if self._alarm is None and job.due < math.inf:
            self._alarm = self._loop.call_at(job.due, self._expire)

    def _returned(self, job: Job, result: Returned, error: BaseException | None) -> None:
        """The worker has returned or raised, perhaps after the attempt was given up."""
        prompt: Prompt = job.group
        if job not in prompt.batch.running:
            return
        del prompt.batch.running[job]
        if error is None and result == NOTHING and prompt.batch.within is not None:
            error = DataFailure(
                "the worker returned no rows, as one that writes them to a queue itself",
                remedy="return the rows; or submit() to a dispatcher that has the queue",
            )
        if error is not None:
            self._failed(job, portable(error))
        else:
            job.rows, tokens = result
            length = tokens or self._loop.time() - job.started
            if self._history is not None:
                self._history.learn(prompt, length)
            try:
                self._scheduler.done(job, length)
            except Exception as policys:
                self._abort(prompt.batch, policys)
            self._end(job, tokens)
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

    def _give_up(self, job: Job) -> None:  # it may write rows for a while
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
        job.error = cause_of(failure)
        self._end(job)

    # -- it ends -------------------------------------------------------------------------------

    def _end(self, job: Job, tokens: int = 0) -> None:
        """A session has its outcome: write it, where it is written, and settle it."""
        prompt, batch = job.group, job.group.batch
        if job.session_id not in prompt.open:  # its batch was given up, and it has its outcome
            return
        prompt.open.remove(job.session_id)
        if not prompt.open:
            self._pool.forget(prompt)
        batch.report.tokens += tokens
        if batch.within is None or batch.journal is not None:
            self._sink.write(job)
        else:
            self._settle(job)

    def _written(self, job: Job, error: Exception | None) -> None:
        if error is not None and not job.error:
            job.rows = None
            job.error = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("%s failed: %s", job, job.error)
            if not isinstance(error, NoAnswerError):
                self._sink.write(job)  # the queue refuses its rows, but perhaps not its marker
                return
        if error is not None:  # or may have both yet
            self._abort(job.group.batch, error)
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """Its group has the session: the last one ends the prompt, and the batch."""
        batch, group = job.group.batch, job.group.group
        with self.changed:
            if job.error:
                batch.report.failed[group.uid, job.session_id] = job.error
                group.failed[job.session_id] = job.error
            else:  # rows in the queue are not kept twice
                batch.report.succeeded += 1
                group.rows[job.session_id] = [] if batch.within is None else job.rows or []
            within = None if group.running else batch.within
            if within is not None and within.find(group.uid) is group:
                within.file(group)
                if self.wait_for_some:
                    self.changed.notify_all()
        if batch.report.open == 0:
            batch.report.seconds = time.perf_counter() - batch.began
            if batch.journal is not None:
                with contextlib.suppress(OSError):
                    batch.journal.close()
            self.finish(batch, batch.error)

    def finish(self, batch: BatchHandle, error: BaseException | None) -> None:
        """Wake the callers that wait for a batch, with its report or with `error`."""
        with self.changed:
            self.batches.discard(batch)
            if not batch.done():
                if error is None:
                    batch.future.set_result(batch.report)
                else:
                    batch.future.set_exception(error)
            self.changed.notify_all()
        batch.rooted.set()

    def release(self, batch: BatchHandle) -> None:
        """Calls find the groups of a batch no more."""
        groups = [prompt.group for prompt in batch.prompts]
        with self.changed:
            if (within := batch.within) is not None:
                within.remove(g.uid for g in groups if within.find(g.uid) is g)

    # -- it ends early ---------------------------------------------------------------------------

    def cancel_soon(self, batch: BatchHandle) -> None:
        """Stop a batch, from any thread."""
        self.host.post(self._stop, batch, "cancelled")
        self.host.post(self._pump)

    def _abort(self, batch: BatchHandle, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`, once every session is marked failed."""
        batch.error = batch.error or error
        self._stop(batch, f"the batch was given up: {text_of(error)}")

    def _stop(self, batch: BatchHandle, cause: str) -> None:
        """Each session that has no outcome fails."""
        batch.stopped = batch.stopped or cause
        if batch.rooted.is_set():  # else `_begin` does it, once the roots are written
            self._end_all(batch)

    def _end_all(self, batch: BatchHandle) -> None:
        self._scheduler.cancel({*batch.prompts})
        for job in list(batch.running):
            self._give_up(job)
            self._scheduler.done(job)
        for prompt in batch.prompts:
            for session in sorted(prompt.open):
                self._end(Job(prompt, session, error=batch.stopped))
