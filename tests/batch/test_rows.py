"""Which tokens of padded columns and of lists belong to a row, and which were sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlskip.batch.rows import RowColumns, Rows


def rows_of(columns: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    rows = Rows.of(RowColumns.of(columns))
    return [
        (tokens.tolist(), sampled.astype(int).tolist())
        for tokens, sampled in zip(rows.tokens, rows.sampled, strict=True)
    ]


PROMPT = [[0, 3]]


@pytest.mark.parametrize("padded", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("columns", "tokens", "sampled"),
    [
        # With an attention mask: what it leaves out is padding, whatever was sampled.
        (
            {"prompts": PROMPT, "responses": [[5, 6, 0]], "attention_mask": [[0, 1, 1, 1, 0]],
             "response_mask": [[1, 0, 0]]},
            [3, 5, 6], [0, 1, 0],
        ),
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
    assert rows_of({name: padded(cells) for name, cells in columns.items()}) == [(tokens, sampled)]


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (
            {"prompts": [[3], [4, 4]], "responses": [[5, 6, 7], [8, 8]]},
            [([3, 5, 6, 7], [0, 1, 1, 1]), ([4, 4, 8, 8], [0, 0, 1, 1])],
        ),
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
    assert rows_of(columns) == rows
    nested = {
        name: torch.nested.as_nested_tensor(list(map(torch.tensor, cells)), layout=torch.jagged)
        for name, cells in columns.items()
    }
    assert rows_of(nested) == rows
