"""Several ranks, really: torch.distributed over gloo, 2 and 4 processes."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs.ranks import RankGroup
from rlskip.store import StepStore

_RANK = """
    import json, os, sys, time
    import torch, torch.distributed as dist
    from rlskip.jobs.ranks import RankGroup
    from rlskip.jobs.lease import SingleFlight
    from rlskip.store import CorruptDumpError, RankTimeoutError, StepStore
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = RankGroup(timeout_s=30)
    rank, world = ranks.rank, ranks.world_size
    store = StepStore(sys.argv[1], rank=rank, world_size=world)
    said = {}

    def look(step):
        return ranks.agree(store.read_meta(step) is not None, f"step {step}")

    said["empty"] = look(1)
    store.save(1, {"rank": rank})
    said["half"] = None
    if rank == world - 1:
        time.sleep(0.2)  # the others look while a shard is missing
    dist.barrier()
    said["complete"] = look(1)
    said["mine"] = store.load(1)["rank"]
    said["steps"] = store.steps()

    dist.barrier()
    if rank == 1:
        os.unlink(os.path.join(sys.argv[1], "1", f"gen_batch.r1-of-{world}.dp"))
    dist.barrier()
    said["one shard missing"] = look(1)
    said["steps then"] = store.steps()
    dist.barrier()
    store.save(1, {"rank": rank, "again": True})
    dist.barrier()
    said["again"] = look(1) and store.load(1)["again"]

    dist.barrier()
    if rank == 0:
        path = os.path.join(sys.argv[1], "1", f"gen_batch.r0-of-{world}.dp")
        data = bytearray(open(path, "rb").read())
        data[20] ^= 1
        open(path, "wb").write(data)
    dist.barrier()
    try:
        store.load(1)
        loaded = True
    except CorruptDumpError:
        loaded = False
    said["one shard corrupt"] = [loaded, ranks.agree(loaded)]
    dist.barrier()
    said["quarantined"] = look(1)

    flight = SingleFlight(store.directory, ranks, ttl_s=5, poll_s=0.02)
    lease = flight.enter(1, lambda: store.read_meta(1) is not None)
    dist.barrier()
    said["leases"] = sorted(os.listdir(os.path.join(sys.argv[1], ".leases")))
    dist.barrier()
    with lease:
        store.save(1, {"rank": rank, "again": 2})
    dist.barrier()
    said["then there"] = flight.enter(1, lambda: store.read_meta(1) is not None) is None
    said["word of rank 0"] = ranks.follow(7 + rank)

    late = RankGroup(timeout_s=1)
    if rank == 0:
        time.sleep(2.5)
        said["timeout"] = "rank 0 was the late one"
    else:
        try:
            late.agree(True, "step 9")
        except RankTimeoutError as error:
            said["timeout"] = str(error)
    print(json.dumps(said), flush=True)
    os._exit(0)  # the broken group must not be torn down politely
"""


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_on_hit_or_miss(world: int, python: Any, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code, folder = textwrap.dedent(_RANK), tmp_path / "run"
    ranks = [
        python.start("-c", code, folder, env=_environment(rank, world, port))
        for rank in range(world)
    ]
    said: list[dict[str, Any]] = []
    for process in ranks:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        said.append(json.loads(out.splitlines()[-1]))
    for rank, seen in enumerate(said):
        assert seen["empty"] is False
        assert seen["complete"] is True
        assert seen["mine"] == rank
        assert seen["steps"] == [1]
        assert seen["one shard missing"] is False
        assert seen["steps then"] == []
        assert seen["again"] is True
        assert seen["one shard corrupt"] == [rank != 0, False]
        assert seen["quarantined"] is False
        assert seen["leases"] == ["1"], "one lease for the job, not one per rank"
        assert seen["then there"] is True
        assert seen["word of rank 0"] == 7
        if rank:
            assert "waited up to 1 s" in seen["timeout"]
            assert "step 9" in seen["timeout"]
    shards = sorted(p.name for p in (tmp_path / "run" / "1").iterdir())
    assert shards == sorted(
        name
        for rank in range(world)
        for name in (f"gen_batch.r{rank}-of-{world}.dp", f"meta.r{rank}-of-{world}.json")
    )


def test_without_torch_distributed_one_is_rank_0_of_1() -> None:
    ranks = RankGroup()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.agree(True)
    assert not ranks.agree(False)
    assert ranks.follow(3) == 3


def test_shards_of_another_world_are_another_dump(tmp_path: Path) -> None:
    for rank in range(2):
        StepStore(tmp_path, rank=rank, world_size=2).save(1, rank)
    assert StepStore(tmp_path, rank=0, world_size=2).load(1) == 0
    assert StepStore(tmp_path).read_meta(1) is None
    assert StepStore(tmp_path, rank=0, world_size=4).read_meta(1) is None


def test_a_shard_in_anothers_place_is_not_loaded(tmp_path: Path) -> None:
    stores = [StepStore(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for store in stores:
        store.save(1, store.rank)
    place = tmp_path / "1"
    for kind in ("gen_batch.{}.dp", "meta.{}.json"):
        (place / kind.format("r1-of-2")).write_bytes((place / kind.format("r0-of-2")).read_bytes())
    assert stores[1].read_meta(1) is None
    assert stores[0].read_meta(1) is None, "the step is there when all shards are"
    (kept,) = tmp_path.glob("1.bad-*")
    assert sorted(p.name for p in kept.iterdir()) == ["gen_batch.r1-of-2.dp", "meta.r1-of-2.json"]


def test_another_ranks_damaged_shard_leaves_our_own_in_place(tmp_path: Path) -> None:
    stores = [StepStore(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    for store in stores:
        store.save(1, store.rank)
    (tmp_path / "1" / "meta.r1-of-2.json").write_text("{}")
    assert stores[0].read_meta(1) is None
    assert list(tmp_path.glob("1.bad-*")) == [], "its own rank quarantines it"
    assert stores[1].read_meta(1) is None
    assert len(list(tmp_path.glob("1.bad-*"))) == 1


def test_shards_of_two_calls_are_not_a_step(tmp_path: Path) -> None:
    """Rank 1's shard is lost; the job that generates again dies after writing only that one."""
    stores = [StepStore(tmp_path, rank=rank, world_size=2) for rank in range(2)]

    def save(store: StepStore, generation: str) -> None:
        store.save(1, generation, info={"generation": generation})

    def seen() -> list[bool]:
        return [store.read_meta(1) is not None and store.steps() == [1] for store in stores]

    for store in stores:
        save(store, "a")
    assert seen() == [True, True]
    stores[1].quarantine(1, "a test")
    assert seen() == [False, False]
    save(stores[1], "b")
    assert seen() == [False, False]
    for store in stores:
        save(store, "c")
        assert seen() == [store.rank == 1] * 2
    assert [store.load(1) for store in stores] == ["c", "c"]


def test_every_decision_has_a_name_of_its_own() -> None:
    ranks, names = RankGroup(), set()
    for hit in (True, False) * 20:
        assert ranks.agree(hit) is hit
        names.add(ranks.exchange_id)
    assert len(names) == 40
    assert {len(name) for name in names} == {15}, "as meta.json expects it"
