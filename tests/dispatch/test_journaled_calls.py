"""Journals of the calls of a stage; which call resumes what is in ``skip/test_served_stateful``."""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.queue import IncompleteRolloutError, KVBatchMeta, MemoryQueue
from rlskip.store import StepStore

N = 2


@pytest.fixture(autouse=True)
def _job(job: None) -> None: ...


@pytest.mark.parametrize("role", ["rollout", "rollout_tq"])
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("options", "resumed"),
    [({"style": "long", "seed": 1}, 2), ({"style": "long", "seed": 2}, 2), ({"style": "short"}, 0)],
    ids=str,
)
def test_sessions_of_a_call_with_other_arguments_are_not_resumed(
    tmp_path: Path, options: dict[str, Any], resumed: int, in_thread: bool, role: str
) -> None:
    ran: list[int] = []
    executor = ThreadPoolExecutor(1)  # which gives no context on
    for given, ends_at in (({"style": "long", "seed": 1}, 2), (options, 2 * N)):
        ran.clear()
        SkipManager.init({"skip": {"dump_dir": str(tmp_path), role: {"enable": True}}})
        dispatch = {"rollout_level": True, "n": N, "journal": True}
        config = {"dispatch": {**dispatch, "max_concurrent_rollouts_per_worker": 1}}

        async def worker(prompt: Any, sampling: Any, session: Any, most: int = ends_at) -> Any:
            if len(ran) >= most:
                raise ValueError("the process ends here")
            ran.append(session.session_id)
            return {"draw": torch.ones(1)}

        @SkipManager.annotate(role, **({"queue": MemoryQueue()} if "_" in role else {}))
        def generate(prompts: list[dict[str, Any]], options: dict[str, Any]) -> Any:
            collect = functools.partial(dispatcher.collect, prompts, step=3)
            return (executor.submit(collect).result() if in_thread else collect())[0]

        SkipManager.set_step(3)
        pool, store = LocalPool(worker, 1), SkipManager.store(role)
        may_end = contextlib.suppress(IncompleteRolloutError)
        with RolloutDispatcher(pool, None, config, store=store) as dispatcher, may_end:
            generate([{"uid": f"u{i}", "input_ids": torch.tensor([i])} for i in (1, 2)], given)
    assert len(ran) == 2 * N - resumed


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


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("match", ["step", "prompt"])
def test_sessions_of_groups_that_served_from_a_dump_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str, beside: bool
) -> None:
    drawn: list[int] = []
    later: list[Any] = []  # what is submitted in another thread, while the dump is loaded
    load = StepStore.load

    def load_beside(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as executor:
            while later:
                executor.submit(submit, later.pop()).result()
        return load(*args, **kwargs)

    monkeypatch.setattr(StepStore, "load", load_beside)

    async def worker(prompt: Any, sampling: Any, session: Any) -> Any:
        drawn.append(len(drawn))
        return {"draw": torch.tensor([drawn[-1]])}

    trained: list[list[int]] = []
    for run in range(4):
        keys = {"dump_dir": str(tmp_path), "match": match if run else "step"}
        SkipManager.init({"skip": {**keys, "rollout_tq": {"enable": True}}})
        queue, config = MemoryQueue(), {"rollout_level": True, "n": N, "journal": True}

        @SkipManager.annotate(role="rollout_tq", stage="submit", queue=queue)
        def submit(prompts: Any) -> None:
            dispatcher.submit(prompts, step=1).result()

        @SkipManager.annotate(role="rollout_tq", phase="sample", queue=queue)
        def sample(queue: Any) -> KVBatchMeta:
            keys = [key for key in queue.list("train") if key.count("_") == 2]
            return KVBatchMeta(keys, [{}] * len(keys), "train")

        SkipManager.set_step(1)
        pool, store = LocalPool(worker, 1), SkipManager.store("rollout_tq")
        with RolloutDispatcher(pool, queue, {"dispatch": config}, store=store) as dispatcher:
            # The dump has a group for one of the two.
            batches = [[{"uid": f"{run}-{i}", "text": "a"}] for i in range(1 if run == 0 else 2)]
            later += batches[1:] if beside else []
            for batch in batches[: 1 if beside else 2]:
                submit(batch)
            if run != 1:  # it ends before it has sampled
                rows = queue.get(sample(queue).keys, "train")
                trained.append(sorted(int(draw) for draw in rows["draw"]))
    assert trained == [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
