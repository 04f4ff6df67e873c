"""Memory that copies use again: never while anybody has it, and only so much of it."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip._copies import BufferPool

CHUNK = 1 << 21  # a huge page
SIZE = CHUNK // 4


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_only_released_memory_is_reused() -> None:
    buffers = BufferPool(1 << 28)
    first = buffers.take(SIZE)
    where = address(first)
    assert where % CHUNK == 0
    assert first.nbytes == SIZE
    second = buffers.take(SIZE)
    assert address(second) != where
    del first
    assert address(buffers.take(CHUNK // 100)) != where  # too little for so much
    assert address(buffers.take(2 * SIZE)) != where
    assert address(buffers.take(SIZE - SIZE // 16)) == where


def test_released_memory_is_bounded() -> None:
    buffers = BufferPool(kept=3 * (SIZE + CHUNK))
    tracemalloc.start()
    try:
        arrays = [buffers.take(SIZE) for _ in range(10)]
        del arrays
        assert tracemalloc.get_traced_memory()[0] // (SIZE + CHUNK) == 3
        buffers.clear()
        assert tracemalloc.get_traced_memory()[0] < SIZE
    finally:
        tracemalloc.stop()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_two_living_arrays_share_memory(moves: list[tuple[bool, int]]) -> None:
    buffers, living = BufferPool(1 << 28), []
    for number, (drop, which) in enumerate(moves):
        if drop and living:
            living.pop(which % len(living))
        else:
            array = buffers.take(SIZE * (1 + which))
            array[::4096] = number
            living.append((number, array))
    for number, array in living:
        assert (array[::4096] == number).all()
