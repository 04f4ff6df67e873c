"""The version of the format: one, which this package writes and reads."""

from __future__ import annotations

from rlskip.format.dump_errors import CorruptDumpError, OtherFormatError

VERSION = 4


def check_version(version: object, where: str) -> None:
    """Refuse every version but this one."""
    if type(version) is not int or version < 1:
        raise CorruptDumpError(f"{version!r:.60} is not a format version", where=where)
    if version != VERSION:
        raise OtherFormatError(
            f"a dump of format {version}; this rlskip reads format {VERSION}",
            where=where,
            remedy="use the rlskip that wrote it, or generate again into another skip.dump_dir",
        )
