"""What makes a dump durable: the order of writes, syncs and renames, as it was observed."""

from __future__ import annotations

import os
from pathlib import Path

from rlskip.store import StepStore
from tests.faulty_files import FaultyFiles, FileOperation


def _order(operations: list[FileOperation], *names: str) -> list[str]:
    return [f"{o.name} {o.path}" for o in operations if o.name in names and "job-" not in o.path]


def test_a_dump_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "dumps" / "run")
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


def test_a_dump_is_removed_by_a_rename(tmp_path: Path) -> None:
    store = StepStore(tmp_path, keep_last=1)
    store.save(1, "x")
    with FaultyFiles(tmp_path) as seen:
        store.save(2, "y")
    first = next(
        o
        for o in seen.operations
        if o.path.startswith("1") and o.name in ("rename", "unlink", "rmdir")
    )
    assert first.name == "rename"
    assert str(first.other).startswith(".work/removed-1~")
