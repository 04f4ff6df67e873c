"""What a worker receives and returns, and why a session fails: infrastructure, data or code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from tensordict import is_non_tensor, is_tensor_collection

from rlskip.errors import RlskipError
from rlskip.keys import TrajectoryKey, row_tag
from rlskip.queue.protocol import OwnRow

_LONGEST = 2000  # characters of an error's text


class Session(NamedTuple):
    """Names the session that a worker runs: number `session_id` of the `n` of prompt `uid`.

    `attempt` counts the earlier attempts, those of an earlier submission of the uid included;
    `step`, `sample_index`, `rollout_n` and `validate` are as :func:`build_trajectory_info` returns
    them; `seed` is below 2**63, and the same at every attempt and on any worker; rows go to
    `partition`. `journal_name` names its prompt among all that are journaled: the step, a hash of
    its content and of the stage's call that submits it, and its number among the step's prompts of
    that hash. None: the session is not journaled.
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
    journal_name: str | None = None

    def key(self, index: int) -> str:
        """The queue key of its `index`-th row, for workers that write their rows themselves."""
        return str(TrajectoryKey.of_attempt(self.uid, self.session_id, index, self.attempt))

    def tag(self, **more: Any) -> dict[str, Any]:
        """The tag of its rows, for workers that write their rows themselves."""
        return row_tag(self.step, self.attempt, **more)


def session_seed(seed: int, step: int, prompt: int, session: int) -> int:
    """A 63-bit seed that is stable over processes, machines and versions."""
    text = f"{seed}/{step}/{prompt}/{session}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


class BatchError(RlskipError, ValueError):
    """A batch of prompts that cannot be dispatched."""


class DispatcherClosedError(RlskipError, RuntimeError):
    """A dispatcher is used after it was closed."""


class SessionFailure(RlskipError, RuntimeError):
    """An attempt at a session failed. A worker may raise a subclass to choose the kind."""


class DataFailure(SessionFailure):
    """The session itself cannot succeed: a bad prompt, a broken environment, a bug."""


class InfrastructureFailure(SessionFailure):
    """The infrastructure under the session failed: the same session may succeed elsewhere."""


class WorkerLostError(InfrastructureFailure):
    """The worker of the session died."""


class NoAnswerError(InfrastructureFailure):
    """Nobody answered by the deadline; what was asked may yet be done."""


# An async worker's session may be cancelled by somebody else there.
_INFRASTRUCTURE = (OSError, MemoryError, asyncio.TimeoutError, asyncio.CancelledError)


def as_failure(error: BaseException) -> SessionFailure:
    """`error` as a SessionFailure: infrastructure for I/O and memory errors, else data."""
    if isinstance(error, SessionFailure):
        return error
    kind = InfrastructureFailure if isinstance(error, _INFRASTRUCTURE) else DataFailure
    failure = kind(f"{type(error).__name__}: {text_of(error)}")
    failure.__cause__ = error
    return failure


def cause_of(failure: SessionFailure, what: str = "") -> str:
    """How a report and a marker name a failure: its kind, `what`, and its text."""
    kind = "infrastructure" if isinstance(failure, InfrastructureFailure) else "data"
    return f"{kind}: {what}{text_of(failure)}"


def portable(error: BaseException) -> Exception:
    """`error`, or a SessionFailure for an error that futures and event loops cannot carry."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return as_failure(error)


def text_of(error: BaseException) -> str:
    """The message of an error, cut to a length that fits a tag; some errors cannot be printed."""
    try:
        text = str(error.what if isinstance(error, RlskipError) else error)
    except BaseException:
        return "(its text cannot be read)"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


# -- what a worker returned ----------------------------------------------------------------------

Rows = list[OwnRow]
Result = Rows | None | SessionFailure  # what a session returned, or why it failed

_copying = threading.Lock()  # held while rows are copied, for which no code of a user's is called


def returned(result: Any) -> Rows | None:
    """What a worker returned, as rows of its session's own; raises DataFailure if it is not valid.

    They are copies: the next session may write into the worker's buffers.
    """
    if result is None:
        return None
    rows = [result] if isinstance(result, Mapping) else result
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, Mapping) for row in rows):
        raise DataFailure(
            f"the worker returned a {type(result).__name__}",
            remedy="return one row (a mapping of fields), a list of rows, or None",
        )
    if not rows:
        raise DataFailure("the worker returned no trajectory")
    # To iterate over a TensorDict gives its rows.
    given = [{name: row[name] for name in row.keys()} for row in rows]  # noqa: SIM118
    kept = [_kept(row, i) for i, row in enumerate(given)]
    # A call of torch releases the GIL for a moment. Where the threads of many workers copy at the
    # same time they wake one another for each of them, and all take several times as long.
    with _copying:
        for row, copies in zip(given, kept, strict=True):
            for name, value in row.items():
                if type(value) is torch.Tensor:
                    copies[name] = value
    return kept


def _kept(row: Mapping[Any, Any], i: int) -> OwnRow:
    """A copy of a row, but for its tensors: each has its place."""
    kept = OwnRow()
    for name, value in row.items():
        if not isinstance(name, str):
            raise DataFailure(f"row {i}: the name {name!r:.80} of a field is not a string")
        if type(value) is torch.Tensor:  # as nearly always
            kept.kept[name] = None  # with a tensor in it, the garbage collector would look into it
            continue
        if is_tensor_collection(value) and not is_non_tensor(value):
            what = f"field {name!r} is a nested {type(value).__name__}; return its fields flat"
            raise DataFailure(f"row {i}: {what}")
        try:
            kept[name] = value
        except Exception as error:
            why = f"{type(error).__name__}: {text_of(error)}"
            raise DataFailure(f"row {i}: field {name!r} cannot be copied: {why}") from error
    if not kept:
        raise DataFailure(f"row {i}: it has no fields")
    return kept
