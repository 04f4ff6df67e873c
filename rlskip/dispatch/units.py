"""What travels to a worker: one session, its prompt, and nothing of the batch it came from."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from rlskip.errors import RlskipError
from rlskip.keys import TrajectoryKey, row_tag


class BatchError(RlskipError, ValueError):
    """A batch of prompts that cannot be dispatched."""


@attrs.frozen
class Session:
    """Which session a worker is to run.

    Parameters
    ----------
    uid
        Its prompt.
    session_id, n
        Which of the prompt's sessions, and how many there are.
    attempt
        How often it was tried before.
    step, sample_index, rollout_n, validate
        As :func:`build_trajectory_info` has them.
    seed
        The session's own: the same at every attempt and on any worker. Below 2**63.
    partition
        Where its rows go.
    """

    uid: str
    session_id: int
    n: int
    attempt: int
    step: int
    sample_index: Any
    rollout_n: int
    validate: bool
    seed: int
    partition: str

    def key(self, index: int) -> str:
        """The queue key of its `index`-th row, for workers that write their rows themselves."""
        return str(TrajectoryKey(self.uid, self.session_id, index))

    def tag(self, **more: Any) -> dict[str, Any]:
        """The tag of its rows, for workers that write them themselves."""
        return row_tag(self.step, self.attempt, **more)


_ids = itertools.count()


class Sample:
    """One prompt's fields, taken out of the batch once for all its sessions."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.id = next(_ids)
        self.fields = fields


@attrs.frozen(eq=False)
class Job:
    """All that a worker needs to run one session."""

    session: Session
    sample: Sample
    sampling: Mapping[str, Any]


def session_seed(seed: int, step: int, prompt: int, session: int) -> int:
    """A 63-bit seed, stable over processes, machines and versions."""
    text = f"{seed}/{step}/{prompt}/{session}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def extract_sample(batch: TensorDictBase | Sequence[Mapping[str, Any]], i: int) -> dict[str, Any]:
    """Sample `i` of a batch as a plain dict that shares no memory with it.

    A view would drag the whole batch's storage through every serialisation.

    Parameters
    ----------
    batch
        A TensorDict of batch size ``(prompts,)``, or one mapping per prompt.

    Returns
    -------
    dict
        Tensors without the batch dimension; per-sample data as it is; batch-wide data
        (NonTensorData) as every sample's.

    Raises
    ------
    BatchError
        A field of a kind that has no samples.
    """
    if not isinstance(batch, TensorDictBase):
        return {str(key): own(value) for key, value in batch[i].items()}
    return {str(key): own(_item(key, batch.get(key), i)) for key in batch.keys()}  # noqa: SIM118


def _item(key: Any, value: Any, i: int) -> Any:
    if isinstance(value, (torch.Tensor, TensorDictBase)) and not isinstance(value, NonTensorStack):
        return value[i]
    if isinstance(value, NonTensorStack):
        item = value[i]
        return item.tolist() if isinstance(item, NonTensorStack) else getattr(item, "data", item)
    if isinstance(value, NonTensorData):
        return value.data
    if isinstance(value, Sequence) and not isinstance(value, str):  # as later tensordicts unwrap
        return value[i]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise BatchError(f"a {type(value).__name__} has no samples", f"batch[{key!r}]")


def own(value: Any) -> Any:
    """A copy of `value` that shares no memory with it, views included."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, TensorDictBase):
        return value.clone()
    if type(value) is dict:
        return {key: own(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own(item) for item in value)
    return copy.deepcopy(value)


def build_trajectory_info(step: Any, index: Any, validate: Any) -> list[dict[str, Any]]:
    """For each prompt of a batch: which it is, in plain Python scalars.

    Parameters
    ----------
    step
        The trainer's step: a number, or a tensor or array of one.
    index
        Each prompt's number in the data set: a tensor, an array or a list.
    validate
        Whether the batch is a validation batch.

    Returns
    -------
    list of dict
        ``step``, ``sample_index``, ``rollout_n`` (0 for an index unlike the one before, else
        one more) and ``validate``.
    """
    step, validate = _scalar(step), bool(_scalar(validate))
    info: list[dict[str, Any]] = []
    for i in index.tolist() if hasattr(index, "tolist") else index:
        i = _scalar(i)
        again = bool(info) and info[-1]["sample_index"] == i
        info.append(
            {
                "step": step,
                "sample_index": i,
                "rollout_n": info[-1]["rollout_n"] + 1 if again else 0,
                "validate": validate,
            }
        )
    return info


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def batch_size(batch: TensorDict | Sequence[Any]) -> int:
    """How many prompts a batch has; raises :class:`BatchError` for what is no batch."""
    if isinstance(batch, TensorDictBase) and len(batch.batch_size) != 1:
        raise BatchError(f"batch size {tuple(batch.batch_size)}", remedy="expected (prompts,)")
    if len(batch) == 0:
        raise BatchError("the batch has no prompts")
    return len(batch)
