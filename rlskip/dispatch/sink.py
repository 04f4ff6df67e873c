"""Writes what sessions leave: journal, then rows, then markers; in batches, and in order.

While one write runs, the next batch gathers, so the number of writes depends on how long they take
and not on the number of sessions. A dispatcher without a queue has a sink for its journals only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import attrs

from rlskip.dispatch.failures import InfrastructureFailure
from rlskip.dispatch.journal import Appender, SessionJournal
from rlskip.dispatch.timeouts import failure_of, in_thread
from rlskip.queue import TrajectoryQueue

logger = logging.getLogger(__name__)

MOST = 1024
"""The number of sessions that one write takes."""
STRIKES = 3
"""After this many writes in a row without an answer, nothing is written until one returns."""


@attrs.define(eq=False)
class Leaving:
    """What is written once a session, or a prompt, has finished.

    `written` is called once: with None when all is written, else with the error. Readers see the
    `tags` (markers, and roots) after the `rows`, which have tags of their own.
    """

    written: Callable[[Exception | None], object]
    partition: str
    tags: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = attrs.field(factory=dict)
    journal: SessionJournal | None = None
    entries: dict[Any, Any] = attrs.field(factory=dict)


class Sink:
    """The only writer of a dispatcher: it writes from a thread, each time within `seconds`.

    A write that takes longer is given up.
    """

    def __init__(self, queue: TrajectoryQueue | None, seconds: float, appender: Appender) -> None:
        # `_writing` runs while something is gathered, and is None otherwise. What was gathered is
        # written in this order, and each is answered once, with or without an error.
        self._queue = queue
        self._seconds = seconds
        self._appender = appender
        self._gathered: deque[Leaving] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._stuck: list[asyncio.Future[None]] = []  # writes in a row that did not return

    def write(self, leaving: Leaving) -> None:
        """Write it soon, after all that was given before."""
        self._gathered.append(leaving)
        if self._writing is None:  # a task begins in the next turn: what else comes in this, joins
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._gathered:
            most = min(len(self._gathered), MOST)
            batch = [self._gathered.popleft() for _ in range(most)]
            await self._journal_all(batch)
            error = await self._try(batch)
            for leaving in batch:
                # Once more, alone: what the queue refuses of one must not keep out the others, and
                # a queue that stalled once loses nothing.
                leaving.written(None if error is None else await self._try([leaving]))
        self._writing = None

    async def _try(self, batch: list[Leaving]) -> Exception | None:
        """Write a batch; returns what the queue raised, or that it did not answer."""
        if self._queue is None:
            return None
        if any(write.done() for write in self._stuck):
            self._stuck.clear()
        if len(self._stuck) < STRIKES:
            write = in_thread(self._put, batch, self._queue, name="rlskip-queue")
            error = await failure_of(write, self._seconds, "the queue")
            if write.done():
                self._stuck.clear()
                return error
            self._stuck.append(write)
        return InfrastructureFailure(f"the queue did not answer within {self._seconds:g} s")

    def _put(self, batch: list[Leaving], queue: TrajectoryQueue) -> None:
        # Rows are grouped by their fields, because a put takes rows of the same fields.
        rows: dict[tuple[str, frozenset[str]], dict[str, Any]] = defaultdict(dict)
        tags: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for leaving in batch:
            for key, (row, tag) in leaving.rows.items():
                rows[leaving.partition, frozenset(row)][key] = row, tag
            for key, tag in leaving.tags.items():
                tags[leaving.partition][key] = {**tags[leaving.partition].get(key, {}), **tag}
        for (partition, _), found in rows.items():
            fields, row_tags = zip(*found.values(), strict=True)
            queue.put(list(found), partition, fields, row_tags)
        for partition, by_key in tags.items():
            queue.put(list(by_key), partition, tags=list(by_key.values()))

    async def _journal_all(self, batch: list[Leaving]) -> None:
        entries: dict[SessionJournal, dict[Any, Any]] = defaultdict(dict)
        for leaving in batch:
            if leaving.journal is not None and leaving.entries:
                entries[leaving.journal].update(leaving.entries)
        for journal, added in entries.items():
            await self._appender.append(journal, added)
