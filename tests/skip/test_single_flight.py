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


def generated_by(folder: Path, job: Callable[..., list[Any]], *given: Any) -> list[str]:
    """What jobs, one for each of `given`, generate that start at once."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(given))

    def run(index: int) -> None:
        Path(folder, f"{index}").write_text(" ".join(job(folder, given[index], start)))

    jobs = [context.Process(target=run, args=(index,)) for index in range(len(given))]
    [one.start() for one in jobs]
    [one.join(100) for one in jobs]
    [one.kill() for one in jobs]
    assert [one.exitcode for one in jobs] == [0] * len(given)
    return sorted(" ".join((folder / f"{i}").read_text() for i in range(len(given))).split())


def _steps(folder: Path, action: str, start: Any) -> list[str]:
    role = {"enable": True, "action": action}
    SkipManager.init({"skip": {"dump_dir": f"{folder}/dumps", "rollout": role}})
    generated = []

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, int]:
        time.sleep(0.3)
        generated.append(str(prompts[0]))
        return {"step": prompts[0]}

    start.wait(60)
    for step in (1, 2, 3):
        SkipManager.set_step(step)
        assert generate([step]) == {"step": step if action == "cache" else 1}
    return generated


@pytest.mark.parametrize(("action", "once"), [("cache", "123"), ("repeat", "1")])
def test_parallel_jobs_generate_each_step_once(action: str, once: str, tmp_path: Path) -> None:
    """Under repeat, too, where the step has no dump when the others begin to wait."""
    assert generated_by(tmp_path, _steps, *[action] * 3) == list(once)


def _calls(folder: Path, names: list[str], start: Any) -> list[str]:
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
    return generated


def test_jobs_that_wait_for_each_others_calls_do_not_keep_each_other_waiting(
    tmp_path: Path,
) -> None:
    """Each has more calls than asyncio has threads, for which the stage and its dumps wait."""
    names = [f"{i:02}" for i in range(64)]
    assert generated_by(tmp_path, _calls, names, names[::-1]) == names, "each once"


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
