"""What it costs ranks to agree: exchanges, numbers and files, for 2 to 1 024 simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlskip.jobs.ranks import RankError
from rlskip.skip.call import Call
from rlskip.skip.call_role import CallRole
from rlskip.skip.stage import Stage
from rlskip.store import CorruptDumpError, TooLargeDumpError
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
    assert len(exchanges) == 3
    for _ in range(2):
        got, exchanges = job.call(1)
        assert got == [f"1 of rank {rank}" for rank in range(world)]
        assert exchanges == [7]


def test_a_shard_that_one_rank_lacks_the_memory_for_is_not_replaced(tmp_path: Path) -> None:
    job = Job(Hub(3), tmp_path, background_write=False)
    job.call(1)
    store = job.roles[1].dumps.store
    store._max_bytes = 1
    with pytest.raises((TooLargeDumpError, RankError), match=r"max_bytes|rank 1 of 3 raised"):
        job.call(1)
    store._max_bytes = None
    assert job.call(1)[0] == [f"1 of rank {rank}" for rank in range(3)]
