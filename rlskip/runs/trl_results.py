"""What TRL's trainers return from their stage, as named columns.

It is a tuple that differs from trainer to trainer and from version to version; its parts are known
by their types and shapes. `rlskip.hosts.trl` keeps it together with the metrics and the number of
tokens that the trainer counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_KEPT = {"output", "metrics", "num_tokens"}
_NO_LABEL = -100  # of tokens that are not trained


def named(rollouts: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The columns of a generation, and what belongs to all of it; None for any other rollouts."""
    if not isinstance(rollouts, Mapping) or rollouts.keys() != _KEPT:
        return None
    output = rollouts["output"]
    if not isinstance(output, tuple) or len(output) < 2:
        return None
    columns = _of_lists(*output) or _of_arrays(output)
    if columns is None:
        return None
    return columns, {"metrics": rollouts["metrics"], "num_tokens": rollouts["num_tokens"]}


def _of_lists(prompts: Any, completions: Any, *others: Any) -> dict[str, Any] | None:
    """Of GRPO, RLOO, Distillation, SDPO and SDFT: lists of tokens."""
    if not (_is_rows(prompts) and _is_rows(completions) and len(prompts) == len(completions)):
        return None
    columns = {"prompt_ids": prompts, "completion_ids": completions}
    for name, part in _others(others, completions):
        columns.setdefault(name, part)
    return columns


def _of_arrays(output: tuple[Any, ...]) -> dict[str, Any] | None:
    """Of OnlineDPO (prompts and completions, each with its mask) and GKD (all tokens, labels)."""
    shapes = [part.shape for part in output if isinstance(part, np.ndarray) and part.ndim == 2]
    if len(shapes) < len(output) or len({rows for rows, _ in shapes}) > 1:
        return None
    if len(output) == 4 and shapes[0] == shapes[1] and shapes[2] == shapes[3]:
        prompts, prompt_mask, completions, mask = output
        seen = np.hstack([prompt_mask, mask])
        return {"prompts": prompts, "responses": completions, "attention_mask": seen}
    if len(output) == 3 and shapes[0] == shapes[1] == shapes[2]:
        tokens, seen, labels = output
        sampled = (labels != _NO_LABEL).astype(np.int64)
        return {"input_ids": tokens, "attention_mask": seen, "response_mask": sampled}
    return None


def _is_rows(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(row, list) for row in part)


def _others(parts: Sequence[Any], completions: list[list[int]]) -> Iterator[tuple[str, Any]]:
    """The names of further parts, with those of the fields that a `rollout_func` adds."""
    for number, part in enumerate(parts, 2):
        if isinstance(part, Mapping):
            yield from ((str(name), value) for name, value in part.items())
        elif _is_by_token(part, completions):
            floats = any(isinstance(value, float) for row in part for value in row)
            yield "logprobs" if floats else "completion_mask", part
        elif part is not None:
            text = isinstance(part, list) and all(isinstance(row, str | list) for row in part)
            yield "completions" if text else f"output_{number}", part


def _is_by_token(part: Any, completions: list[list[int]]) -> bool:
    return (
        _is_rows(part)
        and list(map(len, part)) == list(map(len, completions))
        and all(value is None or isinstance(value, int | float) for row in part for value in row)
    )
