"""A dump is there completely or not at all, and what is bad is quarantined.

A dump is written in a staging directory and renamed into place. Of two writers that race for a name
the first rename wins. Nothing here relies on locks or on process ids, so that network file systems
will do.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import math
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rlskip import _files
from rlskip._files import Folder, open_folder
from rlskip.store.layout import WORK, call_numbers, quarantine_name, steps_among

logger = logging.getLogger(__name__)

STALE_S = 120.0
"""Seconds without renewal after which a staging directory or a reader's mark counts as left behind
by a process that died."""
_ATTEMPTS = 10
_EXIT_S = 2.0
_JOIN_POLL_S = 0.05


class _Pulse:
    """Renews the times of what this process writes or reads, in a thread, as long as it does.

    One write or sync of a large dump may take longer than STALE_S. The thread ends before the
    interpreter does.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty: a forked child has neither the parent's thread nor its dumps."""
        self._lock = threading.Lock()
        # Both under the lock. While there is a path, the thread beats; where it could not be
        # started, the next call of `renews` tries again.
        self._paths: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @contextlib.contextmanager
    def renews(self, path: Path) -> Iterator[None]:
        with self._lock:
            self._paths.add(path)
            if self._thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._beat, name="rlskip-pulse", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread left, or the interpreter ends
                    thread.start()
                    self._thread = thread
        try:
            yield
        finally:
            with self._lock:
                self._paths.discard(path)

    def _beat(self) -> None:
        # It outlives one dump: a thread for each would cost more than loading a small one.
        while not self._ending.wait(STALE_S / 4):
            with self._lock:
                paths = list(self._paths)
                if not paths:
                    self._thread = None
                    return
            for path in paths:
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)

    def end(self) -> None:
        """Stop for good; a disk that hangs is waited for briefly."""
        self._ending.set()
        if (thread := self._thread) is not None:
            thread.join(_EXIT_S)


_PULSE = _Pulse()
os.register_at_fork(after_in_child=lambda: _PULSE.forget())
atexit.register(lambda: _PULSE.end())


# -- writing -------------------------------------------------------------------------------


@contextlib.contextmanager
def staging_directory(root: Path, label: str) -> Iterator[Folder]:
    """A new directory below `root` to write in; gone afterwards unless renamed away."""
    name = f"{label}-{secrets.token_hex(8)}"
    make_directory(root)
    quarantine_other_than_directory(root / WORK)
    with open_folder(root, WORK, name, create=True) as folder:
        try:
            with _PULSE.renews(folder.path):
                yield folder
        finally:
            _remove_tree(folder.path)


@contextlib.contextmanager
def synced(folder: Folder, name: str) -> Iterator[BinaryIO]:
    """A new file to write; when the block ends, it is on the disk."""
    with folder.open(name, "x", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def publish(staging: Folder, final: Path) -> bool:
    """Rename the staging directory to `final`, durably; False where something is there already."""
    _sync(staging)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            make_directory(final.parent)
            os.rename(staging.path, final)
            break
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                if os.path.lexists(final):
                    return False
            # Else something was removed in this moment: what had the name, or the step's directory,
            # over which its first call may be renamed while it is empty.
            elif error.errno != errno.ENOENT:
                raise
            if attempt == _ATTEMPTS:
                raise
    sync_directory(final.parent)
    return True


@contextlib.contextmanager
def joining(root: Path, step: int) -> Iterator[None]:
    """Within the block no other process or thread moves files into the step's directory.

    Two that did so at once would mix their files. The claim of a process that died holds the others
    up until it is stale.

    Raises
    ------
    OSError
        The claim cannot be written, or others have had it all the time.
    """
    claim = root / WORK / f"joining-{step}"
    for _ in range(math.ceil(2 * STALE_S / _JOIN_POLL_S)):
        with contextlib.suppress(FileExistsError), open_folder(root, WORK) as work:
            work.open(claim.name, "x").close()
            break
        sweep(root)
        time.sleep(_JOIN_POLL_S)
    else:
        raise OSError(errno.EBUSY, "other processes dump it again and again", str(claim))
    try:
        with _PULSE.renews(claim):
            yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(claim)


def publish_files(staging: Folder, final: Path, meta: str, dump: str) -> None:
    """Move a dump's files into a directory that others share; it is there once its meta is.

    Those of an earlier dump are replaced.
    """
    make_directory(final)
    with open_folder(final) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(meta, dir_fd=folder.handle)
        _move_files(staging, folder, meta, dump)


def join_files(staging: Folder, final: Path, meta: str, dump: str) -> bool:
    """As :func:`publish_files`; False where there are such files, or there is no directory."""
    with contextlib.suppress(FileNotFoundError), open_folder(final) as folder:
        if {meta, dump}.isdisjoint(folder.names()):
            _move_files(staging, folder, meta, dump)
            return True
    return False


def _move_files(staging: Folder, folder: Folder, meta: str, dump: str) -> None:
    os.replace(staging.path / dump, dump, dst_dir_fd=folder.handle)
    # Where the step was removed meanwhile, the folder is gone, and the dump with it.
    with contextlib.suppress(FileNotFoundError):
        os.replace(staging.path / meta, meta, dst_dir_fd=folder.handle)
    _sync(folder)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, durably."""
    if os.path.isdir(path) or path == path.parent:
        _files.refuse_guarded_links(path)
        return
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk, on file systems that can."""
    with contextlib.suppress(OSError), open_folder(path) as folder:
        _sync(folder)


def _sync(folder: Folder) -> None:
    with contextlib.suppress(OSError):
        os.fsync(folder.handle)


# -- keeping what is bad, removing what is old ------------------------------------------------


def move_away(
    root: Path,
    parts: Sequence[str],
    files: Sequence[str],
    *,
    alone: bool,
    judged: os.stat_result | None = None,
) -> str:
    """Rename a dump, or what has the name of its directory and is not one; returns the new name.

    Unless the dump is `alone` in its directory, only its `files` are moved: the others are those
    of other calls or of other ranks. Where it is, only what was `judged` to be bad is moved.

    Raises
    ------
    FileNotFoundError
        It is gone, or another dump has its place by now.
    """
    *above, name = parts
    kept = quarantine_name(name)
    with open_folder(root, *above) as folder:
        at = {"src_dir_fd": folder.handle, "dst_dir_fd": folder.handle}
        if alone or not stat.S_ISDIR(folder.stat(name).st_mode):
            os.rename(name, kept, **at)
            if judged is not None and not os.path.samestat(folder.stat(kept), judged):
                with contextlib.suppress(OSError):
                    os.rename(kept, name, **at)
                raise FileNotFoundError(errno.ENOENT, "it was replaced", str(folder.path / name))
            # Later calls that were written in that very moment go back.
            with contextlib.suppress(OSError), open_folder(folder.path, kept) as moved:
                for number in call_numbers(moved.names()):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder.handle)
                    os.rename(f"{kept}/{number}", f"{name}/{number}", **at)
            return kept
        os.mkdir(kept, dir_fd=folder.handle)
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{name}/{file}", f"{kept}/{file}", **at)
    return kept


def quarantine_other_than_directory(path: Path) -> None:
    """Rename whatever has the name of one of our directories and is not one, such as a link."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return
        kept = path.with_name(quarantine_name(path.name))
        os.rename(path, kept)
    except FileNotFoundError:  # nothing is there, or another process was quicker
        return
    logger.warning("%s is not a directory. It is kept as %s", path, kept.name)


def remove(path: Path, root: Path) -> None:
    """Delete a dump: it vanishes in one rename, its files follow."""
    quarantine_other_than_directory(root / WORK)
    with open_folder(root, WORK, create=True) as work:
        doomed = work.path / f"removed-{path.name}-{secrets.token_hex(8)}"
        os.rename(path, doomed)
    _remove_tree(doomed)


def _remove_tree(path: Path) -> None:
    for _ in range(_ATTEMPTS):  # a writer that holds the directory may still move files into it
        with contextlib.suppress(OSError):  # of which `ignore_errors` lets some pass
            shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return


def sweep(root: Path) -> None:
    """Remove what writers and readers that died left behind."""
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:
        before = _now(work) - STALE_S
        for name in work.names():
            with contextlib.suppress(OSError):
                _remove_if_stale(work, name, before)


def _remove_if_stale(work: Folder, name: str, before: float) -> None:
    found, path = work.stat(name), work.path / name
    if not stat.S_ISDIR(found.st_mode):
        if found.st_mtime < before:
            os.unlink(name, dir_fd=work.handle)
            logger.info("removed %s, left by a process that died", path)
        return
    with open_folder(work.path, name) as left:
        newest = max([found.st_mtime, *(left.stat(file).st_mtime for file in left.names())])
    if newest < before:
        shutil.rmtree(path)
        logger.info("removed %s, left by a process that died before it was complete", path)


def _now(work: Folder) -> float:
    """The file system's own clock: those of the hosts may differ."""
    name = f"clock-{secrets.token_hex(8)}"
    work.open(name, "x").close()
    try:
        return work.stat(name).st_mtime
    finally:
        os.unlink(name, dir_fd=work.handle)


# -- marks of readers, so that nobody removes what is being read ------------------------------

_READING = "reading-"


@contextlib.contextmanager
def reading(root: Path, step: int) -> Iterator[None]:
    """Mark `step` as being read, for other processes, where a mark can be written."""
    mark = root / WORK / f"{_READING}{step}-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:  # none, or read-only
        work.open(mark.name, "x").close()
    try:
        with _PULSE.renews(mark):
            yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(mark)


def being_read(root: Path) -> set[int]:
    """The steps that living readers have marked; raises OSError where that cannot be seen."""
    sweep(root)  # where that fails, dead readers count, too
    with contextlib.suppress(FileNotFoundError), open_folder(root, WORK) as work:
        marks = (name for name in work.names() if name.startswith(_READING))
        return set(steps_among(mark.split("-")[1] for mark in marks))
    return set()
