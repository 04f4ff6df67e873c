"""Writes what sessions leave: journal, then rows, then markers; batch-wise, in order.

While one write is under way the next gathers, so a write costs the queue what it costs,
however many sessions end meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import attrs

from rlskip.errors import RlskipError
from rlskip.queue import TrajectoryQueue
from rlskip.store.journal import SessionJournal

logger = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Leaving:
    """What is to be written once a session, or a prompt, is settled.

    Parameters
    ----------
    partition
        Where it goes.
    rows
        Rows by key, each with its tag.
    tags
        Markers, and new statuses of prompts, by key: readers see them after the rows.
    journal, entries
        Where the session is journaled, and as what; None where it is not.
    then
        Called on the event loop with None once all is written, or with what went wrong.
    """

    partition: str
    tags: dict[str, dict[str, Any]]
    then: Callable[[BaseException | None], None]
    rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = attrs.field(factory=dict)
    journal: SessionJournal | None = None
    entries: dict[Any, Any] = attrs.field(factory=dict)


class Writer:
    """The one who writes to the queue, on a thread, for an event loop."""

    def __init__(self, queue: TrajectoryQueue) -> None:
        self._queue = queue
        self._gathered: list[Leaving] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, leaving: Leaving) -> None:
        """Write it soon, after all that was added before."""
        self._gathered.append(leaving)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while self._gathered:
            batch, self._gathered = self._gathered, []
            error = await self._try(batch)
            for leaving in batch:
                # What one of them holds must not keep the others from the queue.
                alone = error is not None and len(batch) > 1
                leaving.then(await self._try([leaving]) if alone else error)
        self._task = None

    async def _try(self, batch: list[Leaving]) -> Exception | None:
        try:
            await asyncio.to_thread(self._write, batch)
        except Exception as error:
            return error
        return None

    def _write(self, batch: list[Leaving]) -> None:
        entries: dict[SessionJournal, dict[Any, Any]] = defaultdict(dict)
        # Rows go by the fields they have: a queue packs those of one put together.
        rows: dict[tuple[str, frozenset[str]], dict[str, Any]] = defaultdict(dict)
        tags: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for leaving in batch:
            if leaving.journal is not None and leaving.entries:
                entries[leaving.journal].update(leaving.entries)
            for key, (row, tag) in leaving.rows.items():
                rows[leaving.partition, frozenset(row)][key] = row, tag
            for key, tag in leaving.tags.items():
                tags[leaving.partition][key] = {**tags[leaving.partition].get(key, {}), **tag}
        for journal, added in entries.items():
            _journal(journal, added)
        for (partition, _), found in rows.items():
            fields, row_tags = zip(*found.values(), strict=True)
            self._queue.put(list(found), partition, fields, row_tags)
        for partition, by_key in tags.items():
            self._queue.put(list(by_key), partition, tags=list(by_key.values()))


def _journal(journal: SessionJournal, entries: dict[Any, Any]) -> None:
    try:
        journal.append(entries)
    except (RlskipError, OSError) as error:
        # Without it a killed step starts over; the rows are not to be lost for that.
        logger.warning("%s: %d sessions not journaled: %s", journal.path, len(entries), error)
