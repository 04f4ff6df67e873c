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
from rlskip.store import Identity
from rlskip.store.layout import journal_name

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 30  # larger journals are refused without being read
MAX_FRAME = 1 << 30  # a larger session is not journaled, and a longer line is damage


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


def append_sessions(path: Path, identity: Identity, entries: Mapping[Hashable, Any]) -> None:
    """Add finished sessions, key to value; once this returns, they survive the process.

    Raises the error of a session whose value cannot be stored, after the others were written,
    or an OSError: the disk is full, for example. What was appended before is not affected.
    """
    written_as = json.dumps(identity.as_json()).encode()
    data, refused = b"", None
    for key, value in entries.items():
        try:
            data += _frame(written_as, key, value)
        except Exception as error:  # a value may be anything
            refused = error
    if data:
        # Opened each time, as another process may have removed an earlier file. One write, so that
        # frames of several processes never interleave.
        with (
            open_folder(path.parent, create=True) as folder,
            folder.open(path.name, "a", buffering=0) as file,
        ):
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, "only a part of a frame was written", str(path))
    if refused is not None:
        raise refused


def read_sessions(path: Path, identity: Identity) -> dict[Hashable, Any]:
    """The finished sessions in a journal, but for those that another `identity` generated.

    Raises OSError for a journal that cannot be read, or is not a regular file.
    """
    try:
        with open_folder(path.parent) as folder:
            file = folder.open(path.name, max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return {}
    entries, refused, allowed, damaged = {}, set[str](), set[str](), 0
    with file:
        for frame, entry in frames(file, str(path)):
            if entry is None:
                damaged += len(frame)
                continue
            its, key, value = entry
            must, warn = identity.differences(its)
            refused.update(must)
            if not must:
                allowed.update(warn)
                entries[key] = value
    for what, differences in (
        ("was resumed although it differs", allowed),
        ("holds sessions of another run, which are not resumed", refused),
    ):
        if differences:
            logger.warning("rlskip: %s %s: %s", path, what, "; ".join(sorted(differences)))
    if damaged:
        logger.warning("rlskip: %s: skipped %d damaged bytes", path, damaged)
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
        if session.journal_name is not None:
            key = session.journal_name, session.session_id
            await self.append(session.step, {key: Journaled(rows, tags, session.uid).packed()})

    async def append(self, step: int, entries: Mapping[Hashable, Any]) -> None:
        """Add finished sessions to the journal of a step."""
        if not self._hangs:
            path = self.directory / journal_name(step)
            append = timeouts.in_thread(
                append_sessions, path, self.identity, entries, name="rlskip-journal"
            )
            error = await timeouts.failure_of(append, timeouts.WRITE_S, "the disk")
            self._hangs = not append.done()
            if error is not None:
                self.warn(path, text_of(error))

    def warn(self, where: object, cause: str) -> None:
        """Say that sessions are not journaled: if killed, the step starts over."""
        if cause != self._warned:
            self._warned = cause
            logger.warning("rlskip: %s: sessions are not journaled: %s", where, cause)
