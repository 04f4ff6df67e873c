"""The journal of a step: its finished sessions, from which a killed step resumes.

There is one file a step, next to the step's dump. Sessions are appended as they finish: by the
dispatcher if it writes their rows, else by the worker that does. The next run that submits the step
takes them by the call of a stage that submits them, the content of their prompt and their number,
and generates the others. Each session is a line of text, its *frame*, between two line ends::

    checksum    XXH3-128 of what follows the space, in hex
    identity    what the session was generated under: JSON
    record      key and value of the session: a dump's file in base64

Every frame stands alone. The file is only ever appended to, by any number of processes and under
any number of identities. An interrupted write leaves a torn frame, and a damaged disk an altered
one; a reader skips it, and it stays where it is.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import io
import json
import logging
import os
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import xxhash

from rlskip._files import open_folder
from rlskip.dispatch import timeouts
from rlskip.dispatch.sessions import Session, text_of
from rlskip.format import container
from rlskip.format.kinds import Packer, rebuild
from rlskip.store import Identity, dump
from rlskip.store.layout import as_step, journal_name

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 30  # larger journals are refused without being read
MAX_FRAME = 1 << 30  # a larger session is not journaled, and a longer line is damage


def prompt_name(step: int, key: tuple[str, int]) -> str:
    """A prompt's name among all that are journaled, which its root and then its dump have."""
    return f"{step}-{key[0]}-{key[1]}"


@attrs.frozen
class Journaled:
    """A finished session: its rows, and what else of it must be known to resume it.

    `tags` are those of the rows, if a worker wrote them itself; `uid` is its prompt's; `lacks` is
    what it lacked of what its stage needed (:class:`rlskip.jobs.served.Needs`).
    """

    rows: list[dict[str, Any]]
    tags: Sequence[Mapping[str, Any]] = ()
    uid: str | None = None
    lacks: Sequence[str] = ()

    def packed(self) -> tuple[Any, ...]:
        """What a journal holds of it: plain mappings, as the format keeps no other."""
        return [{**row} for row in self.rows], list(self.tags), self.uid, self.lacks


class SessionJournal:
    """The finished sessions of one step, in the file `path`, which the first append creates.

    ``entries`` are those of earlier processes, key to value, but for sessions that were generated
    under another `identity`. Who only appends does not `read` the file. Raises OSError for a
    journal that cannot be read, or is not a regular file.
    """

    def __init__(self, path: str | Path, identity: Identity, *, read: bool = True) -> None:
        self.path = Path(path)
        self._identity = identity
        self._written_as = json.dumps(identity.as_json()).encode()
        self._file: IO[bytes] | None = None
        self._held = contextlib.ExitStack()  # the mark that it grows, for `rlskip prune`, and it
        self._busy = threading.Lock()
        self.entries = self._recovered() if read else {}

    def append(self, entries: Mapping[Hashable, Any]) -> None:
        """Add finished sessions; once this returns, they survive the death of the process.

        Raises the error of a session whose value cannot be stored, after the others were written,
        or an OSError: the disk is full, for example. What was appended before is not affected.
        """
        data, refused = b"", None
        for key, value in entries.items():
            try:
                data += _frame(self._written_as, key, value)
            except Exception as error:  # a value may be anything
                refused = error
        with self._busy:
            # One write, so that frames of several processes never interleave.
            if data and self._open().write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of a frame was written", str(self.path))
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Close the file; an append that hangs keeps it open."""
        if self._busy.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._held.close()
            self._file = None
            self._busy.release()

    def _open(self) -> IO[bytes]:
        """The file at `path`, even after another process removed an earlier one."""
        if self._file is None or not _is_at(self.path, self._file):
            self._held.close()
            # The mark first: `rlskip prune` looks for it just before it removes an old journal. One
            # that had looked already takes this append with the file; the next begins another file.
            if (step := as_step(self.path.stem)) is not None:
                self._held.enter_context(dump.appending(self.path.parent, step))
            with open_folder(self.path.parent, create=True) as folder:
                self._file = self._held.enter_context(folder.open(self.path.name, "a", buffering=0))
        return self._file

    def _recovered(self) -> dict[Hashable, Any]:
        try:
            with open_folder(self.path.parent) as folder:
                file = folder.open(self.path.name, max_bytes=MAX_BYTES)
        except FileNotFoundError:
            return {}
        entries, refused, allowed, damaged = {}, set[str](), set[str](), 0
        with file:
            for frame, entry in frames(file, str(self.path)):
                if entry is None:
                    damaged += len(frame)
                    continue
                identity, key, value = entry
                must, warn = self._identity.differences(identity)
                refused.update(must)
                if not must:
                    allowed.update(warn)
                    entries[key] = value
        for what, differences in (
            ("was resumed although it differs", allowed),
            ("holds sessions of another run, which are not resumed", refused),
        ):
            if differences:
                logger.warning("%s %s: %s", self.path, what, "; ".join(sorted(differences)))
        if damaged:
            logger.warning("%s: skipped %d damaged bytes", self.path, damaged)
        return entries


def _frame(identity: bytes, key: Hashable, value: Any) -> bytes:
    packer = Packer()
    record = packer.node([key, value])
    body = io.BytesIO()
    container.write(body, {"record": record}, packer.arrays)
    text = b"%s %s" % (identity, base64.b64encode(body.getbuffer()))
    if len(text) > MAX_FRAME:
        raise OSError(errno.EFBIG, f"a session of {len(text)} bytes is too large")
    # A line end on either side: a frame without its own end costs no other one.
    return b"\n%s %s\n" % (_checksum(text), text)


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode()


def frames(file: IO[bytes], where: str) -> Iterator[tuple[bytes, Any]]:
    """The frames of a journal, each with its identity, key and value.

    None for these if it is damaged, or cannot be loaded here.
    """
    for line in iter(functools.partial(file.readline, MAX_FRAME + 64), b""):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not checksum:  # between two frames
            continue
        entry = None
        if checksum == _checksum(text):
            identity, _, record = text.rpartition(b" ")
            with contextlib.suppress(Exception):  # another version may have written it
                key, value = rebuild(container.Reader(base64.b64decode(record), where), "record")
                hash(key)
                entry = _identity(identity), key, value
        yield line, entry


@functools.lru_cache(maxsize=4)  # all frames of a run have one
def _identity(written: bytes) -> Identity:
    return Identity.from_json(json.loads(written))


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except OSError:
        return False


@attrs.define(eq=False)
class JournalWriter:
    """Appends to the journals of a run within ``WRITE_S``; can be sent to another process.

    A fault costs one warning, and never the rows. After an append that takes longer there are no
    more.
    """

    directory: Path
    identity: Identity
    _hangs: bool = attrs.field(default=False, init=False)
    _warned: str = attrs.field(default="", init=False)

    async def add(
        self, session: Session, rows: list[dict[str, Any]], tags: Sequence[Mapping[str, Any]]
    ) -> None:
        """Append a finished session, for a worker that writes its rows itself."""
        if session.prompt_key is not None:
            path = self.directory / journal_name(session.step)
            journal = SessionJournal(path, self.identity, read=False)
            key = (*session.prompt_key, session.session_id)
            await self.append(journal, {key: Journaled(rows, tags, session.uid).packed()})
            journal.close()

    async def append(self, journal: SessionJournal, entries: Mapping[Hashable, Any]) -> None:
        """Add finished sessions to a journal."""
        if not self._hangs:
            append = timeouts.in_thread(journal.append, entries, name="rlskip-journal")
            error = await timeouts.failure_of(append, timeouts.WRITE_S, "the disk")
            self._hangs = not append.done()
            if error is not None:
                self.warn(journal.path, text_of(error))

    def warn(self, where: object, cause: str) -> None:
        """Say that sessions are not journaled: if killed, the step starts over."""
        if cause != self._warned:
            self._warned = cause
            logger.warning("%s: sessions are not journaled: %s", where, cause)
