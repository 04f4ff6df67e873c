"""Hosts: where rlskip attaches to somebody else's trainer. One small file a host."""

from __future__ import annotations

from rlskip.hosts.attach import install, uninstall, when_imported, wrap

__all__ = ["install", "uninstall", "when_imported", "wrap"]
