"""Which uids a dispatcher has in flight: two prompts of one uid would share keys of rows."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Collection, Iterable

from rlskip.dispatch import timeouts
from rlskip.dispatch.batch import BatchHandle, Prompt
from rlskip.dispatch.units import BatchError
from rlskip.keys import IS_SESSION, split_session
from rlskip.queue import TrajectoryQueue

_MOST = 1 << 16
"""So many of the uids that were submitted last are remembered."""


class Uids:
    """The prompt that was submitted last under each uid; threads may submit at once."""

    def __init__(self, queue: TrajectoryQueue) -> None:
        self._queue = queue
        self._last: dict[tuple[str, str], weakref.ref[Prompt]] = {}  # by partition and uid
        self._lock = threading.Lock()

    def add(self, batch: BatchHandle, taken: Collection[str] | None = None) -> None:
        """From now on these uids are known as those of `batch`.

        Parameters
        ----------
        taken
            What :meth:`queued` found; None: two prompts of one uid may be in flight.

        Raises
        ------
        BatchError
            `taken` has one of the uids, or a session of an earlier prompt of it runs.
        """
        with self._lock:
            for prompt in batch.prompts:
                earlier = self._find(batch.partition, prompt.uid)
                if taken is not None and (
                    prompt.uid in taken or (earlier is not None and earlier.in_flight)
                ):
                    raise BatchError(
                        f"an earlier prompt of the uid {prompt.uid!r} is in flight",
                        "uid",
                        "give this one a uid of its own; or first take the other's group, or give "
                        "it up: cancel its batch, and evict it (dispatcher.buffer.evict)",
                    )
            for prompt in batch.prompts:
                self._last.pop((batch.partition, prompt.uid), None)  # the last one comes last
                self._last[batch.partition, prompt.uid] = weakref.ref(prompt)
            for key in list(itertools.islice(self._last, max(0, len(self._last) - _MOST))):
                del self._last[key]

    def queued(self, batch: BatchHandle, seconds: float) -> set[str]:
        """The uids of `batch` of which an earlier prompt runs now, or the queue holds its group.

        The queue is asked, because a trainer may delete groups without our buffer. That may take
        `seconds`, and the last markers of groups that just ended as long as at a close.
        """
        with self._lock:
            known = [p.uid for p in batch.prompts if (batch.partition, p.uid) in self._last]
            found = [self._find(batch.partition, uid) for uid in known]
        if not known:
            return set()
        earlier = [prompt for prompt in found if prompt is not None]
        # Before the queue is asked: a session may end, and write its marker, at any time.
        running = {prompt.uid for prompt in earlier if prompt.in_flight and prompt.open}
        deadline = time.monotonic() + timeouts.CLOSE_S
        for prompt in earlier:
            while prompt.in_flight and not prompt.open:  # being written
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        listing = timeouts.bounded(seconds, self._queue.list, batch.partition)
        # Its markers tell: of an attempt that was given up a row may come at any time.
        markers = (split_session(key) for key, tag in listing.items() if tag.get(IS_SESSION))
        return running | {marker[0] for marker in markers if marker is not None}.intersection(known)

    def batches_of(self, partition: str, uids: Iterable[str]) -> set[BatchHandle]:
        """The batches in flight that consist of these prompts."""
        uids = set(uids)
        with self._lock:
            found = [self._find(partition, uid) for uid in uids]
        batches = {prompt.batch for prompt in found if prompt is not None and prompt.in_flight}
        return {batch for batch in batches if uids.issuperset(one.uid for one in batch.prompts)}

    def _find(self, partition: str, uid: str) -> Prompt | None:
        prompt = self._last.get((partition, uid))
        return None if prompt is None else prompt()
