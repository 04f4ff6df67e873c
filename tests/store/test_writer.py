"""The background writer: copies at once, writes in order, reports what went wrong."""

from __future__ import annotations

import logging
import os
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip._copies import BufferPool
from rlskip.store import DumpMeta, StepStore, UnsupportedTypeError, WriterTimeoutError
from rlskip.store.commit import NewDump
from rlskip.store.writer import Writer


@pytest.fixture
def gate(store: StepStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is not set the store writes nothing."""
    event = threading.Event()
    commit = store.write

    def wait_and_commit(dump: NewDump) -> DumpMeta:
        assert event.wait(30)
        return commit(dump)

    monkeypatch.setattr(store, "write", wait_and_commit)
    return event


def test_what_is_saved_is_what_was_given(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store)
    ids, noise = torch.arange(300_000), torch.rand(1000)
    turns = [[1, 2], [3] * 9]
    pixels = bytearray(b"abc")
    before = (ids.clone(), noise.clone(), [[1, 2], [3] * 9], bytearray(b"abc"))
    writer.save(1, (ids, noise, turns, pixels))
    ids.zero_()
    noise.zero_()
    turns[0].append(99)
    pixels[0] = 0
    gate.set()
    writer.flush()
    loaded = store.load(1)
    assert torch.equal(loaded[0], before[0])
    assert torch.equal(loaded[1], before[1])
    assert loaded[2:] == before[2:]


def test_order_is_kept_and_outcomes_are_reported(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store)
    told: list[Any] = []
    for step in (5, 3, 4):
        writer.save(step, step, done=lambda meta, error: told.append((meta.step, error)))
    assert told == []
    gate.set()
    writer.flush()
    assert told == [(5, None), (3, None), (4, None)]
    assert store.steps() == [3, 4, 5]


def test_memory_in_flight_is_bounded(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store, max_bytes=1 << 20, timeout_s=0.2)
    half = torch.randint(0, 2**62, (1 << 16,))  # 512 KiB
    writer.save(1, half)
    writer.save(2, half)
    with pytest.raises(WriterTimeoutError, match="1, 2"):
        writer.save(3, half)
    gate.set()
    writer.timeout_s = 60
    writer.save(4, half)
    writer.save(5, torch.cat([half] * 5))  # more than all there is room for: alone
    writer.flush()
    assert store.steps() == [1, 2, 4, 5]


def test_what_is_saved_later_is_made_by_the_thread_and_counts_until_it_is_written(
    store: StepStore, gate: threading.Event
) -> None:
    writer = Writer(store, max_bytes=100, timeout_s=0.2)
    makers: list[threading.Thread] = []
    told: list[Any] = []

    def make(step: int) -> int:
        makers.append(threading.current_thread())
        return 1 // step

    for step in (0, 1):
        writer.save_later(
            step, lambda step=step: make(step), 50, done=lambda *told_of: told.append(told_of)
        )
    with pytest.raises(WriterTimeoutError, match="1"):
        writer.save_later(2, lambda: make(2), 60)
    gate.set()
    writer.flush()
    assert store.steps() == [1]
    assert [maker.name for maker in makers] == ["rlskip-writer"] * 2
    (meta, error), (second, none) = told
    assert (meta, type(error), second.step, none) == (None, ZeroDivisionError, 1, None)


@pytest.mark.parametrize("wait", [Writer.wait, Writer.flush])
def test_no_wait_lasts_forever(
    store: StepStore, gate: threading.Event, wait: Callable[[Writer], None]
) -> None:
    writer = Writer(store, timeout_s=0.1)
    writer.save(7, "x")
    with pytest.raises(WriterTimeoutError, match="7") as caught:
        wait(writer)
    assert str(store.directory) in str(caught.value)
    gate.set()


def test_what_cannot_be_kept_is_refused_at_once(store: StepStore) -> None:
    writer = Writer(store)
    with pytest.raises(UnsupportedTypeError):
        writer.save(1, object())
    writer.flush()
    assert store.steps() == []


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
def test_an_error_is_a_warning_and_the_next_dump_is_written(
    raised: type[BaseException],
    store: StepStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = Writer(store)
    commit = store.write

    def fail_first(dump: NewDump) -> DumpMeta:
        if dump.place.step == 1:
            raise OSError(28, "No space left on device")
        return commit(dump)

    monkeypatch.setattr(store, "write", fail_first)
    outcomes: list[Any] = []

    def done(meta: DumpMeta | None, error: BaseException | None) -> None:
        outcomes.append((meta, error))
        raise raised("of the caller's own")

    with caplog.at_level(logging.WARNING):
        writer.save(1, "x", done=done)
        assert "NOT dumped" not in caplog.text, "who waits for the outcome says it"
        writer.save(1, "x")
        writer.save(2, "y")
        writer.flush()
    assert "step 1 is NOT dumped: [Errno 28] No space left" in caplog.text
    ((meta, error),) = outcomes
    assert meta is None
    assert isinstance(error, OSError)
    assert store.steps() == [2]


def test_a_copy_that_fails_gives_its_room_back(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    large = torch.rand(1 << 20)
    writer = Writer(store, max_bytes=1, timeout_s=5)
    with monkeypatch.context() as patched:
        patched.setattr(BufferPool, "take", no_memory)
        with pytest.raises(MemoryError):
            writer.save(1, large)
    writer.save(2, large)
    writer.flush()
    assert store.steps() == [2]


def test_many_threads_may_save(store: StepStore) -> None:
    writer = Writer(store, max_bytes=1 << 16)
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda step: writer.save(step, torch.full((3000,), step)), range(20)))
    writer.flush()
    assert store.steps() == list(range(20))
    assert all((store.load(step) == step).all() for step in range(20))


def test_an_interpreter_that_ends_writes_everything_first(python: Any, tmp_path: Path) -> None:
    script = """
        import sys, torch
        from rlskip.store import StepStore
        from rlskip.store.writer import Writer
        writer = Writer(StepStore(sys.argv[1]))
        for step in range(5):
            writer.save(step, torch.rand(2_000_000))
    """
    done = python.run("-c", textwrap.dedent(script), tmp_path)
    assert done.returncode == 0, done.stderr
    assert StepStore(tmp_path).steps() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_empty(store: StepStore, gate: threading.Event) -> None:
    writer = Writer(store)
    writer.save(1, "the parent's")
    child = os.fork()
    if not child:
        code = 1
        try:
            gate.set()
            assert writer.save(2, "the child's") is None
            writer.flush()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.steps() == [2]
    gate.set()
    writer.flush()
    assert store.steps() == [1, 2]
