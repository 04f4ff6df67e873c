"""A dump without a field that this run needs is a mismatch; one with more fields is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.batch.fields import field_names
from rlskip.errors import MismatchError
from tests.skip.trainers import Loop, visit

needed: set[str] = set()
made: list[str] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    needed.clear()
    made.clear()


def lacks(rollouts: Any) -> list[str]:
    return sorted(needed - field_names(rollouts))


def rows(names: str) -> dict[str, Any]:
    return {name: torch.arange(2) for name in names.split()}


@SkipManager.annotate(role="rollout", lacks=lacks, ignore=["names"])
def generate(prompts: list[int], names: str) -> dict[str, Any]:
    made.append(names)
    return rows(names)


def dumped(init: Callable[..., Path], names: str, **skip: Any) -> Path:
    """Dump step 1 with the fields `names`, then start a run that needs logprobs."""
    init()
    SkipManager.set_step(1)
    generate([1], names)
    made.clear()
    needed.add("logprobs")
    folder = init(**skip)
    SkipManager.set_step(1)
    return folder


@pytest.mark.parametrize(
    "keys", [{}, {"on_miss": "error"}, {"action": "repeat"}], ids=["default", "on_miss", "repeat"]
)
def test_a_dump_without_a_needed_field_is_a_mismatch(
    init: Callable[..., Path], keys: dict[str, Any]
) -> None:
    dumped(init, "tokens", **keys)
    if "action" in keys:
        SkipManager.set_step(2)
    with pytest.raises(MismatchError, match="the dump of step 1 lacks what this run needs: logp"):
        generate([1], "tokens logprobs")
    assert made == []


def test_regenerate_quarantines_it(init: Callable[..., Path]) -> None:
    folder = dumped(init, "tokens", on_mismatch="regenerate")
    assert field_names(generate([1], "tokens logprobs")) == {"tokens", "logprobs"}
    assert made == ["tokens logprobs"]
    visit(1)
    assert field_names(generate([1], "never called")) == {"tokens", "logprobs"}
    assert list(folder.rglob("1.bad-*")), "the old dump is kept"


@pytest.mark.parametrize("policy", ["error", "regenerate"])
def test_prompt_by_prompt_no_dump_is_quarantined(init: Callable[..., Path], policy: str) -> None:
    init(gbs=2)
    for step in (1, 2):
        SkipManager.set_step(step)
        generate([step, -step], "tokens")
    needed.add("logprobs")
    init(gbs=1, wait_s=0)
    SkipManager.set_step(2)
    generate([7], "tokens logprobs")
    folder = init(gbs=1, match="prompt", on_mismatch=policy, wait_s=0)
    SkipManager.set_step(1)
    if policy == "regenerate":
        assert field_names(generate([2], "tokens logprobs")) == {"tokens", "logprobs"}
    else:
        with pytest.raises(MismatchError, match="the dump of step 2 lacks") as caught:
            generate([2], "tokens logprobs")
        assert (Path(caught.value.where) / "meta.json") in folder.rglob("GBS2_*/2/meta.json")
        assert "quarantined" not in str(caught.value)
    assert not list(folder.rglob("*.bad-*"))


def test_more_fields_than_needed_are_no_mismatch(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        dumped(init, "tokens logprobs more")
        assert field_names(generate([1], "never called")) == {"tokens", "logprobs", "more"}
    assert made == []
    assert "lacks" not in caplog.text


# -- through a queue -------------------------------------------------------------------------


def test_groups_of_a_queue_are_checked(init: Callable[..., Path]) -> None:
    def step(fields: str, **skip: Any) -> tuple[set[str], int]:
        init("rollout_tq", n=1, **skip)
        SkipManager.set_step(1)
        loop = Loop(fields, lacks=lacks)
        loop.submit({"uid": ["a", "b"], "text": ["x", "y"]})
        got = field_names(loop.queue.get(loop.sample().keys, "train"))
        return got, len(loop.submitted)

    assert step("tokens") == ({"tokens"}, 2)
    needed.add("logprobs")
    with pytest.raises(MismatchError, match="the dump of step 1 lacks"):
        step("tokens logprobs")
    fits = {"tokens", "logprobs"}
    assert step("tokens logprobs", on_mismatch="regenerate") == (fits, 2)
    assert step("never") == (fits, 0)


def test_a_field_that_the_stage_never_returns_is_no_mismatch(init: Callable[..., Path]) -> None:
    """To generate again would not help."""
    needed.add("logprobs")
    init()
    for _ in range(2):
        visit(1)
        assert set(generate([1], "tokens")) == {"tokens"}
    assert made == ["tokens"]
