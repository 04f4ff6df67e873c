"""The end of the process: it waits for nothing that hangs, and nothing of ours runs then."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

HANGS = """
    import sys, threading, torch
    from rlskip.dispatch import LocalPool, RolloutDispatcher, timeouts
    from rlskip.queue import MemoryQueue

    timeouts.WRITE_S, timeouts.CLOSE_S, timeouts.EXIT_S = 0.2, 0.5, 0.5
    what, closing = sys.argv[1:]
    forever = threading.Event()

    def worker(prompt, sampling, session):
        if what == "worker":
            forever.wait()
        return {"responses": torch.ones(3)}

    class Queue(MemoryQueue):
        def put(self, *args, **more):
            if what == "queue":
                forever.wait()
            return super().put(*args, **more)

    dispatcher = RolloutDispatcher(
        LocalPool(worker, 2), Queue(), {"dispatch": {"session_timeout_s": 0.2, "max_retries": 0}}
    )
    batch = dispatcher.submit([{"uid": "a"}], step=1)
    if closing == "close":
        dispatcher.close()
    print("last line", flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("closing", ["close", "none"])
@pytest.mark.parametrize("what", ["worker", "queue"])
def test_a_process_ends_whatever_hangs(python, what, closing):
    process = python.start("-c", textwrap.dedent(HANGS), what, closing, env=ENV)
    assert process.stdout.readline() == "last line\n"
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "never awaited" not in errors


# What is registered first is called last: after rlskip has let its calls end.
FREES = """
    import atexit, os, threading, time

    freed = 0

    def nothing_is_freed_any_more():
        before = freed
        time.sleep(0.3)
        if freed != before:
            print("still running", flush=True)
            os._exit(3)

    atexit.register(nothing_is_freed_any_more)

    from rlskip.dispatch import LocalPool, RolloutDispatcher, timeouts
    from rlskip.queue import MemoryQueue

    timeouts.EXIT_S = 60

    class KeepsNoRows(MemoryQueue):
        def put(self, keys, partition, fields=None, tags=None):
            return super().put(keys, partition, None, tags)

    class Row:
        def __del__(self):
            global freed
            time.sleep(0.001)
            freed += 1

    begun = threading.Event()

    def worker(prompt, sampling, session):
        if prompt["uid"] == "v":  # it is under way when the process ends
            begun.set()
            for _ in range(100):
                Row()
        return [{"odd": Row()} for _ in range(200)]

    dispatcher = RolloutDispatcher(LocalPool(worker, 1), KeepsNoRows())
    assert dispatcher.submit([{"uid": "u"}], step=1).result().succeeded == 1
    under_way = dispatcher.submit([{"uid": "v"}], step=2)
    begun.wait()
"""


@pytest.mark.timeout(200)
def test_nothing_is_freed_while_the_interpreter_ends(python):
    done = python.run("-c", textwrap.dedent(FREES), env=ENV)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
