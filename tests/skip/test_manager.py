"""SkipManager and its decorator, over the rollout role."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager, SkipManagerConfig
from rlskip.errors import ConfigError, NotInstalledError
from rlskip.jobs.records import tally
from tests.skip.trainers import Stage, leases, steps_on_disk, visit

# -- off --------------------------------------------------------------------------------------


def test_off_the_original_runs(init: Callable[..., Path]) -> None:
    dumps = init(enable=False)
    stage = Stage()
    assert [stage.at(1), stage.at(1)] == [1, 2]
    assert not dumps.exists()


def test_what_cannot_be_dumped_still_reaches_the_trainer(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init()

    @SkipManager.annotate(role="rollout")
    def generate(prompts: list[int]) -> dict[str, Any]:
        return {"a": 1, "lock": threading.Lock()}

    SkipManager.set_step(1)
    assert generate([1])["a"] == 1
    assert "NOT dumped, training goes on" in caplog.text
    assert "lock" in caplog.text
    assert "Traceback" not in caplog.text, "the message says it all"
    assert steps_on_disk(dumps) == []


# -- async ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stage_may_change_what_a_replay_returns(
    init: Callable[..., Path], is_async: bool
) -> None:
    """What the function itself returns stays as it is."""
    init()

    def generate(prompts: list[int]) -> dict[str, Any]:
        return {"ids": prompts, "seconds": 5}

    async def generate_async(prompts: list[int]) -> dict[str, Any]:
        return generate(prompts)

    annotate = SkipManager.annotate(role="rollout", on_replay=lambda made: {**made, "seconds": 0})
    stage = annotate(generate_async if is_async else generate)
    for seconds in (5, 0):
        visit(1)
        got = asyncio.run(stage([7])) if is_async else stage([7])
        assert got == {"ids": [7], "seconds": seconds}


def test_generators_are_refused() -> None:
    with pytest.raises(TypeError, match="generator"):

        @SkipManager.annotate(role="rollout")
        def generate(prompts: list[int]) -> Any:
            yield prompts


class Noting:
    """An object that is a stage."""

    def __init__(self, note: Callable[..., Any]) -> None:
        self.note = note

    def __call__(self, prompts: list[int]) -> list[int]:
        self.note(prompts)
        return prompts


def plain(note: Callable[..., Any], prompts: list[int]) -> list[int]:
    return Noting(note)(prompts)


async def coroutine(note: Callable[..., Any], prompts: list[int]) -> list[int]:
    return plain(note, prompts)


KINDS: dict[str, Callable[..., Any]] = {
    "partial": functools.partial(functools.partial, plain),
    "partial of a coroutine function": functools.partial(functools.partial, coroutine),
    "object": Noting,
    "static method": lambda note: staticmethod(functools.partial(plain, note)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_can_be_called_is_a_stage(init: Callable[..., Path], kind: str) -> None:
    ran: list[Any] = []
    annotate = SkipManager.annotate(role="rollout", prompts="prompts")
    stage = annotate(KINDS[kind](ran.append))
    call = stage.__func__ if isinstance(stage, staticmethod) else stage
    assert asyncio.iscoroutinefunction(call) is ("coroutine" in kind)
    dumps = init()
    for _ in range(3):
        visit(1)
        result = call([1])
        assert (asyncio.run(result) if inspect.isawaitable(result) else result) == [1]
        assert not leases(dumps)
    assert ran == [[1]]


@pytest.mark.parametrize("what", [property(lambda self: 1), 5, int], ids=["property", "5", "int"])
def test_what_cannot_be_called_is_refused_by_name(what: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SkipManager.annotate(role="rollout")(what)
    assert caught.value.where == "SkipManager.annotate"


# -- the table --------------------------------------------------------------------------------


def test_after_a_failed_init_nothing_runs_in_silence(init: Callable[..., Path]) -> None:
    init()
    with pytest.raises(ConfigError):
        init(stepz=1)
    with pytest.raises(NotInstalledError):
        Stage().at(1)


def test_init_replaces_what_was_on(init: Callable[..., Path]) -> None:
    init()
    SkipManager.set_step(3)
    SkipManager.init({"skip": {}})
    assert SkipManager.step is None
    assert SkipManager.skip_instances == {}


# -- records ----------------------------------------------------------------------------------


def test_an_unlisted_step_is_consulted_too(init: Callable[..., Path]) -> None:
    dumps = init(steps=[5])
    Stage().at(1)
    counts = tally({"rollout": str(dumps)}, "job")["rollout"]
    assert (counts.consulted, counts.hits, counts.misses) == (True, 0, 0)


def test_a_cancelled_call_ends_quietly_while_its_thread_works_on(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    init()
    begun, cancelled = threading.Event(), threading.Event()

    def held(prompts: list[int]) -> dict[str, int]:
        begun.set()
        cancelled.wait(60)
        return {}

    @SkipManager.annotate(role="rollout", identity=held)
    async def generate(prompts: list[int]) -> None: ...

    async def main() -> None:
        SkipManager.set_step(1)
        task = asyncio.create_task(generate([1]))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("made", [lambda coroutine: coroutine, asyncio.ensure_future])
def test_a_plain_function_that_returns_what_is_awaited_is_refused(
    init: Callable[..., Path], made: Callable[..., Any]
) -> None:
    dumps = init()
    SkipManager.set_step(1)

    async def generate(prompts: list[int]) -> list[int]:
        return prompts

    async def main() -> None:
        with pytest.raises(ConfigError, match="async def"):
            SkipManager.annotate(role="rollout")(lambda prompts: made(generate(prompts)))([1])

    asyncio.run(main())
    assert not leases(dumps)


@pytest.mark.parametrize(
    ("skip", "key"),
    [
        ({"dump_dir": "x"}, "dump_dir"),
        ({"steps": [1], "rollout": {"enable": False}}, "steps"),
        ({"validation": "replay"}, "validation"),
        ({"dump_dir": "x", "enable": False}, None),
        ({"enable": True, "rollout": {}}, None),
        ({"steps": "all"}, None),
        ({"dump_dir": "x", "reward": {"enable": True}}, None),
    ],
)
def test_keys_that_no_role_takes_are_a_warning(
    tmp_path: Path, monkeypatch: Any, caplog: Any, skip: dict[str, Any], key: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    SkipManager.init({"skip": skip})
    SkipManager.init(SkipManagerConfig())
    told = [r.message for r in caplog.records if "NOTHING is skipped" in r.message]
    assert len(told) == (key is not None)
    if key:
        assert f"skip.{key} is set, and no role is on; set skip.rollout.enable=true" in told[0]
