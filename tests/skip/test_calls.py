"""A stage that is called several times in a step."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import ConfigError, MismatchError, MissError
from rlskip.jobs.records import tally_steps

made: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    made.clear()


@SkipManager.annotate(role="rollout", identity=lambda prompts, greedy=False: {"greedy": greedy})
def generate(prompts: str, greedy: bool = False) -> str:
    made.append(prompts)
    return f"{prompts}{len(made)}"


def step(number: int, *calls: str) -> list[str]:
    """One visit of a step; an upper-case letter is a greedy baseline."""
    SkipManager.set_step(number + 1)
    SkipManager.set_step(number)
    return [generate(call.lower(), greedy=call.isupper()) for call in calls]


def on_disk(dumps: Path) -> list[str]:
    paths = (path.relative_to(dumps).parts[2:-1] for path in dumps.rglob("gen_batch.dp"))
    return sorted("/".join(parts) for parts in paths)


# -- which dump serves a call ------------------------------------------------------------------


def test_each_call_has_a_dump_of_its_own(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "abc"})
    assert on_disk(dumps) == ["1", "1/1", "1/2"]
    assert step(1, *"abc") == ["a1", "b2", "c3"]
    assert made == []


def test_the_records_count_each_call(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "abc"})
    step(1, *"ca")
    step(1, *"c")
    (counted,) = tally_steps(dumps).values()
    hits = {key: tally.hits for key, tally in counted.items() if tally.hits}
    assert hits == {(1, 0): 1, (1, 2): 2}


def test_a_call_is_served_whatever_its_place(dumped_calls: Any) -> None:
    dumped_calls({1: "abc"})
    assert step(1, *"cab") == ["c3", "a1", "b2"]
    assert made == []


def test_equal_calls_are_served_in_order_and_one_more_is_added(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "aa"})
    assert step(1, *"aaa") == ["a1", "a2", "a1"]
    assert made == ["a"], "the third is generated"
    assert on_disk(dumps) == ["1", "1/1", "1/2"]
    assert step(1, *"aaa") == ["a1", "a2", "a1"]
    assert made == ["a"]


def test_the_same_step_again_continues_the_visit(dumped_calls: Any) -> None:
    dumped_calls({1: "aa"})
    assert step(1, "a") == ["a1"]
    SkipManager.set_step(1)
    assert generate("a") == "a2"
    SkipManager.set_step(2)
    SkipManager.set_step(1)
    assert generate("a") == "a1"


def test_a_greedy_baseline_is_a_call_of_its_own(dumped_calls: Any) -> None:
    dumped_calls({1: "aAbB"})
    assert step(1, *"AaBb") == ["a2", "a1", "b4", "b3"]
    assert made == []


def test_a_step_that_was_cut_off_replays_what_it_has(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumps = dumped_calls({1: "ab"})
    with caplog.at_level(logging.INFO):
        assert step(1, *"abc") == ["a1", "b2", "c1"]
    assert "call 2 is generated: no dump of the step has its prompts" in caplog.text
    assert on_disk(dumps) == ["1", "1/1", "1/2"]


# -- mismatches and misses ---------------------------------------------------------------------


def test_the_first_call_that_fits_none_is_a_mismatch(dumped_calls: Any) -> None:
    dumped_calls({1: "ab"})
    with pytest.raises(
        MismatchError,
        match=r"step 1, call 1, the nearest of its 2 calls, was "
        r"made for another call: extra.greedy: True now, False in the dump",
    ):
        step(1, "B")
    assert made == []


def test_a_later_call_that_fits_none_is_a_miss(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumped_calls({1: "ab"})
    with caplog.at_level(logging.INFO):
        assert step(1, *"aB") == ["a1", "b1"]
    assert "step 1, call 1 is generated: extra.greedy: True now, False in" in caplog.text


def test_regenerate_quarantines_only_the_call_that_differs(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "ab"}, on_mismatch="regenerate")
    assert step(1, *"xb") == ["x1", "b2"]
    assert made == ["x"]
    assert [name for name in on_disk(dumps) if "bad" not in name] == ["1", "1/1"]
    assert len(list(dumps.rglob("1.bad-*"))) == 1
    assert step(1, *"xb") == ["x1", "b2"]


def test_ignore_takes_the_call_of_the_same_place_else_the_last(dumped_calls: Any) -> None:
    dumped_calls({1: "abc"}, on_mismatch="ignore")
    assert step(1, *"xayz") == ["a1", "b2", "c3", "c3"]
    assert made == []


def test_ignore_generates_what_the_step_never_had(init: Callable[..., Path]) -> None:
    init(on_mismatch="ignore")
    assert step(1, *"ab") == ["a1", "b2"]
    assert step(1, *"xy") == ["a1", "b2"]


def test_on_miss_error_refuses_what_is_not_served(dumped_calls: Any) -> None:
    dumped_calls({1: "ab"}, on_miss="error")
    assert step(1, *"ab") == ["a1", "b2"]
    with pytest.raises(MissError, match="its dumps have served other calls"):
        generate("a")
    with pytest.raises(MissError, match="no dump of the step has its prompts"):
        generate("c")
    with pytest.raises(MismatchError):
        step(1, "x")
    assert made == []


def test_repeat_takes_the_same_call_of_its_source_else_the_last(dumped_calls: Any) -> None:
    dumped_calls({1: "ab"}, action="repeat")
    assert step(5, *"xyz") == ["a1", "b2", "b2"]
    assert step(1, *"xyz") == ["a1", "b2", "b2"]
    assert made == []


def test_repeat_generates_all_calls_of_its_first_step(init: Callable[..., Path]) -> None:
    init(action="repeat")
    assert step(1, *"ab") == ["a1", "b2"]
    assert step(2, *"cd") == ["a1", "b2"]


# -- other steps of the run ----------------------------------------------------------------------


def test_match_run_looks_in_other_steps(
    dumped_calls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dumps = dumped_calls({1: "ab", 2: "cd", 3: "ef"}, match="run")
    with caplog.at_level(logging.INFO):
        assert step(1, *"abc") == ["a1", "b2", "c3"]
        assert step(2, *"def") == ["d4", "e5", "f6"]
        assert step(3, *"fgh") == ["f6", "g1", "h2"]
    assert made == ["g", "h"]
    assert "a call of step 1 replayed from step 2 of the run (match=run)" in caplog.text
    assert on_disk(dumps) == ["1", "1/1", "2", "2/1", "3", "3/1", "3/2", "3/3"]


def test_match_run_serves_each_dump_once_a_visit(dumped_calls: Any) -> None:
    dumped_calls({1: "a", 3: "a"}, match="run")
    assert step(2, *"aaa") == ["a1", "a2", "a1"]
    assert made == ["a"]


def test_what_no_step_has_is_still_a_mismatch(dumped_calls: Any) -> None:
    dumped_calls({1: "a", 2: "b"}, match="run")
    with pytest.raises(MismatchError, match="step 1 was made for another call"):
        step(1, "x")


def test_a_mismatch_names_the_step_that_has_the_prompts(dumped_calls: Any) -> None:
    dumped_calls({1: "a", 2: "bc"})
    with pytest.raises(MismatchError) as caught:
        step(1, "c")
    assert "A dump of step 2, call 1 has its prompts" in str(caught.value)
    assert "skip.rollout.match=run looks in the run's other steps, too" in str(caught.value)


def test_a_queues_role_refuses_to_look_elsewhere(init: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"skip\.rollout_tq\.match"):
        init("rollout_tq", match="run")


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("file", ["gen_batch.dp", "meta.json"])
@pytest.mark.parametrize("how", ["cut", "altered", "gone"])
def test_a_damaged_call_costs_that_call_only(
    dumped_calls: Any, damaged: int, file: str, how: str
) -> None:
    dumps = dumped_calls({1: "abc"})
    folder = next(dumps.glob("*/*/1")) / (str(damaged) if damaged else "")
    content = (folder / file).read_bytes()
    if how == "cut":
        (folder / file).write_bytes(content[:-9])
    elif how == "altered":
        (folder / file).write_bytes(content.replace(content[20:22], b"\xff\xff", 1))
    else:
        (folder / file).unlink()
    assert [text[0] for text in step(1, *"abc")] == ["a", "b", "c"]
    assert made == ["abc"[damaged]]
    made.clear()
    step(1, *"abc")
    assert made == []
    assert [name for name in on_disk(dumps) if "bad" not in name] == ["1", "1/1", "1/2"]


def test_a_call_that_was_removed_costs_that_call_only(dumped_calls: Any) -> None:
    dumps = dumped_calls({1: "abc"})
    shutil.rmtree(next(dumps.glob("*/*/1/1")))
    assert step(1, *"bca") == ["b1", "c3", "a1"]
    assert made == ["b"]


def test_a_stage_that_fails_leaves_no_gap(init: Callable[..., Path]) -> None:
    dumps = init()

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> str:
        if prompts == "fails":
            raise RuntimeError("out of memory")
        return prompts

    SkipManager.set_step(1)
    stage("a")
    with pytest.raises(RuntimeError):
        stage("fails")
    stage("b")
    assert on_disk(dumps) == ["1", "1/1"]


# -- side by side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_calls_side_by_side_in_threads(init: Callable[..., Path], background: bool) -> None:
    names = [f"{prompt}{i % 3}" for i, prompt in enumerate("abcdefghijkl" * 2)]
    count = threading.Barrier(len(names))

    @SkipManager.annotate(role="rollout")
    def stage(prompts: str) -> tuple[str, int]:
        made.append(prompts)
        return prompts, len(made)

    def visit(one_more: int) -> list[tuple[str, int]]:
        results = []
        SkipManager.set_step(one_more)
        SkipManager.set_step(1)

        def call(name: str) -> None:
            count.wait(60)
            results.append(stage(name))

        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        SkipManager.flush()
        return sorted(results)

    init(background_write=background)
    first = visit(2)
    assert len(made) == len(names)
    assert [name for name, _ in first] == sorted(names)
    made.clear()
    assert visit(2) == first, "each gets a call of its own"
    assert made == []


def test_calls_side_by_side_in_tasks(init: Callable[..., Path]) -> None:
    @SkipManager.annotate(role="rollout")
    async def stage(prompts: str) -> tuple[str, int]:
        await asyncio.sleep(0)
        made.append(prompts)
        return prompts, len(made)

    async def visit() -> list[tuple[str, int]]:
        SkipManager.set_step(2)
        SkipManager.set_step(1)
        return list(await asyncio.gather(*map(stage, "aabbccdd")))

    init()
    first = asyncio.run(visit())
    assert sorted(asyncio.run(visit())) == sorted(first)
    assert len(made) == 8
