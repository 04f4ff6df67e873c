"""Single flight: of several jobs that lack a step one generates it, the others wait for it.

A lease is a file that its owner rewrites now and then. Nothing else is relied on: no locks, no
process ids, no common clock. Whoever waits watches the file by its own clock, and once it has
not changed for long enough takes it over. Leases save work, they do not keep dumps safe: should
two jobs ever generate the same step, one dump wins whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rlskip.store.ranks import RankGroup

logger = logging.getLogger(__name__)

LEASES = ".leases"


class Lease:
    """The right to generate a step; kept alive until released.

    One without a file (another rank's, or taken after waiting in vain) holds nothing.
    """

    def __init__(self, path: Path | None = None, ttl_s: float = 60.0) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._token = secrets.token_hex(8)
        self._beats = 0
        self._released = threading.Event()

    def acquire(self) -> bool:
        """Take it, unless somebody has it."""
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._path.touch(exist_ok=False)  # created or not: one operation everywhere
        except FileExistsError:
            return False
        try:
            self._path.write_text(self._text())
        except OSError:
            self._path.unlink()
            raise
        threading.Thread(target=self._beat, name="rlskip-lease", daemon=True).start()
        return True

    def release(self) -> None:
        """Let others have it; again or without a file: nothing."""
        if self._released.is_set() or self._path is None:
            return
        self._released.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _text(self) -> str:
        # Of one length: rewritten in place, it is never seen shorter.
        return json.dumps(
            {"owner": self._token, "host": socket.gethostname(), "beat": f"{self._beats:012d}"}
        )

    def _is_mine(self) -> bool:
        assert self._path is not None
        return self._token in self._path.read_text(errors="replace")

    def _beat(self) -> None:
        assert self._path is not None
        while not self._released.wait(self._ttl_s / 4):
            self._beats += 1
            try:
                if not self._is_mine():
                    logger.warning("%s was taken over: it was not renewed in time", self._path)
                    return
                with open(self._path, "r+") as file:
                    file.write(self._text())
            except FileNotFoundError:
                return
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._path, error)


class SingleFlight:
    """Lets one job at a time generate a step of the dumps under `directory`.

    Parameters
    ----------
    directory
        The store's.
    ranks
        The job's own: rank 0 takes the lease for all, and all wait or go on together.
    ttl_s
        After so long without a sign of life a lease may be taken over.
    wait_s
        The longest that a job waits for another before it generates the step itself.
    poll_s
        How often it looks.

    Examples
    --------
    >>> flight = SingleFlight(store.directory)
    >>> lease = flight.enter(step, lambda: store.peek(step) is not None)
    >>> if lease is None:
    ...     return store.load(step)
    >>> with lease:
    ...     rollouts = generate(prompts)
    ...     store.save(step, rollouts)
    """

    def __init__(
        self,
        directory: Path,
        ranks: RankGroup | None = None,
        *,
        ttl_s: float = 60.0,
        wait_s: float = 6 * 3600.0,
        poll_s: float = 1.0,
    ) -> None:
        self._folder = Path(directory) / LEASES
        self._ranks = ranks or RankGroup()
        self._ttl_s = ttl_s
        self._wait_s = wait_s
        self._poll_s = poll_s

    def enter(
        self, step: int, is_there: Callable[[], bool], inner: int | None = None
    ) -> Lease | None:
        """None once the step's dump is there, on all ranks; else the lease to generate it.

        Parameters
        ----------
        is_there
            Whether this rank can load it: cheap, it is asked at every look.
        """
        what = f"step {step}" if inner is None else f"step {step}, mini-batch {inner}"
        path = self._folder / (f"{step}" if inner is None else f"{step}-{inner}")
        watch = _Watch(path, self._ttl_s)
        began = time.monotonic()
        told = False
        while True:
            lease, go = self._try(path, watch, time.monotonic() - began, what)
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
            if not told and self._ranks.rank == 0:
                logger.info(
                    "another job generates %s; waiting for it, %g s at most", what, self._wait_s
                )
            told = True
            time.sleep(self._poll_s)

    def _try(self, path: Path, watch: _Watch, waited: float, what: str) -> tuple[Lease, bool]:
        if self._ranks.rank != 0:
            return Lease(), False
        lease = Lease(path, self._ttl_s)
        try:
            if lease.acquire():
                return lease, True
        except OSError as error:
            logger.warning("no lease for %s, another job may generate it too: %s", what, error)
            return Lease(), True
        if watch.has_expired():
            logger.warning("the job that generated %s shows no sign of life; taking over", what)
            watch.take_away()
        elif waited > self._wait_s:
            logger.warning("waited %.0f s for %s in vain; generating it too", waited, what)
            return Lease(), True
        return Lease(), False

    def _agree(self, is_there: Callable[[], bool], what: str) -> bool:
        there = False
        try:
            there = is_there()
        finally:  # also where it raises: the other ranks must not wait for this one
            there = self._ranks.agree(there, what)
        return there


class _Watch:
    """Tells by this process's clock for how long a lease has not been renewed."""

    def __init__(self, path: Path, ttl_s: float) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._text: str | None = None
        self._since = 0.0

    def has_expired(self) -> bool:
        text = _read(self._path)
        if text is None or text != self._text:
            self._text, self._since = text, time.monotonic()
        return text is not None and time.monotonic() - self._since > self._ttl_s

    def take_away(self) -> None:
        """Remove the very lease that was watched; of several watchers one succeeds."""
        taken = self._path.with_name(f"{self._path.name}.expired-{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):
            os.rename(self._path, taken)
            if _read(taken) != self._text:
                # Another was quicker and this is already its new lease: give it back.
                with contextlib.suppress(OSError):
                    os.link(taken, self._path)
            taken.unlink()


def _read(path: Path) -> str | None:
    """None where it is gone, or where the file system does not say: that is no sign of death."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
