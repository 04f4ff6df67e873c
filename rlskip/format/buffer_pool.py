"""Memory for large arrays that are loaded, taken from rollouts that were released before.

Much of the time of a load into fresh memory is the kernel's, which zeroes every page before it is
written. A training loop releases one step's rollouts before it loads the next step's, which are of
about the same size.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from rlskip.format.chunks import CHUNK

KEPT = 256 << 20
"""The most bytes of released memory that are kept."""


class _Owner:
    """What arrays and tensors refer to while they use `room`."""

    def __init__(self, room: np.ndarray, nbytes: int) -> None:
        # Each chunk is in a huge page (2 MiB) of its own: a page that two chunks share is touched
        # by both threads, or is split into small ones.
        start = room.ctypes.data + -room.ctypes.data % CHUNK
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (start, False),
        }


class BufferPool:
    """Memory for arrays. Memory that no array uses any more is reused.

    There is no lock, because the garbage collector may release memory at any moment. Each
    operation of a deque is atomic.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._free: deque[np.ndarray] = deque()

    def take(self, nbytes: int) -> np.ndarray:
        """An array of `nbytes` uninitialised bytes that begins with a huge page."""
        room = self._find(nbytes + CHUNK)
        if room is None:
            room = np.empty(nbytes + CHUNK, np.uint8)
        owner = _Owner(room, nbytes)
        weakref.finalize(owner, self._release, room).atexit = False
        return np.asarray(owner)

    def _find(self, nbytes: int) -> np.ndarray | None:
        for _ in range(len(self._free)):
            try:
                room = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if nbytes <= len(room) <= nbytes + nbytes // 8:
                return room
            self._free.append(room)
        return None

    def _release(self, room: np.ndarray) -> None:
        self._free.append(room)
        while sum(map(len, tuple(self._free))) > self._kept:
            self._free.popleft()

    def clear(self) -> None:
        """Return the released memory to the system."""
        self._free.clear()


pool = BufferPool()
