"""An attempt that was given up changes nothing, whenever it writes."""

import threading
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.keys import TrajectoryKey, prompt_tag, row_tag, session_tag
from rlskip.queue import IncompleteRolloutError, MemoryQueue, ReplayBuffer, to_rows


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

    def __init__(self, queue, counted):
        self.queue, self.counted = queue, counted
        self.partition = uuid.uuid4().hex
        self.buffer = ReplayBuffer(queue, {"replay": {"timeout_s": 5}})
        queue.put(["u"], self.partition, None, [prompt_tag(1, 1)])

    def write(self, attempt, row):
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


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    "make_queue", [MemoryQueue, pytest.param(None, marks=pytest.mark.ray, id="TransferQueue")]
)
@given(history=histories())
@settings(max_examples=50)
def test_the_last_attempt_is_returned(request, make_queue, counted, history):
    last, rows, steps = history
    queue = request.getfixturevalue("adapter") if make_queue is None else make_queue()
    assert OneSession(queue, counted).play(last, rows, steps) == whole(last, rows)


def test_a_marker_without_an_attempt_takes_the_rows_of_the_last_one(rollouts, buffer, queue):
    rollouts.tag("u", prompt_tag(1, 1))
    rollouts.session("u", 0, rows=3, marker=False)
    rollouts.session("u", 0, rows=2, marker=False, attempt=1)
    rollouts.tag("u_sess0", {"is_session": True, "session_id": 0, "status": "success"})
    batch, _ = buffer.sample(1, "train")
    assert batch.keys == ["u_0_1000000", "u_0_1000001"]
    assert [tag["attempt"] for tag in batch.tags] == [1, 1]


@pytest.mark.parametrize(("rows", "announced"), [(1, 2), (3, 2)])
def test_another_number_of_rows_than_announced_is_incomplete(rollouts, buffer, rows, announced):
    rollouts.tag("u", prompt_tag(1, 1))
    rollouts.session("u", 0, rows=rows, marker=False)
    rollouts.tag("u_sess0", session_tag(0, rows=announced))
    with pytest.raises(IncompleteRolloutError) as error:
        buffer.sample(1, "train")
    assert error.value.prompts[0].failed == ((0, f"found {rows} of its {announced} rows"),)


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
