"""A dump is there completely or not at all, and what is bad is quarantined.

A dump is written in a staging directory and renamed into place. Of two writers that race for a name
the first rename wins. Nothing here relies on locks, so that network file systems will do. What a
killed writer leaves is known by :mod:`rlskip.jobs.alive`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from rlskip import _files
from rlskip._files import Folder, open_folder
from rlskip.jobs import alive
from rlskip.jobs.alive import WORK
from rlskip.store.layout import Place, as_step, quarantine_name

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_NOT_NOW = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENOENT)


# -- writing -------------------------------------------------------------------------------


@contextlib.contextmanager
def staging_directory(root: Path, label: str) -> Iterator[Folder]:
    """A new directory below `root` to write in; gone afterwards unless renamed away."""
    # Owned before it is made: who sweeps between the two would else find a directory of nobody's.
    # The token keeps two writers of one dump apart.
    with (
        _work(root),
        open_folder(root, WORK, f"{label}~{alive.own(root)}", create=True) as folder,
    ):
        try:
            yield folder
        finally:
            _remove_tree(folder.path)


@contextlib.contextmanager
def _work(root: Path) -> Iterator[Folder]:
    """The folder of what jobs hold in `root`; anything else of that name is moved away."""
    make_directory(root)
    quarantine_other_than_directory(root / WORK)
    with open_folder(root, WORK, create=True) as work:
        yield work


@contextlib.contextmanager
def synced(folder: Folder, name: str) -> Iterator[BinaryIO]:
    """A new file to write; when the block ends, it is on the disk."""
    with folder.open(name, "x", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def publish(staging: Folder, final: Path) -> bool:
    """Rename the staging directory to `final`, durably; False where it is to be tried again.

    Then something has the name, or was removed in this moment.
    """
    # The order is important: both files are on the disk by now (`synced`); then the directory that
    # lists them, then the name, then the directory that lists the name. So after a power cut there
    # is a whole dump of this name, or none.
    _sync(staging)
    try:
        make_directory(final.parent)
        # A directory replaces an empty one only. A dump has files: the second writer of a name
        # always fails here, and a look before it could decide nothing.
        os.rename(staging.path, final)
    except OSError as error:
        if error.errno not in _NOT_NOW or not os.path.lexists(staging.path):
            raise
        return False
    sync_directory(final.parent)
    return True


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
    with _work(root) as work:
        # The rename first: no reader finds a dump of which a part is gone. What is left of it by a
        # process that is killed now is owned, so the next save removes it.
        doomed = work.path / f"removed-{path.name}~{alive.own(root)}"
        os.rename(path, doomed)
        _remove_tree(doomed)


def _remove_tree(path: Path) -> None:
    for _ in range(_ATTEMPTS):  # a writer that holds the directory may still move files into it
        with contextlib.suppress(OSError):  # of which `ignore_errors` lets some pass
            shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            return


# -- what living jobs are at, so that nobody removes it -----------------------------------------

_APPENDING = "appending-"


def appending(root: Path, step: int) -> AbstractContextManager[None]:
    """Mark the step's journal as one that grows, where a mark can be written."""
    with contextlib.suppress(OSError), open_folder(root, WORK, create=True):
        pass
    return alive.holding(root, f"{_APPENDING}{step}")


def in_use(root: Path) -> dict[int, str]:
    """The steps that living jobs generate; raises OSError where that cannot be seen."""
    uses = {alive.LEASE: "a job generates it", _APPENDING: "a process appends to it"}
    found: dict[int, str] = {}
    for label, _ in alive.held(root):
        for prefix in filter(label.startswith, uses):
            step = as_step(label.removeprefix(prefix).partition("-")[0])
            if step is not None:
                found[step] = uses[prefix]
    return found
