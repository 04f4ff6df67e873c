"""Role `async_rollout`: one call of the stage generates one sample, many at the same time."""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar

from rlskip.batch.prompts import first_uid
from rlskip.errors import ConfigError, RlskipError
from rlskip.jobs.ranks import world_size
from rlskip.skip.replaying import ReplayingSkip
from rlskip.skip.role import register_skip
from rlskip.store import StepStore


@register_skip("async_rollout")
class AsyncRolloutSkip(ReplayingSkip):
    """Dumps and replays samples; a sample's step is its place in the feed order.

    Its calls already run in threads, so dumps are written there, and none waits for another job:
    that would keep a thread from the other samples.
    """

    support_online_step: ClassVar[bool] = True

    @functools.cached_property
    def store(self) -> StepStore:
        if (ranks := world_size()) > 1:
            raise ConfigError(
                f"torch.distributed has {ranks} ranks here, and concurrent samples have no order "
                "in which ranks could decide together",
                f"skip.{self.role}.enable",
                "use skip.rollout, or generate in a process outside torch.distributed",
            )
        return super().store

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """The feed-order index of the call's ``sample_id``, or else of its prompts' uid."""
        sample_id = kwargs.get("sample_id")
        if sample_id is None:
            sample_id = next((arg for arg in args if isinstance(arg, str)), None)
        if sample_id is None:
            sample_id = first_uid([*args, *kwargs.values()])
        return parse_async_rollout_sample_step(sample_id)


_SAMPLE_ID = re.compile(r"(?:uid_)?sample_(\d+)_(\d+)", re.ASCII)


class SampleIdError(RlskipError, ValueError):
    """A sample id that names no step."""


def parse_async_rollout_sample_step(sample_id: Any) -> int:
    """Feed-order index of ``sample_{epoch}_{index}`` (also ``uid_sample_{epoch}_{index}``).

    >>> parse_async_rollout_sample_step("sample_0_42")
    42
    """
    match = _SAMPLE_ID.fullmatch(sample_id) if isinstance(sample_id, str) else None
    if match is None:
        raise SampleIdError(
            f"{sample_id!r} is not a sample id",
            "skip.async_rollout",
            "expected sample_{epoch}_{index}, as the argument sample_id or as the prompts' uid",
        )
    return int(match[2])
