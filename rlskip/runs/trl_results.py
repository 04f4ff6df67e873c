"""What TRL's trainers return from their stage, as named columns.

The result of `_generate` is a tuple that differs from trainer to trainer and from version to
version: token ids of prompts and completions come first, the others are known by what they hold.
`rlskip.hosts.trl` keeps it together with the metrics and the tokens that the trainer counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KEPT = {"output", "metrics", "num_tokens"}


def named(rollouts: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The columns of a generation, and what belongs to all of it; None for any other rollouts."""
    if not isinstance(rollouts, Mapping) or rollouts.keys() != _KEPT:
        return None
    output = rollouts["output"]
    if not isinstance(output, tuple) or len(output) < 2:
        return None
    prompts, completions, *others = output
    if not (_is_rows(prompts) and _is_rows(completions) and len(prompts) == len(completions)):
        return None
    columns = {"prompt_ids": prompts, "completion_ids": completions}
    for name, part in _others(others, completions):
        columns.setdefault(name, part)
    return columns, {"metrics": rollouts["metrics"], "num_tokens": rollouts["num_tokens"]}


def _is_rows(part: Any) -> bool:
    return isinstance(part, list) and all(isinstance(row, list) for row in part)


def _others(parts: list[Any], completions: list[list[int]]) -> Iterator[tuple[str, Any]]:
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
