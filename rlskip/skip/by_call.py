"""Calls that are served as a whole: by the dump of the very call, or as the policies say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from rlskip.config.skip import SkipAction
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.run_index import Gathered, RunIndex
from rlskip.skip.visit import Found

log = logging.getLogger(__name__)


class CallMatching:
    """Finds the dump of a whole call, in its step or in another one of the run.

    Parameters
    ----------
    dumps, index
        The role's.
    own_steps
        Whether each call has a step of its own.
    """

    def __init__(self, dumps: Dumps, index: RunIndex, own_steps: bool) -> None:
        self._dumps, self._index, self._own_steps = dumps, index, own_steps

    def offers(self, call: Call) -> Iterator[Found | Gathered]:
        """The dumps that were made for this very call, the one to take first."""
        if self._dumps.local_config.action == SkipAction.REPEAT:
            if (repeated := self._repeated(call)) is not None:
                yield repeated
        elif call.identity.prompts_hash is not None:
            yield from call.visit.fitting(call.identity)
            yield from call.visit.unnamed()
            if self._dumps.local_config.match == "run":
                yield from self._elsewhere(call)

    def judge(self, call: Call) -> Found | Gathered | None:
        """What becomes of a call that no dump fits.

        None: it is a miss. Under ``on_mismatch=ignore`` a dump serves it nevertheless.

        Raises
        ------
        MismatchError
            It is the first call at the step, and all dumps of the step differ from it.
        """
        visit, identity = call.visit, call.identity
        policy = self._dumps.local_config.on_mismatch
        if self._dumps.local_config.action == SkipAction.REPEAT or visit.is_empty:
            return None
        if identity.prompts_hash is None or policy == "ignore":
            kth = visit.kth(call.place)
            if kth is None or (policy == "regenerate" and call.place >= len(visit.listed)):
                return None
            call.reason = (
                f"the prompts cannot be compared with those of the dump of {kth}"
                if identity.prompts_hash is None
                else f"no dump of step {visit.step} fits: {visit.why_not(identity)}"
            )
            return self._accept_mismatch(call, kth)
        nearest = None if call.place or visit.is_damaged else visit.nearest(identity)
        if nearest is None:
            damaged = "a dump of the step is missing, and the others were made for other calls"
            call.reason = visit.why_not(identity) if call.place else damaged
            log.info(
                "rlskip: role %s: step %d, call %d is generated: %s",
                self._dumps.role, visit.step, call.place, call.reason,
            )  # fmt: skip
            return None
        found, differs = nearest
        n = len(visit.listed)
        of = f", the nearest of its {n} calls," if n > 1 else ""
        differs = self._dumps.in_words(call, found, differs)
        call.reason = f"the dump of {found}{of} was made for another call: {'; '.join(differs)}"
        hint = ""
        if policy == "error" and self._dumps.local_config.match == "step":
            elsewhere = self._index.find(identity.prompts_hash, visit.step)
            if elsewhere:
                call.reason += f"; they are the same prompts as those of {elsewhere[0]}"
                hint = f"skip.{self._dumps.role}.match=run looks in the run's other steps, too; "
        return self._accept_mismatch(call, found, hint)

    def take(self, call: Call, found: Any) -> None:
        """These serve the call, and no other one of the visit."""
        call.visit.take(found)

    def _repeated(self, call: Call) -> Found | None:
        """The same call of the step itself, else of the nearest one; else that step's last."""
        source, store = call.step, self._dumps.store
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
        for found in self._index.find(call.identity.prompts_hash, call.step):
            meta = self._dumps.store.read_meta(found.step, found.part)
            if call.visit.is_used(found) or meta is None or meta.identity is None:
                continue
            if not call.identity.differences(meta.identity)[0]:
                yield found

    def _accept_mismatch(self, call: Call, found: Found, hint: str = "") -> Found | None:
        """`found` if it is to serve the call despite `call.reason`; None if it was quarantined."""
        if self._dumps.accept_mismatch(call.reason, found, hint):
            return found
        call.visit.lose(found)
        return None
