"""How two batches of prompts differ, for readers: a dump records a summary of its prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import xxhash

from rlskip._human import short
from rlskip.batch.columns import cells_of, column_length, columns_of, length_of
from rlskip.batch.meta import plain
from rlskip.format.fingerprint import VOLATILE, fingerprint

# Of larger batches the first rows are compared.
_MAX_ROWS = 256
_MAX_TEXTS = 64
_SHOWN = 2
_TEXT_NAMES = ("text", "prompt", "question", "content", "messages", "raw_prompt")


@attrs.frozen
class PromptRows:
    """What a dump records of its prompts.

    Parameters
    ----------
    rows
        How many there were.
    digests
        A hash of each of the first 256.
    texts
        How each of the first 64 begins.
    """

    rows: int
    digests: list[str]
    texts: list[str]

    @classmethod
    def of(cls, prompts: Any) -> PromptRows | None:
        """Summarize prompts; None if they cannot be taken apart."""
        try:
            if not columns_of(prompts) or not (n := length_of(prompts)):
                rows = prompts if isinstance(prompts, list | tuple) else [prompts]
                digests = [fingerprint(row)[:12] for row in rows[:_MAX_ROWS]]
                return cls(len(rows), digests, [_text_of(row) for row in rows[:_MAX_TEXTS]])
            columns = {k: v for k, v in columns_of(prompts).items() if k not in VOLATILE}
            return cls(n, _digests(columns, n), [_text_of(cell) for cell in _shown(columns, n)])
        except Exception:  # it only serves a message
            return None

    @classmethod
    def recorded(cls, value: Any) -> PromptRows | None:
        """What ``attrs.asdict`` made of one, from a file; None if it is something else."""
        try:
            found = cls(**value)
            texts = all(isinstance(text, str) for text in [*found.digests, *found.texts])
            return found if texts and type(found.rows) is int else None
        except (TypeError, AttributeError):
            return None

    def difference(self, then: PromptRows) -> str:
        """How these prompts differ from those of a dump; empty if the summaries do not show it."""
        both = range(min(len(self.digests), len(then.digests)))
        differ = [i for i in both if self.digests[i] != then.digests[i]]
        said = [f"{self.rows} prompts now, {then.rows} in the dump"] * (self.rows != then.rows)
        if self.rows == then.rows and differ and Counter(self.digests) == Counter(then.digests):
            whole = "" if self.rows <= _MAX_ROWS else f"first {_MAX_ROWS} "
            return f"the same {whole}prompts in another order"
        said += [
            f"row {i} is {_at(self.texts, i)} now, {_at(then.texts, i)} in the dump"
            for i in differ[:_SHOWN]
        ]
        if more := len(differ) - _SHOWN:
            said += [f"{more} more rows differ"] * (more > 0)
        return ", ".join(said)


def _digests(columns: Mapping[Any, Any], n: int) -> list[str]:
    """A hash of each of the first rows."""
    rows = [xxhash.xxh3_64() for _ in range(min(n, _MAX_ROWS))]
    for name in sorted(columns, key=str):
        column, parts = columns[name], list[Any]()
        if isinstance(column, torch.Tensor) and not column.is_nested and len(column) == n:
            data = column[: len(rows)].detach().cpu().contiguous()
            parts = [*data.reshape(len(rows), -1).view(torch.uint8).numpy()]
        elif (cells := cells_of(column, n)) is not None:
            parts = [fingerprint(cell).encode() for cell in cells[: len(rows)]]
        else:
            continue  # one value for all rows
        for row, part in zip(rows, parts, strict=True):
            row.update(f"{name};".encode())
            row.update(part)
    return [row.hexdigest()[:12] for row in rows]


def _shown(columns: Mapping[Any, Any], n: int) -> Sequence[Any]:
    """The first cells of the column that shows best what a row is: a text, if there is one."""
    of_rows = {name: column for name, column in columns.items() if column_length(column) == n}
    named = [name for name in _TEXT_NAMES if name in of_rows]
    texts = [name for name, column in of_rows.items() if isinstance(_first(column), str)]
    best = next(iter([*named, *texts, *of_rows]), None)
    if best is None:
        return []
    column = of_rows[best]
    if isinstance(column, torch.Tensor) and not column.is_nested:
        return column[:_MAX_TEXTS].unbind()
    return (cells_of(column, n) or [])[:_MAX_TEXTS]


def _first(column: Any) -> Any:
    return column[0] if isinstance(column, list | tuple | np.ndarray) else None


def _text_of(value: Any) -> str:
    """How a prompt begins."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in _TEXT_NAMES if name in value), dict(value))
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim:
        value = value[:16]
    value = plain(value)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):  # a conversation
        value = value[-1].get("content", value)
    return repr(short(value, 48)) if isinstance(value, str) else short(repr(value)[:200], 48)


def _at(texts: Sequence[str], i: int) -> str:
    return texts[i] if i < len(texts) else "another"
