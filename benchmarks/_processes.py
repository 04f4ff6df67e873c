"""What the processes that a benchmark starts take, as /proc tells it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

_POLL_S = 0.25
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
_SUBREAPER = 36  # prctl: orphans become children of this process, so that they are found


@attrs.define
class Cost:
    """What a run has taken until now; a process counts with what it had taken at its last sample.

    Ray's processes do not wait for each other, so the kernel's sums over children miss most of
    their CPU seconds.
    """

    wall_s: float = 0.0
    mib: float = 0.0  # the peak
    _ticks: dict[tuple[int, int], int] = attrs.field(factory=dict)

    @property
    def cpu_s(self) -> float:
        return sum(self._ticks.values()) / _TICK

    def sample(self) -> bool:
        """Whether any process of the run lives."""
        resident, found = 0.0, False
        for pid in _below(os.getpid()):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            found = True
            started, resident = int(fields[19]), resident + int(fields[21]) * _PAGE_MIB
            self._ticks[pid, started] = int(fields[11]) + int(fields[12])
        self.mib = max(self.mib, resident)
        return found


def run(
    command: Sequence[object],
    folder: Path,
    env: Mapping[str, str] | None = None,
    each: Callable[[Cost, Path], None] = lambda cost, log: None,
) -> Cost:
    """Run `command` with its output in ``folder/log``, and wait for all that it left behind.

    ``each(cost, log)`` is called several times a second.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    file, cost, began = folder / "log", Cost(), time.perf_counter()
    with file.open("w") as log:
        process = subprocess.Popen(
            [*map(str, command)], cwd=folder, env={**os.environ, **(env or {})}, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None:
            cost.sample()
            each(cost, file)
            time.sleep(_POLL_S)
        cost.wall_s = time.perf_counter() - began
        while cost.sample():
            _reap()
            time.sleep(_POLL_S)
    if process.returncode:
        raise SystemExit(file.read_text(errors="replace")[-4000:])
    return cost


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _below(pid: int) -> Iterator[int]:
    """The processes that `pid` and those below it started, and that still live."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))
    except OSError:  # it has just ended
        return
