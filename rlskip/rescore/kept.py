"""What a reward function said, kept by the content that it was asked about.

::

    {directory}/{function}/{00..ff}.jsonl    verdicts, by the first digits of their keys
    {directory}/{function}/claims            locked at a key's place while its verdict is asked for

A verdict is a line between two line ends: the checksum of what follows the space, then key and
value in JSON. The files are only appended to, one write a verdict, so a verdict that was kept
survives the death of its process. The kernel releases the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from rlskip._files import open_folder

log = logging.getLogger(__name__)

ABSENT: Any = object()
"""No verdict is kept; None is one."""
_MAX_FILE = 1 << 30
_MAX_CLAIM = 1 << 60


class Verdicts:
    """The verdicts of one function, in a directory of its own that the first one creates.

    A directory that cannot be read or written costs a warning: verdicts are paid for again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._warned: set[str] = set()

    def find(self, key: str) -> Any:
        """The verdict of a key (hexadecimal digits); :data:`ABSENT` without one."""
        try:
            with open_folder(self.directory) as folder:
                data = folder.read(f"{key[:2]}.jsonl", _MAX_FILE)
        except FileNotFoundError:
            return ABSENT
        except OSError as error:
            return self._warn("cannot be read", error)
        at = -1
        while (at := data.find(key.encode(), at + 1)) >= 0:
            start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            if end > 0 and (found := _parsed(data[start:end], key)) is not ABSENT:
                return found
        return ABSENT

    def keep(self, key: str, value: Any) -> Any:
        """Keep a verdict; returns it as :meth:`find` will, unchanged if JSON cannot hold it."""
        try:
            text = json.dumps([key, value], default=lambda part: part.item()).encode()
            plain = json.loads(text)[1]
            if not bool(plain == value):  # a tuple, a NaN
                raise ValueError(f"{value!r:.60} would change")
        except Exception as error:  # a value may be anything
            self._warn(f"lack some of type {type(value).__name__}, which JSON does not hold", error)
            return value
        try:
            with (
                open_folder(self.directory, create=True) as folder,
                folder.open(f"{key[:2]}.jsonl", "a", buffering=0) as file,
            ):
                line = b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "only a part of a verdict was written")
        except OSError as error:
            self._warn("cannot be written", error)
        return plain

    @contextlib.contextmanager
    def claims(self) -> Iterator[Callable[[str], bool]]:
        """Within it a key can be claimed: true if nobody else asks for it. At its end all end."""
        try:
            with open_folder(self.directory, create=True) as folder:
                file = folder.open("claims", "a")
        except OSError as error:
            self._warn("cannot be written", error)
            yield lambda key: True
            return
        with file:
            yield partial(_claim, file.fileno())

    def _warn(self, what: str, error: Exception) -> Any:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("rlskip: %s: the verdicts here %s: %s", self.directory, what, error)
        return ABSENT


def _claim(handle: int, key: str) -> bool:
    """Lock the place of a key; true, too, where the file system has no locks."""
    # Locks of the open file, not of the process: they hold among threads, too.
    place = int(key[:16], 16) % _MAX_CLAIM
    lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _parsed(line: bytes, key: str) -> Any:
    checksum, _, text = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(text).encode():
        return ABSENT
    found, value = json.loads(text)
    return value if found == key else ABSENT
