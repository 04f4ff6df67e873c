"""What a dispatcher raises, and why sessions fail: the infrastructure, or their data or code."""

from __future__ import annotations

import asyncio

from rlskip.errors import RlskipError

_LONGEST = 2000


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


_INFRASTRUCTURE = (
    OSError,
    MemoryError,
    TimeoutError,
    asyncio.TimeoutError,
    asyncio.CancelledError,  # as of an async worker, whose session somebody else cancelled
)


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
