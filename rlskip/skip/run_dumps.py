"""The dumps of a run by their prompts: whole batches, and the rows of each prompt.

The run's index (:mod:`rlskip.store.index`) tells where to look. What serves is judged by the
``meta.json`` that lies there at that moment, and by the ledger (:mod:`rlskip.jobs.served`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from rlskip.jobs.served import Ledger
from rlskip.skip.step_calls import Key
from rlskip.store import DumpMeta, Identity, StepStore
from rlskip.store.index import QUEUED, Index, IndexedDump, Stamp, rows_of_prompts, stamp_at
from rlskip.store.layout import Place


@attrs.frozen
class Group:
    """The rows of a dump that were generated for one prompt: `count` of them from `start` on.

    Of a queue's dump ``start`` is the number of the group, whose ``count`` is 1 if it is complete,
    and ``position`` that of its prompt in its step. It was ``made`` for more than the prompt.
    """

    key: Key
    start: int
    count: int
    checksum: str
    digest: str
    made: Identity = attrs.field(eq=False)
    position: int = attrs.field(eq=False, default=0)


@attrs.frozen
class PromptGroups:
    """A group for each prompt of a call, which together serve it."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        steps = Counter(group.key.step for group in self.groups)
        named = ", ".join(f"{steps[step]} from step {step}" for step in sorted(steps))
        return f"the groups of {len(self.groups)} prompts ({named})"


@attrs.frozen(eq=False)
class _Listed:
    """A dump that the index lists; `order` is that in which prompts take its groups."""

    key: Key
    line: IndexedDump
    order: tuple[str, int, int, str]


class _OneSize:
    """What the index lists of one directory: that of the run, or of another number of prompts.

    Lines that a later one has replaced are passed over when they are met.
    """

    def __init__(self, store: StepStore, size: str) -> None:
        self.store, self.size = store, size
        self.index = Index(store.directory)
        self.by_batch: dict[str, list[_Listed]] = {}
        self.by_prompt: dict[str, list[tuple[_Listed, int]]] = {}
        self._mended: Mapping[int, Sequence[Place]] | None = None

    def refresh(self) -> None:
        """Read the index on; after the directory was listed again, index what it lacks."""
        self._add(self.index.refresh())
        listed, store = self.store.listed_by_step(), self.store
        if listed is self._mended:
            return
        # At first each line is compared with its dump. Later a dump that is replaced has a new
        # line, unless its process was killed before: then it is not found until the next run.
        known = {} if self._mended is None else self.index.dumps
        places = [place for family in [*listed.values()] for place in [*family]]  # threads add some
        some = [one for one in places if self._is_mine(one) and one.name not in known]
        self._mended = listed
        if some:
            self._add(self.index.mend(some, lambda p: store.read_meta(p.step, p.call)))

    def stamp(self, key: Key) -> Stamp | None:
        store = self.store
        place = Place(store.directory, key.step, key.call, store.rank, store.world_size)
        return stamp_at(place)

    def is_last(self, listed: _Listed) -> bool:
        return self.index.dumps.get(listed.line.name) is listed.line

    def _is_mine(self, place: Place) -> bool:
        return (place.rank, place.world_size) == (self.store.rank, self.store.world_size)

    def _add(self, lines: Iterable[IndexedDump]) -> None:
        for line in lines:
            place = Place.parse(self.store.directory, line.name)
            if place is None or not self._is_mine(place):
                continue
            nth = line.about.get("info", {}).get("place", 0)  # of the call in its step
            order = self.size, place.step, nth, place.name
            listed = _Listed(Key(place.step, place.call, self.size), line, order)
            if line.batch:
                self.by_batch.setdefault(line.batch, []).append(listed)
            for i, digest in enumerate(line.prompts):
                self.by_prompt.setdefault(digest, []).append((listed, i))


class RunDumps:
    """Finds dumps by their prompts. Hold the ledger's lock until what is found is taken.

    What this process wrote serves no prompt of it, and each group serves one prompt: the k-th time
    that a prompt is asked for it gets the k-th group, by step. A process that starts at a later
    step takes the groups of that step and of later ones first. `stores` returns where dumps are
    (:attr:`~rlskip.skip.dumps.Dumps.stores`): a job starts before its ranks are known.
    """

    def __init__(self, stores: Callable[[], Mapping[str, StepStore]], ledger: Ledger) -> None:
        self._stores, self._ledger = stores, ledger
        self._sizes: dict[str, _OneSize] = {}
        self._groups: dict[Key, tuple[Stamp | None, list[Group]]] = {}
        #: The step of the loop's first call: where this process began.
        self.first: int | None = None

    def find(self, prompts_hash: str, step: int) -> Iterator[Key]:
        """The dumps with these prompts in other steps, the nearest first, as `repeat` prefers."""
        with self._ledger.lock:  # calls of their own steps may be side by side
            (own,) = self._refreshed([""])
            found = [one for one in own.by_batch.get(prompts_hash, ()) if one.key.step != step]

        def preference(one: _Listed) -> tuple[Any, ...]:
            return one.key.step > step, abs(step - one.key.step), one.key.place.order

        for one in sorted(found, key=preference):
            if own.is_last(one) and own.stamp(one.key):
                yield one.key

    def choose(
        self,
        digests: Sequence[str | None],
        fits: Callable[[Group], bool],
        *,
        only: int | None = None,
        again: bool = False,
    ) -> list[Group | None]:
        """For each of the prompts with these hashes a group that is left; None where none is.

        A group `fits` if it was made for this, the prompts apart. With `only` the dumps of that
        step alone may serve; and a group serves `again` where a prompt has no other one left.
        """
        self._refreshed(self._stores())
        given: Counter[Group] = Counter()

        def uses(group: Group) -> int:
            return self._ledger.served[group] + given[group]

        found: list[Group | None] = []
        for digest in digests:
            groups = self._groups_for(digest, only) if digest else iter(())
            if again:
                groups = iter(sorted(groups, key=uses))
            fitting = (g for g in groups if g.count and (again or not uses(g)) and fits(g))
            if (best := next(fitting, None)) is not None:
                given[best] += 1
            found.append(best)
        return found

    def why_none(
        self, lacking: Sequence[str], asked: int, fits: Callable[[Group], bool], only: int | None
    ) -> str:
        """Why :meth:`choose` found no group for these of the `asked` prompts."""
        unknown, said = sum(not any(map(fits, self._groups_for(one, only))) for one in lacking), []
        if unknown:
            said.append(f"{unknown} of {asked} prompts are in no dump of the run")
        if again := len(lacking) - unknown:
            what = "prompts are asked for more often than they were dumped"
            said.append(f"{again} of {asked} {what}")
        return ", ".join(said)

    def groups_of(self, key: Key) -> list[Group]:
        """The groups of the dump that lies there, if it records them."""
        stamp = self._sizes[key.size].stamp(key)
        known = self._groups.get(key)
        if known is None or known[0] != stamp:
            known = self._groups[key] = stamp, self._read(key)
        return known[1]

    def parts_of(self, found: Key | PromptGroups) -> list[Key | Group]:
        """What serves when a dump of the run itself does, or when these groups do."""
        if isinstance(found, PromptGroups):
            return [*found.groups]
        self._refreshed([found.size])
        return [found, *self.groups_of(found)]

    def _refreshed(self, sizes: Iterable[str]) -> list[_OneSize]:
        for size in (wanted := [*sizes]):
            if size not in self._sizes:
                self._sizes[size] = _OneSize(self._stores()[size], size)
            self._sizes[size].refresh()
        return [self._sizes[size] for size in wanted]

    def _groups_for(self, digest: str, only: int | None) -> Iterator[Group]:
        """Those that were generated for a prompt, the first one to take first."""
        first = self.first or 0
        listed = [
            (dump.key.step < first, dump.order, i, dump)
            for size in self._sizes.values()
            for dump, i in size.by_prompt.get(digest, ())
            if size.is_last(dump) and dump.key not in self._ledger.written
            if only is None or (not size.size and dump.key.step == only)
        ]
        for _, _, i, dump in sorted(listed, key=lambda one: one[:3]):
            groups = self.groups_of(dump.key)
            if i < len(groups) and groups[i].digest == digest:
                yield groups[i]

    def _read(self, key: Key) -> list[Group]:
        meta = self._sizes[key.size].store.read_meta(key.step, key.call)
        if meta is None or meta.identity is None:
            return []
        if QUEUED in meta.info:
            return [group for group in queued_groups(key, meta) if group.digest]
        made, rows = meta.identity.for_prompts(None), rows_of_prompts(meta.info)
        return [Group(key, at, n, meta.checksum, digest, made) for digest, at, n in rows]


def queued_groups(key: Key, meta: DumpMeta) -> list[Group]:
    """The groups of a queue that a dump records; none where its ``meta.json`` describes none.

    Their digest is empty where only uids told their prompts apart.
    """
    made, groups = (meta.identity or Identity()).for_prompts(None), []
    try:
        for i, (content, position, is_complete) in enumerate(meta.info[QUEUED]):
            digest, count = content or "", int(is_complete is True)
            if (type(digest), type(position)) != (str, int):
                return []
            groups.append(Group(key, i, count, meta.checksum, digest, made, position))
    except (KeyError, TypeError, ValueError):
        return []
    return groups
