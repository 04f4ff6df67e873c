"""The rows that merging reads: SkyRL's GeneratorOutput, and what every entrance refuses.

A row is one turn: what the model was given (`prompt_token_ids`) and what came of it
(`response_ids`), with fields beside them that hold one entry a row or one value a response
token. The names and their meaning are SkyRL's (``skyrl/train/generators/base.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import chain as flatten
from typing import Any

import attrs

from rlskip.errors import RlskipError

PROMPTS = "prompt_token_ids"
RESPONSES = "response_ids"
REWARDS = "rewards"
MASKS = "loss_masks"
LOGPROBS = "rollout_logprobs"
TRAJECTORIES = "trajectory_ids"
IS_LAST = "is_last_step"
METRICS = "rollout_metrics"

REQUIRED = (PROMPTS, RESPONSES, REWARDS, MASKS)

# One value a response token, and what the tokens of an observation get: nothing trains there.
# (`rewards` may also hold one number a row; see `token_fields`.)
_PER_TOKEN: dict[str, float] = {MASKS: 0, REWARDS: 0.0, LOGPROBS: 0.0}

# One value a token, a patch or an image: taking the last turn's alone would misalign them.
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

    Also an AssertionError, because that is what SkyRL raises at these places.
    """


@attrs.frozen(order=True)
class TrajectoryID:
    """SkyRL's trajectory id, hashable: the `repetition_id`-th session of prompt `instance_id`.

    Any other hashable will do as a trajectory id, and so does SkyRL's own class.
    """

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def token_fields(out: Mapping[str, Any]) -> dict[str, float]:
    """The fields of a list batch that hold one value a response token, and their empty value.

    Beside those of the format, every field whose entries are all lists of numbers as long as
    their responses: the last turn's alone would not fit the merged response.
    """
    fields = {
        name: nothing
        for name, nothing in _PER_TOKEN.items()
        if out.get(name) is not None and (name != REWARDS or _is_token_reward(out[name][0]))
    }
    for name, values in out.items():
        if name not in (PROMPTS, RESPONSES, *_PER_TOKEN) and _fits_responses(values, out):
            numbers = flatten.from_iterable(values)
            fields[name] = 0.0 if any(isinstance(number, float) for number in numbers) else 0
    return fields


def _is_token_reward(reward: Any) -> bool:
    """One number a row has no length; a tensor of no dimension has none either."""
    return hasattr(reward, "__len__") and getattr(reward, "ndim", 1) > 0


def _fits_responses(values: Any, out: Mapping[str, Any]) -> bool:
    responses = out[RESPONSES]
    return (
        isinstance(values, list)
        and len(values) == len(responses)
        and any(values)
        and all(
            isinstance(entry, list) and len(entry) == len(response)
            for entry, response in zip(values, responses, strict=True)
        )
        and all(isinstance(number, int | float) for number in flatten.from_iterable(values))
    )


def check_rows(out: Mapping[str, Any]) -> None:
    """Refuse a list batch whose rows are missing, or whose lengths disagree.

    Raises
    ------
    MergeError
        Naming the field and, where one row is at fault, its index.
    """
    for name in REQUIRED:
        if out.get(name) is None:
            raise MergeError("this field is missing", name)
    rows = len(out[RESPONSES])
    check_some(rows)
    for name in (*REQUIRED, "stop_reasons", LOGPROBS, TRAJECTORIES, IS_LAST, *NOT_CARRIED):
        if out.get(name) is not None:
            check_count(len(out[name]), rows, name)
    per_token = token_fields(out)
    for i, reward in enumerate(out[REWARDS]):
        if _is_token_reward(reward) != (REWARDS in per_token):
            raise MergeError(
                "some rows have one reward, others one a token",
                f"{REWARDS}[{i}]",
                "give every row a list of token rewards, or every row a number",
            )
    for name in (PROMPTS, RESPONSES, *per_token):
        for i, values in enumerate(out[name]):
            if not isinstance(values, list):
                kind = type(values).__name__
                raise MergeError(f"expected a list, one value a token, got {kind}", f"{name}[{i}]")
    for name in per_token:
        for i, (values, response) in enumerate(zip(out[name], out[RESPONSES], strict=True)):
            if len(values) != len(response):
                raise MergeError(
                    f"{len(values)} values for {len(response)} response tokens", f"{name}[{i}]"
                )


def check_some(rows: int) -> None:
    """Refuse a batch without rows."""
    if rows == 0:
        raise MergeError("there are no rows", RESPONSES, "an empty step has nothing to train on")


def check_count(entries: int, rows: int, name: str) -> None:
    """Refuse a field that does not hold one entry a row."""
    if entries != rows:
        raise MergeError(f"{entries} entries for {rows} rows", name)


def check_carried(names: Collection[str]) -> None:
    """Refuse fields that merging would misalign."""
    for name in NOT_CARRIED:
        if name in names:
            # In SkyRL's words, which its users and its tests look for.
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
        An id or a flag is missing, a trajectory's rows do not stand together, or `is_last_step`
        is not true on the last of them and false on the others.
    """
    if ids is None or is_last is None:
        missing = TRAJECTORIES if ids is None else IS_LAST
        raise MergeError(f"step-wise rows need {missing}", missing)
    check_count(len(is_last), len(ids), IS_LAST)
    keys = [_comparable(id_) for id_ in ids]
    spans: list[range] = []
    seen: set[Hashable] = set()
    start = 0
    for i, key in enumerate(keys):
        if key is None:
            raise MergeError("the trajectory id is missing", f"{TRAJECTORIES}[{i}]")
        if key in seen:
            raise MergeError(
                f"trajectory {key} goes on after rows of another one",
                f"{TRAJECTORIES}[{i}]",
                "put all rows of a trajectory together, in the order of its turns",
            )
        ends = i + 1 == len(keys) or keys[i + 1] != key
        if bool(is_last[i]) != ends:
            what = "ends here" if ends else f"goes on in row {i + 1}"
            raise MergeError(f"{is_last[i]}, but trajectory {key} {what}", f"{IS_LAST}[{i}]")
        if ends:
            spans.append(range(start, i + 1))
            seen.add(key)
            start = i + 1
    return spans


def _comparable(id_: Any) -> Hashable:
    # SkyRL's own TrajectoryID is an unfrozen dataclass: it compares, but does not hash.
    key: Hashable = id_.to_string() if hasattr(id_, "to_string") else id_
    return key
