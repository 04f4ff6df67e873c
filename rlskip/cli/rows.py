"""Rollouts of any trainer as columns and rows: what was said, with which log-probs and reward.

Which column is what is told by its name; the names are those of verl, SkyRL, TRL and of
``train.py``. Whatever has no such name is a column among others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDictBase

from rlskip.errors import RlskipError
from rlskip.store.batches import DataProtoParts

NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompts", "prompt_token_ids", "prompt_ids"),
    "response": ("responses", "response_ids", "completion_ids"),
    "whole": ("input_ids",),
    "attention": ("attention_mask",),
    "mask": ("response_mask", "loss_masks", "loss_mask", "completion_mask"),
    "log_probs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "old_log_probs",
        "logprobs",
    ),
    "reward": ("rewards", "reward", "rm_scores", "token_level_scores", "token_level_rewards",
               "scores", "score"),
    "uid": ("uid", "uids", "trajectory_ids"),
}  # fmt: skip

Column = Any  # a tensor, an array or a sequence: one value a row


@attrs.frozen
class Columns:
    """Rollouts as columns of `n` values, and what belongs to the whole batch."""

    n: int
    columns: Mapping[str, Column]
    beside: Mapping[str, Any]

    def of(self, what: str) -> tuple[str, Sequence[Any]] | None:
        """Name and values of the column that holds `what` (a key of NAMES); None without one."""
        for name in NAMES[what]:
            if name in self.columns:
                return name, values(self.columns[name])
        return None


@attrs.frozen
class Row:
    """One trajectory, without padding. `response` begins with the first sampled token.

    ``mask`` says of each token of the response whether it was sampled, ``log_probs`` goes with
    it; either is None where the rollouts have none. ``reward`` is the sum where it was given
    token by token.
    """

    index: int
    uid: str | None
    prompt: list[int]
    response: list[int]
    mask: list[int] | None
    log_probs: list[float] | None
    reward: float | None


# -- any rollouts as columns ---------------------------------------------------------------


def columns_of(rollouts: Any) -> Columns:
    """Columns of a DataProto, a TensorDict, a mapping, a queue's part or a list of rows."""
    if isinstance(rollouts, DataProtoParts):
        tensors = {} if rollouts.batch is None else _items(rollouts.batch)
        return _split({**tensors, **rollouts.non_tensor_batch}, {"meta_info": rollouts.meta_info})
    if isinstance(rollouts, TensorDictBase):
        return _split(_items(rollouts), {})
    if is_queue_part(rollouts):
        fields = {"key": rollouts["keys"], **_items(rollouts["fields"])}
        return _split(fields, {"groups": rollouts["groups"]})
    if isinstance(rollouts, Mapping):
        return _split(dict(rollouts), {})
    if isinstance(rollouts, list | tuple):
        if rollouts and all(isinstance(row, Mapping) for row in rollouts):
            names = dict.fromkeys(str(name) for row in rollouts for name in row)
            return Columns(
                len(rollouts), {name: [row.get(name) for row in rollouts] for name in names}, {}
            )
        return Columns(len(rollouts), {"value": list(rollouts)}, {})
    return Columns(0, {}, {"value": rollouts})


def is_queue_part(rollouts: Any) -> bool:
    """Whether this is what role rollout_tq dumps."""
    return isinstance(rollouts, dict) and rollouts.keys() == {"groups", "keys", "fields"}


def values(column: Column) -> Sequence[Any]:
    """One value a row."""
    if isinstance(column, torch.Tensor):
        return column.unbind()
    if isinstance(column, np.ndarray):
        return list(column)
    if hasattr(column, "tensordicts"):  # NonTensorStack
        return list(column.tolist())
    return column  # type: ignore[no-any-return]


def _items(batch: TensorDictBase) -> dict[str, Any]:
    return {str(key): batch.get(key) for key in list(batch.keys())}


def _split(fields: dict[str, Any], beside: dict[str, Any]) -> Columns:
    """Apart what has one value a row (most fields do) and what has not."""
    lengths = {name: n for name, value in fields.items() if (n := _length(value)) is not None}
    counts = Counter(lengths.values())
    n = max(counts, key=lambda length: (counts[length], length), default=0)
    columns = {name: fields[name] for name, length in lengths.items() if length == n}
    others = {name: value for name, value in fields.items() if name not in columns}
    return Columns(n, columns, {**others, **beside})


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.size(0)) if value.ndim else None  # a strided nested one has no shape
    if isinstance(value, np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    if hasattr(value, "tensordicts") or isinstance(value, list | tuple):
        return len(value)
    return None


# -- columns as rows -----------------------------------------------------------------------


def rows_of(columns: Columns, limit: int | None = None) -> list[Row]:
    """The trajectories, or the first few; none where no column holds tokens."""
    return rows_at(columns, range(columns.n)[:limit])


def rows_at(columns: Columns, places: Sequence[int]) -> list[Row]:
    """The trajectories at these places; none where no column holds tokens."""
    found = {what: named[1] for what in NAMES if (named := columns.of(what)) is not None}
    for what in ("response", "whole"):
        if what in found and any(numbers(found[what][i]) is None for i in places[:1]):
            del found[what]  # the text of it, say
    if not found.keys() & {"response", "whole"}:
        return []
    return [_row(i, {what: column[i] for what, column in found.items()}) for i in places]


def lengths_of(columns: Columns) -> list[int]:
    """Tokens of each response, without padding; none where no column holds tokens.

    Worked out for whole columns where they are tensors: a step may have 10 000 rows.
    """
    response = _tensor(columns, "response")
    attention, mask = _tensor(columns, "attention"), _tensor(columns, "mask")
    if response is not None and not response.is_nested and response.dim() == 2:
        real = mask
        if attention is not None and attention.shape[1] > response.shape[1]:
            real = attention[:, -response.shape[1] :]
        if real is None or real.is_nested:
            return [response.shape[1]] * columns.n
        at = torch.arange(1, real.shape[1] + 1)
        return [int(n) for n in (at * (real != 0)).amax(1).tolist()]
    return [len(row.response) for row in rows_of(columns)]


def rewards_of(columns: Columns) -> list[float]:
    """The reward of each row that has one."""
    reward = _tensor(columns, "reward")
    if reward is not None and not reward.is_nested:
        return [float(r) for r in reward.double().reshape(columns.n, -1).sum(1).tolist()]
    named = columns.of("reward")
    totals = [_total(cell) for cell in named[1]] if named is not None else []
    return [total for total in totals if total is not None]


def _tensor(columns: Columns, what: str) -> torch.Tensor | None:
    name = next((name for name in NAMES[what] if name in columns.columns), None)
    column = None if name is None else columns.columns[name]
    return column if isinstance(column, torch.Tensor) else None


def _row(index: int, cell: dict[str, Any]) -> Row:
    response, mask = numbers(cell.get("response")), numbers(cell.get("mask"))
    log_probs = numbers(cell.get("log_probs"))
    prompt, attention = numbers(cell.get("prompt")) or [], numbers(cell.get("attention"))
    if response is None:
        # The whole is prompt and response; the mask says what was sampled of it.
        whole = numbers(cell["whole"]) or []
        sampled = [i for i, flag in enumerate(mask or []) if flag]
        first, last = (sampled[0], sampled[-1] + 1) if sampled else (len(whole), len(whole))
        prompt, response = whole[:first], whole[first:last]
        mask = mask[first:last] if mask else None
        log_probs = log_probs[first:last] if log_probs else None
    elif attention is not None and len(attention) == len(prompt) + len(response):
        seen = attention[len(prompt) :]
        prompt = [t for t, real in zip(prompt, attention, strict=False) if real]
        # Only what trails is padding; a gap within would be the trainer's own.
        length = max((i + 1 for i, real in enumerate(seen) if real), default=0)
        response = response[:length]
        mask = mask[:length] if mask else None
        log_probs = log_probs[:length] if log_probs else None
    uid = cell.get("uid")
    return Row(
        index,
        None if uid is None else str(uid.item() if hasattr(uid, "item") else uid),
        [int(t) for t in prompt],
        [int(t) for t in response],
        None if mask is None else [int(bool(flag)) for flag in mask],
        None if log_probs is None else [float(p) for p in log_probs],
        _total(cell.get("reward")),
    )


def numbers(value: Any) -> list[Any] | None:
    """A row's cell as a list of numbers; None where it is no such thing."""
    if isinstance(value, torch.Tensor):
        return None if value.is_complex() else value.reshape(-1).tolist()
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in value):
        return list(value)
    return None


def _total(value: Any) -> float | None:
    if isinstance(value, int | float | np.number | np.bool_):
        return float(value)
    given = numbers(value)
    return None if given is None else float(sum(given))


# -- decoding --------------------------------------------------------------------------------


class Decoder:
    """Tokens as text, by a tokenizer on this disk.

    Raises
    ------
    RlskipError
        transformers is not installed, or the path holds no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RlskipError(
                "decoding needs transformers", "--tokenizer", "pip install transformers"
            ) from error
        if not path.is_dir():
            raise RlskipError("no such directory", str(path), "give a local tokenizer's")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise RlskipError(f"it holds no tokenizer: {reason}", str(path)) from error

    def __call__(self, tokens: Sequence[int]) -> str:
        known = [t for t in tokens if 0 <= t < len(self._tokenizer)]
        return str(self._tokenizer.decode(known))


def plain(value: Any) -> Any:
    """A cell as JSON."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
