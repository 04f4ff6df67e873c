"""How a dump is published: the order of its operations, rivals, and memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs.alive import WORK
from rlskip.store import CorruptDumpError, StepStore
from tests.faulty_files import FaultyFiles, FileOperation


def _order(operations: list[FileOperation], *names: str) -> list[str]:
    return [f"{o.name} {o.path}" for o in operations if o.name in names and "job-" not in o.path]


def test_a_dump_is_on_the_disk_before_it_gets_its_name_and_goes_by_a_rename(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "dumps" / "run", keep_last=1)
    with FaultyFiles(tmp_path) as seen:
        store.save(3, list(range(100)), call="part-1")
    staging = next(o.path for o in seen.operations if o.path.endswith("gen_batch.dp"))
    staging = os.path.dirname(staging)
    assert _order(seen.operations, "mkdir", "write", "fsync", "rename") == [
        "mkdir dumps",
        "fsync .",
        "mkdir dumps/run",
        "fsync dumps",
        "mkdir dumps/run/.work",
        "fsync dumps/run",
        f"mkdir {staging}",
        f"write {staging}/gen_batch.dp",
        f"fsync {staging}/gen_batch.dp",
        f"write {staging}/meta.json",
        f"fsync {staging}/meta.json",
        f"fsync {staging}",
        f"rename {staging}",
        "fsync dumps/run",
        "write dumps/run/dumps.index",
    ]
    with FaultyFiles(tmp_path) as seen:
        store.save(4, "y")
    changes = ("rename", "unlink", "rmdir")
    gone = "dumps/run/3.part-1"
    first = next(o for o in seen.operations if o.path.startswith(gone) and o.name in changes)
    assert (first.name, first.path) == ("rename", gone)
    assert str(first.other).startswith("dumps/run/.work/removed-3.part-1~")


def test_a_shard_is_gone_before_another_has_its_name(tmp_path: Path) -> None:
    store = StepStore(tmp_path, world_size=2)
    store.save(3, "old")
    with FaultyFiles(tmp_path) as seen:
        store.save(3, "new")
    *_, refused, gone, named = [o for o in seen.operations if o.name == "rename"]
    assert (refused.path, refused.other) == (named.path, named.other) == (named.path, "3.r0-of-2")
    assert (gone.path, str(gone.other)[:23]) == ("3.r0-of-2", ".work/removed-3.r0-of-2")
    syncs = [o.path for o in seen.operations if o.name == "fsync"]
    ours = [path for path in syncs if path.startswith(named.path)]
    assert ours[:2] == [f"{named.path}/gen_batch.dp", f"{named.path}/meta.json"]
    assert ours[2] == named.path
    assert syncs[-1] == "."


@pytest.mark.parametrize(("finds", "before"), [("save", "rename"), ("load", "stat")])
def test_a_dump_that_takes_the_place_of_a_bad_one_is_not_quarantined(
    finds: str, before: str, store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has the name of a dump is judged; before it is moved, another process replaces it."""
    store.directory.joinpath("1").mkdir(parents=True)
    (store.directory / "1" / "notes").write_text("no dump")
    real, rivals = getattr(os, before), [StepStore(store.directory)]

    def operation(name: Any, *others: Any, **at: Any) -> Any:
        if rivals and name == "1":
            rivals.pop().save(1, "the other's")
        return real(name, *others, **at)

    monkeypatch.setattr(os, before, operation)
    if finds == "save":
        assert store.save(1, "late") == store.read_meta(1)
    else:
        with pytest.raises(CorruptDumpError):
            store.load(1)
    assert not rivals
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
    late = store.prepare(1, "late")
    assert store.write(late, over=seen[1]) == (meta, False), "it was to replace another one"
    assert not list((tmp_path / WORK).glob("*~*"))


_MEMORY = """
    import json, os, resource, sys, threading
    import torch
    from rlskip.store import StepStore
    from rlskip.store.writer import Writer

    def now():  # without mapped files: the kernel drops and rereads those as it likes
        _, resident, shared, *_ = map(int, open("/proc/self/statm").read().split())
        return (resident - shared) * resource.getpagesize()

    def peak(function, *arguments, **options):
        before, top, stop = now(), [0], threading.Event()
        def watch():
            while not stop.wait(0.001):
                top[0] = max(top[0], now())
        watcher = threading.Thread(target=watch)
        watcher.start()
        value = function(*arguments, **options)
        stop.set()
        watcher.join()
        return max(0, top[0] - before)

    store = StepStore(sys.argv[1])
    size = 256 << 20
    rollouts = {f"f{i}": torch.randint(0, 2**62, (size // 64,)) for i in range(8)}
    store.save(0, torch.zeros(3 << 20))  # what is allocated once and for all
    store.load(0)
    writer = Writer(store)
    used = {"size": size, "save": peak(store.save, 1, rollouts)}
    used["behind"] = peak(lambda: (writer.save(2, rollouts), writer.flush()))
    del rollouts
    used["field"] = peak(store.load, 1, fields=["f3"])  # before there is freed memory to reuse
    used["load"] = peak(store.load, 1)
    print(json.dumps(used))
"""


@pytest.mark.slow
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
