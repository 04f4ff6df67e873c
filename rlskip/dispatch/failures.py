"""Why a session failed: the machinery's fault, or its own."""

from __future__ import annotations

import asyncio

from rlskip.errors import RlskipError


class SessionFailure(RlskipError, RuntimeError):
    """An attempt at a session that failed. Raised by a worker, it says whose fault it was."""


class DataFailure(SessionFailure):
    """The session itself cannot succeed: a bad prompt, a broken environment, a bug."""


class InfrastructureFailure(SessionFailure):
    """What the session runs on failed it: the same session may succeed elsewhere."""


class WorkerLostError(InfrastructureFailure):
    """The worker died under the session. `gone`: and it will not come back."""

    def __init__(self, what: str, where: str = "", remedy: str = "", gone: bool = False) -> None:
        super().__init__(what, where, remedy)
        self.gone = gone


_INFRASTRUCTURE = (OSError, MemoryError, TimeoutError, asyncio.TimeoutError)


def as_failure(error: BaseException) -> SessionFailure:
    """`error` as a failure; what a worker raises is a data failure unless it speaks of I/O."""
    if isinstance(error, SessionFailure):
        return error
    kind = InfrastructureFailure if isinstance(error, _INFRASTRUCTURE) else DataFailure
    failure = kind(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
