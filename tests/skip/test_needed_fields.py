"""Fields of rows: what they hold is recorded; a dump without one that is needed is a mismatch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlskip import SkipManager
from rlskip.batch.columns import field_names
from rlskip.batch.row_fields import RowFields, RowsError
from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.errors import ConfigError, MismatchError
from rlskip.queue import IncompleteRolloutError
from tests.skip.trainers import Loop, prompts, visit

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


@pytest.mark.parametrize(
    ("keys", "step"),
    [({}, 1), ({"on_miss": "error"}, 1), ({"action": "repeat"}, 2)],
    ids=["default", "on_miss", "repeat"],
)
def test_a_dump_without_a_needed_field_is_a_mismatch(
    init: Callable[..., Path], keys: dict[str, Any], step: int
) -> None:
    init(at=1)
    generate([1], "tokens")
    made.clear()
    needed.add("logprobs")
    init(at=step, **keys)
    with pytest.raises(MismatchError, match="the dump of step 1 lacks what this run needs: logp"):
        generate([1], "tokens logprobs")
    assert made == []


def test_prompt_by_prompt_no_dump_is_quarantined(init: Callable[..., Path]) -> None:
    init(gbs=2)
    for step in (1, 2):
        SkipManager.set_step(step)
        generate([step, -step], "tokens")
    needed.add("logprobs")
    init(gbs=1, wait_s=0, at=2)
    generate([7], "tokens logprobs")
    folder = init(gbs=1, match="prompt", on_mismatch="error", wait_s=0, at=1)
    with pytest.raises(MismatchError, match="the dump of step 2 lacks") as caught:
        generate([2], "tokens logprobs")
    assert (Path(caught.value.where) / "meta.json") in folder.rglob("GBS2_*/2/meta.json")
    assert "quarantined" not in str(caught.value)
    init(gbs=1, match="prompt", on_mismatch="regenerate", wait_s=0, at=1)
    assert field_names(generate([2], "tokens logprobs")) == {"tokens", "logprobs"}
    assert not list(folder.rglob("*.bad-*"))


@pytest.mark.parametrize("match", ["step", "run", "prompt"])
def test_a_field_that_is_dropped_on_purpose_is_not_missed(
    init: Callable[..., Path], match: str
) -> None:
    needed.add("logprobs")
    init(at=1)
    generate([1, 2], "tokens logprobs")
    made.clear()
    init(at=1 if match == "step" else 2, match=match, drop_fields=["logprobs"])
    prompts = [2, 1] if match == "prompt" else [1, 2]
    assert field_names(generate(prompts, "tokens logprobs")) == {"tokens"}
    assert made == []


def test_groups_of_a_queue_are_checked(init: Callable[..., Path]) -> None:
    def step(fields: str, **skip: Any) -> tuple[set[str], int]:
        init("rollout_tq", n=1, at=1, **skip)
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


def collected(
    init: Callable[..., Path], ran: list[str], fields: str, ends_at: int = 99, **options: Any
) -> set[str]:
    """The fields of a step whose sessions have `fields`; a process that ends with a session."""
    init(on_mismatch="regenerate", wait_s=0, at=1)

    async def worker(prompt: Any, sampling: Any, session: Any) -> Any:
        if len(ran) >= ends_at:
            raise ValueError("the process ends here")
        ran.append(fields)
        return {name: torch.zeros(1) for name in fields.split()}

    @SkipManager.annotate(role="rollout", stage="collect", **options)
    def collect(prompts: list[str]) -> Any:
        rows = [{"uid": prompt, "text": prompt} for prompt in prompts]
        return dispatcher.collect(rows, step=1)[0]

    config = {"n": 2, "journal": True, "rollout_level": True}
    store = SkipManager.store("rollout")
    with RolloutDispatcher(LocalPool(worker, 1, threads=1), config={"dispatch": config},
                           store=store) as dispatcher:  # fmt: skip
        try:
            return field_names(collect(["a", "b"])) & {"tokens", "logprobs"}
        except IncompleteRolloutError:
            return set()


def test_sessions_without_a_needed_field_are_not_resumed(
    init: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    collected(init, ran, "tokens", 3, lacks=lacks)
    needed.add("logprobs")
    assert collected(init, ran, "tokens logprobs", lacks=lacks) == {"tokens", "logprobs"}
    assert len(ran) == 3 + 4
    assert "3 sessions are not resumed: they lack what this run needs: logprobs" in caplog.text
    assert "lacks" not in SkipManager.store("rollout").read_meta(1).info


def test_sessions_of_a_stage_that_never_returns_it_are_resumed(init: Callable[..., Path]) -> None:
    ran: list[str] = []
    needed.add("logprobs")
    collected(init, ran, "tokens", 3, lacks=lacks)
    assert collected(init, ran, "tokens", lacks=lacks) == {"tokens"}
    assert len(ran) == 4
    assert SkipManager.store("rollout").read_meta(1).info["lacks"] == ["logprobs"]


def test_what_cannot_be_told_of_single_sessions(init: Callable[..., Path]) -> None:
    """A function for the whole result: sessions of a run without it are not resumed."""

    def of_batch(rollouts: Any) -> list[str]:
        assert len(rollouts.batch_size) == 1
        return sorted(needed - field_names(rollouts))

    ran: list[str] = []
    collected(init, ran, "tokens", 3)
    collected(init, ran, "tokens", 5, lacks=of_batch)
    assert len(ran) == 5, "none of the three is resumed"
    needed.add("logprobs")
    assert collected(init, ran, "tokens", lacks=of_batch) == {"tokens"}
    assert len(ran) == 3 + 4
    info = SkipManager.store("rollout").read_meta(1).info
    assert "lacks" not in info, "it may be the lack of those that were resumed"


# -- what rows hold is recorded with the dumps: by usual names, and by ``rows=`` --------------


ROWS = {"said": [[1, 2], [3]], "uid": ["a", "b"], "won": [1.0, 0.0], "metrics": {"x": 1.0}}


@pytest.mark.parametrize(
    ("result", "rows", "found"),
    [
        (ROWS, {"response": "said", "reward": "won", "n": 1},
         {"response": "said", "group": "uid", "reward": "won", "n": 1}),
        (ROWS, lambda result: {"response": "said", "pad": len(result)},
         {"response": "said", "group": "uid", "pad": 4}),
        (ROWS, {"group": None, "session": "metric.x"}, RowsError),
        ([{"responses": [1], "reward": 1.0}], None, {"response": "responses", "reward": "reward"}),
        (["text", "text"], None, {}),
        (ROWS, {"response": "sad"}, RowsError),
    ],
)  # fmt: skip
def test_a_dump_tells_what_its_fields_hold(
    init: Callable[..., None], result: Any, rows: Any, found: Any
) -> None:
    init(at=1)
    generate = SkipManager.annotate(role="rollout", rows=rows)(lambda prompts: result)
    if found is RowsError:
        with pytest.raises(RowsError, match="no field") as caught:
            generate([1, 2])
        assert "said" in caught.value.remedy
        return
    assert generate([1, 2]) is result
    meta = SkipManager.store("rollout").read_meta(1)
    assert RowFields.from_meta(meta) == RowFields(**found)


def test_a_description_is_checked_where_it_is_given(init: Callable[..., None]) -> None:
    for rows in ({"respose": "said"}, {"n": 0}, {"response": 3}):
        with pytest.raises(RowsError):
            SkipManager.annotate(role="rollout", rows=rows)
    at = {"rollout": {"target": "colorsys:rgb_to_hls", "rows": {"respose": "said"}}}
    with pytest.raises(ConfigError, match=r"^skip\.attach\.rollout\.rows: .*respose"):
        init(attach=at)


def test_the_hosts_tokenizer_is_recorded(init: Callable[..., Path]) -> None:
    generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    for step, model, found in (
        (1, {"path": "a/model", "tokenizer_path": "words"}, "words"),
        (2, {"path": "a/model"}, "a/model"),
        (3, {}, None),
    ):
        init(host={"actor_rollout_ref": {"model": model}}, at=step)
        generate([1])
        assert SkipManager.store("rollout").read_meta(step).info.get("tokenizer") == found


def test_groups_of_a_queue_are_described(run: Callable[..., Any]) -> None:
    run().step(1, prompts("a"))
    found = RowFields.from_meta(SkipManager.store("rollout_tq").read_meta(1))
    assert found == RowFields(response="responses", reward="rm_scores", group="uid")
