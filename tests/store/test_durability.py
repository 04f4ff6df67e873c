"""What makes a dump durable: the order of writes, syncs and renames, as it was observed."""

from __future__ import annotations

import os
from pathlib import Path

from rlskip.store import StepStore
from tests.faulty_files import FaultyFiles, FileOperation


def _order(operations: list[FileOperation], *names: str) -> list[str]:
    return [f"{o.name} {o.path}" for o in operations if o.name in names]


def test_a_dump_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    store = StepStore(tmp_path / "dumps" / "run")
    with FaultyFiles(tmp_path) as seen:
        store.save(3, list(range(100)), part=1)
    staging = next(o.path for o in seen.operations if o.path.endswith("gen_batch.dp"))
    staging = os.path.dirname(staging)
    assert _order(seen.operations, "mkdir", "write", "fsync", "rename") == [
        "mkdir dumps",
        "fsync .",
        "mkdir dumps/run",
        "fsync dumps",
        "mkdir dumps/run/.work",
        f"mkdir {staging}",
        f"write {staging}/gen_batch.dp",
        f"fsync {staging}/gen_batch.dp",
        f"write {staging}/meta.json",
        f"fsync {staging}/meta.json",
        f"fsync {staging}",
        "mkdir dumps/run/3",
        "fsync dumps/run",
        f"rename {staging}",
        "fsync dumps/run/3",
    ]


def test_a_shard_is_there_once_its_meta_is(tmp_path: Path) -> None:
    store = StepStore(tmp_path, world_size=2)
    store.save(3, "old")
    with FaultyFiles(tmp_path) as seen:
        store.save(3, "new")
    done = [
        (o.name, o.path, o.other)
        for o in seen.operations
        if o.name in ("unlink", "replace", "fsync") and "clock" not in o.path
    ]
    staging = os.path.dirname(done[0][1])
    meta, dump = "meta.r0-of-2.json", "gen_batch.r0-of-2.dp"
    assert done[:6] == [
        ("fsync", f"{staging}/{dump}", None),
        ("fsync", f"{staging}/{meta}", None),
        ("unlink", f"3/{meta}", None),
        ("replace", f"{staging}/{dump}", f"3/{dump}"),
        ("replace", f"{staging}/{meta}", f"3/{meta}"),
        ("fsync", "3", None),
    ]


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
    assert str(first.other).startswith(".work/removed-1-")
