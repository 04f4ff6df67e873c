"""Hosts: attach rlskip to third-party trainers.

The names load on first use, so that verl's plug-in can report an error that occurs meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlskip.hosts.attach import install, uninstall, when_imported, wrap

__all__ = ["install", "uninstall", "when_imported", "wrap"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rlskip.hosts import attach

        return getattr(attach, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
