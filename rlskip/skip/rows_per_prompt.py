"""Which rows of a stage's result are which prompt's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlskip.batch.columns import (
    UIDS,
    cells_of,
    column_length,
    columns_of,
    length_of,
    values_at,
)
from rlskip.batch.row_fields import RowFields


def rows_per_prompt(result: Any, asked: int, prompts: Any, fields: RowFields) -> list[int] | str:
    """How many rows of a stage's result each of the `asked` prompts has, one's after the other's.

    Or why that is not known: the rows are neither as many as the prompts, nor do the result's
    fields tell.
    """
    rows = row_count(result, fields)
    if asked == 1:
        return [rows or 1]
    if rows is None:
        return f"the stage returns a {type(result).__name__}, whose rows are not known"
    if rows == asked:
        return [1] * asked
    groups = values_at(result, fields.group) if fields.group else None
    if groups is not None and len(groups) == rows:
        runs = [(name, len([*of])) for name, of in itertools.groupby(map(plain_scalar, groups))]
        names = [plain_scalar(name) for name in prompt_groups(prompts, fields) or ()]
        if len(runs) == asked and (not names or names == [name for name, _ in runs]):
            return [count for _, count in runs]
    last = values_at(result, fields.last) if fields.last else None
    if last is not None and len(last) == rows:
        ends = [i + 1 for i, is_last in enumerate(last) if bool(is_last)]
        if len(ends) == asked and ends[-1] == rows:
            return [end - begin for begin, end in itertools.pairwise([0, *ends])]
    if fields.n is not None and rows == fields.n * asked:
        return [fields.n] * asked
    return (
        f"the stage returns {rows} rows for {asked} prompts, and no field tells which are whose: "
        "annotate(rows={'group': FIELD}), or {'n': ROWS_A_PROMPT} where they follow each other"
    )


def row_count(result: Any, fields: RowFields) -> int | None:
    """How many rows a stage's result has; None if its parts may be something else."""
    if isinstance(result, torch.Tensor | np.ndarray):
        return column_length(result)
    columns = columns_of(result)
    for name in (fields.response, fields.whole):
        if name in columns and (rows := column_length(columns[name])) is not None:
            return rows
    return length_of(result) if isinstance(result, list) or columns else None


def prompt_groups(prompts: Any, fields: RowFields) -> Sequence[Any] | None:
    """What names each prompt's group in the result, if the prompts have it."""
    columns = columns_of(prompts)
    likely = [fields.prompt_group, *(UIDS if fields.group in UIDS else ())]
    name = next((name for name in likely if name in columns), None)
    return None if name is None else cells_of(columns[name])


def plain_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value
