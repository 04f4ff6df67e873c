"""The dumps of a run by their prompts: whole batches, and the rows of each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from rlskip.jobs.served import Ledger
from rlskip.skip.prompt_rows import ROWS_PER_PROMPT, PromptRows
from rlskip.skip.step_calls import Key
from rlskip.store import DumpMeta, Identity, StepStore


@attrs.frozen
class Group:
    """The rows of a dump that were generated for one prompt: `count` of them from `start` on.

    ``checksum`` is the dump's, ``made`` what it was made for besides the prompts, and ``place`` its
    call's in the step.
    """

    key: Key
    start: int
    count: int
    checksum: str
    made: Identity = attrs.field(eq=False)
    place: int = attrs.field(eq=False, default=0)


@attrs.frozen
class Gathered:
    """A group for each prompt of a call, which together serve it.

    ``is_whole`` tells whether they are all groups of one dump, in order.
    """

    groups: tuple[Group, ...]
    is_whole: bool = False

    def __str__(self) -> str:
        steps = Counter(group.key.step for group in self.groups)
        named = ", ".join(f"{steps[step]} from step {step}" for step in sorted(steps))
        return f"the groups of {len(self.groups)} prompts ({named})"


class RunIndex:
    """Reads the meta of each dump once, when it is first needed.

    Hold `lock` from :meth:`gather` until :meth:`take`.

    What this process wrote serves no prompt of it, and each group serves one prompt: the k-th time
    that a prompt is asked for it gets the k-th group, by step. A process that starts at a later
    step takes the groups of that step and of later ones first.

    Parameters
    ----------
    stores
        Returns where dumps are (:attr:`~rlskip.skip.dumps.Dumps.stores`): a job starts before its
        ranks are known.
    ledger
        What has served in the run's directory.
    """

    def __init__(self, stores: Callable[[], Mapping[str, StepStore]], ledger: Ledger) -> None:
        self.lock, self._ledger = ledger.lock, ledger
        self._stores = stores
        self._read: set[tuple[str, int]] = set()
        self._by_prompts: dict[str, list[Key]] = {}
        self._by_prompt: dict[str, list[Group]] = {}
        self._groups: dict[Key, Sequence[Group]] = {}
        self._conditions: list[Identity] = []
        self._first: int | None = None
        #: How many dumps do not record their prompts, or which rows are which prompt's.
        self.mute = 0

    def find(self, prompts_hash: str, step: int) -> list[Key]:
        """The dumps with these prompts in other steps, the nearest first, as `repeat` prefers."""
        with self.lock:
            for other in self._stores()[""].with_calls():
                if other != step:
                    self._read_step("", other)
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
    ) -> Gathered | str:
        """A group for each of the prompts with these hashes, or why there is none for some.

        Parameters
        ----------
        fits
            Whether dumps that were made for this, the prompts apart, may serve.
        alone
            Whether only the dumps of `step` itself may.
        again
            Whether a group may serve several times, where a prompt has no other one left.
        """
        for size, store in self._stores().items():
            for other in [step] if alone else store.with_calls():
                self._read_step(size, other)
        allowed = {id(made) for made in self._conditions if fits(made)}
        uses, gathered, unknown = Counter(self._ledger.uses), list[Group](), 0
        for digest in digests:
            groups = [
                group
                for group in self._by_prompt.get(digest, ())
                if id(group.made) in allowed and not (alone and group.key.step != step)
            ]
            unknown += not groups
            left = [group for group in groups if again or not uses[group]]
            best = min(left, key=lambda group: (uses[group], self._order(group)), default=None)
            if best is not None:
                uses[best] += 1
                gathered.append(best)
        if len(gathered) < len(digests):
            return _why_not(len(digests), unknown, len(digests) - len(gathered) - unknown)
        return Gathered(tuple(gathered), [*self._groups.get(gathered[0].key, ())] == gathered)

    def groups_in(self, found: Key) -> int:
        """How many groups a dump has."""
        return len(self._groups.get(found, ()))

    def take(self, found: Key | Gathered, step: int) -> None:
        """The groups of a whole dump of the run itself, or these groups, serve a call of `step`."""
        if isinstance(found, Key):
            self._read_step("", found.step)
        self._ledger.uses.update(groups := self._groups_of(found))
        for group in groups:
            self._ledger.steps.setdefault(group, step)

    def serves(self, found: Key, step: int) -> None:
        """A whole dump serves a call of `step`."""
        self._ledger.steps.setdefault(found, step)

    def has_served_elsewhere(self, found: Key, step: int) -> bool:
        """Whether a dump of the run itself, or a group of it, has served a call of another step."""
        parts: list[Key | Group] = [found, *self._groups_of(found)]
        return any(self._ledger.steps.get(part, step) != step for part in parts)

    def is_used(self, found: Key) -> bool:
        """Whether a group of a dump of the run itself has served."""
        return any(self._ledger.uses[group] for group in self._groups_of(found))

    def give_back(self, found: Key | Gathered) -> None:
        """Its dumps turned out not to serve the call; read what is left of their steps again."""
        with self.lock:
            self._ledger.uses.subtract(own := self._groups_of(found))
            if isinstance(found, Key):
                self._ledger.steps.pop(found, None)
            for group in own:
                if not self._ledger.uses[group]:
                    self._ledger.steps.pop(group, None)
                self._forget(group.key.size, group.key.step)

    def writes(self, found: Key) -> bool:
        """This process is going to write a dump: before it is there, as it may be in a thread.

        Returns whether it is the first of that name.
        """
        with self.lock:
            is_new = found not in self._ledger.written
            self._ledger.written.add(found)
            return is_new

    def writes_not(self, found: Key) -> None:
        """Another job was quicker to write a dump of that name."""
        with self.lock:
            self._ledger.written.discard(found)

    def has_written(self, found: Key) -> bool:
        """Whether this process has written a dump, or is going to."""
        return found in self._ledger.written

    def wrote(self, found: Key) -> None:
        """This process has written a dump."""
        with self.lock:
            self._ledger.written.add(found)
            self._forget("", found.step)

    # -- within --------------------------------------------------------------------------

    def _groups_of(self, found: Key | Gathered) -> Sequence[Group]:
        return found.groups if isinstance(found, Gathered) else self._groups.get(found, ())

    def _order(self, group: Group) -> tuple[Any, ...]:
        key = group.key
        first = key.step < (self._first or 0)
        return first, key.size, key.step, group.place, key.call, group.start

    def _forget(self, size: str, step: int) -> None:
        """Read a step again when it is next needed."""
        if (size, step) not in self._read:
            return
        self._read.discard((size, step))
        if not size:
            for some in self._by_prompts.values():
                some[:] = [one for one in some if one.step != step]
        for groups in self._by_prompt.values():
            groups[:] = [g for g in groups if (g.key.size, g.key.step) != (size, step)]

    def _read_step(self, size: str, step: int) -> None:
        if (size, step) in self._read:
            return
        self._read.add((size, step))
        store = self._stores()[size]
        for call in store.calls(step):
            found = Key(step, call, size)
            meta = store.read_meta(step, call)
            if meta is None:
                continue
            if meta.identity is None or not meta.identity.prompts:
                self.mute += 1
                continue
            if not size:
                self._by_prompts.setdefault(meta.identity.prompts, []).append(found)
            if found not in self._ledger.written:
                self._add(found, meta, meta.identity)

    def _add(self, found: Key, meta: DumpMeta, identity: Identity) -> None:
        made = identity.for_prompts(None)
        same = next((known for known in self._conditions if known == made), None)
        if same is None:
            self._conditions.append(same := made)
        prompts = PromptRows.recorded(meta.info.get("prompts"))
        groups = [] if prompts is None else [*_groups(found, same, meta, len(prompts.digests))]
        if prompts is None or not groups:
            self.mute += 1
            return
        self._groups[found] = groups
        for digest, group in zip(prompts.digests, groups, strict=True):
            self._by_prompt.setdefault(digest, []).append(group)


def _why_not(prompts: int, unknown: int, again: int) -> str:
    """Of how many prompts of a call no dump ever was, and of how many others none is left."""
    said = []
    if unknown:
        said.append(f"{unknown} of {prompts} prompts are in no dump of the run")
    if again:
        said.append(f"{again} of {prompts} prompts are asked for more often than they were dumped")
    return ", ".join(said)


def _groups(found: Key, made: Identity, meta: DumpMeta, prompts: int) -> Iterator[Group]:
    """The groups of a dump, as far as it records them."""
    counts = meta.info.get(ROWS_PER_PROMPT)
    if type(counts) is int:
        counts = [counts] * prompts
    if not isinstance(counts, list) or len(counts) != prompts:
        return
    start, place = 0, meta.info.get("place", 0)
    for count in counts:
        if type(count) is not int or count < 1:
            return
        yield Group(found, start, count, meta.checksum, made, place)
        start += count
