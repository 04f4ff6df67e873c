"""SkipManager and its decorator, over the rollout role."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlskip import RolloutSkipConfig, SkipManager, SkipManagerConfig
from rlskip.errors import ConfigError, NotInstalledError, RlskipError
from tests.skip.prompt_stages import run
from tests.skip.trainers import Stage, leases, steps_on_disk, visit


def test_what_cannot_be_dumped_still_reaches_the_trainer(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    dumps = init(at=1)
    rollouts = {"a": 1, "lock": threading.Lock()}
    generate = SkipManager.annotate(role="rollout")(lambda prompts: rollouts)
    assert generate([1])["a"] == 1
    assert "NOT dumped, training goes on" in caplog.text
    assert "lock" in caplog.text
    assert "Traceback" not in caplog.text, "the message says it all"
    assert steps_on_disk(dumps) == []


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


def test_what_is_no_stage_is_refused_by_name() -> None:
    for what in (property(lambda self: 1), 5, int):
        with pytest.raises(ConfigError, match=r"^SkipManager\.annotate: "):
            SkipManager.annotate(role="rollout")(what)
    with pytest.raises(RlskipError, match="it is a generator"):
        SkipManager.annotate(role="rollout")(lambda prompts: (yield prompts))


def test_init_replaces_what_was_on_and_where_it_fails_nothing_runs(
    init: Callable[..., Path],
) -> None:
    dumps = init(at=3)
    init(enable=False)
    stage = Stage()
    assert [stage.at(1), stage.at(1)] == [1, 2]
    assert not dumps.exists()
    SkipManager.init({"skip": {}})
    assert SkipManager.step is None
    assert SkipManager.skip_instances == {}
    init()
    with pytest.raises(ConfigError):
        init(stepz=1)
    with pytest.raises(NotInstalledError):
        Stage().at(1)


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
    dumps = init(at=1)

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
        ({"enable": True, "rollout": {}}, "enable"),
        ({"steps": "all"}, "steps"),
        ({"enable": True, "rollout": {"enable": False}}, None),
        ({"rollout": {"dump_dir": "x"}}, "rollout.dump_dir"),
        (RolloutSkipConfig(keep_last=2), "rollout.keep_last"),
        ({"dump_dir": "x", "reward": {"enable": True}}, None),
    ],
)
def test_keys_that_no_role_takes_are_a_warning(
    tmp_path: Path, monkeypatch: Any, caplog: Any, skip: Any, key: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = not isinstance(skip, dict)
    SkipManager.init(SkipManagerConfig(rollout=skip) if typed else {"skip": skip})
    SkipManager.init(SkipManagerConfig())
    told = [r.message for r in caplog.records if "NOTHING is skipped" in r.message]
    assert len(told) == (key is not None)
    if key:
        assert f"skip.{key} is set, and no role is on; set skip.rollout.enable=true" in told[0]


# -- arguments that cannot be right are refused; nothing is skipped or run without notice -----


generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
generate_one = SkipManager.annotate(role="async_rollout")(lambda prompts: prompts)


def test_what_is_not_a_config_is_refused() -> None:
    node = OmegaConf.create({"skip": {"values": {"enable": True}}}).skip
    typed = OmegaConf.structured(SkipManagerConfig)
    for config in ("rollout_cache", 5, ["skip"], {}, {"trainer": {}}, node, typed):
        with pytest.raises(ConfigError, match="skip"):
            SkipManager.init(config)  # type: ignore[arg-type]


def test_any_integer_is_a_step_and_nothing_else(init: Callable[..., Path]) -> None:
    init()
    for step in (4, np.int64(4), np.uint8(4), torch.tensor(4)):
        SkipManager.set_step(3)
        SkipManager.set_step(step)  # type: ignore[arg-type]
        assert (SkipManager.step, type(SkipManager.step)) == (4, int)
    odd: Any
    for odd in ("1", 1.0, -1, None, [1], torch.tensor([1, 2])):
        with pytest.raises(ConfigError, match=r"SkipManager\.set_step: .* is not a step"):
            SkipManager.set_step(odd)
        with pytest.raises(ConfigError, match=r"SkipManager\.will_replay: .* is not a step"):
            SkipManager.will_replay("rollout", [odd])
        assert SkipManager.step == 4


def test_an_option_of_another_kind_is_refused(init: Callable[..., Path]) -> None:
    options = {"prompts": 5, "identity": ["n"], "lacks": ["n"], "ignore": "n", "on_replay": 3}
    for name, value in options.items():
        with pytest.raises(ConfigError, match=rf"{name}=\.\.\.\): expected "):
            SkipManager.annotate(role="rollout", **{name: value})  # type: ignore[arg-type]
    init(at=1)
    stage = SkipManager.annotate(role="rollout", identity=lambda prompts: None)(len)
    with pytest.raises(ConfigError, match="returns None, and not a mapping"):
        stage([1])


def test_what_is_no_role_is_refused() -> None:
    for role in ("rolout", "rollouts", "asyncrollout", "rollout-tq"):
        with pytest.raises(ConfigError, match=r"did you mean '.*rollout(_tq)?'"):
            SkipManager.annotate(role=role)
    odd: Any
    for odd in ("", "my role", 5, ["rollout"], "steps", np.zeros(0), np.zeros(2)):
        with pytest.raises(ConfigError, match="there is no role"):
            SkipManager.annotate(role=odd)


def test_two_roles_do_not_share_a_directory(tmp_path: Path) -> None:
    roles = {"rollout": {"enable": True}, "async_rollout": {"enable": True}}
    with pytest.raises(
        ConfigError, match=r"skip\.async_rollout\.dump_dir: roles rollout and async"
    ):
        SkipManager.init({"skip": {"dump_dir": str(tmp_path), **roles}})
    roles["async_rollout"]["dump_dir"] = str(tmp_path / "other")  # type: ignore[assignment]
    SkipManager.init({"skip": {"dump_dir": str(tmp_path), **roles}})
    assert set(SkipManager.skip_instances) == set(roles)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The warnings of a test."""
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(("steps", "lists"), [("2-7", ""), ("7", "7"), ([], "none")])
def test_steps_that_a_loop_does_not_reach_are_told_as_it_ends(
    init: Callable[..., Path], warned: Any, steps: Any, lists: str
) -> None:
    init(steps=steps)
    run(generate, [1], [1])
    importlib.import_module("rlskip.skip.manager")._say_what_is_kept()  # as Python ends
    what = f"its function was called, but at no step that is listed: skip.steps lists {lists}"
    assert warned.text.count(what) == bool(lists)


@pytest.mark.parametrize(
    ("typed", "own", "unmet"),
    [
        (["nmae", "name", "other", "len.x", "self.a", "*"], ["promts.a"], "nmae, promts.a"),
        (["name.lr"], ["extra"], ""),
    ],
)
def test_names_that_no_stage_has_are_told_as_it_ends(
    init: Callable[..., Path], warned: Any, typed: list[str], own: list[str], unmet: str
) -> None:
    init(ignore=typed, at=1)
    first = SkipManager.annotate("rollout", ignore=own)(lambda prompts, name=1, **more: len([]))
    first([1], extra=1)
    SkipManager.annotate("rollout")(lambda prompts, other=1: 1)([2])
    importlib.import_module("rlskip.skip.manager")._say_what_is_kept()
    assert warned.text.count("rlskip: skip.ignore or annotate(ignore=...)") == bool(unmet)
    assert f"names {unmet}, which no stage has" in warned.text or not unmet


def test_steps_that_were_not_dumped_are_counted_as_a_loop_ends(
    init: Callable[..., Path], warned: Any
) -> None:
    init()
    stage = SkipManager.annotate(role="rollout")(lambda prompts: iter(prompts))  # no codec has it
    run(stage, [1], [1])
    importlib.import_module("rlskip.skip.manager")._say_what_is_kept()
    assert "role rollout: 0 hits, 2 misses (2 NOT dumped)" in warned.text


def test_a_function_of_another_role_is_named(init: Callable[..., Path], warned: Any) -> None:
    init("async_rollout", at=1)
    generate([1])
    assert warned.text == ""
    run(generate, [1], [1], [1], first=2)
    what = (
        "role async_rollout is enabled and was NEVER CONSULTED up to step 1: functions of role "
        "rollout were called instead: skip.rollout.enable=true"
    )
    assert warned.text.count("NEVER CONSULTED") == warned.text.count(what) == 1
    assert SkipManager.bypassed == {"rollout"}
    init("rollout")
    assert SkipManager.bypassed == set()
    SkipManager.set_step(1)
    generate([1])
    warned.clear()
    generate_one([1])
    SkipManager.set_step(2)
    assert warned.text == ""


def test_a_stage_that_nobody_calls_is_named_after_the_first_step(
    init: Callable[..., Path], warned: Any
) -> None:
    # The functions of async_rollout may be called in another process.
    for role, times in ("rollout", 1), ("async_rollout", 0):
        init(role)
        warned.clear()
        for step in (1, 1, 2, 3):
            assert "NEVER CONSULTED" not in warned.text or step == 3
            SkipManager.set_step(step)
        assert warned.text.count(f"role {role} is enabled and was NEVER CONSULTED up to") == times
        assert warned.text.count("skip.attach.ROLE=package.module:function") == times


def test_a_stage_within_a_replayed_one_is_not_missed(
    init: Callable[..., Path], warned: Any
) -> None:
    experience = SkipManager.annotate(role="experience")(lambda prompts: generate(prompts))
    for again in (False, True):
        init("rollout", experience={"enable": True})
        assert run(experience, [1], [2], [3]) == [[1], [2], [3]]
        assert (SkipManager.skip_instances["rollout"].recorder is None) is again
    assert "NEVER CONSULTED" not in warned.text


@pytest.mark.parametrize(
    ("validated", "warns"),
    [(0, False), (7, False), (None, True)],
    ids=["before training", "at a checkpoint", "never"],
)
def test_validation_before_training_is_no_step_that_the_stage_missed(
    init: Callable[..., Path], warned: Any, validated: int | None, warns: bool
) -> None:
    init("rollout", validation="replay")
    validate = SkipManager.annotate(role="rollout_val")(lambda prompts: prompts)
    first = 7 if validated is None else validated
    SkipManager.set_step(first)
    if validated is not None:
        validate({"validate": True, "ids": [1]})
    SkipManager.set_step(first + 1)
    assert ("NEVER CONSULTED" in warned.text) is warns
    warned.clear()
    generate([1])
    for step in (2, 3):  # validation may come later
        SkipManager.set_step(first + step)
    assert "NEVER CONSULTED" not in warned.text


def test_a_call_meanwhile_a_step_begins_that_is_not_listed_just_runs(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    dumps = init(at=1, steps="1")
    call = threading.Thread(target=stage, args=("p",))

    def begin() -> None:
        call.start()
        call.join(0.2)

    monkeypatch.setattr(SkipManager.skip_instances["rollout"], "begin_visit", begin)
    SkipManager.set_step(2)
    call.join()
    assert not [*dumps.rglob("gen_batch.dp")]
