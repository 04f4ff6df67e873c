"""Single flight: of several jobs that lack a step one generates it, and the others wait for it.

A lease is a file that its owner rewrites now and then. Nothing else is relied on: no locks, no
common clock. A waiting job watches the file by its own clock, and takes it over once it has not
changed for long enough, or at once where it can see that the owner's process has ended. Leases save
work; they are not what keeps dumps safe. If two jobs ever generate the same step, one dump is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from rlskip._files import Folder, RefusedFileError, open_folder
from rlskip.jobs.ranks import RankGroup

logger = logging.getLogger(__name__)

LEASES = ".leases"
_MAX_LEASE = 4096  # bytes
_EXIT_S = 2.0


@attrs.define(eq=False)
class Lease(AbstractContextManager["Lease"]):
    """The right to generate a step, kept alive until released or until the process ends.

    One without a path (another rank's, or taken after the wait timed out) holds nothing. Nor does
    the copy in a forked child: the lease is its parent's.
    """

    _path: Path | None = None
    _ttl_s: float = 60.0
    # The file is ours as long as it has our token: only then is it rewritten or removed. The
    # thread that rewrites it lives from `acquire` until `_released` is set or the file is lost.
    _token: str = attrs.field(init=False, factory=lambda: secrets.token_hex(8))
    _beats: int = attrs.field(init=False, default=0)
    _released: threading.Event = attrs.field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = attrs.field(init=False, default=None)
    _process: int = attrs.field(init=False, factory=os.getpid)

    def acquire(self) -> bool:
        """Take it, unless another job has it.

        Raises
        ------
        OSError
            The file cannot be written.
        RuntimeError
            The system has no thread left to keep it alive.
        """
        assert self._path is not None
        with _folder_of(self._path, create=True) as folder:
            try:
                file = folder.open(self._path.name, "x")  # created or not: one operation everywhere
            except FileExistsError:
                return False
            try:
                with file:
                    file.write(self._text())
                thread = threading.Thread(target=self._beat, name="rlskip-lease", daemon=True)
                thread.start()
            except (OSError, RuntimeError):
                self._released.set()
                os.unlink(self._path.name, dir_fd=folder.handle)
                raise
        self._thread = thread
        _held.add(self)
        return True

    def release(self, wait_s: float = 0.0) -> None:
        """Let other jobs have it. Doing so again, or without a path, does nothing.

        `wait_s` is how long to wait for the thread that has kept it alive to end, in seconds.
        """
        if self._released.is_set() or self._path is None or self._process != os.getpid():
            return
        self._released.set()
        _held.discard(self)
        with contextlib.suppress(OSError), _folder_of(self._path) as folder:
            if self._token.encode() in folder.read(self._path.name, _MAX_LEASE):
                os.unlink(self._path.name, dir_fd=folder.handle)
        if self._thread is not None:
            self._thread.join(wait_s)

    def __exit__(self, *error: object) -> None:
        self.release()

    def _text(self) -> bytes:
        # Always of the same length: rewritten in place, it is never seen shorter.
        owner = {"owner": self._token, **_this_process(), "beat": f"{self._beats:012d}"}
        return json.dumps(owner).encode()

    def _beat(self) -> None:
        while not self._released.wait(self._ttl_s / 4):
            try:
                if not self.renew():
                    logger.warning("%s was taken over: it was not renewed in time", self._path)
                    return
            except FileNotFoundError:
                return
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._path, error)

    def renew(self) -> bool:
        """Rewrite the file; False where it is another job's."""
        assert self._path is not None
        self._beats += 1
        with (
            _folder_of(self._path) as folder,
            # Read and written through one descriptor: a file that replaces it is not touched.
            folder.open(self._path.name, "r+", max_bytes=_MAX_LEASE, buffering=0) as file,
        ):
            if self._token.encode() not in file.read(_MAX_LEASE):
                return False
            file.seek(0)
            file.write(self._text())
        return True


# Those of this process, which are released as it ends.
_held: set[Lease] = set()


@atexit.register
def _release_all() -> None:
    """Leave no lease behind, and no thread that runs as the interpreter ends."""
    for lease in list(_held):
        lease.release(wait_s=_EXIT_S)


@attrs.define(eq=False)
class SingleFlight:
    """Lets one job at a time generate a step of the dumps in `directory`.

    Parameters
    ----------
    directory
        The store's.
    ranks
        The job's own: rank 0 takes the lease for all, and all wait or go on together.
    ttl_s
        A lease that has not been renewed for this many seconds may be taken over.
    wait_s
        How long a job waits for another at most, in seconds, before it generates the step itself.
    poll_s
        Seconds between two looks.
    clock, sleep
        What measures and passes the time of a wait.

    Examples
    --------
    >>> flight = SingleFlight(store.directory)
    >>> lease = flight.enter(step, lambda: store.read_meta(step) is not None)
    >>> if lease is None:
    ...     return store.load(step)
    >>> with lease:
    ...     rollouts = generate(prompts)
    ...     store.save(step, rollouts)
    """

    _directory: Path = attrs.field(converter=Path)
    _ranks: RankGroup = attrs.field(factory=RankGroup)
    _ttl_s: float = 60.0
    _wait_s: float = 6 * 3600.0
    _poll_s: float = 1.0
    _clock: Callable[[], float] = time.monotonic
    _sleep: Callable[[float], object] = time.sleep

    def enter(self, step: int, is_there: Callable[[], bool], call: str = "") -> Lease | None:
        """Wait until the step's dump is there, or until this job may generate it.

        Parameters
        ----------
        is_there
            Whether this rank can load it. It is called at every look, so it should be cheap.
        call
            Names one of several calls of the step: letters, digits and hyphens.

        Returns
        -------
        lease
            None once the dump is there, on all ranks; else the lease to generate it.
        """
        what = f"step {step}, call {call}" if call else f"step {step}"
        path = self._directory / LEASES / (f"{step}-{call}" if call else f"{step}")
        watch = LeaseWatch(path, self._ttl_s, self._clock)
        began = self._clock()
        logged = False
        while True:
            lease, go = self._try(path, watch, self._clock() - began, step)
            go = bool(self._ranks.follow(go, what))
            try:
                # Asked once the lease is ours: its last owner may just have finished.
                there = self._agree(is_there, what)
            except BaseException:
                lease.release()
                raise
            if there:
                lease.release()
                return None
            if go:
                return lease
            if not logged and self._ranks.rank == 0:
                logger.warning(  # the job seems to hang
                    "another job generates step %d; waiting for it, %g s at most",
                    step, self._wait_s,
                )  # fmt: skip
            logged = True
            self._sleep(self._poll_s)

    def _try(self, path: Path, watch: LeaseWatch, waited: float, step: int) -> tuple[Lease, bool]:
        if self._ranks.rank != 0:
            return Lease(), False
        lease = Lease(path, self._ttl_s)
        try:
            if lease.acquire():
                return lease, True
            if (why := watch.why_dead()) is not None:
                logger.warning("the job that generated step %d %s; taking over", step, why)
                watch.take_away()
                if lease.acquire():
                    return lease, True
        except (OSError, RuntimeError) as error:
            logger.warning("no lease for step %d, another job may generate it too: %s", step, error)
            return Lease(), True
        if waited > self._wait_s:
            logger.warning(
                "timed out after %.0f s of waiting for step %d; generating it", waited, step
            )
            return Lease(), True
        return Lease(), False

    def _agree(self, is_there: Callable[[], bool], what: str) -> bool:
        there, error = False, None
        try:
            there = is_there()
        except BaseException as raised:  # the other ranks must not wait for this one
            error = raised
        answers = self._ranks.exchange(there, what=what, error=error)
        return all(there for (there,) in answers)


@attrs.define(eq=False)
class LeaseWatch:
    """Measures, by this process's `clock`, for how long a lease has not been renewed."""

    _path: Path
    _ttl_s: float
    _clock: Callable[[], float]
    # `_text` is what the file held at the last look, and has held at every look since `_since`.
    _text: bytes | None = attrs.field(init=False, default=None)
    _since: float = attrs.field(init=False, default=0.0)

    def why_dead(self) -> str | None:
        """What shows that the owner is dead; None while it may be alive."""
        text = self._read(self._path.name)
        if text is None or text != self._text:
            self._text, self._since = text, self._clock()
        if text is None:
            return None
        if (process := _ended_process(text)) is not None:
            return f"has ended (process {process} on this host)"
        if self._clock() - self._since > self._ttl_s:
            return "shows no sign of life"
        return None

    def take_away(self) -> None:
        """Remove the very lease that was watched; of several watchers one succeeds."""
        taken = f"{self._path.name}.expired-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError), _folder_of(self._path) as folder:
            at = {"src_dir_fd": folder.handle, "dst_dir_fd": folder.handle}
            os.rename(self._path.name, taken, **at)
            if self._read(taken) != self._text:
                # Another job was quicker and this is its new lease already: give it back.
                with contextlib.suppress(OSError):
                    os.link(taken, self._path.name, **at, follow_symlinks=False)
            os.unlink(taken, dir_fd=folder.handle)

    def _read(self, name: str) -> bytes | None:
        """None where it is gone or cannot be read just now: its owner may well be alive."""
        try:
            with _folder_of(self._path) as folder:
                return folder.read(name, _MAX_LEASE)
        except RefusedFileError as error:
            return error.what.encode()  # nobody renews a link, a FIFO or a directory
        except OSError:
            return None


def _folder_of(path: Path, *, create: bool = False) -> AbstractContextManager[Folder]:
    return open_folder(path.parent.parent, path.parent.name, create=create)


# -- processes of this host ------------------------------------------------------------------


def _this_process() -> dict[str, Any]:
    """What names this process, for those that can see it: on this host, in its container."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
        "sees": _sees(),
    }


def _ended_process(text: bytes) -> int | None:
    """The process that wrote a lease, if it is one that this one could see, and has ended."""
    try:
        owner = json.loads(text)
        pid, began, sees = owner["pid"], owner["began"], owner["sees"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if type(pid) is not int or pid <= 0 or None in (began, sees) or sees != _sees():
        return None
    try:
        os.kill(pid, 0)  # not the entry in /proc, which may be hidden
    except ProcessLookupError:
        return pid
    except (OSError, OverflowError):
        pass
    now = _began(pid)
    return None if now in (None, began) else pid


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
