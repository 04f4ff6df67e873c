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
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlskip import _files
from rlskip._files import Folder, open_folder
from rlskip.store.layout import WORK, Place, as_step, quarantine_name

logger = logging.getLogger(__name__)

STALE_S = 120.0
"""Seconds without renewal after which a staging directory or a reader's mark counts as left behind
by a process that died."""
_ATTEMPTS = 10
_EXIT_S = 2.0


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
            # Else something was removed in this moment: what had the name, or the run's directory.
            elif error.errno != errno.ENOENT:
                raise
            if attempt == _ATTEMPTS:
                raise
    sync_directory(final.parent)
    return True


def replace(staging: Folder, final: Path, root: Path) -> None:
    """As :func:`publish`, over whatever has the name: that is gone before, so none sees a mixture.

    Of two that replace one name at once the last one stays.
    """
    for _ in range(_ATTEMPTS):
        if publish(staging, final):
            return
        with contextlib.suppress(FileNotFoundError):
            remove(final, root)
    raise OSError(errno.EBUSY, "other processes write it again and again", str(final))


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


def move_away(place: Place, judged: os.stat_result | None = None) -> str:
    """Rename a dump, or what has the name of its directory and is not one; returns the new name.

    With `judged` only that very directory is moved.

    Raises
    ------
    FileNotFoundError
        It is gone, or another dump has its place by now.
    """
    name, kept = place.name, quarantine_name(place.name)
    with open_folder(place.root) as folder:
        at = {"src_dir_fd": folder.handle, "dst_dir_fd": folder.handle}
        os.rename(name, kept, **at)
        # Another process may have replaced it between the look and the rename: then what was moved
        # is sound, and goes back. Where a third one has the place by then, it stays moved away.
        if judged is not None and not os.path.samestat(folder.stat(kept), judged):
            with contextlib.suppress(OSError):
                os.rename(kept, name, **at)
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(folder.path / name))
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
        steps = (as_step(mark.split("-")[1]) for mark in marks)
        return {step for step in steps if step is not None}
    return set()
