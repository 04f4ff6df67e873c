"""The rollout of verl's actor where :mod:`rlskip.hosts.verl.no_engine` chose no engine."""

from typing import Any

from verl.workers.rollout.base import BaseRollout


class NoRollout(BaseRollout):  # type: ignore[misc]
    """It holds neither weights nor a cache."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None: ...
