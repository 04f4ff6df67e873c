"""Dumps written in the background: in order, in bounded memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np

from rlskip._copies import BufferPool, fresh
from rlskip.errors import RlskipError
from rlskip.format import chunks
from rlskip.format.chunks import CHUNK
from rlskip.store.dump import NewDump
from rlskip.store.step_store import StepStore

logger = logging.getLogger(__name__)

# How long nothing must have been saved when the writer's thread goes on, unless much is held.
_REST_S = 0.005


class WriterTimeoutError(RlskipError, TimeoutError):
    """Dumps were not written in time."""


class _Job(NamedTuple):
    step: int
    nbytes: int
    run: Callable[[], object]


class Writer:
    """Writes a store's dumps in a thread; the caller waits only while they are copied.

    The thread lives while there is something to write and is not a daemon: an interpreter that
    ends normally writes everything first. A process that is going to be killed must :meth:`flush`,
    or not use this. Where the system has no thread left, the caller writes its dump itself.

    Copies of `max_bytes` may be held at a time: a save that would exceed it waits until earlier
    ones are written, and one larger than that until it is the only one. A save, a wait or a flush
    waits `timeout_s` seconds at most, and then raises WriterTimeoutError, which names the steps
    that are not written.
    """

    def __init__(
        self, store: StepStore, *, max_bytes: int = 1 << 30, timeout_s: float = 600.0
    ) -> None:
        self.store = store
        self._max_bytes = max_bytes
        self.timeout_s = timeout_s
        self._start_empty()

    def _start_empty(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        # All under the condition. A job stays first in the queue until it is written or has failed,
        # so an empty queue means that nothing is left to do. The thread ends itself, and only when
        # the queue is empty. `_held` is the size of all copies, `_saved` when the last was made.
        self._jobs: deque[_Job] = deque()
        self._held = 0
        self._saved = 0.0
        self._thread: threading.Thread | None = None
        self._pool = BufferPool(self._max_bytes)

    def save(
        self,
        step: int,
        rollouts: Any,
        *,
        write: Callable[[NewDump], object] | None = None,
        **about: Any,
    ) -> None:
        """Like :meth:`StepStore.save`, but return as soon as the rollouts are copied, narrowed.

        `write`, by default :meth:`StepStore.write`, gets the copy in the writer's thread. What it
        raises is a warning.
        """
        dump = self.store.prepare(step, rollouts, **about)
        self._reserve(dump.nbytes)
        try:
            copied = attrs.evolve(dump, arrays=chunks.copied(dump.arrays, self.memory))
        except BaseException:
            self._release(dump.nbytes)
            raise
        write = write or self.store.write
        self._put(_Job(step, dump.nbytes, lambda: write(copied)))

    def run(self, step: int, nbytes: int, job: Callable[[], object]) -> None:
        """Let the thread do the `job`, which holds `nbytes` until it has written `step`."""
        self._reserve(nbytes)
        self._put(_Job(step, nbytes, job))

    def memory(self, nbytes: int) -> np.ndarray:
        """Bytes to copy into: where they are many, memory of copies that are written already."""
        return self._pool.take(nbytes) if nbytes > CHUNK else fresh(nbytes)

    def wait(self) -> None:
        """Wait until everything is written."""
        self._wait_for(lambda: not self._jobs)

    def flush(self) -> None:
        """Like :meth:`wait`, and give the copies' memory back."""
        self.wait()
        self._pool.clear()

    def _reserve(self, nbytes: int) -> None:
        self._wait_for(lambda: not self._held or self._held + nbytes <= self._max_bytes, nbytes)

    def _wait_for(self, condition: Callable[[], bool], nbytes: int = 0) -> None:
        """Wait until a condition holds, and then hold as many more bytes."""
        if self._process != os.getpid():
            # A forked child has neither the parent's thread nor its dumps, and the lock may be held
            # by a thread that was not forked.
            self._start_empty()
        with self._changed:
            if not self._changed.wait_for(condition, self.timeout_s):
                steps = ", ".join(str(job.step) for job in self._jobs)
                raise WriterTimeoutError(
                    f"the dumps of steps {steps} were not written within {self.timeout_s:g} s",
                    where=str(self.store.directory),
                    remedy="the file system is slow or hangs; see skip.background_write",
                )
            self._held += nbytes

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._held -= nbytes
            self._changed.notify_all()

    def _put(self, job: _Job) -> None:
        # In one turn with the look for the thread: that either sees the job before it ends, or has
        # ended, and then another one is started.
        with self._changed:
            self._jobs.append(job)
            self._saved = time.monotonic()
            self._changed.notify_all()
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="rlskip-writer")
            try:
                self._thread.start()
                return
            except RuntimeError as error:  # no thread left, or the interpreter ends
                logger.warning("rlskip: dumps are written without a separate thread: %s", error)
        self._run()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                # A burst of saves has the cores and the memory's bandwidth for itself.
                while 2 * self._held < self._max_bytes and (
                    (rest := self._saved + _REST_S - time.monotonic()) > 0
                ):
                    self._changed.wait(rest)
                job = self._jobs[0]
            try:
                job.run()
            except BaseException as error:  # the next dump is to be written
                logger.warning("rlskip: step %d is NOT dumped: %s", job.step, error)
            nbytes = job.nbytes
            del job  # its memory is free before anybody is told
            with self._changed:
                self._jobs.popleft()
                self._release(nbytes)
