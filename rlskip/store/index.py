"""The index of a run's directory: which prompts were dumped where.

``dumps.index`` has a line for each dump that was published: what ``meta.json`` says of it, but for
its identity, and the digests of its prompts. It tells where to look, and nothing else, so whatever
happens to the file costs time only. A dump without a line, or whose ``meta.json`` is another file
than its line was written for, is indexed again; lines of dumps that are gone are passed over. A
process may be killed within its line, and several append at once: each line is one write to a file
opened with O_APPEND, has a checksum, and a line end on either side, so that a torn one costs no
other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import xxhash

from rlskip._files import open_folder
from rlskip.format.dump_errors import DAMAGE, VERSION
from rlskip.store.layout import INDEX, Place
from rlskip.store.meta import DumpMeta

logger = logging.getLogger(__name__)

# Entries of a dump's `info`. The number of rows of each of its prompts: one number where all have
# as many, absent where the rows do not tell.
ROWS_PER_PROMPT = "rows_per_prompt"
# The prompts one by one, with the hash of each under ``digests``.
PROMPTS = "prompts"
# A queue's groups one by one: what each is for, and more.
QUEUED = "groups"

_LARGEST = 1 << 30  # bytes; a larger index is not read

Stamp = tuple[int, int]
"""Which file a ``meta.json`` is: when it was written, in ns, and its size."""


def stamp_of(found: os.stat_result) -> Stamp:
    return found.st_mtime_ns, found.st_size


def stamp_at(place: Place) -> Stamp | None:
    """The stamp of the dump that has this place now; None where there is none."""
    with contextlib.suppress(OSError):
        return stamp_of(os.lstat(place.directory / place.meta))
    return None


def rows_of_prompts(info: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Of each prompt of a dump its hash, and where its rows start and how many they are.

    Empty where the dump does not record which rows are which prompt's: an entry may be anything.
    """
    found, start = [], 0
    try:
        digests, counts = info[PROMPTS]["digests"], info[ROWS_PER_PROMPT]
        counts = [counts] * len(digests) if isinstance(counts, int) else counts
        for digest, count in zip(digests, counts, strict=True):
            if type(count) is not int or count < 0 or not isinstance(digest, str):
                return []
            found.append((digest, start, count))
            start += count
    except (LookupError, TypeError, ValueError):
        return []
    return found


@attrs.frozen(eq=False)
class IndexedDump:
    """A line of the index, of the dump whose directory has this name."""

    name: str
    #: Of the ``meta.json`` that the line was made of.
    stamp: Stamp
    #: The hash of all its prompts; empty where it records none.
    batch: str
    #: Its meta without the identity, and without what it says of single prompts.
    about: Mapping[str, Any]
    #: The hash of each of its prompts, or what each group of a queue is for, with commas between.
    joined: str

    @classmethod
    def of(cls, place: Place, meta: DumpMeta, stamp: Stamp) -> IndexedDump:
        about = attrs.asdict(meta, recurse=False)
        identity, info = about.pop("identity"), meta.info
        single = (PROMPTS, QUEUED, ROWS_PER_PROMPT)
        about["info"] = {name: value for name, value in info.items() if name not in single}
        prompts = [digest for digest, _, _ in rows_of_prompts(info)]
        if isinstance(queued := info.get(QUEUED), list):
            whose = [one[0] for one in queued if isinstance(one, list) and one]
            prompts = [one for one in whose if isinstance(one, str)]
        batch = str(identity.prompts or "") if identity else ""
        return cls(place.name, stamp, batch, about, ",".join(prompts))

    @classmethod
    def parse(cls, line: bytes) -> IndexedDump | None:
        """None for a line that is torn, damaged or another version's."""
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        with contextlib.suppress(*DAMAGE):
            if checksum == xxhash.xxh3_64_hexdigest(text).encode():
                name, stamp, batch, about, joined = json.loads(text)
                if about["version"] == VERSION:
                    return cls(name, (*stamp,), batch, about, joined)
        return None

    @property
    def line(self) -> bytes:
        text = json.dumps(attrs.astuple(self, recurse=False), separators=(",", ":")).encode()
        return b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)

    @property
    def prompts(self) -> list[str]:
        return self.joined.split(",") if self.joined else []


class Index:
    """The index of a run's directory, as far as it was read; :meth:`refresh` reads on.

    `dumps` has by the name of a dump's directory its last line, whether it is there or not.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dumps: dict[str, IndexedDump] = {}
        #: By step what was there when it was mended last, for who mends it.
        self.mended: Mapping[int, Sequence[Place]] | None = None
        self._inode = self._read_to = 0

    def refresh(self) -> list[IndexedDump]:
        """Read what was appended since; returns that."""
        new: dict[str, IndexedDump] = {}
        with contextlib.suppress(OSError):
            found = os.lstat(self.directory / INDEX)
            if found.st_ino != self._inode or found.st_size < self._read_to:
                # Another file, or an older state of it (NFS). What was read stays true as far as
                # the dumps do not tell otherwise.
                self._inode, self._read_to = found.st_ino, 0
            if found.st_size > self._read_to:
                with (
                    open_folder(self.directory) as folder,
                    folder.open(INDEX, max_bytes=_LARGEST) as file,
                ):
                    file.seek(self._read_to)
                    for line in file:
                        if not line.endswith(b"\n"):  # torn, or still being written
                            break
                        self._read_to += len(line)
                        if (dump := IndexedDump.parse(line)) is not None:
                            new[dump.name] = dump
        self.dumps |= new
        return [*new.values()]

    def mend(
        self, places: Sequence[Place], read: Callable[[Place], DumpMeta | None]
    ) -> list[IndexedDump]:
        """Index those of these dumps, which are all that are there, whose lines do not fit them.

        `read` returns the meta of a dump; None: it cannot be used. Returns what is new.
        """
        new = []
        for place in places:
            known, stamp = self.dumps.get(place.name), stamp_at(place)
            if stamp is None or (known is not None and known.stamp == stamp):
                continue
            # The stamp is from before the look: what replaces the dump meanwhile has another one.
            if (meta := read(place)) is not None:
                new.append(IndexedDump.of(place, meta, stamp))
        self.dumps |= {dump.name: dump for dump in new}
        append(self.directory, new)
        return new


def append(directory: Path, dumps: Sequence[IndexedDump]) -> None:
    """Add lines to the index of a run's directory; what cannot be written is found without."""
    if not dumps:
        return
    try:
        with open_folder(directory) as folder, folder.open(INDEX, "a", buffering=0) as file:
            # One write a line, and each goes to where the file ends at that moment: no other job's
            # line is overwritten, and who is killed in between leaves whole ones.
            for dump in dumps:
                file.write(dump.line)
    except OSError as error:
        logger.debug("rlskip: the index of %s cannot be written: %s", directory, error)
