"""StepStore: the dumps of one run, by step."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs

from rlskip.store import commit, container, pieces
from rlskip.store.codec import Packer
from rlskip.store.dump import is_complete, open_dump, read_meta, rebuild, whose
from rlskip.store.errors import AbsentDumpError, CorruptDumpError
from rlskip.store.identity import Identity
from rlskip.store.index import StepIndex
from rlskip.store.layout import OpenPlace, Place
from rlskip.store.meta import DumpMeta
from rlskip.store.retention import Retention

logger = logging.getLogger(__name__)

_ATTEMPTS = 10


@attrs.frozen(eq=False)
class Prepared:
    """A dump that can be written: everything in it is known to be kept.

    Its arrays are views of the rollouts until :meth:`copied`.
    """

    place: Place
    index: dict[str, Any]
    arrays: list[pieces.Array]
    identity: Identity | None
    info: dict[str, Any]
    replace: bool

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def copy_nbytes(self) -> int:
        """What :meth:`copied` takes of its arena at most."""
        return sum(array.copy_nbytes for array in self.arrays)

    def copied(self, arena: pieces.Arena) -> Prepared:
        """The same with arrays in `arena`'s memory: the rollouts may change from now on."""
        return attrs.evolve(self, arrays=pieces.copied(self.arrays, arena))


class StepStore:
    """The dumps in one directory, as :func:`~rlskip.store.run_directory` names it.

    Parameters
    ----------
    directory
        Created on the first save.
    rank, world_size
        Of several ranks that call the stage together each keeps a shard of the step; the step
        is there when all shards are, with the same ``info["generation"]``.
    keep_last, max_size
        After each save remove the dumps written longest ago, down to so many and to so many
        bytes; never the step just saved or one being read. None: keep all.

    A corrupt dump is never loaded: whoever meets it sets it aside with a warning, and the
    step counts as absent. A dump in a newer format stays where it is and raises.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        keep_last: int | None = None,
        max_size: int | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.world_size = world_size
        self._index = StepIndex(self.directory)
        self._retention = Retention(self.directory, keep_last, max_size)

    # -- which steps there are -----------------------------------------------------------

    def steps(self, inner: int | None = None) -> list[int]:
        """The steps with a complete dump, ascending."""
        return [step for step in self._index.steps() if self._is_complete(step, inner)]

    def nearest(self, step: int, inner: int | None = None) -> int | None:
        """The step that `repeat` takes for `step`.

        `step` itself; else the largest below; else the smallest above; else None.
        """
        candidates = self._index.nearest(step)
        return next((s for s in candidates if self.peek(s, inner) is not None), None)

    def peek(self, step: int, inner: int | None = None) -> DumpMeta | None:
        """What this rank's dump of `step` says about itself; None when there is none.

        Cheap: the rollouts are not read. A dump that is evidently corrupt is set aside: None.

        Raises
        ------
        NewerFormatError
            A newer rlskip wrote it.
        """
        try:
            with self._opened(step, inner) as here:
                return read_meta(here) if is_complete(here) else None
        except (FileNotFoundError, CorruptDumpError):
            return None

    def _is_complete(self, step: int, inner: int | None) -> bool:
        try:
            with self._place(step, inner).opened() as here:
                return is_complete(here)
        except (FileNotFoundError, CorruptDumpError):
            return False

    # -- saving --------------------------------------------------------------------------

    def save(
        self,
        step: int,
        rollouts: Any,
        *,
        identity: Identity | None = None,
        info: Mapping[str, Any] | None = None,
        aside: Any = None,
        inner: int | None = None,
        replace: bool = False,
    ) -> DumpMeta:
        """Write `rollouts` as the dump of `step`, whole or not at all.

        Parameters
        ----------
        rollouts
            Anything the codec keeps.
        identity, info
            Recorded in ``meta.json``; `info` is any JSON. Several ranks give the same
            ``info["generation"]``, which no other call has (:attr:`RankGroup.decision`): a
            shard of one call and another's are no step, but a miss, and are replaced.
        aside
            A second value, loaded on its own: the generators' states, say.
        inner
            The mini-batch, where a step has several.
        replace
            What to do where another has dumped the step meanwhile: keep the other's and
            return its meta (False), or set it aside and take its place (True).

        Raises
        ------
        UnsupportedTypeError
            The rollouts hold what cannot be kept; nothing was written.
        OSError
            Disk full and the like; nothing is left of the dump.
        """
        return self.write(
            self.prepare(
                step,
                rollouts,
                identity=identity,
                info=info,
                aside=aside,
                inner=inner,
                replace=replace,
            )
        )

    def prepare(
        self,
        step: int,
        rollouts: Any,
        *,
        identity: Identity | None = None,
        info: Mapping[str, Any] | None = None,
        aside: Any = None,
        inner: int | None = None,
        replace: bool = False,
    ) -> Prepared:
        """The first half of :meth:`save`: all that can be refused, nothing written."""
        packer = Packer()
        index = {
            "rollouts": packer.node(rollouts, "rollouts"),
            "aside": packer.node(aside, "aside"),
        }
        return Prepared(
            place=self._place(step, inner),
            index=index,
            arrays=packer.arrays,
            identity=identity,
            info=json.loads(json.dumps(dict(info or {}))),
            replace=replace,
        )

    def write(self, dump: Prepared) -> DumpMeta:
        """The second half: write it, sync it, rename it into place."""
        place = dump.place
        commit.sweep(self.directory)
        with commit.work_aside(self.directory, "-".join(place.parts)) as work:
            with commit.synced(work / place.dump) as file:
                checksum = container.write(file, {**whose(place), **dump.index}, dump.arrays)
                stored = file.tell()
            meta = DumpMeta(
                step=place.step,
                inner=place.inner,
                rank=place.rank,
                world_size=place.world_size,
                checksum=checksum,
                nbytes=dump.nbytes,
                stored=stored,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                identity=dump.identity,
                info=dump.info,
            )
            with commit.synced(work / place.meta) as file:
                file.write(meta.to_bytes())
            for depth, _ in enumerate(place.parts, 1):
                commit.move_link_aside(self.directory.joinpath(*place.parts[:depth]))
            before = self._index.changed_at()
            if place.world_size > 1:
                meta = self._publish_shard(work, place, meta)
            else:
                meta = self._publish(work, place, meta, dump.replace)
        self._index.added(place.step, before)
        if place.rank == 0:
            self._retention.apply(self._index.steps(), place.step)
        return meta

    def _publish(self, work: Path, place: Place, meta: DumpMeta, replace: bool) -> DumpMeta:
        for _ in range(_ATTEMPTS):
            if commit.publish(work, place.directory):
                return meta
            other = None if replace else self.peek(place.step, place.inner)
            if other is not None:
                logger.info("%s: dumped meanwhile by another; its dump stays", place.directory)
                return other
            self.set_aside(place.step, "another dump takes its place", place.inner)
        raise FileExistsError(
            errno.EEXIST, "others put something here as often as it is moved away", place.directory
        )

    def _publish_shard(self, work: Path, place: Place, meta: DumpMeta) -> DumpMeta:
        """Into the directory that all ranks share; the shard is there once its meta.json is."""
        final = place.directory
        final.mkdir(parents=True, exist_ok=True)
        (final / place.meta).unlink(missing_ok=True)
        os.replace(work / place.dump, final / place.dump)
        os.replace(work / place.meta, final / place.meta)
        commit.sync_directory(final)
        commit.sync_directory(final.parent)
        return meta

    # -- loading -------------------------------------------------------------------------

    def load(
        self, step: int, *, inner: int | None = None, fields: Sequence[str] | None = None
    ) -> Any:
        """The rollouts of `step`, verified, in memory of their own.

        Large arrays get that of rollouts that were loaded and let go, where there is some of
        their size: up to 256 MiB wait for that.

        Parameters
        ----------
        fields
            Read and verify only these of the outermost mapping or batch; None for all.

        Raises
        ------
        CorruptDumpError
            It is not what was written; it has been set aside.
        AbsentDumpError
            There is none.
        DumpError
            It is in a newer format, holds a type unknown here, or has no such field.
        """
        return self.load_with_meta(step, inner=inner, fields=fields)[0]

    def load_with_meta(
        self, step: int, *, inner: int | None = None, fields: Sequence[str] | None = None
    ) -> tuple[Any, DumpMeta]:
        """As :meth:`load`, with what that very dump says about itself."""
        with self._reader(step, inner) as (reader, meta):
            if fields is None:
                reader.expand_all()
            return rebuild(reader, "rollouts", fields), meta

    def load_aside(self, step: int, *, inner: int | None = None) -> Any:
        """What :meth:`save` was given as `aside`; raises as :meth:`load` does."""
        with self._reader(step, inner) as (reader, _):
            return rebuild(reader, "aside", None)

    def verify(self, step: int, *, inner: int | None = None) -> DumpMeta:
        """Compare every byte with its checksum, and set nothing aside; raises as :meth:`load`."""
        place = self._place(step, inner)
        with _absent(place), place.opened() as here, open_dump(here) as (reader, meta):
            reader.verify()
            return meta

    def set_aside(self, step: int, reason: str, inner: int | None = None) -> Path | None:
        """Keep a bad dump under a name that is no step, with a warning.

        Of several ranks each sets its own shard aside. Returns where; None when it is gone.
        """
        place = self._place(step, inner)
        name = commit.name_aside(place.directory.name)
        kept = place.directory.with_name(name)
        try:
            if place.world_size == 1 or place.directory.is_symlink():
                os.rename(place.directory, kept)
            else:
                kept.mkdir()
                for file in (place.meta, place.dump):
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(place.directory / file, kept / file)
        except FileNotFoundError:
            return None
        logger.warning(
            "%s cannot be used: %s. It is kept as %s", place.directory, reason, kept.name
        )
        return kept

    # -- within --------------------------------------------------------------------------

    def _place(self, step: int, inner: int | None) -> Place:
        return Place(self.directory, step, inner, self.rank, self.world_size)

    @contextlib.contextmanager
    def _opened(self, step: int, inner: int | None) -> Iterator[OpenPlace]:
        """The dump's directory; what turns out corrupt while it is open is set aside."""
        place = self._place(step, inner)
        handle: int | None = None
        try:
            with place.opened() as here:
                try:
                    yield here
                except CorruptDumpError:
                    handle = os.dup(here.handle)
                    raise
        except CorruptDumpError as error:
            # Only what was read, not what another may have put into its place since.
            if handle is None or place.is_at(handle):
                self.set_aside(step, error.what, inner)
            raise
        finally:
            if handle is not None:
                os.close(handle)

    @contextlib.contextmanager
    def _reader(self, step: int, inner: int | None) -> Iterator[tuple[container.Reader, DumpMeta]]:
        with (
            _absent(self._place(step, inner)),
            commit.reading(self.directory, step),
            self._opened(step, inner) as here,
            open_dump(here) as opened,
        ):
            yield opened


@contextlib.contextmanager
def _absent(place: Place) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise AbsentDumpError("there is no dump of this step", str(place.directory)) from error
