"""Crashes, full disks and rivals: a step is complete or absent, and nothing piles up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs.alive import WORK
from rlskip.store import StepStore

# -- rivals ------------------------------------------------------------------------------


def test_a_dump_that_takes_the_place_of_a_bad_one_is_not_quarantined(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has the name of a dump is judged; before it is moved, another process replaces it."""
    store.directory.joinpath("1").mkdir(parents=True)
    (store.directory / "1" / "notes").write_text("no dump")
    real, rivals = os.rename, [StepStore(store.directory)]

    def rename(source: Any, target: Any, **at: int) -> None:
        if rivals and ".bad-" in str(target):
            rivals.pop().save(1, "the other's")
        real(source, target, **at)

    monkeypatch.setattr(os, "rename", rename)
    assert store.save(1, "late") == store.read_meta(1)
    assert store.load(1) == "the other's"
    (kept,) = store.directory.glob("1.bad-*")
    assert [path.name for path in kept.iterdir()] == ["notes"]


def test_between_the_renames_that_replace_a_shard_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed there leaves no mixture; a rival that comes there is replaced in turn."""
    real, seen = os.rename, list[Any]()

    def rename(source: Any, target: Any, **at: int) -> None:
        real(source, target, **at)
        if "removed-1.r0-of-2" in str(target) and not seen:
            rival = StepStore(tmp_path, world_size=2)
            seen.extend([rival.read_meta(1), rival.save(1, "a rival's")])

    store = StepStore(tmp_path, world_size=2)
    store.save(1, "old")
    monkeypatch.setattr(os, "rename", rename)
    meta = store.save(1, "new")
    assert seen[0] is None
    assert seen[1] != meta == store.read_meta(1)
    assert store.load(1) == "new"
    assert not list((tmp_path / WORK).glob("*~*"))


# -- memory ------------------------------------------------------------------------------

_MEMORY = """
    import json, os, resource, sys, threading, time
    import torch
    from rlskip.store import StepStore
    from rlskip.store.writer import Writer

    os.fsync = lambda handle: None  # a gigabyte need not be on the disk
    def now():  # without mapped files: the kernel drops and rereads those as it likes
        _, resident, shared, *_ = map(int, open("/proc/self/statm").read().split())
        return (resident - shared) * resource.getpagesize()

    def peak(function):
        before, top, stop = now(), [0], threading.Event()
        def watch():
            while not stop.wait(0.001):
                top[0] = max(top[0], now())
        watcher = threading.Thread(target=watch)
        watcher.start()
        value = function()
        stop.set()
        watcher.join()
        return max(0, top[0] - before), value

    store = StepStore(sys.argv[1])
    size = 256 << 20
    rollouts = {f"f{i}": torch.randint(0, 2**62, (size // 64,)) for i in range(8)}
    store.save(0, torch.zeros(3 << 20))  # what is allocated once and for all
    store.load(0)
    save, _ = peak(lambda: store.save(1, rollouts))
    writer = Writer(store)
    def background():
        writer.save(2, rollouts)
        writer.flush()
    behind, _ = peak(background)
    del rollouts
    field, _ = peak(lambda: store.load(1, fields=["f3"]))  # before there is freed memory to reuse
    load, _ = peak(lambda: store.load(1))
    print(json.dumps({"size": size, "save": save, "behind": behind, "load": load, "field": field}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_is_bounded(python: Any, tmp_path: Path) -> None:
    """Ids that cannot be narrowed or compressed: the worst case.

    A second copy of the rollouts would take 256 MiB. A save's buffers take 25 to 55, depending on
    how many threads' happen to be full at once, so half a copy tells the two apart.
    """
    used, _ = python.json(_MEMORY, tmp_path / "run")
    assert used["save"] <= used["size"] // 2
    assert used["behind"] <= used["size"] + used["size"] // 2
    buffer = 64 << 20
    assert used["load"] <= used["size"] + buffer
    assert used["field"] <= used["size"] // 8 + buffer
