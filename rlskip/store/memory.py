"""Memory for large arrays that are loaded: that of rollouts which were let go, before fresh.

Much of a load into fresh memory is the kernel's, which zeroes every page before it is written.
A training loop drops one step's rollouts before it loads the next one's, of about their size.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from rlskip.store.pieces import PIECE

KEPT = 256 << 20
"""Bytes at most that wait to be used again."""


class _Owner:
    """What arrays and tensors hold on to while they use `room`."""

    def __init__(self, room: np.ndarray, nbytes: int) -> None:
        # Each piece lies in a huge page (2 MiB) of its own: one that two pieces share is met by
        # both threads, or falls apart into small ones.
        start = room.ctypes.data + -room.ctypes.data % PIECE
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (start, False),
        }


class Memory:
    """Hands out memory, and takes back what no array uses any more.

    Without a lock, for the garbage collector may give something back at any moment; a deque's
    own steps are atomic.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._free: deque[np.ndarray] = deque()

    def take(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of any content, which begin with a huge page, for one array."""
        room = self._find(nbytes + PIECE)
        if room is None:
            room = np.empty(nbytes + PIECE, np.uint8)
        owner = _Owner(room, nbytes)
        weakref.finalize(owner, self._give_back, room).atexit = False
        return np.asarray(owner)

    def _find(self, nbytes: int) -> np.ndarray | None:
        for _ in range(len(self._free)):
            try:
                room = self._free.popleft()
            except IndexError:  # another thread found it
                break
            if nbytes <= len(room) <= nbytes + nbytes // 8:
                return room
            self._free.append(room)
        return None

    def _give_back(self, room: np.ndarray) -> None:
        self._free.append(room)
        while sum(map(len, tuple(self._free))) > self._kept:
            self._free.popleft()

    def clear(self) -> None:
        """Give back to the system what waits to be used again."""
        self._free.clear()


memory = Memory()
