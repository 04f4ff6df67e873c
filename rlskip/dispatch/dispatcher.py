"""RolloutDispatcher: how it is made, what it is asked for, and how it ends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, TypeAlias

from tensordict import TensorDict, TensorDictBase

from rlskip.config.nodes import read_node
from rlskip.config.other_nodes import DispatchConfig, ReplayConfig
from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, joined, read_batch, step_number
from rlskip.dispatch.groups import Groups
from rlskip.dispatch.pools import THREADS, LocalPool, Pool, Worker
from rlskip.dispatch.sessions import DispatcherClosedError, text_of
from rlskip.dispatch.sink import Journals, journal_identity
from rlskip.errors import ConfigError, RlskipError
from rlskip.keys import TRAIN, VAL
from rlskip.queue import TrajectoryQueue
from rlskip.queue.readiness import Partition
from rlskip.queue.sampling import SampleCall
from rlskip.store import Identity, StepStore

Batch: TypeAlias = TensorDictBase | Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)


class RolloutDispatcher:
    """Runs the sessions of batches on a pool, and returns the groups of their rows.

    With a queue, :meth:`submit` writes each prompt's root tag there first, then each session's
    rows, then exactly one marker a session, whatever happens to it. Batches may overlap: they share
    the pool's caps and cursor. A queue has one dispatcher, the last that was made for it.

    Parameters
    ----------
    pool
        A LocalPool or a RayPool, which the dispatcher opens and closes.
    queue
        Where :meth:`submit` writes; None: groups stay here until they are taken.
    config
        Anything that :func:`~rlskip.config.nodes.read_node` takes; its node `replay` judges
        the groups of :meth:`collect`.
    store, journals
        The run's dumps, next to which journals are kept; or the journals.
    """

    def __init__(
        self,
        pool: Pool,
        queue: TrajectoryQueue | None = None,
        config: Any = None,
        *,
        store: StepStore | None = None,
        journals: Journals | None = None,
    ) -> None:
        self._process = os.getpid()
        self.config: DispatchConfig = read_node(DispatchConfig, config)
        self.queue = queue
        self._pool = pool
        if pool.groups is not None and not pool.groups.closed:
            raise RlskipError("another RolloutDispatcher has this pool", remedy="close that first")
        if self.config.journal and journals is None:
            if store is None:
                raise ConfigError(
                    "a journal needs the directory of the dumps",
                    "dispatch.journal",
                    "pass store=... to the dispatcher; SkipManager.store('rollout') returns the "
                    "store of an enabled role (+skip=rollout_cache)",
                )
            journals = Journals(store, journal_identity(Identity(), self.config), queue)
        self._replay = read_node(ReplayConfig, config)
        ahead = {name: Partition(name, self._replay) for name in (TRAIN, VAL)}
        self._groups = Groups(pool, queue, self.config, journals, ahead)
        self._host = self._groups.host
        if queue is not None:
            queue.dispatcher = self
        try:
            self._host.within(timeouts.OPEN_S, pool.open, self._groups)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(
        cls, config: Any, worker: Worker, queue: TrajectoryQueue | None = None, **more: Any
    ) -> RolloutDispatcher:
        """Make a dispatcher with the pool that ``dispatch.pool`` and ``dispatch.workers`` name."""
        dispatch = read_node(DispatchConfig, config)
        make_pool: Callable[..., Pool] = LocalPool
        if dispatch.pool == "ray":
            from rlskip.dispatch.ray_pool import RayPool as make_pool
        threads = dispatch.max_concurrent_rollouts_per_worker or THREADS
        return cls(make_pool(worker, dispatch.workers or 1, threads=threads), queue, config, **more)

    def collect(
        self,
        prompts: Batch | None = None,
        *,
        step: int | None = None,
        validate: bool | None = None,
        batch_size: int | None = None,
    ) -> tuple[TensorDict, dict[str, float]]:
        """Generate, wait for complete groups, and return their rows, and metrics.

        The rows are a TensorDict, group by group, each by session and index, packed as
        :meth:`TrajectoryQueue.get` packs them. Columns ``uid`` and ``session_id`` are added unless
        they have them. Metrics and errors are those of :meth:`ReplayBuffer.sample`; a row that
        lacks a field that another one has, which is not to be filled, raises UnequalFieldsError.
        Nothing is written to the queue. All waits together take at most ``replay.timeout_s``.

        Parameters
        ----------
        prompts, step, validate
            As in :meth:`submit`. Without prompts, nothing is submitted and `step` is required.
        batch_size
            None: the groups of these prompts; without prompts, those of this step that nobody has
            taken. A number: the groups of that many prompts of any step, oldest first, while the
            others go on.
        """
        self._check_open()
        if self._replay.on_incomplete == "refill":
            raise ConfigError(
                "collect() has no prompts to refill a group with",
                "replay.on_incomplete",
                "use raise, drop or min_viable (dispatch.max_retries and max_data_retries try "
                "sessions again); refill is for ReplayBuffer(queue, refill=...)",
            )
        batch = None if prompts is None else self._read(prompts, step, validate)
        partition = VAL if validate else TRAIN
        if batch is not None:
            step, partition = batch.step, batch.partition
        own = batch if batch_size is None else None
        ahead = self._groups.ahead[partition]
        within = ahead if own is None else Partition(partition, self._replay)
        call = SampleCall(within, step_number(step), batch_size, time.monotonic())
        if batch is not None:
            self._groups.submit(batch, within)
        groups = self._groups.take(call, own)
        return joined(groups, partition, self.config.fill_missing), call.metrics()

    def submit(
        self, prompts: Batch, *, step: int | None = None, validate: bool | None = None
    ) -> BatchHandle:
        """Start generating; with a queue, return once a buffer of it knows of all these prompts.

        Raises BatchError if the batch has no uid, duplicate uids, no step, or a session count below
        one; or if an earlier prompt of a uid is in flight, or in the queue.

        Parameters
        ----------
        prompts
            A TensorDict of batch size ``(prompts,)``, or one mapping per prompt. Field ``uid``
            names each prompt until its group has ended and, without a queue, was taken. Optional
            fields: ``__rollout_n__``, how many sessions a prompt gets; ``__do_sample__``, false for
            greedy sampling in training; ``index``, its number in the data set.
        step, validate
            The trainer's step, and whether to use ``val_n`` and ``val_sampling``. None: the
            batch's fields ``global_steps`` and ``validate``.
        """
        batch = self._read(prompts, step, validate)
        within = self._groups.ahead[batch.partition] if self.queue is None else None
        self._groups.submit(batch, within)
        return batch

    def _read(self, prompts: Batch, step: int | None, validate: bool | None) -> BatchHandle:
        self._check_open()
        if self.queue is not None and self.queue.dispatcher not in (None, self):
            raise RlskipError(
                "another RolloutDispatcher was made for this queue",
                remedy="use that one, or close it; or give each a queue of its own",
            )
        return read_batch(prompts, self.config, self._groups, step, validate)

    def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker and wait, e.g. to load a new policy's weights."""
        self._check_open()
        self._host.within(timeouts.OPEN_S, self._pool.broadcast, method, *args)

    def _check_open(self) -> None:
        if self._groups.closed or self._process != os.getpid():
            what = "this dispatcher is closed, or was made before this process was forked"
            raise DispatcherClosedError(what, remedy="make a new one")

    def close(self) -> None:
        """Cancel the batches that run, and release the workers, within a bounded time."""
        # A forked child has none of the threads, and the lock may be held by one of them.
        if self._process != os.getpid():
            return
        with self._groups.changed:
            if self._groups.closed:
                return
            self._groups.closed = True
            self._groups.changed.notify_all()
            batches = list(self._groups.batches)
        if self.queue is not None and self.queue.dispatcher is self:
            self.queue.dispatcher = None
        for batch in batches:
            batch.cancel()
        wait(batches, timeouts.CLOSE_S)
        for batch in batches:
            late = DispatcherClosedError("closed before all its markers were written")
            self._groups.finish(batch, late)
        deadline = time.monotonic() + timeouts.CLOSE_S
        try:
            self._host.within(timeouts.CLOSE_S, self._pool.close)
        except Exception as error:
            logger.warning("rlskip: the pool was not closed properly: %s", text_of(error))
        self._host.close()
        self._host.thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> RolloutDispatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
