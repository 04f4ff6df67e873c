"""Which prompts are in flight: two of one uid would have rows of the same keys."""

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
from rlskip.queue.per_queue import PerQueue

_MOST = 1 << 16
"""So many of the uids that were submitted last are remembered."""

# Of each queue, by partition and uid: the prompt that was submitted last in this process.
_claims: PerQueue[dict[tuple[str, str], weakref.ref[Prompt]]] = PerQueue(dict)
_claiming = threading.Lock()


def claim(queue: TrajectoryQueue, batch: BatchHandle, taken: Collection[str] | None = None) -> None:
    """From now on these uids are known as those of `batch`.

    Parameters
    ----------
    taken
        What :func:`queued` found; None: two prompts of one uid may be in flight.

    Raises
    ------
    BatchError
        `taken` has one of the uids, or a session of an earlier prompt of it runs.
    """
    claims = _claims[queue]
    with _claiming:
        for prompt in batch.prompts:
            key = batch.partition, prompt.uid
            earlier = claims[key]() if key in claims else None
            if taken is not None and (
                prompt.uid in taken or (earlier is not None and earlier.in_flight)
            ):
                raise BatchError(
                    f"an earlier prompt of the uid {prompt.uid!r} is in flight",
                    "uid",
                    "give this one a uid of its own; or first take the other's group, or give it "
                    "up: cancel its batch, and evict it (dispatcher.buffer.evict)",
                )
        for prompt in batch.prompts:
            claims.pop((batch.partition, prompt.uid), None)  # the last one comes last
            claims[batch.partition, prompt.uid] = weakref.ref(prompt)
        for key in list(itertools.islice(claims, max(0, len(claims) - _MOST))):
            del claims[key]


def queued(queue: TrajectoryQueue, batch: BatchHandle, seconds: float) -> set[str]:
    """The uids of `batch` of which an earlier prompt runs now, or the queue holds its group.

    The queue is asked, because a trainer may delete groups without our buffer. That may take
    `seconds`, and the last markers of groups that just ended as long as at a close.
    """
    claims = _claims[queue]
    with _claiming:
        uids = [prompt.uid for prompt in batch.prompts if (batch.partition, prompt.uid) in claims]
        earlier = [claims[batch.partition, uid]() for uid in uids]
    if not uids:
        return set()
    # Before the queue is asked: a session may end, and write its marker, at any time.
    running = {one.uid for one in earlier if one is not None and one.in_flight and one.open}
    deadline = time.monotonic() + timeouts.CLOSE_S
    for prompt in earlier:
        while prompt is not None and prompt.in_flight and not prompt.open:  # being written
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
    listing = timeouts.bounded(seconds, queue.list, batch.partition)
    # Its markers tell: of an attempt that was given up a row may come at any time.
    markers = (split_session(key) for key, tag in listing.items() if tag.get(IS_SESSION))
    return running | {marker[0] for marker in markers if marker is not None}.intersection(uids)


def batches_of(queue: TrajectoryQueue, partition: str, uids: Iterable[str]) -> set[BatchHandle]:
    """The batches in flight that consist of these prompts."""
    claims, uids = _claims[queue], set(uids)
    with _claiming:
        found = [claims[partition, uid]() for uid in uids if (partition, uid) in claims]
    batches = {prompt.batch for prompt in found if prompt is not None and prompt.in_flight}
    return {batch for batch in batches if uids.issuperset(one.uid for one in batch.prompts)}
