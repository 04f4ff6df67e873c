"""Dispatch: runs a batch of prompts as sessions, spread over workers.

``docs/dispatch.md`` is the guide.
"""

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use
from rlskip.dispatch.batch import (
    BatchHandle,
    BatchReport,
    Group,
    build_trajectory_info,
    extract_sample,
)
from rlskip.dispatch.dispatcher import RolloutDispatcher
from rlskip.dispatch.pools import LocalPool, Pool
from rlskip.dispatch.scheduler import POLICIES, PendingSession, Placement, Policy
from rlskip.dispatch.sessions import (
    BatchError,
    DataFailure,
    DispatcherClosedError,
    InfrastructureFailure,
    Session,
    SessionFailure,
    WorkerLostError,
    session_seed,
)

if TYPE_CHECKING:
    from rlskip.dispatch.ray_pool import RayPool

__all__ = [
    "POLICIES",
    "BatchError",
    "BatchHandle",
    "BatchReport",
    "DataFailure",
    "DispatcherClosedError",
    "Group",
    "InfrastructureFailure",
    "LocalPool",
    "PendingSession",
    "Placement",
    "Policy",
    "Pool",
    "RayPool",
    "RolloutDispatcher",
    "Session",
    "SessionFailure",
    "WorkerLostError",
    "build_trajectory_info",
    "extract_sample",
    "session_seed",
]

__getattr__ = load_on_use(__name__, {"rlskip.dispatch.ray_pool": ["RayPool"]})  # ray is an extra
