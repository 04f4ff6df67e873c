"""The version of the format."""

from __future__ import annotations

from rlskip.format.dump_errors import CorruptDumpError, NewerFormatError

VERSION = 1


def check_version(version: object, where: str) -> None:
    """Refuse a version that this package cannot read."""
    if type(version) is not int or version < 0:
        raise CorruptDumpError(f"{version!r:.60} is not a format version", where=where)
    if version == 0:
        raise CorruptDumpError(
            "a dump of format 0, which no release ever wrote: it cannot be read", where=where
        )
    if version > VERSION:
        raise NewerFormatError(
            f"a dump of format {version}; this rlskip reads up to {VERSION}",
            where=where,
            remedy="install the rlskip that wrote it or a newer one",
        )
