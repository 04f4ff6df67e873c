"""The role for calls: find a dump, replay it; or the stage runs, and its result is kept."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.config.facts import HostFacts
from rlskip.jobs.lease import SingleFlight
from rlskip.jobs.ranks import RankGroup
from rlskip.skip.agreement import Mismatch, SeveralRanks, ranks_of
from rlskip.skip.call import Call, Stage
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng
from rlskip.skip.role import Role, present
from rlskip.skip.stage_runner import log_unusable, not_dumped
from rlskip.skip.visit import Visit
from rlskip.store import (
    AbsentDumpError,
    DumpError,
    TooLargeDumpError,
    WriterTimeoutError,
)
from rlskip.store.dump import NewDump
from rlskip.store.layout import Place
from rlskip.store.writer import Writer

log = logging.getLogger(__name__)


class CallRole(Role):
    """Dumps what each call of a stage returned, and replays it.

    Calls that have a step of their own run side by side, in threads already: their dumps are
    written there, they have no order in which ranks could agree, and none waits for another job,
    which would keep its thread from other calls.
    """

    def __init__(self, role: str, local_config: Any, facts: HostFacts) -> None:
        Role.__init__(self, role, local_config)  # next to it, a subclass has BaseSkip
        self._visiting: Visit | None = None
        self._lock = threading.Lock()
        self.dumps: Dumps = Dumps(role, local_config, facts, self.shard)

    @functools.cached_property
    def ranks(self) -> SeveralRanks | None:
        """How several ranks agree; at the first call, as a job starts before they are known."""
        return ranks_of(self.dumps, self.support_online_step)

    @functools.cached_property
    def flight(self) -> SingleFlight | None:
        """Lets one job at a time generate what several lack; None: every job may."""
        c = self.local_config
        if self.support_online_step or c.wait_s <= 0:
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

    # -- a call: name it, look for its dump; load it, or run the stage and keep what it returns ----

    def find(self, call: Call) -> bool:
        if call.before is not None:
            call.before.wait()
        # What earlier steps generated can be replayed from now on; what this visit writes serves
        # none of it. A dump is complete or absent: to look without it is safe.
        try:
            if call.visit.is_new and self.writer is not None:
                self.writer.wait()
        except WriterTimeoutError as error:
            log.warning("rlskip: the look at the dumps does not wait longer: %s", error)
        call.visit.is_new = False
        try:
            self._choose(call)
        finally:  # the next one need not wait for another job, as this one may
            if call.chosen is not None:
                call.chosen.set()
        if call.found is None:
            self.dumps.notices.log_hidden()
        if call.found is None and self.local_config.on_miss == "generate":
            _ = call.prompt_rows  # now: the stage may change its input
            if self.flight is not None:
                is_there = functools.partial(self._is_there, call)
                lease = self.flight.enter(call.step, is_there, call.name)
                if lease is None:
                    self._choose(call)
                else:  # other jobs wait for this one until the call ends
                    call.at_end(lease.close)
        return call.found is not None

    def replay(self, call: Call) -> Any:
        found = call.found
        if found is None:
            where = str(self.dumps.store.place(call.step).directory)
            raise AbsentDumpError("no dump serves this call", where)
        try:
            # Ranks have loaded it to agree.
            loaded, call.loaded = call.loaded or self.dumps.load(call, found), None
            rollouts, states = loaded
            if self.local_config.restore_rng:
                restore_rng(states)
        except (DumpError, OSError, MemoryError):
            call.visit.give_back(call, found, is_lost=True)
            call.found = None
            _ = call.prompt_rows
            raise
        self.dumps.identities.learn(call, call.meta)
        self.dumps.notices.replayed(call.step, call.meta, found)
        return rollouts

    def keep(self, call: Call, result: Any) -> None:
        # Before anything that may raise: all ranks exchange.
        shard = {} if self.ranks is None else self.ranks.info(call)
        self._name(call)
        self.dumps.identities.ran(call)
        about = {
            # From now on what has this name serves no other call.
            "call": call.visit.write(call),
            "identity": call.identity,
            "info": {**self.dumps.info(call, result), **shard, "place": call.place},
            "sidecar": capture_rng(),
        }
        if self.writer is None:
            self._write(call, self.dumps.store.prepare(call.step, result, **about))
            return
        # The writer, not the end of this call, gives the lease back.
        release = call.ending.pop_all().close

        def write(dump: NewDump) -> None:
            try:
                self._write(call, dump)
            except BaseException as error:
                not_dumped(self, call, error)
            finally:
                release()

        try:
            self.writer.save(call.step, result, **about, write=write)
        except BaseException:
            release()
            raise

    def visit(self, step: int) -> Visit:
        """The calls of `step` so far; where each call has its own step, none."""
        if self.support_online_step:
            return Visit(self.dumps, step)
        with self._lock:
            if self._visiting is None or self._visiting.step != step:
                self._visiting = Visit(self.dumps, step)
                run = self.dumps.run
                run.first = step if run.first is None else run.first
            return self._visiting

    def _choose(self, call: Call) -> None:
        """Find the dump that serves the call, from now on no other one; without, it is a miss."""
        match = self.local_config.match
        # The lock from the look until the dump is taken: of two equal calls side by side each gets
        # a dump of its own. Calls of their own steps may take the same dump, or groups of the same.
        # One lock for all others, too, would keep ranks that are threads from agreeing.
        together = match == "prompt" or (match == "run" and self.support_online_step)
        with call.visit.lock, self.dumps.ledger.lock if together else contextlib.nullcontext():
            found: Any = None
            error: BaseException | None = None
            try:
                self._name(call)
                found = call.visit.look_up(call) or call.visit.judge(call)
                if self.ranks is not None and isinstance(found, Place):
                    # It is loaded first, so that a hit takes the ranks one exchange.
                    call.loaded = self.dumps.load(call, found)
            except BaseException as raised:
                # What cannot be read counts as absent; but not a sound dump that is too large.
                is_absent = isinstance(raised, DumpError | OSError | MemoryError)
                if is_absent and not isinstance(raised, TooLargeDumpError):
                    log_unusable(self.role, call, raised)
                elif self.ranks is None:
                    raise
                else:  # it is raised once the other ranks know
                    error = raised
            if self.ranks is not None:
                found = self.ranks.agree(call, found, error)
            if isinstance(found, Mismatch):
                # What the run has trained on, at another step, the next run looks for.
                replaces = not call.visit.has_served(found.key, call)
                self.dumps.reject(call.reason, found.key, found.hint, replaces=replaces)
                # Under the name of a call with other prompts no later run would look for it.
                is_looked_for = replaces and found.key in call.visit.candidates(call)
                call.replaces, found = found.key.call if is_looked_for else None, None
            call.found = found
            if found is not None:
                call.visit.take(call, found)

    def _name(self, call: Call) -> None:
        """Give the call its identity, and by that its name and its place in the step."""
        if not call.name:
            call.identity = call.identity or self.dumps.identities.of_call(call)
            call.visit.begin(call)

    def _is_there(self, call: Call) -> bool:
        """Whether another job has dumped the call meanwhile."""
        with call.visit.lock:
            there = False
            with contextlib.suppress(DumpError, OSError, MemoryError):
                there = call.visit.look_up(call) is not None
        if call.over:  # cancelled: nobody waits for this thread any more
            raise asyncio.CancelledError
        return there

    def _write(self, call: Call, dump: NewDump) -> None:
        """Write the dump under its name, or under the next one that is not another call's.

        At a name may lie a dump of equal prompts and other arguments: the rename tells.
        """
        over = None
        while True:
            key = dump.place
            meta, is_own = self.dumps.store.write(dump, over)
            if not is_own and (
                (meta.identity and not call.identity.fits(meta.identity))
                or call.visit.has_served(key, call)
            ):
                # It may serve the call that it was made for, which may be one of this visit.
                if not call.visit.taken.get(key):  # by now it may serve such a call
                    call.visit.free(key)
                if call.writes == key:
                    self.dumps.ledger.written.discard(key)
                dump, over = dump.named(call.visit.write(call, key.call)), None
            elif is_own or self.ranks is None:
                break
            else:
                over = meta  # all shards of a call are of one generation
        size = self.dumps.store.size_of(meta)
        call.record("dumped", step=call.step, call=meta.call, bytes=size)
        if is_own:  # else another job's dump of the call stays
            call.written = key
            call.at_end(call.visit.end, call)

    def begin_visit(self) -> None:
        with self._lock:
            self._visiting = None

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    # -- by hand: the methods of verl's BaseSkip ---------------------------------------------
    # They keep nothing between them: of equal calls of a step they mean the first.

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        with self._call(step, func, args, kwargs) as call:
            return call.found is not None if call.name else CallRole.find(self, call)

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        with self._call(step, func, args, kwargs) as call:
            if not call.name:
                CallRole.find(self, call)
            return CallRole.replay(self, call)

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        with self._call(step, lambda *_, **__: None, args, kwargs) as call:  # the stage is over
            CallRole.keep(self, call, result)

    @contextlib.contextmanager
    def _call(
        self, step: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Call]:
        """The present call of a decorated function, or the one that the arguments name."""
        call = present.get()
        if call is not None and (call.stage.role, call.step) == (self.role, step):
            yield call
            return
        visit = Visit(self.dumps, step, by_hand=True)
        with Call(Stage(func, "", _likely_prompts), args, kwargs, step, visit=visit) as call:
            yield call


def _likely_prompts(*args: Any, **kwargs: Any) -> Any:
    """The argument `prompts`, else the first that is a batch, else the first."""
    if "prompts" in kwargs:
        return kwargs["prompts"]
    given = [*args, *kwargs.values()]
    return next((one for one in given if columns_of(one)), given[0] if given else None)
