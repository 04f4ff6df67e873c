"""Dispatch: a batch of prompts as sessions, spread over workers.

>>> async def worker(prompt, sampling, session): ...
>>> with RolloutDispatcher(LocalPool(worker, 8), queue, config) as dispatcher:
...     dispatcher.generate_sequences(prompts, step=3)

``docs/dispatch.md`` says how.
"""

from typing import TYPE_CHECKING, Any

from rlskip.dispatch.batch import Batch, BatchReport
from rlskip.dispatch.dispatcher import DispatcherClosedError, RolloutDispatcher
from rlskip.dispatch.failures import (
    DataFailure,
    InfrastructureFailure,
    SessionFailure,
    WorkerLostError,
)
from rlskip.dispatch.policies import POLICIES, Place, Policy, Waiting
from rlskip.dispatch.pools import LocalPool, Pool
from rlskip.dispatch.scheduler import Group, Scheduler, Unit
from rlskip.dispatch.units import (
    BatchError,
    Session,
    build_trajectory_info,
    extract_sample,
    session_seed,
)

if TYPE_CHECKING:
    from rlskip.dispatch.ray_pool import RayPool

__all__ = [
    "POLICIES",
    "Batch",
    "BatchError",
    "BatchReport",
    "DataFailure",
    "DispatcherClosedError",
    "Group",
    "InfrastructureFailure",
    "LocalPool",
    "Place",
    "Policy",
    "Pool",
    "RayPool",
    "RolloutDispatcher",
    "Scheduler",
    "Session",
    "SessionFailure",
    "Unit",
    "Waiting",
    "WorkerLostError",
    "build_trajectory_info",
    "extract_sample",
    "session_seed",
]


def __getattr__(name: str) -> Any:
    if name == "RayPool":  # ray is an extra
        from rlskip.dispatch.ray_pool import RayPool

        return RayPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
