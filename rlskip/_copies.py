"""Copies of large arrays, made by two threads."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Memory = Callable[[int], np.ndarray]
"""Returns the given number of bytes of memory to write to."""

T = TypeVar("T")
R = TypeVar("R")

_JOB = 1 << 21
"""Bytes that a thread reads before it takes the next ones."""
_BLOCK = 1 << 12
"""Bytes that are copied as one where only parts of an array are: few blocks, and few too many."""


def fresh(nbytes: int) -> np.ndarray:
    """Memory of no pool; if it is large, it begins with a huge page (2 MiB)."""
    if nbytes <= _JOB:
        return np.empty(nbytes, np.uint8)
    return _within(np.empty(nbytes + _JOB, np.uint8), nbytes)


def _within(room: np.ndarray, nbytes: int) -> np.ndarray:
    """So many bytes of a room, which has `_JOB` more, from the start of a huge page on."""
    # Each job's part is in such a page of its own: one that two parts share is touched by both
    # threads, or is split into small ones. Not a view of the room, to which every view of the view
    # would refer.
    return np.frombuffer(room.data, np.uint8, nbytes, -room.ctypes.data % _JOB)


class BufferPool:
    """Memory for large arrays. Memory that no array uses any more is reused.

    The kernel zeroes every fresh page before it is written: without reuse a record of stages takes
    eight times as long (``benchmarks.store``). There is no lock, because the garbage collector may
    release memory at any moment. Each operation of a deque is atomic.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._free: deque[np.ndarray] = deque()

    def take(self, nbytes: int) -> np.ndarray:
        """An array of `nbytes` uninitialised bytes that begins with a huge page."""
        room = self._find(nbytes + _JOB)
        lent = _within(room, nbytes)
        weakref.finalize(lent, self._release, room).atexit = False
        return lent

    def _find(self, nbytes: int) -> np.ndarray:
        for _ in range(len(self._free)):
            try:
                room = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if nbytes <= len(room) <= nbytes + nbytes // 8:
                return room
            self._free.append(room)
        return np.empty(nbytes, np.uint8)

    def _release(self, room: np.ndarray) -> None:
        self._free.append(room)
        while sum(map(len, tuple(self._free))) > self._kept:
            self._free.popleft()

    def clear(self) -> None:
        """Return the released memory to the system."""
        self._free.clear()


def gathered(data: np.ndarray, spans: np.ndarray, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
    """Copy what spans, int64 [B, 2], of the first dimension of contiguous `data` hold.

    They may be many and short, so what is copied are the blocks that they touch: between two in the
    copy there may be items that belong to neither. Returns the copy, and where in it they are.
    """
    if not data.size:
        return data, spans
    items = data.reshape(len(data), -1)
    size = max(1, _BLOCK // items[0].nbytes)
    n, width = len(items) // size, size * items.shape[1]
    first = spans[:, 0] // size
    counts = -(-spans[:, 1] // size) - first
    starts = np.cumsum(counts) - counts
    wanted = np.repeat(first - starts, counts) + np.arange(counts.sum())
    copy = memory(len(wanted) * width * data.itemsize).view(data.dtype).reshape(-1, width)
    blocks, rest = items[: n * size].reshape(n, width), items[n * size :].reshape(-1)

    def take(start: int) -> None:
        some = slice(start, start + step)
        # Without a mode numpy copies twice.
        np.take(blocks, wanted[some], axis=0, out=copy[some], mode="clip")

    step = max(1, _JOB // (width * data.itemsize))
    if n:
        share(take, range(0, len(wanted), step))
    copy[wanted == n, : len(rest)] = rest
    spans = spans + ((starts - first) * size)[:, None]
    return copy.reshape(-1, *data.shape[1:])[: spans.max(initial=0)], spans


def share(function: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """Map `function` over `jobs` in this thread and, if they are many, in a second one.

    The results are in the order of the jobs. The thread is started for the call: kept ones do not
    survive a fork, and the interpreter's pools refuse work while it shuts down, when a last dump
    may still have to be written.
    """
    if len(jobs) < 3 or (os.cpu_count() or 1) == 1:
        return [function(job) for job in jobs]
    results, failures = dict[int, R](), list[BaseException]()
    # One thread starts at the front, one at the back. Neighbours share a huge page, and two threads
    # that touch a fresh one at the same time make the kernel zero it twice.
    todo = deque(enumerate(jobs))

    def work(take: Callable[[], tuple[int, T]]) -> None:
        try:
            while True:
                try:
                    number, job = take()
                except IndexError:  # the threads have met
                    return
                results[number] = function(job)
        except BaseException as error:
            failures.append(error)

    helper = threading.Thread(target=work, args=[todo.pop], name="rlskip-store", daemon=True)
    with contextlib.suppress(RuntimeError):  # the system has no thread left
        helper.start()
    work(todo.popleft)
    if helper.ident is not None:
        helper.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(jobs))]
