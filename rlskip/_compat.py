"""The only place for version switches: the versions of other packages.

This module imports nothing heavy: the start of every process of verl loads it.
"""

from __future__ import annotations

import re
import sys


def version_of(package: str) -> tuple[int, ...] | None:
    """The leading numbers of a package's version, (0, 9, 1); None without it.

    An imported package states its own: a source tree on the path has no metadata.
    """
    # Every Hydra application loads this module at its start, and metadata takes milliseconds.
    from importlib import metadata

    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        version = str(version or metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else None
