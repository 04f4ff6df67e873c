"""Which dumps serve a call: that of the very call, or the groups of its prompts in any dump."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from rlskip.batch.columns import cells_of, columns_of
from rlskip.batch.meta import plain
from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.skip.agreement import Loaded, Mismatch
from rlskip.skip.assembling import Assembly, Source
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, seconds_saved
from rlskip.skip.prompt_rows import prompt_groups
from rlskip.skip.run_index import Gathered, RunIndex
from rlskip.skip.visit import Found
from rlskip.store import CorruptDumpError, DumpMeta, Identity

_CACHED = 1 << 30
"""Bytes of dumps that are kept in memory, because the next batch needs other rows of them."""


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
        elif call.identity.prompts is not None:
            yield from call.visit.fitting(call.identity)
            yield from call.visit.unnamed()
            if self._dumps.local_config.match == "run":
                yield from self._elsewhere(call)

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call that no dump fits.

        None: it is a miss. A Mismatch: it is the first call at the step, and all dumps of the step
        differ from it.
        """
        visit, identity = call.visit, call.identity
        policy = self._dumps.local_config.on_mismatch
        if self._dumps.local_config.action == SkipAction.REPEAT or visit.is_empty:
            return None
        if identity.prompts is None:
            kth: Found | None = visit.kth(call.place)
            if kth is None:
                return None
            call.reason = f"the prompts cannot be compared with those of the dump of {kth}"
            return Mismatch(kth)
        nearest = None if call.place or visit.is_damaged else visit.nearest(identity)
        if nearest is None or (policy == "error" and _follows_new_rollouts(call, nearest[1])):
            damaged = "a dump of the step is missing, and the others were made for other calls"
            call.reason = visit.why_not(identity) if call.place or nearest else damaged
            self._dumps.notices.generated(call, call.reason)
            return None
        found, differs = nearest
        n = len(visit.listed)
        of = f", the nearest of its {n} calls," if n > 1 else ""
        differs = self._dumps.in_words(call, found, differs)
        call.reason = f"the dump of {found}{of} was made for another call: {'; '.join(differs)}"
        hint = ""
        if policy == "error" and self._dumps.local_config.match == "step":
            elsewhere = self._index.find(identity.prompts, visit.step)
            if elsewhere:
                call.reason += f"; they are the same prompts as those of {elsewhere[0]}"
                looks = f"skip.{self._dumps.role}.match=run looks in the run's other steps, too"
                hint = "" if self._dumps.role == VALIDATION_ROLE else looks
        return Mismatch(found, hint)

    def take(self, call: Call, found: Any) -> None:
        """These serve the call, and no other one of the visit."""
        call.visit.take(found)
        self._index.serves(found, call.step)

    def load(self, call: Call) -> Loaded:
        """The rollouts that serve the call, verified, with one meta and the generators' states.

        Raises
        ------
        DumpError
            A dump is unusable.
        """
        found, store, config = call.found, self._dumps.store, self._dumps.local_config
        assert isinstance(found, Found)
        with call.timed():
            rollouts, meta, states = store.load_with_meta(
                found.step, part=found.part, sidecar=config.restore_rng
            )
            repeats = config.action == SkipAction.REPEAT
            if not repeats and self._dumps.differences(call.identity, meta):
                where = str(self._dumps.directory / found.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self._dumps.check_fields(rollouts, meta, call, found)
            rollouts = self._dumps.without_dropped(rollouts)
        call.facts.update(
            source=meta.step,
            part=found.number,
            bytes=store.size_of(meta),
            seconds_saved=seconds_saved([meta], call.seconds),
        )
        return rollouts, meta, states

    def _repeated(self, call: Call) -> Found | None:
        """The same call of the step itself, else of the nearest one; else that step's last."""
        own = [*filter(call.visit.is_usable, call.visit.listed)]
        if (found := self._at_place(call, call.step, own)) is not None:
            return found
        nearest = self._dumps.store.nearest(call.step)
        if nearest is None or nearest == call.step:  # written in this visit
            return None
        return self._at_place(call, nearest, self._dumps.store.calls(nearest))

    def _at_place(self, call: Call, step: int, numbers: list[int]) -> Found | None:
        """The dump of the call's place among these of a step, else the last that can be read."""
        while numbers:
            found = Found(step, numbers[min(call.place, len(numbers) - 1)])
            if self._dumps.store.read_meta(step, found.part) is not None:
                return found
            call.visit.lose(found)
            numbers.remove(found.number)
        return None

    def _elsewhere(self, call: Call) -> Iterator[Found]:
        """The dumps of other steps that were made for such a call.

        Those that this process wrote, or that have served another step of it, do not serve, because
        prompts that come again are sampled again. They serve a stage that follows another one: it
        computes the same again.
        """
        for found in self._index.find(call.identity.prompts, call.step):
            elsewhere = self._index.has_served_elsewhere(found, call.step)
            if (elsewhere or self._index.has_written(found)) and not call.stage.derived:
                continue
            meta = self._dumps.store.read_meta(found.step, found.part)
            if call.visit.is_used(found) or meta is None or meta.identity is None:
                continue
            if not call.identity.differences(meta.identity)[0]:
                yield found


def _follows_new_rollouts(call: Call, differs: list[str]) -> bool:
    """Whether nothing but the prompts differs, where these are what an earlier stage returned."""
    return call.stage.derived and all(line.startswith("prompts: ") for line in differs)


class PromptMatching(CallMatching):
    """Finds and loads the groups of a call's prompts, in whatever dumps of the run they are."""

    def __init__(self, dumps: Dumps, index: RunIndex, own_steps: bool) -> None:
        super().__init__(dumps, index, own_steps)
        self._cache: OrderedDict[Found, tuple[Any, DumpMeta]] = OrderedDict()

    def offers(self, call: Call) -> Iterator[Found | Gathered]:
        """The dumps of this very call, then a group for each of its prompts."""
        if call.identity.prompts is not None:
            for found in call.visit.fitting(call.identity):
                # A visit does not know what calls of other steps were served, and one of a call
                # that has its own step knows of no other.
                used = self._own_steps and self._index.is_used(found)
                if not (used or self._index.has_served_elsewhere(found, call.step)):
                    yield found
            identity = call.identity.for_prompts(None)
            gathered = self._gather(call, lambda made: not identity.differences(made)[0])
            if isinstance(gathered, Gathered):
                yield gathered
            else:
                call.reason = gathered

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call for whose prompts there are no groups: it is generated.

        Prompts without a dump are generated, and the whole batch with them. Where all have one that
        was made in another way, ``on_mismatch`` decides.

        Raises
        ------
        MismatchError
            ``on_mismatch`` is ``error``.
        """
        if call.identity.prompts is None:
            return super().judge(call)
        found = self._gather(call, lambda made: True)
        if isinstance(found, Gathered):
            identity = call.identity.for_prompts(None)
            differing = (
                (group, must)
                for group in found.groups
                if (must := identity.differences(group.made)[0])
            )
            first, must = next(differing, (None, []))
            if first is not None:
                call.reason = f"{found} were made for other calls: {'; '.join(must)}"
                self._dumps.reject(call.reason, first.found, replaces=False)
        if self._index.mute:
            self._dumps.notices.once(
                "mute", "%d dumps of the run do not record which rows are which prompt's: they "
                "serve at most the very batch that they were made for",
                self._index.mute,
            )  # fmt: skip
        self._dumps.notices.generated(call, call.reason)
        return None

    def take(self, call: Call, found: Any) -> None:
        self._index.take(found, call.step)
        if isinstance(found, Found):
            super().take(call, found)
            return
        for group in found.groups:
            if not group.found.size and group.found.step == call.step:
                call.visit.mark_present(group.found.number)

    def load(self, call: Call) -> Loaded:
        """As `CallMatching.load`, or the groups as the stage would have returned them.

        Raises
        ------
        AssemblyError
            The rows cannot be one batch.
        """
        found = call.found
        if not isinstance(found, Gathered):
            return super().load(call)
        with call.timed(), self._index.lock:  # calls may be side by side
            metas: dict[Found, DumpMeta] = {}
            first = found.groups[0].found
            whole, metas[first] = self._loaded(first, found.groups[0].checksum)
            if found.is_whole and not self._is_renamed(call, whole, metas[first]):
                self._cache.pop(first)  # what the trainer gets it may change
                rollouts = self._dumps.without_dropped(whole)
            else:
                rollouts = self._assemble(call, found, metas)
            self._dumps.check_fields(rollouts, metas[first], call, first, replaces=False)
        for dump, meta in metas.items():
            self._dumps.notices.changed(meta, self._dumps.stores[dump.size].directory)
            if meta.identity is not None:
                present = call.identity.for_prompts(meta.identity.prompts)
                self._dumps.differences(present, meta)  # logs what is noteworthy
        took = sum(
            metas[group.found].info.get("seconds", 0.0) / max(1, self._index.groups_in(group.found))
            for group in found.groups
        )
        call.facts.update(
            source=first.step,
            bytes=sum(meta.stored for meta in metas.values()),
            seconds_saved=took - call.seconds if took else 0.0,
        )
        return rollouts, metas[first], None

    def _gather(self, call: Call, fits: Callable[[Identity], bool]) -> Gathered | str:
        prompts = call.summarize_prompts()
        if prompts is None or not prompts.digests:
            return "its prompts cannot be told apart"
        return self._index.gather(
            prompts.digests,
            call.step,
            fits,
            # How the model was then is what a validation shows.
            alone=self._dumps.role == VALIDATION_ROLE,
            again=self._dumps.local_config.action == SkipAction.REPEAT,
        )

    @staticmethod
    def _is_renamed(call: Call, whole: Any, meta: DumpMeta) -> bool:
        """Whether the prompts name the groups of a whole dump otherwise now."""
        fields = _fields_of(whole, meta)
        then = cells_of(columns_of(whole).get(fields.group))
        now = prompt_groups(call.prompts, fields)
        if then is None or now is None:
            return False
        first, second = ([*dict.fromkeys(repr(plain(name)) for name in of)] for of in (then, now))
        return first != second

    def _assemble(self, call: Call, found: Gathered, metas: dict[Found, DumpMeta]) -> Any:
        """The groups as one batch; `metas` gets the meta of each group's dump."""
        checksums = {group.found: group.checksum for group in found.groups}
        numbers = {dump: number for number, dump in enumerate(checksums)}
        rows: dict[Found, list[int]] = {dump: [] for dump in checksums}
        picks = []
        for group in found.groups:
            of_dump = rows[group.found]
            picks += [(numbers[group.found], len(of_dump) + i) for i in range(group.count)]
            of_dump += range(group.start, group.start + group.count)
        # One dump after the other: they may be too large to be in memory together.
        sources = []
        for dump, checksum in checksums.items():
            rollouts, metas[dump] = self._loaded(dump, checksum)
            rollouts = self._dumps.without_dropped(rollouts)
            sources.append(Source.of(rollouts, _fields_of(rollouts, metas[dump]), rows[dump]))
        prompts = call.summarize_prompts()
        digests = prompts.digests if prompts else []
        owners = [i for i, group in enumerate(found.groups) for _ in range(group.count)]
        return Assembly(sources, picks, call.prompts, digests, owners, call.stage.totals).batch()

    def _loaded(self, dump: Found, checksum: str) -> tuple[Any, DumpMeta]:
        """A dump, which the next batch may need, too."""
        if dump not in self._cache or self._cache[dump][1].checksum != checksum:
            store = self._dumps.stores[dump.size]
            rollouts, meta, _ = store.load_with_meta(dump.step, part=dump.part)
            if meta.checksum != checksum:
                where = str(store.directory / dump.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self._cache[dump] = rollouts, meta
        self._cache.move_to_end(dump)
        loaded = self._cache[dump]
        while len(self._cache) > 1 and sum(m.nbytes for _, m in self._cache.values()) > _CACHED:
            self._cache.popitem(last=False)
        return loaded


def _fields_of(rollouts: Any, meta: DumpMeta) -> RowFields:
    names = {str(name) for name in columns_of(rollouts)}
    return RowFields.from_meta(meta) or RowFields.of(names)
