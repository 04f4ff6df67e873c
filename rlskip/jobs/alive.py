"""Which jobs are at work in a run's directory, what each holds there, and which have died.

Each process has one file in the directory's ``.work``, which a thread touches every `BEAT_S`
seconds as long as the process holds something. What it holds names it by its token::

    .work/job-{token}             the process: its host, its number, when it began
    .work/{label}~{token}-{n}     what it holds: a staging directory, or an empty mark
    .work/lease-{step}[-{call}]   contains "{token}-{n}": who generates a step (rlskip.jobs.lease)

A job is dead if its process has ended, which is known at once on its host and in its container;
elsewhere if its file was not touched for `DEAD_S` seconds. What names nobody, as the lease of a job
that was killed before it wrote it, is as old as itself. There are no locks. All depends on an
order: a job's file is there before anything that the job holds, and goes after it.
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

from rlskip._files import CLOCK, Folder, RefusedFileError, open_folder
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


@attrs.define(eq=False)
class _Job:
    """This process in one directory."""

    root: Path
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))
    holds: int = 0
    numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def show(self) -> bool:
        """Touch its file; False where it had to be made."""
        path = self.root / WORK / f"{_JOB}{self.token}"
        with self._lock:  # of two threads that begin, none goes on before the file is there
            try:
                os.utime(path, follow_symlinks=False)
                return True
            except FileNotFoundError:
                with open_folder(self.root, WORK) as work:
                    write_new(work, path.name, json.dumps(this_process()).encode())
                return False

    def hide(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.root / WORK / f"{_JOB}{self.token}")


class _Heart:
    """Says that this process lives, in each directory where it holds something."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty: a forked child has neither the parent's thread nor what it holds."""
        self._lock = threading.Lock()
        # Both under the lock. While there is a job the thread beats; where it could not be started
        # the next `begin` tries again.
        self._jobs: dict[Path, _Job] = {}
        self.thread: threading.Thread | None = None
        self._ending = threading.Event()

    def begin(self, root: Path) -> _Job:
        root = Path(os.path.abspath(root))  # the thread finds it after a chdir, too
        # Counted before its file is touched: the thread looks for idle jobs at any moment.
        with self._lock:
            job = self._jobs.setdefault(root, _Job(root))
            job.holds += 1
            if self.thread is None and not self._ending.is_set():
                thread = threading.Thread(target=self._beat, name="rlskip-alive", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread left, or the interpreter ends
                    thread.start()
                    self.thread = thread
        try:
            job.show()
        except BaseException:
            self.end(job)
            raise
        return job

    def end(self, job: _Job) -> None:
        with self._lock:
            job.holds -= 1
            is_last = self._ending.is_set() and not job.holds
        if is_last:  # of what other functions do at exit: there is no thread any more
            job.hide()

    def has(self, name: str) -> bool:
        """Whether something in a ``.work`` names this process."""
        return any(job.token in name for job in [*self._jobs.values()])

    def _beat(self) -> None:
        # It outlives what is held: a thread and a file for each would cost more than loading a
        # small dump.
        while not self._ending.wait(BEAT_S):
            with self._lock:
                idle = [job for job in self._jobs.values() if not job.holds]
                for job in idle:
                    del self._jobs[job.root]
                jobs = [*self._jobs.values()]
            # Without the lock, as a disk may hang. Who begins meanwhile has another token, so the
            # file of a job that holds something is never removed here.
            for job in idle:
                job.hide()
            for job in jobs:
                try:
                    if not job.show():
                        logger.warning("%s: this job was taken for dead by others", job.root)
                except OSError as error:
                    logger.warning("%s: no sign of life can be given: %s", job.root, error)
            with self._lock:
                if not self._jobs:
                    self.thread = None
                    return

    def close(self) -> None:
        """Stop for good; a disk that hangs is waited for briefly."""
        self._ending.set()
        if (thread := self.thread) is not None:
            thread.join(_EXIT_S)
        for job in self._jobs.values():
            if not job.holds:
                job.hide()


_HEART = _Heart()
os.register_at_fork(after_in_child=lambda: _HEART.forget())
atexit.register(lambda: _HEART.close())


@contextlib.contextmanager
def owning(root: Path, *, must_beat: bool = False) -> Iterator[str]:
    """``{token}-{n}``, which names this process as the owner of something as long as it holds it.

    Raises
    ------
    OSError
        `root` has no ``.work`` that can be written.
    RuntimeError
        With `must_beat`: without a thread it would be believed for `DEAD_S` seconds only.
    """
    job = _HEART.begin(root)
    try:
        if must_beat and _HEART.thread is None:
            raise RuntimeError("can't start new thread")
        yield f"{job.token}-{next(job.numbers)}"
    finally:
        _HEART.end(job)


@contextlib.contextmanager
def holding(root: Path, label: str) -> Iterator[None]:
    """Hold `label` for others to see (:func:`held`), where a mark can be written.

    Who holds something marks it first and looks at what is there afterwards. Who must not disturb
    a holder makes its change first, looks for holders afterwards, and takes the change back where
    there is one. So of two at the same time at least one sees the other.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no `.work`, or one that cannot be written
            name = f"{label}~{stack.enter_context(owning(root))}"
            with open_folder(root, WORK) as work:
                write_new(work, name)
            stack.callback(_unmark, root / WORK / name)
        yield


def _unmark(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


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


def held(root: Path) -> set[str]:
    """The labels that living jobs hold in `root`; raises OSError where that cannot be seen."""
    with contextlib.suppress(FileNotFoundError), open_folder(root, WORK) as work:
        return {_label(name) for name, _, why in _judged(work) if why is None}
    return set()


def at_work(root: Path) -> dict[str, list[str]]:
    """The jobs that hold something in `root`, as a user would name them, and its labels."""
    jobs: dict[str, list[str]] = {}
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:
        for name, sign, why in _judged(work):
            if why is None and sign.process and not name.startswith(_JOB):
                who = f"process {sign.process.get('pid')} on {sign.process.get('host')}"
                jobs.setdefault(who, []).append(_label(name))
    return jobs


def sweep(root: Path) -> None:
    """Remove what jobs left that died."""
    with contextlib.suppress(OSError), open_folder(root, WORK) as work:
        dead = {name for name, _, why in _judged(work) if why is not None}
        # Listed again: between the first listing and its death a job may have made something more,
        # which nobody would know to be a dead job's once the job's file is gone.
        for name, sign, why in _judged(work) if dead else ():
            if why is not None and (name in dead or not name.startswith(_JOB)):
                with contextlib.suppress(OSError):
                    remove(work, name, sign.owner)
                    logger.info("removed %s: its job %s", work.path / name, why)


def _judged(work: Folder) -> Iterator[tuple[str, Sign, str | None]]:
    """What is in ``.work``, its sign of life, and why its job is dead; None: it may live."""
    now: int | None = None
    # A job's file is the last: who is killed while it sweeps leaves what the next one can judge.
    for name in sorted(work.names(), key=lambda name: name.startswith(_JOB)):
        sign, why = Sign("", 0, {}), None
        if name.startswith(CLOCK):  # a living job's may go, too: it has what it made it for
            yield name, sign, "was killed while it looked at the clock"
            continue
        try:
            if not _HEART.has(name):
                sign = Sign.of(work, name)
                why = why_ended(sign.process)
                if why is None:
                    now = work.now() if now is None else now
                    is_silent = now - sign.touched > DEAD_S * 1e9
                    why = "shows no sign of life" if is_silent else None
        except FileNotFoundError:  # its owner, or another job, has removed it
            continue
        except OSError:  # what cannot be read at the moment may live
            pass
        yield name, sign, why


def _label(name: str) -> str:
    return name.rpartition("~")[0] or name


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
