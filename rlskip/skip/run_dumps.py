"""The dumps of a run by their prompts: whole batches, and the rows of each prompt.

The run's index (:mod:`rlskip.store.index`) tells where to look. What serves is judged by the
``meta.json`` that lies there at that moment, and by the ledger (:mod:`rlskip.jobs.served`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip._human import counted
from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE
from rlskip.jobs.served import Ledger
from rlskip.skip.call import Call
from rlskip.skip.prompt_rows import row_count, some_rows
from rlskip.store import DumpMeta, Identity
from rlskip.store.index import QUEUED, Stamp, rows_of_prompts, stamp_at
from rlskip.store.layout import Place

_CACHED = 1 << 30
"""Bytes of dumps that are kept in memory, because the next batch needs other rows of them."""


@attrs.frozen
class Group:
    """The rows of a dump that were generated for one prompt: `count` of them from `start` on.

    Of a queue's dump ``start`` is the number of the group, whose ``count`` is 1 if it is complete,
    ``position`` that of its prompt in its step, and ``journal_name`` that in the step's journal. It
    was ``made`` for more than the prompt, and judged by the ``meta`` of its dump.
    """

    key: Place
    start: int
    count: int
    checksum: str
    digest: str
    made: Identity = attrs.field(eq=False)
    meta: DumpMeta = attrs.field(eq=False)
    position: int = attrs.field(eq=False, default=0)
    journal_name: str | None = attrs.field(eq=False, default=None)


class PromptGroups(tuple[Group, ...]):
    """Groups of single prompts, which together serve a call."""

    @property
    def metas(self) -> dict[Place, DumpMeta]:
        """The metas of the dumps that have them."""
        return {group.key: group.meta for group in self}

    def __str__(self) -> str:
        steps = Counter(group.key.step for group in self)
        named = ", ".join(f"{steps[step]} from step {step}" for step in sorted(steps))
        return f"the groups of {counted(len(self), 'prompt')} ({named})"


class RunDumps:
    """Finds dumps by their prompts. Hold the ledger's lock until what is found is taken.

    What this process wrote serves no prompt of it, and each group serves one prompt: the k-th time
    that a prompt is asked for it gets the k-th group, by step. A process that starts at a later
    step takes the groups of that step and of later ones first. With ``action=repeat`` a group
    serves again where a prompt has no other one left. Of validation only the dumps of the step
    itself serve: how the model was then is what they show.
    """

    def __init__(self, dumps: Any) -> None:
        # The stores of `dumps` are asked for late: a job starts before its ranks are known.
        self._dumps = dumps
        self._ledger: Ledger = dumps.ledger
        # By the hash of a prompt, and of a batch, its dumps: of each the place among the calls of
        # its step, and which of its groups is the prompt's. Some may have been replaced since.
        self._listed: dict[str, list[tuple[Place, int, int]]] = {}
        self._groups: dict[Place, tuple[Stamp | None, list[Group]]] = {}
        self._cache: OrderedDict[tuple[Place, str], tuple[Any, int]] = OrderedDict()
        #: The step of the loop's first call: where this process began.
        self.first: int | None = None

    def find(self, prompts_hash: str, step: int) -> Iterator[Place]:
        """The dumps with these prompts in other steps, the nearest first, as `repeat` prefers."""
        own: Path = self._dumps.directory
        with self._ledger.lock:  # calls of their own steps may be side by side
            self._refresh()
            listed = {key for key, *_ in self._listed.get(prompts_hash, ()) if key.root == own}

        def preference(key: Place) -> tuple[Any, ...]:
            return key.step > step, abs(step - key.step), key.order

        for key in sorted(listed, key=preference):
            is_still = self._dumps.store.index.dumps[key.name].batch == prompts_hash
            if key.step != step and is_still and stamp_at(key):
                yield key

    def choose(
        self, digests: Sequence[str | None], step: int, present: Identity | None
    ) -> list[Group | None]:
        """For each of the prompts with these hashes a group that is left; None where none is.

        They are made as the `present` call of a `step`, the prompts apart; None: in any way.
        """
        self._refresh()
        given: Counter[Group] = Counter()

        def uses(group: Group) -> int:
            return self._ledger.served[group] + given[group]

        found: list[Group | None] = []
        for digest in digests:
            groups = self._left_for(digest, step, present)
            if self._dumps.repeats:
                best = min(groups, key=uses, default=None)
            else:
                best = next((group for group in groups if not uses(group)), None)
            if best is not None:
                given[best] += 1
            found.append(best)
        return found

    def refuse_odd(self, call: Call, digests: Sequence[str | None], present: Identity) -> None:
        """Where each of a call's prompts has a group, but not one that fits: a mismatch."""
        found = self.choose(digests, call.step, None)
        odd = [group for group in found if group is not None and not present.fits(group.made)]
        if odd and None not in found:
            differs = present.differences(odd[0].made)[0]
            call.reason = self._dumps.reject_group(odd[0], differs)

    def groups_for(self, call: Call) -> PromptGroups | None:
        """A group for each of the call's prompts; without, its reason says what is lacking."""
        digests, present = call.digests, call.identity.for_prompts(None)
        chosen = self.choose(digests, call.step, present)
        found = PromptGroups(group for group in chosen if group is not None)
        if 0 < len(found) == len(digests):
            call.meta = found[0].meta
            return found
        lacking = [digest for digest, one in zip(digests, chosen, strict=True) if one is None]
        unknown = sum(not any(self._left_for(one, call.step, present)) for one in lacking)
        again = "prompts are asked for more often than they were dumped"
        reasons = {"prompts are in no dump of the run": unknown, again: len(lacking) - unknown}
        said = (f"{n} of {len(digests)} {reason}" for reason, n in reasons.items() if n)
        call.reason = ", ".join(said)
        return None

    def load(self, call: Call, found: PromptGroups) -> Any:
        """The groups as the stage would have returned them.

        Raises DumpError where a dump is unusable.
        """
        dumps = self._dumps
        with call.timed(), self._ledger.lock:  # calls may be side by side
            rollouts = self._assemble(call, found)
        for key, meta in found.metas.items():
            dumps.notices.changed(meta, key.root)
            if meta.identity is not None:
                present = call.identity.for_prompts(meta.identity.prompts)
                dumps.identities.differences(present, meta)  # logs what is noteworthy
        took = sum(
            group.meta.info.get("seconds", 0.0) / max(1, len(self.groups_of(group.key)))
            for group in found
        )
        call.is_served(found[0].key.step, sum(meta.stored for meta in found.metas.values()), took)
        return rollouts

    def _assemble(self, call: Call, found: PromptGroups) -> Any:
        """The groups as one batch."""
        from rlskip.skip.assembling import Assembly  # needs torch

        metas = found.metas
        numbers = {key: number for number, key in enumerate(metas)}
        rows: list[list[int]] = [[] for _ in metas]  # of each dump
        picks, owners = [], []
        for owner, group in enumerate(found):
            of_dump = rows[number := numbers[group.key]]
            picks += [(number, len(of_dump) + i) for i in range(group.count)]
            owners += [owner] * group.count
            of_dump += range(group.start, group.start + group.count)
        fields = RowFields.from_meta(found[0].meta)
        # One dump after the other: they may be too large to be in memory together.
        parts = []
        for (key, meta), of_dump in zip(metas.items(), rows, strict=True):
            rollouts = self._dumps.usable(self._loaded(key, meta), meta, call, key)
            fields = fields or RowFields.of({*map(str, columns_of(rollouts))})
            parts.append(some_rows(rollouts, fields, of_dump))
        assert fields is not None
        if len(found) == 1 and row_count(parts[0], fields) is None:  # of a single prompt
            self._cache.clear()  # what the trainer gets it may change
            return parts[0]
        of_batch = call.prompts, call.digests, owners, call.stage.totals
        dumps = functools.partial(map, self._loaded, metas.keys(), metas.values())
        dumped = [self.groups_of(key) for key in metas]
        is_whole = dumped == [[*found]] or 1 in map(len, dumped)
        asked = [] if is_whole else [*map(len, dumped)]
        return Assembly(parts, fields, picks, *of_batch, dumps, asked).batch()

    def parts_of(self, found: Place | PromptGroups) -> list[Place | Group]:
        """What serves when a dump of the run itself does, or when these groups do."""
        if isinstance(found, PromptGroups):
            return [*found]
        if not self._dumps.by_prompt:
            return [found]
        self._refresh()
        return [found, *self.groups_of(found)]

    def groups_of(self, key: Place) -> list[Group]:
        """The groups of the dump that lies there, if it records them."""
        stamp, known = stamp_at(key), self._groups.get(key)
        if known is None or known[0] != stamp:
            groups = groups_in(key, self._dumps.stores[key.root].read_meta(key.step, key.call))
            known = self._groups[key] = stamp, [group for group in groups if group.digest]
        return known[1]

    def _loaded(self, key: Place, meta: DumpMeta) -> Any:
        """A dump, which the next batch may need, too."""
        name = key, meta.checksum
        if name not in self._cache:
            store = self._dumps.stores[key.root]
            self._cache[name] = store.load(key.step, call=key.call, meta=meta), meta.nbytes
        self._cache.move_to_end(name)
        while len(self._cache) > 1 and sum(n for _, n in self._cache.values()) > _CACHED:
            self._cache.popitem(last=False)
        return self._cache[name][0]

    def _refresh(self) -> None:
        """Read the indices on; after a directory was listed again, index what it lacks."""
        for store in self._dumps.stores.values():
            index, shard = store.index, (store.rank, store.world_size)
            lines, by_step, before = index.refresh(), store.listed_by_step(), index.mended
            if by_step is not before:
                # At first each line is compared with its dump. Later a dump that is replaced has a
                # new line, unless its process was killed before: then it is not found until the
                # next run.
                known = {} if before is None else index.dumps
                every = [one for family in [*by_step.values()] for one in [*family]]  # they grow
                mine = [one for one in every if (one.rank, one.world_size) == shard]
                some = [one for one in mine if one.name not in known]
                index.mended = by_step
                lines += index.mend(some, lambda p: store.read_meta(p.step, p.call))  # noqa: B023
            for line in lines:
                place = Place.parse(store.directory, line.name)
                if place is not None and (place.rank, place.world_size) == shard:
                    nth = line.about.get("info", {}).get("place", 0)
                    for digest, i in [(line.batch, 0), *zip(line.prompts, itertools.count())]:
                        self._listed.setdefault(digest, []).append((place, nth, i))

    def _left_for(self, digest: str | None, step: int, present: Identity | None) -> Iterator[Group]:
        """The complete ones that were generated for a prompt, the first one to take first."""
        first, is_validation = self.first or 0, self._dumps.role == VALIDATION_ROLE
        roots = [*self._dumps.stores]
        listed = [
            (key.step < first, roots.index(key.root), key.step, nth, key.call, i, key)
            for key, nth, i in self._listed.get(digest or "", ())
            if key not in self._ledger.written
            if not is_validation or (key.root, key.step) == (roots[0], step)
        ]
        for *_, i, key in sorted(listed, key=lambda one: one[:-1]):
            for group in self.groups_of(key)[i : i + 1]:  # of another dump, it may be by now
                fits = present is None or present.fits(group.made)
                if group.digest == digest and group.count and fits:
                    yield group


def groups_in(key: Place, meta: DumpMeta | None) -> list[Group]:
    """The groups that a dump records; none where its ``meta.json`` describes none.

    Of a queue's the digest is empty where only uids told the prompts apart.
    """
    if meta is None or meta.identity is None:
        return []
    made, info = meta.identity.for_prompts(None), meta.info
    found: list[Any] = [(*rows, 0, None) for rows in rows_of_prompts(info)]
    if QUEUED in info:
        try:
            told = enumerate(info[QUEUED])
            found = [(c or "", i, int(w is True), at, name) for i, (c, at, w, name) in told]
        except (TypeError, ValueError):
            return []
    groups = [Group(key, at, n, meta.checksum, d, made, meta, *rest) for d, at, n, *rest in found]
    sound = all((type(one.digest), type(one.position)) == (str, int) for one in groups)
    sound = sound and all(isinstance(one.journal_name, str | None) for one in groups)
    return groups if sound else []
