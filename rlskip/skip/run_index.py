"""The dumps of a run by their prompts: whole batches, and the rows of each prompt."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from rlskip.skip.prompt_rows import PromptRows
from rlskip.skip.visit import Found
from rlskip.store import DumpMeta, Identity, StepStore

ROWS_PER_PROMPT = "rows_per_prompt"
"""The entry of a dump's `info` that has the number of rows of each of its prompts.

It is one number where all have as many, and absent where the rows do not tell.
"""


@attrs.frozen
class Group:
    """The rows of a dump that were generated for one prompt: `count` of them from `start` on.

    ``checksum`` is the dump's. ``size`` is the directory of its run, if that has another number of
    prompts a step.
    """

    found: Found
    start: int
    count: int
    checksum: str
    size: str = ""


@attrs.frozen
class Gathered:
    """A group for each prompt of a call, which together serve it.

    ``is_whole`` tells whether they are all groups of one dump, in order.
    """

    groups: tuple[Group, ...]
    is_whole: bool = False

    def __str__(self) -> str:
        steps = Counter(group.found.step for group in self.groups)
        named = ", ".join(f"{steps[step]} from step {step}" for step in sorted(steps))
        return f"the groups of {len(self.groups)} prompts ({named})"


@attrs.frozen
class Missing:
    """Of how many prompts of a call no dump is left, and of how many of these none ever was."""

    prompts: int
    missing: int
    unknown: int

    def __str__(self) -> str:
        said = []
        if self.unknown:
            said.append(f"{self.unknown} of {self.prompts} prompts are in no dump of the run")
        if again := self.missing - self.unknown:
            said.append(
                f"{again} of {self.prompts} prompts are asked for more often than they were dumped"
            )
        return ", ".join(said)


@attrs.frozen(eq=False)
class _Entry:
    """A group, and what its dump was made for besides the prompts."""

    group: Group
    made: Identity


class RunIndex:
    """Reads the meta of each dump once, when it is first needed.

    Hold `lock` from :meth:`gather` until :meth:`take`.

    What this process wrote serves no prompt of it, and each group serves one prompt: the k-th time
    that a prompt is asked for it gets the k-th group, by step. A process that starts at a later
    step takes the groups of that step and of later ones first.

    Parameters
    ----------
    stores
        Returns where dumps are: "" is the run's own store, the others, by their directory, are
        those of the same run with other numbers of prompts a step.
    """

    def __init__(self, stores: Callable[[], Mapping[str, StepStore]]) -> None:
        self.lock = threading.RLock()
        self._list_stores = stores
        self._known: Mapping[str, StepStore] | None = None
        self._read: set[tuple[str, int]] = set()
        self._by_prompts: dict[str, list[Found]] = {}
        self._by_prompt: dict[str, list[_Entry]] = {}
        self._groups: dict[tuple[str, Found], Sequence[Group]] = {}
        self._conditions: list[Identity] = []
        self._uses: Counter[Group] = Counter()
        self._written: set[Found] = set()
        self._first: int | None = None
        #: How many dumps do not record which rows are which prompt's.
        self.mute = 0

    def find(self, prompts_hash: str, step: int) -> list[Found]:
        """The dumps with these prompts in other steps, the nearest first, as `repeat` prefers."""
        own = self._stores[""]
        with self.lock:
            for other in own.listed():
                if other != step:
                    self._read_step("", own, other)
            found = [one for one in self._by_prompts.get(prompts_hash, ()) if one.step != step]
        return sorted(found, key=lambda one: one.order(step))

    def begin(self, step: int) -> None:
        """Note the step of a call: that of the first is where this process began."""
        self._first = step if self._first is None else self._first

    def gather(
        self,
        digests: Sequence[str],
        step: int,
        fits: Callable[[Identity], bool],
        *,
        alone: bool = False,
        again: bool = False,
    ) -> Gathered | Missing:
        """A group for each of the prompts with these hashes, or how many have none.

        Parameters
        ----------
        fits
            Whether dumps that were made for this, the prompts apart, may serve.
        alone
            Whether only the dumps of `step` itself may.
        again
            Whether a group may serve several times, where a prompt has no other one left.
        """
        for size, store in self._stores.items():
            for other in [step] if alone else store.listed():
                self._read_step(size, store, other)
        allowed = {id(made) for made in self._conditions if fits(made)}
        uses, groups, unknown = Counter(self._uses), list[Group](), 0
        for digest in digests:
            entries = [
                entry
                for entry in self._by_prompt.get(digest, ())
                if id(entry.made) in allowed and not (alone and entry.group.found.step != step)
            ]
            unknown += not entries
            left = [e for e in entries if again or not uses[e.group]]
            best = min(left, key=lambda e: (uses[e.group], self._order(e.group)), default=None)
            if best is not None:
                uses[best.group] += 1
                groups.append(best.group)
        if len(groups) == len(digests):
            first = groups[0]
            whole = self._groups.get((first.size, first.found), ())
            return Gathered(tuple(groups), is_whole=[*whole] == groups)
        return Missing(len(digests), len(digests) - len(groups), unknown)

    def made_for(self, group: Group) -> Identity:
        """What the dump of a group was made for; the prompts are not part of it."""
        return next(e.made for es in self._by_prompt.values() for e in es if e.group == group)

    def groups_in(self, group: Group) -> int:
        """How many groups the dump of `group` has."""
        return len(self._groups.get((group.size, group.found), ()))

    def store_of(self, group: Group) -> StepStore:
        return self._stores[group.size]

    def take(self, found: Found | Gathered) -> None:
        """A whole dump of the run itself, or these groups, serve a call."""
        if isinstance(found, Gathered):
            self._uses.update(found.groups)
        else:
            self._read_step("", self._stores[""], found.step)
            self._uses.update(self._groups.get(("", found), ()))

    def is_used(self, found: Found) -> bool:
        """Whether a group of a dump of the run itself has served."""
        return any(self._uses[group] for group in self._groups.get(("", found), ()))

    def give_back(self, found: Found | Gathered) -> None:
        """Its dumps turned out not to serve the call; read what is left of their steps again."""
        with self.lock:
            own = self._groups.get(("", found), ()) if isinstance(found, Found) else found.groups
            self._uses.subtract(own)
            for group in own:
                self._forget(group.size, group.found.step)

    def writes(self, found: Found) -> None:
        """This process is going to write a dump: before it is there, as it may be in a thread."""
        with self.lock:
            self._written.add(found)

    def wrote(self, found: Found) -> None:
        """This process has written a dump."""
        with self.lock:
            self._written.add(found)
            self._forget("", found.step)

    # -- within --------------------------------------------------------------------------

    @property
    def _stores(self) -> Mapping[str, StepStore]:
        with self.lock:
            if self._known is None:  # a job starts before its ranks are known
                self._known = self._list_stores()
            return self._known

    def _order(self, group: Group) -> tuple[Any, ...]:
        step = group.found.step
        return step < (self._first or 0), group.size, step, group.found.number, group.start

    def _forget(self, size: str, step: int) -> None:
        """Read a step again when it is next needed."""
        if (size, step) not in self._read:
            return
        self._read.discard((size, step))
        if not size:
            for some in self._by_prompts.values():
                some[:] = [one for one in some if one.step != step]
        for entries in self._by_prompt.values():
            entries[:] = [e for e in entries if (e.group.size, e.group.found.step) != (size, step)]

    def _read_step(self, size: str, store: StepStore, step: int) -> None:
        if (size, step) in self._read:
            return
        self._read.add((size, step))
        for number in store.calls(step):
            found = Found(step, number)
            meta = store.read_meta(step, found.part)
            if meta is None or meta.identity is None or not meta.identity.prompts_hash:
                continue
            if not size:
                self._by_prompts.setdefault(meta.identity.prompts_hash, []).append(found)
            if size or found not in self._written:
                self._add(size, found, meta, meta.identity)

    def _add(self, size: str, found: Found, meta: DumpMeta, identity: Identity) -> None:
        prompts = PromptRows.recorded(meta.info.get("prompts"))
        groups = [] if prompts is None else [*_groups(found, size, meta, len(prompts.digests))]
        if prompts is None or not groups:
            self.mute += 1
            return
        made = attrs.evolve(identity, prompts_hash=None)
        same = next((known for known in self._conditions if known == made), None)
        if same is None:
            self._conditions.append(same := made)
        self._groups[size, found] = groups
        for digest, group in zip(prompts.digests, groups, strict=True):
            self._by_prompt.setdefault(digest, []).append(_Entry(group, same))


def _groups(found: Found, size: str, meta: DumpMeta, prompts: int) -> Iterator[Group]:
    """The groups of a dump, as far as it records them."""
    counts = meta.info.get(ROWS_PER_PROMPT)
    if type(counts) is int:
        counts = [counts] * prompts
    if not isinstance(counts, list) or len(counts) != prompts:
        return
    start = 0
    for count in counts:
        if type(count) is not int or count < 1:
            return
        yield Group(found, start, count, meta.checksum, size)
        start += count
