"""How the ranks of a job decide together which dump serves a call, and load it."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import attrs

from rlskip.config.check import Problem
from rlskip.config.skip import as_given
from rlskip.errors import ConfigError, MismatchError
from rlskip.jobs.ranks import RankGroup, RankTimeoutError, shard
from rlskip.jobs.records import has_token, job_id, leave_token
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.store.layout import Place

# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0
SHOWN_S = 5.0
"""A network file system may show a new file that late."""


@attrs.frozen
class Mismatch:
    """The dump to name for a call that fits none: why is the call's `reason`.

    ``hint`` is what may be set instead of ``on_mismatch``.
    """

    key: Place
    hint: str = ""


class _Shard(NamedTuple):
    """What a rank has for call `place` of `step`, as numbers.

    Its dump `differs`, or it has `loaded` a shard of the call that `generation` names.
    """

    step: int
    place: int
    differs: bool
    loaded: bool
    generation: int


class SeveralRanks:
    """Ranks that keep a shard of each call: a call is replayed on all of them or on none.

    Each rank has prompts of its own, so each looks under its own names. What makes shards those of
    one call is the generation that they record: unequal ones are a miss on all ranks, and all
    shards are replaced. No rank leaves while others wait for it: what it cannot use it says,
    and what one raises lets all raise.
    """

    def __init__(self, group: RankGroup, dumps: Dumps) -> None:
        self.group, self._dumps = group, dumps

    def agree(self, call: Call, found: Any, error: BaseException | None) -> Any:
        """What serves the call on every rank, or the mismatch to name; None: it is generated.

        `found` is what serves the call here, and is in ``call.loaded``; a `Mismatch`, or None. An
        `error` is raised once all ranks know of it.
        """
        differs, has_loaded = isinstance(found, Mismatch), call.loaded is not None
        generation = int(call.meta.info.get("generation", "0"), 16) if has_loaded else 0
        mine = _Shard(call.step, call.place, differs, has_loaded, generation)
        given = self.group.exchange(*mine, what=f"step {call.step}", error=error)
        # Rank 0 made it for this exchange: a call that is generated has it as its generation.
        call.generation = self.group.exchange_id
        shards = [_Shard(*shard) for shard in given]  # type: ignore[arg-type]
        if len({(shard.step, shard.place) for shard in shards}) > 1:
            made = ", ".join(
                f"rank {rank} makes call {shard.place} of step {shard.step}"
                for rank, shard in enumerate(shards)
            )
            what = f"the ranks call the stage unequally often: {made}"
            remedy = "let every rank call the stage equally often, one call after the other"
            raise RankTimeoutError(what, f"skip.{self._dumps.role}", remedy)
        if {(one.loaded, one.generation) for one in shards} == {(True, mine.generation)}:
            return found
        call.loaded = None
        return self._mismatch(call, found, shards)

    def _mismatch(self, call: Call, found: Any, shards: list[_Shard]) -> Mismatch | None:
        """The mismatch of a call that no dump serves if its dumps are whole, and another call's."""
        is_whole = all(one.loaded or one.differs for one in shards)
        if isinstance(found, Mismatch) and is_whole:
            return found
        if isinstance(found, Mismatch):
            call.reason = f"another rank has no whole dump; {call.reason}"
            self._dumps.notices.generated(call)
        elif isinstance(found, Place):  # else it would be found again, and be unequal again
            call.visit.taken[found] = ""
            call.replaces = found.call
        others = [str(rank) for rank, shard in enumerate(shards) if shard.differs]
        if is_whole and others and self._dumps.local_config.on_mismatch == "error":
            raise MismatchError(
                f"rank {', '.join(others)} of {self.group.world_size} makes another call than the "
                f"dump of step {call.step} was made for",
                str(self._dumps.directory / str(call.step)),
                "the error of that rank says how the calls differ, and what to choose",
            )
        return None

    def info(self, call: Call) -> dict[str, Any]:
        """What this rank's shard records so that all shards of a call are known."""
        if not call.generation:  # a call by hand, for which nobody looked
            self.group.exchange(what=f"step {call.step}")
            call.generation = self.group.exchange_id
        return {"generation": call.generation}


def only_on_one_rank(dumps: Dumps, own_steps: bool = False) -> Problem | None:
    """Why a role, whose calls may have steps of their own, cannot have several ranks; or None."""
    key = f"skip.{dumps.role}"
    if dumps.by_prompt:
        what = "a prompt may be one rank's now and another's in its dump"
        return Problem(f"{key}.match", what, f"set {key}.match=step")
    if dumps.repeats:
        what = "each of them may find another nearest step"
        return Problem(f"{key}.action", what, f"set {key}.action=cache, or use one rank")
    if own_steps:
        what = "concurrent samples have no order in which ranks could decide together"
        remedy = "use skip.rollout, or generate in a process outside torch.distributed"
        return Problem(f"{key}.enable", what, remedy)
    return None


def ranks_of(dumps: Dumps, own_steps: bool) -> SeveralRanks | None:
    """The ranks that torch.distributed has, None for one; on all of them a collective call.

    Raises ConfigError where the role cannot have several, or they do not share its directory.
    """
    if (ranks := shard()[1]) == 1:
        return None
    if (why := only_on_one_rank(dumps, own_steps)) is not None:
        what = f"torch.distributed has {ranks} ranks here, and {why.what}"
        raise ConfigError(what, why.key, why.remedy)
    group, dump_dir = RankGroup(_RANKS_S), dumps.local_config.dump_dir
    what = f"a job with its dumps in {dump_dir}"
    group.exchange(what=what)
    token = f"ranks-{group.exchange_id}"
    # Where rank 0 cannot leave it, none is looked for.
    (is_left,), *_ = group.exchange(group.rank == 0 and leave_token(dump_dir, token), what=what)
    sees = not is_left or has_token(dump_dir, token, job_id(), SHOWN_S)
    seen = enumerate(group.exchange(sees, what=what))
    if apart := ", ".join(str(rank) for rank, (sees,) in seen if not sees):
        raise ConfigError(
            f"{dump_dir} is not shared: rank {apart} of {group.world_size} does not see what rank "
            f"0 writes there (this is rank {group.rank}, on {socket.gethostname()})",
            f"skip.{dumps.role}.dump_dir",
            "name a directory that all nodes share: "
            + as_given("skip.dump_dir=/shared/dumps", dumps.role, dumps.local_config),
        )
    return SeveralRanks(group, dumps)
