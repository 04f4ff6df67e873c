"""Which dumps of a run serve a call prompt by prompt: groups of its prompts, wherever they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.jobs.served import Ledger
from rlskip.skip.agreement import Mismatch
from rlskip.skip.assembling import Assembly
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps
from rlskip.skip.matching import CallMatching, LoadedDump
from rlskip.skip.prompt_rows import Source
from rlskip.skip.run_dumps import Group, PromptGroups, RunDumps
from rlskip.skip.step_calls import Key
from rlskip.store import AbsentDumpError, CorruptDumpError, DumpMeta

_CACHED = 1 << 30
"""Bytes of dumps that are kept in memory, because the next batch needs other rows of them."""


class PromptMatching(CallMatching):
    def __init__(self, dumps: Dumps, run: RunDumps, ledger: Ledger) -> None:
        super().__init__(dumps, run, ledger)
        self._cache: OrderedDict[Key, tuple[Any, DumpMeta]] = OrderedDict()

    def look_up(self, call: Call) -> Key | PromptGroups | None:
        """The dump of this very call, else a group for each of its prompts."""
        if call.identity.prompts is None:
            return None
        own = self._in_step(call)
        if own is not None:
            return own
        identity = call.identity.for_prompts(None)
        return self._gather(call, lambda group: identity.fits(group.made))

    def has_served(self, key: Key, call: Call) -> bool:
        return any(self._ledger.has_served(part, call.writes) for part in self._run.parts_of(key))

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call for whose prompts there are no groups: it is generated.

        Where all have one that was made in another way, ``on_mismatch`` decides.
        """
        if call.identity.prompts is None:
            return super().judge(call)
        why, found = call.reason, self._gather(call, lambda group: True)
        if found is not None:
            identity = call.identity.for_prompts(None)
            odd = next((group for group in found.groups if not identity.fits(group.made)), None)
            if odd is not None:
                must = "; ".join(identity.differences(odd.made)[0])
                call.reason = f"{found} were made for other calls: {must}"
                self._dumps.reject(call.reason, odd.key, replaces=False)
        call.reason = why if found is None else call.reason
        self._dumps.notices.generated(call, call.reason)
        return None

    def take(self, call: Call, found: Any) -> None:
        call.parts = self._run.parts_of(found)
        self._ledger.serve(call.parts)
        for key, checksum in _of_step(call, found).items():
            call.visit.take(key, checksum)

    def give_back(self, call: Call, found: Any, *, is_lost: bool = False) -> None:
        self._ledger.give_back(call.parts)
        for key in [found] if isinstance(found, Key) else _of_step(call, found):
            call.visit.give_back(key, is_lost=is_lost and key == found)

    def load(self, call: Call, found: Any) -> LoadedDump:
        """As `CallMatching.load`, or the groups as the stage would have returned them."""
        if not isinstance(found, PromptGroups):
            return super().load(call, found)
        with call.timed(), self._ledger.lock:  # calls may be side by side
            metas: dict[Key, DumpMeta] = {}
            first = found.groups[0].key
            rollouts = self._assemble(call, found, metas)
        for dump, meta in metas.items():
            self._dumps.notices.changed(meta, self._dumps.stores[dump.size].directory)
            if meta.identity is not None:
                present = call.identity.for_prompts(meta.identity.prompts)
                self._dumps.identities.differences(present, meta)  # logs what is noteworthy
        took = sum(
            metas[group.key].info.get("seconds", 0.0) / max(1, len(self._run.groups_of(group.key)))
            for group in found.groups
        )
        call.facts.update(
            source=first.step,
            bytes=sum(meta.stored for meta in metas.values()),
            seconds_saved=took - call.seconds if took else 0.0,
        )
        return rollouts, metas[first], None

    def _gather(self, call: Call, fits: Callable[[Group], bool]) -> PromptGroups | None:
        """A group for each of the prompts; None where some have none, and the reason is why."""
        digests = call.prompt_rows.digests if call.prompt_rows else []
        # How the model was then is what a validation shows.
        only = call.step if self._dumps.role == VALIDATION_ROLE else None
        again = self._dumps.local_config.action == SkipAction.REPEAT
        chosen = self._run.choose(digests, fits, only=only, again=again)
        found = tuple(group for group in chosen if group is not None)
        if len(found) == len(digests) > 0:
            return PromptGroups(found)
        lacking = [digest for digest, one in zip(digests, chosen, strict=True) if one is None]
        why = self._run.why_none(lacking, len(digests), fits, only)
        call.reason = why or "its prompts cannot be told apart"
        return None

    def _assemble(self, call: Call, found: PromptGroups, metas: dict[Key, DumpMeta]) -> Any:
        """The groups as one batch; `metas` gets the meta of each group's dump."""
        checksums = {group.key: group.checksum for group in found.groups}
        numbers = {dump: number for number, dump in enumerate(checksums)}
        rows: dict[Key, list[int]] = {dump: [] for dump in checksums}
        picks, owners = [], []
        for owner, group in enumerate(found.groups):
            of_dump = rows[group.key]
            picks += [(numbers[group.key], len(of_dump) + i) for i in range(group.count)]
            owners += [owner] * group.count
            of_dump += range(group.start, group.start + group.count)
        # One dump after the other: they may be too large to be in memory together.
        sources = []
        for dump, checksum in checksums.items():
            rollouts, meta = self._loaded(dump, checksum)
            names = {str(name) for name in columns_of(rollouts)}
            fields = RowFields.from_meta(meta) or RowFields.of(names)
            source = Source.of(self._dumps.without_dropped(rollouts), fields, rows[dump])
            try:
                self._dumps.check_fields(source.rollouts, meta, call, dump, replaces=False)
            except CorruptDumpError as error:  # it serves no later call either
                if not dump.size:
                    self._dumps.store.quarantine(dump.step, error.what, dump.call)
                raise
            metas[dump] = meta
            sources.append(source)
        if len(found.groups) == len(sources) == 1 and not sources[0].n:  # of a single prompt
            self._cache.pop(found.groups[0].key)  # what the trainer gets it may change
            return sources[0].rollouts
        digests = call.prompt_rows.digests if call.prompt_rows else []
        return Assembly(sources, picks, call.prompts, digests, owners, call.stage.totals).batch()

    def _loaded(self, dump: Key, checksum: str) -> tuple[Any, DumpMeta]:
        """A dump, which the next batch may need, too."""
        if dump not in self._cache or self._cache[dump][1].checksum != checksum:
            store = self._dumps.stores[dump.size]
            meta = store.read_meta(dump.step, dump.call)
            if meta is None or meta.checksum != checksum:
                what = "another job replaced it meanwhile, or removed it"
                raise AbsentDumpError(what, str(store.directory / dump.path))
            self._cache[dump] = store.load(dump.step, call=dump.call, meta=meta), meta
        self._cache.move_to_end(dump)
        loaded = self._cache[dump]
        while len(self._cache) > 1 and sum(m.nbytes for _, m in self._cache.values()) > _CACHED:
            self._cache.popitem(last=False)
        return loaded


def _of_step(call: Call, found: Key | PromptGroups) -> dict[Key, str]:
    """The dumps of the call's own step that serve it, with their checksums."""
    if isinstance(found, Key):
        return {found: call.meta.checksum}
    keys = {group.key: group.checksum for group in found.groups}
    return {key: keys[key] for key in keys if not key.size and key.step == call.step}
