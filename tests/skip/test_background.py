"""Dumps that are written in the background, and leases: of several jobs one generates a step."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import multiprocessing
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.records import JOB_VARIABLE, tally
from rlskip.skip import call_role
from rlskip.store import StepStore
from rlskip.store.writer import Writer
from tests.clock import in_a_fork
from tests.skip.prompt_stages import run
from tests.skip.trainers import Stage, leases, role_of, steps_on_disk, visit


@pytest.mark.parametrize(
    ("said", "promised", "background"),
    [("auto", False, False), ("auto", True, True), (True, False, True), (False, True, False)],
)
def test_background_writes_only_where_a_flush_is_certain(
    tmp_path: Path, said: Any, promised: bool, background: bool
) -> None:
    skip = {"dump_dir": str(tmp_path), "background_write": said, "rollout": {"enable": True}}
    SkipManager._start({"skip": skip}, flushes=promised)
    role = role_of()
    held = threading.Event()
    write = role.dumps.store.write
    role.dumps.store.write = lambda *args: (held.wait(5), write(*args))[1]
    if not background:
        held.set()
    stage = Stage()
    assert stage.at(1) == 1
    assert steps_on_disk(tmp_path) == ([] if background else ["1"])
    held.set()
    SkipManager.flush()
    assert steps_on_disk(tmp_path) == ["1"]
    assert stage.at(1) == 1
    counts = tally({"rollout": str(tmp_path)}, "job")["rollout"]
    assert (counts.hits, counts.misses) == (1, 1)
    (folder,) = (file.parent for file in tmp_path.rglob("gen_batch.dp"))
    assert counts.bytes_written == sum(file.stat().st_size for file in folder.iterdir())


def test_the_next_job_of_a_process_sees_what_is_still_being_written(
    init: Callable[..., Path],
) -> None:
    init(background_write=True)
    role = role_of()
    held, write = threading.Event(), role.dumps.store.write
    role.dumps.store.write = lambda *args: (held.wait(60), write(*args))[1]
    stage = Stage()
    assert stage.at(1) == 1
    threading.Timer(0.1, held.set).start()
    init(background_write=True, on_miss="error")
    assert SkipManager.will_replay("rollout", [1])
    assert stage.at(1) == 1


def test_a_disk_too_slow_for_the_writer_does_not_end_training(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init(background_write=True)
    role = role_of()
    role.writer = Writer(role.dumps.store, timeout_s=0.1)
    held, write = threading.Event(), role.dumps.store.write
    role.dumps.store.write = lambda *args: (held.wait(20), write(*args))[1]
    stage = Stage()
    assert [stage.at(1), stage.at(2)] == [1, 2]
    assert "the dumps of steps 1 were not written within 0.1 s" in caplog.text
    held.set()
    role.writer.timeout_s = 60
    SkipManager.flush()
    assert steps_on_disk(dumps) == ["1", "2"]
    assert [stage.at(1), stage.at(2)] == [1, 2]
    assert stage.calls == 2


def _full(dumps: Path, background: bool) -> None:
    """A process in which no file may grow past 100 KB."""
    skip = {"dump_dir": str(dumps), "background_write": background, "rollout": {"enable": True}}
    SkipManager.init({"skip": skip})
    logging.getLogger("rlskip").addHandler(logging.FileHandler(f"{dumps}.log"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    annotate = SkipManager.annotate(role="rollout")
    generate = annotate(lambda prompts: torch.rand(1_000_000 if prompts[0] < 3 else 10))
    assert [*map(len, run(generate, [1], [2], [3]))] == [1_000_000, 1_000_000, 10]
    SkipManager.flush()


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_does_not_end_training(tmp_path: Path, background: bool) -> None:
    dumps = tmp_path / "dumps"
    in_a_fork(lambda: _full(dumps, background))
    said = Path(f"{dumps}.log").read_text()
    assert steps_on_disk(dumps) == ["3"]
    assert re.search(r"step 1 .*NOT dumped.*File too large: '.*/1'\n  -> free space", said)
    assert said.count("NOT dumped") == 1, "said once"
    assert tally({"rollout": str(dumps)}, "job")["rollout"].lost == 2
    assert not leases(dumps)
    assert not [*dumps.rglob(".work/*~*")]


generate = SkipManager.annotate(role="rollout")(lambda prompts: torch.rand(3))


def test_a_stage_that_fails_or_a_writer_that_refuses_gives_the_lease_back(
    init: Callable[..., Path],
) -> None:
    dumps = init(background_write=True, at=1)
    stage = SkipManager.annotate(role="rollout")(lambda prompts: 5 // prompts[0])
    with pytest.raises(ZeroDivisionError):
        stage([0])
    assert not leases(dumps)

    def refuse(*_: Any, **__: Any) -> None:
        assert leases(dumps)
        raise RuntimeError("no memory")

    role_of().writer.save = refuse
    assert stage([1]) == 5
    assert not leases(dumps)


def test_a_sample_does_not_wait_for_another_job(init: Callable[..., Path]) -> None:
    init("async_rollout", wait_s=1e6)
    role = role_of("async_rollout")
    other = SingleFlight(role.dumps.directory).enter(7, lambda: False)
    assert other is not None

    @SkipManager.annotate(role="async_rollout")
    async def one(prompts: list[int], sample_id: str) -> list[int]:
        return prompts

    assert asyncio.run(one([1], "sample_0_7")) == [1]
    other.close()


@pytest.mark.parametrize("background", [False, True])
def test_the_dump_is_what_the_stage_returned(init: Callable[..., Path], background: bool) -> None:
    init(background_write=background, at=1)
    made = generate([1])
    kept = made.clone()
    made.zero_()  # the trainer may change it at once
    SkipManager.flush()
    visit(1)
    assert torch.equal(generate([1]), kept)


# -- leases: of several jobs one generates a step, and each lease is given back ---------------


def generated_by(folder: Path, job: Callable[..., list[Any]], *given: Any) -> list[str]:
    """What jobs, one for each of `given`, generate that start at once."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(given))

    def run(index: int) -> None:
        os.environ.pop(JOB_VARIABLE, None)  # else each is a part of the job that starts it
        call_role.SingleFlight = functools.partial(SingleFlight, poll_s=0.01)  # type: ignore
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
        time.sleep(0.1)
        generated.append(str(prompts[0]))
        return {"step": prompts[0]}

    start.wait(60)
    got = [one["step"] for one in run(generate, [1], [2], [3])]
    assert got == ([1, 2, 3] if action == "cache" else [1] * 3)
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


@pytest.mark.parametrize("match", ["step", "run"])
def test_what_another_job_writes_where_a_call_is_going_to_serves(
    init: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str
) -> None:
    draws = itertools.count(1)
    generate = SkipManager.annotate(role="rollout")(lambda prompts: f"{prompts}{next(draws)}")
    init(at=1)
    assert generate("b") == "b1"
    head, others, got = SkipManager.store("rollout").place(1).directory, tmp_path / "others", []
    shutil.move(head, others)
    init(at=1, match=match)
    prepare = StepStore.prepare

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        """The name is taken by now, and nothing is written yet."""
        monkeypatch.undo()
        shutil.move(others, head)
        with ThreadPoolExecutor(1) as threads:
            got.append(threads.submit(generate, "b").result())
        return prepare(*args, **kwargs)

    monkeypatch.setattr(StepStore, "prepare", meanwhile)
    assert (generate("a"), got) == ("a2", ["b1"])
    assert generate("b") == "b3", "each dump serves once"
    init(at=1, match=match)
    assert [*map(generate, "abb")] == ["a2", "b1", "b3"]


def test_jobs_that_wait_for_each_others_calls_do_not_keep_each_other_waiting(
    tmp_path: Path,
) -> None:
    """Each has more calls than asyncio has threads, for which the stage and its dumps wait."""
    names = [f"{i:02}" for i in range(64)]
    assert generated_by(tmp_path, _calls, names, names[::-1]) == names, "each once"


def test_a_task_cancelled_while_it_waits_for_a_lease_leaves_none(init: Callable[..., Path]) -> None:
    dumps = init()
    role = role_of()
    others, ended = [], threading.Event()

    class AfterAnotherJob(SingleFlight):
        def enter(self, step: int, is_there: Any, call: str = "") -> Any:
            others.append(super().enter(step, lambda: False, call))
            try:
                return super().enter(step, is_there, call)
            finally:
                ended.set()

    role.flight = AfterAnotherJob(role.dumps.directory, wait_s=1e6, poll_s=0.05)

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: list[int]) -> None: ...

    async def main() -> None:
        SkipManager.set_step(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(generate([1]), 0.3)

    asyncio.run(main())
    assert ended.wait(30), "else a process that ends waits for this thread"
    others[0].close()
    assert not leases(dumps)
