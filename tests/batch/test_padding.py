"""One rule of padding: for values of another length than their tokens, and for every layout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import rlskip
from rlskip.batch.columns import objects_of
from rlskip.batch.padding import LengthError
from rlskip.batch.rows import Layout, RowColumns, Rows
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
        ({"responses": [[1], [2]], "loss_mask": [[1]]}, "1 row, for 2 responses"),
        ({"responses": [[1], [2]], "logprobs": [[-1.0]]}, "1 row, for 2 responses"),
        (
            {"responses": [[1, 2, 3]] * 3, "logprobs": [[-1.0], None, [-1.0] * 2]},
            "1 value in row 0, and its response has 3 tokens; likewise 1 other row",
        ),
    ],
)
def test_what_does_not_fit_is_named(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(LengthError, match=said):
        RowColumns.of(columns).refuse_misfits("the stage")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("response_mask", [[1, None, 0], [1, 0, 1]]),
        ("response_mask", np.ones((2, 3, 1), np.int64)),
        ("response_mask", np.ones(2, np.int64)),
        ("response_mask", np.array(["101", "110"])),
        ("response_mask", [[1, 0, 1]]),
        ("logprobs", [[-1.0, None, -2.0], None]),
        ("logprobs", np.zeros((2, 3, 5))),  # of the likeliest tokens
        ("logprobs", [-3.0, -4.0]),
        ("logprobs", [[{"5": -1.0}], [{"8": -1.0}]]),
    ],
)
def test_what_cannot_be_read_is_not_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, values: Any
) -> None:
    columns = {"prompts": PROMPTS, "responses": RESPONSES, name: values}
    StepStore(tmp_path / "a_b" / "GBSany_Nany_inany_outany").save(1, columns)
    opened = rlskip.open(tmp_path)
    (row, _), (session, _) = opened.iter_rows(), opened.sessions()
    assert (row["mask"], row["log_probs"]) == (None, None)
    assert [name in one.getMessage() for one in caplog.records] == [True]
    assert len(values) == 1 or row[name] == np.asarray(values[0]).tolist(), "it stays"
    assert session.conversation.mask == (None if name == "response_mask" else [True] * 3)


@pytest.mark.parametrize("score", [0.5, [0.5], np.array([[0.5], [1.0]]), torch.ones(2, 1)])
def test_one_reward_for_a_row_needs_no_tokens(score: Any) -> None:
    rewards = [score, None] if isinstance(score, float | list) else score
    columns = {"responses": RESPONSES, "rewards": rewards, "scores": ["text", "text"]}
    RowColumns.of(columns).refuse_misfits("the stage")


def test_attention_to_prompts_that_are_not_known_is_not_judged() -> None:
    RowColumns.of({"responses": R, "attention_mask": ATTENTION[:, :3]}).refuse_misfits("the stage")


# -- rows are the same, named and opened, whatever columns hold them -----------------------------

TOKEN = st.integers(0, 2)
RESPONSE = st.lists(st.tuples(TOKEN, st.booleans()), max_size=4).map(
    lambda said: [(token, i == 0 or sampled) for i, (token, sampled) in enumerate(said)]
)
ROWS = st.lists(st.tuples(st.lists(TOKEN, max_size=3), RESPONSE), min_size=1, max_size=3)
LAYOUTS = ["two columns", "lists", "one column", "lists of one column"]


def _padded(cells: list[list[Any]], width: int, fill: Any, left: bool) -> np.ndarray:
    pads = ([fill] * (width - len(cell)) for cell in cells)
    rows = [pad + cell if left else cell + pad for cell, pad in zip(cells, pads, strict=True)]
    dtype = np.float32 if isinstance(fill, float) else np.int64
    return np.array(rows, dtype).reshape(len(cells), width)


def _columns(rows: list[Any], layout: str, more: tuple[int, int], pad: int, left: bool) -> Any:
    """The columns of such rows; log-probs and rewards have -1 - token, or 0 and 7 for padding."""
    prompts = [prompt for prompt, _ in rows]
    responses = [[token for token, _ in said] for _, said in rows]
    masks = [[int(sampled) for _, sampled in said] for _, said in rows]
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    marks = [[0] * len(p) + m for p, m in zip(prompts, masks, strict=True)]
    if layout == "lists":
        return {"prompts": prompts, "responses": responses, "response_mask": masks,
                "rollout_log_probs": [[-1.0 - t for t in r] for r in responses],
                "rewards": [[-1.0 - t for t in r] for r in responses]}  # fmt: skip
    if layout == "lists of one column":
        return {"input_ids": whole, "loss_mask": marks,
                "rollout_log_probs": [[-1.0 - t for t in row] for row in whole],
                "rewards": [[-1.0 - t for t in row] for row in whole]}  # fmt: skip
    probs = [[-1.0 - t for t in row] for row in (whole if layout == "one column" else responses)]
    p, r = (max(map(len, cells)) + more[i] for i, cells in enumerate((prompts, responses)))
    if layout == "one column":
        columns = {"input_ids": (whole, pad), "loss_mask": (marks, 0),
                   "attention_mask": ([[1] * len(row) for row in whole], 0),
                   "rollout_log_probs": (probs, 0.0), "rewards": (probs, 7.0)}  # fmt: skip
        return {name: _padded(cells, p + r, fill, left) for name, (cells, fill) in columns.items()}
    seen = [[[1] * len(cell) for cell in cells] for cells in (prompts, responses)]
    return {
        "prompts": _padded(prompts, p, pad, left=True),
        "responses": _padded(responses, r, pad, left=False),
        "attention_mask": np.hstack([_padded(seen[0], p, 0, True), _padded(seen[1], r, 0, False)]),
        "response_mask": _padded(masks, r, 0, left=False),
        "rollout_log_probs": _padded(probs, r, 0.0, left=False),
        "rewards": _padded(probs, r, 7.0, left=False),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    rows=ROWS,
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    pad=TOKEN,
    left=st.booleans(),
    as_tensors=st.booleans(),
)
def test_rows_are_the_same_in_every_layout(
    layout: str, rows: list[Any], more: tuple[int, int], pad: int, left: bool, as_tensors: bool
) -> None:
    columns = _columns(rows, layout, more, pad, left)
    opened = Rollouts(rollout_columns(columns), {}, ["prompt", "response", "mask", "log_probs"])
    if as_tensors:
        columns = {
            name: torch.from_numpy(column) if isinstance(column, np.ndarray) else column
            for name, column in columns.items()
        }
    named = Rows.of(RowColumns.of(columns))
    for i, (prompt, said) in enumerate(rows):
        response, mask = [token for token, _ in said], [int(sampled) for _, sampled in said]
        row = opened.row(i)
        assert (row["prompt"], row["response"], row["mask"]) == (prompt, response, mask)
        assert row["log_probs"] == [-1.0 - token for token in response]
        if len(columns["rewards"][i]) != 1:  # or it is that of the row
            assert opened.rewards[i] == sum(-1.0 - token for token in response)
        assert named.tokens[i].tolist() == prompt + response
        assert named.sampled[i].astype(int).tolist() == [0] * len(prompt) + mask
    spans = named.prompt.lengths.tolist()
    assert spans == [len(prompt) for prompt, _ in rows]


def test_gaps_in_a_prompt_are_padding_and_in_a_response_are_not() -> None:
    columns = {
        "input_ids": np.array([[1, 0, 2, 5, 0, 6, 0]]),
        "attention_mask": np.array([[1, 0, 1, 1, 0, 1, 0]]),
        "loss_mask": np.array([[0, 0, 0, 1, 0, 1, 0]]),
        "rollout_log_probs": -np.arange(7.0)[None],
    }
    (row,) = Rollouts(rollout_columns(columns))
    assert (row["prompt"], row["response"], row["mask"]) == ([1, 2], [5, 0, 6], [1, 0, 1])
    assert row["log_probs"] == [-3, -4, -5]
    named = Rows.of(RowColumns.of(columns))
    assert named.tokens[0].tolist() == [1, 2, 5, 0, 6]
    assert Layout.of(named, (1, 7)).align is None, "one value a token has no place for each"


def test_a_row_without_a_mask_is_sampled_as_a_whole() -> None:
    rows = [
        {"prompt_ids": [1], "completion_ids": [2, 3], "loss_mask": mask} for mask in ([1, 0], None)
    ]
    opened = list(Rollouts(rollout_columns(rows)))
    assert [row["mask"] for row in opened] == [[1, 0], None]
    named = Rows.of(RowColumns.of(rows))
    assert [cell.tolist() for cell in named.sampled] == [[False, True, False], [False, True, True]]


@pytest.mark.parametrize(
    ("prompts", "opened"),
    [([[1], None], [[1], []]), ([[1], "text"], [None, None]), ([[0.5], [1]], [None, None])],
)
def test_responses_are_read_whatever_some_prompts_are(
    prompts: list[Any], opened: list[list[int] | None]
) -> None:
    rows = [{"prompt_ids": prompt, "completion_ids": [2, 3]} for prompt in prompts]
    found = list(Rollouts(rollout_columns(rows)))
    assert [row["response"] for row in found] == [[2, 3]] * 2
    assert [row["prompt"] for row in found] == opened


def tokens_of(columns: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row, and which were sampled."""
    rows = Rows.of(RowColumns.of(columns))
    sampled = [cell.astype(int).tolist() for cell in rows.sampled]
    return list(zip([cell.tolist() for cell in rows.tokens], sampled, strict=True))


PROMPT = [[0, 3]]


@pytest.mark.parametrize("padded", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("columns", "tokens", "sampled"),
    [
        # With an attention mask: what it leaves out is padding, whatever was sampled.
        (  # an aborted row
            {"prompts": PROMPT, "responses": [[0, 0, 0]], "attention_mask": [[0, 1, 0, 0, 0]],
             "response_mask": [[0, 0, 0]]},
            [3], [0],
        ),
        (
            {"prompts": PROMPT, "responses": [[0, 0, 0]], "attention_mask": [[0, 0, 0, 0, 0]]},
            [], [],
        ),
        # With a mask of the response alone: what follows the last sampled token is padding.
        (
            {"prompts": PROMPT, "responses": [[5, 6, 7, 0]], "response_mask": [[1, 0, 1, 0]]},
            [0, 3, 5, 6, 7], [0, 0, 1, 0, 1],
        ),
        (  # the loss of a whole row may be masked: its tokens are still those of the row
            {"prompts": PROMPT, "responses": [[5, 6]], "response_mask": [[0, 0]]},
            [0, 3, 5, 6], [0, 0, 0, 0],
        ),
        # Prompt and response in one column.
        ({"input_ids": [[1, 5, 7, 7, 7]]}, [1, 5, 7, 7, 7], [0] * 5),
        ({"input_ids": [[1, 5, 7, 7, 7]], "loss_mask": [[0, 1, 1, 1, 1]]},
         [1, 5, 7, 7, 7], [0, 1, 1, 1, 1]),
        ({"input_ids": [[1, 5, 7, 7, 7]], "loss_mask": [[0, 1, 1, 0, 0]]},
         [1, 5, 7], [0, 1, 1]),
        ({"input_ids": [[1, 5, 7, 7]], "attention_mask": [[0, 1, 1, 1]]}, [5, 7, 7], [0, 0, 0]),
        ({"input_ids": [[1, 5, 7, 7]], "attention_mask": [[0, 0, 0, 0]]}, [], []),
    ],
)  # fmt: skip
def test_padding_is_no_part_of_a_row(
    padded: Any, columns: dict[str, Any], tokens: list[int], sampled: list[int]
) -> None:
    assert tokens_of({name: padded(cells) for name, cells in columns.items()}) == [
        (tokens, sampled)
    ]


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (  # what a tool said last is not padding
            {"prompts": [[3]], "responses": [[5, 6, 7]], "response_mask": [[1, 0, 0]]},
            [([3, 5, 6, 7], [0, 1, 0, 0])],
        ),
        ({"input_ids": [[1, 5, 7, 7], [2]]}, [([1, 5, 7, 7], [0] * 4), ([2], [0])]),
        (
            {"input_ids": [[1, 5, 7, 7]], "loss_mask": [[0, 1, 0, 0]]},
            [([1, 5, 7, 7], [0, 1, 0, 0])],
        ),
    ],
)  # fmt: skip
def test_lists_have_no_padding(columns: dict[str, Any], rows: list[tuple[Any, Any]]) -> None:
    assert tokens_of(columns) == rows
    assert tokens_of({name: nested(cells) for name, cells in columns.items()}) == rows
