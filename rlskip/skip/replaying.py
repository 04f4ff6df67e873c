"""Roles that replay calls one by one: which dump serves a call, and what becomes of the others."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rlskip.config.facts import HostFacts
from rlskip.skip.call import Call, current_call, saved_call
from rlskip.skip.dumping import DumpingSkip, seconds_saved
from rlskip.skip.rng import capture_rng, restore_rng
from rlskip.skip.role import SkipAction
from rlskip.skip.visit import Found, OtherSteps, Visit
from rlskip.store import AbsentDumpError, CorruptDumpError, DumpError, DumpMeta, RankTimeoutError

log = logging.getLogger(__name__)


class ReplayingSkip(DumpingSkip):
    """A role that dumps what each call of its stage returned and replays it.

    ``cache`` serves a call with the dump of its step that has its identity: the prompts (by
    content), n, lengths and sampling parameters. ``repeat`` takes the dumps of the nearest step
    that has some in their order, and checks no prompts. In one visit of a step
    (:class:`~rlskip.skip.visit.Visit`) each dump serves one call.
    """

    def __init__(self, local_config: Any, facts: HostFacts) -> None:
        super().__init__(local_config, facts)
        self._visiting: Visit | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def _others(self) -> OtherSteps:
        return OtherSteps(self.store)

    # -- the three questions -----------------------------------------------------------

    def meet_precondition(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> bool:
        call = current_call(func, *args, **kwargs)
        generates = self.local_config.on_miss == "generate"
        visit = call.visit = self._visit(step)
        with visit.lock:
            call.place = visit.calls
            call.found = self._choose(call)
            if call.found is not None or generates:
                call.name = visit.answer(call.identity)
        if call.found is None:
            self._warn_of_other_shapes()
            if generates:
                self._claim(call)
        return call.found is not None

    def warp_function(
        self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        call = saved_call(*args, **kwargs)
        if call.found is None:
            raise AbsentDumpError("no dump serves this call", str(self.directory / str(step)))
        try:
            rollouts, meta, states = self._load(call)
            if self.local_config.restore_rng:
                restore_rng(states)
        except RankTimeoutError:
            raise
        except (DumpError, OSError, MemoryError):
            call.visit.lose(call.found)
            if self.local_config.on_miss == "generate":
                self._reserve(call)
            raise
        call.facts.update(
            source=meta.step,
            part=call.found.number,
            bytes=self.store.size_of(meta),
            seconds_saved=seconds_saved([meta], call.seconds),
        )
        self._log_replay(step, meta, call.found)
        return self._without_dropped(rollouts)

    def prepare_data(self, step: int, result: Any, /, *args: Any, **kwargs: Any) -> None:
        call = saved_call(*args, **kwargs)
        meta = self.store.save(step, result, **self._about(step, call, result))
        self._note_written(step, call, meta)

    def begin_visit(self) -> None:
        with self._lock:
            self._visiting = None

    # -- which dump ----------------------------------------------------------------------

    def _visit(self, step: int) -> Visit:
        """The present visit of `step`; where each call has its own step, a new one."""
        if self.support_online_step:
            return Visit(self.store, step)
        with self._lock:
            if self._visiting is None or self._visiting.step != step:
                self._visiting = self._new_visit(step)
            return self._visiting

    def _new_visit(self, step: int) -> Visit:
        return Visit(self.store, step)

    def _choose(self, call: Call) -> Found | None:
        """The dump that serves the call, from now on no other one's; None: it is a miss."""
        offers, found = self._offers(call), None
        try:
            call.identity = call.identity or self._identity(call)
            found = next(offers, None) or self._unfit(call)
        except (DumpError, OSError, MemoryError) as error:
            step = call.visit.step
            log.warning("rlskip: role %s: step %d counts as a miss: %s", self.role, step, error)
        finally:
            # The ranks agree even if this one is about to raise: the others must not wait for it.
            found = self._agreed(call, found, offers)
        if found is not None:
            call.visit.take(found)
        return found

    def _agreed(self, call: Call, found: Found | None, offers: Iterator[Found]) -> Found | None:
        """The first of the offers that every rank has, where there are several ranks.

        `found` is this rank's first; it is None if the others shall not wait for this rank's.
        """
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
        step = source = call.visit.step
        numbers = [n for n in call.visit.listed if n not in call.visit.lost]
        if not numbers:
            nearest = self.store.nearest(step)
            if nearest is None or nearest == step:  # written in this visit
                return None
            source, numbers = nearest, self.store.calls(nearest)
        while numbers:
            found = Found(source, numbers[min(call.place, len(numbers) - 1)])
            if self.store.read_meta(source, found.part) is not None:
                return found
            numbers.remove(found.number)
        return None

    def _elsewhere(self, call: Call) -> Iterator[Found]:
        """The dumps of other steps that were made for such a call."""
        for found in self._others.find(call.identity.prompts_hash, call.visit.step):
            meta = self.store.read_meta(found.step, found.part)
            if call.visit.is_used(found) or meta is None or meta.identity is None:
                continue
            if not call.identity.differences(meta.identity)[0]:
                yield found

    def _unfit(self, call: Call) -> Found | None:
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
            return self._despite(call, kth)
        if policy == "ignore":
            if kth is None:
                return None
            call.reason = f"no dump of step {visit.step} fits: {visit.why_not(identity)}"
            return self._despite(call, kth)
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
        call.reason = f"the dump of {found}{of} was made for another call: {'; '.join(differs)}"
        hint = ""
        if policy == "error" and self.local_config.match == "step":
            elsewhere = self._others.find(identity.prompts_hash, visit.step)
            if elsewhere:
                call.reason += f". A dump of {elsewhere[0]} has its prompts"
                hint = f"skip.{self.role}.match=run looks in the run's other steps, too; "
        return self._despite(call, found, hint)

    def _despite(self, call: Call, found: Found, hint: str = "") -> Found | None:
        """`found` if it is to serve the call despite `call.reason`; None if it was quarantined."""
        if self._accepts(call.reason, found, hint):
            return found
        call.visit.lose(found)
        return None

    # -- what is in it -------------------------------------------------------------------

    def _load(self, call: Call) -> tuple[Any, DumpMeta, Any]:
        """The rollouts that serve the call, verified, and the generators' states if needed."""
        found: Found = call.found
        with call.timed():
            rollouts, meta = self.store.load_with_meta(found.step, part=found.part)
            compares = self.local_config.action != SkipAction.REPEAT and not call.reason
            if compares and self._differences(call.identity, meta):
                where = str(self.directory / found.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self._check_fields(rollouts, meta, call)
            restores = self.local_config.restore_rng
            states = self.store.load_sidecar(found.step, part=found.part) if restores else None
            return rollouts, meta, states

    # -- what is kept --------------------------------------------------------------------

    def _claim(self, call: Call) -> None:
        """Prepare to generate; another job may have done so meanwhile: then `found` is set."""
        self._reserve(call)

    def _reserve(self, call: Call) -> None:
        """Give the call's dump the lowest number that is free."""
        self._hold(call, call.visit.reserve())

    def _hold(self, call: Call, number: int) -> None:
        call.number = number
        call.cleanup.add(functools.partial(call.visit.release, number))

    def _about(self, step: int, call: Call, result: Any) -> dict[str, Any]:
        """What a dump records besides the result, and where it goes."""
        call.visit = call.visit or self._visit(step)
        identity = call.identity = call.identity or self._identity(call)
        if call.number is None:
            self._reserve(call)

        def elsewhere(other: DumpMeta) -> int | None:
            """The next number, unless another job has dumped this very call."""
            taken = call.number or 0
            call.visit.others_wrote(taken)
            if other.identity is None or not identity.differences(other.identity)[0]:
                return None
            self._hold(call, call.visit.reserve(taken + 1))
            return call.number

        return {
            "identity": identity,
            "info": self._info(call, result),
            "sidecar": capture_rng(),
            "part": call.number or None,
            "elsewhere": elsewhere,
        }

    def _note_written(self, step: int, call: Call, meta: DumpMeta) -> None:
        call.visit.wrote(call.number)
        self._others.forget(step)
        call.record("dumped", step=step, part=meta.part or 0, bytes=self.store.size_of(meta))
