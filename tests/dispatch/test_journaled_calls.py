"""Journals of a stage that is called several times in a step: each call has its own sessions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from rlskip import SkipManager
from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.queue import IncompleteRolloutError, MemoryQueue
from rlskip.store import StepStore

N = 2
CALLS = {
    "equal": ([1, 2], [1, 2], [1, 2]),
    "a shared prompt": ([1, 2], [1, 3], [3, 1]),
    "other prompts": ([1, 2], [3, 4], [5, 6]),
    "of two kinds": ([1], [2], [1]),
}


@pytest.fixture(autouse=True)
def _job(job: None) -> None: ...


@attrs.define
class Process:
    """A process of a run, in which every session draws another number."""

    dump_dir: Path
    draws: Iterator[int]
    ends_at: int = 10**6  # sessions from this number of the process on fail
    background: bool = False
    options: dict[str, Any] = attrs.field(factory=dict)
    ran: int = 0

    def step(self, calls: tuple[list[int], ...]) -> list[list[int]]:
        """What each call of step 3 returned, as draws, up to the first one that fails."""
        skip = {"dump_dir": str(self.dump_dir), "rollout": {"enable": True}}
        skip["background_write"] = self.background
        SkipManager.init({"skip": skip})
        config = {
            "rollout_level": True,
            "n": N,
            "journal": True,
            "max_concurrent_rollouts_per_worker": 1,
        }
        numbers = itertools.count()
        returned = []

        async def worker(prompt: Any, sampling: Any, session: Any) -> Any:
            if self.ran >= self.ends_at:
                raise ValueError("the process ends here")
            self.ran += 1
            return {"draw": torch.tensor([next(self.draws)]), "content": prompt["input_ids"]}

        @SkipManager.annotate(role="rollout", prompts="contents")
        def generate(contents: torch.Tensor, options: dict[str, Any]) -> Any:
            prompts = [{"uid": f"u{next(numbers)}", "input_ids": one} for one in contents]
            return dispatcher.collect(prompts, step=3)[0]

        SkipManager.set_step(3)
        pool, store = LocalPool(worker, 1), SkipManager.store("rollout")
        with RolloutDispatcher(pool, config={"dispatch": config}, store=store) as dispatcher:
            for contents in calls:
                try:
                    rows = generate(torch.tensor(contents)[:, None], self.options)
                except IncompleteRolloutError:
                    break
                assert [*map(int, rows["content"])] == [c for c in contents for _ in range(N)]
                returned.append([*map(int, rows["draw"])])
        SkipManager.flush()
        return returned


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_each_call_resumes_its_own_sessions(
    tmp_path: Path, calls: tuple[list[int], ...], background: bool
) -> None:
    total = N * sum(map(len, calls))
    for ends_at, again_at in itertools.product(range(total), (1, total)):
        directory, draws = tmp_path / f"{ends_at}-{again_at}", itertools.count()
        first = Process(directory, draws, ends_at, background)
        returned = first.step(calls)
        second = Process(directory, draws, again_at, background)
        second.step(calls)
        third = Process(directory, draws, background=background)
        all_returned = third.step(calls)
        assert all_returned[: len(returned)] == returned, "a dump is replayed"
        assert sorted(itertools.chain(*all_returned)) == list(range(total)), "each draw is used"
        assert first.ran + second.ran + third.ran == total, "no session is generated twice"


@pytest.mark.parametrize(
    ("options", "resumed"),
    [({"style": "long", "seed": 1}, 2), ({"style": "long", "seed": 2}, 2), ({"style": "short"}, 0)],
    ids=str,
)
def test_sessions_of_a_call_with_other_arguments_are_not_resumed(
    tmp_path: Path, options: dict[str, Any], resumed: int
) -> None:
    draws = itertools.count()
    Process(tmp_path, draws, ends_at=2, options={"style": "long", "seed": 1}).step(([1, 2],))
    again = Process(tmp_path, draws, options=options)
    again.step(([1, 2],))
    assert again.ran == 2 * N - resumed


@pytest.mark.parametrize("first", [False, True])
def test_runs_with_and_without_a_role_of_groups_share_journals(tmp_path: Path, first: bool) -> None:
    async def worker(prompt: Any, sampling: Any, session: Any) -> Any:
        return {"responses": torch.tensor([session.session_id])}

    resumed = []
    for on in (first, not first):
        roles = {"rollout_tq": {"enable": on}, "reward": {"enable": True}}
        SkipManager.init({"skip": {"dump_dir": str(tmp_path / str(on)), **roles}})
        queue, config = MemoryQueue(), {"rollout_level": True, "n": N, "journal": True}

        @SkipManager.annotate(role="rollout_tq", queue=queue)
        def submit(prompts: Any) -> None:
            resumed.append(dispatcher.submit(prompts, step=3).result().resumed)

        SkipManager.set_step(3)
        with RolloutDispatcher(
            LocalPool(worker, 1), queue, {"dispatch": config}, store=StepStore(tmp_path / "run")
        ) as dispatcher:
            submit([{"uid": f"{on}-{i}", "input_ids": torch.tensor([i])} for i in range(2)])
    assert resumed == [0, 2 * N]
