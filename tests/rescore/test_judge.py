"""`rlskip.cached_reward`: what a function is asked, which calls are the same, what is kept."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlskip
from rlskip.rescore.judge import RewardError
from rlskip.rescore.kept import ABSENT, Verdicts
from tests.clock import in_a_fork
from tests.faulty_files import each_fault

HOLDING: dict[str, Any] = {"asked": []}


def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    HOLDING["asked"].append(solution_str)
    return float(solution_str == ground_truth) + len(data_source)


def reads_all(solution_str, extra_info=None, **kwargs):
    HOLDING["asked"].append(solution_str)
    return len(f"{extra_info}{kwargs}")


def batch(solution_strs, ground_truths, **kwargs):
    HOLDING["asked"] += solution_strs
    return np.array([float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)])


def trl(prompts, completions, answer, **kwargs):
    HOLDING["asked"] += completions
    return [None if a is None else len(c) + a for c, a in zip(completions, answer, strict=True)]


def by_sample(completions, sample_id, **kwargs):
    HOLDING["asked"] += completions
    return [float(c == s) for c, s in zip(completions, sample_id, strict=True)]


def by_state(completions, trainer_state=None, **kwargs):
    HOLDING["asked"] += completions
    return [float(len(c) <= trainer_state) + len(kwargs) for c in completions]


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_tags(completions, labels, tags=("<t>", "<a>")):
    HOLDING["asked"] += completions
    found = zip(completions, labels, strict=True)
    return [float(c == str(int(label))) + all(t in c for t in tags) for c, label in found]


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., Any]:
    HOLDING["asked"] = []
    return functools.partial(rlskip.cached_reward, version="1", directory=tmp_path / "verdicts")


CALL = {"data_source": "d", "solution_str": "a", "ground_truth": "a", "extra_info": {"index": 1}}
TRL = {"prompts": ["p", "p"], "completions": ["a", "bb"], "answer": [1, 2], "trainer_state": 1}
STATE = {"completions": ["a", "bb"], "trainer_state": 1}
SAMPLE = {"completions": ["a", "b"], "sample_id": ["a", "b"]}
BATCH = {"solution_strs": ["a", "b"], "ground_truths": ["a", "a"], "data_sources": ["d", "d"]}


@pytest.mark.parametrize(
    ("function", "first", "second", "again"),
    [
        (verl, CALL, {}, False),
        (verl, CALL, {"reward_router_address": "host:1", "uid": "u"}, False),
        (verl, CALL, {"solution_str": "b"}, True),
        (verl, CALL, {"ground_truth": "b"}, True),
        (verl, CALL, {"data_source": "e"}, True),
        (verl, CALL, {"extra_info": {"index": 2}}, True),
        (reads_all, {"solution_str": "a"}, {"rubric": "strict"}, True),
        (reads_all, {"solution_str": "a"}, {"extra_info": None}, False),
        (trl, TRL, {"trainer_state": object()}, False),
        (trl, TRL, {"answer": [2, 2]}, True),
        (trl, TRL, {"other": [1, 2]}, True),
        (batch, BATCH, {"data_sources": ["d", "e"]}, True),
        (by_sample, SAMPLE, {"sample_id": ["b", "a"]}, True),
        (by_sample, SAMPLE, {"uid": ["u", "v"], "trainer_state": object()}, False),
        (wrapped(by_sample), SAMPLE, {"sample_id": ["b", "a"]}, True),
        (by_state, STATE, {"trainer_state": 2}, True),
    ],
)
def test_calls_are_the_same_whose_arguments_are_equal(
    cached: Any, function: Any, first: Any, second: Any, again: bool
) -> None:
    judge = cached(function)
    expected = function(**first), function(**{**first, **second})
    before = len(HOLDING["asked"])
    judge(**first)
    asked = len(HOLDING["asked"])
    assert asked > before
    found = judge(**{**first, **second})
    assert (len(HOLDING["asked"]) > asked) is again
    assert found == list(expected[1]) if isinstance(found, list) else found == expected[1]
    asked = len(HOLDING["asked"])
    assert cached(function)(**first) is not None
    assert len(HOLDING["asked"]) == asked


def test_of_a_batch_only_new_sessions_are_asked_and_equal_ones_once(cached: Any) -> None:
    judge = cached(trl)
    given = {"prompts": ["p"] * 4, "completions": ["a", "b", "a", "c"], "answer": [1, 2, 1, None]}
    assert judge(**given) == [2, 3, 2, None]
    assert HOLDING["asked"] == ["a", "b", "c"]
    more = {"prompts": ["p"] * 3, "completions": ["z", "c", "b"], "answer": [0, None, 2]}
    assert judge(**more) == [1, None, 3]
    assert HOLDING["asked"] == ["a", "b", "c", "z"]


def test_an_async_function_stays_one(cached: Any) -> None:
    async def judge(solution_str: str) -> dict[str, Any]:
        HOLDING["asked"].append(solution_str)
        await asyncio.sleep(0.02)
        return {"score": len(solution_str)}

    wrapped = cached(judge)
    assert inspect.iscoroutinefunction(wrapped)

    async def both() -> list[Any]:
        return await asyncio.gather(*(wrapped(solution_str=text) for text in ("a", "bb", "a")))

    assert asyncio.run(both()) == [{"score": 1}, {"score": 2}, {"score": 1}]
    assert sorted(HOLDING["asked"]) == ["a", "bb"], "two calls at once ask once"


def test_it_passes_for_the_function(cached: Any) -> None:
    wrapped = cached(verl)
    assert (wrapped.__name__, inspect.signature(wrapped)) == ("verl", inspect.signature(verl))
    assert wrapped("d", "a", ground_truth="a") == 2.0, "by position, too"


def test_an_error_is_the_callers_and_is_not_kept(cached: Any) -> None:
    def fails(solution_str: str) -> float:
        HOLDING["asked"].append(solution_str)
        raise KeyError(solution_str)

    judge = cached(fails)
    for _ in range(2):
        with pytest.raises(KeyError, match="a"):
            judge(solution_str="a")
    assert HOLDING["asked"] == ["a", "a"]


def test_only_another_version_is_asked_again(cached: Any, tmp_path: Path) -> None:
    file = tmp_path / "rubric.py"

    def score(name: str, rubric: int, version: str) -> float:
        file.write_text(f"def judge(solution_str):\n    return {rubric} * len(solution_str)\n")
        judge = runpy.run_path(str(file), run_name=name)["judge"]
        return float(cached(judge, version=version)(solution_str="ab"))

    # A trainer that loads the file by its path names the module as it likes.
    assert [score("a", 1, "x"), score("b", 1, "x"), score("c", 30, "x")] == [2, 2, 2]
    assert [score("a", 30, "y"), score("a", 1, "x")] == [60, 2]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_columns_and_verdicts_of_any_kind_are_cut_and_defaults_are_not(
    cached: Any, kind: Any
) -> None:
    judge = cached(functools.wraps(with_tags)(lambda *args, **more: kind(with_tags(*args, **more))))
    assert judge(["1", "<t><a>"], kind([1, 2])) == [1, 1]
    assert judge(["1", "3"], kind([1, 3])) == [1, 1]
    assert judge(["<t>", "1"], kind([1, 1])) == [0, 1]
    assert HOLDING["asked"] == ["1", "<t><a>", "3", "<t>"]


@pytest.mark.parametrize(
    ("function", "call", "word"),
    [
        (lambda text: 0.0, None, "solution_str"),
        (len, None, "solution_str"),
        (functools.partial(reads_all, extra_info="strict"), None, "it is a partial"),
        (reads_all, {"solution_str": "a", "client": object()}, "ignore"),
        (by_state, {"completions": ["a"], "trainer_state": object()}, "ignore"),
        (lambda completions: [1.0], {"completions": ["a", "b"]}, "2 sessions"),
        (lambda completions: 1.0, {"completions": ["a", "b"]}, "2 sessions"),
    ],
)
def test_what_cannot_be_cached_is_refused(
    cached: Any, function: Any, call: dict[str, Any] | None, word: str
) -> None:
    def attempt() -> None:
        cached(function)(**(call or {}))

    with pytest.raises(RewardError) as caught:
        attempt()
    assert word in str(caught.value)


def test_ignored_arguments_are_passed_and_do_not_count(cached: Any) -> None:
    judge = cached(reads_all, ignore=["client"])
    assert judge(solution_str="a", client=(client := object())) == reads_all("a", client=client)
    asked = len(HOLDING["asked"])
    cached(reads_all, ignore="client")(solution_str="a", client=object())
    assert len(HOLDING["asked"]) == asked


# -- verdicts on disk: kept, found by everybody, asked for by one at a time ----------------------


KEY, OTHER = "ab" * 16, "ab" * 15 + "cd"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0.1, 0.1),
        (None, None),
        (True, True),
        ({"score": 0.5, "why": "é\n ab" + KEY}, {"score": 0.5, "why": "é\n ab" + KEY}),
        (np.float32(0.1), float(np.float32(0.1))),
        (torch.tensor(0.1), torch.tensor(0.1).item()),
        ({"score": np.int64(3), "acc": np.bool_(True)}, {"score": 3, "acc": True}),
        ((1, 2), ABSENT),
        (math.nan, ABSENT),
        (object(), ABSENT),
    ],
)
def test_a_verdict_is_found_as_it_was_returned(tmp_path: Path, value: Any, kept: Any) -> None:
    returned = Verdicts(tmp_path).keep(KEY, value)
    found = Verdicts(tmp_path).find(KEY)
    assert Verdicts(tmp_path).find(OTHER) is ABSENT
    if kept is ABSENT:
        assert returned is value
        assert found is ABSENT
    else:
        assert (found, type(found)) == (kept, type(kept))
        assert (returned, type(returned)) == (kept, type(kept))


def test_a_damaged_verdict_is_asked_for_again_and_costs_no_other(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    for key in (KEY, OTHER):
        verdicts.keep(key, 0.25)
    file = tmp_path / "ab.jsonl"
    whole = file.read_bytes()
    second = whole.rindex(b"\n\n") + 1
    for at in range(len(whole)):
        file.write_bytes(whole[:at])  # torn by a full disk
        expected = [0.25 if at >= end else ABSENT for end in (second, len(whole))]
        found = [verdicts.find(key) for key in (KEY, OTHER)]
        assert found == expected or at == second - 1
    for at in range(1, second - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert (verdicts.find(KEY), verdicts.find(OTHER)) == (ABSENT, 0.25)
    verdicts.keep(KEY, 0.5)
    assert verdicts.find(KEY) == 0.5


def test_one_at_a_time_claims_a_key(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path)
    with verdicts.claims() as claim, verdicts.claims() as claim_too:
        assert claim(KEY)
        assert not claim_too(KEY)
        assert claim_too("cd" * 16)

        def claim_there() -> None:
            with verdicts.claims() as claim_too:
                assert not claim_too(KEY)

        in_a_fork(claim_there)
    with verdicts.claims() as claim_later:
        assert claim_later(KEY)


def test_no_fault_of_the_disk_reaches_the_trainer(tmp_path: Path) -> None:
    met = 0
    for fault in each_fault(tmp_path, lasting=True):
        verdicts = Verdicts(tmp_path / "verdicts")
        with fault:
            with verdicts.claims() as claim:
                assert claim(KEY)
            assert verdicts.find(KEY) in (0.5, ABSENT)
            assert verdicts.keep(KEY, 0.5) == 0.5
        met += fault.happened
    assert met > 15
