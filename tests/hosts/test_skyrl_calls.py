"""SkyRL's trainers that generate several times a step, from its wheel (see conftest.py)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import types
from pathlib import Path
from typing import Any

import pytest

from rlskip.errors import ConfigError


def on(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"skip": {"dump_dir": str(tmp_path / "dumps"), "rollout": {"enable": True}, **more}}


def sample_dynamically(trainer: Any, batch: Any, steps: int = 2) -> list[list[Any]]:
    """SkyRL's loop with dynamic sampling: what the generator returned, by step and call."""
    seen: list[list[Any]] = []
    first = 0
    for step in range(1, steps + 1):
        seen.append([])
        sample_more = True
        while sample_more:
            input_batch, uids = batch(step, first=first)
            out = asyncio.run(trainer.generate(input_batch))
            out.pop("trajectory_generation_times", None)
            seen[-1].append(copy.deepcopy(out))
            *_, sample_more = trainer.handle_dynamic_sampling(out, uids)
            first += 2
    return seen


@pytest.fixture
def dynamic(make: Any, tmp_path: Path) -> Any:
    """``dynamic(kind, min_replace_ratio)``: a trainer that samples so; some groups have ties."""

    def dynamic(kind: str, min_replace_ratio: float = 0.5) -> Any:
        sampling = {"type": kind, "min_replace_ratio": min_replace_ratio, "max_sample_batches": 9}
        overrides = {f"trainer.algorithm.dynamic_sampling.{k}": v for k, v in sampling.items()}
        trainer = make(on(tmp_path), **overrides, **{"trainer.train_batch_size": 2})
        trainer.generator.ties = {"0", "1", "5"}
        trainer.dynamic_sampling_state = None
        return trainer

    return dynamic


@pytest.mark.parametrize("kind", ["filter", "replace"])
def test_dynamic_sampling_replays_every_call_of_a_step(dynamic: Any, batch: Any, kind: str) -> None:
    first = dynamic(kind)
    seen = sample_dynamically(first, batch)
    assert first.generator.calls == [("train", step) for step in (1, 1, 2, 2)]
    second = dynamic(kind)
    assert sample_dynamically(second, batch) == seen
    assert second.generator.calls == []


def test_another_filter_generates_only_what_is_missing(dynamic: Any, batch: Any) -> None:
    [seen] = sample_dynamically(dynamic("filter"), batch, steps=1)
    stricter = dynamic("replace", min_replace_ratio=1)
    stricter.cfg.trainer.algorithm.dynamic_sampling.max_sample_batches = 3
    with pytest.raises(RuntimeError, match="dynamic sampling limit"):
        sample_dynamically(stricter, batch, steps=1)
    assert len(seen) == 2
    assert stricter.generator.calls == [("train", 1)]


class Loader(list[Any]):
    """As much of a StatefulDataLoader as SkyRL's _AsyncDataloader uses."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def fully_async(make: Any, skyrl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fully_async(**skip)``: (uid, tokens) of each group in the order of training; the calls.

    Three steps of two groups each, which four workers generate, at most a step ahead.
    """
    module = skyrl("train.fully_async_trainer")
    # What needs stubs; and a worker that fails ends its process.
    monkeypatch.setattr(module, "Timer", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(module, "get_sampling_params_for_backend", lambda *_: {"temperature": 1.0})
    monkeypatch.setattr(module, "os", types.SimpleNamespace(_exit=print))

    async def run(trainer: Any) -> list[tuple[str, Any]]:
        loader = Loader(
            [{"prompt": f"{i}?", "env_class": None, "env_extras": {}, "uid": str(i)}]
            for i in range(6)
        )
        trainer.async_train_dataloader = module._AsyncDataloader(loader, 2)
        trainer._staleness_manager = module._AsyncStalenessManager(4, 2, 1)
        trainer.mini_batch_size, trainer.sample_full_batch = 2, False
        trainer.all_timings, trainer.global_step = {}, 1
        groups: asyncio.Queue[Any] = asyncio.Queue()
        workers = [
            asyncio.create_task(trainer._run_generate_for_a_group_loop(groups)) for _ in range(4)
        ]
        seen = []
        for step in range(1, 4):
            batch, *_ = await trainer._collect_generation_mini_batch(groups, asyncio.Event())
            seen += [(group.uid, group.generator_output["response_ids"]) for group in batch]
            trainer.global_step = step + 1
            await trainer._staleness_manager.notify_capacity_change(step + 1)
        await asyncio.gather(*workers)
        return seen

    def fully_async(**skip: Any) -> tuple[list[tuple[str, Any]], list[Any]]:
        trainer = make(
            on(tmp_path, **skip),
            trainer_class=module.FullyAsyncRayPPOTrainer,
            **{"trainer.fully_async.enabled": True},
        )
        return asyncio.run(asyncio.wait_for(run(trainer), 60)), trainer.generator.calls

    return fully_async


def test_the_fully_async_trainer_replays_every_group(fully_async: Any) -> None:
    seen, calls = fully_async()
    assert len(calls) == 6
    for _ in range(3):  # the workers differ in their pace
        again, calls = fully_async()
        assert dict(again) == dict(seen)
        assert calls == []


def test_the_one_step_of_the_fully_async_trainer_must_be_listed(fully_async: Any) -> None:
    with pytest.raises(ConfigError, match=r"skip\.rollout\.steps: .* belong to step 1, which is"):
        fully_async(steps=[2, 3])
