"""The role for calls: look up a dump, replay it; or run the stage, and keep what it returns."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.errors import RlskipError
from rlskip.jobs.lease import SingleFlight
from rlskip.skip.agreement import Loaded, OneRank, all_ranks, no_other_rank
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, capture_rng, restore_rng, seconds_saved
from rlskip.skip.prompt_rows import PromptRows
from rlskip.skip.role import Role
from rlskip.skip.stage_runner import not_dumped
from rlskip.skip.visit import Found, OtherSteps, Visit
from rlskip.store import (
    AbsentDumpError,
    CorruptDumpError,
    DumpError,
    DumpMeta,
    RankTimeoutError,
    WriterTimeoutError,
)
from rlskip.store.writer import Writer

log = logging.getLogger(__name__)


class CallRole(Role):
    """Dumps what each call of a stage returned, and replays it.

    ``cache`` serves a call with the dump of its step that has its identity: the prompts (by
    content), n, lengths and sampling parameters. ``repeat`` takes the dumps of the nearest step
    that has some in their order, and checks no prompts. In one visit of a step
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
        super().__init__(role, local_config)
        self.serves_validation = role == VALIDATION_ROLE
        self.support_online_step = step_of is not None
        self.dumps: Dumps = Dumps(role, local_config, facts, self._shard)
        self._step_of = step_of
        self._visiting: Visit | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def ranks(self) -> OneRank:
        """How ranks agree; at the first call, as a job starts before its ranks are known."""
        return no_other_rank(self.dumps) if self.support_online_step else all_ranks(self.dumps)

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

    @functools.cached_property
    def _others(self) -> OtherSteps:
        return OtherSteps(self.dumps.store)

    def _shard(self) -> tuple[int, int]:
        return self.ranks.group.rank, self.ranks.group.world_size

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        if self._step_of is None:
            return super().extract_step(*args, **kwargs)
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
            self.dumps.notices.log_other_shapes()
            if generates:
                self._claim(call)
        return call.found is not None

    def replay(self, call: Call) -> Any:
        if call.found is None:
            where = str(self.dumps.directory / str(call.step))
            raise AbsentDumpError("no dump serves this call", where)
        try:
            rollouts, meta, states = self.ranks.load(call, self._load)
            if self.local_config.restore_rng:
                restore_rng(states)
        except RankTimeoutError:
            raise
        except (DumpError, OSError, MemoryError):
            call.visit.lose(call.found)
            if self.local_config.on_miss == "generate":
                self._begin(call)
                self._reserve(call)
            raise
        call.awaited = meta.info.get("awaited") is True
        call.facts.update(
            source=meta.step,
            part=call.found.number,
            bytes=self.dumps.store.size_of(meta),
            seconds_saved=seconds_saved([meta], call.seconds),
        )
        self.dumps.notices.replayed(call.step, meta, call.found)
        return self.dumps.without_dropped(rollouts)

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
        """The present visit of `step`; where each call has its own step, a new one."""
        if self.support_online_step:
            return Visit(self.dumps.store, step)
        with self._lock:
            if self._visiting is None or self._visiting.step != step:
                # What earlier steps generated can be replayed; what this visit writes serves none
                # of it, so only its first call waits.
                self._wait_for_writer()
                self._visiting = Visit(self.dumps.store, step)
            return self._visiting

    def _wait_for_writer(self) -> None:
        try:
            if self.writer is not None:
                self.writer.wait()
        except WriterTimeoutError as error:
            # A dump is complete or absent, so to look without it is safe.
            log.warning("rlskip: the look at the dumps does not wait longer: %s", error)

    def _choose(self, call: Call) -> Found | None:
        """The dump that serves the call, from now on no other one's; None: it is a miss."""
        offers, found = self._offers(call), None
        try:
            call.identity = call.identity or self.dumps.identity_of(call)
            found = next(offers, None) or self._on_mismatch(call)
        except (DumpError, OSError, MemoryError) as error:
            log.warning(
                "rlskip: role %s: step %d counts as a miss: %s", self.role, call.step, error
            )
        finally:
            # The ranks agree even if this one is about to raise: the others must not wait for it.
            found = self.ranks.agree(call, found, offers, self._load)
        if found is not None:
            call.visit.take(found)
        return found

    def _offers(self, call: Call) -> Iterator[Found]:
        """The dumps that were made for this very call, the one to take first."""
        if self.local_config.action == SkipAction.REPEAT:
            if (repeated := self._repeated(call)) is not None:
                yield repeated
        elif call.identity.prompts_hash is not None:
            yield from call.visit.fitting(call.identity)
            if self.local_config.match == "run":
                yield from self._elsewhere(call)

    def _repeated(self, call: Call) -> Found | None:
        """The same call of the step itself, else of the nearest one; else that step's last."""
        source, store = call.step, self.dumps.store
        numbers = [*filter(call.visit.is_usable, call.visit.listed)]
        if not numbers:
            nearest = store.nearest(source)
            if nearest is None or nearest == source:  # written in this visit
                return None
            source, numbers = nearest, store.calls(nearest)
        while numbers:
            found = Found(source, numbers[min(call.place, len(numbers) - 1)])
            if store.read_meta(source, found.part) is not None:
                return found
            call.visit.lose(found)
            numbers.remove(found.number)
        return None

    def _elsewhere(self, call: Call) -> Iterator[Found]:
        """The dumps of other steps that were made for such a call."""
        for found in self._others.find(call.identity.prompts_hash, call.step):
            meta = self.dumps.store.read_meta(found.step, found.part)
            if call.visit.is_used(found) or meta is None or meta.identity is None:
                continue
            if not call.identity.differences(meta.identity)[0]:
                yield found

    def _on_mismatch(self, call: Call) -> Found | None:
        """What becomes of a call that no dump fits.

        None: it is a miss. Under ``on_mismatch=ignore`` a dump serves it nevertheless.

        Raises
        ------
        MismatchError
            It is the visit's first call, which all dumps of its step differ from.
        """
        visit, identity = call.visit, call.identity
        policy = self.local_config.on_mismatch
        if self.local_config.action == SkipAction.REPEAT or visit.is_empty:
            return None
        kth = visit.kth(call.place)
        if identity.prompts_hash is None:
            if kth is None or (policy == "regenerate" and call.place >= len(visit.listed)):
                return None
            call.reason = f"the prompts cannot be compared with those of the dump of {kth}"
            return self._accept_mismatch(call, kth)
        if policy == "ignore":
            if kth is None:
                return None
            call.reason = f"no dump of step {visit.step} fits: {visit.why_not(identity)}"
            return self._accept_mismatch(call, kth)
        nearest = None if call.place or visit.is_damaged else visit.nearest(identity)
        if nearest is None:
            damaged = "a dump of the step is missing, and the others were made for other calls"
            call.reason = visit.why_not(identity) if call.place else damaged
            log.info(
                "rlskip: role %s: step %d, call %d is generated: %s",
                self.role, visit.step, call.place, call.reason,
            )  # fmt: skip
            return None
        found, differs = nearest
        n = len(visit.listed)
        of = f", the nearest of its {n} calls," if n > 1 else ""
        differs = self.dumps.in_words(call, found, differs)
        call.reason = f"the dump of {found}{of} was made for another call: {'; '.join(differs)}"
        hint = ""
        if policy == "error" and self.local_config.match == "step":
            elsewhere = self._others.find(identity.prompts_hash, visit.step)
            if elsewhere:
                call.reason += f"; they are the same prompts as those of {elsewhere[0]}"
                hint = f"skip.{self.role}.match=run looks in the run's other steps, too; "
        return self._accept_mismatch(call, found, hint)

    def _accept_mismatch(self, call: Call, found: Found, hint: str = "") -> Found | None:
        """`found` if it is to serve the call despite `call.reason`; None if it was quarantined."""
        if self.dumps.accept_mismatch(call.reason, found, hint):
            return found
        call.visit.lose(found)
        return None

    # -- what is in it -------------------------------------------------------------------

    def _load(self, call: Call) -> Loaded:
        """The rollouts that serve the call, verified, and the generators' states if needed."""
        found, store = call.found, self.dumps.store
        assert found is not None
        with call.timed():
            rollouts, meta = store.load_with_meta(found.step, part=found.part)
            compares = self.local_config.action != SkipAction.REPEAT and not call.reason
            if compares and self.dumps.differences(call.identity, meta):
                where = str(self.dumps.directory / found.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self.dumps.check_fields(rollouts, meta, call)
            restores = self.local_config.restore_rng
            states = store.load_sidecar(found.step, part=found.part) if restores else None
            return rollouts, meta, states

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
        call.prompt_rows = PromptRows.of(call.prompts)  # now: the stage may change its input
        # One that fails, or is cancelled, leaves no dump: the next run must not take its place for
        # that of another call.
        call.cleanup.add(functools.partial(call.visit.end, call, dumped=False))

    def _may_generate(self, call: Call, flight: SingleFlight) -> bool:
        """Whether this job may generate the call; False once another job has dumped it.

        What keeps other jobs from generating it is given back when the call ends.
        """
        visit = call.visit

        def is_there() -> bool:
            with visit.lock:
                visit.refresh()
                there = next(self._offers(call), None) is not None
            if call.cleanup.over:  # cancelled: nobody waits for this thread any more
                raise asyncio.CancelledError
            return there

        try:
            lease = flight.enter(call.step, is_there, call.name)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RlskipError):
                raise
            # No descriptor or thread is left, say: another job may generate the step too.
            log.warning("rlskip: role %s: no lease for step %d: %s", self.role, call.step, error)
            return True
        if lease is None:
            return False
        call.cleanup.add(lease.release)
        return True

    def _reserve(self, call: Call) -> None:
        """Give the call's dump the lowest number that is free."""
        with call.visit.lock:  # the shards of one call have one number
            self._hold(call, call.visit.reserve(self.ranks.next_number(call.visit)))

    def _hold(self, call: Call, number: int) -> None:
        call.number = number
        call.cleanup.add(functools.partial(call.visit.release, number))

    def _dump_options(self, call: Call, result: Any) -> dict[str, Any]:
        """What a dump records besides the result, and where it goes."""
        call.visit = call.visit or self._visit(call.step)
        identity = call.identity = call.identity or self.dumps.identity_of(call)
        if call.number is None:
            call.prompt_rows = PromptRows.of(call.prompts)
            self._reserve(call)

        def on_conflict(other: DumpMeta) -> int | None:
            """The next number, unless another job has dumped this very call."""
            taken = call.number or 0
            call.visit.mark_present(taken)
            if other.identity is None or not identity.differences(other.identity)[0]:
                return None
            self._hold(call, call.visit.reserve(taken + 1))
            return call.number

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
        with call.visit.lock:
            call.visit.wrote(call.number)
            call.visit.end(call, dumped=True)
        self._others.forget(call.step)
        size = self.dumps.store.size_of(meta)
        call.record("dumped", step=call.step, part=meta.part or 0, bytes=size)
