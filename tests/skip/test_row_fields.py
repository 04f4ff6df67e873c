"""What a stage's rows hold is recorded with its dumps: by usual names, and by ``rows=``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlskip import SkipManager
from rlskip.batch.row_fields import RowFields, RowsError
from rlskip.errors import ConfigError
from rlskip.store import StepStore
from tests.skip.trainers import prompts

ROWS = {"said": [[1, 2], [3]], "uid": ["a", "b"], "won": [1.0, 0.0], "metrics": {"x": 1.0}}


def run(init: Callable[..., None], result: Any, rows: Any, **config: Any) -> StepStore:
    """One call of a stage that returns `result`; the store of its dumps."""
    init(**config)
    generate = SkipManager.annotate(role="rollout", rows=rows)(lambda prompts: result)
    SkipManager.set_step(1)
    assert generate([1, 2]) is result
    store: StepStore = SkipManager.store("rollout")
    return store


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
    if found is RowsError:
        with pytest.raises(RowsError, match="no field") as caught:
            run(init, result, rows)
        assert "said" in caught.value.remedy
        return
    meta = run(init, result, rows).read_meta(1)
    assert RowFields.from_meta(meta) == RowFields(**found)


def test_a_description_is_checked_where_it_is_given(init: Callable[..., None]) -> None:
    for rows in ({"respose": "said"}, {"n": 0}, {"response": 3}):
        with pytest.raises(RowsError):
            SkipManager.annotate(role="rollout", rows=rows)
    at = {"rollout": {"target": "json:dumps", "rows": {"respose": "said"}}}
    with pytest.raises(ConfigError, match="respose") as caught:
        init(attach=at)
    assert caught.value.where == "skip.attach.rollout.rows"


def test_the_hosts_tokenizer_is_recorded(init: Callable[..., Path]) -> None:
    generate = SkipManager.annotate(role="rollout")(lambda prompts: prompts)
    dump_dir = str(init())
    for model, found in (
        ({"path": "a/model", "tokenizer_path": "words"}, "words"),
        ({"path": "a/model"}, "a/model"),
        ({}, None),
    ):
        on = {"dump_dir": f"{dump_dir}/{found}", "rollout": {"enable": True}}
        SkipManager.init({"skip": on, "actor_rollout_ref": {"model": model}})
        SkipManager.set_step(1)
        generate([1])
        assert SkipManager.store("rollout").read_meta(1).info.get("tokenizer") == found


def test_groups_of_a_queue_are_described(run: Callable[..., Any]) -> None:
    run().step(1, prompts("a"))
    found = RowFields.from_meta(SkipManager.store("rollout_tq").read_meta(1))
    assert found == RowFields(response="responses", reward="rm_scores", group="uid")
