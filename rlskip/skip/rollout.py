"""Role `rollout`: each call of the stage generates a batch of the step, on every rank."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.errors import ConfigError, RlskipError
from rlskip.skip.call import Call, saved_call
from rlskip.skip.replaying import ReplayingSkip
from rlskip.skip.role import SkipAction, register_skip
from rlskip.skip.visit import Found, Visit
from rlskip.store import (
    CorruptDumpError,
    DumpMeta,
    RankGroup,
    RankTimeoutError,
    SingleFlight,
    StepStore,
    Writer,
    WriterTimeoutError,
)

log = logging.getLogger(__name__)

# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0


@register_skip("rollout")
class RolloutSkip(ReplayingSkip):
    """Dumps and replays steps that several ranks generate together.

    The ranks decide together whether a step is replayed. Of several jobs that lack a step one
    generates it and the others wait for its dump (`wait_s`). Dumps are written in the background
    where `background_write` allows.
    """

    def __init__(self, local_config: Any, facts: HostFacts) -> None:
        super().__init__(local_config, facts)
        self._in_background = bool(local_config.background_write)
        self._waits = local_config.wait_s > 0 and local_config.on_miss == "generate"

    @functools.cached_property
    def ranks(self) -> RankGroup:
        # Not in __init__: a job starts before torch.distributed knows its ranks.
        ranks, dump_dir = RankGroup(_RANKS_S), self.local_config.dump_dir
        apart = ranks.apart(dump_dir) if ranks.world_size > 1 else []
        if apart:
            raise ConfigError(
                f"{dump_dir} is not shared: rank {', '.join(map(str, apart))} of "
                f"{ranks.world_size} does not see what rank 0 writes there (this is rank "
                f"{ranks.rank}, on {socket.gethostname()})",
                f"skip.{self.role}.dump_dir",
                "name a directory that all nodes share: skip.dump_dir=/shared/dumps",
            )
        return ranks

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

    def _new_visit(self, step: int) -> Visit:
        # What earlier steps generated can be replayed; what this visit writes serves none of it.
        if self._in_background:
            try:
                self.writer.wait()
            except WriterTimeoutError as error:
                # A dump is complete or absent, so to look without it is safe.
                log.warning("rlskip: role %s goes on without waiting longer: %s", self.role, error)
        return super()._new_visit(step)

    def _agreed(self, call: Call, found: Found | None, offers: Iterator[Found]) -> Found | None:
        if self.ranks.world_size == 1:
            return found
        visit, repeats = call.visit, self.local_config.action == SkipAction.REPEAT
        while True:
            # Loaded first, so that a hit takes one exchange: it settles which dump serves the
            # call, and whether every rank has its shard of it.
            mine = (1, found.step, found.number) if found else (0, 0, 0)
            shard = self._load_shard(call, found)
            place = (visit.step, call.place)
            answers = self.ranks.exchange(*place, *mine, *shard, what=f"step {visit.step}")
            self._refuse_other_places([answer[:2] for answer in answers])
            theirs = [Found(*answer[3:5]) if answer[2] else None for answer in answers]
            # A repeat checks nothing: what rank 0 finds will do.
            agreed = theirs[0] if repeats or None not in theirs else None
            if agreed is None or set(theirs) == {agreed}:
                # Another job may be replacing the shards, one rank's after the other's.
                of_one_call = {answer[5:] for answer in answers} == {(True, shard[1])}
                if not of_one_call and not isinstance(call.loaded, BaseException):
                    call.loaded = None
                if agreed is None and found and any(a[2] and not a[5] for a in answers):
                    visit.lose(found)  # a rank found it damaged, and another has seen that already
                return agreed
            last = max(one.order(visit.step) for one in theirs if one)
            candidates = itertools.chain([found] if found else [], offers)
            next_ones = (one for one in candidates if one.order(visit.step) >= last)
            found = agreed if repeats else next(next_ones, None)

    def _refuse_other_places(self, places: Sequence[tuple[int, ...]]) -> None:
        if len(set(places)) == 1:
            return
        said = ", ".join(
            f"rank {rank} makes call {place} of step {step}"
            for rank, (step, place) in enumerate(places)
        )
        raise RankTimeoutError(
            f"the ranks call the stage unequally often: {said}",
            f"skip.{self.role}",
            "let every rank call the stage equally often in each step, one call after the other",
        )

    def _claim(self, call: Call) -> None:
        visit, step = call.visit, call.visit.step

        def is_there() -> bool:
            with visit.lock:
                visit.look()
                there = next(self._offers(call), None) is not None
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return there

        if self._waits:
            try:
                lease = self.flight.enter(step, is_there, call.name)
            except (OSError, RuntimeError) as error:
                if isinstance(error, RlskipError):
                    raise
                # No descriptor or thread is left, say: another job may generate the step too.
                log.warning("rlskip: role %s: no lease for step %d: %s", self.role, step, error)
            else:
                if lease is not None:
                    call.cleanup.add(lease.release)
                else:
                    with visit.lock:
                        call.found = self._choose(call)
                    if call.found is not None:
                        return
        self._reserve(call)

    def _reserve(self, call: Call) -> None:
        visit = call.visit
        with visit.lock:  # the shards of one call have one number
            free = self.ranks.exchange(visit.next_number(), what=f"step {visit.step}")
            self._hold(call, visit.reserve(max(number for (number,) in free)))

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        if not self._in_background:
            super().prepare_data(step, result, *args, **kwargs)
            return
        call = saved_call(*args, **kwargs)
        # The writer, not the end of this call, gives the lease back.
        release = call.cleanup.pop_all().close

        def done(meta: DumpMeta | None, error: BaseException | None) -> None:
            if meta is not None:
                self._note_written(step, call, meta)
            release()

        try:
            self.writer.save(step, result, **self._about(step, call, result), done=done)
        except BaseException:
            release()
            raise

    def flush(self) -> None:
        if self._in_background:
            self.writer.flush()

    def _load_shard(self, call: Call, found: Found | None) -> tuple[bool, int]:
        """Load this rank's shard of `found`: whether it can be, and which call's it is."""
        call.found, call.loaded = found, None
        if found is None:
            return False, 0
        try:
            call.loaded = super()._load(call)
        except BaseException as error:  # the other ranks must not wait for this one
            call.loaded = error
            return False, 0
        return True, int(call.loaded[1].info.get("generation", "0"), 16)

    def _load(self, call: Call) -> tuple[Any, DumpMeta, Any]:
        """As the base class has it; on every rank or on none."""
        if self.ranks.world_size == 1:
            return super()._load(call)
        loaded: tuple[Any, DumpMeta, Any] | BaseException | None
        loaded, call.loaded = call.loaded, None
        if isinstance(loaded, BaseException):
            raise loaded
        if loaded is None:
            raise CorruptDumpError(
                "another rank's shard is unusable, or of another call", str(self.directory)
            )
        return loaded

    def _info(self, call: Call, result: Any) -> dict[str, Any]:
        info = super()._info(call, result)
        if self.ranks.world_size > 1:
            info["generation"] = self.ranks.decision
        return info
