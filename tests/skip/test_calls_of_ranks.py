"""Several calls in a step, made by several ranks of real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import rlskip.skip.roles  # noqa: F401 - here once, not in every child
from rlskip import SkipManager
from rlskip.store import RankTimeoutError


def _join(rank: int, world: int, folder: str, **skip: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/rendezvous"
    )
    on = {"dump_dir": f"{folder}/dumps", "rollout": {"enable": True}}
    SkipManager.init({"skip": {**on, **skip}})
    role: Any = SkipManager.skip_instances["rollout"]
    role.made = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: str) -> dict[str, Any]:
        dist.barrier()  # a rank that generated alone would hang here
        role.made.append(prompts)
        return {"rank": rank, "of": prompts, "place": len(role.made)}

    return generate


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _rank(rank: int, world: int, folder: str, calls: str, made: str) -> None:
    generate = _join(rank, world, folder)
    SkipManager.set_step(1)
    got = [generate(call) for call in calls]
    assert [one["of"] for one in got] == list(calls)
    assert {one["rank"] for one in got} == {rank}
    assert "".join(SkipManager.skip_instances["rollout"].made) == made  # type: ignore[attr-defined]
    _leave()


def _run(folder: Path, function: Any, *args: Any) -> None:
    (folder / "rendezvous").unlink(missing_ok=True)
    mp.start_processes(function, args=(2, str(folder), *args), nprocs=2, start_method="fork")


def test_calls_of_ranks_are_replayed_and_added(tmp_path: Path) -> None:
    _run(tmp_path, _rank, "aab", "aab")
    _run(tmp_path, _rank, "baa", "")
    _run(tmp_path, _rank, "abac", "c")
    _run(tmp_path, _rank, "abca", "")
    assert len(list(tmp_path.glob("dumps/*/*/1/3/gen_batch.r*-of-2.dp"))) == 2


def _counting(rank: int, world: int, folder: str) -> None:
    generate = _join(rank, world, folder)
    gather, exchanges = dist.all_gather, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        exchanges.append(args)
        return gather(*args, **kwargs)

    dist.all_gather = counted
    SkipManager.set_step(1)
    generate("a")  # the job's first call also finds out whether the ranks share dump_dir
    assert len(exchanges) == 1 + 2
    for k, call in enumerate("ab", 1 + 3):
        generate(call)
        assert len(exchanges) == k
    _leave()


def test_a_hit_takes_one_collective(tmp_path: Path) -> None:
    _run(tmp_path, _rank, "aab", "aab")
    _run(tmp_path, _counting)


def _first_for_all(rank: int, world: int, folder: str) -> None:
    """Rank 1 has lost what it knew of call 0, so the lowest that fits both is call 1."""
    generate = _join(rank, world, folder)
    SkipManager.set_step(1)
    role: Any = SkipManager.skip_instances["rollout"]
    if rank == 1:
        visit = role._visit(1)
        assert [found.number for found in visit.fitting(role_identity(role))] == [0, 1]
        visit.take(next(visit.fitting(role_identity(role))))
    assert generate("a")["place"] == 2
    assert role.made == []
    _leave()


def role_identity(role: Any) -> Any:
    return role.store.read_meta(1).identity


def test_ranks_take_the_lowest_dump_that_fits_all(tmp_path: Path) -> None:
    _run(tmp_path, _rank, "aa", "aa")
    _run(tmp_path, _first_for_all)


def _unequal(rank: int, world: int, folder: str) -> None:
    generate = _join(rank, world, folder)
    SkipManager.set_step(5)
    generate("a")
    if rank == 1:
        SkipManager.set_step(6)
    with pytest.raises(RankTimeoutError) as caught:
        generate("b")
    said = "rank 0 makes call 1 of step 5, rank 1 makes call 0 of step 6"
    assert said in str(caught.value)
    _leave()


def test_ranks_that_make_other_numbers_of_calls_are_named(tmp_path: Path) -> None:
    _run(tmp_path, _unequal)
