"""The role for calls: look up a dump, replay it; or run the stage, and keep what it returns.

:mod:`rlskip.skip.stage_runner` asks a role for each call of a decorated function. What it asks is
here in this order: :meth:`CallRole.find` names the call and looks whether its dump is there, and
:meth:`CallRole.replay` loads it; or the stage runs, and :meth:`CallRole.keep` keeps its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.ranks import RankGroup
from rlskip.jobs.served import ledger_of
from rlskip.skip.agreement import Mismatch, SeveralRanks, ranks_of
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng
from rlskip.skip.matching import CallMatching
from rlskip.skip.role import Role
from rlskip.skip.run_dumps import PromptGroups, RunDumps
from rlskip.skip.stage_runner import not_dumped
from rlskip.skip.step_calls import Key, StepCalls, next_name
from rlskip.store import (
    AbsentDumpError,
    DumpError,
    DumpMeta,
    RankTimeoutError,
    WriterTimeoutError,
)
from rlskip.store.writer import Writer

log = logging.getLogger(__name__)


class CallRole(Role):
    """Dumps what each call of a stage returned, and replays it.

    ``cache`` serves a call with the dump of its step that has its identity
    (:class:`~rlskip.store.identity.Identity`). ``repeat`` takes the dumps of the nearest step that
    has some in their order, and compares no identity. While the loop is at a step
    (:class:`~rlskip.skip.step_calls.StepCalls`) each dump serves one call.

    Calls that have a step of their own run side by side, in threads already: their dumps are
    written there, they have no order in which ranks could agree, and none waits for another job,
    which would keep its thread from other calls.

    The step comes from `step_of`, a function of a call's arguments; None: from the training loop.
    """

    def __init__(
        self,
        role: str,
        local_config: Any,
        facts: HostFacts,
        step_of: Callable[..., int] | None = None,
    ) -> None:
        Role.__init__(self, role, local_config)  # next to it, a subclass has BaseSkip
        self.support_online_step = step_of is not None
        self._step_of = step_of or super().extract_step
        self._visiting: StepCalls | None = None
        self._lock = threading.Lock()
        self.use(Dumps(role, local_config, facts, self.shard))

    def use(self, dumps: Dumps) -> None:
        """Keep results in these dumps from now on; before the first call."""
        self.dumps: Dumps = dumps
        self._ledger = ledger_of(dumps.directory)
        self._run = RunDumps(lambda: dumps.stores, self._ledger)
        matching = CallMatching
        if dumps.by_prompt:
            from rlskip.skip.by_prompt import PromptMatching as matching  # needs torch
        self._matching: CallMatching = matching(dumps, self._run, self._ledger)

    @functools.cached_property
    def ranks(self) -> SeveralRanks | None:
        """How several ranks agree; at the first call, as a job starts before they are known."""
        return ranks_of(self.dumps, self.support_online_step)

    @functools.cached_property
    def flight(self) -> SingleFlight | None:
        """Lets one job at a time generate what several lack; None: every job may."""
        c = self.local_config
        if self.support_online_step or c.on_miss != "generate" or c.wait_s <= 0:
            return None
        group = self.ranks.group if self.ranks else RankGroup()
        return SingleFlight(self.dumps.directory, group, wait_s=c.wait_s)

    @functools.cached_property
    def writer(self) -> Writer | None:
        """Writes dumps in a thread; None: the call waits until its dump is written."""
        background = self.local_config.background_write and not self.support_online_step
        return Writer(self.dumps.store) if background else None

    def shard(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return (self.ranks.group.rank, self.ranks.group.world_size) if self.ranks else (0, 1)

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        return self._step_of(*args, **kwargs)

    # -- a call: name it, look for its dump; load it, or run the stage and keep what it returns ----

    def find(self, call: Call) -> bool:
        call.visit = call.visit or self._visit(call.step)
        self._choose(call)
        if call.found is None:
            self.dumps.notices.log_hidden()
            if self.local_config.on_miss == "generate":
                _ = call.prompt_rows  # now: the stage may change its input
                if self.flight is not None and not self._may_generate(call, self.flight):
                    self._choose(call)
        return call.found is not None

    def replay(self, call: Call) -> Any:
        found = call.found
        if found is None:
            where = str(self.dumps.directory / str(call.step))
            raise AbsentDumpError("no dump serves this call", where)
        try:
            # Ranks have loaded it to agree.
            loaded, call.loaded = call.loaded or self._matching.load(call, found), None
            rollouts, meta, states = loaded
            if self.local_config.restore_rng:
                restore_rng(states)
        except RankTimeoutError:
            raise
        except (DumpError, OSError, MemoryError):
            self._matching.give_back(call, found, is_lost=True)
            call.found = None
            _ = call.prompt_rows
            raise
        self.dumps.identities.learn(call, meta)
        shown = found if isinstance(found, Key) else str(found)
        self.dumps.notices.replayed(call.step, meta, shown)
        return rollouts

    def keep(self, call: Call, result: Any) -> None:
        about = self._about(call, result)
        if self.writer is None:
            self._note_written(call, self.dumps.store.save(call.step, result, **about))
            return
        # The writer, not the end of this call, gives the lease back.
        release = call.cleanup.pop_all().close

        def done(meta: DumpMeta | None, error: BaseException | None) -> None:
            if meta is not None:
                self._note_written(call, meta)
            elif error is not None:
                not_dumped(self, call, error)
            release()

        try:
            self.writer.save(call.step, result, **about, done=done)
        except BaseException:
            release()
            raise

    def begin_visit(self) -> None:
        with self._lock:
            self._visiting = None

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    # -- which dump ----------------------------------------------------------------------

    def _visit(self, step: int) -> StepCalls:
        """The calls of `step` so far; where each call has its own step, none."""
        if self.support_online_step:
            return StepCalls(self.dumps.store, step)
        with self._lock:
            if self._visiting is None or self._visiting.step != step:
                if self.writer is not None:
                    self._wait_for(self.writer)
                self._visiting = StepCalls(self.dumps.store, step)
                self._run.first = step if self._run.first is None else self._run.first
            return self._visiting

    def _wait_for(self, writer: Writer) -> None:
        """Wait at the first call of a visit until what earlier steps generated can be replayed.

        What this visit writes serves none of it.
        """
        try:
            writer.wait()
        except WriterTimeoutError as error:
            # A dump is complete or absent, so to look without it is safe.
            log.warning("rlskip: the look at the dumps does not wait longer: %s", error)

    def _choose(self, call: Call) -> None:
        """Find the dump that serves the call, from now on no other one; without, it is a miss."""
        match, matching = self.local_config.match, self._matching
        # The lock from the look until the dump is taken: of two equal calls side by side each gets
        # a dump of its own. Calls of their own steps may take the same dump, or groups of the same.
        # One lock for all others, too, would keep ranks that are threads from agreeing.
        together = match == "prompt" or (match == "run" and self.support_online_step)
        with call.visit.lock, self._ledger.lock if together else contextlib.nullcontext():
            if self.ranks is None:
                found = self._look_up(call)
            else:
                found = self.ranks.agree(call, self._look_up, matching.load)
            if isinstance(found, Mismatch):
                self.dumps.reject(call.reason, found.key, found.hint)
                call.replaces, found = found.key.call, None
            call.found = found
            if found is not None and not call.by_hand:
                matching.take(call, found)
                call.cleanup.undo(functools.partial(self._give_back, call, found))

    def _look_up(self, call: Call) -> Key | PromptGroups | Mismatch | None:
        """Name the call, and find what serves it; what cannot be read counts as absent."""
        try:
            self._name(call)
            return self._matching.look_up(call) or self._matching.judge(call)
        except (DumpError, OSError, MemoryError) as error:
            self.dumps.notices.unusable(call, error)
            return None

    def _name(self, call: Call) -> None:
        """Give the call its identity, and by that its name and its place in the step."""
        if call.name:
            return
        call.identity = call.identity or self.dumps.identities.of_call(call)
        call.name, call.place = call.visit.begin(call.identity)
        call.cleanup.undo(functools.partial(call.visit.end, call.name, call.place))

    def _give_back(self, call: Call, found: Key | PromptGroups) -> None:
        """Let dumps serve another call, if this one was cancelled or its stage failed."""
        if call.found is found:
            self._matching.give_back(call, found)

    def _may_generate(self, call: Call, flight: SingleFlight) -> bool:
        """Whether this job may generate the call; False once another job has dumped it.

        What keeps other jobs from generating it is given back when the call ends.
        """

        def is_there() -> bool:
            with call.visit.lock:
                there = False
                with contextlib.suppress(DumpError, OSError, MemoryError):
                    there = self._matching.look_up(call) is not None
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return there

        lease = flight.enter(call.step, is_there, call.name)
        if lease is None:
            return False
        call.cleanup.add(lease.release)
        return True

    # -- what is kept --------------------------------------------------------------------

    def _about(self, call: Call, result: Any) -> dict[str, Any]:
        """What a dump records besides the result, and where it goes.

        It has the call's name, and the first call of a step the step's own directory; one that
        replaces a dump has that one's name. From now on it serves no call of the visit.
        """
        visit, info = call.visit, {}
        if self.ranks is not None:
            info = self.ranks.info(call)  # before anything that may raise: all ranks exchange
        self._name(call)
        name = call.name if call.place else ""
        key = Key(call.step, name if call.replaces is None else call.replaces)
        while call.replaces is None and (key in visit.taken or self._is_anothers(call, key)):
            key = Key(call.step, next_name(call.name, key.call))
        self._take(call, key)

        def on_conflict(other: DumpMeta) -> str | None:
            """Another name, unless another job has dumped this very call.

            At the name may lie a dump of equal prompts and other arguments. Whether a name was free
            the rename says, and not a look before it.
            """
            nonlocal key
            if not self._is_anothers(call, key, other):
                call.is_dropped = self.ranks is None  # shards are replaced
                return None
            # That dump may serve the call that it was made for, which may be one of this visit.
            visit.give_back(key)
            if call.writes == key:
                self._ledger.write_not(key)
            while (key := Key(call.step, next_name(call.name, key.call))) in visit.taken:
                pass
            self._take(call, key)
            return key.call

        return {
            "call": key.call,
            "identity": call.identity,
            "info": {**self.dumps.info(call, result), **info, "place": call.place},
            "sidecar": capture_rng(),
            "on_conflict": on_conflict,
        }

    def _is_anothers(self, call: Call, key: Key, there: DumpMeta | None = None) -> bool:
        """Whether another call's dump has this name, which may serve that one yet."""
        if there is None and key.call in call.visit.listed:
            there = self.dumps.store.read_meta(key.step, key.call)
        if there is None:
            return False
        fits = not there.identity or call.identity.fits(there.identity)
        return not fits or self._matching.has_served(key, call)

    def _take(self, call: Call, key: Key) -> None:
        """The call is going to write this dump, which serves no other one."""
        call.visit.write(key)
        call.writes = key if not call.by_hand and self._ledger.write(key) else None

    def _note_written(self, call: Call, meta: DumpMeta) -> None:
        if not call.by_hand:
            self._ledger.write(Key(call.step, meta.call))
        size = self.dumps.store.size_of(meta)
        call.record("dumped", step=call.step, call=meta.call, bytes=size)
        if not call.is_dropped:  # else another job's dump of the call stays
            call.cleanup.undo(functools.partial(self._withdraw, call, meta))

    def _withdraw(self, call: Call, meta: DumpMeta) -> None:
        """Take back the dump of a call that was cancelled: the trainer got no such rollouts."""
        self.dumps.store.quarantine(call.step, "its call was cancelled", meta.call)
        call.visit.give_back(Key(call.step, meta.call))
