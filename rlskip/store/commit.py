"""Whole or not at all: work aside, one rename; what is bad is kept aside.

Two writers may race for a name: one rename wins, whole. Nothing here relies on locks or on
process ids, so that a network file system will do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

WORK = ".work"
STALE_S = 120.0
"""Seconds without a sign of life after which a writer's work or a reader's mark counts as left
behind by a process that died."""


class _Pulse:
    """Renews the times of what this process writes or reads, in a thread, while it does.

    One write or sync of a large dump may take longer than STALE_S.
    """

    def __init__(self, every_s: float = STALE_S / 4) -> None:
        self._every_s = every_s
        self.forget()

    def forget(self) -> None:
        """A forked child has neither the thread nor the work."""
        self._lock = threading.Lock()
        self._paths: set[Path] = set()
        self._beats = False

    @contextlib.contextmanager
    def renews(self, path: Path) -> Iterator[None]:
        with self._lock:
            self._paths.add(path)
            if not self._beats:
                with contextlib.suppress(RuntimeError):  # an interpreter that ends has no threads
                    threading.Thread(target=self._beat, name="rlskip-pulse", daemon=True).start()
                    self._beats = True
        try:
            yield
        finally:
            with self._lock:
                self._paths.discard(path)

    def _beat(self) -> None:
        # It outlives one dump: a thread for each would cost more than a small one's load.
        while True:
            time.sleep(self._every_s)
            with self._lock:
                paths = list(self._paths)
                if not paths:
                    self._beats = False
                    return
            for path in paths:
                with contextlib.suppress(OSError):
                    os.utime(path)


_PULSE = _Pulse()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _PULSE.forget())


@contextlib.contextmanager
def work_aside(root: Path, label: str) -> Iterator[Path]:
    """A fresh directory under `root` to work in; gone afterwards unless renamed away."""
    aside = _work(root) / f"{label}-{secrets.token_hex(8)}"
    aside.mkdir(parents=True)
    try:
        with _PULSE.renews(aside):
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


def move_link_aside(path: Path) -> None:
    """Nothing is written or removed through a link that lies where a directory of ours should."""
    if path.is_symlink():
        kept = path.with_name(name_aside(path.name))
        with contextlib.suppress(FileNotFoundError):  # another was quicker
            os.rename(path, kept)
            logger.warning(
                "%s is a symbolic link, which is not followed. It is kept as %s", path, kept.name
            )


def _work(root: Path) -> Path:
    move_link_aside(root / WORK)
    return root / WORK


def remove(path: Path, root: Path) -> None:
    """Delete a dump: it vanishes at once and whole, its files follow."""
    doomed = _work(root) / f"removed-{path.name}-{secrets.token_hex(8)}"
    doomed.parent.mkdir(exist_ok=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(root: Path, stale_s: float = STALE_S) -> None:
    """Remove what writers and readers left behind that died."""
    try:
        work = _work(root)
        now, left = _now(work), list(work.iterdir())
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError):
            newest = max(p.lstat().st_mtime for p in (path, *path.glob("*")))
            if now - newest > stale_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                logger.info("removed %s, left by a run that ended before it was whole", path)


def _now(work: Path) -> float:
    """The file system's own clock: those of the hosts may differ."""
    probe = work / f"clock-{secrets.token_hex(8)}"
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now


# -- marks of readers, so that nobody removes what is being read ---------------------------

_READING = "reading-"


@contextlib.contextmanager
def reading(root: Path, step: int) -> Iterator[None]:
    """Tell other processes that `step` is being read, where they can be told."""
    mark = root / WORK / f"{_READING}{step}-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # no writer was here yet, or read-only
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        with _PULSE.renews(mark):
            yield
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def being_read(root: Path, stale_s: float = STALE_S) -> set[int]:
    """The steps that living readers have marked."""
    work = root / WORK
    try:
        marks = [name for name in os.listdir(work) if name.startswith(_READING)]
    except OSError:
        return set()
    if not marks:
        return set()
    try:
        now = _now(work)
    except OSError:
        now = -math.inf  # nobody knows how old they are: they all count
    found = set()
    for name in marks:
        with contextlib.suppress(FileNotFoundError):
            if now - (work / name).lstat().st_mtime <= stale_s:
                found.add(int(name.split("-")[1]))
    return found
