"""Where dumps are, and how they are opened.

::

    {dump_dir}/{experiment_name}_{project_name}/GBS{gbs}_N{n}_in{prompt_len}_out{response_len}/
        {step}/gen_batch.dp             meta.json
        {step}/{part}/gen_batch.dp      meta.json            later calls, or the parts of a queue
        {step}/gen_batch.r0-of-2.dp     meta.r0-of-2.json    one pair per rank
        {step}.journal                  finished sessions of a step without a dump

Whatever is not a dump (staging directories, leases, quarantined dumps) has a name that is not an
integer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import xxhash

from rlskip._files import Folder, RefusedFileError, guard, open_folder
from rlskip.config.dump_dir import parse_dump_dir
from rlskip.errors import ConfigError
from rlskip.format.dump_errors import AbsentDumpError, CorruptDumpError, UnreadableDumpError

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,-]")
_MAX_NAME = 120  # two make one name of a directory, which may have 255
_JOURNAL = ".journal"


def run_directory(
    dump_dir: str | Path,
    experiment_name: str,
    project_name: str,
    gbs: int | str | None,
    n: int | str | None,
    prompt_len: int | str | None,
    response_len: int | str | None,
) -> Path:
    """The directory of a run's dumps; nothing is created.

    ``~`` is expanded; a relative `dump_dir` stays relative. Names are made safe: none leaves
    `dump_dir`, and no two names are changed into the same one.

    Raises
    ------
    ConfigError
        `dump_dir` is a URL or empty, or the run's directory is reached by a symbolic link below it
        (`dump_dir` itself may be one).
    """
    run = f"{safe_name(experiment_name)}_{safe_name(project_name)}"
    shape = f"GBS{gbs}_N{n}_in{prompt_len}_out{response_len}"
    outermost = parse_dump_dir(dump_dir)
    directory = outermost / run / safe_name(shape)
    refuse_links(directory)
    guard(outermost)
    return directory


def refuse_links(directory: Path) -> None:
    """Raise ConfigError where one of a run's two directories in a dump_dir is a symbolic link."""
    for path in (directory.parent, directory):
        if os.path.islink(path):
            raise ConfigError(
                f"{path} is a symbolic link; below dump_dir none is followed",
                where="skip.dump_dir",
                remedy="replace it by what it points to, or give a dump_dir that is there",
            )


def safe_name(name: object) -> str:
    """`name` as one path component; a changed one carries a hash of the original.

    >>> safe_name("qwen3-8b"), safe_name("../x")
    ('qwen3-8b', '-x~ade92630f33b')
    """
    text = str(name)
    clean = _UNSAFE.sub("-", text)
    if clean == text and text.strip(".") and len(text) <= _MAX_NAME:
        return text
    tag = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))[:12]
    return f"{clean.strip('.')[: _MAX_NAME - 20]}~{tag}"


def as_step(name: str) -> int | None:
    """The step or part that a directory is named after; None for any other name."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0"):
        return int(name)
    return None


def journal_name(step: int) -> str:
    """The name of the step's journal."""
    return f"{step}{_JOURNAL}"


def journaled_step(name: str) -> int | None:
    """The step whose journal has this name; None for any other name."""
    return as_step(name.removesuffix(_JOURNAL)) if name.endswith(_JOURNAL) else None


def call_numbers(names: Iterable[str]) -> list[int]:
    """The later calls of a step, ascending, by the names in its directory.

    None where there is a part 0: such parts are those of a queue.
    """
    found = {as_step(name) for name in names}
    return [] if 0 in found else sorted(number for number in found if number is not None)


@attrs.frozen
class Place:
    """Where the dump of one step (or of a part of it) is, for one rank.

    Parameters
    ----------
    root
        The run's directory. Below it no symbolic link is followed.
    """

    root: Path
    step: int
    part: int | None = None
    rank: int = 0
    world_size: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        return (str(self.step),) if self.part is None else (str(self.step), str(self.part))

    @property
    def directory(self) -> Path:
        return self.root.joinpath(*self.parts)

    @property
    def dump(self) -> str:
        return f"gen_batch{self._shard}.dp"

    @property
    def meta(self) -> str:
        return f"meta{self._shard}.json"

    @property
    def _shard(self) -> str:
        return "" if self.world_size == 1 else f".r{self.rank}-of-{self.world_size}"

    def shards(self) -> Iterator[Place]:
        """The same step's places of all ranks."""
        return (attrs.evolve(self, rank=rank) for rank in range(self.world_size))

    def next_shard(self) -> Place:
        """The same step's place of the next rank; of the last one, rank 0's."""
        return attrs.evolve(self, rank=(self.rank + 1) % self.world_size)

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenPlace]:
        """Hold the directory open, so that its files belong together whatever is renamed.

        This is the boundary to the file system for whatever reads dumps: within the block, too,
        its faults become one of these errors.

        Raises
        ------
        AbsentDumpError
            There is no such directory or file (any more).
        UnreadableDumpError
            The file system does not let it be read, or there is not enough memory.
        CorruptDumpError
            Something else has the directory's name: a file, a link.
        """
        try:
            with open_folder(self.root, *self.parts) as folder:
                yield OpenPlace(self, folder)
        except RefusedFileError as error:
            raise CorruptDumpError(error.what, error.where) from error
        except (OSError, MemoryError) as error:
            where = str(self.directory)
            # ESTALE: another host has removed what is open here (NFS).
            if getattr(error, "errno", None) in (errno.ENOENT, errno.ESTALE):
                raise AbsentDumpError("there is no dump of this step", where) from error
            reason = error if isinstance(error, OSError) else "there is not enough memory"
            raise UnreadableDumpError(
                f"it cannot be read at the moment: {reason}", where
            ) from error


@attrs.frozen
class OpenPlace:
    """A place whose directory is held open."""

    place: Place
    folder: Folder

    def names(self) -> frozenset[str]:
        return frozenset(self.folder.names())

    def open(self, name: str, max_bytes: int | None = None) -> BinaryIO:
        """Open a file of the dump for reading.

        Raises
        ------
        FileNotFoundError
            There is none.
        CorruptDumpError
            It is not a regular file, or larger than `max_bytes`.
        """
        try:
            return self.folder.open(name, max_bytes=max_bytes)
        except RefusedFileError as error:
            raise CorruptDumpError(error.what, error.where) from error

    def size(self, name: str) -> int:
        """Bytes of a file of the dump; raises as :meth:`open` does."""
        found = self.folder.stat(name)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptDumpError("it is not a regular file", str(self.folder.path / name))
        return found.st_size

    def is_in_place(self) -> bool:
        """Whether the open directory still has this name, as far as can be seen."""
        try:
            now = os.lstat(self.place.directory)
            return os.path.samestat(os.fstat(self.folder.handle), now)
        except OSError:
            return False
