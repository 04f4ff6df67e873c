"""Role `rollout`: one call of the stage generates a whole step, on every rank."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import Any

from rlskip.config.skip import RoleConfig, RolloutSkipConfig
from rlskip.errors import RlskipError
from rlskip.skip.call import Call, current_call, saved_call
from rlskip.skip.dumping import DumpingSkip
from rlskip.skip.role import SkipAction, register_skip
from rlskip.store import (
    CorruptDumpError,
    DumpMeta,
    RankGroup,
    SingleFlight,
    StepStore,
    Writer,
    WriterTimeoutError,
)

log = logging.getLogger(__name__)

# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0


@register_skip("rollout", config=RolloutSkipConfig)
class RolloutSkip(DumpingSkip):
    """Dumps and replays steps that several ranks generate together.

    The ranks decide together whether a step is replayed. Of several jobs that lack a step one
    generates it and the others wait for its dump (`wait_s`). Dumps are written in the background
    where `background_write` allows.
    """

    def __init__(self, local_config: RoleConfig, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        c = local_config
        assert c.wait_s is not None
        self._in_background = bool(c.background_write)
        self._waits = c.wait_s > 0 and c.on_miss == "generate"

    @functools.cached_property
    def ranks(self) -> RankGroup:
        # Not in __init__: a job starts before torch.distributed knows its ranks.
        return RankGroup(_RANKS_S)

    @functools.cached_property
    def store(self) -> StepStore:
        return StepStore(
            self.directory,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            keep_last=self.local_config.keep_last,
            max_size=self.local_config.max_size,
        )

    @functools.cached_property
    def writer(self) -> Writer:
        return Writer(self.store)

    @functools.cached_property
    def flight(self) -> SingleFlight:
        return SingleFlight(self.directory, self.ranks, wait_s=self.local_config.wait_s)

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        call = current_call(func, *args, **kwargs)
        self._wait_for_writer()
        hit = False
        try:
            hit = super().meet_precondition(step, func, *args, **kwargs)
        finally:
            # Also when this rank is about to raise: the others must not wait for it.
            hit = self.ranks.agree(hit, f"step {step}")
        if hit or not self._waits:
            return hit

        def is_there() -> bool:
            there = self._is_there(step, call.identity)
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return there

        try:
            lease = self.flight.enter(step, is_there)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RlskipError):
                raise
            # No descriptor or thread is left, say: another job may generate the step too.
            log.warning("rlskip: role %s: no lease for step %d: %s", self.role, step, error)
            return False
        if lease is None:
            return True
        call.cleanup.add(lease.release)
        return False

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        if not self._in_background:
            super().prepare_data(step, result, *args, **kwargs)
            return
        call = saved_call(*args, **kwargs)
        # The writer, not the end of this call, gives the lease back.
        release = call.cleanup.pop_all().close

        def done(meta: DumpMeta | None, error: BaseException | None) -> None:
            release()
            if meta is not None:
                call.record("dumped", step=step, bytes=meta.stored)

        try:
            self.writer.save(step, result, **self._about(call, result), done=done)
        except BaseException:
            release()
            raise

    def flush(self) -> None:
        if self._in_background:
            self.writer.flush()

    def _wait_for_writer(self) -> None:
        """So that what was generated a moment ago can be replayed."""
        if not self._in_background:
            return
        try:
            self.writer.wait()
        except WriterTimeoutError as error:
            # A dump is complete or absent, so to look without it is safe.
            log.warning("rlskip: role %s goes on without waiting longer: %s", self.role, error)

    def _source(self, step: int) -> int | None:
        """As the base class has it, on every rank what rank 0 finds: another job may be writing."""
        if self.local_config.action != SkipAction.REPEAT:
            return step
        found = None
        try:
            if self.ranks.rank == 0:
                found = self.store.nearest(step)
        finally:
            # Also when rank 0 is about to raise: the others must not wait for it.
            found = self.ranks.follow(-1 if found is None else found, f"step {step}")
        return None if found < 0 else found

    def _load(self, step: int, call: Call) -> tuple[Any, DumpMeta, Any]:
        """As the base class has it; on every rank or on none."""
        loaded, generation = None, 0
        try:
            loaded = super()._load(step, call)
            generation = _number(loaded[1].info.get("generation"))
        finally:
            # Another job may be replacing the shards, one rank's after the other's.
            same = self.ranks.follow(generation, f"step {step}") == generation
            everywhere = self.ranks.agree(loaded is not None and same, f"step {step}")
        if not everywhere:
            raise CorruptDumpError(
                "another rank's shard is unusable, or of another call", str(self.directory)
            )
        return loaded

    def _info(self, call: Call, result: Any) -> dict[str, Any]:
        info = super()._info(call, result)
        if self.ranks.world_size > 1:
            info["generation"] = self.ranks.decision
        return info


def _number(generation: Any) -> int:
    """The generation of a dump as a number that ranks can exchange; 0 if it has none."""
    try:
        return int(str(generation), 16) % (1 << 63)
    except ValueError:
        return 0
