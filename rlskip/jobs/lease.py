"""Single flight: of several jobs that lack a step one generates it, and the others wait for it.

A lease is a link that one job can create, and that names its owner. A waiting job takes it over
once the owner is dead (:mod:`rlskip.jobs.alive`). Leases save work; they are not what keeps dumps
safe. If two jobs ever generate the same step, one dump is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from rlskip._files import open_folder
from rlskip.jobs import alive
from rlskip.jobs.alive import LEASE, WORK
from rlskip.jobs.ranks import RankGroup

logger = logging.getLogger(__name__)


def take(lease: contextlib.ExitStack, root: Path, name: str) -> bool:
    """Hold this lease until `lease` is closed or the process ends; False: another job has it.

    Raises OSError where it cannot be written. In a forked child its copy holds nothing: the lease
    is its parent's.
    """
    owner = alive.own(root)
    try:
        with open_folder(root, WORK) as work:
            # A link has its owner from its first moment. A file would be empty until it is
            # written, and name nobody if its job were killed in between.
            os.symlink(owner, name, dir_fd=work.handle)
    except FileExistsError:
        return False
    lease.callback(alive.drop, root, name, owner)
    atexit.register(lease.close)
    lease.callback(atexit.unregister, lease.close)
    return True


@attrs.define(eq=False)
class SingleFlight:
    """Lets one job at a time generate a step of the dumps in `directory`.

    Of the job's own `ranks` rank 0 takes the lease for all, and all wait or go on together. A job
    waits `wait_s` seconds at most before it generates the step itself, and looks every `poll_s`.
    """

    _directory: Path
    _ranks: RankGroup = attrs.field(factory=RankGroup)
    _wait_s: float = 6 * 3600.0
    _poll_s: float = 1.0
    _clock: Callable[[], float] = time.monotonic
    _sleep: Callable[[float], object] = time.sleep

    def enter(
        self, step: int, is_there: Callable[[], bool], call: str = ""
    ) -> contextlib.ExitStack | None:
        """Wait until the step's dump is there, or until this job may generate it.

        `is_there` tells whether this rank can load it, and is called at every look. `call` names
        one of several calls of the step: letters, digits and hyphens. Returns None once the dump is
        there, on all ranks; else the right to generate it, until that is closed.
        """
        what = f"step {step}, call {call}" if call else f"step {step}"
        name = f"{LEASE}{step}-{call}" if call else f"{LEASE}{step}"
        lease, began, is_told = contextlib.ExitStack(), self._clock(), False
        while True:
            # Rank 0 tries, and all go on with what it got. Each round has the same exchanges on
            # all ranks, so none waits in one that another rank has left.
            waited = self._clock() - began
            go = self._ranks.rank == 0 and self._may_go(lease, name, waited, step)
            go = bool(self._ranks.exchange(go, what=what)[0][0])
            there, error = False, None
            try:
                # Asked once the lease is ours: its last owner publishes its dump and then gives the
                # lease back, so who looked before could miss a dump, and generate it again.
                there = is_there()
            except BaseException as raised:  # the other ranks must not wait for this one
                error = raised
            is_needed = False
            try:
                is_needed = (0,) in self._ranks.exchange(there, what=what, error=error)
            finally:
                if not is_needed:
                    lease.close()
            if go or not is_needed:
                return lease if is_needed else None
            if not is_told and self._ranks.rank == 0:
                text = "rlskip: another job generates step %d; waiting for it, %g s at most"
                logger.warning(text, step, self._wait_s)  # the job seems to hang
            is_told = True
            self._sleep(self._poll_s)

    def _may_go(self, lease: contextlib.ExitStack, name: str, waited: float, step: int) -> bool:
        """Whether this job has the lease, or generates the step without."""
        try:
            if take(lease, self._directory, name):
                return True
            if (why := alive.sweep(self._directory).get(name)) is not None:
                logger.warning("rlskip: the job that generated step %d %s; taking over", step, why)
                return take(lease, self._directory, name)
        except OSError as error:
            text = "rlskip: no lease for step %d, another job may generate it too: %s"
            logger.warning(text, step, error)
            return True
        if waited > self._wait_s:
            text = "rlskip: timed out after %.0f s of waiting for step %d; generating it"
            logger.warning(text, waited, step)
        return waited > self._wait_s
