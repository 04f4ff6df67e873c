"""`diff`: in which sessions prompts, tokens, log-probs and rewards differ."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlskip.compare.rollouts import Difference, compare_rollouts, compare_sessions
from rlskip.config.steps import Steps
from rlskip.runs.columns import rollout_columns
from rlskip.runs.opened import NoSuchPlaceError, Run, Step
from rlskip.runs.rollouts import Rollouts
from rlskip.store import StepStore


def test_diff_says_from_which_token_on(rlskip: Any, dumps: Path) -> None:
    said = rlskip("compare", dumps / "grpo_tiny", dumps / "grpo-lr2_tiny", "--json")
    assert said.code == 1
    (found,) = said.json["differences"]
    assert [one["same"] for one in said.json["steps"]] == [8, 7, 8]
    assert [one["same_groups"] for one in said.json["steps"]] == [4, 3, 4]
    assert (found["step"], found["a"], found["b"], found["token"]) == (2, 7, 7, 3)
    assert (found["log_prob"], found["reward"]) == (None, None)
    same = rlskip("compare", 1, 1, "-d", dumps / "grpo_tiny")
    assert same.code == 0
    assert same.out.startswith("8 of 8 sessions are the same\n"), "the verdict comes first"


def test_diff_finds_rows_by_their_prompts_and_judges_each_part(rlskip: Any, tmp_path: Path) -> None:
    def rows(**change: Any) -> list[dict[str, Any]]:
        made = [
            {
                "prompt_ids": [prompt, 1],
                "completion_ids": [5, 6, 7],
                "logprobs": [-0.1, -0.2, -0.3],
                "reward": 1.0,
            }
            for prompt in (1, 2, 3)
        ]
        made[1].update(change)
        return made

    store = StepStore(tmp_path / "e_p" / "s")
    store.save(1, rows())
    store.save(2, rows()[::-1])
    store.save(3, rows(logprobs=[-0.1, -0.25, -0.3], reward=0.5))
    store.save(4, rows(prompt_ids=[9, 9]))
    store.save(5, rows(completion_ids=[5, 6]))

    def found(a: int, b: int, *more: object) -> list[dict[str, Any]]:
        return rlskip("compare", a, b, "-d", tmp_path, "--json", *more).json["differences"]

    assert found(1, 2) == []
    (one,) = found(1, 3)
    assert (one["log_prob"], one["reward"], one["token"]) == (1, [1.0, 0.5], None)
    assert one["by"] == pytest.approx(0.05)
    assert found(1, 3, "--atol", 0.6) == []
    assert found(1, 3, "--rtol", 0.6) == []
    assert [one["reward"] for one in found(1, 3, "--rtol", 0.3)] == [[1.0, 0.5]]
    (half,) = found(1, 3, "--rtol", 0.19, "--atol", 0.2)
    assert half["log_prob"] is None
    assert [(one["a"], one["b"]) for one in found(1, 4)] == [(1, None), (None, 1)]
    assert [one["token"] for one in found(1, 5)] == [2]
    out = rlskip("compare", 1, 4, "-d", tmp_path, "--limit", 1).out
    assert "\n1 more sessions differ: --limit" in out


@pytest.mark.parametrize("lacks", ["A", "B"])
def test_steps_that_one_side_lacks_are_a_difference(rlskip: Any, dumps: Path, lacks: str) -> None:
    shutil.rmtree(dumps / "grpo-lr2_tiny")
    sides = {"A": dumps / "grpo_tiny", "B": dumps / "other_tiny"}
    shutil.copytree(sides["A"], sides["B"])
    shutil.rmtree(sides[lacks] / "GBS4_N2_in6_out8/3")
    other = "B" if lacks == "A" else "A"
    said = rlskip("compare", *sides.values())
    assert (said.code, f"only in {other}: steps 3" in said.out) == (1, True)
    found = rlskip("compare", *sides.values(), "--json").json
    assert (found[f"only_in_{lacks.lower()}"], found[f"only_in_{other.lower()}"]) == ([], [3])
    chosen = rlskip("compare", *sides.values(), "--steps", "1-2", "--json")
    assert (chosen.code, [step["step"] for step in chosen.json["steps"]]) == (0, [1, 2])
    assert rlskip("compare", *sides.values(), "--steps", "7").code == 2


def test_a_step_that_a_live_run_removes_meanwhile_is_listed(dumps: Path) -> None:
    run = Run(dumps / "grpo_tiny" / "GBS4_N2_in6_out8")

    def progress(steps: Sequence[int]) -> Iterator[int]:
        for step in steps:
            if step == 2:
                shutil.rmtree(run.directory / "2")
            yield step

    found = compare_rollouts(run, run, 0.0, Steps.parse("all"), progress)
    assert [one.step for one in found.steps] == [1, 3]
    assert [one["step"] for one in found.unreadable] == [2]
    with pytest.raises(NoSuchPlaceError, match="no dump"):
        compare_rollouts(Step(run, 2), run[1], 0.0, Steps.parse("all"))


def rollouts(rows: Any) -> Rollouts:
    return Rollouts(rollout_columns(rows))


def turns(*, response: int = 7, reward: float = 1.0, seen: int = 5, n: int = 3) -> Any:
    """Two groups of two sessions of `n` turns each; the last turn of the last one as given."""
    rows = [
        {
            "uid": f"p{group}",
            "session_id": session,
            "turn": turn,
            "prompt_ids": [9, group, *([seen if is_last else 5] * turn)],
            "completion_ids": [6, response if is_last else 7],
            "reward": (reward if is_last else 1.0) if turn == 2 else 0.0,
        }
        for group in range(2)
        for session in range(2)
        for turn in range(n if (group, session) == (1, 1) else 3)
        for is_last in [(group, session, turn) == (1, 1, 2)]
    ]
    return [rollouts(rows)]


def test_sessions_are_compared_over_their_turns() -> None:
    """As `show` and `report` count them: a session of three turns is one, with one reward."""
    found, tally = compare_sessions(turns(), turns(), 1, 0.0)
    assert found == []
    assert (tally.sessions, tally.same, tally.groups, tally.same_groups) == (4, 4, 2, 2)
    (one,), tally = compare_sessions(turns(), turns(response=8, reward=0.5), 1, 0.0)
    assert (one.a, one.b, one.group, one.token, one.reward) == (3, 3, "p1", 5, (1.0, 0.5))
    assert (tally.same, tally.same_groups, tally.tokens, tally.rewards) == (3, 1, 1, 1)
    (one,), _ = compare_sessions(turns(), turns(seen=4), 1, 0.0)
    assert (one.field, one.token) == ("observations", None)
    (one,), tally = compare_sessions(turns(), turns(n=2), 1, 0.0)
    assert (one.a, one.token, one.reward, tally.sessions) == (3, 4, (1.0, 0.0), 4)


NAN = float("nan")


def difference(tolerance: float = 0.0, **pair: tuple[Any, Any]) -> dict[str, Any]:
    """How a row with the first of each pair differs from a row with the second."""
    rows: list[dict[str, Any]] = [{"prompt_ids": [1], "completion_ids": [5, 6, 7]} for _ in "ab"]
    for name, values in pair.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    found, tally = compare_sessions(*([rollouts([row])] for row in rows), 1, tolerance)
    assert (tally.sessions, tally.same) == (1, 1 - len(found))
    return {} if not found else {k: v for k, v in vars_of(found[0]).items() if v}


def vars_of(one: Difference) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("token", "log_prob", "by", "reward", "mask")}


def test_nan_equals_nan_and_nothing_else() -> None:
    assert difference(logprobs=([-0.1, NAN, -0.3], [-0.1, NAN, -0.3])) == {}
    assert difference(logprobs=([-0.1, NAN, -0.3], [-0.1, -0.2, -0.3])) == {
        "log_prob": 1,
        "by": 1.0,
    }
    assert difference(logprobs=([-0.1, -0.2, -0.3], [-0.1, NAN, -0.3])) == {
        "log_prob": 1,
        "by": 1.0,
    }
    assert difference(2.0, logprobs=([-0.1, NAN, -0.3], [-0.1, -0.2, -0.3])) != {}
    assert difference(reward=(NAN, NAN)) == {}
    assert "reward" in difference(reward=(NAN, 1.0))


def test_the_largest_gap_beyond_the_tolerance_is_reported() -> None:
    pair = ([-0.1, -0.2, -0.3], [-0.1, -0.25, -0.9])
    assert difference(logprobs=pair) == {"log_prob": 1, "by": pytest.approx(0.6)}
    assert difference(0.1, logprobs=pair) == {"log_prob": 2, "by": pytest.approx(0.6)}
    assert difference(0.7, logprobs=pair) == {}
    assert difference(0.5, reward=(1.0, 0.5)) == {}
    assert difference(0.4, reward=(1.0, 0.5)) == {"reward": (1.0, 0.5)}


def test_what_one_side_lacks_differs() -> None:
    (found,), _ = compare_sessions(
        [rollouts([{"prompt_ids": [1], "completion_ids": [5], "logprobs": [-0.1]}])],
        [rollouts([{"prompt_ids": [1], "completion_ids": [5]}])],
        1,
        0.0,
    )
    assert found.log_prob == 0
    assert found.by is None
    assert difference(reward=(None, 1.0)) == {"reward": (None, 1.0)}
    assert difference(completion_mask=([1, 1, 1], [1, 0, 1])) == {"mask": True}
    masks = ([1, 1, 1], [1, 1])  # of other texts: not a difference of its own
    tokens = ([5, 6, 7], [5, 6])
    assert difference(completion_ids=tokens, completion_mask=masks) == {"token": 2}


def row(prompt: int, *, turn: int = 0, logprobs: list[float] | None = None) -> dict[str, Any]:
    session = {"uid": f"p{prompt}", "session_id": 0, "turn": turn}
    return {**session, "prompt_ids": [prompt], "completion_ids": [5], "logprobs": logprobs}


def texts(prompts: str, rewards: Any, answers: str = "wxyz") -> Rollouts:
    asked: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if prompts.isupper():
        asked = list(prompts)
    return rollouts({"prompt": asked, "completion": list(answers), "rewards": rewards})


@pytest.mark.parametrize("prompts", ["AABB", "aabb"], ids=["text", "chats"])
def test_sessions_of_text_are_matched_by_their_prompts(prompts: str) -> None:
    a = texts(prompts, [1.0, 0.0, 1.0, float("nan")])
    moved = texts(prompts[::-1], [1.0, float("nan"), 1.0, 0.0], "yzwx")
    for other, tolerance in ((moved, 0.0), (texts(prompts, [1.01, 0.0, 1.0, float("nan")]), 0.1)):
        assert compare_sessions([a], [other], 1, tolerance)[0] == []
    (one,), tally = compare_sessions([a], [texts(prompts, [0.5, 0.0, 1.0, float("nan")])], 1, 0.1)
    assert (one.a, one.b, one.reward, one.field) == (0, 0, (1.0, 0.5), None)
    assert (tally.rewards, tally.others) == (1, 0)
    (one,), tally = compare_sessions(
        [a], [texts(prompts, a.columns.columns["rewards"], "Wxyz")], 1, 0
    )
    assert (one.reward, one.field, tally.rewards, tally.others) == (None, "completion", 0, 1)
    left = texts(prompts.replace(prompts[0], "C"), [1.0, 0.0, 1.0, float("nan")])
    assert compare_sessions([a], [left], 1, 0.0)[1].prompts == 4
    without = rollouts({"completion": ["x", "y"], "rewards": ["good", None]})
    other = rollouts({"completion": ["x", "y"], "rewards": ["bad", 1.0]})
    found, _ = compare_sessions([without], [other], 1, 0.0)
    assert [(one.a, one.b, one.field) for one in found] == [(0, 0, "rewards"), (1, 1, "rewards")]


def test_sessions_of_one_side_are_counted_and_named_by_their_call() -> None:
    one, two = rollouts([row(1)]), rollouts([row(2)])
    found, tally = compare_sessions([one], [one, two], 1, 0.0)
    assert [(f.a, f.b, f.call) for f in found] == [(None, 1, 1)]
    assert (tally.sessions, tally.same, tally.prompts) == (1, 1, 1)
    found, tally = compare_sessions([one], [two], 1, 0.0)
    assert [(f.a, f.b, f.call) for f in found] == [(0, None, None), (None, 0, None)]
    assert (tally.sessions, tally.same, tally.prompts) == (1, 0, 2)


def test_a_run_without_masks_sampled_all_tokens() -> None:
    assert difference(completion_mask=(None, [1, 1, 1])) == {}
    assert difference(completion_mask=(None, [1, 0, 1]))["mask"] is True


def test_log_probs_of_some_turns_are_compared() -> None:
    a, b = ([rollouts([row(1, logprobs=[first]), row(1, turn=1)])] for first in (-0.1, -0.4))
    (found,), _ = compare_sessions(a, b, 1, 0.0)
    assert (found.log_prob, found.by) == (0, pytest.approx(0.3))


def test_a_log_prob_is_named_by_its_token_after_turns_without_any() -> None:
    a, b = ([rollouts([row(1), row(1, turn=1, logprobs=[last])])] for last in (-0.1, -0.4))
    (found,), _ = compare_sessions(a, b, 1, 0.0)
    assert (found.log_prob, found.by) == (1, pytest.approx(0.3))
    b = [rollouts([row(1, logprobs=[-0.2]), row(1, turn=1, logprobs=[-0.1])])]
    assert [one.log_prob for one in compare_sessions(a, b, 1, 0.0)[0]] == [0]


def test_log_probs_count_up_to_the_first_token_that_differs() -> None:
    tokens = ([5, 6, 7], [5, 9, 7])
    pair = ([-0.1, -0.2, -0.3], [-0.1, -0.7, -0.8])
    assert difference(completion_ids=tokens, logprobs=pair) == {"token": 1}
    pair = ([-0.1, -0.2, -0.3], [-0.4, -0.7, -0.8])
    found = difference(completion_ids=tokens, logprobs=pair)
    assert (found["token"], found["by"]) == (1, pytest.approx(0.3))


def test_images_are_compared_by_what_they_show(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    store = StepStore(tmp_path)
    for step, shades in ((1, (0, 9)), (2, (0, 9)), (3, (0, 8))):
        content = [[{"type": "image", "image": images.new("L", (2, 2), i)}] for i in shades]
        prompts = [[{"role": "user", "content": one}] for one in content]
        store.save(step, {"prompt": prompts * 2, "completion": list("abcd")})
    found = [list(Run(tmp_path)[step].rollouts()) for step in (1, 2, 3)]
    assert [len(one.groups) for (one,) in found] == [2, 2, 2]
    assert compare_sessions(found[0], found[1], 1, 0.0)[0] == []
    assert compare_sessions(found[0], found[2], 1, 0.0)[1].prompts == 4
