"""What verl makes where :mod:`rlskip.hosts.verl.no_engine` chose no inference engine."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica


class NoRollout(BaseRollout):  # type: ignore[misc]
    """A rollout that holds neither weights nor a cache."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """`weights` is a generator, and it stays unread."""


class NoReplica(RolloutReplica):  # type: ignore[misc]
    """A replica without servers: waking it, putting it to sleep and aborting it do nothing."""

    async def launch_servers(self) -> None:
        """Start nothing; verl wants different addresses."""
        self._server_address = f"rlskip-no-engine-{self.replica_rank}"
