"""Which dumps of a run serve a call prompt by prompt: groups of its prompts, wherever they are."""

from __future__ import annotations

import functools
from typing import Any

from rlskip.batch.columns import columns_of
from rlskip.batch.row_fields import RowFields
from rlskip.skip.agreement import Mismatch
from rlskip.skip.assembling import Assembly
from rlskip.skip.call import Call
from rlskip.skip.prompt_rows import row_count, some_rows
from rlskip.skip.run_dumps import PromptGroups
from rlskip.skip.visit import Visit


class PromptVisit(Visit):
    def _elsewhere(self, call: Call) -> PromptGroups | None:
        """A group of the run for each of the call's prompts."""
        digests, present = call.digests, call.identity.for_prompts(None)
        chosen = self._dumps.run.choose(digests, call.step, present)
        found = PromptGroups(group for group in chosen if group is not None)
        if 0 < len(found) == len(digests):
            call.meta = found[0].meta
            return found
        lacking = [digest for digest, one in zip(digests, chosen, strict=True) if one is None]
        call.reason = self._dumps.run.why_none(lacking, len(digests), call.step, present)
        return None

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call for whose prompts there are no groups: it is generated.

        Where all have one that was made in another way, ``on_mismatch`` decides.
        """
        if call.identity.prompts is None:
            return super().judge(call)
        present = call.identity.for_prompts(None)
        if (odd := self._dumps.run.odd(call.digests, call.step, present)) is not None:
            call.reason = odd.differs(present)
            self._dumps.reject_group(odd, present)
        self._dumps.notices.generated(call)
        return None

    def load(self, call: Call, found: Any) -> tuple[Any, Any]:
        """As `Visit.load`, or the groups as the stage would have returned them."""
        if not isinstance(found, PromptGroups):
            return super().load(call, found)
        with call.timed(), self._dumps.ledger.lock:  # calls may be side by side
            rollouts = self._assemble(call, found)
        for key, meta in found.metas.items():
            self._dumps.notices.changed(meta, key.root)
            if meta.identity is not None:
                present = call.identity.for_prompts(meta.identity.prompts)
                self._dumps.identities.differences(present, meta)  # logs what is noteworthy
        took = sum(
            group.meta.info.get("seconds", 0.0) / max(1, len(self._dumps.run.groups_of(group.key)))
            for group in found
        )
        nbytes = sum(meta.stored for meta in found.metas.values())
        call.is_served(found[0].key.step, nbytes, took)
        return rollouts, None

    def _assemble(self, call: Call, found: PromptGroups) -> Any:
        """The groups as one batch."""
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
            rollouts = self._dumps.usable(self._dumps.run.loaded(key, meta), meta, call, key)
            fields = fields or RowFields.of({*map(str, columns_of(rollouts))})
            parts.append(some_rows(rollouts, fields, of_dump))
        assert fields is not None
        if len(found) == 1 and row_count(parts[0], fields) is None:  # of a single prompt
            self._dumps.run.cache.clear()  # what the trainer gets it may change
            return parts[0]
        of_batch = call.prompts, call.digests, owners, call.stage.totals
        dumps = functools.partial(map, self._dumps.run.loaded, metas.keys(), metas.values())
        dumped = [self._dumps.run.groups_of(key) for key in metas]
        is_whole = dumped == [[*found]] or 1 in map(len, dumped)
        asked = [] if is_whole else [*map(len, dumped)]
        return Assembly(parts, fields, picks, *of_batch, dumps, asked).batch()
