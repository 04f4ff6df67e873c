"""Of several jobs one generates a step; leases are given back."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.jobs.lease import SingleFlight
from tests.skip.trainers import leases


def _job(folder: str, index: int, steps: list[int], start: Any, action: str) -> None:
    role = {"enable": True, "action": action}
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "rollout": role}})
    generated = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, int]:

        time.sleep(0.3)
        generated.append(prompts[0])
        return {"step": prompts[0]}

    start.wait(60)
    for step in steps:
        SkipManager.set_step(step)
        assert generate([step]) == {"step": step if action == "cache" else 1}
    Path(folder, f"generated-{index}").write_text(" ".join(map(str, generated)))


@pytest.mark.parametrize(("action", "once"), [("cache", "123"), ("repeat", "1")])
def test_parallel_jobs_generate_each_step_once(action: str, once: str, tmp_path: Path) -> None:
    """Under repeat, too, where the step has no dump when the others begin to wait."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    jobs = [
        context.Process(target=_job, args=(str(tmp_path), index, [1, 2, 3], start, action))
        for index in range(3)
    ]
    [job.start() for job in jobs]
    [job.join(60) for job in jobs]
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    generated = " ".join((tmp_path / f"generated-{index}").read_text() for index in range(3))
    assert sorted(generated.split()) == list(once)


def _calls(folder: str, index: int, names: list[str], start: Any) -> None:
    roles = {"rollout": {"enable": True}}
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "wait_s": 1000, **roles}})
    generated = []

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: str) -> str:
        generated.append(prompts)
        await asyncio.to_thread(time.sleep, 0.05)
        return prompts

    async def main() -> None:
        SkipManager.set_step(1)
        start.wait(60)
        assert await asyncio.gather(*map(generate, names)) == names

    asyncio.run(main())
    Path(folder, f"generated-{index}").write_text(" ".join(generated))


def test_jobs_that_wait_for_each_others_calls_do_not_keep_each_other_waiting(
    tmp_path: Path,
) -> None:
    """Each has more calls than asyncio has threads, for which the stage and its dumps wait."""
    context = multiprocessing.get_context("fork")
    start, names = context.Barrier(2), [str(i) for i in range(64)]
    orders = enumerate((names, names[::-1]))
    jobs = [
        context.Process(target=_calls, args=(str(tmp_path), index, order, start))
        for index, order in orders
    ]
    [job.start() for job in jobs]
    [job.join(100) for job in jobs]
    [job.kill() for job in jobs]
    assert [job.exitcode for job in jobs] == [0, 0]
    generated = " ".join((tmp_path / f"generated-{index}").read_text() for index in range(2))
    assert sorted(generated.split(), key=int) == names, "each once"


def test_a_stage_that_fails_gives_the_lease_back(init: Callable[..., Path]) -> None:
    dumps = init()

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> int:
        if prompts == [0]:
            raise RuntimeError("out of memory")
        return 5

    SkipManager.set_step(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate([0])
    assert not leases(dumps)
    assert generate([1]) == 5
    assert not leases(dumps)


def test_a_task_cancelled_while_it_waits_for_a_lease_leaves_none(init: Callable[..., Path]) -> None:
    dumps = init()
    role: Any = SkipManager.skip_instances["rollout"]
    others = []

    class AfterAnotherJob(SingleFlight):
        def enter(self, step: int, is_there: Any, call: str = "") -> Any:
            others.append(super().enter(step, lambda: False, call))
            return super().enter(step, is_there, call)

    role.flight = AfterAnotherJob(role.dumps.directory, wait_s=1e6, poll_s=0.05)

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: list[int]) -> None: ...

    async def main() -> None:
        SkipManager.set_step(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(generate([1]), 0.3)

    asyncio.run(main())  # ends once the thread has stopped waiting
    others[0].release()
    assert not leases(dumps)
