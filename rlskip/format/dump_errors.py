"""The errors of dumps, distinguished by their consequences.

A *corrupt* dump can never be used again: it is quarantined and the step counts as a miss. A dump
in a *newer format*, or of a type that this process does not know, is sound: it stays in its place.
"""

from __future__ import annotations

from rlskip.errors import RlskipError


class DumpError(RlskipError, ValueError):
    """A dump that this process cannot use now."""


class AbsentDumpError(DumpError):
    """There is no dump, or no complete one. It may have been there a moment ago."""


class UnreadableDumpError(AbsentDumpError):
    """The file system does not let the dump be read at the moment: it counts as absent."""


class CorruptDumpError(DumpError):
    """A dump that is truncated, altered, or of another step. It is never loaded."""


class NewerFormatError(DumpError):
    """A dump that a newer rlskip wrote."""


class UnknownTypeError(DumpError):
    """A sound dump of a type that this process has no codec for."""


class UnsupportedTypeError(RlskipError, TypeError):
    """A value that cannot be kept or compared exactly, raised before a byte is written."""
