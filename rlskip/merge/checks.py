"""Checks of the rows that merging reads; each refusal names the field and the row."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import numpy as np
from tensordict import is_tensor_collection
from torch import Tensor

from rlskip.errors import RlskipError
from rlskip.merge.turns import (
    IS_LAST,
    LOGPROBS,
    METRICS,
    NOT_CARRIED,
    NUMBER,
    PROMPTS,
    REQUIRED,
    RESPONSES,
    REWARDS,
    TRAJECTORIES,
    MergeError,
    is_token_reward,
    token_fields,
)


def check_rows(out: Mapping[str, Any]) -> None:
    """Refuse a list batch that lacks a field, or has one of an odd type or an unequal length.

    Raises
    ------
    MergeError
        Names the field and, if one row is at fault, its index.
    """
    check_mapping(out)
    for name in REQUIRED:
        if out.get(name) is None:
            raise MergeError("this field is missing", name)
    check_list(out[RESPONSES], RESPONSES)
    rows = len(out[RESPONSES])
    check_some(rows)
    for name in (*REQUIRED, LOGPROBS, TRAJECTORIES, IS_LAST):
        if out.get(name) is not None:
            check_list(out[name], name, rows)
    for name, value in out.items():
        if name != METRICS:
            _check_entries(value, rows, name)
    per_token = token_fields(out)
    for i, reward in enumerate(out[REWARDS]):
        if is_token_reward(reward) != (REWARDS in per_token):
            raise MergeError(
                "some rows have one reward, others one per token",
                f"{REWARDS}[{i}]",
                "give every row a list of token rewards, or every row a number",
            )
    for name in (PROMPTS, RESPONSES, *per_token):
        for i, (values, response) in enumerate(zip(out[name], out[RESPONSES], strict=True)):
            if not isinstance(values, list):
                kind = type(values).__name__
                raise MergeError(f"expected a list of values per token, got {kind}", f"{name}[{i}]")
            if name in per_token and len(values) != len(response):
                what = f"{len(values)} values for {len(response)} response tokens"
                raise MergeError(what, f"{name}[{i}]")
    if REWARDS not in per_token:
        check_numbers(out[REWARDS], REWARDS)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value is a mapping; a TensorDict, which claims to be one, is not."""
    return isinstance(value, Mapping) and not is_tensor_collection(value)


def check_mapping(value: Any, name: str = "") -> None:
    """Refuse a batch, or a field, that is not a mapping."""
    if not is_mapping(value):
        raise MergeError(f"expected a dict, got {type(value).__name__}", name)


def check_list(value: Any, name: str, rows: int | None = None) -> None:
    """Refuse a field that is not a list, or not one of exactly `rows` entries."""
    if not isinstance(value, list):
        raise MergeError(f"expected a list, got {type(value).__name__}", name)
    if rows is not None:
        check_count(len(value), rows, name)


def check_numbers(values: Sequence[Any], name: str) -> None:
    """Refuse a field whose entries are not numbers."""
    for i, value in enumerate(values):
        check_number(value, f"{name}[{i}]")


def check_number(value: Any, where: str) -> None:
    """Refuse a value that is not a number, or too large for a float."""
    number = _scalar(value)
    if not isinstance(number, NUMBER):
        raise MergeError(f"expected a number, got {type(value).__name__}", where)
    try:
        float(number)
    except OverflowError as error:
        raise MergeError(str(error), where) from None


def check_id(value: Any, where: str) -> None:
    """Refuse a token that is not an integer of 64 bits."""
    token = _scalar(value)
    if not isinstance(token, int) or not -(2**63) <= token < 2**63:
        raise MergeError(f"expected a 64-bit integer, got {type(value).__name__}", where)


def _check_entries(value: Any, rows: int, name: str) -> None:
    """Refuse a field that is neither a list of one entry per row nor a dict of such lists."""
    if is_mapping(value):
        for key, part in value.items():
            _check_entries(part, rows, f"{name}.{key}")
    elif value is not None:
        check_list(value, name, rows)


@contextmanager
def naming_odd_tokens(out: Mapping[str, Any]) -> Iterator[None]:
    """Name the odd token behind any error in the block.

    To check the type of each token first would cost as much as the merge.
    """
    try:
        yield
    except RlskipError:
        raise
    except Exception:
        for name in (PROMPTS, RESPONSES, *token_fields(out)):
            for i, row in enumerate(out[name]):
                for k, value in enumerate(row):
                    check = check_id if name in (PROMPTS, RESPONSES) else check_number
                    check(value, f"{name}[{i}][{k}]")
        raise


def check_some(rows: int) -> None:
    """Refuse a batch without rows."""
    if rows == 0:
        raise MergeError("there are no rows", RESPONSES, "an empty step has nothing to train on")


def check_count(entries: int, rows: int, name: str) -> None:
    """Refuse a field without exactly one entry per row."""
    if entries != rows:
        raise MergeError(f"{entries} entries for {rows} rows", name)


def check_carried(names: Collection[str]) -> None:
    """Refuse fields that merging would misalign."""
    for name in NOT_CARRIED:
        if name in names:
            # SkyRL's wording, which its users and tests look for.
            raise MergeError(
                f"{name} not supported for prefix-aware merging",
                name,
                "train these rows unmerged (merge.stepwise_output=false)",
            )


def trajectories(ids: Sequence[Hashable] | None, is_last: Sequence[bool] | None) -> list[range]:
    """The rows of each trajectory, in order.

    Raises
    ------
    MergeError
        An id or a flag is missing or has an odd type, a trajectory's rows are not consecutive, or
        `is_last_step` is not true on the last of them and false on the others.
    """
    if ids is None or is_last is None:
        missing = TRAJECTORIES if ids is None else IS_LAST
        raise MergeError(f"step-wise rows need {missing}", missing)
    check_count(len(is_last), len(ids), IS_LAST)
    keys = [_comparable(id_, i) for i, id_ in enumerate(ids)]
    flags = [_flag(value, i) for i, value in enumerate(is_last)]
    spans: list[range] = []
    seen: set[Hashable] = set()
    start = 0
    for i, key in enumerate(keys):
        if key is None:
            raise MergeError("the trajectory id is missing", f"{TRAJECTORIES}[{i}]")
        if key in seen:
            raise MergeError(
                f"trajectory {key} continues after rows of another one",
                f"{TRAJECTORIES}[{i}]",
                "put all rows of a trajectory together, in the order of its turns",
            )
        ends = i + 1 == len(keys) or keys[i + 1] != key
        if flags[i] != ends:
            what = "ends here" if ends else f"continues in row {i + 1}"
            raise MergeError(f"{flags[i]}, but trajectory {key} {what}", f"{IS_LAST}[{i}]")
        if ends:
            spans.append(range(start, i + 1))
            seen.add(key)
            start = i + 1
    return spans


def _comparable(id_: Any, row: int) -> Hashable:
    """The id of a trajectory as a value that can be compared and hashed."""
    where = f"{TRAJECTORIES}[{row}]"
    # SkyRL's own TrajectoryID is an unfrozen dataclass: it compares, but does not hash.
    key = id_.to_string() if callable(getattr(id_, "to_string", None)) else _scalar(id_)
    try:
        hash(key)
    except TypeError:
        raise MergeError(f"expected a hashable id, got {type(id_).__name__}", where) from None
    if isinstance(key, Tensor):  # hashes by identity
        raise MergeError("expected one id, got a tensor", where)
    return cast("Hashable", key)


def _flag(value: Any, row: int) -> bool:
    flag = _scalar(value)
    if not isinstance(flag, bool | int) or flag not in (0, 1):
        raise MergeError(f"expected a bool, got {type(value).__name__}", f"{IS_LAST}[{row}]")
    return bool(flag)


def _scalar(value: Any) -> Any:
    """A numpy scalar or a 0-d array or tensor as a Python value; any other value unchanged."""
    return (
        value.item()
        if isinstance(value, np.generic | np.ndarray | Tensor) and not value.ndim
        else value
    )
