"""`rlskip compare` of dumps: rollouts are compared by the comparer of recorded stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlskip.compare.rounding import Rounding
from rlskip.compare.sides import Dumps, characters, compare_sides
from rlskip.compare.verdict import Comparison
from rlskip.config.steps import Steps
from rlskip.runs.opened import NoSuchPlaceError, Run
from rlskip.store import StepStore

ALL = Steps.parse("all")
NAN = float("nan")


def row(prompt: int, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": [prompt, 1], "completion_ids": [5, 6, 7], **more}


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    """The comparison of two lists of rows, or of lists of calls; each is a step of a run."""

    def compare(a: Any, b: Any, **tolerance: float) -> Comparison:
        shutil.rmtree(tmp_path / "e_p", ignore_errors=True)
        store = StepStore(tmp_path / "e_p" / "GBSany_Nany_inany_outany")
        for step, side in ((1, a), (2, b)):
            calls = side if isinstance(side, list) and isinstance(side[0], list) else [side]
            for number, rows in enumerate(calls):
                call = f"{number:016x}-1" if number else ""
                store.save(step, rows, call=call, info={"place": number})
        run = Run(store.directory)
        return compare_sides(*Dumps.pair(run[1], run[2]), Rounding(**tolerance), ALL)

    return compare


def first(found: Comparison) -> Any:
    """Stage, values and token of the first difference."""
    one = found.first
    if one is None:
        return None
    at = one.at
    return (one.stage, at and at.a, at and at.b, at and at.token)


def test_rows_are_found_by_their_tokens_and_each_part_is_judged(compared: Any) -> None:
    def rows(**change: Any) -> list[dict[str, Any]]:
        made = [row(p, logprobs=[-0.1, -0.2, -0.3], reward=1.0) for p in (1, 2, 3)]
        made[1].update(change)
        return made

    assert compared(rows(), rows()[::-1]).is_equal
    other = rows(logprobs=[-0.1, -0.25, -0.3], reward=0.5)
    assert first(compared(rows(), other)) == ("log_probs", -0.2, -0.25, 3)
    assert compared(rows(), other, atol=0.6).is_equal
    assert compared(rows(), other, rtol=0.6).is_equal
    assert first(compared(rows(), other, atol=0.2, rtol=0.19)) == ("rewards", 1.0, 0.5, None)
    assert first(compared(rows(), rows(prompt_ids=[9, 9]))) == ("rollouts", None, None, None)
    assert first(compared(rows(), rows(completion_ids=[5, 6]))) == ("rollouts", 7, None, 4)
    assert first(compared(rows(), rows(completion_ids=[5, 9, 7]))) == ("rollouts", 6, 9, 3)
    assert compared(rows(), rows(reward=1.0 + 1e-8)).stages[-1].state == "within rounding"
    assert first(compared(rows(reward=NAN), rows(reward=float("inf"))))[0] == "rewards"
    said = compared([{"said": "a"}], [{"said": "a"}]).verdict()
    assert said == "equal to the bit: the rollouts of steps 1"
    twins = [row(1, completion_mask=mask) for mask in ([1, 1, 1], [1, 0, 1])]
    assert first(compared(twins, twins[:1] * 2)) == ("mask", False, True, 3)
    assert first(compared([row(1)] * 3, [row(1)] * 2)) == ("rollouts", None, None, None)
    tensors = [one | {"logprobs": np.array(one["logprobs"], np.float32)} for one in rows()]
    assert compared(rows(), tensors).stages[-2].state == "within rounding", "as Python's floats"


@pytest.mark.parametrize(
    ("column", "a", "b", "expected"),
    [
        ("logprobs", [-0.1, NAN, -0.3], [-0.1, NAN, -0.3], None),
        ("logprobs", [-0.1, NAN, -0.3], [-0.1, -0.2, -0.3], "log_probs"),
        ("reward", NAN, NAN, None),
        ("reward", NAN, 1.0, "rewards"),
        ("reward", None, 1.0, "only"),
        ("completion_mask", [1, 1, 1], [1, 0, 1], "mask"),
        ("completion_mask", None, [1, 1, 1], None),  # without a mask all tokens were sampled
        ("completion_mask", None, [1, 0, 1], "mask"),
    ],
)
def test_what_one_side_lacks_differs(
    compared: Any, column: str, a: Any, b: Any, expected: str | None
) -> None:
    found = compared([row(1, **{column: a})], [row(1, **{column: b})])
    if expected == "only":
        assert (found.is_equal, found.steps[0].only_b) == (False, ["rewards"])
    else:
        assert (found.first and found.first.stage) == expected
        assert found.is_equal is (expected is None)


def test_sessions_of_several_turns_are_compared_turn_by_turn(compared: Any) -> None:
    def turns(seen: int = 5, reward: float = 1.0, probs: float | None = None) -> Any:
        names = {"uid": "p", "session_id": 0}
        return [
            row(1, **names, turn=0, reward=0.0, logprobs=None),
            {
                **names,
                "turn": 1,
                "prompt_ids": [1, 1, 5, 6, 7, seen],
                "completion_ids": [8],
                "reward": reward,
                "logprobs": None if probs is None else [probs],
            },
        ]

    assert compared(turns(), turns()).is_equal
    assert "turn 1): 1 in A, 0.5 in B" in compared(turns(), turns(reward=0.5)).verdict()
    assert first(compared(turns(), turns(seen=4)))[0] == "rollouts"
    assert first(compared(turns(probs=-0.1), turns(probs=-0.4))) == ("log_probs", -0.1, -0.4, 6)


@pytest.mark.parametrize("chats", [False, True])
def test_texts_are_compared_by_characters(compared: Any, chats: bool) -> None:
    def texts(answers: str, rewards: Any, prompts: str = "AABB") -> dict[str, Any]:
        asked: Any = [[{"role": "user", "content": one}] for one in prompts]
        return {"prompt": asked if chats else list(prompts), "completion": list(answers),
                "rewards": rewards}  # fmt: skip

    a, rewards = texts("wxyz", [1.0, 0.0, 1.0, NAN]), [1.0, NAN, 1.0, 0.0]
    assert compared(a, texts("yzwx", rewards, "BBAA")).is_equal
    assert first(compared(a, texts("wxyz", [0.5, 0.0, 1.0, NAN]))) == ("rewards", 1.0, 0.5, None)
    found = compared(a, texts("Wxyz", [1.0, 0.0, 1.0, NAN]))
    assert first(found)[:3] == ("rollouts", ord("w"), ord("W"))
    assert "[w]" in found.verdict(characters)
    assert compared(a, texts("wxyz", [1.0, 0.0, 1.0, NAN], "CCBB")).first.off == 2
    without = ({"said": ["x", "y"], "rewards": ["good", None]},
               {"said": ["x", "y"], "rewards": ["bad", None]})  # fmt: skip
    assert compared(*without).first.off == 1, "a reward that is no number is text"


def test_images_are_compared_by_what_they_show(compared: Any) -> None:
    images = pytest.importorskip("PIL.Image")

    def shown(*shades: int) -> dict[str, Any]:
        content = [[{"type": "image", "image": images.new("L", (2, 2), i)}] for i in shades]
        prompts = [[{"role": "user", "content": one}] for one in content]
        return {"prompt": prompts * 2, "completion": list("abcd")}

    assert compared(shown(0, 9), shown(0, 9)).is_equal
    assert compared(shown(0, 9), shown(0, 8)).first.off == 2


def test_all_calls_of_a_step_are_compared(compared: Any) -> None:
    assert compared([[row(1)], [row(2)]], [[row(2)], [row(1)]]).is_equal
    found = compared([[row(1)]], [[row(1)], [row(2)]])
    assert found.first.note == "0 rows only in A, 1 only in B"
    assert [one.state for one in found.stages] == ["differs", "not comparable"]
    a, b = ([[row(1, completion_ids=[n])], [row(2, logprobs=[-0.1 * n] * 3)]] for n in (8, 9))
    shown = [one.at.around[0] for one in compared(a, b).stages if one.stage == "log_probs"]
    assert shown == [[2, 1, 5, 6, 7]], "the tokens of its own call"
    assert not compared([row(1)], {"prompt_ids": [], "completion_ids": []}).is_equal


def test_a_step_that_a_live_run_removes_meanwhile_is_listed(dumps: Path) -> None:
    run = Run(dumps / "grpo_tiny" / "GBS4_N2_in6_out8")

    def progress(steps: Sequence[int]) -> Iterator[int]:
        for step in steps:
            if step == 2:
                shutil.rmtree(run.directory / "2")
            yield step

    sides = Dumps.pair(run, run)
    found = compare_sides(*sides, Rounding(), ALL, progress)
    assert [one.step for one in found.steps] == [1, 3]
    assert ([*found.unreadable], found.is_equal) == ([2], False)
    with pytest.raises(NoSuchPlaceError, match="no common step"):
        compare_sides(*sides, Rounding(), Steps.parse("2"))
