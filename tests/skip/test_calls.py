"""A stage that is called several times in a step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlskip import SkipManager, register_skip
from rlskip.errors import MismatchError, MissError
from rlskip.jobs.records import tally_steps
from rlskip.skip import SKIP_REGISTRY, RolloutSkip
from rlskip.skip.call_role import CallRole
from rlskip.store import Identity, StepStore
from tests.skip.trainers import visit

THEIRS = Identity.of({"prompts": "a" * 32})
made: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    made.clear()


@SkipManager.annotate(role="rollout")
def generate(prompts: str) -> str:
    made.append(prompts)
    return f"{prompts}{len(made)}"


def step(number: int, *calls: str) -> list[str]:
    """One visit of a step."""
    visit(number)
    return [generate(call) for call in calls]


@pytest.fixture
def dumped_calls(init: Callable[..., Path]) -> Callable[..., Path]:
    """Dump steps, as ``dumped_calls({1: "abc"}, **skip)``; then start a run that has `skip`."""

    def start(steps: dict[int, str], **skip: Any) -> Path:
        init()
        for number, calls in steps.items():
            step(number, *calls)
        made.clear()
        return init(**skip)

    return start


def test_each_call_is_counted_and_the_reason_of_a_miss_is_logged(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumps = dumped_calls({1: "abc"})
    [step(1, *calls) for calls in ("ca", "c")]
    dumped_calls({}, action="repeat")
    assert step(2, *"wxyz") == ["a1", "b2", "c3", "c3"], "the last one from there on"
    (counted,) = tally_steps(dumps).values()
    hits = {key: tally.hits for key, tally in counted.items() if tally.hits}
    first, second, third = SkipManager.store("rollout").in_order(1)
    assert hits == {(1, first): 2, (1, second): 1, (1, third): 4}
    dumped_calls({})
    with caplog.at_level(logging.INFO):
        step(1, "a", "d")
    assert "no unused dump of the step was made for such a call" in caplog.text


def test_a_call_of_a_new_step_costs_the_same_however_many_were_made_before(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    init()
    step(1, "a")
    monkeypatch.setattr(StepStore, "calls", Mock(side_effect=AssertionError("all are listed")))
    assert generate("b") == "b2"


def test_a_repeat_takes_sound_dumps_and_keeps_what_it_generates(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumps = dumped_calls({1: "ab"}, action="repeat")
    for damaged in dumps.rglob("1.*/gen_batch.dp"):
        damaged.write_bytes(damaged.read_bytes()[::-1])
    assert step(1, *"wxy") == ["a1", "x1", "a1"], "the last one that is sound"
    shutil.rmtree(next(dumps.rglob("1")))
    assert (step(2), step(1, *"cx")) == ([], ["c2", "x3"]), "none to repeat without its first"
    assert caplog.text.count("the first dump of step 1 is missing") == 1
    dumped_calls({}, on_miss="error")
    assert {*step(1, *"cxx")} == {"c2", "x1", "x3"}


def test_a_mismatch_names_the_step_that_has_the_prompts(dumped_calls: Any) -> None:
    dumped_calls({1: "ad", 2: "bc"})
    with pytest.raises(MismatchError, match="the nearest of its 2 calls, was made for") as caught:
        step(1, "c")
    assert "they are the same prompts as those of step 2, call " in str(caught.value)
    assert "skip.rollout.match=run looks in the run's other steps, too" in str(caught.value)


# -- side by side ---------------------------------------------------------------------------------


@pytest.fixture
def asked() -> Iterator[None]:
    """A role whose methods are asked: they name a call by its arguments."""

    @register_skip("asked")
    class AskedSkip(RolloutSkip): ...

    yield
    del SKIP_REGISTRY["asked"]


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("role", "background"), [("rollout", False), ("rollout", True), ("asked", False)]
)
def test_calls_side_by_side_in_threads(
    init: Callable[..., Path], role: str, background: bool
) -> None:
    """Each gets a dump of its own, of equal calls, too."""
    names = [f"{prompt}{i % 3}" for i, prompt in enumerate("abcdefghijkl" * 2)]
    count = threading.Barrier(len(names))

    @SkipManager.annotate(role=role)
    def stage(prompts: str) -> tuple[str, int]:
        made.append(prompts)
        return prompts, len(made)

    def all_at_once() -> list[tuple[str, int]]:
        results = []
        visit(1)

        def call(name: str) -> None:
            count.wait(60)
            results.append(stage(name))

        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        SkipManager.flush()
        return sorted(results)

    init(role, wait_s=0, background_write=background)
    first = all_at_once()
    assert [name for name, _ in first] == sorted(names)
    assert all_at_once() == first, "each gets a call of its own"
    init(role, wait_s=0, background_write=background)
    assert all_at_once() == first
    assert len(made) == len(names)


@pytest.mark.parametrize("how", ["killed", "cancelled", "raised"])
@pytest.mark.parametrize("dumped", ["a", "bc"])
def test_a_call_that_was_under_way_is_no_mismatch_in_the_next_run(
    init: Callable[..., Path], tmp_path: Path, how: str, dumped: str
) -> None:
    """Of calls side by side some are dumped; the next run makes one of the others first.

    Where the first call was dumped, only a later one can have been under way.
    """
    killed = tmp_path / "killed"

    @SkipManager.annotate(role="rollout", ignore=["done"])
    async def stage(prompts: str, done: asyncio.Event) -> str:
        made.append(prompts)
        await done.wait()
        if prompts not in dumped and how == "raised":
            raise RuntimeError("out of memory")
        return prompts

    async def first_run() -> None:
        SkipManager.set_step(1)
        events = {name: asyncio.Event() for name in "abc"}
        tasks = {}
        for k, name in enumerate("abc", 1):
            tasks[name] = asyncio.create_task(stage(name, events[name]))
            while len(made) < k:
                await asyncio.sleep(0.001)
        for name in dumped:
            events[name].set()
            await tasks[name]
        shutil.copytree(tmp_path / "dumps", killed)
        for name in set("abc") - {*dumped}:
            events[name].set() if how == "raised" else tasks[name].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    init(wait_s=0)
    asyncio.run(first_run())
    init(wait_s=0, **({"dump_dir": str(killed)} if how == "killed" else {}))
    made.clear()
    missing = "".join(name for name in "abc" if name not in dumped)

    async def second_run(order: str) -> None:
        SkipManager.set_step(1)
        event = asyncio.Event()
        event.set()
        for name in order:
            if how == "raised" and name not in dumped:
                with pytest.raises(RuntimeError):
                    await stage(name, event)
            else:
                assert await stage(name, event) == name

    asyncio.run(second_run("abc" if "a" in dumped else missing + dumped))
    assert made == [*missing]


@pytest.mark.parametrize("late", [False, True], ids=["while it is dumped", "after that"])
def test_a_call_that_is_cancelled_with_its_result_leaves_no_dump(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The trainer makes it again, and gets another draw, which the next run replays."""
    saving, go_on, draws = threading.Event(), threading.Event(), iter(range(9))
    write = StepStore.write

    def held(self: StepStore, *dump: Any) -> Any:
        meta = write(self, *dump) if late else None
        saving.set()
        go_on.wait(60)
        return meta or write(self, *dump)

    @SkipManager.annotate(role="rollout")
    async def stage(prompts: str) -> int:
        return next(draws)

    async def main(calls: str) -> list[int]:
        SkipManager.set_step(1)
        return [await stage(call) for call in calls]

    async def cancelled() -> int:
        task = asyncio.create_task(stage("a"))
        await asyncio.to_thread(saving.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await stage("a")

    async def first_run() -> list[int]:
        drawn = await main("b")
        monkeypatch.setattr(StepStore, "write", held)
        return [*drawn, await cancelled(), *await main("c")]

    init()
    drawn = asyncio.run(first_run())
    assert drawn == [0, 2, 3]
    init(on_miss="error")
    assert SkipManager.will_replay("rollout", [1])
    assert asyncio.run(main("bac")) == drawn


@pytest.mark.parametrize(
    "skip", [{}, {"action": "repeat"}, {"match": "run"}, {"match": "prompt"}], ids=str
)
def test_the_dump_of_a_call_that_was_cancelled_serves_the_next_one(
    init: Callable[..., Path], skip: dict[str, str]
) -> None:
    begun, over, first = threading.Event(), threading.Event(), [True]

    def on_replay(result: str) -> str:
        if first and first.pop():
            begun.set()
            over.wait(60)
        return result

    @SkipManager.annotate(role="rollout", on_replay=on_replay)
    async def stage(prompts: str) -> str:
        made.append(prompts)
        return prompts

    async def replayed() -> str:
        task = asyncio.create_task(stage("a"))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            return await stage("a")
        finally:
            over.set()

    init(at=1)
    asyncio.run(stage("a"))
    init(on_miss="error", at=2 if skip else 1, **skip)
    assert asyncio.run(replayed()) == "a"
    assert made == ["a"]


def test_where_one_is_lost_no_first_call_is_a_mismatch(dumped_calls: Any, monkeypatch: Any) -> None:
    dumps = dumped_calls({1: "abc"}, on_miss="error")
    (next(dumps.glob("*/*/1")) / "meta.json").unlink()
    SkipManager.set_step(1)
    for prompts in "xy":  # the first, which was refused, does not count
        with pytest.raises(MissError, match="a dump of the step is missing, and the others were"):
            generate(prompts)
    SkipManager.store("rollout").quarantine(1, "for a test")
    with pytest.raises(MissError, match="a dump of the step is missing, and the others were"):
        step(1, "x")
    dumped_calls({2: "a"}, on_miss="error")
    monkeypatch.setattr(StepStore, "load", Mock(side_effect=OSError("it cannot be read now")))
    visit(2)
    for prompts in "ax":
        with pytest.raises(MissError, match="step 2 has no usable dump"):
            generate(prompts)


def test_a_dump_without_an_identity_serves_any_call_but_last(init: Callable[..., Path]) -> None:
    init()
    SkipManager.store("rollout").save(1, "unnamed")
    assert step(1, "a") == ["unnamed"]
    assert (step(1, "a", "b"), step(1, "b", "a")) == (["unnamed", "b1"], ["b1", "unnamed"])


def test_a_call_that_cannot_be_compared_costs_no_dump_that_served_another(
    dumped_calls: Any,
) -> None:
    dumps = dumped_calls({1: "a"}, on_mismatch="regenerate")
    assert step(1, "a") == ["a1"]
    generate(object())  # type: ignore[arg-type]
    assert len(made) == 1
    assert not list(dumps.rglob("*.bad-*"))


def test_a_dump_that_is_replaced_before_it_is_loaded_is_a_miss(
    dumped_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped_calls({1: "a", 2: "b"})
    load, replaced = StepStore.load, []

    def load_later(self: StepStore, number: int, **more: Any) -> Any:
        if not replaced:
            identity = self.read_meta(1).identity
            self.quarantine(1, "for a test")
            replaced.append(self.save(1, "another job's", identity=identity))
        return load(self, number, **more)

    monkeypatch.setattr(StepStore, "load", load_later)
    assert step(1, "a") == ["a1"]
    assert made == ["a"]


def test_what_replaces_a_dump_has_a_name_of_its_own(init: Callable[..., Path]) -> None:
    runs, taken = list[str](), list[str]()

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str, scale: int = 1) -> str:
        runs.append(prompts)
        for name in taken:  # by another job, meanwhile
            SkipManager.store("rollout").save(1, "theirs", call=name, identity=THEIRS)
        return prompts

    init(wait_s=0, at=1)
    stage("a", scale=2)
    stage("b")
    _, *taken = SkipManager.store("rollout").in_order(1)
    for prompts in "cd":
        for on_mismatch in ("regenerate", "error"):  # from the last dump it differs in less
            init(wait_s=0, on_mismatch=on_mismatch, at=1)
            assert stage(prompts) == prompts
    assert runs == [*"abcd"], "each time another run replays it"


def test_of_two_jobs_that_generate_a_call_one_leaves_a_dump(init: Any, monkeypatch: Any) -> None:
    def second(self: StepStore, dump: Any, over: Any = None) -> Any:
        monkeypatch.undo()
        self.save(1, "theirs", identity=dump.identity)
        return self.write(dump, over)

    init(match="run", wait_s=0)
    monkeypatch.setattr(StepStore, "write", second)
    assert step(1, "a") == ["a1"]
    assert SkipManager.store("rollout").calls(1) == [""]


@pytest.mark.parametrize("background", [False, True])
def test_a_name_that_another_job_took_meanwhile_stays_its_own(
    init: Callable[..., Path], background: bool
) -> None:
    init(wait_s=0, background_write=background, at=1)
    store = SkipManager.store("rollout")

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        store.save(1, "theirs", identity=THEIRS)
        return prompts

    assert stage("ours") == "ours"
    SkipManager.flush()
    first, second = store.in_order(1)
    assert (first, second[-2:]) == ("", "-0")
    assert [store.load(1), store.load(1, call=second)] == ["theirs", "ours"]
    assert step(2) == []
    SkipManager.set_step(1)
    assert stage("ours") == "ours"


def test_calls_side_by_side_never_take_one_dump(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their own steps, with equal prompts: both look before either has taken what it found."""

    draws = itertools.count()

    @SkipManager.annotate(role="async_rollout", ignore=["sample_id"])
    async def generate(prompts: str, sample_id: str) -> int:
        return next(draws)

    async def both(*steps: int) -> list[int]:
        return await asyncio.gather(
            *(generate("p", sample_id=f"sample_0_{step}") for step in steps)
        )

    init("async_rollout")
    (dumped,) = asyncio.run(both(1))
    init("async_rollout", match="run")
    real, met = StepStore.read_meta, threading.Barrier(2)

    def together(self: Any, *args: Any) -> Any:
        if (found := real(self, *args)) is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                met.wait(0.3)
        return found

    monkeypatch.setattr(StepStore, "read_meta", together)
    got = asyncio.run(both(5, 6))
    assert got.count(dumped) == 1


@pytest.mark.parametrize("match", ["step", "run", "prompt"])
def test_equal_calls_side_by_side_keep_their_order_and_step(
    init: Callable[..., Path], match: str
) -> None:
    draws = itertools.count()

    @SkipManager.annotate(role="rollout")
    async def generate(prompts: list[str]) -> tuple[int]:
        return (next(draws),)

    async def ahead() -> list[tuple[int]]:
        tasks = []
        for step in range(1, 5):
            SkipManager.set_step(step)
            tasks += [asyncio.ensure_future(generate(["p" * 10_000])) for _ in range(8)]
            await asyncio.sleep(0)  # it goes on before each has looked for its dump
        return await asyncio.gather(*tasks)

    init(match=match)
    made = asyncio.run(ahead())
    assert len({*made}) == len(made)
    init(match=match)
    assert asyncio.run(ahead()) == made


def test_a_call_stays_its_steps_where_another_thread_goes_on(
    init: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = itertools.count()
    stage = SkipManager.annotate(role="rollout")(lambda prompts: next(draws))
    init(at=1)
    assert stage("p") == 0
    real = CallRole.visit

    def late(self: Any, step: int) -> Any:
        loop = threading.Thread(target=SkipManager.set_step, args=(2,))
        loop.start()
        loop.join(0.2)
        return real(self, step)

    monkeypatch.setattr(CallRole, "visit", late)
    assert stage("p") == 1, "the dump of the step's first call serves no other one"


def test_what_has_served_the_run_is_not_replaced(dumped_calls: Any) -> None:
    dumped_calls({1: "a", 2: "b"}, match="run", on_mismatch="regenerate")
    assert (step(1, "b"), step(2, "c")) == (["b2"], ["c1"])
    dumped_calls({}, match="run", on_miss="error")
    assert (step(1, "b"), step(2, "c")) == (["b2"], ["c1"])
