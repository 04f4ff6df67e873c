"""Which dump serves a whole call: one that was made for such a call, in its step or another.

A call's name is the digest of its role, stage and prompts, and its number among the step's calls
of that digest. The name says where to look, the identity in ``meta.json`` judges: arguments, config
and what is ignored never move a dump. So equal calls keep their draws, and calls of other prompts
find their own dumps in any order.
"""

from __future__ import annotations

import functools
import heapq
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from rlskip.config.skip import VALIDATION_ROLE
from rlskip.jobs.records import job_id
from rlskip.skip.agreement import Mismatch
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.prompt_rows import PromptRows
from rlskip.store import DumpMeta, StepStore
from rlskip.store.index import PROMPTS
from rlskip.store.layout import Place


class Visit:
    """The calls of a step since the loop came to it, and which dumps serve them.

    Hold `lock` from :meth:`begin` until what serves the call is `taken`. The step's directory is
    listed once at most, so that a call costs the same in a step of 10 000. ``by_hand``, where
    nobody calls a decorated function, no ledger is told, and the first of equals is meant, served
    or not.
    """

    def __init__(self, dumps: Dumps, step: int, *, by_hand: bool = False) -> None:
        self._dumps, self._config = dumps, dumps.local_config
        # Under ``match=step`` a visit is enough: another one is the same step again.
        self._has_ledger = dumps.local_config.match != "step" and not by_hand
        self.step, self.lock, self.is_new = step, threading.RLock(), True
        # Heaps of the numbers that were given back, and the next: of each digest, and the places.
        self._free: dict[str, list[int]] = {}
        # The dumps that serve a call of the visit, with their checksums; empty: a call writes it.
        self.taken: dict[Place, str] = {}
        self._in_order, self._has_lost = list[str](), False

    @functools.cached_property
    def _store(self) -> StepStore:
        return self._dumps.store  # of several ranks it waits for the others

    @functools.cached_property
    def listed(self) -> dict[str, dict[str, None]]:
        """By digest the calls that had a dump when a call first found none at its own name."""
        found: dict[str, dict[str, None]] = {}
        for call in self._store.calls(self.step):
            found.setdefault(call.rpartition("-")[0], {})[call] = None
        return found

    @property
    def is_whole(self) -> bool:
        """Whether the step has its first dump, and none of it is known to be missing."""
        there = {*self._store.calls(self.step)}
        return "" in there and not self._has_lost and there >= {*self._store.quarantined(self.step)}

    @property
    def in_order(self) -> list[str]:
        """For a repeat: the calls with a sound dump, as they were made; not what the visit writes.

        Another job may have dumped the step while this one waited for it, so that a step without a
        first dump is looked at again.
        """
        head = self._store.place(self.step)
        is_there = os.path.isdir(head.directory)
        if not self._in_order and is_there and self.taken.get(head) != "":
            there = self._store.in_order(self.step)
            mine = {key.call for key, checksum in self.taken.items() if not checksum}
            self._in_order = [call for call in there if call not in mine]
        return self._in_order

    # -- the names of its calls --------------------------------------------------------------

    def begin(self, call: Call) -> None:
        """Give a new call its name, and its place among the calls of the visit."""
        digest, numbers = call.identity.digest(), list[int]()
        with self.lock:
            for of in (digest, ""):
                free = self._free.setdefault(of, [0])
                numbers.append(heapq.heappop(free))
                if not free:
                    free.append(numbers[-1] + 1)
        call.name, call.place = f"{digest}-{numbers[0]}", numbers[1]
        call.at_end(self.end, call)

    def end(self, call: Call) -> None:
        """If a call has failed or was cancelled, it is as if it had not been made.

        When it is made again, it is the same call.
        """
        if not call.failed:
            return
        with self.lock:  # a thread that outlives its cancelled task may end it at the same time
            name, found, written = call.name, call.found, call.written
            call.name, call.found, call.written = "", None, None
        if written is not None:  # the trainer got no such rollouts
            self._store.quarantine(self.step, "its call was cancelled", written.call)
            self.free(written)
        if found is not None:
            self.give_back(call, found)
        if name:
            digest, _, number = name.rpartition("-")
            with self.lock:
                heapq.heappush(self._free[digest], int(number))
                heapq.heappush(self._free[""], call.place)

    def candidates(self, call: Call) -> Iterator[Place]:
        """Where a dump of such a call may be: its own place, the head, others of its digest.

        The head is the own place of the visit's first call. Of those that are taken only its own is
        among them: it has served an equal call.
        """
        digest, _, number = call.name.rpartition("-")
        own = (call.name, "") if call.place else ("", call.name)
        for is_own in (True, False):
            for name in own if is_own else self.listed.get(digest, ()):
                key = self._store.place(self.step, name)
                if key not in self.taken or name == call.name or (number == "0" and not name):
                    yield key

    def write(self, call: Call, tried: str | None = None) -> str:
        """The name of the dump that the call writes: from now on it serves no other call.

        It is that of the dump that the call replaces, else its own, or the next one that is free:
        first after the one that was `tried`, which is another call's.
        """
        name, replaces = call.name if call.place else "", call.replaces
        if tried is not None:
            name, replaces = _next(call.name, tried), None
        with self.lock:
            key = self._store.place(self.step, name if replaces is None else replaces)
            while replaces is None and (key in self.taken or self._was_listed(key)):
                key = self._store.place(self.step, _next(call.name, key.call))
            self.taken[key] = ""
        call.writes = key if self._has_ledger and self._dumps.ledger.write(key) else None
        return key.call

    def _was_listed(self, key: Place) -> bool:
        listed = self.listed.get(key.call.rpartition("-")[0], ())
        return key.call in listed and self._store.read_meta(key.step, key.call) is not None

    def free(self, key: Place, *, is_lost: bool = False) -> None:
        """No call has this dump any more: it may serve another one, unless it is unusable."""
        with self.lock:
            self.taken.pop(key, None)
            self._has_lost |= is_lost
            self._in_order = [] if is_lost else self._in_order  # a repeat takes what is left

    # -- which dump serves a call -----------------------------------------------------------

    def look_up(self, call: Call) -> Any:
        """What was made for this very call, and serves no other one."""
        if self._dumps.repeats and not self._dumps.by_prompt:
            return self._repeated(call)
        if call.identity.prompts is None:
            return None
        own = self._in_step(call)
        return self._elsewhere(call) if own is None and self._config.match != "step" else own

    def _in_step(self, call: Call) -> Place | None:
        """The dump of the step itself that was made for such a call.

        One that records nothing of its call serves any, after those that were made for it.
        """
        differences = self._dumps.identities.differences
        unnamed: tuple[Place, DumpMeta] | None = None
        served, call.again = set[str](), ""
        for key in self.candidates(call):
            if (meta := self._store.read_meta(key.step, key.call)) is None:
                continue
            if meta.identity is None:
                if key not in self.taken:
                    unnamed = unnamed or (key, meta)
            elif self._is_taken(key, meta, call):
                if call.identity.fits(meta.identity):
                    served.add(meta.checksum)
            elif not differences(call.identity, meta):
                call.meta = meta
                return key
        if self._config.match != "step":  # later dumps of such a call may serve another one
            others = self.listed.get(call.name.rpartition("-")[0], ())
            keys = (self._store.place(self.step, name) for name in others)
            served.update(filter(None, map(self.taken.get, keys)))
        # These draws were trained on already: nor are the sessions resumed that they were made of,
        # if the step's journal is still there. What is generated instead leaves its own there, so
        # the call is named there by all that have served: by the next one there is one more.
        call.again = "-".join(["", *sorted(served)])
        if unnamed is None or self._dumps.by_prompt:
            return None
        differences(call.identity, unnamed[1])  # says that it records none
        key, call.meta = unnamed
        return key

    def _is_taken(self, key: Place, meta: DumpMeta, call: Call) -> bool:
        """Whether the dump serves a call of the visit or of the run, or is what one wrote.

        At the name that one is going to write, another job's may lie meanwhile.
        """
        if meta.info.get("job") == job_id():
            return key in self.taken or self.has_served(key, call)
        return bool(self.taken.get(key)) or self.has_served(key, call, writes=key)

    def _elsewhere(self, call: Call) -> Any:
        """The nearest dump of another step that was made for such a call; or groups of the run."""
        if self._dumps.by_prompt:
            return self._dumps.run.groups_for(call)
        differences = self._dumps.identities.differences
        for key in self._dumps.run.find(call.identity.prompts, call.step):
            is_left = key not in self.taken and not self.has_served(key, call)
            meta = self._store.read_meta(key.step, key.call) if is_left else None
            if meta and meta.identity and not differences(call.identity, meta):
                call.meta = meta
                return key
        return None

    def _repeated(self, call: Call) -> Place | None:
        """The dump of the call's place in the step itself, else in the nearest; else its last.

        A step without its first dump is none that could be repeated.
        """
        source, names, store = call.step, self.in_order, self._store
        if "" not in names:
            if self.listed:
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

    def has_served(self, key: Place, call: Call, *, writes: Place | None = None) -> bool:
        """Whether the run has trained on the draws of a dump, at whatever step, so that none does.

        What follows another stage computes the same again. That the call, or another, `writes` it
        does not count.
        """
        if not self._has_ledger or call.stage.derived:
            return False
        parts = self._dumps.run.parts_of(key)
        return any(self._dumps.ledger.has_served(part, writes or call.writes) for part in parts)

    def take(self, call: Call, found: Any) -> None:
        """These serve the call, and no other one of the visit."""
        if self._has_ledger:
            call.parts = self._dumps.run.parts_of(found)
            self._dumps.ledger.serve(call.parts)
        metas = {found: call.meta} if isinstance(found, Place) else found.metas
        for key, meta in metas.items():
            self.taken[key] = meta.checksum
        call.at_end(self.end, call)

    def give_back(self, call: Call, found: Any, *, is_lost: bool = False) -> None:
        """These did not serve the call after all: it failed, or they turned out to be unusable."""
        self._dumps.ledger.give_back(call.parts)
        for key in [found] if isinstance(found, Place) else found.metas:
            self.free(key, is_lost=is_lost and key == found)

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call that no dump fits; None: it is a miss.

        The first call of a step whose first dump is there is a mismatch, and so is a later one in
        whose own place a dump lies that has served none: the prompts are the same, and something
        else has changed. Where the dump of a first call is gone, it was lost, or its job was
        killed: whatever is called first may be that call.
        """
        config, dumps = self._config, self._dumps
        if dumps.by_prompt and call.identity.prompts is not None:
            dumps.run.refuse_odd(call, call.digests, call.identity.for_prompts(None))
            dumps.notices.generated(call)
            return None
        if dumps.repeats:
            return None
        there = [call.name]
        if not call.place:
            there = [*chain.from_iterable(self.listed.values())] if self.is_whole else []
        if not there or (nearest := self._nearest(call, there)) is None:
            if self.listed:
                call.reason = "no unused dump of the step was made for such a call"
                if not self.is_whole:
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
        of = f", the nearest of its {len(there)} calls," if len(there) > 1 else ""
        call.reason = f"the dump of {key}{of} was made for another call: {'; '.join(differs)}"
        if call.identity.prompts is None:
            call.reason = f"the prompts cannot be compared with those of the dump of {key}"
        elsewhere, hint = None, ""
        if config.on_mismatch == "error" and config.match == "step" and by_prompts:
            elsewhere = next(self._dumps.run.find(call.identity.prompts, self.step), None)
        if elsewhere is not None:
            call.reason += f"; they are the same prompts as those of {elsewhere}"
            if dumps.role != VALIDATION_ROLE:
                hint = f"skip.{dumps.role}.match=run looks in the run's other steps, too"
        return Mismatch(key, hint or dumps.ignoring(differs))

    def _nearest(
        self, call: Call, names: Iterable[str]
    ) -> tuple[Place, DumpMeta, list[str]] | None:
        """The dump of the step that differs least from the call, and in what; None: none does.

        One that does not differ at all another job has dumped meanwhile, or it has served another
        step: then no other dump is taken for this call's either.
        """
        differing, store = [], self._store
        for key in (store.place(call.step, name) for name in names):
            meta = None if key in self.taken else store.read_meta(key.step, key.call)
            if meta is not None and meta.identity is not None:
                differs = call.identity.differences(meta.identity)[0]
                if not differs and call.identity.prompts is not None:
                    return None
                differing.append((key, meta, differs))
        # By name where several differ in as much: not as the directory was listed.
        return min(differing, key=lambda one: (len(one[2]), one[0].order), default=None)


def _next(own: str, tried: str) -> str:
    """The name to try after one that was taken: the call's own, then the next number."""
    digest, (of, _, number) = own.rpartition("-")[0], tried.rpartition("-")
    return f"{digest}-{int(number) + 1}" if of == digest else own
