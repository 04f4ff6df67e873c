"""How the ranks of a job decide together which dump serves a call, and load it."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from rlskip.config.check import Problem
from rlskip.config.skip import SkipAction, as_given
from rlskip.errors import ConfigError, MismatchError
from rlskip.jobs.ranks import RankGroup, RankTimeoutError, world_size
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, check_rng
from rlskip.skip.visit import Found, Visit
from rlskip.store import CorruptDumpError, DumpError, DumpMeta

# How long ranks wait for each other, in seconds: longer than a slow disk may hold one of them,
# 600 s for room in its writer and 600 s for what that writes.
_RANKS_S = 1800.0

Loaded = tuple[Any, DumpMeta, Any]
"""Rollouts, their meta, and the states of the generators."""

Load = Callable[[Call], Loaded]
"""Loads and verifies the dump that serves a call, or raises."""


@attrs.frozen
class Mismatch:
    """The dump to name for a call that fits none: why is the call's `reason`.

    ``hint`` is what may be set instead of ``on_mismatch``.
    """

    found: Found
    hint: str = ""


Candidates = Iterator[Any]
"""The dumps that would serve a call, in order; or, where none would, a `Mismatch` or nothing."""


class OneRank:
    """The only rank of a job, which agrees with itself."""

    def __init__(self, group: RankGroup, dumps: Dumps) -> None:
        self.group, self._dumps = group, dumps

    def agree(self, call: Call, candidates: Candidates, load: Load) -> Any:
        """The one of the `candidates` that serves the call on every rank; None: it is generated.

        Raises
        ------
        MismatchError
            There is none, and ``on_mismatch`` is ``error``.
        """
        first = next(candidates, None)
        return self._settle(call, first) if isinstance(first, Mismatch) else first

    def _settle(self, call: Call, mismatch: Mismatch) -> None:
        """Refuse the call, or quarantine the dump, as ``on_mismatch`` says."""
        self._dumps.reject(call.reason, mismatch.found, mismatch.hint)
        call.visit.lose(mismatch.found)

    def load(self, call: Call, load: Load) -> Loaded:
        """What `load` returns for the call, on every rank or on none."""
        return load(call)

    def next_number(self, visit: Visit) -> int:
        """The lowest number that is free on every rank."""
        free = self.group.exchange(visit.next_number(), what=f"step {visit.step}")
        return max(number for (number,) in free)

    def info(self) -> dict[str, Any]:
        """What this rank's shard records so that all shards of a call are known."""
        several = self.group.world_size > 1
        return {"generation": self.group.exchange_id} if several else {}


@attrs.frozen
class _Answer:
    """What a rank has for call `place` of `step`, as numbers.

    Its dumps were made for another call (`differs`); or it has found call `number` of step
    `source`, and has loaded its shard of it, which is of the call that `generation` names.
    """

    step: int
    place: int
    differs: int = 0
    found: int = 0
    source: int = 0
    number: int = 0
    loaded: int = 0
    generation: int = 0

    @property
    def dump(self) -> Found | None:
        return Found(self.source, self.number) if self.found else None


class SeveralRanks(OneRank):
    """Ranks that keep a shard of each call: a call is replayed on all of them or on none.

    No rank leaves while others wait for it: what it cannot use it answers, and what one raises
    lets all raise.
    """

    def agree(self, call: Call, candidates: Candidates, load: Load) -> Any:
        step = call.visit.step
        mismatch: Mismatch | None = None
        choices = candidates
        while True:
            mine, error = _Answer(step, call.place), None
            try:
                found = next(choices, None)
                mismatch = found if isinstance(found, Mismatch) else mismatch
                mine = self._answer(call, found, load)
            except BaseException as raised:  # once the other ranks know
                error = raised
            numbers = map(int, attrs.astuple(mine))
            given = self.group.exchange(*numbers, what=f"step {step}", error=error)
            answers = [_Answer(*answer) for answer in given]
            self._refuse_other_places(answers)
            theirs = [answer.dump for answer in answers]
            agreed = None if None in theirs else theirs[0]
            if agreed is None or set(theirs) == {agreed}:
                break
            last = max(one.order(step) for one in theirs if one)
            later = itertools.chain([mine.dump] if mine.found else [], candidates)
            choices = (one for one in later if one.order(step) >= last)
        # Another job may be replacing the shards, one rank's after the other's.
        of_one_call = {(a.loaded, a.generation) for a in answers} == {(1, mine.generation)}
        if not of_one_call and not isinstance(call.loaded, BaseException):
            call.loaded = None
        if agreed is None:
            self._miss(call, mine.dump, mismatch, answers)
        return agreed

    def _answer(self, call: Call, found: Found | Mismatch | None, load: Load) -> _Answer:
        """This rank's answer. A dump is loaded first, so that a hit takes one exchange.

        It settles which dump serves the call, and whether every rank has its shard of it.
        """
        call.found, call.loaded = None, None
        answer = _Answer(call.visit.step, call.place, differs=isinstance(found, Mismatch))
        if not isinstance(found, Found):
            return answer
        call.found = found
        answer = attrs.evolve(answer, found=True, source=found.step, number=found.number)
        try:
            loaded = call.loaded = load(call)
            if self._dumps.local_config.restore_rng:
                check_rng(loaded[2])
        except (DumpError, OSError, MemoryError) as error:
            call.loaded = error
            return answer
        generation = int(loaded[1].info.get("generation", "0"), 16)
        return attrs.evolve(answer, loaded=True, generation=generation)

    def _miss(
        self, call: Call, found: Found | None, mismatch: Mismatch | None, answers: list[_Answer]
    ) -> None:
        """Refuse a call that no dump serves if its dumps are whole, and made for another call."""
        damaged = any(answer.found and not answer.loaded for answer in answers)
        if damaged and found:
            call.visit.lose(found)  # a rank found it damaged, and another has seen that already
        if damaged or not all(answer.found or answer.differs for answer in answers):
            if mismatch:
                why = f"another rank has no whole dump; {call.reason}"
                self._dumps.notices.generated(call, why)
        elif mismatch:
            self._settle(call, mismatch)
        elif self._dumps.local_config.on_mismatch == "error":
            others = [str(rank) for rank, answer in enumerate(answers) if answer.differs]
            raise MismatchError(
                f"rank {', '.join(others)} of {self.group.world_size} makes another call than the "
                f"dump of step {call.step} was made for",
                str(self._dumps.directory / str(call.step)),
                "the error of that rank says how the calls differ, and what to choose",
            )

    def load(self, call: Call, load: Load) -> Loaded:
        loaded: Loaded | BaseException | None
        loaded, call.loaded = call.loaded, None
        if isinstance(loaded, BaseException):
            raise loaded
        if loaded is None:
            what = "another rank's shard is unusable, or of another call"
            raise CorruptDumpError(what, str(self._dumps.directory))
        return loaded

    def _refuse_other_places(self, answers: Sequence[_Answer]) -> None:
        if len({(answer.step, answer.place) for answer in answers}) == 1:
            return
        made = ", ".join(
            f"rank {rank} makes call {answer.place} of step {answer.step}"
            for rank, answer in enumerate(answers)
        )
        raise RankTimeoutError(
            f"the ranks call the stage unequally often: {made}",
            f"skip.{self._dumps.role}",
            "let every rank call the stage equally often in each step, one call after the other",
        )


def only_on_one_rank(dumps: Dumps, own_steps: bool = False) -> Problem | None:
    """Why a role cannot have several ranks, and what to set instead; None: it can.

    Parameters
    ----------
    own_steps
        Whether each call has a step of its own.
    """
    key = f"skip.{dumps.role}"
    if dumps.by_prompt:
        what = "a prompt may be one rank's now and another's in its dump"
        return Problem(f"{key}.match", what, f"set {key}.match=step")
    if dumps.local_config.action == SkipAction.REPEAT:
        what = "each of them may find another nearest step"
        return Problem(f"{key}.action", what, f"set {key}.action=cache, or use one rank")
    if own_steps:
        what = "concurrent samples have no order in which ranks could decide together"
        remedy = "use skip.rollout, or generate in a process outside torch.distributed"
        return Problem(f"{key}.enable", what, remedy)
    return None


def ranks_of(dumps: Dumps, own_steps: bool) -> OneRank:
    """The ranks that torch.distributed has; on all of them this is one collective call.

    Raises
    ------
    ConfigError
        There are several, and the role cannot have them, or they do not share the directory of
        `dumps`.
    """
    if (why := only_on_one_rank(dumps, own_steps)) is not None:
        if (ranks := world_size()) > 1:
            what = f"torch.distributed has {ranks} ranks here, and {why.what}"
            raise ConfigError(what, why.key, why.remedy)
        return OneRank(RankGroup(), dumps)
    group, dump_dir = RankGroup(_RANKS_S), dumps.local_config.dump_dir
    if group.world_size == 1:
        return OneRank(group, dumps)
    if apart := group.ranks_without(dump_dir):
        raise ConfigError(
            f"{dump_dir} is not shared: rank {', '.join(map(str, apart))} of "
            f"{group.world_size} does not see what rank 0 writes there (this is rank "
            f"{group.rank}, on {socket.gethostname()})",
            f"skip.{dumps.role}.dump_dir",
            "name a directory that all nodes share: "
            + as_given("skip.dump_dir=/shared/dumps", dumps.role, dumps.local_config),
        )
    return SeveralRanks(group, dumps)
