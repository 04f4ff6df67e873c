"""StepStore: the dumps of one run, by step."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlskip.config.max_bytes import half_of_memory
from rlskip.format.dump_errors import AbsentDumpError, CorruptDumpError, UnreadableDumpError
from rlskip.format.kinds import Packer, rebuild
from rlskip.jobs import alive
from rlskip.store.dump import NewDump, in_use, move_away, opened, remove
from rlskip.store.identity import Identity
from rlskip.store.index import Index
from rlskip.store.layout import Listing, Place
from rlskip.store.meta import DumpMeta, kept_info

logger = logging.getLogger(__name__)


class StepStore:
    """The dumps in one directory, as :func:`~rlskip.store.run_directory` names it.

    A dump is named by its step and its call; a step's first call has an empty name. Who finds a
    corrupt dump quarantines it with a warning, and it counts as absent. A dump that cannot be read
    at the moment counts as absent, too, and one in another format raises; both stay.

    Parameters
    ----------
    rank, world_size
        Of several ranks that call the stage together each keeps a shard of each call.
    keep_last
        After each save remove the steps that were written longest ago, down to this number; never
        the step just saved. None: keep all.
    quarantines
        Whether a corrupt dump is moved away. False for who only looks.
    complete
        Given each meta that is read, it returns it with what its dump records elsewhere.
    max_bytes
        The most memory that the values of a dump may take; by default half of what the machine, or
        this process's control group, has. A dump that needs more raises, and stays where it is.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        keep_last: int | None = None,
        quarantines: bool = True,
        complete: Callable[[DumpMeta], DumpMeta] = lambda meta: meta,
        max_bytes: int | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))  # the same one after a chdir
        self.rank, self.world_size = rank, world_size
        self._max_bytes = half_of_memory() if max_bytes is None else max_bytes
        self._quarantines, self._complete = quarantines, complete
        self._listing, self.index = Listing(self.directory), Index(self.directory)
        self._sweep_at = -math.inf
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, and the step just saved always stays")
        self._keep_last = keep_last
        # The steps that this process wrote, in order: the clock of a file system has coarse ticks.
        self._order: dict[int, None] = {}

    # -- which dumps there are -----------------------------------------------------------

    def place(self, step: int, call: str = "") -> Place:
        """Where the dump of a call is, or would be."""
        return Place(self.directory, step, call, self.rank, self.world_size)

    def steps(self) -> list[int]:
        """The steps whose first call has a sound dump, ascending."""
        return [meta.step for meta in self._sound((step, "") for step in self.listed())]

    def nearest(self, step: int) -> int | None:
        """The step that `repeat` takes: `step`; else the largest below; else the smallest above.

        It is one whose first call has a sound dump; None without.
        """
        nearest = sorted(self.listed(), key=lambda s: (s > step, abs(s - step)))
        return next((meta.step for meta in self._sound((near, "") for near in nearest)), None)

    def listed(self) -> list[int]:
        """The steps whose first call has a directory, ascending, without a look into it."""
        families = [*self._listing.look().dumps.items()]  # other threads may add to it
        return sorted(step for step, family in families if self.place(step) in family)

    def listed_by_step(self) -> Mapping[int, Sequence[Place]]:
        """By step the places of the dumps of all ranks; the same object until they change."""
        return self._listing.look().dumps

    def calls(self, step: int) -> list[str]:
        """The names of the calls of `step` that have a directory, the first call first."""
        return self._calls_in(self._listing.look().dumps, step)

    def in_order(self, step: int) -> list[str]:
        """The names of the calls of `step` that have a sound dump, as they were made."""
        # Jobs that shared a step may have given two calls one place: then the names decide.
        found = self._sound((step, call) for call in self.calls(step))
        return [meta.call for meta in sorted(found, key=lambda meta: meta.info.get("place", 0))]

    def quarantined(self, step: int) -> list[str]:
        """The names of the calls of `step` of which something was moved away as bad."""
        return [*dict.fromkeys(self._calls_in(self._listing.look().bad, step))]

    def _calls_in(self, families: Mapping[int, Sequence[Place]], step: int) -> list[str]:
        mine = self.rank, self.world_size
        found = [*families.get(step, ())]  # a thread may add some
        return [place.call for place in found if (place.rank, place.world_size) == mine]

    def read_meta(self, step: int, call: str = "") -> DumpMeta | None:
        """What ``meta.json`` holds; None where there is no dump that can be read.

        Raises OtherFormatError for another version's.
        """
        return next(self._sound([(step, call)]), None)

    def _sound(self, named: Iterable[tuple[int, str]]) -> Iterator[DumpMeta]:
        """The metas of those of these dumps that can be read; one warning for all others."""
        unread: list[UnreadableDumpError] = []
        try:
            for step, call in named:
                try:
                    with opened(self.place(step, call), self._quarantine) as here:
                        meta = here.read_meta()
                    yield self._complete(meta)
                except UnreadableDumpError as error:
                    unread.append(error)
                except (AbsentDumpError, CorruptDumpError):
                    pass
        finally:  # whoever has found one does not read on
            if unread:
                more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
                logger.warning("rlskip: %s%s; it counts as absent", unread[0], more)

    # -- saving --------------------------------------------------------------------------

    def save(self, step: int, rollouts: Any, **about: Any) -> DumpMeta:
        """Write `rollouts` as a dump of `step`, completely or not at all.

        A dump that is there already stays, and its meta is returned; a shard replaces it, because
        all shards of a call are of one generation. `about` and errors are those of :meth:`prepare`;
        or OSError, for a full disk, say: then nothing is left of the dump.
        """
        dump = self.prepare(step, rollouts, **about)
        meta, is_own = self.write(dump)
        while not is_own and self.world_size > 1:
            meta, is_own = self.write(dump, over=meta)
        return meta

    def prepare(
        self,
        step: int,
        rollouts: Any,
        *,
        call: str = "",
        identity: Identity | None = None,
        info: Mapping[str, Any] | None = None,
        sidecar: Any = None,
    ) -> NewDump:
        """The first half of :meth:`save`, which writes nothing.

        ``meta.json`` records `identity` and `info`, which is any JSON, with the entries that
        :class:`DumpMeta` names of their type. A `sidecar` is a second value, loaded on its own,
        such as the states of random generators. Raises UnsupportedTypeError for what cannot be
        kept.
        """
        packer = Packer()
        trees = {
            "rollouts": packer.node(rollouts, "rollouts"),
            "aside": packer.node(sidecar, "sidecar"),
        }
        kept, place = kept_info(info or {}, identity), self.place(operator.index(step), call)
        return NewDump(place, trees, packer.arrays, identity, kept)

    def write(self, dump: NewDump, over: DumpMeta | None = None) -> tuple[DumpMeta, bool]:
        """The second half; `over` and what is returned are those of :meth:`NewDump.publish`."""
        # Before the dump is made: what a killed job left must not fill a disk that is nearly full.
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + alive.DEAD_S
            alive.sweep(self.directory)
        try:
            meta, is_own = dump.publish(over)
        except OSError as error:
            if error.filename is None:  # of a full disk, for example
                error.filename = str(dump.place.directory)
            raise
        if not is_own:
            return self._complete(meta), False
        self._listing.note(dump.place)  # it is published: from here on nothing may fail
        if self.rank == 0 and self._keep_last is not None:
            before = [*self._order]  # in one operation: other threads write, too
            self._order[meta.step] = self._order.pop(meta.step, None)
            # The same step does not look again: it may have thousands of calls.
            if before[-1:] != [meta.step]:
                try:
                    self._remove_old(self._keep_last, meta.step)
                except Exception as error:
                    text = "rlskip: old dumps in %s cannot be removed: %s"
                    logger.warning(text, self.directory, error)
        return meta, True

    def _remove_old(self, keep_last: int, written: int) -> None:
        """Remove all but the `keep_last` steps; never the one just written, nor one in use."""
        self._listing.forget()
        families = self._listing.look().dumps
        ages = {step: age for step, of in [*families.items()] if (age := _written(of)) is not None}
        order = {step: nth for nth, step in enumerate([*self._order], 1)}
        for step in order.keys() - ages.keys():  # one by one: another thread may add its own
            self._order.pop(step, None)
        # Who reads one meanwhile needs no mark: who has opened it reads it to the end, or is told
        # that it is gone (NFS), and who comes later finds none. A miss, never a part of one.
        spared = {*in_use(self.directory), written}
        oldest = sorted((ages[step], order.get(step, 0), step) for step in ages.keys() - spared)
        for _, _, step in oldest[: max(0, len(ages) - keep_last)]:
            # The last calls first. Who is killed on the way leaves a step that lacks its last
            # calls, as one whose job was killed: the others still serve their calls.
            for place in reversed(families[step]):
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    remove(place.directory, self.directory)
            logger.info("rlskip: removed the dumps of step %d: keep_last=%d", step, keep_last)

    # -- loading -------------------------------------------------------------------------

    def load(
        self,
        step: int,
        *,
        call: str = "",
        meta: DumpMeta | None = None,
        part: str | Sequence[str] = "rollouts",
        fields: Sequence[str] | None = None,
    ) -> Any:
        """The rollouts of `step`, verified, in newly allocated memory.

        `meta` is what :meth:`read_meta` returned of it: another dump that has its place by now is
        refused. `part` is ``rollouts``, or ``aside`` for the sidecar; or several, for a list of
        them. Of the outermost mapping or batch only `fields` are read and verified; None for all.

        Raises
        ------
        CorruptDumpError
            It is not what was written; it is quarantined.
        AbsentDumpError
            There is none, or another one than `meta` says, or it cannot be read at the moment.
        DumpError
            It is in another format, holds a type unknown here, has no such field, or needs more
            memory than `max_bytes`.
        """
        with (
            opened(self.place(step, call), self._quarantine) as here,
            here.reader(meta or here.read_meta(), self._max_bytes) as reader,
        ):
            parts = [part] if isinstance(part, str) else part
            values = [rebuild(reader, one, fields) for one in parts]
            if fields is None:
                reader.verify()
            return values[0] if isinstance(part, str) else values

    def size_of(self, meta: DumpMeta) -> int:
        """Bytes of both files of a dump, as ``rlskip ls`` counts them."""
        place = self.place(meta.step, meta.call)
        with contextlib.suppress(OSError):  # it may be gone by now
            return meta.stored + os.lstat(f"{place.root}/{place.name}/{place.meta}").st_size
        return meta.stored

    def quarantine(self, step: int, reason: str, call: str = "") -> Path | None:
        """Keep a bad dump under a name that is none of a dump's, with a warning.

        Returns where it is; None when it is gone or cannot be moved.
        """
        return self._quarantine(self.place(step, call), reason)

    def _quarantine(
        self, place: Place, reason: str, judged: os.stat_result | None = None
    ) -> Path | None:
        kept, becomes = None, ""
        try:
            if self._quarantines:
                kept = move_away(place, judged)
                becomes = f". It is kept as {kept}"
                # Else the next dump that is published would keep it listed for a second.
                self._listing.forget()
        except FileNotFoundError:
            return None
        except OSError as error:
            becomes = f". It stays there, because it cannot be renamed: {error}"
        logger.warning("rlskip: %s cannot be used: %s%s", place.directory, reason, becomes)
        return place.root / kept if kept else None


def _written(places: Sequence[Place]) -> int | None:
    """When the last of these was written, in ns; None where none is there any more."""
    found = []
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.lstat(place.directory).st_mtime_ns)
    return max(found, default=None)
