"""The role for calls: look up a dump, replay it; or run the stage, and keep what it returns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.jobs.lease import SingleFlight
from rlskip.skip.agreement import Candidates, OneRank, ranks_of
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng
from rlskip.skip.matching import CallMatching, PromptMatching
from rlskip.skip.role import Role
from rlskip.skip.run_index import Gathered, RunIndex
from rlskip.skip.stage_runner import not_dumped
from rlskip.skip.visit import Found, Visit
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
    (:class:`~rlskip.skip.visit.Visit`) each dump serves one call.

    Calls that have a step of their own run side by side, in threads already: their dumps are
    written there, they have no order in which ranks could agree, and none waits for another job,
    which would keep its thread from other calls.

    Parameters
    ----------
    role, local_config, facts
        Its name, its complete config, and what the host says of the run.
    step_of
        Where the step comes from: a function of a call's arguments; None: the training loop.
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
        self._visiting: Visit | None = None
        self._lock = threading.Lock()
        self.use(Dumps(role, local_config, facts, self.shard))

    def use(self, dumps: Dumps) -> None:
        """Keep results in these dumps from now on; before the first call."""
        self.dumps: Dumps = dumps
        self._index = RunIndex(lambda: dumps.stores)
        matching = PromptMatching if dumps.by_prompt else CallMatching
        self._matching: CallMatching = matching(dumps, self._index, self.support_online_step)

    @functools.cached_property
    def ranks(self) -> OneRank:
        """How ranks agree; at the first call, as a job starts before its ranks are known."""
        return ranks_of(self.dumps, self.support_online_step)

    @functools.cached_property
    def flight(self) -> SingleFlight | None:
        """Lets one job at a time generate what several lack; None: every job may."""
        c = self.local_config
        if self.support_online_step or c.on_miss != "generate" or c.wait_s <= 0:
            return None
        return SingleFlight(self.dumps.directory, self.ranks.group, wait_s=c.wait_s)

    @functools.cached_property
    def writer(self) -> Writer | None:
        """Writes dumps in a thread; None: the call waits until its dump is written."""
        background = self.local_config.background_write and not self.support_online_step
        return Writer(self.dumps.store) if background else None

    def shard(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self.ranks.group.rank, self.ranks.group.world_size

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        return self._step_of(*args, **kwargs)

    # -- the three questions -----------------------------------------------------------

    def find(self, call: Call) -> bool:
        generates = self.local_config.on_miss == "generate"
        visit = call.visit = self._visit(call.step)
        with visit.lock:
            call.place = visit.calls
            call.found = self._choose(call)
            if call.found is not None or generates:
                call.name = visit.count_call(call.identity)
        if call.found is None:
            self.dumps.notices.log_hidden(call)
            if generates:
                self._claim(call)
        return call.found is not None

    def replay(self, call: Call) -> Any:
        if call.found is None:
            where = str(self.dumps.directory / str(call.step))
            raise AbsentDumpError("no dump serves this call", where)
        try:
            rollouts, meta, states = self.ranks.load(call, self._matching.load)
            if self.local_config.restore_rng:
                restore_rng(states)
        except RankTimeoutError:
            raise
        except (DumpError, OSError, MemoryError):
            self._index.give_back(call.found)
            if isinstance(call.found, Found):
                call.visit.lose(call.found)
            call.found = None
            if self.local_config.on_miss == "generate":
                self._begin(call)
                self._reserve(call)
            raise
        call.awaited = str(meta.info.get("awaited", ""))
        found = call.found if isinstance(call.found, Found) else str(call.found)
        self.dumps.replayed(call, meta, found)
        return rollouts

    def keep(self, call: Call, result: Any) -> None:
        about = self._dump_options(call, result)
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

    def _visit(self, step: int) -> Visit:
        """What is known of the dumps of `step`; where each call has its own step, of that call."""
        if self.support_online_step:
            return Visit(self.dumps.store, step, self.dumps.dumped_calls())
        with self._lock:
            if self._visiting is None or self._visiting.step != step:
                # What earlier steps generated can be replayed; what this visit writes serves none
                # of it, so only its first call waits.
                self._wait_for_writer()
                self._visiting = Visit(self.dumps.store, step, self.dumps.dumped_calls())
            return self._visiting

    def _wait_for_writer(self) -> None:
        try:
            if self.writer is not None:
                self.writer.wait()
        except WriterTimeoutError as error:
            # A dump is complete or absent, so to look without it is safe.
            log.warning("rlskip: the look at the dumps does not wait longer: %s", error)

    def _choose(self, call: Call) -> Found | Gathered | None:
        """The dump that serves the call, from now on no other one's; None: it is a miss."""
        # Calls of their own steps, side by side, take groups of the same dumps.
        with self._index.lock if self.dumps.by_prompt else contextlib.nullcontext():
            if not self.support_online_step:
                self._index.begin(call.step)
            found = self.ranks.agree(call, self._candidates(call), self._matching.load)
            if found is not None:
                self._matching.take(call, found)
                call.found = found
                call.cleanup.add(functools.partial(self._give_back, call, found))
            return found  # type: ignore[no-any-return]

    def _give_back(self, call: Call, found: Found | Gathered) -> None:
        """Let dumps serve another call, if this one was cancelled or its stage failed."""
        if not call.cleanup.failed or call.found is not found:
            return
        if self.dumps.by_prompt:
            self._index.give_back(found)
        if isinstance(found, Found):
            call.visit.give_back(found)

    def _candidates(self, call: Call) -> Candidates:
        offered = False
        try:
            call.identity = call.identity or self.dumps.identity_of(call)
            for found in self._matching.offers(call):
                offered = True
                yield found
            if not offered and (judged := self._matching.judge(call)) is not None:
                yield judged
        except (DumpError, OSError, MemoryError) as error:
            log.warning(
                "rlskip: role %s: step %d counts as a miss: %s", self.role, call.step, error
            )
            call.identity = call.identity or self.dumps.conditions

    # -- what is kept --------------------------------------------------------------------

    def _claim(self, call: Call) -> None:
        """Prepare to generate; another job may have done so meanwhile: then `found` is set."""
        self._begin(call)
        if self.flight is not None and not self._may_generate(call, self.flight):
            with call.visit.lock:
                call.found = self._choose(call)
        if call.found is None:
            self._reserve(call)
        else:
            call.visit.end(call, dumped=True)

    def _begin(self, call: Call) -> None:
        call.visit.begin(call, call.identity)
        call.prompt_rows = call.summarize_prompts()  # now: the stage may change its input
        # One that fails, or is cancelled, leaves no dump: the next run must not take its place for
        # that of another call.
        call.cleanup.add(functools.partial(call.visit.end, call, dumped=False))

    def _may_generate(self, call: Call, flight: SingleFlight) -> bool:
        """Whether this job may generate the call; False once another job has dumped it.

        What keeps other jobs from generating it is given back when the call ends.
        """
        visit, looks = call.visit, itertools.count()

        def is_there() -> bool:
            with visit.lock:
                visit.refresh(everything=next(looks) > 0)
                there = False
                with contextlib.suppress(DumpError, OSError, MemoryError):
                    there = next(self._matching.offers(call), None) is not None
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return there

        lease = flight.enter(call.step, is_there, call.name)
        if lease is None:
            return False
        call.cleanup.add(lease.release)
        return True

    def _reserve(self, call: Call, at_least: int | None = None) -> None:
        """Give the call's dump the lowest number that is free, on every rank or from `at_least`."""
        with call.visit.lock:
            # The shards of one call have one number.
            least = self.ranks.next_number(call.visit) if at_least is None else at_least
            call.number = number = call.visit.reserve(least)
        self._index.writes(Found(call.step, number))
        call.cleanup.add(functools.partial(call.visit.release, number))

    def _dump_options(self, call: Call, result: Any) -> dict[str, Any]:
        """What a dump records besides the result, and where it goes."""
        call.visit = call.visit or self._visit(call.step)
        if call.number is None:
            call.prompt_rows = call.summarize_prompts()
            self._reserve(call)  # before anything that may raise: all ranks decide the number
        identity = call.identity = call.identity or self.dumps.identity_of(call)

        def on_conflict(other: DumpMeta) -> int | None:
            """The next number, unless another job has dumped this very call."""
            taken = call.number or 0
            if other.identity is None or not identity.differences(other.identity)[0]:
                call.visit.mark_present(taken)
                return None
            call.visit.add(taken, other)
            self._reserve(call, at_least=taken + 1)
            call.visit.saves(call.number, identity)
            return call.number

        call.visit.saves(call.number, identity)
        return {
            "identity": identity,
            "info": {
                **self.dumps.info(call, result),
                **self.ranks.info(),
                "calls": call.visit.known_calls(),
            },
            "sidecar": capture_rng(),
            "part": call.number or None,
            "on_conflict": on_conflict,
        }

    def _note_written(self, call: Call, meta: DumpMeta) -> None:
        ours = not call.visit.is_usable(call.number)  # else another job's dump of the call stays
        call.visit.wrote(call, call.number)
        self._index.wrote(Found(call.step, meta.part or 0))
        size = self.dumps.store.size_of(meta)
        call.record("dumped", step=call.step, part=meta.part or 0, bytes=size)
        if ours:
            call.cleanup.add(functools.partial(self._withdraw, call, meta))

    def _withdraw(self, call: Call, meta: DumpMeta) -> None:
        """Take back the dump of a call that was cancelled: the trainer got no such rollouts."""
        if call.cleanup.failed:
            self.dumps.store.quarantine(call.step, "its call was cancelled", meta.part)
            call.visit.lose(Found(call.step, call.number or 0))
