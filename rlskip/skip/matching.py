"""Which dumps serve a call: that of the very call, or the groups of its prompts in any dump."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from rlskip.batch.columns import cells_of, columns_of
from rlskip.batch.meta import plain
from rlskip.batch.row_fields import RowFields
from rlskip.config.skip import VALIDATION_ROLE, SkipAction
from rlskip.jobs.served import Ledger
from rlskip.skip.agreement import Loaded, Mismatch
from rlskip.skip.assembling import Assembly, Source
from rlskip.skip.call import Call
from rlskip.skip.dumps import Dumps, seconds_saved
from rlskip.skip.prompt_rows import prompt_groups
from rlskip.skip.run_dumps import PromptGroups, RunDumps
from rlskip.skip.step_calls import Key
from rlskip.store import CorruptDumpError, DumpMeta, Identity

_CACHED = 1 << 30
"""Bytes of dumps that are kept in memory, because the next batch needs other rows of them."""


class CallMatching:
    """Finds the dump of a whole call, in its step or in another one of the run.

    Parameters
    ----------
    dumps, run, ledger
        The role's, those of its run, and what of them has served.
    """

    def __init__(self, dumps: Dumps, run: RunDumps, ledger: Ledger) -> None:
        self._dumps, self._run, self._ledger = dumps, run, ledger

    def look_up(self, call: Call) -> Key | PromptGroups | None:
        """What was made for this very call, and serves no other one."""
        if self._dumps.local_config.action == SkipAction.REPEAT:
            return self._repeated(call)
        if call.identity.prompts is None:
            return None
        found = self._in_step(call)
        if found is None and self._dumps.local_config.match == "run":
            found = self._elsewhere(call)
        return found

    def _in_step(self, call: Call) -> Key | None:
        """The dump of the step itself that was made for such a call.

        One that records nothing of its call serves any, if none was made for it.
        """
        unnamed: Key | None = None
        served: set[str] = set()
        for key in call.visit.candidates(call.name, call.place):
            meta = self._dumps.store.read_meta(key.step, key.call)
            if meta is None:
                continue
            if meta.identity is None:
                unnamed = unnamed or key
            elif not call.identity.differences(meta.identity)[0]:
                if not self.has_served(key, call):
                    return key  # type: ignore[no-any-return]
                served.add(meta.checksum)
        # Its own dump may have served another call of the visit, or a group of it.
        for own in (call.name, "") if call.name.endswith("-0") else (call.name,):
            if call.visit.is_taken(Key(call.step, own)):
                meta = self._dumps.store.read_meta(call.step, own)
                if meta and meta.identity and not call.identity.differences(meta.identity)[0]:
                    served.add(meta.checksum)
        # These draws were trained on already: nor are the sessions resumed that they were made of,
        # if the step's journal is still there. What is generated instead leaves its own there, so
        # the call is named there by all that have served: by the next one there is one more.
        call.again = "".join(f"-{checksum}" for checksum in sorted(served))
        return None if self._dumps.by_prompt else unnamed

    def has_served(self, key: Key, call: Call) -> bool:
        """Whether the run has trained on the draws of a dump, at whatever step, so that none does.

        Under ``match=step`` another visit of the step is the same step again. What follows another
        stage computes the same again.
        """
        if self._dumps.local_config.match == "step" or call.stage.derived:
            return False
        return self._ledger.has_served(key, call.writes)

    def judge(self, call: Call) -> Mismatch | None:
        """What becomes of a call that no dump fits; None: it is a miss.

        The first call of a step whose first dump is there is a mismatch, and so is a later one in
        whose own place a dump lies that has served none: the prompts are the same, and something
        else has changed. Where the dump of a first call is gone, it was lost, or its job was
        killed: whatever is called first may be that call.
        """
        visit, config = call.visit, self._dumps.local_config
        if config.action == SkipAction.REPEAT:
            return None
        there = [Key(visit.step, call.name)]
        if not call.place:
            there = [Key(visit.step, name) for name in visit.listed] if visit.is_whole else []
        nearest = self._nearest(call, there)
        if nearest is None:
            if self._dumps.store.calls(visit.step):
                call.reason = self._why_not(call)
                self._dumps.notices.generated(call, call.reason)
            return None
        key, differs = nearest
        if config.on_mismatch == "error" and _follows_new_rollouts(call, differs):
            call.reason = "; ".join(differs)
            self._dumps.notices.generated(call, call.reason)
            return None
        n = len(visit.listed)
        of = f", the nearest of its {n} calls," if n > 1 and not call.place else ""
        differs = self._dumps.in_words(call, key, differs)
        call.reason = f"the dump of {key}{of} was made for another call: {'; '.join(differs)}"
        if call.identity.prompts is None:
            call.reason = f"the prompts cannot be compared with those of the dump of {key}"
        hint = ""
        if config.on_mismatch == "error" and config.match == "step":
            elsewhere = next(self._run.find(call.identity.prompts, visit.step), None)
            if elsewhere is not None:
                call.reason += f"; they are the same prompts as those of {elsewhere}"
                looks = f"skip.{self._dumps.role}.match=run looks in the run's other steps, too"
                hint = "" if self._dumps.role == VALIDATION_ROLE else looks
        return Mismatch(key, hint)

    def _nearest(self, call: Call, keys: Iterable[Key]) -> tuple[Key, list[str]] | None:
        """The dump that differs least from the call, and in what; None where none does.

        One that does not differ at all another job has dumped meanwhile, or it has served another
        step: then no other dump is taken for this call's either.
        """
        differing = []
        for key in keys:
            meta = None
            if not call.visit.is_taken(key):
                meta = self._dumps.store.read_meta(key.step, key.call)
            if meta is not None and meta.identity is not None:
                differs = call.identity.differences(meta.identity)[0]
                if not differs and call.identity.prompts is not None:
                    return None
                differing.append((key, differs))
        # By name where several differ in as much: not as the directory was listed.
        return min(differing, key=lambda one: (len(one[1]), one[0].place.order), default=None)

    def _why_not(self, call: Call) -> str:
        if not call.visit.is_whole:
            return "a dump of the step is missing, and the others were made for other calls"
        if call.identity.prompts is None:
            return "its prompts cannot be compared"
        return "no dump of the step that is left was made for such a call"

    def take(self, call: Call, found: Any) -> None:
        """These serve the call, and no other one of the visit."""
        call.visit.take(found)
        call.parts = self.parts_of(found)
        self._ledger.serve(call.parts)

    def parts_of(self, found: Any) -> Sequence[Hashable]:
        """What the ledger knows of what serves a call; under ``match=step`` a visit is enough."""
        return [] if self._dumps.local_config.match == "step" else [found]

    def load(self, call: Call) -> Loaded:
        """The rollouts that serve the call, verified, with one meta and the generators' states.

        Raises
        ------
        DumpError
            A dump is unusable.
        """
        found, store, config = call.found, self._dumps.store, self._dumps.local_config
        assert isinstance(found, Key)
        with call.timed():
            rollouts, meta, states = store.load_with_meta(
                found.step, call=found.call, sidecar=config.restore_rng
            )
            repeats = config.action == SkipAction.REPEAT
            if not repeats and self._dumps.differences(call.identity, meta):
                where = str(self._dumps.directory / found.path)
                raise CorruptDumpError("another job replaced it meanwhile", where)
            self._dumps.check_fields(rollouts, meta, call, found)
            rollouts = self._dumps.without_dropped(rollouts)
        call.facts.update(
            source=meta.step,
            call=found.call,
            bytes=store.size_of(meta),
            seconds_saved=seconds_saved([meta], call.seconds),
        )
        return rollouts, meta, states

    def _repeated(self, call: Call) -> Key | None:
        """The dump of the call's place in the step itself, else in the nearest; else its last.

        A step without its first dump is none that could be repeated.
        """
        source, names = call.step, call.visit.in_order
        if "" not in names:
            nearest = self._dumps.store.nearest(call.step)
            if nearest is None or nearest == call.step:  # written in this visit
                return None
            source, names = nearest, self._dumps.store.in_order(nearest)
        return Key(source, names[min(call.place, len(names) - 1)]) if names else None

    def _elsewhere(self, call: Call) -> Key | None:
        """The dump of another step that was made for such a call."""
        for key in self._run.find(call.identity.prompts, call.step):
            if self.has_served(key, call):
                continue
            meta = self._dumps.store.read_meta(key.step, key.call)
            if call.visit.is_taken(key) or meta is None or meta.identity is None:
                continue
            if not call.identity.differences(meta.identity)[0]:
                return key
        return None


def _follows_new_rollouts(call: Call, differs: list[str]) -> bool:
    """Whether nothing but the prompts differs, where these are what an earlier stage returned."""
    return call.stage.derived and all(line.startswith("prompts: ") for line in differs)


class PromptMatching(CallMatching):
    """Finds and loads the groups of a call's prompts, in whatever dumps of the run they are."""

    def __init__(self, dumps: Dumps, run: RunDumps, ledger: Ledger) -> None:
        super().__init__(dumps, run, ledger)
        self._cache: OrderedDict[Key, tuple[Any, DumpMeta]] = OrderedDict()

    def look_up(self, call: Call) -> Key | PromptGroups | None:
        """The dump of this very call, else a group for each of its prompts."""
        if call.identity.prompts is None:
            return None
        if (found := self._in_step(call)) is not None:
            return found
        identity = call.identity.for_prompts(None)
        gathered = self._gather(call, lambda made: not identity.differences(made)[0])
        if isinstance(gathered, PromptGroups):
            return gathered
        call.reason = gathered
        return None

    def has_served(self, key: Key, call: Call) -> bool:
        return any(self._ledger.has_served(part, call.writes) for part in self.parts_of(key))

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
        if isinstance(found, PromptGroups):
            identity = call.identity.for_prompts(None)
            differing = (
                (group, must)
                for group in found.groups
                if (must := identity.differences(group.made)[0])
            )
            first, must = next(differing, (None, []))
            if first is not None:
                call.reason = f"{found} were made for other calls: {'; '.join(must)}"
                self._dumps.reject(call.reason, first.key, replaces=False)
        if mute := self._run.mute:
            self._dumps.notices.once(
                "mute", "%d dumps of the run do not record which rows are which prompt's: they "
                "serve at most the very batch that they were made for", mute,
            )  # fmt: skip
        self._dumps.notices.generated(call, call.reason)
        return None

    def take(self, call: Call, found: Any) -> None:
        call.parts = self.parts_of(found)
        self._ledger.serve(call.parts)
        keys = [found] if isinstance(found, Key) else {group.key for group in found.groups}
        for key in keys:
            if not key.size and key.step == call.step:
                call.visit.take(key)

    def parts_of(self, found: Any) -> Sequence[Hashable]:
        return self._run.parts_of(found)

    def load(self, call: Call) -> Loaded:
        """As `CallMatching.load`, or the groups as the stage would have returned them.

        Raises
        ------
        AssemblyError
            The rows cannot be one batch.
        """
        found = call.found
        if not isinstance(found, PromptGroups):
            return super().load(call)
        with call.timed(), self._ledger.lock:  # calls may be side by side
            metas: dict[Key, DumpMeta] = {}
            first = found.groups[0].key
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
            metas[group.key].info.get("seconds", 0.0) / max(1, len(self._run.groups_of(group.key)))
            for group in found.groups
        )
        call.facts.update(
            source=first.step,
            bytes=sum(meta.stored for meta in metas.values()),
            seconds_saved=took - call.seconds if took else 0.0,
        )
        return rollouts, metas[first], None

    def _gather(self, call: Call, fits: Callable[[Identity], bool]) -> PromptGroups | str:
        prompts = call.summarize_prompts()
        if prompts is None or not prompts.digests:
            return "its prompts cannot be told apart"
        return self._run.gather(
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

    def _assemble(self, call: Call, found: PromptGroups, metas: dict[Key, DumpMeta]) -> Any:
        """The groups as one batch; `metas` gets the meta of each group's dump."""
        checksums = {group.key: group.checksum for group in found.groups}
        numbers = {dump: number for number, dump in enumerate(checksums)}
        rows: dict[Key, list[int]] = {dump: [] for dump in checksums}
        picks = []
        for group in found.groups:
            of_dump = rows[group.key]
            picks += [(numbers[group.key], len(of_dump) + i) for i in range(group.count)]
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

    def _loaded(self, dump: Key, checksum: str) -> tuple[Any, DumpMeta]:
        """A dump, which the next batch may need, too."""
        if dump not in self._cache or self._cache[dump][1].checksum != checksum:
            store = self._dumps.stores[dump.size]
            rollouts, meta, _ = store.load_with_meta(dump.step, call=dump.call)
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
