"""Where dumps lie, and how they are opened.

::

    {dump_dir}/{experiment_name}_{project_name}/GBS{gbs}_N{n}_in{prompt_len}_out{response_len}/
        {step}/gen_batch.dp             meta.json
        {step}/{inner}/gen_batch.dp     meta.json
        {step}/gen_batch.r0-of-2.dp     meta.r0-of-2.json    one pair per rank

Whatever is no dump (work, leases, set-aside dumps) has a name that is no integer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import xxhash

from rlskip.errors import ConfigError
from rlskip.store.errors import CorruptDumpError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,-]")
_MAX_NAME = 120  # two make one name of a directory, which may have 255


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
    `dump_dir`, and none is changed into another's.

    Raises
    ------
    ConfigError
        `dump_dir` is a URL or empty, or the run's directory is reached by a symbolic link below it
        (`dump_dir` itself may be one).
    """
    text = str(dump_dir)
    if _URL.match(text):
        raise ConfigError(
            f"{text!r} is a URL; dumps are written to mounted file systems only",
            where="skip.dump_dir",
            remedy="mount the storage and give its path, e.g. skip.dump_dir=/mnt/dumps",
        )
    if not text.strip():
        raise ConfigError("it is empty", where="skip.dump_dir", remedy="give a directory")
    run = f"{safe_name(experiment_name)}_{safe_name(project_name)}"
    shape = f"GBS{gbs}_N{n}_in{prompt_len}_out{response_len}"
    directory = Path(text).expanduser() / run / safe_name(shape)
    refuse_links(directory)
    return directory


def refuse_links(directory: Path) -> None:
    """Raise ConfigError where one of a run's two directories in a dump_dir is a symbolic link."""
    for path in (directory.parent, directory):
        if os.path.islink(path):  # False where it cannot be told
            raise ConfigError(
                f"{path} is a symbolic link; below dump_dir none is followed",
                where="skip.dump_dir",
                remedy="move what it points to into its place, or give a dump_dir that lies there",
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
    """The step or mini-batch that a directory is named after; None for any other name."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0"):
        return int(name)
    return None


@attrs.frozen
class Place:
    """Where one rank's dump of one step (or mini-batch) lies.

    Parameters
    ----------
    root
        The run's directory. Below it no symbolic link is followed.
    """

    root: Path
    step: int
    inner: int | None = None
    rank: int = 0
    world_size: int = 1

    @property
    def parts(self) -> tuple[str, ...]:
        return (str(self.step),) if self.inner is None else (str(self.step), str(self.inner))

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

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenPlace]:
        """The directory held open, so that its files belong together whatever is renamed.

        Raises
        ------
        FileNotFoundError
            There is none.
        CorruptDumpError
            Something else has its name: a file, a link.
        """
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in self.parts:
                handle, outer = self._enter(part, handle), handle
                os.close(outer)
            yield OpenPlace(self, handle)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # Removed by another host while it was open here (NFS).
            raise FileNotFoundError(errno.ENOENT, "it is gone", str(self.directory)) from error
        finally:
            os.close(handle)

    def is_at(self, handle: int) -> bool:
        """Whether the open directory `handle` is still the one that has this name."""
        try:
            return os.path.samestat(os.fstat(handle), os.lstat(self.directory))
        except FileNotFoundError:
            return False

    def _enter(self, part: str, outer: int) -> int:
        try:
            return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise CorruptDumpError(
                    f"{part} is a file or a link, not a directory", where=str(self.directory)
                ) from error
            raise


@attrs.frozen
class OpenPlace:
    """A place whose directory is held open."""

    place: Place
    handle: int

    def names(self) -> frozenset[str]:
        return frozenset(os.listdir(self.handle))

    def open(self, name: str) -> BinaryIO:
        """A file of the dump, for reading.

        Raises
        ------
        FileNotFoundError
            There is none.
        CorruptDumpError
            It is a link, a directory, a pipe: anything but a file.
        """
        where = str(self.place.directory / name)
        try:
            # Not blocking: a pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(name, flags, dir_fd=self.handle)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise CorruptDumpError("a link or a socket, not a file", where=where) from error
            raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise CorruptDumpError("a directory or a pipe, not a file", where=where)
        return os.fdopen(handle, "rb")

    def size(self, name: str) -> int:
        """Bytes of a file of the dump; raises as :meth:`open` does."""
        found = os.stat(name, dir_fd=self.handle, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            where = str(self.place.directory / name)
            raise CorruptDumpError("a link, a directory or a pipe, not a file", where=where)
        return found.st_size
