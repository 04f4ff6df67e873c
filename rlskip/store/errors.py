"""What can be wrong with a dump, told apart by what follows from it.

A *corrupt* dump can never be used again: it is set aside and the step counts as a miss. A dump
in a *newer format*, or of a type this process does not know, is sound: it stays where it is.
"""

from __future__ import annotations

from rlskip.errors import RlskipError


class DumpError(RlskipError, ValueError):
    """A dump that cannot be used here and now."""


class AbsentDumpError(DumpError):
    """There is no dump, or no complete one; perhaps it was there a moment ago."""


class CorruptDumpError(DumpError):
    """A dump that is truncated, altered, or of another step: never loaded, set aside."""


class NewerFormatError(DumpError):
    """A dump that a newer rlskip wrote."""


class UnknownTypeError(DumpError):
    """A sound dump of a type that this process has no codec for."""


class UnsupportedTypeError(RlskipError, TypeError):
    """A value that no codec keeps exactly; raised before a byte is written."""
