"""What a prompt passes from `collect` or `submit` to its group.

Read from top to bottom: a call submits a batch and waits for groups; each session runs on the
worker that the scheduler has for it, is tried again elsewhere if that fails, is written where it
goes, and ends with its rows or a cause in its prompt's group. All but what callers ask runs on the
dispatcher's event loop, where no worker's code does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from rlskip.config.other_nodes import DispatchConfig
from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, Group, Prompt, tokens_of
from rlskip.dispatch.pools import Ended, Pool
from rlskip.dispatch.scheduler import Job, Scheduler, chunk, find_policy
from rlskip.dispatch.sessions import (
    BatchError,
    DataFailure,
    DispatcherClosedError,
    InfrastructureFailure,
    Result,
    SessionFailure,
    cause_of,
    returned,
    text_of,
)
from rlskip.dispatch.sink import Journals, Sink
from rlskip.keys import TRAIN
from rlskip.queue import IncompleteRolloutError, TrajectoryQueue
from rlskip.queue.readiness import Partition, State
from rlskip.queue.sampling import SampleCall
from rlskip.store import UnsupportedTypeError, fingerprint

_A_TURN = 512  # the most sessions that one turn of the event loop starts

logger = logging.getLogger(__name__)


class Groups:
    """The batches of a dispatcher that run, and their prompts until somebody takes the groups."""

    def __init__(
        self,
        pool: Pool,
        queue: TrajectoryQueue | None,
        config: DispatchConfig,
        journals: Journals | None,
        ahead: dict[str, Partition],
    ) -> None:
        # `changed` is held while `closed`, `batches` or a partition changes, and notified when a
        # batch has ended, and with every group that any call may take. A session waits in the
        # scheduler, or is an attempt that runs, or has left `open` of its prompt.
        self.changed = threading.Condition()
        self.closed = False
        self.ahead = ahead  # the groups that any call takes
        self.batches: set[BatchHandle] = set()
        self.host = timeouts.LoopThread("rlskip-dispatch")
        self._loop, self._pool = self.host.loop, pool
        self._config = config
        policy = find_policy(config.policy) if config.rollout_level else chunk
        caps = config.max_concurrent_rollouts_per_worker, pool.slots
        self._scheduler = Scheduler(pool.workers, policy, min(filter(None, caps), default=None))
        # By content of a prompt, the lengths of its sessions in this process.
        self._lengths = defaultdict[str, list[float]](lambda: [0, 0.0])
        # Attempts pass their deadlines in the order in which they started: one timer watches the
        # first, because one an attempt costs as much as all else that starts it.
        self._watches = False
        self._journals = journals
        self._sink = Sink(queue, journals, self._settle)
        self._pumps = False  # whether what can run is started in the next turn
        # At the sessions given up, which may still write: a prompt that is submitted again does
        # not begin with the number of such an attempt.
        self._next_attempts: dict[tuple[str, int], int] = {}

    # -- what callers ask ----------------------------------------------------------------------

    def take(self, call: SampleCall, own: BatchHandle | None) -> list[Group]:
        """Wait for groups, and take them: those of the batch `own`, or some of any."""
        within = call.partition
        with self.changed:
            try:
                while True:
                    if own is not None and own.done():
                        own.result()  # raises what ended it
                    if self.closed:  # what is there is a part of what the call asked for
                        what = "this dispatcher was closed while collect() waited"
                        raise DispatcherClosedError(what)
                    # The error of a whole step names all that are incomplete. Of a batch that was
                    # given up the sessions end first, and then it does, with the cause.
                    is_given_up = own is not None and own.error is not None
                    is_whole = call.batch_size is not None or not call.groups(State.RUNNING)
                    if is_whole and not is_given_up:
                        if dropped := call.decide():
                            for groups in dropped.values():
                                within.remove(group.uid for group in groups)
                            call.evicted(dropped)
                        if (chosen := call.choose()) is not None:
                            within.remove(group.uid for group in chosen)
                            return chosen
                    self.changed.wait(call.check_time(time.monotonic()))
            except BaseException as error:
                if type(error) is IncompleteRolloutError:  # which has them; a late one has not
                    within.remove(prompt.uid for prompt in error.prompts)
                if own is not None:  # else its groups are there for the next call
                    own.cancel()
                raise

    def submit(self, batch: BatchHandle, within: Partition | None) -> None:
        """Run a batch; calls find its groups `within`. None: in the queue, with its roots now."""
        batch.within = within
        with self.changed:
            if self.closed:
                raise DispatcherClosedError("this dispatcher is closed")
            same = [b for b in self.batches if b.partition == batch.partition and not b.released]
            held = {group.uid for other in same for group in other.found if group.running}
            for prompt in batch.prompts:
                if prompt.uid in held or self.ahead[batch.partition].find(prompt.uid):
                    raise BatchError(
                        f"an earlier prompt of the uid {prompt.uid!r} is in flight",
                        "uid",
                        "give this one a uid of its own; or first take the other's group, or give "
                        "it up: cancel its batch",
                    )
            self.batches.add(batch)  # from here on, close() ends it
            if within is not None:
                for group in batch.found:
                    within.file(group)
        try:
            if within is None:
                self.host.within(timeouts.WRITE_S, self._sink.check, batch)
            for prompt in batch.prompts if self._scheduler.uses_lengths else ():
                with contextlib.suppress(UnsupportedTypeError):  # it cannot be compared
                    prompt.lengths = self._lengths[fingerprint(prompt.fields)]
            if self._journals is not None and batch.partition == TRAIN:
                self._journals.name(batch)
        except BaseException as error:
            self.release(batch)
            self.finish(batch, error)
            raise
        self.host.ask(self._begin, batch)
        if within is None:  # waits for the journal, and for the queue
            batch.begun.wait(2 * timeouts.WRITE_S)

    def release(self, batch: BatchHandle) -> None:
        """Calls find the groups of a batch no more."""
        with self.changed:
            if (within := batch.within) is not None:
                batch.released = True
                within.remove(g.uid for g in batch.found if within.find(g.uid) is g)

    def cancel(self, batch: BatchHandle) -> None:
        """Stop a batch."""
        self.release(batch)
        self.host.post(self._stop, batch, "cancelled")

    # -- on the event loop ---------------------------------------------------------------------

    async def _begin(self, batch: BatchHandle) -> None:
        """Open its journal, write its roots, and let its sessions wait for workers."""
        try:
            resumed = await self._sink.open(batch)
            for prompt in batch.prompts:
                attempts = {i: self._next_attempts.get((prompt.uid, i), 0) for i in prompt.open}
                for session, found in resumed.get(prompt.uid, {}).items():
                    job = Job(prompt, session, attempt=attempts.pop(session), tags=found.tags)
                    job.rows = returned(found.rows)
                    batch.report.resumed += 1
                    self._end(job)
                self._scheduler.add(prompt, attempts)
        except Exception as error:
            self._abort(batch, error)
        batch.begun.set()
        if batch.stopped:
            self._stop(batch, batch.stopped)
        self._pump()

    def _pump(self) -> None:
        """Start all sessions that can run, once for all that happens in this turn."""
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        self._pumps = False
        starting, error = defaultdict[int, list[Job]](list), None
        seed, now = self._config.seed or 0, self._loop.time()
        try:
            # A part of them, while the workers run others: more objects at once are more that
            # Python's garbage collector looks through.
            for _ in range(_A_TURN):
                if (job := self._scheduler.next()) is None:
                    break
                job.group.batch.report.attempts += 1
                job.session, job.started = job.group.session(job, seed), now
                starting[job.worker].append(job)
            else:
                self._pump()
        except Exception as raised:  # the policy is the user's
            error = raised
        if not self._watches:
            self._watch()
        for worker, jobs in starting.items():
            self._pool.start(worker, jobs)
        for batch in list(self.batches):
            if error is not None:
                self._abort(batch, error)
            elif self._pool.is_lost:
                self._stop(batch, "no worker is left")

    def worker_changed(self, worker: int, error: InfrastructureFailure | None) -> None:
        """A worker is there again; or it is not, nothing starts on it, and what ran on it failed.

        Without it the sessions that wait may have no worker left, for now or for good.
        """
        self._scheduler.change(worker, error is None)
        if error is not None:
            for job in [job for job in self._scheduler.running if job.worker == worker]:
                self._fail(job, error)
        self._pump()

    def _watch(self) -> None:
        """Fail the attempts that have passed their deadline; look again at that of the next."""
        self._watches = False
        seconds = self._config.session_timeout_s
        while seconds is not None and self._scheduler.running and not self._watches:
            job = next(iter(self._scheduler.running))  # it has run longest
            if job.started + seconds <= self._loop.time():
                what = f"passed its deadline of {seconds:g} s (dispatch.session_timeout_s)"
                self._fail(job, InfrastructureFailure(what))
            else:
                self._watches = True
                self._loop.call_at(job.started + seconds, self._watch)

    def _fail(self, job: Job, error: InfrastructureFailure) -> None:
        self._give_up(job)
        self._returned(job, error)

    def _give_up(self, job: Job) -> None:
        self._pool.stop(job)
        # It may write rows for a while.
        self._next_attempts[job.group.uid, job.session_id] = job.attempt + 1

    def returned(self, ended: Sequence[Ended]) -> None:
        """These attempts have ended: of each, another one follows, or its session ends."""
        for job, result in ended:
            try:
                self._returned(job, result)
            except BaseException:  # the others have ended all the same
                logger.exception("rlskip: the end of %s is not seen", job)

    def _returned(self, job: Job, result: Result) -> None:
        if job not in self._scheduler.running:  # it was given up
            return
        self._pump()
        if result is None and job.group.batch.within is not None:
            what = "the worker returned no rows, as one that writes them to a queue itself"
            remedy = "return the rows; or submit() to a dispatcher that has the queue"
            result = DataFailure(what, remedy=remedy)
        length = None
        if isinstance(result, SessionFailure):
            is_machine = isinstance(result, InfrastructureFailure)
            allowed = self._config.max_retries if is_machine else self._config.max_data_retries
            job.failures += (is_machine,)
            if job.failures.count(is_machine) <= allowed:
                logger.warning("rlskip: %s failed and is tried again: %s", job, text_of(result))
                self._scheduler.retry(job)
                return
            logger.error("rlskip: %s failed for good: %s", job, text_of(result), exc_info=result)
            job.error = cause_of(result)
        else:
            job.rows = result
            if self._scheduler.uses_lengths:
                length = tokens_of(result or ()) or self._loop.time() - job.started
        self._scheduler.done(job, length)
        self._end(job)

    def _end(self, job: Job) -> None:
        """A session has its outcome: write it, where it is written, and settle it."""
        prompt: Prompt = job.group
        prompt.open.remove(job.session_id)
        if not prompt.open:
            self._pool.forget(prompt)
        if prompt.batch.within is None or prompt.journal_name is not None:
            self._sink.write(job)
        else:
            self._settle(job)

    def _settle(self, job: Job, error: Exception | None = None) -> None:
        """Its group has the session, unless it could not be written: the last ends the batch."""
        batch, group = job.group.batch, job.group.group
        if error is not None:
            self._abort(batch, error)
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
                if within is self.ahead[batch.partition]:  # else one call waits, for all of them
                    self.changed.notify_all()
        if batch.report.open == 0:
            if batch.appending is not None:  # a disk that hangs holds up nothing else
                timeouts.in_thread(batch.appending.close)
            self.finish(batch, batch.error)

    def finish(self, batch: BatchHandle, error: BaseException | None) -> None:
        """Wake the callers that wait for a batch, with its report or with `error`."""
        with self.changed:
            self.batches.discard(batch)
            batch.prompts = []
            if not batch.done():
                if error is None:
                    batch.set_result(batch.report)
                else:
                    batch.set_exception(error)
            self.changed.notify_all()
        batch.begun.set()

    def _abort(self, batch: BatchHandle, error: BaseException) -> None:
        """The batch cannot go on: its caller gets `error`, once every session is marked failed."""
        if batch.error is None:
            batch.error = error
            self._stop(batch, f"the batch was given up: {text_of(error)}")

    def _stop(self, batch: BatchHandle, cause: str) -> None:
        """Each session that has no outcome fails, now or once the roots are written."""
        batch.stopped = batch.stopped or cause
        if batch.begun.is_set():
            self._scheduler.cancel({*batch.prompts})
            for job in [job for job in self._scheduler.running if job.group.batch is batch]:
                self._give_up(job)
                self._scheduler.done(job)
            for prompt in batch.prompts:
                for session in sorted(prompt.open):
                    self._end(Job(prompt, session, error=batch.stopped))
            self._pump()
