"""What a worker receives, and why a session fails: the infrastructure, or its data or code."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import xxhash

from rlskip.errors import RlskipError
from rlskip.keys import TrajectoryKey, row_tag

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
