"""Break the file operations below a directory, one at a time, or write down their order.

As SQLite's tests do: the 1st operation fails, then the 2nd, and so on, with every errno, until the
code under test gets through without meeting the fault::

    for fault in each_fault(directory):
        with fault:
            assert store.read_meta(1) in (None, meta)
        assert store.load(1) == rollouts
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

ERRNOS: tuple[int, ...] = (
    errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE,
    errno.ENFILE, errno.ENOMEM, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ESTALE,
    errno.ETIMEDOUT, errno.ENAMETOOLONG,
)  # fmt: skip
"""What a file system may answer that works otherwise."""

# Functions of `os` by what they work on: a path or a descriptor, or two paths. Closing never fails:
# it would leak.
_OF_ONE = (
    "access", "chmod", "listdir", "lstat", "mkdir", "readlink", "rmdir", "scandir", "stat",
    "truncate", "unlink", "remove", "utime",
    "fdatasync", "fstat", "fsync", "ftruncate", "lseek", "pread", "pwrite", "read", "write",
)  # fmt: skip
_OF_TWO = ("link", "rename", "replace", "symlink")
_OPENING = ("open", "dup")


@attrs.frozen
class FileOperation:
    """One call: its name as in `os`, and its paths relative to the directory that is watched."""

    name: str
    path: str
    other: str | None = None


class FaultyFiles:
    """A context in which one file operation below `root` fails, in all threads of this process.

    Parameters
    ----------
    root
        The directory; operations outside of it are left alone.
    code
        The errno to fail with; None to fail nothing and only record.
    at
        Which operation fails, counted from 1.
    lasting
        Whether all later ones fail, too.

    Attributes
    ----------
    operations
        What was done, in order, up to and including what failed.
    happened
        Whether the fault has been met.

    Covered are the functions of `os`, files from `open` and `os.fdopen`, and what builds on them
    (`pathlib` from Python 3.11 on, `shutil`). A write that fails has written half of its bytes.
    """

    def __init__(
        self, root: str | Path, code: int | None = None, at: int = 1, *, lasting: bool = False
    ) -> None:
        self.code = code
        self.at = at
        self.lasting = lasting
        self.operations: list[FileOperation] = []
        self.happened = False
        self.entered = False
        self._root = os.path.abspath(root)
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._real: list[tuple[Any, str, Any]] = []

    def __repr__(self) -> str:
        code = "none" if self.code is None else errno.errorcode[self.code]
        met = self.operations[-1] if self.operations else "nothing"
        return f"<fault {code} at operation {self.at}{'+' * self.lasting}, last: {met}>"

    def __enter__(self) -> FaultyFiles:
        self.entered = True
        for names, make in (
            (_OF_ONE, self._of_one),
            (_OF_TWO, self._of_two),
            (_OPENING, self._opening),
        ):
            for name in names:
                self._put(os, name, make)
        self._put(os, "close", self._os_close)
        for owner, name in ((os, "fdopen"), (io, "open"), (builtins, "open")):
            self._put(owner, name, self._open)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        self._real.clear()

    def operate(self, name: str, path: str, other: str | None = None) -> None:
        """Record an operation, and raise if it is the one to fail."""
        with self._lock:
            if self.happened and not self.lasting:
                return
            relative = [os.path.relpath(p, self._root) for p in (path, other) if p is not None]
            self.operations.append(FileOperation(name, *relative))
            if self.code is None or len(self.operations) < self.at:
                return
            self.happened = True
        raise OSError(self.code, os.strerror(self.code), path)

    # -- what is put in the place of the real functions ----------------------------------

    def _put(self, owner: Any, name: str, make: Callable[[str, Any], Any]) -> None:
        real = getattr(owner, name)
        self._real.append((owner, name, real))
        setattr(owner, name, make(name, real))

    def _of_one(self, name: str, real: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if (found := self._path(path, options.get("dir_fd"))) is not None:
                self.operate(name, found)
            return real(path, *arguments, **options)

        return call

    def _of_two(self, name: str, real: Any) -> Any:
        def call(one: Any, other: Any, **options: Any) -> Any:
            paths = (
                self._path(one, options.get("src_dir_fd")),
                self._path(other, options.get("dst_dir_fd", options.get("dir_fd"))),
            )
            if paths != (None, None):
                self.operate(name, *(path or self._root for path in paths))
            return real(one, other, **options)

        return call

    def _opening(self, name: str, real: Any) -> Any:
        opened = self._of_one(name, real)

        def call(path: Any, *arguments: Any, **options: Any) -> int:
            handle: int = opened(path, *arguments, **options)
            self._remember(handle, self._path(path, options.get("dir_fd")))
            return handle

        return call

    def _os_close(self, name: str, real: Any) -> Any:
        def call(handle: int) -> None:
            self._paths.pop(handle, None)
            real(handle)

        return call

    def _open(self, name: str, real: Any) -> Any:
        def call(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            found = self._path(file, None)
            if found is None:
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                self.operate("open", found)
            raw = _File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            raw.faults, raw.path = self, found
            self._remember(raw.fileno(), found)
            if buffering == 0:
                return raw
            kind: Any = io.BufferedReader if mode[0] == "r" else io.BufferedWriter
            kind = io.BufferedRandom if "+" in mode else kind
            buffered = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

        return call

    def _remember(self, handle: int, path: str | None) -> None:
        # A descriptor outside may have got the number of one that a file object has closed.
        self._paths.pop(handle, None)
        if path is not None:
            self._paths[handle] = path

    def _path(self, path: Any, dir_fd: int | None) -> str | None:
        """The absolute path of a path or a descriptor, where it is below the root."""
        if isinstance(path, int):
            return self._paths.get(path)
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            if dir_fd not in self._paths:
                return None
            text = os.path.join(self._paths[dir_fd], text)
        text = os.path.normpath(os.path.join(os.getcwd(), text))
        return text if text == self._root or text.startswith(self._root + os.sep) else None


class _File(io.FileIO):
    faults: FaultyFiles
    path: str

    def write(self, data: Any) -> int:
        try:
            self.faults.operate("write", self.path)
        except OSError:
            super().write(memoryview(data)[: len(data) // 2])
            raise
        return super().write(data)

    def readinto(self, buffer: Any) -> int:
        self.faults.operate("read", self.path)
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        self.faults.operate("read", self.path)
        return super().read(-1 if size is None else size)

    def readall(self) -> bytes:
        self.faults.operate("read", self.path)
        return super().readall()

    def truncate(self, size: int | None = None) -> int:
        self.faults.operate("ftruncate", self.path)
        return super().truncate(size)


def flip(path: Path, at: int) -> None:
    """Alter one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def each_fault(
    root: str | Path, errnos: tuple[int, ...] = ERRNOS, *, lasting: bool = False
) -> Iterator[FaultyFiles]:
    """One context after another: each errno at the 1st operation, at the 2nd, ...

    The next errno follows once a context ends without having met its fault, so the code under test
    must do the same in each context.
    """
    for code in errnos:
        at, met = 0, True
        while met:
            at += 1
            fault = FaultyFiles(root, code, at, lasting=lasting)
            yield fault
            if not fault.entered:
                raise RuntimeError("use each fault as a context: `with fault: ...`")
            met = fault.happened
