"""What a worker receives: one session and its prompt, and nothing else of the batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import attrs
import xxhash

from rlskip.batch.columns import own, rows_of, select
from rlskip.errors import RlskipError
from rlskip.keys import TrajectoryKey, row_tag


class BatchError(RlskipError, ValueError):
    """A batch of prompts that cannot be dispatched."""


@attrs.frozen
class Session:
    """Names the session that a worker runs.

    Parameters
    ----------
    uid
        Its prompt.
    session_id, n
        Its number among the prompt's sessions, and their count.
    attempt
        The number of earlier attempts, including those given up when the same uid was submitted
        before.
    step, sample_index, rollout_n, validate
        As :func:`build_trajectory_info` returns them.
    seed
        Below 2**63, and the same at every attempt and on any worker.
    partition
        Where its rows go.
    prompt_key
        What names its prompt in the step's journal: a hash of its content and of the stage's call
        that submits it, and its number among the step's prompts of that hash. None: the session is
        not journaled.
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
    prompt_key: tuple[str, int] | None = None

    def key(self, index: int) -> str:
        """The queue key of its `index`-th row, for workers that write their rows themselves."""
        return str(TrajectoryKey.of_attempt(self.uid, self.session_id, index, self.attempt))

    def tag(self, **more: Any) -> dict[str, Any]:
        """The tag of its rows, for workers that write their rows themselves."""
        return row_tag(self.step, self.attempt, **more)


@attrs.frozen(eq=False)
class Sample:
    """One prompt's fields, extracted once for all its sessions."""

    fields: dict[str, Any]
    id: int = attrs.field(factory=itertools.count().__next__, init=False)


@attrs.frozen(eq=False)
class Job:
    """What a pool needs to run one session."""

    session: Session
    sample: Sample
    sampling: Mapping[str, Any]


def session_seed(seed: int, step: int, prompt: int, session: int) -> int:
    """A 63-bit seed that is stable over processes, machines and versions."""
    text = f"{seed}/{step}/{prompt}/{session}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def extract_sample(batch: Any, i: int) -> dict[str, Any]:
    """Return sample `i` of a batch as a plain dict that shares no memory with it.

    A view would carry the storage of the whole batch through every serialisation.

    Parameters
    ----------
    batch
        A TensorDict of batch size ``(prompts,)``, a mapping of columns, one mapping per prompt.

    Returns
    -------
    dict
        Tensors without the batch dimension, per-sample data unchanged, and batch-wide data
        (NonTensorData) in every sample.
    """
    (row,) = rows_of(select(batch, [i]))
    return {str(key): own(value) for key, value in row.items()}


def build_trajectory_info(step: Any, index: Any, validate: Any) -> list[dict[str, Any]]:
    """Name each prompt of a batch in plain Python scalars.

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
        Each with ``step``, ``sample_index``, ``rollout_n`` (0 for an index that differs from
        the one before, else one more) and ``validate``.
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


def whole(value: Any) -> int | None:
    """A number without a fraction, of any type, as an int; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = int(value)
        return number if number == value else None
    return None


def step_number(step: Any) -> int:
    """The trainer's step as an int; raises :class:`BatchError`."""
    if step is None:
        remedy = "pass step=... or add the field to the batch"
        raise BatchError("no step is given", "global_steps", remedy)
    number = whole(step)
    if number is None:
        raise BatchError(f"expected a whole number, got {step!r:.100}", "global_steps")
    return number


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
