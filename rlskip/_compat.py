"""The only place for version switches: Python 3.14, and versions of other packages.

This module imports nothing heavy: the start of every process of verl loads it.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any


def gets_self(function: Any) -> bool:
    """Whether `function`, as a class's attribute, is called with self.

    A partial is from Python 3.14 on; 3.13 warns of that, and has the method for it already.
    """
    if isinstance(function, functools.partial):
        return sys.version_info >= (3, 14) and not isinstance(function, WithoutSelf)
    return hasattr(type(function), "__get__")


class WithoutSelf(functools.partial[Any]):
    """A partial that, as a class's attribute, is called without self by any Python."""

    def __get__(self, instance: Any, owner: Any = None) -> WithoutSelf:
        return self


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
