"""Roles: async_rollout, those that the user registers, and a role used by hand."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlskip import BaseSkip, RoleConfig, SkipAction, SkipManager, register_skip
from rlskip.batch.tables import DataProtoParts
from rlskip.errors import ConfigError, MismatchError
from rlskip.skip import SKIP_REGISTRY, parse_async_rollout_sample_step
from rlskip.store import CorruptDumpError
from tests.skip.trainers import leases, role_of

# -- a role used by hand, outside a decorated function ----------------------------------------


def plain(prompts: dict[str, Any], scale: int = 1) -> dict[str, Any]:
    return {"made": prompts["ids"]}


class Trainer:
    def method(self, prompts: dict[str, Any]) -> dict[str, Any]:
        return {"made": prompts["ids"]}

    @SkipManager.annotate(role="rollout")
    def stage(self, prompts: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError


PROMPTS = {"ids": [1, 2]}
CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "positional": (plain, (PROMPTS,), {}),
    "keyword": (plain, (), {"prompts": PROMPTS}),
    "more arguments": (plain, (PROMPTS, 3), {}),
    "method": (Trainer.method, (Trainer(), PROMPTS), {}),
    "method by keyword": (Trainer.method, (Trainer(),), {"prompts": PROMPTS}),
    "bound method": (Trainer().method, (PROMPTS,), {}),
}


@pytest.mark.parametrize("role", ["rollout", "async_rollout"])
@pytest.mark.parametrize("how", CALLS)
def test_prepared_by_hand_it_is_replayed_by_hand(
    init: Callable[..., Path], how: str, role: str
) -> None:
    func, args, kwargs = CALLS[how]
    for fresh in (True, False):
        init(role, wait_s=0)
        skip = role_of(role)
        if not fresh:
            assert skip.meet_precondition(3, func, *args, **kwargs)
            assert skip.warp_function(3, func, *args, **kwargs) == {"made": [1, 2]}
            skip.begin_visit()
            with pytest.raises(MismatchError, match="prompts"):
                skip.meet_precondition(3, plain, {"ids": [7]})
        skip.prepare_data(3, {"made": [1, 2]}, *args, **kwargs)


def test_what_was_prepared_by_hand_serves_a_decorated_function(init: Callable[..., Path]) -> None:
    dumps = init()
    for _ in range(2):
        assert not role_of().meet_precondition(3, plain, PROMPTS)
        assert not leases(dumps), "nothing is held between the methods"
    role_of().prepare_data(3, {"made": "by hand"}, PROMPTS)
    assert role_of().meet_precondition(3, plain, PROMPTS), "what this process wrote, too"
    init(at=3)
    assert Trainer().stage(PROMPTS) == {"made": "by hand"}
    SkipManager.skip_instances["rollout"].begin_visit()
    with pytest.raises(MismatchError):
        Trainer().stage({"ids": [3]})


def test_by_hand_the_first_of_equal_calls_is_meant(init: Callable[..., Path]) -> None:
    init(wait_s=0)
    for value in (3, 4):
        role_of().prepare_data(3, {"made": value}, PROMPTS)
    init(wait_s=0, match="run")
    for step in (3, 4, 3):
        assert role_of().meet_precondition(step, plain, PROMPTS)
        assert role_of().warp_function(step, plain, PROMPTS) == {"made": 3}


@pytest.mark.parametrize("match", ["step", "run", "prompt"])
def test_by_hand_it_does_not_matter_what_has_served(init: Callable[..., Path], match: str) -> None:
    for _ in range(2):
        init(match=match, at=3)
        made = SkipManager.annotate(role="rollout")(plain)(PROMPTS)
        assert role_of().meet_precondition(3, plain, PROMPTS)
        assert role_of().warp_function(3, plain, PROMPTS) == made


@dataclass
class DoublingConfig(RoleConfig):
    factor: int = 2


@pytest.fixture
def doubling() -> Any:
    @register_skip("doubling", config=DoublingConfig)
    class DoublingSkip(BaseSkip):
        support_actions = (SkipAction.CACHE,)

        def __init__(self, local_config: DoublingConfig, global_config: Any) -> None:
            super().__init__(local_config, global_config)
            self.kept: dict[int, Any] = {}

        def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
            return step in self.kept

        def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
            if self.kept[step] == "bad":
                raise CorruptDumpError("bad")
            return self.kept[step] * self.local_config.factor

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            self.kept[step] = result

    yield DoublingSkip
    del SKIP_REGISTRY["doubling"]


def test_a_role_of_ones_own(doubling: Any, init: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    init("doubling", own={"factor": 5}, at=1)
    stage = SkipManager.annotate(role="doubling")(lambda x: x)
    assert [stage(3), stage(3)] == [3, 15]
    SkipManager.skip_instances["doubling"].kept[1] = "bad"
    assert stage(4) == 4, "found unusable while loading: a miss"
    assert stage(4) == 20
    with pytest.raises(ConfigError, match=r"did you mean skip\.doubling\.factor"):
        init("doubling", own={"factr": 5})
    with pytest.raises(ConfigError, match="does not support 'repeat'"):
        init("doubling", action="repeat")
    # It can say that it is off.
    monkeypatch.setattr(doubling, "is_enabled", lambda self: self.local_config.factor > 0)
    for factor in (5, 0):
        init("doubling", own={"factor": factor})
        assert ("doubling" in SkipManager.skip_instances) == (factor > 0)


def test_registering_badly(doubling: Any) -> None:
    class Other(BaseSkip): ...

    for taken in ("rollout", "doubling"):
        with pytest.raises(ConfigError) as caught:
            register_skip(taken)(Other)
        assert caught.value.where == f"register_skip({taken!r})"
    with pytest.raises(ConfigError, match="not an identifier"):
        register_skip("my role")
    with pytest.raises(ConfigError, match=r"derive it from rlskip\.RoleConfig"):
        register_skip("other", config=dict)  # type: ignore[arg-type]


number = st.integers(0, 10**12)


@given(number, number, st.sampled_from(["", "uid_"]))
def test_the_last_number_is_the_step(epoch: int, index: int, prefix: str) -> None:
    assert parse_async_rollout_sample_step(f"{prefix}sample_{epoch}_{index}") == index


@pytest.mark.parametrize(
    "bad", ["", "sample_1", "sample_1_2_3", "sample_-1_2", "x_sample_1_2", 7, None, "sample_1_٣"]
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
    with pytest.raises(ValueError, match="as the argument sample_id or as the prompts' uid"):
        skip.extract_step(object(), {"ids": [1]})


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


def test_sampling_may_change_while_samples_are_generated_side_by_side(
    init: Callable[..., Path],
) -> None:
    class Sampler:
        temperature = 1.0

    async def job() -> None:
        samplers = [Sampler() for _ in range(200)]

        @SkipManager.annotate("async_rollout")
        async def generate(prompts: list[int], sample_id: str) -> list[int]:
            for sampler in samplers[prompts[0] :: 12]:
                sampler.temperature = prompts[0] + 2
            return prompts

        await generate([0], "sample_0_0")
        await asyncio.gather(*(generate([i], f"sample_0_{i}") for i in range(1, 24)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within each other's statements
    try:
        for n in (1, 2):
            init("async_rollout", own={"n": n})
            asyncio.run(job())
    finally:
        sys.setswitchinterval(before)


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
