"""Masks, log-probs and token rewards of another length than their tokens, in every form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import rlskip
from rlskip.batch.columns import objects_of
from rlskip.batch.padding import LengthError
from rlskip.batch.rows import RowColumns
from rlskip.batch.tables import DataProtoParts
from rlskip.runs.columns import rollout_columns
from rlskip.runs.rollouts import Rollouts
from rlskip.store import StepStore

PROMPTS, RESPONSES = [[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]
FIELDS = {"mask": "response_mask", "log_probs": "rollout_log_probs", "reward": "rm_scores"}
VALUES = {"mask": [0, 1, 1, 0, 1], "log_probs": [-1.0, -2.0, -3.0, -4.0, -5.0], "reward": [1.0] * 5}


def nested(cells: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(map(torch.tensor, cells)), layout=torch.jagged)


def arrays(cells: list[Any]) -> np.ndarray:
    return objects_of([None if cell is None else np.array(cell) for cell in cells])


def table(columns: dict[str, Any]) -> TensorDict:
    found = {k: NonTensorStack(*v) if isinstance(v, list) else v for k, v in columns.items()}
    return TensorDict(found, [2])


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tensors": (torch.tensor, dict),
    "arrays": (np.array, dict),
    "jagged tensors of a TensorDict": (nested, table),
    "lists of a TensorDict": (list, table),
    "tensors of a DataProto": (torch.tensor, lambda c: DataProtoParts(table(c), {}, {})),
    "arrays of a DataProto": (arrays, lambda c: DataProtoParts(None, c, {})),
    "objects": (objects_of, dict),
    "rows": (list, lambda c: [{k: v[i] for k, v in c.items()} for i in range(2)]),
}


@pytest.mark.parametrize("length", ["short", "long", "equal", "absent"])
@pytest.mark.parametrize("what", FIELDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_length_is_refused_when_dumped_and_none_when_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, what: str, length: str
) -> None:
    made, batch = FORMS[form]
    count = {"short": 2, "long": 4}.get(length, 3)
    cells: list[Any] = [VALUES[what][:3], VALUES[what][:count]]
    is_padded = made in (torch.tensor, np.array)
    if is_padded:
        cells[0] = cells[1]
    columns = {"prompts": made(PROMPTS), "responses": made(RESPONSES), FIELDS[what]: made(cells)}
    if length == "absent" and (is_padded or made is nested):
        del columns[FIELDS[what]]
    elif length == "absent":
        columns[FIELDS[what]] = made([None if i else cell for i, cell in enumerate(cells)])
    is_odd = length in ("short", "long")
    if is_odd:
        odd = f"{FIELDS[what]} has {count} values in row {1 - is_padded}, and its response has 3 to"
        with pytest.raises(LengthError, match=odd) as caught:
            RowColumns.of(batch(columns)).refuse_misfits("the stage")
        assert caught.value.where == "the stage"
        assert f"annotate(rows={{'{what}': None}})" in caught.value.remedy
    else:
        RowColumns.of(batch(columns)).refuse_misfits("the stage")
    StepStore(tmp_path / "a_b" / "GBSany_Nany_inany_outany").save(1, batch(columns))
    opened = rlskip.open(tmp_path)
    with caplog.at_level(logging.WARNING):
        for field in (None, [what], ["response", what]):
            row = list(opened.iter_rows(field))[1]
            expected = {"mask": [0, 1, 1], "log_probs": [-1.0, -2.0, -3.0], "reward": 3.0}[what]
            assert row[what] == (expected if length == "equal" else None)
    told = [one.getMessage() for one in caplog.records]
    assert [FIELDS[what] in one for one in told] == [True] * is_odd, "said once, or not at all"
    (session,) = list(opened.sessions())[1:]
    conversation = session.conversation
    assert conversation is not None
    assert conversation.completion == RESPONSES[1]
    if what == "mask":
        assert conversation.mask == (None if is_odd else [length != "equal", True, True])


P, R = np.array([[0, 3]]), np.array([[5, 6, 7, 0, 0]])
ATTENTION = np.array([[0, 1, 1, 1, 1, 0, 0]])
TWO = {"prompts": P, "responses": R, "attention_mask": ATTENTION}
ONE = {"input_ids": np.array([[0, 3, 5, 6, 7, 0, 0]]), "attention_mask": ATTENTION}
MASK = {"loss_mask": np.array([[0, 0, 1, 0, 1, 0, 0]])}


@pytest.mark.parametrize(
    "columns",
    [
        TWO | {"response_mask": np.array([[1, 0, 1, 0, 0]]), "logprobs": [[-1.0, -2.0, -3.0]]},
        TWO
        | {
            "response_mask": np.array([[1.0, 0.0, 1.0, 0.0, 0.0]]),
            "logprobs": [[-1.0, -2.0, -3.0]],
        },
        TWO | {"response_mask": [[1, 0, 1]], "logprobs": [[-1.0, -2.0, -3.0, 0.0, 0.0]]},
        TWO | MASK | {"logprobs": [[0.0, -1.0, -2.0, -3.0]]},
        TWO | MASK | {"logprobs": np.array([[0.0, 0.0, -1.0, -2.0, -3.0, 0.0, 0.0]])},
        ONE | MASK | {"logprobs": [[0.0, -1.0, -2.0, -3.0]]},
        ONE | MASK | {"logprobs": [[-1.0, -2.0, -3.0]]},
        ONE | {"loss_mask": [[0, 1, 0, 1]], "logprobs": np.array([[0, 0, -1.0, -2, -3, 0, 0]])},
    ],
)
def test_values_are_padded_as_their_tokens_or_not_at_all(columns: dict[str, Any]) -> None:
    RowColumns.of(columns).refuse_misfits("the stage")
    (row,) = Rollouts(rollout_columns(columns))
    assert (row["prompt"], row["response"], row["mask"]) == ([3], [5, 6, 7], [1, 0, 1])
    assert row["log_probs"] == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            TWO | {"attention_mask": ATTENTION[:, 1:]},
            "attention_mask has 6 values in row 0, and th",
        ),
        ({"prompts": P, "responses": R, "prompt_mask": P[:, :1]}, "and its prompt has 2 tokens"),
        ({"input_ids": [[1, 2, 3]], "loss_mask": [[1]]}, "1 value in row 0, and the row has 3 tok"),
        ({"responses": [[1], [2]], "loss_mask": [[1]]}, "1 rows, and there are 2 responses"),
        ({"responses": [[1], [2]], "logprobs": [[-1.0]]}, "1 rows, and there are 2 responses"),
        (
            {"responses": [[1, 2, 3]] * 3, "logprobs": [[-1.0], None, [-1.0] * 2]},
            "1 value in row 0, and its response has 3 tokens, and 1 other rows do not fit, too",
        ),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(LengthError, match=said):
        RowColumns.of(columns).refuse_misfits("the stage")


@pytest.mark.parametrize("score", [0.5, [0.5], np.array([[0.5], [1.0]]), torch.ones(2, 1)])
def test_one_reward_for_a_row_needs_no_tokens(score: Any) -> None:
    rewards = [score, None] if isinstance(score, float | list) else score
    columns = {"responses": RESPONSES, "rewards": rewards, "scores": ["text", "text"]}
    RowColumns.of(columns).refuse_misfits("the stage")


def test_attention_to_prompts_that_are_not_known_is_not_judged() -> None:
    RowColumns.of({"responses": R, "attention_mask": ATTENTION[:, :3]}).refuse_misfits("the stage")
