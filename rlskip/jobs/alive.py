"""Which jobs are at work in a run's directory, what each holds there, and which have died.

Each process has one file in the directory's ``.work``, which a thread touches every `BEAT_S`
seconds, from the first time that the process holds something there to its end. What it holds names
it by its token::

    .work/job-{token}             the process: its host, its number, when it began
    .work/{label}~{token}-{n}     what it holds: a staging directory, or an empty mark
    .work/lease-{step}[-{call}]   a link to "{token}-{n}": who generates a step (rlskip.jobs.lease)
    .work/lease-of-{token}-{n}    a link, too: who removes the lease of that owner, which is dead

A job is dead if its process has ended, which is known at once on its host and in its container;
elsewhere if its file was not touched for `DEAD_S` seconds, by the clock of the file system: that of
this host may differ. What names nobody, as what somebody else put here, is as old as itself. There
are no locks. All depends on an order: a job's file is there before anything that the job holds, and
goes after it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlskip._files import Folder, RefusedFileError, make_directory, open_folder

logger = logging.getLogger(__name__)

WORK = ".work"
LEASE = "lease-"
BEAT_S = 15.0
DEAD_S = 60.0
_JOB = "job-"
_OWNER = re.compile(r"([0-9a-f]{16})-[0-9]+")
_MAX_FILE = 4096  # bytes
_EXIT_S = 2.0  # how long the end of a process waits for a disk that hangs


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
        self.late: set[tuple[Path, str, str]] = set()
        self._starting = threading.Lock()
        self._ending = threading.Event()

    def begin(self, root: Path) -> int:
        """Show it now, and from now on; when that was by the file system's clock, in ns."""
        root = Path(os.path.abspath(root))  # the thread finds it after a chdir, too
        touched = self._show(root)
        self._roots.add(root)
        # Where the thread could not be started the next one tries again.
        with self._starting:
            if self._thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._beat, name="rlskip-alive", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread left, or the interpreter ends
                    thread.start()
                    self._thread = thread
        return touched

    def _show(self, root: Path) -> int:
        file = root / WORK / f"{_JOB}{self.token}"
        try:
            os.utime(file, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            pid, host = os.getpid(), socket.gethostname()
            me = {"host": host, "pid": pid, "began": _began(pid), "sees": _sees()}
            # Of two threads that make it the second goes on before it has its content, and so does
            # another job that reads it: it is new, which will do for `DEAD_S` seconds.
            with open_folder(root, WORK) as work, contextlib.suppress(FileExistsError):
                write_new(work, file.name, json.dumps(me).encode())
        return os.lstat(file).st_mtime_ns

    def _beat(self) -> None:
        # It outlives what is held: a thread and a file for each would cost more than loading a
        # small dump. A run that somebody has deleted is not forgotten here: another thread may be
        # about to begin in it again.
        while not self._ending.wait(BEAT_S):
            for root in [*self._roots]:
                with contextlib.suppress(OSError):
                    self._show(root)
            for held in [*self.late]:
                drop(*held)

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_EXIT_S)
        files = [(root, f"{_JOB}{self.token}", f"{self.token}-0") for root in self._roots]
        for held in [*self.late, *files]:
            drop(*held)


_HEART = _Heart()
os.register_at_fork(after_in_child=lambda: _HEART.forget())
atexit.register(lambda: _HEART.close())


def own(root: Path) -> str:
    """``{token}-{n}``, which names this process as the owner of something that it is about to make.

    Raises OSError where `root` has no ``.work`` that can be written, or made.
    """
    try:
        _HEART.begin(root)
    except FileNotFoundError:  # the first time, or somebody has deleted the run
        make_directory(root / WORK)
        _HEART.begin(root)
    return f"{_HEART.token}-{next(_HEART.numbers)}"


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
    with contextlib.ExitStack() as held_so_long:
        with contextlib.suppress(OSError):  # no `.work`, or one that cannot be written
            owner = own(root)
            with open_folder(root, WORK) as work:
                write_new(work, name := f"{label}~{owner}")
            held_so_long.callback(drop, root, name, owner)
        yield


def drop(root: Path, name: str, owner: str) -> None:
    """Let others have what this `owner` held; where the disk fails, at the next beat or the end."""
    _HEART.late.discard((root, name, owner))
    try:
        with contextlib.suppress(FileNotFoundError), open_folder(root, WORK) as work:
            # It may be a parent process's, or a successor's: this job may have been suspended.
            if is_mine(owner) and owner_of(work, name) == owner:
                os.unlink(name, dir_fd=work.handle)
    except OSError:  # else others would wait for this job as long as it lives
        _HEART.late.add((root, name, owner))


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


def held(root: Path) -> list[tuple[str, str]]:
    """What living jobs hold in `root`: its label, and the job as a user would name it.

    The job's name is empty where it is not known, and of this process. Raises OSError where nothing
    can be seen.
    """
    found = []
    with contextlib.suppress(FileNotFoundError), open_folder(root, WORK) as work:
        for name, _, process, why in _judged(work):
            if not why and not name.startswith(_JOB):
                job = f"process {process.get('pid')} on {process.get('host')}" if process else ""
                found.append((name.rpartition("~")[0] or name, job))
    return found


def sweep(root: Path) -> dict[str, str]:
    """Remove what jobs left that died; of each thing by its name why its job is dead."""
    removed: dict[str, str] = {}
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:
        dead = {name for name, _, _, why in _judged(work) if why}
        # Listed again: between the first listing and its death a job may have made something more,
        # which nobody would know to be a dead job's once the job's file is gone.
        kept = set[str]()
        for name, owner, _, why in _judged(work) if dead else ():
            if not why or (name.startswith(_JOB) and (name not in dead or owner[:16] in kept)):
                continue
            try:
                _remove(work, name, owner)
                removed[name] = why
                logger.info("rlskip: removed %s: its job %s", work.path / name, why)
            except OSError:
                kept.add(owner[:16])
    return removed


def _judged(work: Folder) -> Iterator[tuple[str, str, dict[str, Any], str | None]]:
    """What is in ``.work``, its owner, that one's process, and why that is dead; else it may live.

    A job's file is the last: who is killed while it sweeps leaves what the next one can judge.
    """
    now: int | None = None
    for name in sorted(work.names(), key=lambda name: name.startswith(_JOB)):
        owner, process, why = "", dict[str, Any](), None
        try:
            if not is_mine(name):
                owner = owner_of(work, name)
                touched, process = _sign_of(work, name, owner)
                why = _why_ended(process)
                if why is None and not is_mine(owner):
                    now = _HEART.begin(work.path.parent) if now is None else now
                    why = "shows no sign of life" if now - touched > DEAD_S * 1e9 else None
        except FileNotFoundError:  # its owner, or another job, has removed it
            continue
        except OSError:  # what cannot be read at the moment may live
            pass
        yield name, owner, process, why


def owner_of(work: Folder, name: str) -> str:
    """Who made an entry of ``.work``; raises FileNotFoundError where a lease is gone."""
    if name.startswith(LEASE):
        try:
            return os.readlink(name, dir_fd=work.handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # there is something else, which no job of ours made
                raise
            return ""
    return f"{name.removeprefix(_JOB)}-0" if name.startswith(_JOB) else name.rpartition("~")[2]


def _sign_of(work: Folder, name: str, owner: str) -> tuple[int, dict[str, Any]]:
    """When the owner showed that it lives, in ns, and its process; without one, the entry's age."""
    if (found := _OWNER.fullmatch(owner)) is not None:
        # Opened, because NFS shows a file's new times to who opens it, and old ones for up to a
        # minute to who only looks.
        with (
            contextlib.suppress(FileNotFoundError, RefusedFileError),
            work.open(f"{_JOB}{found[1]}", max_bytes=_MAX_FILE) as file,
        ):
            touched, process = os.fstat(file.fileno()).st_mtime_ns, None
            with contextlib.suppress(ValueError, RecursionError):
                process = json.loads(file.read())
            return touched, process if isinstance(process, dict) else {}
    return work.stat(name).st_mtime_ns, {}


def _remove(work: Folder, name: str, owner: str) -> None:
    """Remove an entry of ``.work`` that has this owner; raises OSError where it has another by now.

    The name of a lease comes again, so it is removed by who has the lease of its owner, whose name
    does not. Were it renamed first and judged then, a lease that has another owner by now would be
    out of its place for a moment, and a third job could take it.
    """
    with contextlib.ExitStack() as at_the_end:
        if name.startswith(LEASE):
            right = f"{LEASE}of-{owner if _OWNER.fullmatch(owner) else 'nobody'}"
            os.symlink(mine := own(work.path.parent), right, dir_fd=work.handle)
            at_the_end.callback(drop, work.path.parent, right, mine)
            if owner_of(work, name) != owner:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if stat.S_ISDIR(work.stat(name).st_mode):
            shutil.rmtree(work.path / name)
        else:
            os.unlink(name, dir_fd=work.handle)


# -- the processes of this host ----------------------------------------------------------------


def _why_ended(process: dict[str, Any]) -> str | None:
    """What shows that a process has ended; empty if it lives, None if it cannot be seen here."""
    pid, began, sees = (process.get(name) for name in ("pid", "began", "sees"))
    if type(pid) is not int or pid <= 0 or None in (began, sees) or sees != _sees():
        return None
    ended = f"has ended (process {pid} on this host)"
    try:
        os.kill(pid, 0)  # not the entry in /proc, which may be hidden
    except ProcessLookupError:
        return ended
    except (OSError, OverflowError):
        pass
    # The number may be another process's by now, which began at another time.
    now = _began(pid)
    return None if now is None else "" if now == began else ended


def _sees() -> str | None:
    """Which processes can be seen here: those of a boot and a pid namespace. None: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux, or no /proc
        return None


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the boot, or that it has ended; None: not known."""
    try:
        # Behind the name in parentheses, which may hold anything, comes the state.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else fields[18]
