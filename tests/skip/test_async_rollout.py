"""Role async_rollout: every sample tells its own step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlskip import SkipManager
from rlskip.batch.tables import DataProtoParts
from rlskip.skip import parse_async_rollout_sample_step

number = st.integers(0, 10**12)


@given(number, number, st.sampled_from(["", "uid_"]))
def test_the_last_number_is_the_step(epoch: int, index: int, prefix: str) -> None:
    assert parse_async_rollout_sample_step(f"{prefix}sample_{epoch}_{index}") == index


@pytest.mark.parametrize(
    "bad",
    ["", "sample_1", "sample_1_2_3", "sample_-1_2", "x_sample_1_2", 7, None, "sample_1_٣"],
)
def test_a_malformed_id_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="is not a sample id"):
        parse_async_rollout_sample_step(bad)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((object(), {"ids": [1]}, "sample_0_42"), {}),
        (({"ids": [1]},), {"sample_id": "sample_3_42"}),
        (({"ids": [1], "uid": ["uid_sample_0_42"] * 2},), {}),
        (({"ids": [1], "uid": np.array(["sample_0_42"], dtype=object)},), {}),
        ((TensorDict({"uid": NonTensorStack("sample_0_42", "sample_0_42")}, [2]),), {}),
        ((DataProtoParts(None, {"uid": np.array(["sample_0_42"])}),), {}),
    ],
    ids=["positional", "keyword", "dict", "array", "tensordict", "DataProto"],
)
def test_where_the_id_is_found(args: Any, kwargs: Any, init: Callable[..., Path]) -> None:
    init("async_rollout")
    skip = SkipManager.skip_instances["async_rollout"]
    assert skip.support_online_step
    assert skip.extract_step(*args, **kwargs) == 42


def test_no_id_anywhere(init: Callable[..., Path]) -> None:
    init("async_rollout")
    with pytest.raises(ValueError, match="as the argument sample_id or as the prompts' uid"):
        SkipManager.skip_instances["async_rollout"].extract_step(object(), {"ids": [1]})


class Rollouter:
    def __init__(self) -> None:
        self.generated: list[str] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(self, prompts: dict[str, Any], sample_id: str) -> dict[str, Any]:
        index = int(sample_id.rsplit("_", 1)[1])
        await asyncio.sleep(0.001 * (index % 7))  # completion order differs from feed order
        self.generated.append(sample_id)
        return {"tokens": torch.full((4,), index)}

    async def feed(self, indices: range) -> list[int]:
        tasks = [self.generate({"ids": torch.tensor([i])}, f"sample_0_{i}") for i in indices]
        return [int(result["tokens"][0]) for result in await asyncio.gather(*tasks)]


def test_concurrent_samples_do_not_share_a_step(init: Callable[..., Path]) -> None:
    dumps = init("async_rollout", steps="0-31")
    first, second = Rollouter(), Rollouter()
    assert asyncio.run(first.feed(range(40))) == list(range(40))
    assert len(first.generated) == 40
    assert len(list(dumps.rglob("gen_batch.dp"))) == 32
    assert asyncio.run(second.feed(range(40))) == list(range(40))
    assert sorted(second.generated) == sorted(f"sample_0_{i}" for i in range(32, 40))


def test_the_event_loop_is_never_blocked_on_disk(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump is written off the event loop's thread: here it waits until the loop has gone on."""
    init("async_rollout")
    store: Any = SkipManager.store("async_rollout")
    saving, went_on = threading.Event(), threading.Event()
    in_time: list[bool] = []
    write = store.write

    def slow_write(*args: Any, **kwargs: Any) -> Any:
        saving.set()
        in_time.append(went_on.wait(60))
        return write(*args, **kwargs)

    monkeypatch.setattr(store, "write", slow_write)

    async def main() -> None:
        task = asyncio.ensure_future(Rollouter().feed(range(2)))
        while not task.done():
            await asyncio.sleep(0.001)
            if saving.is_set():
                went_on.set()

    asyncio.run(main())
    assert in_time == [True, True]
