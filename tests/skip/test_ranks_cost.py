"""What it costs ranks to agree: exchanges, numbers and files, for 2 to 1 024 simulated ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlskip.skip.call import Call, Stage
from rlskip.skip.call_role import CallRole
from rlskip.store import CorruptDumpError, StepStore
from tests.faulty_files import FaultyFiles
from tests.skip.trainers import Hub, on_ranks


def stage(prompts: list[int]) -> list[int]:
    return prompts


class Job:
    """The ranks of a job, one thread each: the role on every rank, with a store of its own."""

    def __init__(self, hub: Any, folder: Path, **skip: Any) -> None:
        self.hub = hub
        self.roles = on_ranks(hub, dump_dir=str(folder), **skip)
        self._threads = ThreadPoolExecutor(hub.world)

    def each(self, act: Callable[[CallRole], Any]) -> list[Any]:
        return list(self._threads.map(act, self.roles))

    def call(self, step: int) -> tuple[list[Any], list[int]]:
        """What each rank gets for a call of `step`, and the exchanges that took."""
        before = len(self.hub.rounds)

        def rank(role: CallRole) -> Any:
            role.begin_visit()
            call = Call(Stage(stage, "rollout"), ([step],), {}, step)
            with call.cleanup:
                try:
                    if role.find(call):
                        return role.replay(call)
                except CorruptDumpError:
                    pass
                role.keep(call, f"{step} of rank {role.ranks.group.rank}")
            return "generated"

        return self.each(rank), self.hub.rounds[before:]


WORLDS = [
    2,
    16,
    pytest.param(128, marks=pytest.mark.slow),
    # A thousand threads and one interpreter lock: many minutes on two cores.
    pytest.param(1024, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("world", WORLDS)
def test_a_hit_takes_one_exchange_whatever_the_number_of_ranks(tmp_path: Path, world: int) -> None:
    job = Job(Hub(world), tmp_path, background_write=False)
    got, exchanges = job.call(1)
    assert got == ["generated"] * world
    assert len(exchanges) == 4
    for _ in range(2):
        got, exchanges = job.call(1)
        assert got == [f"1 of rank {rank}" for rank in range(world)]
        assert exchanges == [10]


@pytest.mark.parametrize("seen", ["by its own rank", "by another rank meanwhile"])
def test_a_damaged_shard_is_a_miss_for_all_after_one_exchange(tmp_path: Path, seen: str) -> None:
    job = Job(Hub(3), tmp_path, background_write=False)
    job.call(1)
    (shard,) = tmp_path.glob("*/*/1/gen_batch.r1-of-3.dp")
    meta = shard.with_name("meta.r1-of-3.json")
    assert meta.is_file()
    data = shard.read_bytes()
    shard.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    all_looked = threading.Barrier(3, timeout=60)
    for role in job.roles:
        store: Any = role.store
        if seen == "by its own rank":
            store.load_with_meta = after(all_looked.wait, store.load_with_meta)
    if seen == "by another rank meanwhile":
        store.calls = after(lambda: wait_until_gone(shard, meta), store.calls)
    got, exchanges = job.call(1)
    assert got == ["generated"] * 3
    assert len(exchanges) == (2 if seen == "by its own rank" else 4)
    for role in job.roles:
        role.dumps.__dict__.pop("store")
    assert len(list(tmp_path.glob("*/*/1/gen_batch.r*-of-3.dp"))) == 3, "in the place of the other"
    assert job.call(1) == ([f"1 of rank {rank}" for rank in range(3)], [10])


def after(wait: Callable[[], Any], act: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        wait()
        return act(*args, **kwargs)

    return both


def wait_until_gone(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while any(file.exists() for file in files):
        assert time.monotonic() < deadline, f"none of the ranks has moved {files} away"
        time.sleep(0.01)


def test_a_rank_reads_as_many_files_of_2_ranks_as_of_64(tmp_path: Path) -> None:
    operations = []
    for world in (2, 64):
        folder = tmp_path / f"{world}"
        stores = [StepStore(folder, rank=rank, world_size=world) for rank in range(world)]
        for store in stores:
            store.save(1, {"rank": store.rank}, info={"generation": "abc"})
        with FaultyFiles(folder) as files:
            assert stores[1].read_meta(1) is not None
        operations.append(len(files.operations))
    assert operations[0] == operations[1]


def test_shards_of_two_calls_are_seen_by_some_rank_wherever_the_writers_were_killed(
    tmp_path: Path,
) -> None:
    world = 5
    stores = [StepStore(tmp_path, rank=rank, world_size=world) for rank in range(world)]
    for store in stores:
        store.save(1, 1, info={"generation": "a"})
    for store in stores[:-1]:
        store.save(1, 2, info={"generation": "b"})
        assert not all(store.read_meta(1) for store in stores)
        assert all(store.steps() == [] for store in stores)
    stores[-1].save(1, 2, info={"generation": "b"})
    assert all(store.read_meta(1) for store in stores)
