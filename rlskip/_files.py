"""The one place that opens what is below a dump_dir.

Anybody who can write there can leave links, FIFOs, devices or huge files. Nothing below the
directory that a caller names is followed through a link, waited for, or read beyond a bound.
The directory itself may be reached through links: it is the user's choice.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import attrs

from rlskip.errors import RlskipError

_FLAGS = {
    "r": os.O_RDONLY,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
# Of what a path on Linux may have, 4095 bytes, two names are left for what is in a directory.
_MAX_PATH = 4095 - 2 * 256
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@,-]")
_MAX_NAME = 120  # two make one name of a directory, which may have 255
_KINDS = {stat.S_IFREG: "a regular file", stat.S_IFDIR: "a directory"}


class RefusedFileError(RlskipError, OSError):
    """Not the kind of file that belongs here, or a larger one."""


@attrs.frozen
class Folder:
    """A directory held open by :func:`open_folder`: names are those of its direct entries."""

    handle: int
    _parts: tuple[str | Path, ...]

    @property
    def path(self) -> Path:
        return Path(*self._parts)

    def names(self) -> list[str]:
        return os.listdir(self.handle)

    def stat(self, name: str) -> os.stat_result:
        """What the entry itself is: a link is not followed."""
        return os.stat(name, dir_fd=self.handle, follow_symlinks=False)

    def open(
        self, name: str, mode: str = "r", *, max_bytes: int | None = None, buffering: int = -1
    ) -> BinaryIO:
        """Open a regular file of at most `max_bytes`, in binary.

        `mode` is ``r``, ``a`` or ``x``, as :func:`open` has them. Raises RefusedFileError for
        anything else that is there, or a larger file.
        """
        # Not blocking: a FIFO would wait for its other end.
        flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_NOCTTY
        handle = self._open(name, flags, stat.S_IFREG)
        try:
            found = os.fstat(handle)
            self._check(found, stat.S_IFREG, name)
            if max_bytes is not None and found.st_size > max_bytes:
                what = f"it has {found.st_size} bytes, at most {max_bytes} are expected"
                raise self._refused(what, name)
        except BaseException:
            os.close(handle)
            if mode == "x":
                os.unlink(name, dir_fd=self.handle)
            raise
        return cast(BinaryIO, os.fdopen(handle, f"{mode}b", buffering))

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a file of at most `max_bytes`; raises as :meth:`open` does."""
        with self.open(name, max_bytes=max_bytes) as file:
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size))

    def enter(self, name: str, *, create: bool = False) -> Folder:
        """Open a subdirectory; the caller closes it."""
        try:
            handle = self._open(name, os.O_RDONLY | os.O_DIRECTORY, stat.S_IFDIR)
            return Folder(handle, (*self._parts, name))
        except FileNotFoundError:
            if not create:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=self.handle)
        return self.enter(name)

    def _open(self, name: str, flags: int, kind: int) -> int:
        if os.sep in name:  # what a dump names may be anything
            raise self._refused("it is not in this directory", name)
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self.handle)
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError:  # which does not tell what is there instead
            with contextlib.suppress(FileNotFoundError):
                self._check(self.stat(name), kind, name)
            raise

    def _check(self, found: os.stat_result, kind: int, name: str) -> None:
        if stat.S_IFMT(found.st_mode) != kind:
            raise self._refused(f"it is not {_KINDS[kind]}; links are not followed", name)

    def _refused(self, what: str, name: str) -> RefusedFileError:
        return RefusedFileError(what, str(self.path / name), "remove it or move it away")


@contextlib.contextmanager
def open_folder(root: str | Path, *parts: str, create: bool = False) -> Iterator[Folder]:
    """Hold the directory `root` / `parts` open: what is done in it is done there.

    No part of it may be a link, `root` may. Raises RefusedFileError where one of `parts` is not a
    directory, and FileNotFoundError where there is none, unless it is to be created.
    """
    if create and not os.path.isdir(root):
        os.makedirs(root, exist_ok=True)
    folder = Folder(os.open(root, os.O_RDONLY | os.O_DIRECTORY), (root,))
    try:
        for part in parts:
            outer, folder = folder, folder.enter(part, create=create)
            os.close(outer.handle)
        yield folder
    finally:
        with contextlib.suppress(OSError):  # nothing was written through it
            os.close(folder.handle)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, durably."""
    if os.path.isdir(path) or path == path.parent:
        return
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk, on file systems that can."""
    with contextlib.suppress(OSError), open_folder(path) as folder:
        os.fsync(folder.handle)


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def cannot_write(directory: Path) -> str | None:
    """Why `directory`, or the part of it that exists, cannot be written; None if it can."""
    if len(os.fsencode(directory)) > _MAX_PATH:
        return os.strerror(errno.ENAMETOOLONG)
    try:
        with tempfile.TemporaryFile(dir=existing(directory), prefix=".rlskip-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


@functools.lru_cache(1 << 10, typed=True)
def safe_name(name: object) -> str:
    """`name` as one path component; a changed one carries a hash of the original."""
    text = str(name)
    clean = _UNSAFE.sub("-", text)
    if clean == text and text.strip(".") and len(text) <= _MAX_NAME:
        return text
    import xxhash  # a job that skips nothing needs none

    tag = xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))[:12]
    return f"{clean.strip('.')[: _MAX_NAME - 20]}~{tag}"
