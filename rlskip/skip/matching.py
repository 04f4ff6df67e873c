"""Which dump serves a whole call: one that was made for such a call, in its step or another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.jobs.served import Ledger
from rlskip.skip.agreement import Mismatch
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.names import seems_to_shape
from rlskip.skip.prompt_rows import PromptRows
from rlskip.skip.run_dumps import PromptGroups, RunDumps
from rlskip.skip.step_calls import StepCalls
from rlskip.store import DumpMeta
from rlskip.store.index import PROMPTS
from rlskip.store.layout import Place


class CallMatching:
    def __init__(self, dumps: Dumps, run: RunDumps, ledger: Ledger) -> None:
        self._dumps, self._run, self._ledger = dumps, run, ledger

    def look_up(self, call: Call) -> Any:
        """What was made for this very call, and serves no other one."""
        config = self._dumps.local_config
        if config.action == SkipAction.REPEAT:
            return self._repeated(call)
        if call.identity.prompts is None:
            return None
        return self._in_step(call) or (self._elsewhere(call) if config.match == "run" else None)

    def _in_step(self, call: Call) -> Place | None:
        """The dump of the step itself that was made for such a call.

        One that records nothing of its call serves any, after those that were made for it.
        """
        visit: StepCalls = call.visit
        dumps = self._dumps
        unnamed: tuple[Place, DumpMeta] | None = None
        served = set[str]() if dumps.local_config.match == "step" else visit.served(call.name)
        call.again = ""
        for key in visit.candidates(call.name, call.place):
            if (meta := dumps.store.read_meta(key.step, key.call)) is None:
                continue
            if meta.identity is None:
                if key not in visit.taken:
                    unnamed = unnamed or (key, meta)
            elif key in visit.taken or self.has_served(key, call):
                if call.identity.fits(meta.identity):
                    served.add(meta.checksum)
            elif not dumps.identities.differences(call.identity, meta):
                call.meta = meta
                return key
        # These draws were trained on already: nor are the sessions resumed that they were made of,
        # if the step's journal is still there. What is generated instead leaves its own there, so
        # the call is named there by all that have served: by the next one there is one more.
        call.again = "-".join(["", *sorted(served)])
        if unnamed is None or dumps.by_prompt:
            return None
        dumps.identities.differences(call.identity, unnamed[1])  # says that it records none
        key, call.meta = unnamed
        return key

    def _elsewhere(self, call: Call) -> Place | None:
        """The nearest dump of another step that was made for such a call."""
        for key in self._run.find(call.identity.prompts, call.step):
            if self.has_served(key, call) or key in call.visit.taken:
                continue
            meta = self._dumps.store.read_meta(key.step, key.call)
            if meta is None or meta.identity is None:
                continue
            if not self._dumps.identities.differences(call.identity, meta):
                call.meta = meta
                return key
        return None

    def _repeated(self, call: Call) -> Place | None:
        """The dump of the call's place in the step itself, else in the nearest; else its last.

        A step without its first dump is none that could be repeated.
        """
        source, names, store = call.step, call.visit.in_order, self._dumps.store
        if "" not in names:
            if call.visit.listed:
                what = "the first dump of step %d is missing, so that its others are not repeated"
                self._dumps.notices.once(f"headless {call.step}", what, call.step)
            nearest = store.nearest(call.step)
            if nearest is None or nearest == call.step:  # written in this visit
                return None
            source, names = nearest, store.in_order(nearest)
        if not names:
            return None
        key = store.place(source, names[min(call.place, len(names) - 1)])
        call.meta = store.read_meta(key.step, key.call)
        return None if call.meta is None else key

    def has_served(self, key: Place, call: Call) -> bool:
        """Whether the run has trained on the draws of a dump, at whatever step, so that none does.

        Under ``match=step`` another visit of the step is the same step again. What follows another
        stage computes the same again, and by hand the first of equals is meant, served or not.
        """
        if self._dumps.local_config.match == "step" or call.stage.derived or call.by_hand:
            return False
        parts = self._run.parts_of(key)
        return any(self._ledger.has_served(part, call.writes) for part in parts)

    def take(self, call: Call, found: Any) -> None:
        """These serve the call, and no other one of the visit; by step a visit is enough."""
        if self._dumps.local_config.match != "step":
            call.parts = self._run.parts_of(found)
            self._ledger.serve(call.parts)
        for key, checksum in self._of_visit(call, found).items():
            call.visit.take(key, checksum)

    def give_back(self, call: Call, found: Any, *, is_lost: bool = False) -> None:
        """These did not serve the call after all: it failed, or they turned out to be unusable."""
        self._ledger.give_back(call.parts)
        for key in self._of_visit(call, found):
            call.visit.give_back(key, is_lost=is_lost and key == found)

    def _of_visit(self, call: Call, found: Place | PromptGroups) -> dict[Place, str]:
        """The dumps that serve the call and no other one of its visit, with their checksums."""
        if isinstance(found, Place):
            return {found: call.meta.checksum}
        own = self._dumps.directory, call.step
        return {one.key: one.checksum for one in found if (one.key.root, one.key.step) == own}

    def load(self, call: Call, found: Any) -> tuple[Any, Any]:
        """The rollouts that serve the call, and the generators' states.

        Raises DumpError where a dump is unusable.
        """
        meta, store = call.meta, self._dumps.store
        part = ("rollouts", "aside") if self._dumps.local_config.restore_rng else ("rollouts",)
        with call.timed():
            rollouts, *states = store.load(found.step, call=found.call, meta=meta, part=part)
            self._dumps.check_fields(rollouts, meta, call, found)
            rollouts = self._dumps.without_dropped(rollouts)
        call.is_served(found.step, store.size_of(meta), meta.info.get("seconds", 0.0))
        call.facts["call"] = found.call
        return rollouts, states[0] if states else None

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call that no dump fits; None: it is a miss.

        The first call of a step whose first dump is there is a mismatch, and so is a later one in
        whose own place a dump lies that has served none: the prompts are the same, and something
        else has changed. Where the dump of a first call is gone, it was lost, or its job was
        killed: whatever is called first may be that call.
        """
        visit, config, dumps = call.visit, self._dumps.local_config, self._dumps
        if config.action == SkipAction.REPEAT:
            return None
        there: Iterable[str] = [call.name]
        if not call.place:
            there = visit.listed if visit.is_whole else ()
        nearest = self._nearest(call, there)
        if nearest is None:
            if dumps.store.calls(visit.step):
                call.reason = "no unused dump of the step was made for such a call"
                if not visit.is_whole:
                    others = "the others were made for other calls"
                    call.reason = f"a dump of the step is missing, and {others}"
                elif call.identity.prompts is None:
                    call.reason = "its prompts cannot be compared"
                dumps.notices.generated(call)
            return None
        key, meta, differs = nearest
        # What an earlier stage returned is new where that had to run again.
        by_prompts = all(line.startswith("prompts: ") for line in differs)
        if config.on_mismatch == "error" and by_prompts and call.stage.derived:
            call.reason = "; ".join(differs)
            dumps.notices.generated(call)
            return None
        now, then = call.prompt_rows, PromptRows.recorded(meta.info.get(PROMPTS))
        if how := now.difference(then) if now and then else "":
            differs = [f"prompts: {how}" if d.startswith("prompts: ") else d for d in differs]
        n = len(visit.listed)
        of = f", the nearest of its {n} calls," if n > 1 and not call.place else ""
        call.reason = f"the dump of {key}{of} was made for another call: {'; '.join(differs)}"
        if call.identity.prompts is None:
            call.reason = f"the prompts cannot be compared with those of the dump of {key}"
        elsewhere, hint = None, ""
        if config.on_mismatch == "error" and config.match == "step" and by_prompts:
            elsewhere = next(self._run.find(call.identity.prompts, visit.step), None)
        if elsewhere is not None:
            call.reason += f"; they are the same prompts as those of {elsewhere}"
            if dumps.role != VALIDATION_ROLE:
                hint = f"skip.{dumps.role}.match=run looks in the run's other steps, too"
        return Mismatch(key, hint or self._ignoring(differs))

    def _ignoring(self, differs: Iterable[str]) -> str:
        """How to say that what differs does not count; empty if it seems to shape rollouts."""
        places = [line.partition(": ")[0] for line in differs]
        names = [place.removeprefix("arguments.") for place in places]
        for place, name in zip(places, names, strict=True):
            if place == name or seems_to_shape(name) or not re.fullmatch(r"[\w.]+", name):
                return ""
        typed = self._dumps.notices.typed("skip.ignore")
        return f"'{typed}=[{','.join(names)}]' says that it does not count"

    def _nearest(
        self, call: Call, names: Iterable[str]
    ) -> tuple[Place, DumpMeta, list[str]] | None:
        """The dump of the step that differs least from the call, and in what; None: none does.

        One that does not differ at all another job has dumped meanwhile, or it has served another
        step: then no other dump is taken for this call's either.
        """
        differing, store = [], self._dumps.store
        for key in (store.place(call.step, name) for name in names):
            meta = None if key in call.visit.taken else store.read_meta(key.step, key.call)
            if meta is not None and meta.identity is not None:
                differs = call.identity.differences(meta.identity)[0]
                if not differs and call.identity.prompts is not None:
                    return None
                differing.append((key, meta, differs))
        # By name where several differ in as much: not as the directory was listed.
        return min(differing, key=lambda one: (len(one[2]), one[0].order), default=None)
