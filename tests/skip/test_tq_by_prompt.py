"""``skip.match=prompt`` of role rollout_tq: groups are found in whatever step they were dumped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.errors import MismatchError, MissError
from rlskip.keys import REPLAYED
from tests.skip.trainers import prompts


def by_prompt(*steps: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """For each prompt the rows of each of its groups, in order, as far as a replay keeps them."""
    found: dict[str, list[list[Any]]] = defaultdict(list)
    for rows in steps:
        groups: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            kept = row["text"], row["key"], row["responses"], row["rm_scores"]
            groups[row["prompt"]].append(kept)
        for prompt, group in groups.items():
            found[prompt].append(group)
    return found


@pytest.mark.parametrize("model", ["counted", "status"])
def test_prompts_are_found_in_order_whatever_their_step_was(
    run: Callable[..., Any], model: str
) -> None:
    first = run(model)
    dumped = by_prompt(*(first.step(s, prompts(*b)) for s, b in enumerate(["abc", "de", "adf"], 1)))
    second = run(model, match="prompt", on_miss="error")
    again = [second.step(s, prompts(*b)) for s, b in enumerate(["ed", "acfb", "da"], 1)]
    assert second.submitted == []
    assert by_prompt(*again) == dumped
    assert {row["global_steps"] for row in again[1]} == {2}, "as at its own step"


def test_what_has_no_group_left_is_submitted(run: Callable[..., Any]) -> None:
    first = run()
    dumped = by_prompt(first.step(1, prompts(*"abc")), first.step(2, prompts(*"ad")))
    second = run(match="prompt")
    rows = second.step(5, prompts(*"daxb"))
    assert second.submitted == ["x"]
    assert [by_prompt(rows)[p] for p in "db"] == [dumped[p] for p in "db"]
    again = second.step(6, prompts(*"axa"[:2]))
    assert second.submitted == ["x", "x"], "what a run generates serves none of its later prompts"
    assert by_prompt(rows, again)["a"] == dumped["a"]
    third = run(match="prompt", on_miss="error")
    with pytest.raises(MissError, match="the run serves 2 of the batch's 3 prompts"):
        third.step(1, prompts(*"xyb"))


@pytest.mark.parametrize("policy", ["error", "regenerate"])
def test_groups_of_another_sampling_are_a_mismatch(
    run: Callable[..., Any], policy: str, tmp_path: Path
) -> None:
    first = run()
    dumped = by_prompt(first.step(1, prompts(*"ab")), first.step(2, prompts(*"cd")))
    second = run(match="prompt", on_mismatch=policy)
    role: Any = SkipManager.skip_instances["rollout_tq"]
    identities = role.dumps.identities
    identities.conditions = identities.conditions.adding({"sampling.temperature": 0.5})
    if policy == "error":
        with pytest.raises(MismatchError, match="temperature"):
            second.step(1, prompts(*"da"))
        return
    rows = second.step(1, prompts(*"da"))
    assert by_prompt(rows)["d"] != dumped["d"]
    assert len(second.submitted) == 2
    assert not [*tmp_path.rglob("*.bad-*")]


def test_a_job_that_begins_later_takes_later_groups_first(run: Callable[..., Any]) -> None:
    first = run()
    one, two = by_prompt(first.step(1, prompts("a"))), by_prompt(first.step(2, prompts("a")))
    second = run(match="prompt", on_miss="error")
    assert by_prompt(second.step(2, prompts("a"))) == two
    assert by_prompt(second.step(3, prompts("a"))) == one
    third = run(match="prompt")
    SkipManager.set_step(1)
    batch = prompts("a")
    third.submit(batch)
    assert third.queue.list("train")[batch["uid"][0]][REPLAYED] == 1
    sampled, _ = third.sample()
    third.buffer.clear(sampled)
