"""The background writer: copies at once, into memory used again, and writes in order."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlskip._copies import BufferPool
from rlskip.store import DumpMeta, StepStore, UnsupportedTypeError, WriterTimeoutError
from rlskip.store.dump import NewDump
from rlskip.store.writer import Writer
from tests.clock import in_a_fork


@pytest.fixture
def gate(store: StepStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set the store writes nothing."""
    event = threading.Event()
    commit = store.write

    def wait_and_commit(dump: NewDump) -> tuple[DumpMeta, bool]:
        assert event.wait(30)
        return commit(dump)

    monkeypatch.setattr(store, "write", wait_and_commit)
    return event


def test_what_is_saved_is_what_was_given(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store)
    ids, noise, scores = torch.arange(300_000), torch.rand(1000), np.arange(3)
    turns, pixels = [[1, 2], [3] * 9], bytearray(b"abc")
    before = ids.clone(), noise.clone()
    writer.save(1, (ids, noise, turns, pixels, scores))
    ids.zero_()
    noise.zero_()
    turns[0].append(99)
    pixels[0] = scores[0] = 9
    gate.set()
    writer.flush()
    loaded = store.load(1)
    assert all(map(torch.equal, loaded, before))
    assert (*loaded[2:4], [*loaded[4]]) == ([[1, 2], [3] * 9], bytearray(b"abc"), [0, 1, 2])


def test_memory_in_flight_is_bounded(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store, max_bytes=1 << 20, timeout_s=0.2)
    half = torch.randint(0, 2**62, (1 << 16,))  # 512 KiB
    writer.save(1, half)
    writer.save(2, half)
    for wait in (writer.wait, writer.flush, lambda: writer.save(3, half)):
        with pytest.raises(WriterTimeoutError, match="1, 2") as caught:
            wait()
        assert str(store.directory) in str(caught.value)
    gate.set()
    writer.timeout_s = 60
    writer.save(4, half)
    writer.save(5, torch.cat([half] * 5))  # more than all there is room for: alone
    writer.flush()
    assert store.steps() == [1, 2, 4, 5]


def test_a_job_of_the_thread_counts_until_it_is_done(
    store: StepStore, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(store, max_bytes=100, timeout_s=0.2)
    makers: list[tuple[int, str]] = []

    def job(step: int) -> None:
        makers.append((step, threading.current_thread().name))
        store.save(step, 1 // step)

    for step in (0, 1):
        writer.run(step, 50, lambda step=step: job(step))
    with pytest.raises(WriterTimeoutError, match="1"):
        writer.run(2, 60, lambda: job(2))
    gate.set()
    writer.flush()
    assert store.steps() == [1]
    assert makers == [(0, "rlskip-writer"), (1, "rlskip-writer")], "in order"
    assert "step 0 is NOT dumped: " in caplog.text


@pytest.mark.parametrize("raised", [SystemExit(), OSError(28, "No space left")])
def test_an_error_is_a_warning_and_the_next_dump_is_written(
    raised: BaseException, store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(store)

    def fail(dump: NewDump) -> None:
        raise raised

    with caplog.at_level(logging.WARNING):
        writer.save(1, "x", write=fail)
        writer.save(2, "y")
        writer.flush()
    assert f"step 1 is NOT dumped: {raised}" in caplog.text
    assert store.steps() == [2]


def test_what_cannot_be_kept_or_copied_takes_no_room(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    large = torch.rand(1 << 20)
    writer = Writer(store, max_bytes=1, timeout_s=5)
    with pytest.raises(UnsupportedTypeError):
        writer.save(0, object())
    with monkeypatch.context() as patched:
        patched.setattr(BufferPool, "take", no_memory)
        with pytest.raises(MemoryError):
            writer.save(1, large)
    writer.save(2, large)
    writer.flush()
    assert store.steps() == [2]


def test_many_threads_may_save(store: StepStore) -> None:
    """Into memory that is used again, and by one of them at a time."""
    writer = Writer(store, max_bytes=1 << 24)
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda step: writer.save(step, torch.full((1 << 19,), step)), range(20)))
    writer.flush()
    assert store.steps() == list(range(20))
    assert all((store.load(step) == step).all() for step in range(20))


def test_a_forked_child_starts_empty(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store)
    writer.save(1, "the parent's")

    def child() -> None:
        gate.set()
        assert writer.save(2, "the child's") is None
        writer.flush()

    in_a_fork(child)
    assert store.steps() == [2]
    gate.set()
    writer.flush()
    assert store.steps() == [1, 2]
