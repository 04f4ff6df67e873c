"""Whole or not at all: work aside, one rename; what is bad is kept aside.

Two writers may race for a name: one rename wins, whole. Nothing here relies on locks or on
process ids, so that a network file system will do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

WORK = ".work"
STALE_S = 120.0
"""Seconds without a write after which work aside counts as abandoned by a dead writer."""


@contextlib.contextmanager
def work_aside(root: Path, label: str) -> Iterator[Path]:
    """A fresh directory under `root` to work in; gone afterwards unless renamed away."""
    aside = root / WORK / f"{label}-{secrets.token_hex(8)}"
    aside.mkdir(parents=True)
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, on the disk when the block ends."""
    with open(path, "xb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def publish(aside: Path, final: Path) -> bool:
    """Rename directory `aside` to `final`, durably; False where something is there already."""
    sync_directory(aside)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(aside, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    sync_directory(final.parent)
    return True


def sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def name_aside(name: str) -> str:
    """A name, no integer, to keep a bad dump under."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{name}.bad-{stamp}-{secrets.token_hex(3)}"


def remove(path: Path, root: Path) -> None:
    """Delete a dump: it vanishes at once and whole, its files follow."""
    doomed = root / WORK / f"removed-{path.name}-{secrets.token_hex(8)}"
    doomed.parent.mkdir(exist_ok=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(root: Path, stale_s: float = STALE_S) -> None:
    """Remove what writers left behind that died: work nobody wrote to for `stale_s` seconds.

    Ages are told by the file system's own clock: those of the hosts may differ.
    """
    work = root / WORK
    probe = work / f"clock-{secrets.token_hex(8)}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        left = list(work.iterdir())
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError):
            newest = max(p.lstat().st_mtime for p in (path, *path.glob("*")))
            if now - newest > stale_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                logger.info("removed %s, left by a run that ended before it was whole", path)


# -- marks of readers, so that nobody removes what is being read ---------------------------

_READING = "reading-"


@contextlib.contextmanager
def reading(root: Path, step: int) -> Iterator[None]:
    """Tell other processes that `step` is being read, where they can be told."""
    mark = root / WORK / f"{_READING}{step}-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # no writer was here yet, or read-only
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def being_read(root: Path) -> set[int]:
    with contextlib.suppress(OSError):
        names = os.listdir(root / WORK)
        return {int(name.split("-")[1]) for name in names if name.startswith(_READING)}
    return set()
