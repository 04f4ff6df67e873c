"""The processes of this host: a name for this one, and whether another one has ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What names this process, for those that can see it: on this host, in its container."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "began": _began(pid), "sees": _sees()}


def why_ended(process: dict[str, Any]) -> str | None:
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
