"""An attempt that was given up changes nothing, whenever it writes."""

import threading

import pytest

from rlskip.dispatch import LocalPool, RolloutDispatcher
from rlskip.keys import prompt_tag, session_tag
from rlskip.queue import IncompleteRolloutError, ReplayBuffer, to_rows


def test_the_attempt_that_the_marker_names_is_returned_whenever_others_write(rollouts, buffer):
    rollouts.tag("u", prompt_tag(1, 1))
    for attempt, rows in ((0, 2), (2, 3), (1, 1)):
        rollouts.session("u", 0, rows=rows, marker=False, attempt=attempt)
    rollouts.tag("u_sess0", session_tag(0, 1, rows=1))
    batch, _ = buffer.sample(1, "train")
    rollouts.session("u", 0, rows=3, marker=False)
    assert [row["x"] for row in to_rows(buffer.get(batch))] == [0]
    assert batch.keys == ["u_0_1000000"]


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
