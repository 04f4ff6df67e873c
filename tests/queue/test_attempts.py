"""An attempt that was given up changes nothing, whenever it writes."""

import threading
import uuid
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.keys import TrajectoryKey, prompt_tag, row_tag, session_tag
from rlskip.queue import (
    IncompleteRolloutError,
    MemoryQueue,
    MissingKeysError,
    ReplayBuffer,
    to_rows,
)

RAW, OWN = "the same keys for every attempt", "a key of its own for every attempt"


@st.composite
def histories(draw):
    """Writes of several attempts at one session, the last of which counts, in any order.

    Each write is (attempt, row, copy). Those of the attempt that counts come in order, before its
    marker; all others, and duplicates, come whenever they like.
    """
    last = draw(st.integers(1, 2))
    rows = [draw(st.integers(1, 3)) for _ in range(last + 1)]
    mine = [(last, row) for row in range(rows[last])]
    others = [(a, row) for a in range(last) for row in range(rows[a])]
    late = draw(st.lists(st.sampled_from(others), min_size=1, max_size=6))
    again = draw(st.lists(st.sampled_from(mine), max_size=2))
    steps = [*mine, "marker", "sample", "get"]
    for write in late:
        steps.insert(draw(st.integers(0, len(steps))), write)
    for write in again:
        first = steps.index(write)
        steps.insert(draw(st.integers(first + 1, len(steps))), write)
    return last, rows[last], steps


class OneSession:
    """One session of one prompt, on a queue, whose attempts write what `histories` says."""

    def __init__(self, queue, keys, counted):
        self.queue, self.keys, self.counted = queue, keys, counted
        self.partition = uuid.uuid4().hex
        self.buffer = ReplayBuffer(queue, {"replay": {"timeout_s": 5}})
        queue.put(["u"], self.partition, None, [prompt_tag(1, 1)])

    def write(self, attempt, row):
        key = f"u_0_{row}"
        if self.keys == OWN:
            key = str(TrajectoryKey.of_attempt("u", 0, row, attempt))
        # Every attempt has a field of its own beside the common one: nothing may mix.
        fields = {"x": [attempt, row], f"only{attempt}": row}
        self.queue.put([key], self.partition, [fields], [row_tag(1, attempt)])

    def mark(self, attempt, rows):
        tag = session_tag(0, attempt, rows=rows if self.counted else None)
        self.queue.put(["u_sess0"], self.partition, None, [tag])

    def play(self, last, rows, steps):
        """The rows that a trainer gets; all steps before the sample happen before it."""
        got = None
        for step in steps:
            if step == "marker":
                self.mark(last, rows)
            elif step == "sample":
                batch, _ = self.buffer.sample(1, self.partition)
            elif step == "get":
                got = to_rows(self.buffer.get(batch))
            else:
                self.write(*step)
        return got


def whole(last, rows):
    return [{"x": [last, row], f"only{last}": row} for row in range(rows)]


class SharedQueue(MemoryQueue):
    """Replaces by key, as a queue does that cannot compare attempts."""

    drops_late_writes = False

    def put(self, keys, partition, fields=None, tags=None):
        for key, tag in zip(keys, tags, strict=True):
            before = self.list(partition).get(key, {}).get("attempt", 0)
            if before > tag.get("attempt", before):
                self.delete([key], partition)
        return super().put(keys, partition, fields, tags)


@pytest.mark.parametrize(
    ("row", "counted", "reason"),
    [
        (0, True, "found 1 of its 2 rows"),
        (1, True, "found 1 of its 2 rows"),
        (0, False, "row 0 was replaced by another attempt"),
        (1, False, "row 1 is another attempt's, and no count says how many it wrote itself"),
    ],
)
def test_a_row_that_was_replaced_before_the_sample_makes_its_group_incomplete(row, counted, reason):
    session = OneSession(SharedQueue(), RAW, counted)
    with pytest.raises(IncompleteRolloutError) as error:
        session.play(1, 2, [(1, 0), (1, 1), "marker", (0, row), "sample"])
    assert error.value.prompts[0].failed == ((0, reason),)


@pytest.mark.parametrize("keys", [RAW, OWN])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "make_queue",
    [MemoryQueue, SharedQueue, pytest.param(None, marks=pytest.mark.ray, id="TransferQueue")],
)
@given(history=histories())
@settings(max_examples=50)
def test_the_last_attempt_is_returned_or_its_group_named(
    request, make_queue, keys, counted, history
):
    last, rows, steps = history
    queue = request.getfixturevalue("adapter") if make_queue is None else make_queue()
    # Where the queue drops late writes, or attempts share no key, there is nothing to name.
    may_raise = make_queue is not MemoryQueue and keys == RAW
    with suppress(IncompleteRolloutError) if may_raise else nullcontext():
        played = OneSession(queue, keys, counted).play(last, rows, steps)
        assert played == whole(last, rows)


def test_a_marker_without_an_attempt_takes_the_rows_of_the_last_one(rollouts, buffer, queue):
    rollouts.tag("u", prompt_tag(1, 1))
    rollouts.session("u", 0, rows=3, marker=False)
    rollouts.session("u", 0, rows=2, marker=False, attempt=1)
    rollouts.tag("u_sess0", {"is_session": True, "session_id": 0, "status": "success"})
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == ["u_0_0", "u_0_1"]
    assert [tag["attempt"] for tag in batch.tags] == [1, 1]


@pytest.mark.parametrize(("rows", "announced"), [(1, 2), (3, 2)])
def test_another_number_of_rows_than_announced_is_incomplete(rollouts, buffer, rows, announced):
    rollouts.tag("u", prompt_tag(1, 1))
    rollouts.session("u", 0, rows=rows, marker=False)
    rollouts.tag("u_sess0", session_tag(0, rows=announced))
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train")
    assert error.value.prompts[0].failed == ((0, f"found {rows} of its {announced} rows"),)


@pytest.mark.parametrize("first", [0, 1], ids=["batch", "part of a batch"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.write(0, 1), "another attempt replaced row u_0_1"),
        (lambda s: s.queue.delete(["u_0_1"], s.partition), "row u_0_1 was deleted"),
        (
            lambda s: s.queue.put(["u_0_1"], s.partition, None, [{"status": "failure"}]),
            "another attempt replaced row u_0_1",
        ),
    ],
)
def test_a_change_after_the_sample_is_found(change, reason, first):
    session = OneSession(SharedQueue(), RAW, counted=True)
    for row in range(2):
        session.write(1, row)
    session.mark(1, 2)
    batch, _ = session.buffer.sample(1, session.partition)
    session.buffer.check(batch)
    change(session)
    part = replace(batch, keys=batch.keys[first:], tags=batch.tags[first:])
    for read in (session.buffer.get, session.buffer.check):
        with pytest.raises(IncompleteRolloutError) as error:
            read(part)
        (prompt,) = error.value.prompts
        assert error.value.partition == session.partition
        assert (prompt.succeeded, prompt.failed) == ((), ((0, reason),))


def test_a_change_while_the_rows_are_read_is_found():
    class Raced(SharedQueue):
        def get(self, *args):
            rows = super().get(*args)
            session.write(0, 0)
            return rows

    session = OneSession(Raced(), RAW, counted=True)
    with pytest.raises(IncompleteRolloutError, match="another attempt replaced row u_0_0"):
        session.play(1, 1, [(1, 0), "marker", "sample", "get"])


def test_other_tags_may_change_after_the_sample(rollouts, buffer):
    rollouts.counted("u")
    batch, _ = buffer.sample(1, "train")
    rollouts.tag("u_0_0", {"score": 0.5})
    assert len(buffer.get(batch, ["x"])) == 2
    with pytest.raises(MissingKeysError, match="nope"):
        buffer.get(batch, ["nope"])


def test_a_late_row_of_an_earlier_submission_is_not_of_the_later(queue):
    """The first submission's only attempt is given up, and writes after the second has."""
    given_up, wrote = threading.Event(), threading.Event()
    attempts = []

    def worker(prompt, sampling, session):
        attempts.append(session.attempt)
        if len(attempts) == 1:
            given_up.wait(20)
        x = "second" if session.attempt else "first"
        queue.put([session.key(0)], session.partition, [{"x": x}], [session.tag()])
        if x == "first":
            wrote.set()

    config = {
        "dispatch": {"session_timeout_s": 0.3, "max_retries": 0, "n": 1, "rollout_level": True}
    }
    buffer = ReplayBuffer(queue)
    with RolloutDispatcher(LocalPool(worker, workers=1), queue, config) as dispatcher:
        dispatcher.submit([{"uid": "u"}], step=1).result(20)
        buffer.evict(["u"], "train")
        dispatcher.submit([{"uid": "u"}], step=1).result(20)
        given_up.set()
        assert wrote.wait(20)
        batch, _ = buffer.sample(1, "train")
        assert to_rows(buffer.get(batch)) == [{"x": "second"}]
    assert attempts == [0, 1]
