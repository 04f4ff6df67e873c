"""The rows that merging reads: SkyRL's GeneratorOutput, and its checks.

A row is one turn: the model's input (`prompt_token_ids`), its output (`response_ids`), and other
fields with one entry per row or one value per response token. Names and meanings are SkyRL's
(``skyrl/train/generators/base.py``). Each refusal names the field and the row.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import attrs
import numpy as np
from tensordict import is_tensor_collection
from torch import Tensor

from rlskip._human import counted
from rlskip.batch.ragged import NUMBER
from rlskip.errors import RlskipError

PROMPTS = "prompt_token_ids"
RESPONSES = "response_ids"
REWARDS = "rewards"
MASKS = "loss_masks"
LOGPROBS = "rollout_logprobs"
TRAJECTORIES = "trajectory_ids"
IS_LAST = "is_last_step"
METRICS = "rollout_metrics"
TIMES = "trajectory_generation_times"
TIME_SPLITS = "trajectory_time_splits"

REQUIRED = (PROMPTS, RESPONSES, REWARDS, MASKS)

# Fields with one value per response token; `rewards` may also hold one number per row.
PER_TOKEN: dict[str, type] = {MASKS: int, REWARDS: float, LOGPROBS: float}

# One value per token, patch or image: the last turn's values alone would be misaligned.
NOT_CARRIED = (
    "rollout_expert_indices",
    "rollout_sample_support",
    "routed_experts",
    "pixel_values",
    "image_grid_thw",
    "multi_modal_inputs",
    "multi_modal_data",
)


class MergeError(RlskipError, ValueError, AssertionError):
    """Rows that cannot be merged; `where` names the field and the row.

    Also an AssertionError, which SkyRL raises in these cases.
    """


@attrs.frozen(order=True)
class TrajectoryID:
    """SkyRL's trajectory id, hashable: session `repetition_id` of prompt `instance_id`.

    Any other hashable value is a valid trajectory id, and so is SkyRL's own class.
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def token_fields(out: Mapping[str, Any]) -> list[str]:
    """The format's own fields with one value per response token."""
    there = [name for name in PER_TOKEN if out.get(name) is not None]
    return [name for name in there if name != REWARDS or _is_token_reward(out[name][0])]


def _is_token_reward(reward: Any) -> bool:
    """A reward per row is a number, which has no length; a 0-d tensor has none either."""
    return hasattr(reward, "__len__") and getattr(reward, "ndim", 1) > 0


def expect(holds: bool, what: str, where: str = "", remedy: str = "") -> None:
    """Refuse a batch of which something does not hold."""
    if not holds:
        raise MergeError(what, where, remedy)


def is_mapping(value: Any) -> bool:
    """Whether a value is a mapping; a TensorDict, which claims to be one, is not."""
    return isinstance(value, Mapping) and not is_tensor_collection(value)


def expect_a(kind: type, value: Any, where: str = "") -> None:
    """Refuse a value that is not a dict, or not a list."""
    is_one = is_mapping(value) if kind is dict else isinstance(value, kind)
    expect(is_one, f"expected a {kind.__name__}, got {type(value).__name__}", where)


def check_rows(out: Mapping[str, Any]) -> None:
    """Refuse a list batch that lacks a field, or has one of an odd type or an unequal length."""
    for name in (*REQUIRED, LOGPROBS, TRAJECTORIES, IS_LAST):
        if (value := out.get(name)) is not None:
            expect_a(list, value, name)
        expect(value is not None or name not in REQUIRED, "this field is missing", name)
    check_count(rows := len(out[RESPONSES]), rows, RESPONSES)
    for name, value in out.items():
        if name != METRICS:
            _check_entries(value, rows, name)
    per_token = token_fields(out)
    for i, reward in enumerate(out[REWARDS]):
        expect(
            _is_token_reward(reward) == (REWARDS in per_token),
            "some rows have one reward, others one per token",
            f"{REWARDS}[{i}]",
            "give every row a list of token rewards, or every row a number",
        )
    for name in (PROMPTS, RESPONSES, *per_token):
        for i, values in enumerate(out[name]):
            expect_a(list, values, f"{name}[{i}]")
        if name in per_token:
            check_tokens(map(len, out[name]), map(len, out[RESPONSES]), name)
    if REWARDS not in per_token:
        check_numbers(out[REWARDS], REWARDS)


def _check_entries(value: Any, rows: int, name: str) -> None:
    """Refuse a field that is neither a list of one entry per row nor a dict of such lists."""
    if is_mapping(value):
        for key, part in value.items():
            _check_entries(part, rows, f"{name}.{key}")
    elif value is not None:
        expect_a(list, value, name)
        check_count(len(value), rows, name)


def check_count(entries: int, rows: int, name: str) -> None:
    """Refuse a batch without rows, or a field without exactly one entry for each."""
    remedy = "an empty step has nothing to train on"
    expect(rows > 0, "there are no rows", RESPONSES, remedy)
    expect(entries == rows, f"{entries} entries for {counted(rows, 'row')}", name)


def check_tokens(values: Iterable[int], tokens: Iterable[int], name: str) -> None:
    """Refuse a field with a row that has not exactly one value per response token."""
    for i, (found, wanted) in enumerate(zip(values, tokens, strict=True)):
        what = f"{counted(found, 'value')} for {counted(wanted, 'response token')}"
        expect(found == wanted, what, f"{name}[{i}]")


def check_numbers(values: Sequence[Any], name: str, *, are_ids: bool = False) -> None:
    """Refuse values that are not numbers in the range of a float; ids are 64-bit integers."""
    kind, bits = (int, 63) if are_ids else (NUMBER, 1023)
    for i, value in enumerate(values):
        number = _scalar(value)
        fits = isinstance(number, kind) and not (isinstance(number, int) and abs(number) >> bits)
        what = f"expected {'an integer' if are_ids else 'a number'} of at most {bits} bits"
        expect(fits, f"{what}, got {type(value).__name__}", f"{name}[{i}]")


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
                check_numbers(row, f"{name}[{i}]", are_ids=name in (PROMPTS, RESPONSES))
        raise


def check_carried(names: Collection[str]) -> None:
    """Refuse fields that merging would misalign."""
    for name in NOT_CARRIED:
        # SkyRL's wording, which its users and tests look for.
        what = f"{name} not supported for prefix-aware merging"
        remedy = "train these rows unmerged (merge.stepwise_output=false)"
        expect(name not in names, what, name, remedy)


def trajectories(ids: Sequence[Hashable] | None, is_last: Sequence[bool] | None) -> list[range]:
    """The rows of each trajectory, in order, by ids and `is_last_step`, which must agree."""
    if ids is None or is_last is None:
        name = TRAJECTORIES if ids is None else IS_LAST
        raise MergeError(f"step-wise rows need {name}", name)
    check_count(len(is_last), len(ids), IS_LAST)
    keys = [_comparable(id_, i) for i, id_ in enumerate(ids)]
    flags = [_scalar(value) for value in is_last]
    spans: list[range] = []
    seen: set[Hashable] = set()
    start = 0
    for i, (key, flag) in enumerate(zip(keys, flags, strict=True)):
        is_flag = isinstance(flag, int) and flag in (0, 1)
        expect(is_flag, f"expected a bool, got {flag!r:.80}", f"{IS_LAST}[{i}]")
        expect(
            key not in seen,
            f"trajectory {key} continues after rows of another one",
            f"{TRAJECTORIES}[{i}]",
            "put all rows of a trajectory together, in the order of its turns",
        )
        ends = i + 1 == len(keys) or keys[i + 1] != key
        what = "ends here" if ends else f"continues in row {i + 1}"
        expect(flag == ends, f"{bool(flag)}, but trajectory {key} {what}", f"{IS_LAST}[{i}]")
        if ends:
            spans.append(range(start, i + 1))
            seen.add(key)
            start = i + 1
    return spans


def _comparable(id_: Any, row: int) -> Hashable:
    """The id of a trajectory as a value that can be compared and hashed."""
    # SkyRL's own TrajectoryID is an unfrozen dataclass: it compares, but does not hash.
    key = id_.to_string() if callable(getattr(id_, "to_string", None)) else _scalar(id_)
    with suppress(TypeError):
        hash(key)
        if key is not None and not isinstance(key, Tensor):  # a tensor hashes by identity
            return cast("Hashable", key)
    what = f"expected a hashable id, got {type(id_).__name__}"
    raise MergeError(what, f"{TRAJECTORIES}[{row}]")


def _scalar(value: Any) -> Any:
    """A numpy scalar or a 0-d array or tensor as a Python value; any other value unchanged."""
    is_scalar = isinstance(value, np.generic | np.ndarray | Tensor) and not value.ndim
    return value.item() if is_scalar else value
