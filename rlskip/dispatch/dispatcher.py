"""RolloutDispatcher: from a batch of prompts to rows and markers in a queue, and to the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeAlias

from tensordict import TensorDict, TensorDictBase

from rlskip.config.dispatch import DispatchConfig, read_dispatch
from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, read_batch
from rlskip.dispatch.collect import Collector
from rlskip.dispatch.failures import InfrastructureFailure, portable, text_of
from rlskip.dispatch.history import History
from rlskip.dispatch.policies import Policy, chunk, find_policy, least_loaded, round_robin
from rlskip.dispatch.pools import THREADS, LocalPool, Pool, Worker
from rlskip.dispatch.resume import Journals, journal_identity
from rlskip.dispatch.scheduler import Scheduler
from rlskip.dispatch.sessions import Sessions
from rlskip.dispatch.uids import Uids
from rlskip.dispatch.units import step_number
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import TRAIN, VAL
from rlskip.queue import MemoryQueue, ReplayBuffer, TrajectoryQueue
from rlskip.store import Identity, StepStore

Prompts: TypeAlias = TensorDictBase | Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)

_BLIND = (chunk, round_robin, least_loaded)  # policies that use no lengths

# The last dispatcher of each queue that is open, by the queue's id: a queue of the user's may have
# no hash. The id is nobody else's, because a dispatcher keeps its queue.
_last: weakref.WeakValueDictionary[int, RolloutDispatcher] = weakref.WeakValueDictionary()


class DispatcherClosedError(RlskipError, RuntimeError):
    """A dispatcher is used after it was closed."""


class RolloutDispatcher:
    """Runs the sessions of batches on a pool, and writes what they return to a queue.

    It writes each prompt's root tag first, then each session's rows, then exactly one marker per
    session, whatever happens to it. Batches may overlap: they share the pool's caps and cursor.
    A queue has one dispatcher: while another that was made for it later is open, this one takes no
    prompts.

    Parameters
    ----------
    pool
        A LocalPool, a RayPool, or a subclass of Pool. The dispatcher opens and closes it.
    queue
        Where rows go; by default a new MemoryQueue.
    config
        Anything that :func:`~rlskip.config.dispatch.read_dispatch` takes; its node `replay` is of
        :attr:`buffer`.
    policy
        Replaces ``dispatch.policy``.
    store
        The run's dumps, next to which journals are kept.
    identity
        What sessions depend on besides prompts and sampling (lengths, model, ...). A journal of
        another identity is not resumed.
    journals
        Replaces the journals that ``dispatch.journal`` makes of `store` and `identity`.
    """

    def __init__(
        self,
        pool: Pool,
        queue: TrajectoryQueue | None = None,
        config: Any = None,
        *,
        policy: Policy | None = None,
        store: StepStore | None = None,
        identity: Identity | None = None,
        journals: Journals | None = None,
    ) -> None:
        self.config: DispatchConfig = read_dispatch(config)
        policy = policy or find_policy(self.config.policy)
        if not self.config.rollout_level:
            policy = chunk
        self.queue: TrajectoryQueue = MemoryQueue() if queue is None else queue
        self._config = config  # of the buffer
        self._buffer: ReplayBuffer | None = None
        self._ahead: list[BatchHandle] = []  # submitted by collect(), and not yet waited for
        self._uids = Uids(self.queue)
        self._pool = pool
        if self.config.journal and journals is None:
            if store is None:
                raise ConfigError(
                    "a journal needs the directory of the dumps",
                    "dispatch.journal",
                    "pass store=... to the dispatcher; SkipManager.store('rollout') returns the "
                    "store of an enabled role (+skip=rollout_cache)",
                )
            of_sessions = journal_identity(identity or Identity(), self.config)
            journals = Journals(store, of_sessions, self.queue)
        self._journals = journals
        self._history = None if policy in _BLIND else History()
        caps = self.config.max_concurrent_rollouts_per_worker, pool.slots
        per_worker = min(filter(None, caps), default=None)
        self._closed = False
        self._submitted: weakref.WeakSet[BatchHandle] = weakref.WeakSet()
        self._closing = threading.Lock()
        self._ended = threading.Event()
        self._loop = timeouts.stops_at_exit(asyncio.new_event_loop())
        self._sessions = Sessions(
            self._loop,
            pool,
            self.queue,
            self.config,
            Scheduler(pool.workers, policy, per_worker),
            self._history,
            journals,
        )
        _last[id(self.queue)] = self
        self._thread = threading.Thread(target=self._run, name="rlskip-dispatch", daemon=True)
        self._thread.start()
        if self.config.session_timeout_s is not None:
            threading.Thread(target=self._watch, name="rlskip-watch", daemon=True).start()
        try:
            self._call(timeouts.OPEN_S, pool.open)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(
        cls, config: Any, worker: Worker, queue: TrajectoryQueue | None = None, **more: Any
    ) -> RolloutDispatcher:
        """Make a dispatcher with the pool that ``dispatch.pool`` and ``dispatch.workers`` name."""
        dispatch = read_dispatch(config)
        threads = dispatch.max_concurrent_rollouts_per_worker or THREADS
        make_pool: Callable[..., Pool] = LocalPool
        if dispatch.pool == "ray":
            from rlskip.dispatch.ray_pool import RayPool

            make_pool = RayPool
        pool = make_pool(worker, dispatch.workers or 1, threads=threads)
        return cls(pool, queue, config, **more)

    @property
    def buffer(self) -> ReplayBuffer:
        """The replay buffer of :meth:`collect`. Assign another one to refill prompts."""
        if self._buffer is None:
            self._buffer = ReplayBuffer(self.queue, self._config)
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def collect(
        self,
        prompts: Prompts | None = None,
        *,
        step: int | None = None,
        validate: bool | None = None,
        partition: str | None = None,
        batch_size: int | None = None,
    ) -> tuple[TensorDict, dict[str, float]]:
        """Generate, wait for complete groups, and take their rows out of the queue.

        A coroutine calls it as ``await asyncio.to_thread(dispatcher.collect, prompts, step=3)``.

        Parameters
        ----------
        prompts, step, validate, partition
            As in :meth:`submit`. Without prompts, nothing is submitted and `step` is required.
        batch_size
            None: wait for the groups of these prompts, whoever else uses the queue; without
            prompts, for those of this step that no other call waits for. A number: take the
            groups of that many prompts of any step, oldest first, while the others go on; for
            trainers that generate ahead of their updates.

        Returns
        -------
        rows : TensorDict
            Batch size ``(rows,)``, group by group, each by session and index, with the fields
            that all rows have, packed as :meth:`TrajectoryQueue.get` packs them. Columns
            ``uid`` and ``session_id`` are added unless the rows have them.
        metrics : dict
            As :meth:`ReplayBuffer.sample` returns them.

        Raises
        ------
        IncompleteRolloutError, ReplayTimeoutError
            As :meth:`ReplayBuffer.sample` raises them.
        BatchError
            As :meth:`submit` raises it; or an earlier prompt of one of the uids is in flight: a
            session of it runs, or the queue holds its group.
        Exception
            What kept a batch from being written to the queue.
        """
        batch = None if prompts is None else self._read(prompts, step, validate, partition)
        if batch is not None:
            step, partition = batch.step, batch.partition
        step = step_number(step)
        partition = partition or (VAL if validate else TRAIN)
        seconds = timeouts.write_seconds(self.config)
        buffer = timeouts.bounded(seconds, lambda: self.buffer)
        if batch is not None:
            self._uids.add(batch, self._uids.queued(batch, seconds))
        collector = Collector(buffer, self._uids, seconds)
        if batch is not None and batch_size is None:
            return collector.own_rows(batch, self._begin)
        if batch is not None:
            self._begin(batch)
        self._check_ahead(batch)
        return collector.take(step, partition, batch_size)

    def _check_ahead(self, batch: BatchHandle | None) -> None:
        """Raise what kept this batch or an earlier one from the queue; remember the others."""
        with self._closing:
            ahead = self._ahead if batch is None else [*self._ahead, batch]
            done = [one for one in ahead if one.done()]
            self._ahead = [one for one in ahead if one not in done]
        for one in done:
            one.result()

    def submit(
        self,
        prompts: Prompts,
        *,
        step: int | None = None,
        validate: bool | None = None,
        partition: str | None = None,
    ) -> BatchHandle:
        """Start generating, and return once the roots are in the queue.

        From then on a replay buffer knows of all these prompts.

        Parameters
        ----------
        prompts
            A TensorDict of batch size ``(prompts,)``, or one mapping per prompt. Field ``uid``
            names each prompt until its group has left the queue. Optional fields:
            ``__rollout_n__``, how many sessions a prompt gets; ``__do_sample__``, false for
            greedy sampling in training; ``index``, its number in the data set, by default its
            position.
        step
            The trainer's step; None: the batch's field ``global_steps``.
        validate
            Whether to use ``val_n`` and ``val_sampling``; None: the batch's field ``validate``,
            by default false.
        partition
            Where rows go; None: ``val`` in validation, else ``train``.

        Raises
        ------
        BatchError
            The batch has no uid, duplicate uids, no step, or a session count below one.
        DispatcherClosedError
            After :meth:`close`.
        """
        batch = self._read(prompts, step, validate, partition)
        self._uids.add(batch)
        self._begin(batch)
        return batch

    def _read(
        self, prompts: Prompts, step: int | None, validate: bool | None, partition: str | None
    ) -> BatchHandle:
        self._check_open()
        if _last.get(id(self.queue), self) is not self:
            raise RlskipError(
                "another RolloutDispatcher was made for this queue",
                remedy="use that one, or close it; or give each a queue of its own",
            )
        journaled = self._journals is not None
        batch = read_batch(
            prompts, self.config, self._history, journaled, step, validate, partition
        )
        batch.on_cancel = lambda: self._post(self._sessions.cancel, batch)
        return batch

    def _begin(self, batch: BatchHandle) -> None:
        with self._closing:
            self._check_open()
            self._sessions.batches.add(batch)  # from here on, close() ends it
            batch.settled.clear()
            self._submitted.add(batch)
        self._post(self._sessions.begin, batch)
        # An async worker may submit prompts, too, on the thread that has to write their roots.
        if threading.current_thread() is not self._thread:
            batch.rooted.wait(2 * timeouts.write_seconds(self.config))  # the journal, the queue

    def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker and wait, e.g. to load a new policy's weights."""
        self._check_open()
        self._call(timeouts.OPEN_S, self._pool.broadcast, method, *args)

    def _check_open(self) -> None:
        if self._closed:
            raise DispatcherClosedError("this dispatcher is closed", remedy="make a new one")

    def close(self) -> None:
        """Cancel the batches that run, and release the workers, within a bounded time."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if _last.get(id(self.queue)) is self:
            del _last[id(self.queue)]
        deadline = time.monotonic() + timeouts.CLOSE_S
        batches = list(self._sessions.batches)
        for batch in batches:
            batch.cancel()
        for batch in batches:
            with contextlib.suppress(Exception):  # its handle raises the error
                batch.result(max(0.0, deadline - time.monotonic()))
            batch.finish(DispatcherClosedError("closed before all its markers were written"))
            batch.settled.set()
        for batch in list(self._submitted):  # the markers of those that were given up
            batch.settled.wait(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + timeouts.CLOSE_S
        try:
            self._call(timeouts.CLOSE_S, self._pool.close)
        except Exception as error:
            logger.warning("the pool was not closed properly: %s", text_of(error))
        self._ended.set()
        self._post(self._loop.stop)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> RolloutDispatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the event loop, on its thread -----------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._ended.is_set():
            try:
                self._loop.run_forever()
            except BaseException:  # for example a KeyboardInterrupt that a pool raised
                logger.exception("the event loop of the dispatcher goes on")
        with contextlib.suppress(BaseException):
            self._loop.run_until_complete(self._cancel_tasks())
        self._sessions.close()
        self._loop.close()

    def _watch(self) -> None:
        """Fail all batches when something blocks the event loop, and with it every deadline."""
        seconds = (self.config.session_timeout_s or 0) + timeouts.LOOP_S
        while not self._ended.wait(min(1.0, seconds)):
            turned = threading.Event()
            self._post(turned.set)
            if not turned.wait(seconds) and not self._ended.is_set():
                who = self._running_now()
                if turned.is_set():  # it went on meanwhile
                    continue
                error = InfrastructureFailure(
                    f"{who} blocks the event loop for more than {seconds:g} s",
                    remedy="make the worker a plain function: it runs in a thread",
                )
                for batch in list(self._sessions.batches):
                    batch.finish(error)
                self._post(self._sessions.abort_all, error)

    def _running_now(self) -> str:
        """What the event loop runs: a session, by name, or the place in the code."""
        task = asyncio.current_task(self._loop)
        if task is not None and task.get_name().startswith("session "):
            return task.get_name()
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and _of_python(frame):  # a lock that is waited for, say
            frame = frame.f_back
        if frame is None:
            return "a worker or the pool"
        return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    def _post(self, call: Callable[..., object], *args: Any) -> None:
        """Call on the event loop, unless it is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _call(self, seconds: float, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await ``call(*args)`` on the event loop, for at most `seconds`."""
        outcome: Future[Any] = Future()

        async def run() -> None:
            if not outcome.set_running_or_notify_cancel():
                return  # the caller no longer waits
            try:
                outcome.set_result(await call(*args))
            except asyncio.CancelledError:
                outcome.set_exception(
                    InfrastructureFailure(f"{timeouts.name_of(call)} was cancelled")
                )
            except BaseException as error:  # a pool may be the user's
                outcome.set_exception(portable(error))

        self._post(lambda: self._loop.create_task(run()))
        return timeouts.result_of(outcome, seconds, call)


def _of_python(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names
