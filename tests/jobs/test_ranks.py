"""Several ranks, really: torch.distributed over gloo."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlskip import stages
from rlskip.compare.records import StepRecords
from rlskip.config.nodes import read_record
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.ranks import RankError, RankGroup
from rlskip.jobs.records import job_id
from rlskip.runs.on_disk import dumps_of
from rlskip.store import RankTimeoutError, StepStore
from tests.skip.test_ranks import run


def _deciding(rank: int, folder: str) -> None:
    ranks, all_of = RankGroup(timeout_s=30), range(dist.get_world_size())
    assert ranks.exchange(rank) == [(one,) for one in all_of]
    names = set()
    for _ in range(20):
        ranks.exchange(rank)
        names.add(ranks.exchange_id)
    assert (len(names), {len(name) for name in names}) == (20, {15}), "as meta.json expects it"
    error = KeyError("what nobody expects")
    with pytest.raises(RankError if rank else KeyError) as caught:
        ranks.exchange(rank, error=None if rank else error)
    assert caught.value is error or "rank 0 of 2 raised an error" in str(caught.value)

    store = StepStore(f"{folder}/run", rank=rank, world_size=len(all_of))
    flight = SingleFlight(store.directory, ranks, poll_s=0.02)
    lease = flight.enter(1, lambda: store.read_meta(1) is not None)
    assert lease is not None
    dist.barrier()
    names = os.listdir(f"{folder}/run/.work")
    assert [one for one in names if one.startswith("lease-")] == ["lease-1"], (
        "one for the job, not one per rank"
    )
    dist.barrier()
    with lease:
        store.save(1, rank)
    dist.barrier()
    assert flight.enter(1, lambda: store.read_meta(1) is not None) is None
    assert store.load(1) == rank

    late = RankGroup(timeout_s=0.3)
    if rank == 0:
        time.sleep(0.8)
    else:
        with pytest.raises(RankTimeoutError, match=r"waited up to 0\.3 s .* step 9"):
            late.exchange(True, what="step 9")
    os._exit(0)  # the broken group must not be torn down politely


def test_ranks_decide_together(tmp_path: Path) -> None:
    run(tmp_path, _deciding)


def _asked_before_it_joins(rank: int, folder: str) -> None:
    alone = job_id()
    dist.init_process_group("gloo", init_method=f"file://{folder}/joined", rank=rank, world_size=2)
    found: list[str] = ["", ""]
    dist.all_gather_object(found, job_id())
    assert found[0] == found[1] == job_id()
    dist.all_gather_object(found, alone)
    assert job_id() in found


def test_ranks_that_were_asked_before_they_join_are_one_job(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        _asked_before_it_joins, args=(str(tmp_path),), nprocs=2, start_method="fork"
    )


def _recording(rank: int, folder: str) -> None:
    """Three trainings, of which rank 1 records nothing in the second."""
    rows = {"prompts": torch.full((4, 2), 5), "responses": torch.arange(8).reshape(4, 2)}
    rows["responses"] += 100 * rank
    for loss in range(3):
        node = {"enable": True, "dump_dir": folder}
        stages.start(read_record({"record": node}), lambda: 1)
        if loss != 1 or rank == 0:
            stages.record("scores", torch.arange(4.0) + rank, rows=rows)
            stages.record("loss", loss + rank / 2)
        stages.stop()


def test_ranks_record_into_one_job(tmp_path: Path) -> None:
    run(tmp_path, _recording)
    jobs = [StepRecords(dumps_of(job, 1)) for job in (tmp_path / "stages").iterdir()]
    found = {job.stages["loss"][0].load()[0]: job for job in jobs}
    assert {loss: len(job.stages["scores"]) for loss, job in found.items()} == {0: 2, 1: 1, 2: 2}
    assert [(one.rank, one.load()[0]) for one in found[2].stages["loss"]] == [(0, 2), (1, 2.5)]
    assert found[2].rows is not None
    assert len(found[2].rows.keys) == 8


def test_without_torch_distributed_one_is_rank_0_of_1() -> None:
    ranks = RankGroup()
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.exchange(True, 5) == [(True, 5)]
