"""Which jobs are at work in a run's directory, what each holds there, and which have died.

Each process has one file in the directory's ``.work``, which a thread touches every `BEAT_S`
seconds, from the first time that the process holds something there to its end. What it holds names
it by its token::

    .work/job-{token}             the process: its host, its number, when it began
    .work/{label}~{token}-{n}     what it holds: a staging directory, or an empty mark
    .work/lease-{step}[-{call}]   contains "{token}-{n}": who generates a step (rlskip.jobs.lease)

A job is dead if its process has ended, which is known at once on its host and in its container;
elsewhere if its file was not touched for `DEAD_S` seconds, by the clock of the file system: that of
this host may differ. What names nobody, as the lease of a job that was killed before it wrote it,
is as old as itself. There are no locks. All depends on an order: a job's file is there before
anything that the job holds, and goes after it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rlskip._files import Folder, RefusedFileError, open_folder
from rlskip.jobs.processes import this_process, why_ended

logger = logging.getLogger(__name__)

WORK = ".work"
LEASE = "lease-"
BEAT_S = 15.0
DEAD_S = 60.0
_JOB = "job-"
_OWNER = re.compile(r"([0-9a-f]{16})-[0-9]+")
_MAX_FILE = 4096  # bytes
_EXIT_S = 2.0


# -- what this process holds -----------------------------------------------------------------


class _Heart:
    """Says that this process lives, in each directory where it has held something."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty: a forked child is another process, which holds nothing of its parent's."""
        self.token = secrets.token_hex(8)
        self.numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._roots: set[Path] = set()
        self._starting = threading.Lock()
        self._ending = threading.Event()

    def begin(self, root: Path) -> str:
        root = Path(os.path.abspath(root))  # the thread finds it after a chdir, too
        self._show(root)
        self._roots.add(root)
        # Where the thread could not be started the next one tries again.
        with self._starting:
            if self._thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._beat, name="rlskip-alive", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread left, or the interpreter ends
                    thread.start()
                    self._thread = thread
        return f"{self.token}-{next(self.numbers)}"

    def _show(self, root: Path) -> None:
        """Touch this process's file, or make it."""
        name = f"{_JOB}{self.token}"
        try:
            os.utime(root / WORK / name, follow_symlinks=False)
        except FileNotFoundError:
            # Of two threads that make it the second goes on before it has its content, and so does
            # another job that reads it: it is new, which will do for `DEAD_S` seconds.
            with open_folder(root, WORK) as work, contextlib.suppress(FileExistsError):
                write_new(work, name, json.dumps(this_process()).encode())

    def _beat(self) -> None:
        # It outlives what is held: a thread and a file for each would cost more than loading a
        # small dump. A run that somebody has deleted is not forgotten here: another thread may be
        # about to begin in it again.
        while not self._ending.wait(BEAT_S):
            for root in [*self._roots]:
                with contextlib.suppress(OSError):
                    self._show(root)

    def now(self, root: Path) -> int:
        """When this process's file was touched, which is now, in ns."""
        self.begin(root)
        return os.lstat(root / WORK / f"{_JOB}{self.token}").st_mtime_ns

    def close(self) -> None:
        """Stop for good; a disk that hangs is waited for briefly."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_EXIT_S)
        for root in [*self._roots]:
            with contextlib.suppress(OSError):
                os.unlink(root / WORK / f"{_JOB}{self.token}")


_HEART = _Heart()
os.register_at_fork(after_in_child=lambda: _HEART.forget())
atexit.register(lambda: _HEART.close())


def own(root: Path) -> str:
    """``{token}-{n}``, which names this process as the owner of something that it is about to make.

    Raises OSError where `root` has no ``.work`` that can be written.
    """
    return _HEART.begin(root)


def is_mine(name: str) -> bool:
    """Whether this is an owner that names this process, or the name of something of one."""
    return _HEART.token in name


@contextlib.contextmanager
def holding(root: Path, label: str) -> Iterator[None]:
    """Hold `label` for others to see (:func:`held`), where a mark can be written.

    Who holds something marks it first and looks at what is there afterwards. Who must not disturb
    a holder makes its change first, looks for holders afterwards, and takes the change back where
    there is one. So of two at the same time at least one sees the other.
    """
    mark = None
    with contextlib.suppress(OSError):  # no `.work`, or one that cannot be written
        name = f"{label}~{own(root)}"
        with open_folder(root, WORK) as work:
            write_new(work, name)
        mark = root / WORK / name
    try:
        yield
    finally:
        if mark is not None:
            with contextlib.suppress(OSError):
                os.unlink(mark)


def write_new(work: Folder, name: str, data: bytes = b"") -> None:
    """Make a file, or none; raises FileExistsError where there is one."""
    file = work.open(name, "x")  # created or not: one operation everywhere
    try:
        with file:
            file.write(data)
    except OSError:  # a full disk; half a file would say nothing until it is old
        os.unlink(name, dir_fd=work.handle)
        raise


# -- what others hold ------------------------------------------------------------------------


@attrs.frozen
class Sign:
    """Whether the owner of something in ``.work`` lives.

    `touched` is in ns: of its job's file; where it has none, of the thing itself.
    """

    owner: str
    touched: int
    process: dict[str, Any]

    @property
    def job(self) -> str:
        process = self.process
        return f"process {process.get('pid')} on {process.get('host')}" if process else ""

    @classmethod
    def of(cls, work: Folder, name: str) -> Sign:
        """Raises OSError where it cannot be read, and FileNotFoundError where it is gone."""
        if name.startswith(LEASE):
            owner = _content(work, name)
        else:
            is_job = name.startswith(_JOB)
            owner = f"{name.removeprefix(_JOB)}-0" if is_job else name.rpartition("~")[2]
        if (found := _OWNER.fullmatch(owner)) is not None:
            # Opened, because NFS shows a file's new times to who opens it, and old ones for up to a
            # minute to who only looks.
            with (
                contextlib.suppress(FileNotFoundError, RefusedFileError),
                work.open(f"{_JOB}{found[1]}", max_bytes=_MAX_FILE) as file,
            ):
                return cls(owner, os.fstat(file.fileno()).st_mtime_ns, _parsed(file.read()))
        return cls(owner, _written(work, name), {})


def _content(work: Folder, lease: str) -> str:
    try:
        return work.read(lease, _MAX_FILE).decode("utf-8", "replace")
    except RefusedFileError:  # a link, a FIFO or a directory
        return ""


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        process = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return process if isinstance(process, dict) else {}


def _written(work: Folder, name: str) -> int:
    """When something, or a file in it, was written last."""
    times = [work.stat(name).st_mtime_ns]
    with contextlib.suppress(OSError), open_folder(work.path, name) as folder:
        times += [folder.stat(file).st_mtime_ns for file in folder.names()]
    return max(times)


def held(root: Path) -> list[tuple[str, str]]:
    """What living jobs hold in `root`: its label, and the job as a user would name it.

    The job's name is empty where it is not known, and of this process. Raises OSError where nothing
    can be seen.
    """
    with contextlib.suppress(FileNotFoundError), open_folder(root, WORK) as work:
        return [
            (name.rpartition("~")[0] or name, sign.job)
            for name, sign, why in _judged(work)
            if not why and not name.startswith(_JOB)
        ]
    return []


def sweep(root: Path, only: str | None = None) -> dict[str, str]:
    """Remove what jobs left that died, or `only` the entry of this name.

    Returns why the job of each is dead.
    """
    removed: dict[str, str] = {}
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:
        dead = {name for name, _, why in _judged(work, only) if why}
        # Listed again: between the first listing and its death a job may have made something more,
        # which nobody would know to be a dead job's once the job's file is gone.
        for name, sign, why in _judged(work, only) if dead else ():
            if why and (name in dead or not name.startswith(_JOB)):
                with contextlib.suppress(OSError):
                    remove(work, name, sign.owner)
                    removed[name] = why
                    logger.info("removed %s: its job %s", work.path / name, why)
    return removed


def _judged(work: Folder, only: str | None = None) -> Iterator[tuple[str, Sign, str | None]]:
    """What is in ``.work``, its sign of life, and why its job is dead; else it may live."""
    now: int | None = None
    # A job's file is the last: who is killed while it sweeps leaves what the next one can judge.
    names = sorted(work.names(), key=lambda name: name.startswith(_JOB))
    for name in names if only is None else [only]:
        sign, why = Sign("", 0, {}), None
        try:
            if not is_mine(name):
                sign = Sign.of(work, name)
                why = why_ended(sign.process)
                if why is None and not is_mine(sign.owner):
                    now = _HEART.now(work.path.parent) if now is None else now
                    is_silent = now - sign.touched > DEAD_S * 1e9
                    why = "shows no sign of life" if is_silent else None
        except FileNotFoundError:  # its owner, or another job, has removed it
            continue
        except OSError:  # what cannot be read at the moment may live
            pass
        yield name, sign, why


def remove(work: Folder, name: str, owner: str) -> None:
    """Remove an entry of ``.work`` that has this owner.

    A lease may be another job's by now, because its name comes again. So it is renamed, which one
    of several jobs achieves, and what was renamed is judged.
    """
    if name.startswith(LEASE):
        at = {"src_dir_fd": work.handle, "dst_dir_fd": work.handle}
        lease, name = name, f"taken-{secrets.token_hex(8)}"
        os.rename(lease, name, **at)
        if _content(work, name) != owner:
            with contextlib.suppress(OSError):
                os.link(name, lease, **at, follow_symlinks=False)
    if stat.S_ISDIR(work.stat(name).st_mode):
        shutil.rmtree(work.path / name)
    else:
        os.unlink(name, dir_fd=work.handle)
