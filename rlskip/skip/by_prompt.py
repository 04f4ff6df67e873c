"""Calls that are served prompt by prompt, where batches are composed otherwise than dumped."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import attrs

from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.skip.assembling import Source, assembled
from rlskip.skip.by_call import CallMatching
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.run_index import Gathered, Group, Missing, RunIndex
from rlskip.skip.visit import Found
from rlskip.store import CorruptDumpError, DumpMeta, Identity

log = logging.getLogger(__name__)

_CACHED = 1 << 30
"""Bytes of dumps that are kept in memory, because the next batch needs other rows of them."""


class PromptMatching(CallMatching):
    """Finds and loads the groups of a call's prompts, in whatever dumps of the run they are."""

    def __init__(self, dumps: Dumps, index: RunIndex, own_steps: bool) -> None:
        super().__init__(dumps, index, own_steps)
        self._cache: OrderedDict[Group, tuple[Any, DumpMeta]] = OrderedDict()

    def offers(self, call: Call) -> Iterator[Found | Gathered]:
        """The dumps of this very call, then a group for each of its prompts."""
        if call.identity.prompts_hash is not None:
            for found in call.visit.fitting(call.identity):
                # A visit of its own does not know what other calls were served.
                if not (self._own_steps and self._index.is_used(found)):
                    yield found
            if (gathered := self._find(call)) is not None:
                yield gathered

    def _find(self, call: Call) -> Gathered | None:
        """A group for each prompt of the call; None, with the reason in the call, if some lack."""
        identity: Identity = attrs.evolve(call.identity, prompts_hash=None)
        found = self._gather(call, lambda made: not identity.differences(made)[0])
        if isinstance(found, Gathered):
            return found
        call.reason = "its prompts cannot be told apart" if found is None else str(found)
        return None

    def judge(self, call: Call) -> Found | Gathered | None:
        """What becomes of a call for whose prompts there are no groups.

        Prompts without a dump are generated, and the whole batch with them. Where all have one that
        was made in another way, ``on_mismatch`` decides; None: the call is generated.

        Raises
        ------
        MismatchError
            ``on_mismatch`` is ``error``.
        """
        if call.identity.prompts_hash is None:
            return super().judge(call)
        found = self._gather(call, lambda made: True)
        if isinstance(found, Gathered):
            identity = attrs.evolve(call.identity, prompts_hash=None)
            differing = (
                (group, must)
                for group in found.groups
                if (must := identity.differences(self._index.made_for(group))[0])
            )
            first, must = next(differing, (None, []))
            if first is not None:
                what = f"{found} were made for other calls: {'; '.join(must)}"
                call.reason = what
                policy = self._dumps.local_config.on_mismatch
                if policy != "regenerate" and self._dumps.accept_mismatch(what, first.found):
                    return found
        if self._index.mute:
            self._dumps.notices.once(
                "mute", "%d dumps of the run do not record which rows are which prompt's, as those "
                "of rlskip 0.2: they serve only the very batch that they were made for",
                self._index.mute,
            )  # fmt: skip
        log.info(
            "rlskip: role %s: step %d, call %d is generated: %s",
            self._dumps.role, call.step, call.place, call.reason,
        )  # fmt: skip
        return None

    def take(self, call: Call, found: Any) -> None:
        self._index.take(found)
        if isinstance(found, Found):
            super().take(call, found)
            return
        for group in found.groups:
            if not group.size and group.found.step == call.step:
                call.visit.mark_present(group.found.number)

    def load(self, call: Call, found: Gathered) -> tuple[Any, DumpMeta]:
        """The groups put together as the stage would have returned them, and one dump's meta.

        Raises
        ------
        DumpError
            A dump is unusable.
        AssemblyError
            The rows cannot be one batch.
        """
        with call.timed(), self._index.lock:  # calls may be side by side
            metas: dict[Group, DumpMeta] = {}
            first = _dump_of(found.groups[0])
            if found.is_whole:
                whole, metas[first] = self._loaded(first)
                self._cache.pop(first)  # what the trainer gets it may change
                rollouts = self._dumps.without_dropped(whole)
            else:
                rollouts = self._assemble(call, found, metas)
            self._dumps.check_fields(rollouts, metas[first], call)
        for meta in metas.values():
            if meta.identity is not None:
                present = attrs.evolve(call.identity, prompts_hash=meta.identity.prompts_hash)
                self._dumps.differences(present, meta)  # logs what is noteworthy
        took = sum(
            metas[_dump_of(group)].info.get("seconds", 0.0) / max(1, self._index.groups_in(group))
            for group in found.groups
        )
        call.facts.update(
            source=first.found.step,
            bytes=sum(meta.stored for meta in metas.values()),
            seconds_saved=took - call.seconds if took else 0.0,
        )
        return rollouts, metas[first]

    def _gather(self, call: Call, fits: Any) -> Gathered | Missing | None:
        prompts = call.summarize_prompts()
        if prompts is None or not prompts.digests:
            return None
        return self._index.gather(
            prompts.digests,
            call.step,
            fits,
            # How the model was then is what a validation shows.
            alone=self._dumps.role == VALIDATION_ROLE,
            again=self._dumps.local_config.action == SkipAction.REPEAT,
        )

    def _assemble(self, call: Call, found: Gathered, metas: dict[Group, DumpMeta]) -> Any:
        """The groups as one batch; `metas` gets the meta of each group's dump."""
        rows: dict[Group, list[int]] = {}
        picks = []
        numbers: dict[Group, int] = {}
        for group in found.groups:
            dump = _dump_of(group)
            of_dump = rows.setdefault(dump, [])
            number = numbers.setdefault(dump, len(numbers))
            picks += [(number, len(of_dump) + i) for i in range(group.count)]
            of_dump += range(group.start, group.start + group.count)
        # One dump after the other: they may be too large to be in memory together.
        sources = []
        for dump, some in rows.items():
            rollouts, meta = self._loaded(dump)
            metas[dump] = meta
            rollouts = self._dumps.without_dropped(rollouts)
            names = {str(name) for name in columns_of(rollouts)}
            fields = RowFields.from_meta(meta) or RowFields.of(names)
            sources.append(Source.of(rollouts, fields, some))
        prompts = call.summarize_prompts()
        digests = prompts.digests if prompts else []
        counts = [group.count for group in found.groups]
        return assembled(sources, picks, call.prompts, digests, counts, call.stage.totals)

    def _loaded(self, dump: Group) -> tuple[Any, DumpMeta]:
        """A dump, which the next batch may need, too."""
        if dump not in self._cache:
            store = self._index.store_of(dump)
            rollouts, meta = store.load_with_meta(dump.found.step, part=dump.found.part)
            if meta.checksum != dump.checksum:
                where = str(store.directory / dump.found.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self._cache[dump] = rollouts, meta
        self._cache.move_to_end(dump)
        loaded = self._cache[dump]
        while len(self._cache) > 1 and self._cached_bytes() > _CACHED:
            self._cache.popitem(last=False)
        return loaded

    def _cached_bytes(self) -> int:
        return sum(meta.nbytes for _, meta in self._cache.values())


def _dump_of(group: Group) -> Group:
    """What the groups of one dump have in common."""
    return attrs.evolve(group, start=0, count=0)
