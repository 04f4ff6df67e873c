"""Which prompts are in flight: no uid names two at a time, whose rows would have the same keys."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterable

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


def claim(queue: TrajectoryQueue, batch: BatchHandle, seconds: float) -> None:
    """From now on the uids of `batch` are its own, until their groups have left the queue.

    The queue is asked about uids that were submitted before, because a trainer may delete groups
    without our buffer. That may take `seconds`, and their last markers as long as at a close.

    Raises
    ------
    BatchError
        A session of an earlier prompt of the same uid runs, or the queue holds its group.
    """
    claims = _claims[queue]
    mine = {(batch.partition, prompt.uid): weakref.ref(prompt) for prompt in batch.prompts}
    queued: set[str] = set()
    with _claiming:
        earlier = [claims[key]() for key in mine if key in claims]
    if earlier:
        deadline = time.monotonic() + timeouts.CLOSE_S
        for prompt in earlier:
            while prompt is not None and prompt.in_flight and not prompt.open:  # being written
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        listing = timeouts.bounded(seconds, queue.list, batch.partition)
        # Its markers tell: of an attempt that was given up a row may come at any time.
        markers = (split_session(key) for key, tag in listing.items() if tag.get(IS_SESSION))
        queued = {marker[0] for marker in markers if marker is not None}
    with _claiming:
        for key in filter(claims.__contains__, mine):
            prompt = claims[key]()
            if key[1] in queued or (prompt is not None and prompt.in_flight):
                raise BatchError(
                    f"an earlier prompt of the uid {key[1]!r} is in flight",
                    "uid",
                    "give this one a uid of its own; or first take the other's group, or give it "
                    "up: cancel its batch, and evict it (dispatcher.buffer.evict)",
                )
            del claims[key]
        claims.update(mine)
        for key in list(itertools.islice(claims, max(0, len(claims) - _MOST))):
            del claims[key]


def batches_of(queue: TrajectoryQueue, partition: str, uids: Iterable[str]) -> set[BatchHandle]:
    """The batches in flight that consist of these prompts."""
    claims, uids = _claims[queue], set(uids)
    with _claiming:
        found = [claims[partition, uid]() for uid in uids if (partition, uid) in claims]
    batches = {prompt.batch for prompt in found if prompt is not None and prompt.in_flight}
    return {batch for batch in batches if uids.issuperset(one.uid for one in batch.prompts)}
