"""StepStore: the dumps of one run, by step."""

from __future__ import annotations

import bisect
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlskip._files import Folder
from rlskip.format import container
from rlskip.format.dump_errors import (
    AbsentDumpError,
    CorruptDumpError,
    DumpError,
    UnreadableDumpError,
)
from rlskip.format.kinds import Packer, rebuild
from rlskip.store import commit
from rlskip.store.dump import OpenDump, opened
from rlskip.store.identity import Identity
from rlskip.store.layout import Place, call_numbers, steps_among
from rlskip.store.meta import DumpMeta
from rlskip.store.prepared import Prepared, as_json
from rlskip.store.retention import Retention

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_TICK_S = 1.0
"""A directory changed again within a clock tick of being listed may show no newer time."""


class StepStore:
    """The dumps in one directory, as :func:`~rlskip.store.run_directory` names it.

    A corrupt dump is never loaded: the reader that finds it quarantines it with a warning, and the
    step counts as absent. A dump that cannot be read at the moment counts as absent, too, and one
    in another format raises; both stay where they are.

    Parameters
    ----------
    directory
        Created on the first save.
    rank, world_size
        Of several ranks that call the stage together each keeps a shard of the step. The step is
        there when all shards are, with the same ``info["generation"]``.
    keep_last
        After each save remove the steps that were written longest ago, down to this number; never
        the step just saved or one that is being read. None: keep all.
    quarantines
        Whether a corrupt dump is moved away. False for who only looks: it stays where it is.
    complete
        Given each meta that is read, it returns it with what its dump records elsewhere.
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
    ) -> None:
        self.directory = Path(directory)
        self._quarantines, self._complete = quarantines, complete
        self.rank = rank
        self.world_size = world_size
        # While the directory's mtime, in ns, is the first, it holds exactly these steps. Threads
        # replace the pair as a whole.
        self._seen: tuple[int | None, list[int]] = (None, [])
        self._retention = Retention(self.directory, keep_last)

    # -- which steps there are -----------------------------------------------------------

    def steps(self, part: int | None = None) -> list[int]:
        """The steps with a complete dump, ascending; those that cannot be read are left out."""
        with _unread_dumps() as unread:
            return [s for s in self._listed(unread) if self._is_complete(s, part, unread)]

    def nearest(self, step: int, part: int | None = None) -> int | None:
        """The step that `repeat` takes for `step`; those that cannot be read are left out.

        `step` itself; else the largest below; else the smallest above; else None.
        """
        with _unread_dumps() as unread:
            listed = self._listed(unread)
            at = bisect.bisect_right(listed, step)
            candidates = [*reversed(listed[:at]), *listed[at:]]
            return next((s for s in candidates if self._meta(s, part, unread) is not None), None)

    def listed(self) -> list[int]:
        """The steps that have a directory, ascending, without a look into it."""
        with _unread_dumps() as unread:
            return self._listed(unread)

    def calls(self, step: int) -> list[int]:
        """The numbers of the calls that `step` has dumps of, ascending, from one listing.

        Call 0 is the step's own dump, the others are its parts. Whether a dump is complete is not
        looked at. A step of a queue, whose parts are numbered from 0, has no later calls.
        """
        try:
            with opened(self._place(step, None)) as here:
                names = here.names()
        except (AbsentDumpError, UnreadableDumpError):
            return []
        except CorruptDumpError:  # for who reads it to quarantine
            return [0]
        first = [0] if {here.place.dump, here.place.meta} & names else []
        return first + call_numbers(names)

    def read_meta(self, step: int, part: int | None = None) -> DumpMeta | None:
        """What ``meta.json`` of this rank's dump holds; None when there is no complete dump.

        Cheap: the rollouts are not read. A dump that is evidently corrupt is quarantined: None. One
        that cannot be read at the moment is logged as a warning: None. Of several ranks each
        compares its shard with the next rank's: if all get a meta, all shards are of one call.

        Raises
        ------
        OtherFormatError
            It is in another version of the format.
        """
        with _unread_dumps() as unread:
            return self._meta(step, part, unread)

    def _listed(self, unread: list[DumpError]) -> list[int]:
        try:
            changed = os.stat(self.directory).st_mtime_ns
            seen, steps = self._seen
            if changed != seen:
                steps = steps_among(os.listdir(self.directory))
                settled = time.time() - changed / 1e9 > _TICK_S
                self._seen = (changed if settled else None, steps)
            return steps
        except FileNotFoundError:
            return []
        except OSError as error:
            unread.append(UnreadableDumpError(f"it cannot be listed: {error}", str(self.directory)))
            return []

    def _is_complete(self, step: int, part: int | None, unread: list[DumpError]) -> bool:
        try:
            with opened(self._place(step, part)) as here:
                return here.is_complete()
        except UnreadableDumpError as error:
            unread.append(error)
        except DumpError:
            pass
        return False

    def _meta(self, step: int, part: int | None, unread: list[DumpError]) -> DumpMeta | None:
        try:
            return self._meta_there(step, part)
        except UnreadableDumpError as error:
            unread.append(error)
        except (AbsentDumpError, CorruptDumpError):
            pass
        return None

    def _meta_there(self, step: int, part: int | None) -> DumpMeta | None:
        with self._opened(step, part) as here:
            there = here.is_complete(compare_all=False)
            return self._complete(here.read_meta()) if there else None

    # -- saving --------------------------------------------------------------------------

    def save(self, step: int, rollouts: Any, **about: Any) -> DumpMeta:
        """Write `rollouts` as a dump of `step`, completely or not at all.

        A dump that is there already stays, and its meta is returned.

        The other parameters are those of :meth:`prepare`.

        Raises
        ------
        UnsupportedTypeError
            The rollouts or `info` hold what cannot be kept; nothing was written.
        OSError
            The disk is full, for example; nothing is left of the dump.
        """
        return self.write(self.prepare(step, rollouts, **about))

    def prepare(
        self,
        step: int,
        rollouts: Any,
        *,
        identity: Identity | None = None,
        info: Mapping[str, Any] | None = None,
        sidecar: Any = None,
        part: int | None = None,
        on_conflict: Callable[[DumpMeta], int | None] | None = None,
    ) -> Prepared:
        """The first half of :meth:`save`: refuse what cannot be kept, and write nothing.

        Parameters
        ----------
        rollouts
            Anything that a codec keeps.
        identity, info
            Recorded in ``meta.json``; `info` is any JSON, with the entries that
            :class:`DumpMeta` names of their type. Several ranks give the same
            ``info["generation"]``, which no other call has: shards of different calls are not a
            step but a miss, and are replaced.
        sidecar
            A second value, loaded on its own, such as the states of random generators.
        part
            The number of the part, where a step has several. Of several calls the first has none.
        on_conflict
            Called with the meta of the dump where another process has dumped the step meanwhile.
            It returns the part to write to instead; None: this dump is dropped. By default it is
            dropped. Shards are always replaced, one file after the other.
        """
        packer = Packer()
        index = {
            "rollouts": packer.node(rollouts, "rollouts"),
            "aside": packer.node(sidecar, "sidecar"),
        }
        place, plain = self._place(step, part), as_json(info or {}, identity)
        return Prepared(place, index, packer.arrays, packer.cost, identity, plain, on_conflict)

    def write(self, dump: Prepared) -> DumpMeta:
        """The second half: write it, sync it, rename it into place."""
        commit.sweep(self.directory)
        while True:
            try:
                meta, ours = self._write(dump)
            except OSError as error:
                if error.filename is None:  # of a full disk, for example
                    error.filename = str(dump.place.directory)
                raise
            part = None if ours or dump.on_conflict is None else dump.on_conflict(meta)
            if part is None:
                return meta
            dump = attrs.evolve(dump, place=attrs.evolve(dump.place, part=part))

    def _write(self, dump: Prepared) -> tuple[DumpMeta, bool]:
        """The meta of the dump that has the place now, and whether it is this one."""
        place, ours = dump.place, True
        with commit.staging_directory(self.directory, "-".join(place.parts)) as staging:
            meta = dump.write_files(staging)
            shared = place.parts if place.world_size > 1 else place.parts[:-1]
            for depth, _ in enumerate(shared, 1):
                commit.quarantine_other_than_directory(self.directory.joinpath(*shared[:depth]))
            if place.world_size > 1:
                commit.publish_files(staging, place.directory, place.meta, place.dump)
            elif (other := self._publish(staging, place)) is not None:
                meta, ours = other, False
        # It is published: from here on nothing may fail.
        if place.rank == 0:
            is_later_call = place.part is not None
            self._retention.apply(self.listed, place.step, is_later_call=is_later_call)
        return meta, ours

    def _publish(self, staging: Folder, place: Place) -> DumpMeta | None:
        """Give the dump its name; the meta of the dump that has the name already."""
        for _ in range(_ATTEMPTS):
            if commit.publish(staging, place.directory):
                return None
            try:
                judged = os.lstat(place.directory)
            except FileNotFoundError:  # it was removed in this moment
                continue
            if (other := self._others(place)) is not None:
                return other
            if place.part is None and any(self.calls(place.step)):  # the directory is theirs, too
                if self._join(staging, place):
                    return None
                continue
            # What is there is no dump that can be read. Another process may be quicker to move or
            # to replace it.
            with contextlib.suppress(FileNotFoundError):
                kept = commit.move_away(self.directory, place.parts, (), alone=True, judged=judged)
                logger.warning("%s holds no readable dump. It is kept as %s", place.directory, kept)
        raise FileExistsError(
            errno.EEXIST, "other processes dump it again and again", str(place.directory)
        )

    def _join(self, staging: Folder, place: Place) -> bool:
        """Move the first call's files to the later calls; False where that is to be tried again."""
        with commit.joining(self.directory, place.step):
            if self._others(place) is None and 0 in self.calls(place.step):
                self.quarantine(place.step, "it is not complete")
            return commit.join_files(staging, place.directory, place.meta, place.dump)

    def _others(self, place: Place) -> DumpMeta | None:
        """The meta of the dump that another process has written to `place`.

        Raises
        ------
        OSError
            What is there cannot be read. It may be a sound dump, which nobody quarantines.
        """
        other = None
        with contextlib.suppress(CorruptDumpError):
            try:
                other = self._meta_there(place.step, place.part)
            except AbsentDumpError as error:
                # What is stale counts as absent for a reader. It may have been moved, and be sound.
                stale = getattr(error.__cause__, "errno", None) == errno.ESTALE
                if stale or isinstance(error, UnreadableDumpError):
                    raise OSError(errno.EIO, error.what, error.where) from error
        if other is not None:
            logger.info("%s has a dump already, which stays", place.directory)
        return other

    # -- loading -------------------------------------------------------------------------

    def load(
        self, step: int, *, part: int | None = None, fields: Sequence[str] | None = None
    ) -> Any:
        """The rollouts of `step`, verified, in newly allocated memory.

        Large arrays use the memory of earlier rollouts that nothing refers to any more, where some
        of their size is free: up to 256 MiB are kept for that.

        Parameters
        ----------
        fields
            Read and verify only these of the outermost mapping or batch; None for all.

        Raises
        ------
        CorruptDumpError
            It is not what was written; it is quarantined.
        AbsentDumpError
            There is none, or it cannot be read at the moment.
        DumpError
            It is in another format, holds a type unknown here, or has no such field.
        """
        with self._reader(step, part) as (reader, _):
            if fields is None:
                reader.expand_all()
            return rebuild(reader, "rollouts", fields)

    def load_with_meta(
        self, step: int, *, part: int | None = None, sidecar: bool = False
    ) -> tuple[Any, DumpMeta, Any]:
        """As :meth:`load`, with the meta of that very dump, and its sidecar or None."""
        with self._reader(step, part) as (reader, meta):
            reader.expand_all()
            aside = rebuild(reader, "aside") if sidecar else None
            return rebuild(reader, "rollouts"), self._complete(meta), aside

    def load_sidecar(self, step: int, *, part: int | None = None) -> Any:
        """What :meth:`save` was given as `sidecar`; raises as :meth:`load` does."""
        with self._reader(step, part) as (reader, _):
            return rebuild(reader, "aside")

    def size_of(self, meta: DumpMeta) -> int:
        """Bytes of both files of a dump, as ``rlskip ls`` counts them."""
        place = Place(self.directory, meta.step, meta.part, meta.rank, meta.world_size)
        with contextlib.suppress(OSError):  # it may be gone by now
            return meta.stored + os.lstat(place.directory / place.meta).st_size
        return meta.stored

    def quarantine(
        self,
        step: int,
        reason: str,
        part: int | None = None,
        *,
        judged: os.stat_result | None = None,
    ) -> Path | None:
        """Keep a bad dump under a name that is not a step, with a warning.

        Other calls of the step and other ranks' shards stay; so does a dump whose directory is not
        the one that was `judged`. Returns where the dump is; None when it is gone or cannot be
        moved.
        """
        place = self._place(step, part)
        if not self._quarantines:
            logger.warning("%s cannot be used: %s", place.directory, reason)
            return None
        alone = self.world_size == 1 and (part is not None or not any(self.calls(step)))
        try:
            files = place.meta, place.dump
            kept = commit.move_away(self.directory, place.parts, files, alone=alone, judged=judged)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning(
                "%s cannot be used: %s. It stays there, because it cannot be renamed: %s",
                place.directory, reason, error,
            )  # fmt: skip
            return None
        self._retention.forget(step)
        logger.warning("%s cannot be used: %s. It is kept as %s", place.directory, reason, kept)
        return place.directory.with_name(kept)

    # -- within --------------------------------------------------------------------------

    def _place(self, step: int, part: int | None) -> Place:
        return Place(self.directory, step, part, self.rank, self.world_size)

    @contextlib.contextmanager
    def _opened(self, step: int, part: int | None) -> Iterator[OpenDump]:
        """Open the dump's directory; a dump that turns out to be corrupt is quarantined."""
        place, here = self._place(step, part), None
        try:
            with opened(place) as here:
                try:
                    yield here
                except CorruptDumpError as error:
                    # Only what was read, not what another process may have put there since.
                    if here.is_in_place():
                        judged = os.fstat(here.folder.handle)
                        self.quarantine(step, error.what, part, judged=judged)
                    raise
        except CorruptDumpError as error:
            if here is None:  # what has the directory's name is not a directory
                self.quarantine(step, error.what, part)
            raise

    @contextlib.contextmanager
    def _reader(self, step: int, part: int | None) -> Iterator[tuple[container.Reader, DumpMeta]]:
        with (
            commit.reading(self.directory, step),
            self._opened(step, part) as here,
            here.reader() as found,
        ):
            yield found


@contextlib.contextmanager
def _unread_dumps() -> Iterator[list[DumpError]]:
    """Those that cannot be read at the moment: one warning for all."""
    unread: list[DumpError] = []
    yield unread
    if unread:
        more = f" (and {len(unread) - 1} more)" if len(unread) > 1 else ""
        logger.warning("%s%s; it counts as absent", unread[0], more)
