"""What ``skip.max_bytes`` is where nothing is given: how much memory a dump's values may take."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from rlskip.errors import ConfigError


def half_of_memory() -> int:
    """Half of the bytes that this process may use, unless RLSKIP_MAX_BYTES allows others."""
    if not (given := os.environ.get("RLSKIP_MAX_BYTES")):
        return _memory() // 2
    if not given.isdecimal():
        raise ConfigError(f"{given!r:.40} is not a number of bytes", "RLSKIP_MAX_BYTES")
    return int(given)


@functools.cache
def _memory() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, *limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def limits(root: Path, own: Path) -> Iterator[int]:
    """Those of this process's control group and of the groups above it, of version 1 or 2."""
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                # In a container the path may be the host's; the root is then the group itself.
                group = Path(path.lstrip("/"))
                for place in (group, *group.parents):
                    for name in ("memory.max", "memory.limit_in_bytes"):
                        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
                            yield int((root / controllers / place / name).read_text())
