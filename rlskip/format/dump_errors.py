"""The errors of dumps, distinguished by their consequences.

A *corrupt* dump can never be used again: it is quarantined and the step counts as a miss. That
needs a proof: a checksum that differs, a file that is too short, a structure that no writer makes.
Any other dump that this process cannot load stays in its place.
"""

from __future__ import annotations

import struct
import traceback

from rlskip.errors import RlskipError

VERSION = 4
"""The version of the format: one, which this package writes and reads."""

DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error)
"""What rlskip's own code raises over a structure that no writer makes.

Every other exception is the process's (its memory, its stack, a device), or a registered codec's.
"""


def text_of(error: BaseException) -> str:
    """The type and message of `error`, even if its ``__str__`` fails."""
    return traceback.format_exception_only(type(error), error)[-1].strip()


class DumpError(RlskipError, ValueError):
    """A dump that this process cannot use now."""


class AbsentDumpError(DumpError):
    """There is no dump, or no complete one. It may have been there a moment ago."""


class UnreadableDumpError(AbsentDumpError):
    """The file system or this process cannot read the dump at the moment: it counts as absent."""

    @classmethod
    def by_process(cls, error: BaseException, where: str = "") -> UnreadableDumpError:
        """The error for `error`, which says nothing about the file."""
        what = f"this process cannot load it now: {text_of(error)}"
        return cls(what, where, "the dump stays as it is: run again once the cause is mended")


class CorruptDumpError(DumpError):
    """A dump that is truncated, altered, or of another step. It is never loaded."""


class OtherFormatError(DumpError):
    """A dump in a version of the format that this rlskip does not read."""


class TooLargeDumpError(DumpError):
    """A sound dump whose values take more memory than `max_bytes`. It stays as it is."""


class UnknownTypeError(DumpError):
    """A sound dump of a type that this process has no codec for."""


class UnsupportedTypeError(RlskipError, TypeError):
    """A value that cannot be kept or compared exactly, raised before a byte is written."""


def check_version(version: object, where: str) -> None:
    """Refuse every version but this one."""
    if type(version) is not int or version < 1:
        raise CorruptDumpError(f"{version!r:.60} is not a format version", where)
    if version != VERSION:
        what = f"a dump of format {version}; this rlskip reads format {VERSION}"
        remedy = "use the rlskip that wrote it, or generate again into another skip.dump_dir"
        raise OtherFormatError(what, where, remedy)
