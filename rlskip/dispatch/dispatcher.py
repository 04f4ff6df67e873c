"""RolloutDispatcher: from a batch of prompts to rows and markers in a queue."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase

from rlskip.config.dispatch import DispatchConfig, read_dispatch
from rlskip.dispatch.batch import Batch, BatchReport
from rlskip.dispatch.history import History
from rlskip.dispatch.policies import Policy, chunk, find_policy, least_loaded, round_robin
from rlskip.dispatch.pools import THREADS, LocalPool, Pool, Worker
from rlskip.dispatch.read import read_batch
from rlskip.dispatch.resume import journal_identity
from rlskip.dispatch.scheduler import Scheduler
from rlskip.dispatch.sessions import Sessions
from rlskip.errors import ConfigError, RlskipError
from rlskip.queue import TrajectoryQueue
from rlskip.store import Identity, StepStore

_BLIND = (chunk, round_robin, least_loaded)  # policies that ask for no lengths


class DispatcherClosedError(RlskipError, RuntimeError):
    """A dispatcher was closed, and is asked for more."""


class RolloutDispatcher:
    """Runs the sessions of batches on a pool, and writes what they return to a queue.

    For every prompt its root tag comes first, for every session its rows next and then exactly
    one marker, whatever happens to it. Batches may overlap: caps and cursors are the pool's.

    Parameters
    ----------
    pool
        LocalPool, RayPool, or another; the dispatcher starts and closes it.
    queue
        Where rows go.
    config
        Anything that :func:`~rlskip.config.dispatch.read_dispatch` takes.
    policy
        Instead of ``dispatch.policy``.
    store
        The run's dumps: where journals lie, and what `longest_first` learns lengths from.
    identity
        What sessions depend on beside prompts and sampling (lengths, model, ...); a journal
        of another identity is not resumed.
    """

    def __init__(
        self,
        pool: Pool,
        queue: TrajectoryQueue,
        config: Any = None,
        *,
        policy: Policy | None = None,
        store: StepStore | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.config: DispatchConfig = read_dispatch(config)
        if self.config.journal and store is None:
            raise ConfigError(
                "needs to know where dumps lie",
                "dispatch.journal",
                "give the dispatcher a store; that of an enabled role (+skip=rollout_cache) is "
                "SkipManager.store('rollout')",
            )
        policy = policy or find_policy(self.config.policy)
        if not self.config.rollout_level:
            policy = chunk
        self._pool = pool
        self._history = None if policy in _BLIND else History(self.config.history_fields)
        if self._history is not None and store is not None:
            self._history.learn_dumps(store)
        caps = self.config.max_concurrent_rollouts_per_worker, pool.slots
        per_worker = min(filter(None, caps), default=None)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._sessions = Sessions(
            self._loop,
            pool,
            queue,
            self.config,
            Scheduler(pool.workers, policy, per_worker, self.config.max_concurrent_rollouts),
            self._history,
            store,
            journal_identity(identity or Identity(), self.config),
        )
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rlskip-dispatch", daemon=True
        )
        self._thread.start()
        try:
            self._call(pool.open()).result()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(
        cls, config: Any, worker: Worker, queue: TrajectoryQueue, **more: Any
    ) -> RolloutDispatcher:
        """A dispatcher on the pool that ``dispatch.pool`` and ``dispatch.workers`` name."""
        dispatch = read_dispatch(config)
        threads = dispatch.max_concurrent_rollouts_per_worker or THREADS
        pool: Pool
        if dispatch.pool == "ray":
            from rlskip.dispatch.ray_pool import RayPool

            pool = RayPool(worker, dispatch.workers or 1, threads=threads)
        else:
            pool = LocalPool(worker, dispatch.workers or 1, threads=threads)
        return cls(pool, queue, dispatch, **more)

    # -- what callers do -------------------------------------------------------------------

    def submit(
        self,
        prompts: TensorDictBase | Sequence[Mapping[str, Any]],
        *,
        step: int | None = None,
        validate: bool | None = None,
        partition: str | None = None,
    ) -> Batch:
        """Start generating, and return at once.

        Parameters
        ----------
        prompts
            A TensorDict of batch size ``(prompts,)``, or one mapping per prompt. Field ``uid``
            names each prompt. Per prompt too: ``__rollout_n__``, how many sessions it gets,
            and ``__do_sample__``, false for greedy sampling in training. ``index`` is its
            number in the data set, by default its position.
        step
            The trainer's step; None: the batch's ``global_steps``.
        validate
            Whether to use ``val_n`` and ``val_sampling``; None: as the batch's ``validate``
            says, else no.
        partition
            Where rows go; None: ``val`` in validation, else ``train``.

        Raises
        ------
        BatchError
            The batch has no uid, uids twice, no step, or a session count below one.
        DispatcherClosedError
            After :meth:`close`.
        """
        if self._closed:
            raise DispatcherClosedError("this dispatcher is closed", remedy="make a new one")
        batch = read_batch(prompts, self.config, self._history, step, validate, partition)
        loop, sessions = self._loop, self._sessions
        batch.on_cancel = lambda: loop.call_soon_threadsafe(sessions.cancel, batch)
        self._call(sessions.begin(batch))
        return batch

    def generate_sequences(
        self, prompts: TensorDictBase | Sequence[Mapping[str, Any]], **where: Any
    ) -> BatchReport:
        """:meth:`submit`, and wait until every session has its marker."""
        return self.submit(prompts, **where).result()

    def broadcast(self, method: str, *args: Any) -> None:
        """Call a method of every worker and wait: to load a new policy's weights, say."""
        self._call(self._pool.broadcast(method, *args)).result()

    def close(self) -> None:
        """Cancel what runs, and let the workers go."""
        if self._closed:
            return
        self._closed = True
        for batch in list(self._sessions.batches):
            batch.cancel()
        for batch in list(self._sessions.batches):
            with contextlib.suppress(Exception):  # whoever submitted it is told
                batch.result(timeout=30)
        self._call(self._pool.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> RolloutDispatcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
