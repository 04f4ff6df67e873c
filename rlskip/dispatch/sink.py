"""What a batch and its sessions leave outside the process: in a queue, and in the step's journal.

While one write runs, what is to be written next gathers, so the number of writes depends on how
long they take and not on the number of sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle
from rlskip.dispatch.journal import Journaled, SessionJournal
from rlskip.dispatch.resume import Journals, to_journal
from rlskip.dispatch.scheduler import Job
from rlskip.dispatch.sessions import BatchError, NoAnswerError, as_failure, cause_of
from rlskip.dispatch.timeouts import failure_of, in_thread
from rlskip.keys import ROWS_PER_ATTEMPT, row_tag, session_key, session_tag, trajectory_key, uid_of
from rlskip.queue import TrajectoryQueue

_MOST = 1024  # sessions of one write

logger = logging.getLogger(__name__)


class Sink:
    """The only writer of a dispatcher: it writes from a thread, each time within ``WRITE_S``.

    A write that takes longer is given up; nothing more is written until it returns.
    """

    def __init__(
        self,
        queue: TrajectoryQueue | None,
        journals: Journals | None,
        written: Callable[[Job, Exception | None], object],
    ) -> None:
        self._written = written
        self._queue: Any = queue  # which is there for batches that have a sink
        self._journals: Any = journals  # as well
        # `_writing` runs while something is gathered, and is None otherwise. What was gathered is
        # written in this order, and `_written` called once for each, with what kept its marker out.
        self._gathered: deque[Job] = deque()
        self._writing: asyncio.Task[None] | None = None
        # The roots of one batch and the sessions of others are put one after the other: a second
        # put beside one that the queue does not answer would hang as well, in a further thread.
        self._one = asyncio.Lock()
        self._put: asyncio.Future[None] | None = None  # the last one

    async def check(self, batch: BatchHandle) -> None:
        """Refuse a prompt of which the queue has sessions: those of two would be mixed."""
        keys = {*await in_thread(self._queue.list, batch.partition, name="rlskip-queue")}
        uids = {prompt.uid: uid_of(prompt.uid) for prompt in batch.prompts}
        if held := uids.keys() & {uid_of(key) for key in keys}:
            raise BatchError(
                f"the queue still holds earlier prompts of the uids {', '.join(sorted(held)[:10])}",
                "uid",
                "clear() what was sampled, or evict() them, or give each a uid of its own",
            )
        for uid, of in uids.items():
            if of in keys or of in uids:
                raise BatchError(
                    f"the uid {uid!r} is a key of a session of the prompt {of!r}",
                    "uid",
                    "give it one that does not end in _sess0, or in _0_0, after another's uid",
                )

    async def open(self, batch: BatchHandle) -> dict[str, dict[int, Journaled]]:
        """Open the batch's journal, and write its roots; returns the sessions that are resumed."""
        journaled = self._journals is not None and not batch.validate
        resumed = await self._journals.resume(batch) if journaled else {}
        if batch.within is None:
            roots = {prompt.uid: prompt.root_tag() for prompt in batch.prompts}
            if error := await self._try(self._put_tags, {batch.partition: roots}):
                raise error
        return resumed

    def write(self, job: Job) -> None:
        """Write a session that has ended, soon, and after all that ended before."""
        self._gathered.append(job)
        if self._writing is None:  # a task begins in the next turn: what else comes in this, joins
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._gathered:
            jobs = [self._gathered.popleft() for _ in range(min(len(self._gathered), _MOST))]
            entries: dict[SessionJournal, dict[Any, Any]] = defaultdict(dict)
            for job in jobs:
                if (journal := job.group.batch.journal) is not None and (entry := to_journal(job)):
                    entries[journal].update(entry)
            for journal, found in entries.items():
                await self._journals.written.append(journal, found)
            queued = [job for job in jobs if job.group.batch.within is None]
            error = await self._try(self._put_all, queued) if queued else None
            for job in jobs:
                again = error is not None and job.group.batch.within is None
                self._written(job, await self._put_alone(job) if again else None)
        self._writing = None

    async def _put_alone(self, job: Job) -> Exception | None:
        """What the queue refuses of one session must not keep out the others, nor its marker."""
        error = await self._try(self._put_all, [job])
        if error is not None and not job.error:
            job.rows = None
            job.error = cause_of(as_failure(error), "its rows could not be written: ")
            logger.error("%s failed: %s", job, job.error)
            if not isinstance(error, NoAnswerError):  # else it may have both yet
                error = await self._try(self._put_all, [job])
        return error

    async def _try(self, put: Callable[[Any], None], what: Any) -> Exception | None:
        """Write something; returns what the queue raised, or that it did not answer."""
        async with self._one:
            if self._put is not None and not self._put.done():  # it had its time
                return NoAnswerError(f"the queue did not answer within {timeouts.WRITE_S:g} s")
            self._put = in_thread(put, what, name="rlskip-queue")
            return await failure_of(self._put, timeouts.WRITE_S, "the queue")

    def _put_all(self, jobs: list[Job]) -> None:
        # Rows are grouped by their fields, because a put takes rows of the same fields. Readers see
        # a session's marker after its rows.
        rows: dict[Any, tuple[list[str], list[Any], list[Any]]] = defaultdict(lambda: ([], [], []))
        markers: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for job in jobs:
            batch, uid, session = job.group.batch, job.group.uid, job.session_id
            # Rows that are returned are written once, here. A worker that writes its own (those it
            # journaled have tags) may still write for an attempt that was given up.
            attempt = job.attempt if job.rows is None or job.tags else 0
            tag = row_tag(batch.step, attempt)
            for i, row in enumerate(job.rows or ()):
                keys, fields, tags = rows[batch.partition, tuple(row)]
                keys.append(trajectory_key(uid, session, attempt * ROWS_PER_ATTEMPT + i))
                fields.append(row)
                tags.append({**job.tags[i], **tag} if job.tags else tag)
            count = None if job.rows is None else len(job.rows)
            marker = session_tag(session, attempt, job.error or None, count)
            markers[batch.partition][session_key(uid, session)] = marker
        for (partition, _), (keys, fields, tags) in rows.items():
            self._queue.put(keys, partition, fields, tags)
        self._put_tags(markers)

    def _put_tags(self, tags: dict[str, dict[str, dict[str, Any]]]) -> None:
        for partition, by_key in tags.items():
            self._queue.put(list(by_key), partition, tags=list(by_key.values()))
