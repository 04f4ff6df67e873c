"""How the ranks of a job decide together which dump serves a call, and load it."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlskip.config.skip import SkipAction
from rlskip.errors import ConfigError
from rlskip.jobs.ranks import RankGroup, RankTimeoutError, world_size
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.visit import Found, Visit
from rlskip.store import CorruptDumpError, DumpMeta

# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0

Loaded = tuple[Any, DumpMeta, Any]
"""Rollouts, their meta, and the states of the generators."""

Load = Callable[[Call], Loaded]
"""Loads and verifies the dump that serves a call, or raises."""


class OneRank:
    """The only rank of a job, which agrees with itself."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def agree(
        self, call: Call, found: Found | None, offers: Iterator[Found], load: Load
    ) -> Found | None:
        """The dump that serves the call on every rank, where `found` is this rank's first.

        `offers` are the others that would do, in order. `found` is None if the others shall not
        wait for this rank's.
        """
        return found

    def load(self, call: Call, load: Load) -> Loaded:
        """What `load` returns for the call, on every rank or on none."""
        return load(call)

    def next_number(self, visit: Visit) -> int:
        """The lowest number that is free on every rank."""
        return visit.next_number()

    def info(self) -> dict[str, Any]:
        """What this rank's shard records so that all shards of a call are known."""
        return {}


class SeveralRanks(OneRank):
    """Ranks that keep a shard of each call: a call is replayed on all of them or on none."""

    def __init__(self, group: RankGroup, dumps: Dumps) -> None:
        super().__init__(group)
        self._dumps = dumps

    def agree(
        self, call: Call, found: Found | None, offers: Iterator[Found], load: Load
    ) -> Found | None:
        visit, repeats = call.visit, self._dumps.local_config.action == SkipAction.REPEAT
        while True:
            # Loaded first, so that a hit takes one exchange: it settles which dump serves the
            # call, and whether every rank has its shard of it.
            mine = (1, found.step, found.number) if found else (0, 0, 0)
            shard = self._load_shard(call, found, load)
            place = (visit.step, call.place)
            answers = self.group.exchange(*place, *mine, *shard, what=f"step {visit.step}")
            self._refuse_other_places([answer[:2] for answer in answers])
            theirs = [Found(answer[3], answer[4]) if answer[2] else None for answer in answers]
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

    def load(self, call: Call, load: Load) -> Loaded:
        loaded: Loaded | BaseException | None
        loaded, call.loaded = call.loaded, None
        if isinstance(loaded, BaseException):
            raise loaded
        if loaded is None:
            what = "another rank's shard is unusable, or of another call"
            raise CorruptDumpError(what, str(self._dumps.directory))
        return loaded

    def next_number(self, visit: Visit) -> int:
        free = self.group.exchange(visit.next_number(), what=f"step {visit.step}")
        return max(number for (number,) in free)

    def info(self) -> dict[str, Any]:
        return {"generation": self.group.exchange_id}

    def _load_shard(self, call: Call, found: Found | None, load: Load) -> tuple[bool, int]:
        """Load this rank's shard of `found`: whether it can be, and which call's it is."""
        call.found, call.loaded = found, None
        if found is None:
            return False, 0
        try:
            call.loaded = load(call)
        except BaseException as error:  # the other ranks must not wait for this one
            call.loaded = error
            return False, 0
        return True, int(call.loaded[1].info.get("generation", "0"), 16)

    def _refuse_other_places(self, places: Sequence[tuple[int, ...]]) -> None:
        if len(set(places)) == 1:
            return
        made = ", ".join(
            f"rank {rank} makes call {place} of step {step}"
            for rank, (step, place) in enumerate(places)
        )
        raise RankTimeoutError(
            f"the ranks call the stage unequally often: {made}",
            f"skip.{self._dumps.role}",
            "let every rank call the stage equally often in each step, one call after the other",
        )


def all_ranks(dumps: Dumps) -> OneRank:
    """The ranks that torch.distributed has; on all of them this is one collective call.

    Raises
    ------
    ConfigError
        They do not share the directory of `dumps`.
    """
    group, dump_dir = RankGroup(_RANKS_S), dumps.local_config.dump_dir
    if group.world_size == 1:
        return OneRank(group)
    if apart := group.ranks_without(dump_dir):
        raise ConfigError(
            f"{dump_dir} is not shared: rank {', '.join(map(str, apart))} of "
            f"{group.world_size} does not see what rank 0 writes there (this is rank "
            f"{group.rank}, on {socket.gethostname()})",
            f"skip.{dumps.role}.dump_dir",
            "name a directory that all nodes share: skip.dump_dir=/shared/dumps",
        )
    return SeveralRanks(group, dumps)


def no_other_rank(dumps: Dumps, why: str) -> OneRank:
    """The only rank, for a role that cannot have several; `why` follows their number in the error.

    Raises
    ------
    ConfigError
        torch.distributed has several.
    """
    if (ranks := world_size()) > 1:
        raise ConfigError(
            f"torch.distributed has {ranks} ranks here, and {why}",
            f"skip.{dumps.role}.{'match' if dumps.by_prompt else 'enable'}",
            f"set skip.{dumps.role}.match=step"
            if dumps.by_prompt
            else "use skip.rollout, or generate in a process outside torch.distributed",
        )
    return OneRank(RankGroup())
